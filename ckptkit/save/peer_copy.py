"""From a committed ramdisk slot to the hosts that keep its copies, in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ckptkit.errors import CheckpointError, PeerUnreachableError
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import PEER
from ckptkit.save.outcomes import Outcomes, Refusal, describe
from ckptkit.save.records import PeerCopies, Save, SaveTargets, SealedSave
from ckptkit.save.worker import Worker
from ckptkit.slots.arena import Slot
from ckptkit.util.clock import Deadline

_TRANSFER_SHARE = 0.5  # of the longest wait for other processes: who sends slowly is not missed at the vote


@final
class PeerCopier:
    """Sends this process's slots to its keepers, and agrees with all that every process has.

    A copy that does not succeed anywhere leaves the step out of this tier everywhere, degrades it, and stops nothing:
    the ramdisk has the step, and the next one is tried again.
    """

    def __init__(self, peer_copies: PeerCopies, tiers: SaveTargets, outcomes: Outcomes, timeout_s: float):
        self._peer_copies = peer_copies
        self._tiers = tiers
        self._outcomes = outcomes
        self._timeout_s = timeout_s
        self._worker = Worker("ckptkit-peer-copy", waiting_max=1)

    @property
    def idle(self) -> bool:
        """Whether no copy is on its way."""
        return self._worker.idle

    def submit(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        """Sends a save that all processes have committed; `slot` is leased until it is sent."""
        self._tiers.staging.lease(slot)
        self._worker.submit(lambda: self._replicate(save, slot, sealed))

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no copy is on its way; False when `timeout_s` passed first."""
        return self._worker.wait_idle(timeout_s)

    def drain(self) -> None:
        """Waits for the copy on its way; raises what escaped the thread."""
        self._worker.drain()

    def close(self) -> None:
        """Finishes what is under way and joins the thread."""
        self._worker.close()

    # In the thread.

    def _replicate(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        save_id, refusal = save.save_id, None
        self._outcomes.phase(save_id, "begun", PEER)
        try:
            deadline = Deadline(self._timeout_s * _TRANSFER_SHARE)
            self._peer_copies.client.try_again()
            self._send_all(save_id, slot, save.description.slot_bytes, sealed, deadline)
            self._outcomes.phase(save_id, "committed_here", PEER)
        except CheckpointError as error:  # full, slow, gone: the ramdisk has the step all the same
            refusal = Refusal(policy="veto", reason=describe(error))
            self._outcomes.degraded(save_id.step, PEER, error)
        except Exception as error:  # noqa: BLE001  the top of a thread: voted on, reported and stored
            refusal = Refusal(policy="veto", reason=describe(error))
            self._outcomes.failed(save_id, PEER, error)
        try:
            refusals = self._outcomes.vote("peer-commit", save_id, refusal)
            self._peer_copies.receiver.end(save_id)
            if refusals is not None:
                self._outcomes.skipped(save_id, PEER, refusals, gone=False)
            else:
                self._outcomes.copied(save)
        except CheckpointError as error:  # nobody knows the verdict: what is committed stays where it is
            self._outcomes.failed(save_id, PEER, error)
        finally:
            self._tiers.staging.release(slot)

    def _send_all(self, save_id: SaveId, slot: Slot, size_bytes: int, sealed: SealedSave, deadline: Deadline) -> None:
        for keeper in self._keepers():
            for sent_bytes in self._peer_copies.client.send_copy(
                keeper, save_id, sealed.writer.process, slot.memory[:size_bytes], sealed.text_for_name
            ):
                if deadline.passed:
                    raise PeerUnreachableError(
                        f"process {keeper} took {sent_bytes} of {size_bytes} bytes in {self._timeout_s / 2:g} s"
                    )

    def _keepers(self) -> Sequence[int]:
        return self._peer_copies.keepers

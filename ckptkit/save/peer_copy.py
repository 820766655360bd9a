"""From a committed ramdisk slot to the hosts that keep its copies, in a thread of its own."""

from __future__ import annotations

from functools import partial
from typing import final

from ckptkit.errors import CheckpointError, PeerUnreachableError
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import PEER
from ckptkit.save.outcomes import Outcomes
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
        self.worker = Worker("ckptkit-peer-copy", waiting_max=1)

    def submit(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        """Sends a save that all processes have committed; `slot` is leased until it is sent."""
        self._tiers.staging.lease(slot)
        self.worker.submit(lambda: self._replicate(save, slot, sealed))

    # In the thread.

    def _replicate(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        save_id, ended = save.save_id, partial(self._peer_copies.receiver.end, save.save_id)

        def send() -> None:
            deadline = Deadline(self._timeout_s * _TRANSFER_SHARE)
            self._peer_copies.client.try_again()
            self._send_all(save_id, slot, save.description.slot_bytes, sealed, deadline)
            self._outcomes.phase(save_id, "committed_here", PEER)

        def taken() -> None:
            ended()
            self._outcomes.copied(save)

        self._outcomes.phase(save_id, "begun", PEER)
        # Keepers that are full, slow or lost degrade the tier alone: the ramdisk has the step all the same.
        _, refusal = self._outcomes.tried(save_id, PEER, send, degrading=CheckpointError)
        try:
            self._outcomes.conclude("peer-commit", save_id, PEER, refusal, taken=taken, left_out=ended, gone=False)
        finally:
            self._tiers.staging.release(slot)

    def _send_all(self, save_id: SaveId, slot: Slot, size_bytes: int, sealed: SealedSave, deadline: Deadline) -> None:
        for keeper in self._peer_copies.keepers:
            for sent_bytes in self._peer_copies.client.send_copy(
                keeper, save_id, sealed.writer.process, slot.memory[:size_bytes], sealed.text_for_name
            ):
                if deadline.passed:
                    raise PeerUnreachableError(
                        f"process {keeper} took {sent_bytes} of {size_bytes} bytes in {self._timeout_s / 2:g} s"
                    )

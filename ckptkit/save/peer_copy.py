"""From a committed ramdisk slot to the hosts that keep its copies, in a thread of its own."""

from __future__ import annotations

from typing import final

from ckptkit.errors import PeerUnreachableError
from ckptkit.model.tiers import PEER
from ckptkit.save.outcomes import Outcomes
from ckptkit.save.protocol import Do, SaveProtocol
from ckptkit.save.records import PeerCopies, Save, SealedSave
from ckptkit.save.voting import TierWork
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.util.clock import Deadline

_TRANSFER_SHARE = 0.5  # of the longest wait for other processes: a slow sender still comes to the vote in time


@final
class PeerCopyWork(TierWork):
    """Sends this process's slot to its keepers.

    A copy that fails on one process leaves the step out of this tier everywhere and degrades the tier. Nothing else
    stops: the ramdisk has the step, and the next one is tried again.
    """

    def __init__(
        self, save: Save, slot: Slot, sealed: SealedSave, copies: PeerCopies, staging: Arena, outcomes: Outcomes
    ):
        """`slot` is leased until it was sent, or `release`."""
        super().__init__(PEER, "peer-commit", save)
        self._slot, self._sealed, self._copies, self._staging = slot, sealed, copies, staging
        self._outcomes = outcomes
        self._leased = True

    def act(self) -> SaveProtocol:
        """See `TierWork.act`."""
        self._outcomes.phase(self.save.save_id, "begun", PEER)
        try:
            yield Do("copy to peers", self._send)
        finally:
            self.release()
        self._outcomes.phase(self.save.save_id, "committed_here", PEER)

    def keep(self) -> None:
        """See `TierWork.keep`."""
        self._copies.receiver.end(self.save.save_id)
        self._outcomes.committed(self.save, PEER, None)

    def drop(self) -> None:
        """See `TierWork.drop`."""
        self._copies.receiver.end(self.save.save_id)

    def release(self) -> None:
        """See `TierWork.release`."""
        if self._leased:
            self._leased = False
            self._staging.release(self._slot)

    def _send(self) -> None:
        save_id, size_bytes = self.save.save_id, self.save.description.slot_bytes
        text, writer = self._sealed.text_for_name, self._sealed.writer.process
        deadline = Deadline(self._copies.timeout_s * _TRANSFER_SHARE)
        self._copies.client.try_again()
        for keeper in self._copies.keepers:
            memory = self._slot.memory[:size_bytes]
            for sent_bytes in self._copies.client.send_copy(keeper, save_id, writer, memory, text):
                if deadline.passed:
                    raise PeerUnreachableError(
                        f"process {keeper} took {sent_bytes} of {size_bytes} bytes in "
                        f"{self._copies.timeout_s * _TRANSFER_SHARE:g} s"
                    )

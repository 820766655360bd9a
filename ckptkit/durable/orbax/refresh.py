"""What Orbax's managers of one root know of its steps: each keeps books of its own, and sees what was written or
deleted beside it only when it looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import orbax.checkpoint as ocp

from ckptkit.durable.orbax.manager import look_afresh


@final
class Views:
    """Which managers are behind, and which could not look when they should have."""

    def __init__(self) -> None:
        self._behind: set[int] = set()  # ids of those that another one has written past
        self._unseen: set[int] = set()  # of those that could not look after a save that failed

    def written_past(self, manager: ocp.CheckpointManager | None) -> None:
        """Another one has written or deleted a step; nothing where there is no such manager."""
        if manager is not None:
            self._behind.add(id(manager))

    def is_behind(self, manager: ocp.CheckpointManager) -> bool:
        """Whether it has to look before it can say what there is."""
        return id(manager) in self._behind

    def look(self, manager: ocp.CheckpointManager) -> None:
        """Has it look at the storage: its steps are in order then. Raises what Orbax raises."""
        look_afresh(manager)
        self._behind.discard(id(manager))
        self._unseen.discard(id(manager))

    def fresh(self, manager: ocp.CheckpointManager) -> ocp.CheckpointManager:
        """The manager, which has looked where it has to. Raises what Orbax raises."""
        if id(manager) in self._behind:
            self.look(manager)
        return self.seen(manager)

    def seen(self, manager: ocp.CheckpointManager) -> ocp.CheckpointManager:
        """The manager, which has tried once more where it could not look after a save that failed. Raises nothing."""
        if id(manager) in self._unseen:
            self.look_again(manager)
        return manager

    def look_again(self, manager: ocp.CheckpointManager, look: Callable[[], None] | None = None) -> None:
        """After a save that failed: its step may be there all the same, and Orbax forgets others that are (FACTS 5).

        A look that fails too is left to the next save: what is raised says why the save failed, and decides whether it
        is tried again; and a process that raises before a meeting leaves the others waiting.
        """
        try:
            if look is None:
                self.look(manager)
            else:
                look()
            self._unseen.discard(id(manager))
        except Exception:  # noqa: BLE001  the storage is why the save failed
            self._unseen.add(id(manager))

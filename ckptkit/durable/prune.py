"""Deletes old steps in the background: never on a save's path, in batches, and what makes a step one goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import orbax.checkpoint as ocp

from ckptkit.durable.lifecycle.delete import remove_step
from ckptkit.durable.lifecycle.leases import PruneGuard
from ckptkit.durable.orbax.manager import StockManager, delete_directory, put_aside
from ckptkit.store.remote import forget_listings

Report = Callable[[int, str], None]  # of a step that is committed: what failed after that


@final
class Pruner:
    """One thread, on process 0. A failed deletion is reported, and tried again with the next save's.

    While it deletes, `doomed.json` names what: `PruneGuard.spare` has written it when the steps were chosen.
    """

    def __init__(
        self,
        url: str,
        stock: StockManager,
        guard: PruneGuard,
        options: ocp.CheckpointManagerOptions,
        *,
        leads: bool,
        report: Report,
    ):
        self._url = url
        self._stock = stock
        self._guard = guard
        self._options = options
        self._leads = leads
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-prune")
        self._running: Future[None] | None = None
        self._left: dict[int, str] = {}  # steps that the books have forgotten, and the storage may still have

    def prune(self, steps: Iterable[int], first: Callable[[], None] = lambda: None) -> None:
        """Begins to delete `steps`, which have no reader, after `first`; waits for the deletions before."""
        self.wait()
        if not self._leads:
            return
        doomed = list(steps)
        if doomed and put_aside(doomed[0], self._url, self._options):  # renames; a refusal is reported for the save
            for step in doomed[1:]:
                put_aside(step, self._url, self._options)
            self._guard.settle()
            doomed = []
        again = sorted(self._left)
        self._left.update((step, self._stock.found_name(step)) for step in doomed)
        self._running = self._thread.submit(self._delete, again, first)

    def remove(self, step: int) -> None:
        """Deletes a step at once, by the options. Raises the errors of the deletion."""
        if not put_aside(step, self._url, self._options):
            self._remove(self._stock.found_name(step))

    def forget(self, step: int) -> None:
        """A step of this number is about to be saved again: it is not to be deleted for what it once was."""
        self._left.pop(step, None)

    def wait(self) -> None:
        """Waits for deletions in flight."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _delete(self, again: list[int], first: Callable[[], None]) -> None:
        first()
        if not self._left:
            return
        # Those of an earlier save may have been leased since; they are announced again with the new ones.
        read = self._guard.spare(self._left) if again else set[int]()
        for step, name in sorted(self._left.items()):
            if step in read or self._guard.lost:
                continue
            try:
                self._remove(name)
            except Exception as error:  # noqa: BLE001  it is a step or it is not, never half: reported, and tried again
                reason = f"step {step} is to be deleted, and is not yet: {type(error).__name__}: {error}"
                self._report(step, reason)
            else:
                del self._left[step]
        self._guard.settle()

    def _remove(self, name: str) -> None:
        remove_step(f"{self._url}/{name}", lambda place: delete_directory(place, self._options))
        forget_listings(self._url)

"""Deletes old steps in the background: never on a save's path, in batches, and what makes a step one goes first."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import final

import orbax.checkpoint as ocp

from ckptkit.durable.leases import PruneGuard
from ckptkit.durable.orbax_files import COMMITTED, TEMPORARY
from ckptkit.durable.step_writer import delete_below, list_below
from ckptkit.durable.stock import StockManager, delete_directory
from ckptkit.errors import StoreError
from ckptkit.store import open_store
from ckptkit.store.local import sync_directory
from ckptkit.store.roots import is_remote

_log = logging.getLogger(__name__)


@final
class Pruner:
    """One thread, on process 0. A step that could not be deleted is tried again with the next save's."""

    def __init__(
        self, url: str, stock: StockManager, guard: PruneGuard, options: ocp.CheckpointManagerOptions, *, leads: bool
    ):
        self._url = url
        self._stock = stock
        self._guard = guard
        self._options = options
        self._moved = options.todelete_subdir is not None or options.todelete_full_path is not None
        self._leads = leads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-prune")
        self._running: Future[None] | None = None
        self._left: set[str] = set()

    def prune(self, steps: Iterable[int]) -> None:
        """Begins to delete `steps`, which nobody reads; waits for the deletions before."""
        self.wait()
        if not self._leads:
            return
        doomed = list(steps)
        if self._moved and doomed:
            self._stock.delete_as_asked(doomed)  # a rename; and what is refused fails this save, as in Orbax
            self._guard.settle()
            return
        self._left |= {self._stock.name(step) for step in doomed}
        if self._left:
            self._running = self._thread.submit(self._delete)

    def wait(self) -> None:
        """Waits for what is on its way."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _delete(self) -> None:
        for name in sorted(self._left):
            try:
                self._remove(f"{self._url}/{name}")
            except (StoreError, OSError) as error:  # it is no step any more, or still one: tried again
                _log.warning("%s/%s is not deleted yet: %s", self._url, name, error)
            else:
                self._left.discard(name)
        self._guard.settle()

    def _remove(self, where: str) -> None:
        """First goes what makes it a step, then the rest: a crash in between leaves what is no step."""
        if is_remote(where):
            store, names = open_store(where), list_below(where)
            if COMMITTED in names:
                store.delete(COMMITTED)
            delete_below(where, [name for name in names if name != COMMITTED])
            return
        leaving = where + TEMPORARY
        shutil.rmtree(leaving, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(where, leaving)
            sync_directory(os.path.dirname(where))
            delete_directory(leaving, self._options)

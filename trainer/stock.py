"""Stock Orbax under the same training loop: what runs with ckptkit are compared with.

The loop calls a few functions that only ckptkit has. Here they are what a script that was written for Orbax does
instead, and the events are those by which goodput is counted.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from ckptkit import EventLog, Kind, LastSave

_POLL_S = 0.02
_COMMIT_LIMIT_S = 600.0


class StockOrbax:
    """Orbax's own `CheckpointManager` and nothing else: no tiers, no proof, no older step where the newest fails.

    `save` returns when Orbax's does. `restore_async` restores at once, as Orbax's `restore` does, on the caller's
    thread. Raises what Orbax raises.
    """

    def __init__(self, directory: str, options: ocp.CheckpointManagerOptions, events: EventLog):
        self._manager = ocp.CheckpointManager(directory, options=options)
        self._directory = Path(directory)
        self._events = events
        self._watch: threading.Thread | None = None

    def latest_step(self) -> int | None:
        """The newest step that Orbax lists."""
        return self._manager.latest_step()

    def prepare(self, args: Any) -> None:
        """Orbax makes no room beforehand."""

    def restore_async(self, step: int | None, *, args: Any) -> "Restored":
        """The newest step, read before this returns."""
        started_s = time.monotonic()
        found = self._manager.latest_step() if step is None else step
        restored = self._manager.restore(found, args=args)
        jax.block_until_ready(restored["state"])
        self._events.emit(
            Kind.RESTORED,
            step=found,
            sources={"durable": sum(leaf.nbytes for leaf in jax.tree.leaves(restored["state"]))},
            duration_s=round(time.monotonic() - started_s, 6),
            proven=False,
        )
        return Restored(restored)

    def save(self, step: int, *, args: Any, force: bool = False) -> bool:
        """Saves if Orbax's policy decides so; returns True if it did."""
        started_s = time.monotonic()
        if not self._manager.save(step, args=args, force=force):
            return False
        stall_s = time.monotonic() - started_s
        self._events.emit(
            Kind.STAGED, step=step, strategy="orbax", reason="stock Orbax", stall_s=round(stall_s, 6), policy="orbax"
        )
        if jax.process_index() == 0 and "://" not in str(self._directory):
            self._note_commit(step, started_s)
        return True

    def reached_preemption(self, step: int) -> bool:
        """Whether the processes agreed to leave at this step."""
        return jax.distributed.is_initialized() and self._manager.reached_preemption(step)

    def save_last(self, step: int, args: Any, *, grace_s: float) -> LastSave:
        """Saves and waits without a limit: Orbax has no deadline."""
        self.save(step, args=args, force=True)
        self.wait_until_finished()
        return LastSave(step=step, tiers=("durable",), unfinished=(), left_out={}, spent_s=0.0, grace_s=grace_s)

    def wait_until_finished(self) -> None:
        """Waits for the save that is under way."""
        self._manager.wait_until_finished()
        if self._watch is not None:
            self._watch.join()

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()

    def _note_commit(self, step: int, started_s: float) -> None:
        """Reports the commit of the step and its size, which Orbax does not report."""

        def watch() -> None:
            committed = self._directory / str(step)
            while not committed.exists():
                if time.monotonic() - started_s > _COMMIT_LIMIT_S:
                    return
                time.sleep(_POLL_S)
            duration_s = time.monotonic() - started_s
            with suppress(FileNotFoundError):  # a short interval: it was pruned meanwhile
                size = sum(path.stat().st_size for path in committed.rglob("*") if path.is_file())
                self._events.emit(
                    Kind.COMMITTED, step=step, tier="durable", bytes=size, duration_s=round(duration_s, 6)
                )

        self._watch = threading.Thread(target=watch, name="trainer-commit", daemon=True)
        self._watch.start()


class Restored:
    """A finished restore, in the form of one that is under way."""

    def __init__(self, restored: Any):
        self.result: Callable[[], Any] = lambda: restored

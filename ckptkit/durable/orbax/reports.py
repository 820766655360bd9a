"""Reports saves and restores as Orbax's managers do: names in `jax.monitoring`, entries for its logger.

Collectors that listen for Orbax's names, and dashboards that read its entries, still work when a manager of ours
replaces it. As in Orbax, process 0 reports the names, times are seconds (`*_time` in `jax.monitoring`: milliseconds
since the epoch), and sizes are GiB of the whole tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, final

from jax import monitoring
from orbax.checkpoint._src.logging import step_statistics
from orbax.checkpoint._src.path import utils as path_utils

from ckptkit.events import Event, Kind
from ckptkit.model.tiers import DURABLE
from ckptkit.util import clock

_WAITING_MAX = 16  # durable saves under way, and lost ones
_BY_ORBAX = "durable (orbax)"  # the source of a restore that Orbax did, and reported


@final
class OrbaxNames:
    """An observer that reports saves to the root at `url`, and restores, by Orbax's names in `jax.monitoring`.

    Steps that Orbax wrote or read itself are left out: it reports them.
    """

    def __init__(self, url: str, *, asynchronous: bool):
        self._url = url
        self._asynchronous = asynchronous
        self._staged: dict[int | None, tuple[float, int]] = {}  # by step: held the loop for, bytes
        self._began_s: float | None = None
        self._restoring = False

    def __call__(self, event: Event) -> None:
        """Reports an event that Orbax would report."""
        fields = event.fields
        if event.kind == Kind.STAGED and DURABLE in fields.get("tiers", ()):
            self._save_staged(event)
        elif event.kind == Kind.COMMITTED and event.tier == DURABLE and event.step in self._staged:
            self._save_committed(fields["duration_s"], *self._staged.pop(event.step))
        elif event.kind == Kind.PLANNED and not self._restoring:
            self._restoring = True
            monitoring.record_event("/jax/orbax/read/start")
            monitoring.record_event("/jax/orbax/read/storage_type", storage_type=self._storage)
        elif event.kind == Kind.RESTORED:
            self._restoring = False
            if _BY_ORBAX not in fields["sources"]:
                self._restored(fields["duration_s"], fields["tree_bytes"])

    @property
    def _storage(self) -> str:
        return path_utils.get_storage_type(self._url)

    def _save_staged(self, event: Event) -> None:
        """A save to the durable tier has returned to the step loop."""
        fields = event.fields
        blocking_s, tree_bytes = fields["stall_s"] + fields["computing_s"], fields["tree_bytes"]
        self._staged[event.step] = blocking_s, tree_bytes
        while len(self._staged) > _WAITING_MAX:
            self._staged.pop(next(iter(self._staged)))
        began_s = event.at_s - blocking_s
        before_s, self._began_s = self._began_s, began_s
        if before_s is not None:
            between_s = max(0.0, began_s - before_s)
            name = "/jax/orbax/checkpoint_manager/time_between_consecutive_saves_secs"
            _duration(name, between_s, continuous_checkpointing_enabled=0)
            _duration("/jax/checkpoint/write/duration_since_last_checkpoint_secs", between_s)
        base, now_s = ("/jax/orbax/write/async" if self._asynchronous else "/jax/orbax/write"), clock.wall_s()
        monitoring.record_event(f"{base}/start")
        _scalar(f"{base}/start_time", 1e3 * (now_s - blocking_s), storage_type=self._storage)
        monitoring.record_event("/jax/orbax/write/storage_type", storage_type=self._storage)
        _duration("/jax/checkpoint/write/wait_for_prev_duration_secs", fields["waited_s"])
        _duration("/jax/orbax/write/blocking_wait_prev_duration_secs", fields["waited_s"])
        if self._asynchronous:
            _duration("/jax/checkpoint/write/async/blocking_duration_secs", blocking_s)
        _duration(f"{base}/blocking_duration_secs", blocking_s, storage_type=self._storage)
        _scalar(f"{base}/blocking_end_time", 1e3 * now_s, storage_type=self._storage)
        _rate("/jax/orbax/write/blocking_gbytes_per_sec", tree_bytes, blocking_s - fields["waited_s"])

    def _save_committed(self, background_s: float, blocking_s: float, tree_bytes: int) -> None:
        """The durable tier holds the save, `background_s` after it was staged."""
        total_s = blocking_s + background_s
        monitoring.record_event("/jax/orbax/write/success")
        _rate("/jax/orbax/write/gbytes_per_sec", tree_bytes, total_s)
        _scalar("/jax/orbax/write/gbytes", tree_bytes / 2**30)
        if not self._asynchronous:
            _duration("/jax/orbax/write/total_duration_secs", total_s, storage_type=self._storage)
            return
        _duration("/jax/checkpoint/write/async/thread_duration_sec", background_s)
        _duration("/jax/orbax/write/background_duration_secs", background_s)
        _duration("/jax/checkpoint/write/async/total_duration_secs", total_s, storage_type=self._storage)
        _duration("/jax/orbax/write/async/total_duration_secs", total_s, storage_type=self._storage)

    def _restored(self, duration_s: float, tree_bytes: int) -> None:
        _duration("/jax/orbax/read/blocking_duration_secs", duration_s, storage_type=self._storage)
        monitoring.record_event("/jax/orbax/read/success")
        _duration("/jax/orbax/read/total_duration_secs", duration_s, storage_type=self._storage)
        _rate("/jax/checkpoint/read/gbytes_per_sec", tree_bytes, duration_s)
        _scalar("/jax/checkpoint/read/gbytes", tree_bytes / 2**30)


def _duration(name: str, seconds: float, **labels: str | int) -> None:
    monitoring.record_event_duration_secs(name, seconds, **labels)


def _scalar(name: str, value: float, **labels: str | int) -> None:
    monitoring.record_scalar(name, value, **labels)


def _rate(name: str, nbytes: int, seconds: float) -> None:
    if seconds > 0:
        _scalar(name, nbytes / 2**30 / seconds)


# Entries are not made of events: each manager has a logger of its own, and several managers may share one event log,
# whose events do not name the manager.
@dataclass(slots=True)
class Spans:
    """Parts of a call, by the names in Orbax's entries: when each began (wall clock), and how long it lasted."""

    fields: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """The body is the part `name`."""
        start_s = clock.monotonic_s()
        try:
            yield
        finally:
            self.ended(name, start_s)

    def ended(self, name: str, start_s: float) -> None:
        """The part `name`, which began at `start_s` of the monotonic clock, ends now."""
        duration_s = clock.monotonic_s() - start_s
        self.fields[f"{name}_start_time"] = clock.wall_s() - duration_s
        self.fields[f"{name}_duration_secs"] = duration_s


def save_entry(start_s: float, step: int, directory: Any, spans: Spans, *, synchronous: bool) -> dict[str, Any]:
    """The entry of a `save` that began at `start_s` of the monotonic clock, and returns now."""
    spans.ended("checkpoint_manager_blocking", start_s)
    # A background thread finds the old steps: no save waits for it.
    old_steps = {"get_old_steps_start_time": clock.wall_s(), "get_old_steps_duration_secs": 0.0}
    known = {"step": step, "directory": str(directory), "synchronous": synchronous}
    return asdict(step_statistics.SaveStepStatistics(**known, **old_steps, **spans.fields))


def restore_entry(start_s: float, step: int, directory: Any, spans: Spans) -> dict[str, Any]:
    """The entry of a `restore` that began at `start_s` of the monotonic clock, and returns now."""
    spans.ended("checkpoint_manager", start_s)
    return asdict(step_statistics.RestoreStepStatistics(step=step, directory=str(directory), **spans.fields))

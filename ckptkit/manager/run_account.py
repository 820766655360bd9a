"""The manager's record of a run's time: spans of its saves and restores, and the steps known from its calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ckptkit.events import EventLog, Kind
from ckptkit.model.tiers import PEER, Tier
from ckptkit.save.book.under_way import SavesUnderWay, described
from ckptkit.util import clock, heartbeat
from ckptkit.util.waits import Meter, is_watched, told

_log = logging.getLogger("ckptkit")
_NOTICED_S = 1e-3  # a call that saved nothing, and was shorter than this, is not a span
_NORMAL_ENDS = (StopIteration, GeneratorExit)  # of an input, as loops notice it


@dataclass(slots=True)
class SaveCall:
    """One call that saves, or waits for saves."""

    taken: bool = False


class RunAccount:
    """Belongs to the step loop's thread. `ckptkit.goodput` reads what it records."""

    def __init__(self, events: EventLog, *, progress: bool):
        self._events = events
        self._progress = progress  # whether long waits are shown where a person looks
        self._opened_s = clock.monotonic_s()
        self._seen: int | None = None  # the last step that a call was about

    def opened(self, process: int, url: str, tiers: Sequence[Tier], steps: Sequence[int]) -> None:
        """The manager of process `process` is ready."""
        if self._events.has_file and self._events.process != process:
            _log.warning(
                "this is process %d, and its event log is of process %d: `ckptkit goodput` takes it for that one. Call "
                "EventLog.for_run after jax.distributed.initialize(), or give it process=%d",
                *(process, self._events.process, process),
            )
        self._events.emit(
            Kind.OPENED,
            directory=url,
            tiers=[tier.name for tier in tiers],
            places={tier.name: str(tier.path) for tier in tiers if tier.medium != PEER},
            steps=len(steps),
            newest=steps[-1] if steps else None,
            duration_s=round(clock.monotonic_s() - self._opened_s, 6),
        )

    @contextmanager
    def saving(self, step: int | None = None, under_way: SavesUnderWay | None = None) -> Iterator[SaveCall]:
        """A call that saves `step`, or (None) waits for saves.

        A person who watches sees how far the saves `under_way` have come: the call may wait for the one before.
        """
        call, begun_s, failed = SaveCall(), clock.monotonic_s(), True
        if step is not None:
            self.called(step, "save")  # before the save: a loss in it does not lose sight of the step
        seen = under_way if self._progress and is_watched() else None
        try:
            with nullcontext() if seen is None else told(_text_of(seen, "save "), show=True):
                yield call
            failed = False
        finally:
            duration_s = clock.monotonic_s() - begun_s
            if call.taken or failed or duration_s >= _NOTICED_S:
                fields: dict[str, Any] = {"duration_s": round(duration_s, 6), **({"failed": True} if failed else {})}
                self._events.emit(Kind.SPAN, step=step, span="checkpoint_save", **fields)

    @contextmanager
    def waiting(self, under_way: SavesUnderWay) -> Iterator[None]:
        """A call that waits for saves."""
        with self.saving(), told(_text_of(under_way), show=self._progress):
            yield

    @contextmanager
    def restoring(self, text: Callable[[], str]) -> Iterator[None]:
        """A call that restores, or waits for a restore; `text` returns what it waits for."""
        with self._events.span("checkpoint_restore"), told(text, show=self._progress):
            yield

    @contextmanager
    def closing(self, under_way: SavesUnderWay) -> Iterator[None]:
        """The manager ends, and whether the run is coming to its normal end with it."""
        failed = is_unwinding()
        try:
            with self.waiting(under_way):
                yield
        except BaseException:
            failed = True
            raise
        finally:
            fields: dict[str, Any] = {"failed": True} if failed else {}
            self._events.emit(Kind.CLOSED, **fields)

    def called(self, step: int, call: str) -> None:
        """The loop called the manager about `step`. Recorded once for a step, if the loop does not record its steps.

        The launcher sees the same steps: it counts those that a loss cost as `ckptkit goodput` does.
        """
        heartbeat.beat(step)
        if step != self._seen and not self._events.tells_steps:
            self._events.emit(Kind.CALLED, step=step, call=call)
        self._seen = step


def _text_of(under_way: SavesUnderWay, caller: str = "") -> Callable[[], str]:
    """The saves that a wait waits for, and how far they have come, as text."""
    meter, (_, before_bytes) = Meter(), under_way.progress()
    meter.begin(under_way.left_bytes())

    def text() -> str:
        meter.at(under_way.progress()[1] - before_bytes)
        written = meter.text()
        return f"{caller}waits for {described(under_way.left())}{f': {written}' if written else ''}"

    return text


def is_unwinding() -> bool:
    """Whether an exception is being handled that ends the run early."""
    error = sys.exc_info()[1]
    if error is None or isinstance(error, _NORMAL_ENDS):
        return False
    return not (isinstance(error, SystemExit) and error.code in (None, 0))

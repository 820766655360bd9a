"""The observers that a manager adds to its event log: they log lines, and report to `jax.monitoring`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

from jax import monitoring

from ckptkit.durable.orbax.reports import OrbaxNames
from ckptkit.events import Event, EventLog, Kind
from ckptkit.model.tiers import DURABLE
from ckptkit.util import clock
from ckptkit.util.clock import time_text
from ckptkit.util.words import count_text, size_text

_log = logging.getLogger("ckptkit")
_QUIET_S = 60.0  # between two log lines of one kind
_LIKE_CHARS = 40  # of a reason: numbers come later
_REASON_CHARS_MAX = 400  # the event has all of it
_UNREPORTED = frozenset({Kind.CALLED, Kind.PHASE})  # often, and without a length


def observe_run(events: EventLog, process: int, url: str, *, asynchronous: bool) -> None:
    """Logs and reports every event from now on; the manager is in process `process`, its durable root at `url`.

    Adds nothing that another manager has added to the same log. Only process 0 reports Orbax's names, as in Orbax.
    """
    observers: dict[str, Callable[[Event], None]] = {"log lines": _LogLines(process), "jax.monitoring": _report_event}
    if process == 0:
        observers["Orbax's names"] = OrbaxNames(url, asynchronous=asynchronous)
    for name, observer in observers.items():
        events.observe(observer, once=name)


def _report_event(event: Event) -> None:
    """Reports an event to `jax.monitoring`.

    An event is `/ckptkit/<kind>`, with its tier; a length of time in it `/ckptkit/<kind>/<field>_secs`, its bytes
    `/ckptkit/<kind>/bytes`; a span `/ckptkit/span/<name>/duration_secs`.
    """
    if event.kind in _UNREPORTED:
        return
    name = f"/ckptkit/{event.kind}"
    if event.kind == Kind.SPAN:
        name += f"/{event.fields['span']}"
    labels = {} if event.tier is None else {"tier": event.tier}
    monitoring.record_event(name, **labels)
    for field, value in event.fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if field.endswith("_s"):
            monitoring.record_event_duration_secs(f"{name}/{field.removesuffix('_s')}_secs", float(value), **labels)
        elif field == "bytes":
            monitoring.record_scalar(f"{name}/bytes", value, **labels)


@final
class FirstOfMany:
    """Admits the first of many events with one key, and then one in a while. It uses no lock, because a signal handler
    may interrupt the thread that holds one. So several threads at once may each have an event admitted."""

    def __init__(self, quiet_s: float = _QUIET_S):
        self._quiet_s = quiet_s
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}  # when one was admitted, and how many were not since

    def admit(self, key: tuple[str, ...]) -> int | None:
        """None for one that is left out, else how many were left out before it."""
        now_s = clock.monotonic_s()
        at_s, left_out = self._last.get(key, (now_s - self._quiet_s, 0))
        if now_s - at_s < self._quiet_s:
            self._last[key] = (at_s, left_out + 1)
            return None
        self._last[key] = (now_s, 0)
        return left_out


@final
class _LogLines:
    """Logs what an operator wants to read: news at INFO, by process 0 alone; problems at WARNING, by each process.

    Warnings of one kind are logged once a minute, with the number of those that were left out.
    """

    def __init__(self, process: int):
        self._is_first = process == 0
        self._limit = FirstOfMany()

    def __call__(self, event: Event) -> None:
        if self._is_first and (news := _NEWS.get(event.kind)) is not None:
            line = news(event)
            if line:
                _log.info("%s", line)
        if (problem := _PROBLEMS.get(event.kind)) is not None:
            more = self._limit.admit(_like(event))
            if more is not None:
                _log.warning("%s%s", problem(event), f" ({more} more like this since the last such line)" * bool(more))


def _like(event: Event) -> tuple[str, ...]:
    """The key by which warnings are equal. Each rejected candidate is logged, and each reason of a degraded tier."""
    about = (
        {Kind.REJECTED: str(event.step), Kind.DEGRADED: _reason(event)[:_LIKE_CHARS]}
        if "reason" in event.fields
        else {}
    )
    return event.kind, event.tier or "", str(event.fields.get("policy", "")), about.get(event.kind, "")


def _opened(event: Event) -> str:
    fields = event.fields
    newest = f"the newest is {fields['newest']}" if fields["steps"] else "a fresh start"
    return (
        f"start: {count_text(fields['steps'], 'step')} in {fields['directory']} and the fast tiers, {newest}; "
        f"tiers: {', '.join([*fields['tiers'], DURABLE])}; ready after {time_text(fields['duration_s'])}"
    )


def _committed(event: Event) -> str:
    if event.tier != DURABLE:
        return ""
    size = f"{size_text(event.fields['bytes'])} of this process, " if event.fields["bytes"] else ""
    if shared_bytes := event.fields.get("shared_bytes"):
        size += f"{size_text(shared_bytes)} of them taken from step {event.fields['shared_from']}, "
    return (
        f"step {event.step} is committed to tier durable: {size}{time_text(event.fields['duration_s'])} after staging"
    )


def _recovered(event: Event) -> str:
    fields = event.fields
    return (
        f"tier {event.tier} works again, after {count_text(fields['failures'], 'failed save')} in "
        f"{time_text(fields['failed_s'])}"
    )


def _retried(event: Event) -> str:
    delay = time_text(event.fields["delay_s"])
    return f"step {event.step}: the save to tier {event.tier} is tried again in {delay}: {_reason(event)}"


def _preempted(event: Event) -> str:
    fields = event.fields
    left_out = "".join(f"; {tier} is left out: {why}" for tier, why in fields["left_out"].items())
    unfinished = f"; not finished: {', '.join(fields['unfinished'])}" if fields["unfinished"] else ""
    return (
        f"last save: step {event.step} is in {', '.join(fields['tiers']) or 'no tier'}{unfinished}{left_out}; "
        f"{time_text(fields['spent_s'])} of {time_text(fields['grace_s'])} had passed before it"
    )


def _left_behind(event: Event) -> str:
    fields = event.fields
    return f"{fields['path']} holds {count_text(fields['count'], 'save')} that a run before did not commit"


def _skipped(event: Event) -> str:
    if event.tier is None:
        return f"step {event.step} is not saved: {_reason(event)}"
    return f"step {event.step} was not saved to tier {event.tier}: {_reason(event)}"


def _rejected(event: Event) -> str:
    step = "a save" if event.step is None else f"step {event.step}"
    return f"restore: {step} in {event.tier} was rejected: {_reason(event)}"


def _differ(event: Event) -> str:
    fields = event.fields
    holders = ", ".join(f"process {h['process']} on {h['host']} ({h['device']})" for h in fields["holders"])
    return f"step {event.step}: replicas of {fields['item']}:{fields['leaf']} differ: {holders}"


def _scrubbed(event: Event) -> str:
    return f"scrub: step {event.step} in {event.fields['path']} is damaged: {_reason(event)}"


def _reason(event: Event) -> str:
    reason = str(event.fields["reason"])
    return reason if len(reason) <= _REASON_CHARS_MAX else reason[:_REASON_CHARS_MAX] + " ..."


_Line = Callable[[Event], str]
_NEWS: Mapping[Kind, _Line] = {
    Kind.OPENED: _opened,
    Kind.COMMITTED: _committed,
    Kind.RECOVERED: _recovered,
    Kind.RETRIED: _retried,
    Kind.PREEMPTED: _preempted,
    Kind.LEFT_BEHIND: _left_behind,
}
_PROBLEMS: Mapping[Kind, _Line] = {
    Kind.DEGRADED: lambda event: f"tier {event.tier} is degraded: {_reason(event)}",
    Kind.SKIPPED: _skipped,
    Kind.FAILED: lambda event: f"step {event.step} was not committed to tier {event.tier}: {_reason(event)}",
    Kind.REJECTED: _rejected,
    Kind.REPLICAS_DIFFER: _differ,
    Kind.SCRUBBED: _scrubbed,
}

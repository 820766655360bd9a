"""The account of a run in words: the number that leads, its source, and the reasons to doubt it."""

from __future__ import annotations

from ckptkit.goodput.report import DEFINITIONS, GoodputReport
from ckptkit.util.clock import time_text
from ckptkit.util.words import count_text

_STEPS_FROM = {
    "spans": "steps from the loop's `step` spans",
    "calls": "steps from the loop's calls of the manager",
    "both": "steps from `step` spans in some starts, from calls of the manager in others",
}
NO_STEPS = "no step information"


def headline(report: GoodputReport) -> str:
    """The goodput by the definition that leads, and its name; or that no log records steps."""
    if report.goodput.ml_goodput is None:
        return f"goodput: {NO_STEPS}"
    _, name, _ = DEFINITIONS[0]
    return f"goodput {report.goodput.ml_goodput:.2%} ({name}; {_STEPS_FROM[report.steps_from]})"


def caveats(report: GoodputReport) -> list[str]:
    """Facts without which a reader would take the numbers for something else: one or two sentences each."""
    told = []
    if report.steps_from == "nothing":
        told.append(
            "No log has steps. Call manager.save(step, ...), should_save or reached_preemption in each step, or "
            "write `with manager.step(step):` around it."
        )
    if unknown := [loss for loss in report.disruptions if loss.process is None and loss.cause == "unknown"]:
        told.append(
            f"No log has the process or the cause of {count_text(len(unknown), 'loss', 'losses')}: `ckptkit run` "
            "writes both into the directory of its --events. Give it the directory of the job's event logs."
        )
    if report.custom_s:
        named = ", ".join(f"{_shown(name)} ({time_text(seconds)})" for name, seconds in report.custom_s.items())
        told.append(f"Spans with names that are not kinds of time count as `custom`, never as training: {named}.")
    return told


def _shown(name: str) -> str:
    """A name from a log, which may hold what moves the cursor of a terminal."""
    return "".join(each if each.isprintable() else "?" for each in name)

"""Where the time of a run went: pure folds over its event logs."""

from ckptkit.goodput.page import goodput_page
from ckptkit.goodput.parts import Part
from ckptkit.goodput.report import (
    DEFINITIONS,
    Disruption,
    Goodput,
    GoodputReport,
    Injected,
    Restore,
    Saves,
    goodput_report,
)
from ckptkit.goodput.resume import Phase, Resume, resumes
from ckptkit.goodput.runs import RunLogs, load_run, read_run, steps_done
from ckptkit.goodput.text import caveats, headline
from ckptkit.goodput.timeline import LossMark, RestoreMark, SaveMark, Stretch, Timeline, timeline_of

__all__ = [
    "DEFINITIONS",
    "Disruption",
    "Goodput",
    "GoodputReport",
    "Injected",
    "LossMark",
    "Part",
    "Phase",
    "Restore",
    "RestoreMark",
    "Resume",
    "RunLogs",
    "SaveMark",
    "Saves",
    "Stretch",
    "Timeline",
    "caveats",
    "goodput_page",
    "goodput_report",
    "headline",
    "load_run",
    "read_run",
    "resumes",
    "steps_done",
    "timeline_of",
]

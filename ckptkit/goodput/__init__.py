"""Where the time of a run went: pure folds over its event logs."""

from ckptkit.goodput.page import goodput_page
from ckptkit.goodput.parts import Part
from ckptkit.goodput.report import Disruption, Goodput, GoodputReport, Restore, Saves, goodput_report
from ckptkit.goodput.runs import load_run
from ckptkit.goodput.timeline import LossMark, RestoreMark, SaveMark, Stretch, Timeline, timeline_of

__all__ = [
    "Disruption",
    "Goodput",
    "GoodputReport",
    "LossMark",
    "Part",
    "Restore",
    "RestoreMark",
    "SaveMark",
    "Saves",
    "Stretch",
    "Timeline",
    "goodput_page",
    "goodput_report",
    "load_run",
    "timeline_of",
]

"""Where the time of a run went: pure folds over its event logs."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.goodput.page import goodput_page as goodput_page
    from ckptkit.goodput.parts import Part as Part
    from ckptkit.goodput.report import DEFINITIONS as DEFINITIONS
    from ckptkit.goodput.report import Disruption as Disruption
    from ckptkit.goodput.report import Goodput as Goodput
    from ckptkit.goodput.report import GoodputReport as GoodputReport
    from ckptkit.goodput.report import Injected as Injected
    from ckptkit.goodput.report import Restore as Restore
    from ckptkit.goodput.report import Saves as Saves
    from ckptkit.goodput.report import goodput_report as goodput_report
    from ckptkit.goodput.runs import RunLogs as RunLogs
    from ckptkit.goodput.runs import load_run as load_run
    from ckptkit.goodput.runs import read_run as read_run
    from ckptkit.goodput.runs import steps_done as steps_done
    from ckptkit.goodput.text import caveats as caveats
    from ckptkit.goodput.text import headline as headline
    from ckptkit.goodput.timeline import LossMark as LossMark
    from ckptkit.goodput.timeline import RestoreMark as RestoreMark
    from ckptkit.goodput.timeline import SaveMark as SaveMark
    from ckptkit.goodput.timeline import Stretch as Stretch
    from ckptkit.goodput.timeline import Timeline as Timeline
    from ckptkit.goodput.timeline import timeline_of as timeline_of

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

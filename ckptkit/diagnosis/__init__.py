"""Slow, risky and wasteful parts of a run, from its event logs, checkpoints and state, with the remedies.

Names are imported when they are first used: `doctor` and `inspect` need no JAX.
"""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.diagnosis.examining import Diagnosis as Diagnosis
    from ckptkit.diagnosis.examining import diagnose as diagnose
    from ckptkit.diagnosis.records import Advice as Advice
    from ckptkit.diagnosis.records import Facts as Facts
    from ckptkit.diagnosis.rules import RULES as RULES
    from ckptkit.diagnosis.sharding import sharding_report as sharding_report
    from ckptkit.diagnosis.tuner.explaining import explain as explain
    from ckptkit.diagnosis.tuner.forecasting import SaveForecast as SaveForecast
    from ckptkit.diagnosis.tuner.proposing import tune as tune
    from ckptkit.inspection.layouts import LayoutFinding as LayoutFinding
    from ckptkit.inspection.layouts import ShardingReport as ShardingReport

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

"""A state that is whole and wrong: alarms over what the loop measures, the way back, and batches that are skipped.

Names are imported when they are first used: `ckptkit inspect` reads the records without JAX.
"""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.guard.guarding import Guard as Guard
    from ckptkit.guard.guarding import GuardPolicy as GuardPolicy
    from ckptkit.guard.guarding import SlowDown as SlowDown
    from ckptkit.guard.record import Alarm as Alarm
    from ckptkit.guard.record import GuardRecord as GuardRecord
    from ckptkit.guard.record import Rollback as Rollback
    from ckptkit.guard.record import Skips as Skips
    from ckptkit.guard.replaying import Certificate as Certificate
    from ckptkit.guard.replaying import Difference as Difference
    from ckptkit.guard.replaying import NewSave as NewSave
    from ckptkit.guard.replaying import ReplayPlan as ReplayPlan
    from ckptkit.guard.replaying import replay as replay
    from ckptkit.guard.replaying import replay_new as replay_new
    from ckptkit.guard.rules import Divergence as Divergence
    from ckptkit.guard.rules import Finding as Finding
    from ckptkit.guard.rules import NonFinite as NonFinite
    from ckptkit.guard.rules import Reading as Reading
    from ckptkit.guard.rules import Rule as Rule
    from ckptkit.guard.rules import Spike as Spike

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

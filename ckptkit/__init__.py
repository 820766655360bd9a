"""Checkpoint-centric resilience for JAX training, on Orbax and TensorStore."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptkit.util.distribution import refuse_foreign
from ckptkit.util.lazy import lazy_names

__version__ = "0.2.0"

refuse_foreign(sys.path)

if TYPE_CHECKING:
    from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError as StepAlreadyExistsError

    from ckptkit import emergency as emergency
    from ckptkit import surgery as surgery
    from ckptkit import v1 as v1
    from ckptkit.conversion import diff as diff
    from ckptkit.diagnosis.sharding import sharding_report as sharding_report
    from ckptkit.diagnosis.tuner import explain as explain
    from ckptkit.diagnosis.tuner import tune as tune
    from ckptkit.direct import AsyncCheckpointer as AsyncCheckpointer
    from ckptkit.direct import Checkpointer as Checkpointer
    from ckptkit.direct import PyTreeCheckpointer as PyTreeCheckpointer
    from ckptkit.direct import StandardCheckpointer as StandardCheckpointer
    from ckptkit.direct import load as load
    from ckptkit.direct import save as save
    from ckptkit.durable.cells.forecast import SaveForecast as SaveForecast
    from ckptkit.errors import CheckpointError as CheckpointError
    from ckptkit.errors import CoordinationError as CoordinationError
    from ckptkit.errors import CorruptCheckpointError as CorruptCheckpointError
    from ckptkit.errors import GuardStopError as GuardStopError
    from ckptkit.errors import ItemNotFoundError as ItemNotFoundError
    from ckptkit.errors import NoRestorableStepError as NoRestorableStepError
    from ckptkit.errors import NotJoinedError as NotJoinedError
    from ckptkit.errors import ProgramChangedError as ProgramChangedError
    from ckptkit.errors import ReplicaMismatchError as ReplicaMismatchError
    from ckptkit.errors import SaveFailedError as SaveFailedError
    from ckptkit.errors import SigningKeyError as SigningKeyError
    from ckptkit.errors import StepNotFoundError as StepNotFoundError
    from ckptkit.errors import StoreError as StoreError
    from ckptkit.errors import StoreFullError as StoreFullError
    from ckptkit.errors import SurgeryError as SurgeryError
    from ckptkit.errors import TierUnusableError as TierUnusableError
    from ckptkit.errors import TransientStoreError as TransientStoreError
    from ckptkit.errors import TreeMismatchError as TreeMismatchError
    from ckptkit.errors import UntrustedStepError as UntrustedStepError
    from ckptkit.events import Event as Event
    from ckptkit.events import EventLog as EventLog
    from ckptkit.events import Kind as Kind
    from ckptkit.events import read_events as read_events
    from ckptkit.formats import inspect as inspect
    from ckptkit.formats import open_checkpoint as open_checkpoint
    from ckptkit.guard import Alarm as Alarm
    from ckptkit.guard import Certificate as Certificate
    from ckptkit.guard import Divergence as Divergence
    from ckptkit.guard import Guard as Guard
    from ckptkit.guard import GuardPolicy as GuardPolicy
    from ckptkit.guard import NonFinite as NonFinite
    from ckptkit.guard import ReplayPlan as ReplayPlan
    from ckptkit.guard import SlowDown as SlowDown
    from ckptkit.guard import Spike as Spike
    from ckptkit.guard import replay as replay
    from ckptkit.inspection import list_steps as list_steps
    from ckptkit.inspection.latest import latest_step as latest_step
    from ckptkit.job.compiled import CompiledProgram as CompiledProgram
    from ckptkit.job.compiled import compiled as compiled
    from ckptkit.job.data.batches import ElasticBatches as ElasticBatches
    from ckptkit.manager import CheckpointManager as CheckpointManager
    from ckptkit.manager import RestoreHandle as RestoreHandle
    from ckptkit.manager import StepRecord as StepRecord
    from ckptkit.manager.follow import FollowedStep as FollowedStep
    from ckptkit.manager.follow import follow as follow
    from ckptkit.model.durable_profile import DurableProfile as DurableProfile
    from ckptkit.model.policies import BroadcastOptions as BroadcastOptions
    from ckptkit.model.policies import FailurePolicy as FailurePolicy
    from ckptkit.model.policies import PeerOptions as PeerOptions
    from ckptkit.model.policies import ProcessOptions as ProcessOptions
    from ckptkit.model.policies import ReplicaPolicy as ReplicaPolicy
    from ckptkit.model.policies import SaveOptions as SaveOptions
    from ckptkit.model.tiers import EverySeconds as EverySeconds
    from ckptkit.model.tiers import EverySteps as EverySteps
    from ckptkit.model.tiers import KeepBytes as KeepBytes
    from ckptkit.model.tiers import KeepNewest as KeepNewest
    from ckptkit.model.tiers import KeepUnflushed as KeepUnflushed
    from ckptkit.model.tiers import Tier as Tier
    from ckptkit.patch import patch_orbax as patch_orbax
    from ckptkit.schedule.goodput_policy import GoodputOptimal as GoodputOptimal
    from ckptkit.schedule.goodput_policy import IntervalBounds as IntervalBounds
    from ckptkit.schedule.preemption import LastSave as LastSave
    from ckptkit.snapshot.abstract import abstract_state as abstract_state
    from ckptkit.snapshot.state_digest import state_digest as state_digest
    from ckptkit.util.log_to import log_to as log_to
    from ckptkit.verification import scrub as scrub
    from ckptkit.verification import verify as verify

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)


class _Package(ModuleType):
    """`ckptkit.save` is the function. The import of the package of that name would set the attribute to the package."""

    @property
    def save(self) -> Any:
        """See `ckptkit.direct.save`."""
        from ckptkit.direct import save

        return save

    @save.setter
    def save(self, package: ModuleType) -> None:
        """The package is found in `sys.modules`."""


sys.modules[__name__].__class__ = _Package

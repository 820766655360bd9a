"""Checkpoint-centric resilience for JAX training, on Orbax and TensorStore.

The names here serve a training job and its checkpoints. Everything else has a module of its own: `ckptkit.direct`,
`guard`, `resume`, `diagnosis`, `surgery`, `v1`, `emergency`, `patch`."""

import sys
from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names, refuse_foreign

__version__ = "0.2.0"

refuse_foreign(sys.path)

if TYPE_CHECKING:
    from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError as StepAlreadyExistsError

    from ckptkit.conversion import diff as diff
    from ckptkit.durable.lifecycle.listing import latest_step as latest_step
    from ckptkit.errors import CheckpointError as CheckpointError
    from ckptkit.errors import CoordinationError as CoordinationError
    from ckptkit.errors import CorruptCheckpointError as CorruptCheckpointError
    from ckptkit.errors import ItemNotFoundError as ItemNotFoundError
    from ckptkit.errors import NoRestorableStepError as NoRestorableStepError
    from ckptkit.errors import NotJoinedError as NotJoinedError
    from ckptkit.errors import ReplicaMismatchError as ReplicaMismatchError
    from ckptkit.errors import SaveFailedError as SaveFailedError
    from ckptkit.errors import StepNotFoundError as StepNotFoundError
    from ckptkit.errors import StoreError as StoreError
    from ckptkit.errors import StoreFullError as StoreFullError
    from ckptkit.errors import TierUnusableError as TierUnusableError
    from ckptkit.errors import TransientStoreError as TransientStoreError
    from ckptkit.errors import TreeMismatchError as TreeMismatchError
    from ckptkit.events import Event as Event
    from ckptkit.events import EventLog as EventLog
    from ckptkit.events import Kind as Kind
    from ckptkit.events import read_events as read_events
    from ckptkit.formats import inspect as inspect
    from ckptkit.formats import open_checkpoint as open_checkpoint
    from ckptkit.goodput.policy import GoodputOptimal as GoodputOptimal
    from ckptkit.goodput.policy import IntervalBounds as IntervalBounds
    from ckptkit.inspection import list_steps as list_steps
    from ckptkit.manager import CheckpointManager as CheckpointManager
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
    from ckptkit.save.last_save import LastSave as LastSave
    from ckptkit.snapshot.abstract import abstract_state as abstract_state
    from ckptkit.snapshot.state_digest import state_digest as state_digest
    from ckptkit.util.package import log_to as log_to
    from ckptkit.verification import scrub as scrub
    from ckptkit.verification import verify as verify
    from ckptkit.verification.follow import follow as follow

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

"""Checkpoint-centric resilience for JAX training, on Orbax and TensorStore."""

from typing import TYPE_CHECKING

from ckptkit.lazy import lazy_names

if TYPE_CHECKING:
    from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError as StepAlreadyExistsError

    from ckptkit import surgery as surgery
    from ckptkit import v1 as v1
    from ckptkit.abstract import abstract_state as abstract_state
    from ckptkit.broadcast import BroadcastOptions as BroadcastOptions
    from ckptkit.conversion import diff as diff
    from ckptkit.durable.listing import latest_step as latest_step
    from ckptkit.errors import CheckpointError as CheckpointError
    from ckptkit.errors import CoordinationError as CoordinationError
    from ckptkit.errors import CorruptCheckpointError as CorruptCheckpointError
    from ckptkit.errors import ItemNotFoundError as ItemNotFoundError
    from ckptkit.errors import NoRestorableStepError as NoRestorableStepError
    from ckptkit.errors import ReplicaMismatchError as ReplicaMismatchError
    from ckptkit.errors import SaveFailedError as SaveFailedError
    from ckptkit.errors import StepNotFoundError as StepNotFoundError
    from ckptkit.errors import StoreError as StoreError
    from ckptkit.errors import StoreFullError as StoreFullError
    from ckptkit.errors import SurgeryError as SurgeryError
    from ckptkit.errors import TierUnusableError as TierUnusableError
    from ckptkit.errors import TransientStoreError as TransientStoreError
    from ckptkit.errors import TreeMismatchError as TreeMismatchError
    from ckptkit.events import Event as Event
    from ckptkit.events import EventLog as EventLog
    from ckptkit.events import Kind as Kind
    from ckptkit.events import read_events as read_events
    from ckptkit.following import FollowedStep as FollowedStep
    from ckptkit.following import follow as follow
    from ckptkit.formats import inspect as inspect
    from ckptkit.formats import open_checkpoint as open_checkpoint
    from ckptkit.inspection import list_steps as list_steps
    from ckptkit.manager import CheckpointManager as CheckpointManager
    from ckptkit.manager import RestoreHandle as RestoreHandle
    from ckptkit.manager import StepRecord as StepRecord
    from ckptkit.optimal import GoodputOptimal as GoodputOptimal
    from ckptkit.optimal import IntervalBounds as IntervalBounds
    from ckptkit.policy import EverySeconds as EverySeconds
    from ckptkit.policy import EverySteps as EverySteps
    from ckptkit.policy import FailurePolicy as FailurePolicy
    from ckptkit.policy import KeepBytes as KeepBytes
    from ckptkit.policy import KeepNewest as KeepNewest
    from ckptkit.policy import KeepUnflushed as KeepUnflushed
    from ckptkit.policy import PeerOptions as PeerOptions
    from ckptkit.policy import ReplicaPolicy as ReplicaPolicy
    from ckptkit.policy import Tier as Tier
    from ckptkit.preemption import LastSave as LastSave
    from ckptkit.proving import Sample as Sample
    from ckptkit.tuner import explain as explain
    from ckptkit.tuner import tune as tune
    from ckptkit.tuning import DurableProfile as DurableProfile
    from ckptkit.tuning import SaveForecast as SaveForecast
    from ckptkit.verification import scrub as scrub
    from ckptkit.verification import verify as verify

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ckptkit": (
            "surgery",
            "v1",
        ),
        "ckptkit.abstract": ("abstract_state",),
        "ckptkit.broadcast": ("BroadcastOptions",),
        "ckptkit.conversion": ("diff",),
        "ckptkit.durable.listing": ("latest_step",),
        "ckptkit.errors": (
            "CheckpointError",
            "CoordinationError",
            "CorruptCheckpointError",
            "ItemNotFoundError",
            "NoRestorableStepError",
            "ReplicaMismatchError",
            "SaveFailedError",
            "StepNotFoundError",
            "StoreError",
            "StoreFullError",
            "SurgeryError",
            "TierUnusableError",
            "TransientStoreError",
            "TreeMismatchError",
        ),
        "ckptkit.events": (
            "Event",
            "EventLog",
            "Kind",
            "read_events",
        ),
        "ckptkit.following": (
            "FollowedStep",
            "follow",
        ),
        "ckptkit.formats": (
            "inspect",
            "open_checkpoint",
        ),
        "ckptkit.inspection": ("list_steps",),
        "ckptkit.manager": (
            "CheckpointManager",
            "RestoreHandle",
            "StepRecord",
        ),
        "ckptkit.optimal": (
            "GoodputOptimal",
            "IntervalBounds",
        ),
        "ckptkit.policy": (
            "EverySeconds",
            "EverySteps",
            "FailurePolicy",
            "KeepBytes",
            "KeepNewest",
            "KeepUnflushed",
            "PeerOptions",
            "ReplicaPolicy",
            "Tier",
        ),
        "ckptkit.preemption": ("LastSave",),
        "ckptkit.proving": ("Sample",),
        "ckptkit.tuner": (
            "explain",
            "tune",
        ),
        "ckptkit.tuning": (
            "DurableProfile",
            "SaveForecast",
        ),
        "ckptkit.verification": (
            "scrub",
            "verify",
        ),
        "orbax.checkpoint.checkpoint_manager": ("StepAlreadyExistsError",),
    },
)

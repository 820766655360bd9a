"""Checkpoint-centric resilience for JAX training, on Orbax and TensorStore."""

from ckptkit.errors import CheckpointError as CheckpointError
from ckptkit.errors import CoordinationError as CoordinationError
from ckptkit.errors import CorruptCheckpointError as CorruptCheckpointError
from ckptkit.errors import NoRestorableStepError as NoRestorableStepError
from ckptkit.errors import SaveFailedError as SaveFailedError
from ckptkit.errors import StepAlreadyExistsError as StepAlreadyExistsError
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
from ckptkit.inspection import inspect as inspect
from ckptkit.inspection import list_steps as list_steps
from ckptkit.manager import CheckpointManager as CheckpointManager
from ckptkit.manager import RestoreHandle as RestoreHandle
from ckptkit.manager import StepRecord as StepRecord
from ckptkit.policy import EverySteps as EverySteps
from ckptkit.policy import Tier as Tier
from ckptkit.verification import scrub as scrub
from ckptkit.verification import verify as verify

"""Orbax's emergency manager (`orbax.checkpoint.experimental.emergency`) over our tiers; the options are Orbax's own."""

from orbax.checkpoint.experimental.emergency.checkpoint_manager import (
    CheckpointManagerOptions as CheckpointManagerOptions,
)
from orbax.checkpoint.experimental.emergency.checkpoint_manager import LocalCheckpointOptions as LocalCheckpointOptions
from orbax.checkpoint.experimental.emergency.checkpoint_manager import MultiprocessingOptions as MultiprocessingOptions
from orbax.checkpoint.experimental.emergency.checkpoint_manager import (
    PersistentCheckpointOptions as PersistentCheckpointOptions,
)

from ckptkit.emergency.manager import CheckpointManager as CheckpointManager

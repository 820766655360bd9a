"""The checkpoint manager: Orbax's surface over fast tiers and a durable one."""

from ckptkit.manager.book import StepRecord as StepRecord
from ckptkit.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from ckptkit.manager.pending import RestoreHandle as RestoreHandle

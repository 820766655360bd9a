"""The checkpoint manager: Orbax's surface over fast tiers and a durable one."""

from ckptkit.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from ckptkit.manager.restore_handle import RestoreHandle as RestoreHandle
from ckptkit.manager.scrub import SlotDamage as SlotDamage
from ckptkit.manager.scrub import SlotScrub as SlotScrub
from ckptkit.save.book.ledger import StepRecord as StepRecord

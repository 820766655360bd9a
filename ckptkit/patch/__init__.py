"""Orbax's managers and checkpointers replaced by ours in a process whose source stays as it is."""

from ckptkit.patch.replacing import patch_orbax as patch_orbax
from ckptkit.patch.replacing import read_tiers as read_tiers

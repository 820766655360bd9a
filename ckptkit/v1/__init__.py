"""The newer style of Orbax (`orbax.checkpoint.v1`) over the same tiers: `Checkpointer`, and `training` as in Orbax."""

from ckptkit.v1 import training as training
from ckptkit.v1.checkpointer import Checkpointer as Checkpointer

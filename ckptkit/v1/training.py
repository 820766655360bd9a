"""`orbax.checkpoint.v1.training` with our `Checkpointer`; policies, metadata and errors are Orbax's own."""

from orbax.checkpoint.experimental.v1.training import CheckpointMetadata as CheckpointMetadata
from orbax.checkpoint.experimental.v1.training import RootMetadata as RootMetadata
from orbax.checkpoint.experimental.v1.training import errors as errors
from orbax.checkpoint.experimental.v1.training import pathways as pathways
from orbax.checkpoint.experimental.v1.training import preservation_policies as preservation_policies
from orbax.checkpoint.experimental.v1.training import save_decision_policies as save_decision_policies

from ckptkit.v1.checkpointer import Checkpointer as Checkpointer

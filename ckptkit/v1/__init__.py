"""The newer style of Orbax (`orbax.checkpoint.v1`) over the same tiers: its module with our `training.Checkpointer`.

Every name but `training` and `Checkpointer` is Orbax's own: the free functions read and write one directory.
"""

from orbax.checkpoint.experimental.v1 import PLACEHOLDER as PLACEHOLDER
from orbax.checkpoint.experimental.v1 import AbstractCheckpointable as AbstractCheckpointable
from orbax.checkpoint.experimental.v1 import AsyncResponse as AsyncResponse
from orbax.checkpoint.experimental.v1 import Checkpointable as Checkpointable
from orbax.checkpoint.experimental.v1 import CheckpointableHandler as CheckpointableHandler
from orbax.checkpoint.experimental.v1 import CheckpointMetadata as CheckpointMetadata
from orbax.checkpoint.experimental.v1 import Context as Context
from orbax.checkpoint.experimental.v1 import PyTreeMetadata as PyTreeMetadata
from orbax.checkpoint.experimental.v1 import StatefulCheckpointable as StatefulCheckpointable
from orbax.checkpoint.experimental.v1 import arrays as arrays
from orbax.checkpoint.experimental.v1 import checkpointables_metadata as checkpointables_metadata
from orbax.checkpoint.experimental.v1 import delete as delete
from orbax.checkpoint.experimental.v1 import delete_async as delete_async
from orbax.checkpoint.experimental.v1 import errors as errors
from orbax.checkpoint.experimental.v1 import handlers as handlers
from orbax.checkpoint.experimental.v1 import is_orbax_checkpoint as is_orbax_checkpoint
from orbax.checkpoint.experimental.v1 import load as load
from orbax.checkpoint.experimental.v1 import load_async as load_async
from orbax.checkpoint.experimental.v1 import load_checkpointables as load_checkpointables
from orbax.checkpoint.experimental.v1 import load_checkpointables_async as load_checkpointables_async
from orbax.checkpoint.experimental.v1 import load_pytree as load_pytree
from orbax.checkpoint.experimental.v1 import load_pytree_async as load_pytree_async
from orbax.checkpoint.experimental.v1 import metadata as metadata
from orbax.checkpoint.experimental.v1 import multihost as multihost
from orbax.checkpoint.experimental.v1 import options as options
from orbax.checkpoint.experimental.v1 import partial as partial
from orbax.checkpoint.experimental.v1 import path as path
from orbax.checkpoint.experimental.v1 import pytree_metadata as pytree_metadata
from orbax.checkpoint.experimental.v1 import save as save
from orbax.checkpoint.experimental.v1 import save_async as save_async
from orbax.checkpoint.experimental.v1 import save_checkpointables as save_checkpointables
from orbax.checkpoint.experimental.v1 import save_checkpointables_async as save_checkpointables_async
from orbax.checkpoint.experimental.v1 import save_pytree as save_pytree
from orbax.checkpoint.experimental.v1 import save_pytree_async as save_pytree_async
from orbax.checkpoint.experimental.v1 import tree as tree

from ckptkit.v1 import training as training
from ckptkit.v1.checkpointer import Checkpointer as Checkpointer

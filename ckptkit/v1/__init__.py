"""The newer style of Orbax (`orbax.checkpoint.v1`) over the same tiers: its module with our `training.Checkpointer`.

Every name but `training` and `Checkpointer` is Orbax's own: the free functions read and write one directory.
"""

from orbax.checkpoint.experimental.v1 import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from ckptkit.v1.training import Checkpointer as Checkpointer

# isort: split
# After the line above, which sets it: the star has bound Orbax's `training`.
from ckptkit.v1 import training as training

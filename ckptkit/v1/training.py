"""`orbax.checkpoint.v1.training` with our `Checkpointer`; policies, metadata and errors are Orbax's own."""

from orbax.checkpoint.experimental.v1.training import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from ckptkit.v1.checkpointer import Checkpointer as Checkpointer

"""A tree at a path of its own: plain directories of Orbax with our digests, and Orbax's checkpointers over them."""

from ckptkit.direct.checkpointers import AsyncCheckpointer as AsyncCheckpointer
from ckptkit.direct.checkpointers import Checkpointer as Checkpointer
from ckptkit.direct.checkpointers import PyTreeCheckpointer as PyTreeCheckpointer
from ckptkit.direct.checkpointers import StandardCheckpointer as StandardCheckpointer
from ckptkit.direct.checkpointers import load as load
from ckptkit.direct.checkpointers import save as save

"""Every format behind one small interface: named tensors that are read box by box, within a memory budget."""

from ckptkit.formats.opening import inspect as inspect
from ckptkit.formats.opening import open_checkpoint as open_checkpoint
from ckptkit.formats.tensors import MEMORY_BYTES as MEMORY_BYTES
from ckptkit.formats.tensors import Checkpoint as Checkpoint
from ckptkit.formats.tensors import Tensor as Tensor

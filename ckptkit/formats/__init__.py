"""Every format behind one small interface: named tensors that are read box by box, within a memory budget."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.formats.opening import inspect as inspect
    from ckptkit.formats.opening import open_checkpoint as open_checkpoint
    from ckptkit.formats.tensors import MEMORY_BYTES as MEMORY_BYTES
    from ckptkit.formats.tensors import Checkpoint as Checkpoint
    from ckptkit.formats.tensors import Tensor as Tensor

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

"""For a restarted loop, besides its state: its rows of the data on any number of processes, and its compiled step.

Names are imported when they are first used: the batches need no JAX.
"""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.resume.batches import ElasticBatches as ElasticBatches
    from ckptkit.resume.programs import CompiledProgram as CompiledProgram
    from ckptkit.resume.programs import compiled as compiled

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

"""The durable tier: plain Orbax step directories, written from host memory, with our sidecars in them."""

from typing import TYPE_CHECKING

from ckptkit.lazy import lazy_names

if TYPE_CHECKING:
    from ckptkit.durable.epochs import EpochRecords as EpochRecords
    from ckptkit.durable.reader import DurableReader as DurableReader
    from ckptkit.durable.shards import HostShards as HostShards
    from ckptkit.durable.steps import DurableSteps as DurableSteps

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ckptkit.durable.epochs": ("EpochRecords",),
        "ckptkit.durable.reader": ("DurableReader",),
        "ckptkit.durable.shards": ("HostShards",),
        "ckptkit.durable.steps": ("DurableSteps",),
    },
)

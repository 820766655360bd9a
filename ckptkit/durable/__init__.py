"""The durable tier: plain Orbax step directories, written from host memory, with our sidecars in them."""

from ckptkit.durable.epochs import EpochRecords as EpochRecords
from ckptkit.durable.reader import DurableReader as DurableReader
from ckptkit.durable.shards import HostShards as HostShards
from ckptkit.durable.steps import DurableSteps as DurableSteps

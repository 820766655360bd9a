"""The test kit that ships with ckptkit: what it takes to test checkpoint code without Google.

The names most used are here; the rest of the fault vocabulary is in `ckptkit.testing.bucket`, crash points in
`ckptkit.testing.crash`, and damage in `ckptkit.testing.damage`. The tests that every store passes, which need pytest,
are in `ckptkit.testing.store_contract`. docs/TESTING.md has examples.
"""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.testing.bucket import BucketServer as BucketServer
    from ckptkit.testing.bucket import Fault as Fault
    from ckptkit.testing.bucket import FaultPlan as FaultPlan
    from ckptkit.testing.bucket import Kind as Kind
    from ckptkit.testing.faulty_store import FaultyStore as FaultyStore
    from ckptkit.testing.faulty_store import StoreCrash as StoreCrash
    from ckptkit.testing.faulty_store import StoreFault as StoreFault

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

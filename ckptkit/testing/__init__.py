"""The test kit that ships with ckptkit: what it takes to test checkpoint code without Google.

The names most used are here; the rest of the fault vocabulary is in `ckptkit.testing.bucket`, crash points in
`ckptkit.testing.crash`, damage in `ckptkit.testing.damage`, and strange checkpoint directories in
`ckptkit.testing.roots`. The tests that every store passes, which need pytest, are in `ckptkit.testing.store_contract`.
docs/TESTING.md has examples.
"""

from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind
from ckptkit.testing.faulty_store import FaultyStore, StoreCrash, StoreFault

__all__ = ["BucketServer", "Fault", "FaultPlan", "FaultyStore", "Kind", "StoreCrash", "StoreFault"]

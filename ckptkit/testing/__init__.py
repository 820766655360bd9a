"""The test kit that ships with ckptkit: what it takes to test checkpoint code without Google.

The names most used are here; the rest of the fault vocabulary is in `ckptkit.testing.bucket`.
"""

from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind

__all__ = ["BucketServer", "Fault", "FaultPlan", "Kind"]

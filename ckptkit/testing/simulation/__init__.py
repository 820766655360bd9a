"""The protocol of saves and restores in simulated jobs, under faults, on one thread and in virtual time.

What runs is the library's own code: meetings, votes, the log of process 0, the ledger, retention, the pipeline with
its tiers, and the ranking of candidates. Simulated are the coordination service, slots, the durable root, threads and
clocks. After every event an oracle checks what the protocol promises (`job.py`).
"""

from ckptkit.testing.simulation.job import Fault, Plan, SimJob
from ckptkit.testing.simulation.mutations import MUTATIONS, mutated
from ckptkit.testing.simulation.run import Failure, failures, run_plan, shrunk
from ckptkit.testing.simulation.scheduler import Violation

__all__ = [
    "MUTATIONS",
    "Failure",
    "Fault",
    "Plan",
    "SimJob",
    "Violation",
    "failures",
    "mutated",
    "run_plan",
    "shrunk",
]

"""The protocol of saves and restores in simulated jobs, under faults, on one thread and in virtual time.

It runs the library's own code: exchanges, votes, the log of process 0, the ledger, retention, the pipeline with its
tiers, and the ranking of candidates. It simulates the coordination service, slots, the durable root, threads and
clocks. After every event an oracle checks the promises of the protocol (`job.py`).
"""

from tests.simulation.job import SimJob
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.plan import Fault, Plan
from tests.simulation.run import Failure, failures, run_plan, shrunk
from tests.simulation.scheduler import Violation

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

"""The simulated herd: limits of a job shorten its restores, and the figures are those of a run."""

from __future__ import annotations

from bench.herd import simulate
from ckptkit.model.durable_profile import DurableProfile

_JOB = {"hosts": 200, "reads": 16, "rate": 500.0, "served_s": 0.1, "seed": 3}


def test_limits_of_a_job_shorten_its_restores() -> None:
    """A job that follows the page would restore more slowly than one without limits."""
    free = simulate(DurableProfile(), spread=False, **_JOB)  # pyright: ignore[reportArgumentType]
    limited = simulate(DurableProfile(job_read_concurrency=50), spread=True, **_JOB)  # pyright: ignore[reportArgumentType]
    assert (free.in_flight_per_host, limited.in_flight_per_host, limited.failed_restores) == (32, 1, 0)
    assert limited.requests - limited.refused == 200 * 16, "each read is served once"
    assert limited.refused * 3 < free.refused
    assert limited.last_restore_s < free.last_restore_s
    assert limited.last_restore_s >= 200 * 16 / 500 - 1, "a service is not faster than its rate"


def test_same_seed_gives_the_same_run() -> None:
    """The figures on the page could not be checked."""
    first, second = (simulate(DurableProfile(), spread=True, **_JOB) for _ in range(2))  # pyright: ignore[reportArgumentType]
    assert first == second

"""`python -m bench herd`: all hosts of a large job restore at the same moment, from a bucket that answers 429.

A simulation in virtual time: no bytes move. Each host has reads to do, so many at a time, and the service serves so
many requests a second. A request beyond that gets 429 and waits as TensorStore waits: `initial_delay` doubled at each
try, plus a random part of it, at most `max_delay` (tensorstore/internal/retry.cc). After the last try the host's
restore has failed, and its supervisor starts it again. `DurableProfile` itself computes
how much a host may have in flight and when it starts. The reads of a host are those of its cells, and
those of the sidecars of one item: with the joined record a listing and two reads; without it, as in older steps, a
listing and the sidecar of each host.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import click

from bench.environment import environment, store_result
from ckptkit.durable.cells.writer import RETRIES
from ckptkit.model.durable_profile import DurableProfile

_JOINED_READS = 3  # a listing, the sidecar of process 0, the joined record
_RESTART_S = 10.0  # from a failed restore to the next: a supervisor, imports
_REFUSED_S = 0.03  # a round trip


@dataclass(frozen=True, slots=True, kw_only=True)
class Herd:
    """The restores of one job."""

    in_flight_per_host: int
    start_spread_s: float
    last_restore_s: float
    requests: int
    refused: int  # answered with 429
    failed_restores: int


@final
class _Service:
    """Takes `rate` requests a second, and one second's worth at once after a rest."""

    def __init__(self, rate: float):
        self._rate, self._left, self._seen_s = rate, rate, 0.0

    def takes(self, now_s: float) -> bool:
        """Whether it serves a request that arrives now."""
        self._left = min(self._rate, self._left + (now_s - self._seen_s) * self._rate)
        self._seen_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@final
class _Host:
    """The reads of one host, which are begun in order."""

    def __init__(self, reads: int):
        self.reads, self.life = reads, 0
        self.begun, self.done, self.done_s = 0, 0, 0.0

    def start_again(self) -> None:
        """A new process: what the old one had in flight is void."""
        self.life += 1
        self.begun = self.done = 0


def simulate(
    profile: DurableProfile, *, hosts: int, reads: int, rate: float, served_s: float, spread: bool, seed: int
) -> Herd:
    """Restores of `hosts` hosts with `reads` requests each. `spread` False: all start at once, as without
    `start_spread_s`."""
    own, rng, service = profile.for_one_of(hosts), random.Random(seed), _Service(rate)
    spread_s = (own.start_spread_s or 0.0) if spread else 0.0
    events: list[tuple[float, int, Callable[[float], None]]] = []
    numbers, requests, refused, failed = itertools.count(), 0, 0, 0

    def at(time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(events, (time_s, next(numbers), act))

    def begin(host: _Host) -> Callable[[float], None]:
        def start(now_s: float) -> None:
            for _ in range(own.read_concurrency):
                begin_read(host, now_s)

        return start

    def begin_read(host: _Host, now_s: float) -> None:
        if host.begun < host.reads:
            host.begun += 1
            ask(host, host.life, 0)(now_s)

    def ask(host: _Host, life: int, tries: int) -> Callable[[float], None]:
        def arrive(now_s: float) -> None:
            nonlocal requests, refused, failed
            if host.life != life:
                return
            requests += 1
            if service.takes(now_s):
                at(now_s + served_s, lambda end_s: finish(host, life, end_s))
                return
            refused += 1
            if tries == RETRIES["max_retries"]:
                failed += 1
                host.start_again()
                at(now_s + _RESTART_S, begin(host))
                return
            at(now_s + _REFUSED_S + _backoff_s(tries, rng), ask(host, life, tries + 1))

        return arrive

    def finish(host: _Host, life: int, now_s: float) -> None:
        if host.life == life:
            host.done += 1
            host.done_s = now_s
            begin_read(host, now_s)

    herd = [_Host(reads) for _ in range(hosts)]
    for host in herd:
        at(rng.uniform(0, spread_s), begin(host))
    while events:
        now_s, _, act = heapq.heappop(events)
        act(now_s)
    assert all(host.done == reads for host in herd), f"seed {seed}: a host has not restored"
    return Herd(
        in_flight_per_host=own.read_concurrency,
        start_spread_s=spread_s,
        last_restore_s=round(max(host.done_s for host in herd), 2),
        requests=requests,
        refused=refused,
        failed_restores=failed,
    )


def _backoff_s(tries: int, rng: random.Random) -> float:
    first_s, longest_s = _seconds(RETRIES["initial_delay"]), _seconds(RETRIES["max_delay"])
    return min(first_s * 2**tries + rng.uniform(0, min(1.0, first_s)), longest_s)


def _seconds(text: Any) -> float:
    return float(text.removesuffix("ms")) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))


@click.command()
@click.option("--hosts", type=click.IntRange(min=2), default=1000, show_default=True)
@click.option(
    "--reads", type=click.IntRange(min=1), default=64, show_default=True, help="Requests for cells of each host."
)
@click.option("--rate", type=float, default=5000.0, show_default=True, help="Requests a second that the bucket serves.")
@click.option("--served-s", type=float, default=0.1, show_default=True, help="Time of one served request.")
@click.option("--job-reads", type=int, default=500, show_default=True, help="job_read_concurrency, where it is set.")
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="The same, as JSON.")
def main(
    hosts: int, reads: int, rate: float, served_s: float, job_reads: int, seed: int, json_path: Path | None
) -> None:
    """Simulates the restores of a job that starts again, with and without limits of the job."""
    cases = {
        "no limits": (DurableProfile(), False),
        "start spread": (DurableProfile(), True),
        f"job_read_concurrency={job_reads}": (DurableProfile(job_read_concurrency=job_reads), False),
        "both": (DurableProfile(job_read_concurrency=job_reads), True),
    }
    result: dict[str, Any] = {"benchmark": "herd", "environment": environment(), "hosts": hosts, "reads": reads}
    result |= {"rate": rate, "served_s": served_s, "seed": seed, "sidecars": {}}
    for kind, records, limits in (("joined", _JOINED_READS, list(cases)), ("one by one", hosts + 1, ["both"])):
        each = reads + records
        print(f"sidecars {kind}: {hosts} hosts, {each} requests each, {rate:g}/s: at least {hosts * each / rate:.1f} s")
        found = {
            name: simulate(
                cases[name][0], hosts=hosts, reads=each, rate=rate, served_s=served_s, spread=cases[name][1], seed=seed
            )
            for name in limits
        }
        for name, herd in found.items():
            print(f"  {name}: " + ", ".join(f"{field} {value}" for field, value in asdict(herd).items()))
        result["sidecars"][kind] = {
            "requests_of_each": each,
            "cases": {name: asdict(herd) for name, herd in found.items()},
        }
    store_result(result, json_path)

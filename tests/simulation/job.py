"""A simulated job: processes on hosts, attempts of a launcher, faults from a seed, and the oracle that judges them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.job.meeting import _VERDICT_SPARE_S, Delete, Get, Listing, Now, Pause, Put
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, PEER, RAM, SSD
from ckptkit.save.agreement.protocol import Agree, Ask, Do, Idle, Onto, Recall, SideBySide, Sleep, Veto, Wait
from ckptkit.store import MemoryStore
from ckptkit.util import clock
from ckptkit.util.notice import Promise
from tests.simulation.ages import watch_ages
from tests.simulation.plan import Fault, Plan
from tests.simulation.process import Forever, Part, SimProcess, Until
from tests.simulation.scheduler import PENDING, Scheduler, Task, Violation
from tests.simulation.service import Service
from tests.simulation.storage import Medium, Root

_log = logging.getLogger("ckptkit")
_CATCHING_UP = 4  # saves after the last fault, every 3 seconds: 4 timeouts
_TAIL = 2  # saves after that: in the first one, what failed before is raised; the second one is committed
EVENTS_MAX = 150_000
_CALL_MAX_S = {"save": 5.0, "restore": 40.0}  # times the timeout: a call that takes longer hangs
_REQUESTS = frozenset({Put, Get, Listing, Delete, Pause})


@dataclass(eq=False, slots=True)
class Host:
    """A machine: what its processes leave in its tiers."""

    name: str
    media: dict[str, Medium] = field(default_factory=lambda: {RAM: Medium(), SSD: Medium()})


@final
class SimJob:
    """One run of one plan. `run` raises `Violation` where the oracle finds a fault of ours."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.scheduler = Scheduler(self.rng)
        self.scheduler.perform = self._perform
        self.timeout_s = 3.0
        self.peers = plan.peers
        self.hosts = [Host(f"host-{n}") for n in range(plan.processes)]
        self.epochs = MemoryStore()
        self.root = Root()
        self.processes: list[SimProcess] = []
        self.service = Service(self.scheduler, self.rng)
        self.attempt = 0
        self.finished = False
        self.log: list[str] = []
        self.counts: dict[SaveId, int] = {}  # how many processes wrote a save
        self.committed: dict[SaveId, set[str]] = {}  # what process 0 decided
        self._quiet_from_s = 0.0
        self._operations: list[tuple[Any, ...]] = []
        self._arrived: dict[int, list[Task]] = {}
        self._tail = 0
        self._raise_next: dict[tuple[int, str], int] = {}
        self._restores: dict[str, tuple[list[SaveId], SaveId | None]] = {}
        self._wiped = False
        self._writers: dict[SaveId, tuple[int, int]] = {}

    @property
    def timeout(self) -> float:
        """The longest wait for another process."""
        return self.timeout_s

    def run(self) -> None:
        """Runs the plan to its end, with the clocks of the library in virtual time. Raises `Violation`."""
        clocks, quiet = clock.monotonic_s, _log.disabled
        clock.monotonic_s, _log.disabled = self._clock_s, True
        try:
            self._run()
        finally:
            clock.monotonic_s, _log.disabled = clocks, quiet

    def _clock_s(self) -> float:
        process = self.scheduler.current
        return self.scheduler.now_s + (process.clock_offset_s if process is not None else 0.0)

    def _run(self) -> None:
        for fault in self.plan.faults:
            self.scheduler.at(fault.at_s, lambda fault=fault: self._strike(fault))
            self._quiet_from_s = max(self._quiet_from_s, fault.at_s + fault.seconds)
        self._quiet_from_s += 2.0
        self._launch()
        if not self.scheduler.run(EVENTS_MAX):
            tasks = [(process, task) for process in self.processes for task in process.tasks if not task.done]
            where = [f"process {process.index} in {process.call}, task {task.name}" for process, task in tasks]
            raise Violation(f"the job hangs at {self.scheduler.now_s:.1f} s: {'; '.join(where)}")
        self._check_end()

    def note(self, text: str) -> None:
        """A line for the report of a violation."""
        self.log.append(f"{self.scheduler.now_s:9.3f} {text}")

    # The launcher.

    def _launch(self) -> None:
        count = self.plan.processes
        if self.attempt and self.plan.seed % 5 == 0:
            count = self.rng.choice(range(1, self.plan.processes + 1))  # an elastic restart
        self.note(f"attempt {self.attempt} of {count} processes")
        self.service = Service(self.scheduler, self.rng)
        self._operations, self._arrived, self._tail, self._restores = [], {}, 0, {}
        self._raise_next.clear()
        self._ended: set[int] = set()
        self.processes = [SimProcess(self, index, count, self.attempt) for index in range(count)]
        for process in self.processes:
            process.main = process.start("main", process.run())

    def died(self, process: SimProcess, why: str) -> None:
        """A process died: the launcher ends the others after a while, and restarts all."""
        if not process.alive or self.finished:
            return
        self.note(f"process {process.index} ended: {why}")
        process.kill()
        if process.index == 0:
            self.service.end()
        attempt = self.attempt

        def again() -> None:
            if attempt != self.attempt or self.finished:
                return
            for each in self.processes:
                each.kill()
            self._check_kept()
            self.attempt += 1
            self._launch()

        self.scheduler.at(self.rng.choice((0.1, 2.0, 15.0)), again)

    def ended(self, process: SimProcess) -> None:
        """A process came to the end of its script; the job is finished when all did."""
        self._ended.add(process.index)
        self.finished = self.scheduler.stopped = len(self._ended) == len(self.processes)

    def operation(self, attempt: int, number: int) -> tuple[Any, ...]:
        """The operation of that number, the same on every process."""
        while len(self._operations) <= number:
            self._operations += self._next_operations(attempt)
        return self._operations[number]

    def _next_operations(self, attempt: int) -> list[tuple[Any, ...]]:
        nonce = f"{attempt}.{len(self._operations)}"
        every = frozenset({RAM, SSD, DURABLE, *([PEER] if self.peers else [])})
        if self.scheduler.now_s >= self._quiet_from_s and len(self._operations) > 6:
            self._tail += 1
            if self._tail <= _CATCHING_UP:
                return [("train", 3.0), ("save", frozenset({RAM}), nonce, False)]
            if self._tail == _CATCHING_UP + 1:
                return [("train", 0.5), ("caught up",)]
            if self._tail <= _CATCHING_UP + 1 + _TAIL:
                pause_s = 12.0 if self._tail == _CATCHING_UP + 2 else 1.0  # a pause of the durable tier ends first
                return [("train", pause_s), ("save", every, nonce, False), ("settle",), ("train", 0.1)]
            return [("end",)]
        chance = self.rng.random()
        if chance < 0.1 and len(self._operations) > 8:
            steps = self.processes[0].ledger.steps()
            return [("settle",), ("restore", self.rng.choice([None, *steps[-2:]]))]
        due = {RAM}
        chance_due = 0.8 if self.plan.quick else 0.4
        due |= {tier for tier in (SSD, DURABLE, PEER) if tier in every and self.rng.random() < chance_due}
        if chance < 0.13:  # a fault too: a verdict is waited for until the timeout, and a moment
            self._quiet_from_s = max(self._quiet_from_s, self.scheduler.now_s + self.timeout_s + _VERDICT_SPARE_S)
            return [("misses a call", self.rng.randrange(len(self.processes)), frozenset(due), nonce, False)]
        return [
            ("train", self.rng.choice((0.0, 0.0, 0.05, 0.3) if self.plan.quick else (0.05, 0.5, 1.0, 1.0))),
            ("save", frozenset(due), nonce, self.rng.random() < 0.3),
        ]

    def together(self, process: SimProcess, number: int, seconds: float) -> Any:
        """A training step: a collective of all processes, which ends when all have joined."""
        yield Sleep(seconds * self.rng.uniform(0.9, 1.1))
        arrived = self._arrived.setdefault(number, [])
        assert process.main is not None
        arrived.append(process.main)
        if len(arrived) == process.count:
            for main in arrived:
                self.scheduler.resume(main, delay_s=self.rng.random() * 0.01)
        yield Forever()

    # Reports of processes to the oracle.

    def opened(self, process: SimProcess) -> None:
        """The process has made its parts: its commits are compared with process 0's."""
        log = process.pipeline.voting._log
        booked = log._booked

        def checked(save_id: SaveId, tier: str) -> None:
            if process.index == 0:
                self.committed.setdefault(save_id, set()).add(tier)
                self.note(f"committed {save_id} in {tier}")
                self._check_covered(save_id, tier)
            elif tier not in self.committed.get(save_id, ()):
                raise Violation(f"process {process.index} books {save_id} in {tier}, which process 0 never decided")
            booked(save_id, tier)

        log._booked = checked
        watch_ages(process)

    def wrote(self, save_id: SaveId, count: int) -> None:
        """A process of `count` has written a manifest of this save: no two saves have one identity."""
        told = self._writers.setdefault(save_id, (self.attempt, count))
        if told != (self.attempt, count):
            raise Violation(f"{save_id} is written in attempt {self.attempt}, and was in attempt {told[0]}")
        self.counts[save_id] = count

    def caught_up(self, process: SimProcess) -> None:
        """Some time after the last fault, in a loop that never waits: one of the last three saves is committed."""
        newest = max((save for save in self.committed), default=None)
        if newest is None or newest.step < process.step - 3:
            raise Violation(f"long after the last fault, at step {process.step}, the newest commit is {newest}")

    def timed(self, process: SimProcess, name: str, seconds: float) -> None:
        """A call has ended: none takes longer than its timeouts allow."""
        if seconds > _CALL_MAX_S[name] * self.timeout_s and process.alive:
            raise Violation(f"process {process.index}: {name} took {seconds:.1f} s, timeout_s is {self.timeout_s}")

    def restored(self, process: SimProcess, name: str, save_id: SaveId) -> None:
        """A process restored a save: all restore the same, the newest that can be had."""
        candidates, seen = self._restores[name]
        if seen is not None and seen != save_id:
            raise Violation(f"process {process.index} restored {save_id} in {name}, another one {seen}")
        self._restores[name] = (candidates, save_id)
        self.note(f"process {process.index} restored {save_id}")

    def ranked(self, name: str, candidates: list[SaveId], step: int | None) -> None:
        """Process 0's candidates of a restore of `step`, best first."""
        self._restores[name] = (candidates, None)
        expected = self._newest_covered() if step is None else None
        if expected is not None and (not candidates or candidates[0] != expected):
            raise Violation(f"{name}: candidates {list(map(str, candidates[:3]))}, the newest whole save is {expected}")

    def read(self, save_id: SaveId) -> None:
        """Reads a save as a restore does: every share, of one call of `save`."""
        if save_id in {save for save, _ in self.root.steps.values()}:
            return
        shares = self._shares(save_id)
        if set(shares) != set(range(self.counts.get(save_id, -1))):
            raise CorruptCheckpointError(f"{save_id}: shares {sorted(shares)} of {self.counts.get(save_id)}")
        if len({nonce for nonce, _ in shares.values()}) > 1:
            raise Violation(f"{save_id} mixes calls {shares}")

    # The oracle.

    def _shares(self, save_id: SaveId) -> dict[int, Any]:
        """The shares of a save that some host of this attempt holds, by writer."""
        hosts = self.hosts[: len(self.processes)]
        contents = [
            medium.content(save_id) for host in hosts for medium in host.media.values() if save_id in medium.committed
        ]
        return {content[1]: content for content in contents if content is not None}

    def _covered(self, save_id: SaveId) -> bool:
        if any(save == save_id for save, _ in self.root.steps.values()):
            return True
        count = self.counts.get(save_id)
        return count is not None and set(self._shares(save_id)) >= set(range(count))

    def _newest_covered(self) -> SaveId | None:
        ancestry = EpochRecords(self.epochs).read()
        held = {save for host in self.hosts[: len(self.processes)] for m in host.media.values() for save in m.committed}
        held |= {save for save, _ in self.root.steps.values()}
        held = {save for save in held if not ancestry.superseded(save) and not ancestry.disowned(save)}
        whole = [save for save in held if self._covered(save)]
        return max(whole, default=None)

    def _check_covered(self, save_id: SaveId, tier: str) -> None:
        """Every process holds the saves that process 0 calls committed."""
        if tier in (RAM, SSD):
            for process in self.processes:
                medium = process.host.media[tier]
                if save_id not in medium.committed and process.alive:
                    raise Violation(f"{save_id} is committed in {tier}, and process {process.index} does not hold it")
        elif tier == DURABLE and self.root.steps.get(save_id.step, (None,))[0] != save_id:
            raise Violation(f"{save_id} is committed durably, and the root does not hold it")

    def _check_kept(self) -> None:
        """The newest committed save can be had, or a newer one; unless a host lost what it held."""
        ancestry = EpochRecords(self.epochs).read()
        of_branch = (each for each in self.committed if not ancestry.superseded(each) and not ancestry.disowned(each))
        newest = max(of_branch, default=None)
        if newest is None or self._wiped:
            return
        hosts = len(self.processes)
        if any(self.counts[save] > hosts for save in self.committed):
            return  # after an elastic restart a part of the hosts is not there
        found = self._newest_covered()
        if found is None or found < newest:
            raise Violation(f"{newest} was committed in {self.committed[newest]}, and only {found} can be had")

    def _check_end(self) -> None:
        """After the last fault: the last save is committed, the books are equal, and nothing is held."""
        books = [{record.save_id: record.tiers for record in p.ledger.records()} for p in self.processes]
        for process, book in zip(self.processes, books, strict=True):
            if book != books[0]:
                raise Violation(f"process {process.index} has book {_shown(book)}, process 0 has {_shown(books[0])}")
            if process.pipeline.voting.undecided:
                raise Violation(f"process {process.index} still has undecided saves")
            for name, arena in process.arenas.items():
                if arena.leases:
                    raise Violation(f"process {process.index} holds {arena.leases} leases in {name} at the end")
        last = max(books[0], default=None)
        if last is None or last.step != self.processes[0].step or not {RAM, SSD, DURABLE} <= set(books[0][last]):
            raise Violation(f"after the last fault, step {self.processes[0].step} is not committed: {_shown(books[0])}")
        if len(self.service.values) > 2000:
            raise Violation(f"{len(self.service.values)} keys stay in the coordination service")

    # Faults.

    def _strike(self, fault: Fault) -> None:
        if fault.process >= len(self.processes) or self.finished:
            return
        process = self.processes[fault.process]
        self.note(str(fault))
        link, media = self.service.link(fault.process), process.host.media
        match fault.kind:
            case "cut":
                self.service.cut(fault.process, fault.seconds)
            case "lost answers":
                link.lost = 0.3
                self._later(fault, lambda: setattr(link, "lost", 0.0))
            case "slow service":
                link.slow_s = fault.seconds / 2
                self._later(fault, lambda: setattr(link, "slow_s", 0.0))
            case "raise":
                self._raise_next[fault.process, fault.what] = 1
                self._later(fault, lambda: self._raise_next.pop((fault.process, fault.what), None))
            case "interrupt":
                if process.alive and process.call is not None and process.main is not None:
                    self.scheduler.interrupt(process.main, KeyboardInterrupt())
            case "crash":
                self.died(process, "SIGKILL")
            case "wipe":
                self._wiped = True
                for medium in media.values():
                    medium.wipe()
                self.died(process, "its host is lost")
            case "full" | "read only":
                medium = media[RAM if fault.seconds > 1 else SSD]
                medium.fault = fault.kind
                self._later(fault, lambda: setattr(medium, "fault", None))
            case "durable away":
                self.root.away = True
                self._later(fault, lambda: setattr(self.root, "away", False))
            case "durable slow":
                self.root.slow_s = fault.seconds
                self._later(fault, lambda: setattr(self.root, "slow_s", 0.0))

    def _later(self, fault: Fault, act: Callable[[], object]) -> None:
        self.scheduler.at(fault.seconds, act)

    # Effects.

    def _perform(self, task: Task, effect: Any) -> Any:
        kind, scheduler = type(effect), self.scheduler
        if kind is Now:
            return scheduler.now_s
        if kind in _REQUESTS:
            return self.service.answer(task, task.process.index, effect)
        if kind is Do:
            return self._do(task, effect)
        if kind is Idle:
            return scheduler.wait(task, lambda: effect.worker.idle, effect.timeout_s)
        if kind is Until:
            return scheduler.wait(task, effect.condition, effect.timeout_s)
        if kind is Onto:
            protocol = task.stack.pop()
            effect.worker.submit(lambda: protocol)
            return None
        if kind is Part:
            task.stack.append(effect.protocol)
        elif kind is Sleep:
            scheduler.resume(task, delay_s=effect.seconds)
        elif kind is not Forever:
            task.stack.append(self._exchange(task.process, effect))
        return PENDING

    def _exchange(self, process: SimProcess, effect: Any) -> Any:
        meetings, timeout_s = process.meetings, self.timeout_s
        match effect:
            case Agree(channel, about, value, decide, is_veto, order):
                return meetings.agree(
                    channel, value, decide, timeout_s=timeout_s, about=about, is_veto=is_veto, order=order
                )
            case Ask(channel, about, decide, order):
                return meetings.ask(channel, decide, timeout_s=timeout_s, about=about, order=order)
            case Recall(channel, about):
                return meetings.recall(channel, about, timeout_s=1.0)
            case Veto(channel, about, value, decide):
                return meetings.veto(channel, value, decide, about=about, timeout_s=5.0)
            case SideBySide(protocol, act):
                return _both(protocol, act)
            case Wait(promise, timeout_s):
                return _result(promise, timeout_s)
        raise AssertionError(effect)

    def _do(self, task: Task, effect: Do) -> Any:
        delay_s = self.rng.random() * 0.02
        if effect.what.startswith(("durable", "disk")):
            delay_s += self.rng.random() * (self.root.slow_s + 0.3)
        ticket = self.scheduler.hold(task)
        self.scheduler.at(delay_s, lambda: self._act(task, ticket, effect.what, effect.act))
        return PENDING

    def _act(self, task: Task, ticket: int, what: str, act: Callable[[], Any]) -> None:
        if task.done or task.ticket != ticket:
            return
        process: SimProcess = task.process
        if self._raise_next.pop((process.index, what), None):
            self.note(f"process {process.index}: {what} raises")
            self.scheduler.resume(task, error=StoreError(f"{what} failed (simulated)"))
            return
        try:
            result = act()
        except Violation:
            raise
        except Exception as error:  # noqa: BLE001  raised in the task
            self.scheduler.step(task, error=error)
            return
        if hasattr(result, "send"):
            task.stack.append(result)
            result = None
        self.scheduler.step(task, result)


def _both(protocol: Any, act: Callable[[], Any]) -> Any:
    yield from protocol
    return act()


def _result(promise: Promise[Any], timeout_s: float | None) -> Any:
    if not (yield Until(promise.done, timeout_s)):
        raise TimeoutError
    return promise.result()


def _shown(book: dict[SaveId, tuple[str, ...]]) -> str:
    return "{" + ", ".join(f"{save}: {'+'.join(tiers)}" for save, tiers in sorted(book.items())) + "}"

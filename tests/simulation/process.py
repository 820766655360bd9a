"""One simulated process: the real pipeline, ledger, retention and agreement over simulated storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, final

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.errors import CheckpointError, CorruptCheckpointError, PeerUnreachableError
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import Job
from ckptkit.job.meeting import Meetings
from ckptkit.model.manifest import ManifestText, SaveId, Writer
from ckptkit.model.policies import FailurePolicy, SaveOptions
from ckptkit.model.tiers import DURABLE, RAM, SSD, Tier, kept_beside
from ckptkit.restore.inventory import Held, is_whole
from ckptkit.restore.plan import rank_candidates
from ckptkit.save.agreement.protocol import Agree, Ask, Do, Machinery, SaveProtocol, Wait
from ckptkit.save.book.ledger import Branch, Ledger
from ckptkit.save.book.retention import Retention
from ckptkit.save.pipeline import SavePipeline
from ckptkit.save.records import PeerCopies, Save, SaveTargets
from ckptkit.snapshot.describe import Description
from ckptkit.snapshot.items import SaveItems
from tests.simulation.scheduler import Task, Violation
from tests.simulation.storage import PART_BYTES, SimArena, SimDiskCopy, SimDurable

Content = tuple[str, int]  # which call of the job staged it, and on which process

_NOTHING = Description(
    items={}, treedefs={}, extents=(), slot_bytes=PART_BYTES, share_bytes=PART_BYTES, text=ManifestText({})
)


class Until:
    """A task's wait for a condition, with a time limit; the result is whether it holds."""

    def __init__(self, condition: Callable[[], Any], timeout_s: float | None = None):
        self.condition, self.timeout_s = condition, timeout_s


class Part:
    """A protocol that may go on in another task; the result is then None."""

    def __init__(self, protocol: SaveProtocol):
        self.protocol = protocol


class _Arguments:
    """The content of a save: which call of the job staged it, and on which process."""

    def __init__(self, content: Content):
        self._content: Any = content

    def check(self) -> None:
        """See `Arguments.check`."""

    def collect(self, save: Save) -> None:
        """See `Arguments.collect`."""
        content = {"content": self._content}
        save.items, save.description = SaveItems(trees=content, inline={}, durable=content), _NOTHING

    def taken(self) -> None:
        """See `Arguments.taken`."""

    def begin_by_orbax(self, save_id: SaveId) -> None:
        """See `Arguments.begin_by_orbax`."""


class Forever:
    """A wait that another task ends."""


class _Unheard(EventLog):
    """Events cost more than the protocol, and nobody reads them here. A broken assumption of ours is a violation."""

    def emit(self, kind: Kind, *, step: int | None = None, tier: str | None = None, **fields: Any) -> None:
        """See `EventLog.emit`."""
        if kind == Kind.FAILED and str(fields["reason"]).startswith(AssertionError.__name__):
            raise Violation(f"step {step} in {tier}: {fields['reason']}")


@final
class SimWorker:
    """A thread of the pipeline: runs its jobs one after the other as a task."""

    def __init__(self, process: SimProcess, name: str):
        self._process, self._name = process, name
        self._jobs: list[Callable[[], Any]] = []
        self.task: Task | None = None

    @property
    def idle(self) -> bool:
        """See `Worker.idle`."""
        return not self._jobs and (self.task is None or self.task.done)

    def submit(self, job: Callable[[], Any]) -> None:
        """See `Worker.submit`; never full, as the pipeline bounds what it submits."""
        self._jobs.append(job)
        if self.task is None or self.task.done:
            self.task = self._process.start(self._name, self._run())

    def _run(self) -> Any:
        while self._jobs:
            steps = self._jobs.pop(0)()
            if steps is not None:
                yield Part(steps)


@final
class SimProcess:
    """A process of one attempt of `job` (a `SimJob`). `host` is where its slots are."""

    def __init__(self, job: Any, index: int, count: int, attempt: int):
        self.job, self.index, self.count, self.attempt = job, index, count, attempt
        self.host = job.hosts[index]
        self.meetings = Meetings("job", index, count)
        self.timeout_s = job.timeout_s
        self.clock_offset_s = job.rng.choice((0.0, 5.0, 1e6))
        self.tasks: list[Task] = []
        self.alive = True
        self.step = -1  # the last one that was trained
        self.restores = 0
        self.call: tuple[str, float] | None = None  # the call that runs now, and since when
        self.main: Task | None = None
        self.pipeline: SavePipeline = None  # pyright: ignore[reportAttributeAccessIssue]  until `_open`

    def start(self, name: str, steps: Any) -> Task:
        """A task of this process."""
        if not self.alive:  # what a killed thread leaves to the garbage collector runs no more
            dead = Task(name, self, steps)
            dead.kill()
            return dead
        task = self.job.scheduler.start(name, self, steps)
        self.tasks = [each for each in self.tasks if not each.done]
        self.tasks.append(task)
        return task

    def kill(self) -> None:
        """SIGKILL: everything stops at once; slots stay."""
        self.alive = False
        for task in self.tasks:
            task.kill()

    def run(self) -> Any:
        """The script that a user would have written: open, restore, train and save."""
        try:
            yield from self._open()
            if self.ledger.records():
                yield from self._restore()
            for number in range(10**6):
                operation = self.job.operation(self.attempt, number)
                if operation[0] == "end":
                    self.job.ended(self)
                    return
                yield from self._do(operation, number)
        except (CheckpointError, KeyboardInterrupt) as error:
            self.job.died(self, f"{type(error).__name__}: {error}")

    def _do(self, operation: tuple[Any, ...], number: int) -> Any:
        kind, *rest = operation
        if kind == "train":
            yield from self.job.together(self, number, rest[0])
        elif kind == "save":
            self.step += 1
            try:
                yield from self._timed("save", self._save(self.step, *rest))
            except (CheckpointError, ValueError, KeyboardInterrupt) as error:
                self.job.note(f"process {self.index}: save({self.step}) raised {type(error).__name__}: {error}")
        elif kind == "restore":
            yield from self._restore(*rest)
        elif kind == "misses a call":  # its loop caught an error before it came to `save`
            self.step += 1
            if self.index != rest[0]:
                with suppress(CheckpointError, ValueError, KeyboardInterrupt):
                    yield from self._timed("save", self._save(self.step, *rest[1:]))
        elif kind == "caught up":
            self.job.caught_up(self)
        elif kind == "settle":
            yield from self._settled()

    def _settled(self) -> Any:
        """No save is under way: durable writes wait for none."""
        yield Until(lambda: self.pipeline.threads.idle)
        if self.durable.urgent:
            raise Violation(f"process {self.index}: durable writes still wait for {self.durable.urgent}")

    def _timed(self, name: str, steps: Any) -> Any:
        began_s = self.job.scheduler.now_s
        self.call = (name, began_s)
        try:
            return (yield from steps)
        finally:
            self.call = None
            self.job.timed(self, name, self.job.scheduler.now_s - began_s)

    # The manager's side, as `manager/` has it over real storage.

    def _open(self) -> Any:
        epochs = EpochRecords(self.job.epochs)
        run = f"{self.job.attempt:016x}"
        ancestry, run = yield Agree("first-look", "", None, lambda _: [epochs.read().to_json(), run])
        self.ledger = Ledger(Ancestry.from_json(ancestry))
        media = self.host.media

        in_flight_max = self.job.plan.in_flight_max
        ram, ssd = Tier.ram("/simulated/ram"), Tier.ssd("/simulated/ssd")
        tiers = (ram, Tier.peer(), ssd) if self.job.peers else (ram, ssd)
        ram_slots = ram.slots_for(0, in_flight_max, beside=kept_beside(ram, tiers))
        self.arenas = {
            RAM: SimArena(media[RAM], ram_slots, synced=False, until=Until),
            SSD: SimArena(media[SSD], ssd.slots_for(0, 1), synced=True, until=Until),
        }
        self.arenas |= {
            name: SimArena(media.setdefault(name, type(media[RAM])()), 2, synced=False, until=Until)
            for name in ([f"buddy-{self.index}"] if self.job.peers else [])
        }
        for arena in self.arenas.values():
            arena.written = lambda save_id, _: self.job.wrote(save_id, self.count)
        self.durable = SimDurable(self.job.root, self.index, self.count, kept_max=3)
        told = yield Agree("stock", "", [held.to_json() for held in self.reports()], self._stock)
        held = {SaveId.from_list(save): tiers for save, tiers in told["saves"]}
        self.ledger.refill(held)
        retention = Retention(tiers, {name: a for name, a in self.arenas.items()}, self.ledger, in_flight_max)  # noqa: C416  # pyright: ignore[reportArgumentType]
        retention.opened()
        self.retention = retention
        self.branch = Branch(self.ledger, told["epoch"] + 1, run)
        policy = FailurePolicy(
            retries=1, retry_delay_s=0.5, pause_after=3, pause_s=0.5, max_age_s=self.job.plan.max_age_s
        )
        self.pipeline = SavePipeline(
            SaveTargets(
                staging=self.arenas[RAM],  # pyright: ignore[reportArgumentType]
                staging_name=RAM,
                disk=self.arenas[SSD],  # pyright: ignore[reportArgumentType]
                durable=self.durable,  # pyright: ignore[reportArgumentType]
                epochs=epochs,
                peer_copies=self._peer_copies() if self.job.peers else None,
            ),
            Job(coordinator=self, events=_Unheard()),  # pyright: ignore[reportArgumentType]
            Writer(process=self.index, count=self.count, host=self.host.name),
            self.branch,
            self,  # pyright: ignore[reportArgumentType]
            retention,
            SaveOptions(on_failure=policy, replicas=None, in_flight_max=in_flight_max),
            Machinery(
                make_worker=lambda name, *, waiting_max: SimWorker(self, name),  # pyright: ignore[reportArgumentType]
                make_disk_copy=SimDiskCopy,
                begin_staging=self._begin_staging,
            ),
        )
        self.job.opened(self)

    def _peer_copies(self) -> PeerCopies:
        return PeerCopies(
            keepers=((self.index + 1) % self.count,),
            peer_arenas=(self.arenas[f"buddy-{self.index}"],),  # pyright: ignore[reportArgumentType]
            receiver=SimpleNamespace(end=lambda save_id: None),  # pyright: ignore[reportArgumentType]
            client=self,  # pyright: ignore[reportArgumentType]
            timeout_s=self.timeout_s,
        )

    def try_again(self) -> None:
        """See `PeerClient.try_again`."""

    def send_copy(self, keeper: int, save_id: SaveId, writer: int, memory: Any, text: Callable[[str], bytes]) -> Any:
        """See `PeerClient.send_copy`."""
        target = self.job.processes[keeper]
        if not target.alive or target.pipeline is None:
            raise PeerUnreachableError(f"process {keeper} does not answer (simulated)")
        arena = target.arenas[f"buddy-{keeper}"]
        slot = arena._free()
        if slot is None:
            raise PeerUnreachableError("the keeper has no free slot (simulated)")
        slot.leases = 1
        arena.discard(slot)
        arena.write(slot, memory[0])
        arena.commit(slot, save_id, text(slot.name))
        arena.release(slot)
        yield PART_BYTES

    def _begin_staging(self, choice: str, description: Any, trees: Any, memory: list[Any], *_: Any) -> Any:
        del description
        memory[0] = trees["content"]
        for slot in self.arenas[RAM]._slots:
            if slot.memory is memory:
                self.arenas[RAM].write(slot, trees["content"])
        return SimpleNamespace(strategy=choice, reason="simulated", finish=dict, computing_s=0.0)

    def _save(self, step: int, due: frozenset[str], nonce: str, asks: bool) -> Any:
        """As `SavePipeline.entered` and `SavePipeline.save`."""
        name, save = self.branch.enter(step), None
        try:
            yield Do("user code", lambda: None)
            if asks:
                yield Ask("decision", name, lambda: True)
            self.pipeline.outcomes.raise_failure(in_save=True)
            self.due_now = due
            save = Save(name=name, step=step, arguments=_Arguments((nonce, self.index)), force=False)
            taken = yield Part(self.pipeline.flow.save(save))
            if taken is None:
                yield Wait(save.returned)
        except GeneratorExit:  # the process was killed
            raise
        except BaseException as error:
            if save is not None:
                save.loan.withdrawn = True
                yield Until(lambda: not save.loan._is_read)
                self.pipeline.flow.take_back(save)
            if save is None or not save.is_voted:
                yield from self.pipeline.flow.veto(name, error)
            raise

    # The interface of `Decider` for the flow: the plan of the run has decided.

    def refusal(self, step: int, *, force: bool) -> str | None:
        """See `Decider.refusal`."""
        return None

    def due(self, step: int, **asked: Any) -> frozenset[str]:
        """See `Decider.due`."""
        return self.due_now

    def taken(self, step: int, due: frozenset[str], metrics: Any = None) -> None:
        """See `Decider.taken`."""

    def not_taken(self, step: int) -> None:
        """See `Decider.not_taken`."""

    def forget(self, step: int) -> None:
        """See `Decider.forget`."""

    def _restore(self, step: int | None = None) -> Any:
        """As `Resumer.entered` and `RestoreFlow.restore`."""
        name = f"restore-{self.restores}"
        self.restores += 1
        save_id = yield from self._timed("restore", self._restored(name, step))
        self.step = save_id.step
        self.branch.continue_from(save_id)
        self.pipeline.outcomes.go_on()
        self.ledger.verified(save_id)
        self.retention.restored(save_id)
        self.job.restored(self, name, save_id)

    def _restored(self, name: str, step: int | None) -> Any:
        try:
            yield Do("user code", lambda: None)
            yield from self._settled()
        except GeneratorExit:  # the process was killed
            raise
        except BaseException as error:
            yield from self.pipeline.withdraw(name, error)
            raise
        yield from self.pipeline.synchronise(name)

        def rank(reports: list[list[Any]]) -> list[list[Any]]:
            held = [[Held.from_json(each) for each in report] for report in reports]
            ancestry = EpochRecords(self.job.epochs).read()
            fast = [{each.save_id: each.refusal for each in report} for report in held]
            durable = [save for save, _ in self.job.root.steps.values() if not ancestry.superseded(save)]
            disowned = ancestry.disowned
            ranked = rank_candidates(fast, durable, ancestry.superseded, step, disowned=disowned, linked=True)
            whole = [c.save_id for c in ranked if c.durable or is_whole(held, c.save_id)]
            self.job.ranked(name, whole, step)
            return [save.to_list() for save in whole]

        told = yield Agree("candidates", name, [held.to_json() for held in self.reports()], rank)
        for number, values in enumerate(told):
            save_id, error = SaveId.from_list(values), None
            try:
                yield Do("read", lambda save_id=save_id: self.job.read(save_id))
            except CorruptCheckpointError as caught:
                error = str(caught)
            verdict = yield Agree("restore", f"{name}.{number}", error, lambda errors: [e for e in errors if e])
            if not verdict:
                return save_id
        raise CheckpointError("no restorable step (simulated)")

    def reports(self) -> list[Held]:
        """The shares on this process's host: its own, and copies of others'."""
        found: dict[SaveId, tuple[set[str], set[int]]] = {}
        for tier, medium in self.host.media.items():
            for save_id in medium.committed:
                content = medium.content(save_id)
                if content is not None:
                    tiers, shares = found.setdefault(save_id, (set(), set()))
                    tiers.add(RAM if tier.startswith("buddy") else tier)
                    shares.add(content[1])
        counts = self.job.counts
        return [
            Held(save_id=save, count=counts[save], shares=tuple((s, "") for s in sorted(shares)), tiers=tuple(tiers))
            for save, (tiers, shares) in sorted(found.items())
        ]

    def _stock(self, reports: list[list[Any]]) -> dict[str, Any]:
        """As `take_stock`."""
        held = [[Held.from_json(each) for each in report] for report in reports]
        durable = {save for save, _ in self.job.root.steps.values()}
        found = sorted({each.save_id for report in held for each in report})
        seen = [save for save in found if save in durable or not self.ledger.ancestry.disowned(save)]
        saves: dict[SaveId, set[str]] = {}
        for save in seen:
            if is_whole(held, save):
                saves[save] = {t for report in held for each in report if each.save_id == save for t in each.tiers}
        for save, _ in self.job.root.steps.values():
            saves.setdefault(save, set()).add(DURABLE)
        epoch = max([self.ledger.ancestry.epoch, *(save.epoch for save in (*found, *saves))])
        return {
            "saves": [[save.to_list(), sorted(tiers)] for save, tiers in sorted(saves.items())],
            "epoch": epoch,
        }

    # The pipeline's view of its coordinator: the process's identity. It exchanges values through effects alone.

    @property
    def process(self) -> int:
        """See `Coordinator.process`."""
        return self.index

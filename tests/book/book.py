"""The book: what was saved, where, in which order, and therefore which answers a restart may give.

It knows nothing of epochs, slots, manifests or votes. Each save has a value of its own, and values grow in the order of
saving. A fact that a kill leaves unknown is `MAYBE`: the book allows each outcome then.

Rules:
- The newest save is the one made last on this branch. A higher number of a step does not make a save newer.
- A root that was removed and made again is another root: no answer is a save of the first one.
- A backup that was put back is the same root as it was then. No answer is of a run that it does not know of.
- A run that could not record itself in the root, not later either, is an answer only while no other run has begun.
- A save after the restore of an older one begins a branch: later saves of the branch before are abandoned.
- A deleted save does not return, on whatever host it lay.
- A tier keeps its `keep` newest saves, in the order of saving.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NO, MAYBE, YES = 0, 1, 2
RAM, SSD, PEER, DURABLE = "ram", "ssd", "peer", "durable"


class Disagreement(Exception):
    """The library gave an answer that the book does not allow."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """The saves from a start or a restore on, until the next one."""

    number: int
    run: int
    base: float  # the value from which it continues; 0: from nothing
    began: float  # the value of its first save
    status: int  # whether the root knows of it


@dataclass(slots=True, kw_only=True)
class Root:
    """A durable root as it is now. A copy of the root is a copy of this record."""

    identity: int
    segments: list[Segment] = field(default_factory=list)
    durable: dict[int, int] = field(default_factory=dict)  # value: is it there
    deleted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Save:
    """One save that a run has made."""

    value: int
    step: int
    root: int
    place: str  # the path of the root
    run: int
    segment: int
    hosts: tuple[str, ...]  # of its processes
    sharded: bool  # no process has all of it
    fast: dict[str, list[int]]  # tier: for each process, whether its share is there
    alone: bool  # the root did not know of its run when it was made, and could not be told
    peer: int = NO
    peers_lost: set[str] = field(default_factory=set)  # hosts that have lost the copies that they kept

    def shares(self, tier: str) -> Iterator[tuple[str, int]]:
        """The host of each process, and whether its share is in a tier there."""
        return zip(self.hosts, self.fast.get(tier, ()), strict=False)

    def held(self, hosts: Collection[str], tiers: Collection[str], place: str) -> int:
        """Whether these hosts have all of it in these fast tiers."""
        most = YES if place == self.place else MAYBE
        shares = [NO] * len(self.hosts)
        for tier in tiers:
            for process, (host, found) in enumerate(self.shares(tier)):
                shares[process] = max(shares[process], min(most, found) if host in hosts else NO)
        found = min(shares) if self.sharded else max(shares)
        if PEER in tiers and self.peer:
            gone = {host for host in self.hosts if host not in hosts or host in self.peers_lost}
            if gone != set(self.hosts):
                found = max(found, min(most, self.peer if len(gone) <= 1 else MAYBE))
        return found


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, as far as it has come."""

    number: int
    hosts: tuple[str, ...]
    tiers: Sequence[str]
    keep: dict[str, int | None]
    sharded: bool
    root: Root
    place: str
    segment: Segment | None = None  # None: the next save begins one
    base: int = 0
    restored: bool = False  # and not saved since
    writable: bool = True
    troubled: bool = False  # it was not writable for a time
    in_flight: list[int] = field(default_factory=list)


class Book:
    """The saves, runs and directories of a history so far."""

    def __init__(self) -> None:
        self.saves: dict[int, Save] = {}
        self.roots: dict[str, Root] = {}  # by path
        self._count = 0

    # Events between runs.

    def lose(self, host: str, tiers: Collection[str]) -> None:
        """A host loses what it holds in these tiers: it was rebooted (ram), or replaced (all)."""
        for save in self.saves.values():
            for tier in set(tiers) & set(save.fast):
                save.fast[tier] = [NO if at == host else found for at, found in save.shares(tier)]
            if RAM in tiers:
                save.peers_lost.add(host)

    def put_back(self, place: str, root: Root) -> None:
        """An older copy of the root is in its place. The newer saves, which perhaps were made, are not on its branch;
        they may have replaced older ones that are."""
        self.roots[place] = root
        for newer in self.saves.values():
            if newer.place == place:
                self._may_have_replaced(newer)

    def _may_have_replaced(self, newer: Save) -> None:
        """The older saves are perhaps gone from the tiers that perhaps have this one."""
        tiers = [tier for tier, found in newer.fast.items() if MAYBE in found]
        for older in self.saves.values():
            if older.place == newer.place and older.value < newer.value:
                self._weaken(older, tiers, newer.hosts)

    # Commands between runs.

    def pruned(self, place: str, kept: int) -> None:
        """`prune` has kept the newest steps of the branch in the root. Copies in fast tiers stay."""
        root, newer = self.roots[place], 0
        for value in sorted((v for v, found in root.durable.items() if found), reverse=True):
            status = min(root.durable[value], self._stands(self.saves[value], root))
            if newer >= kept or status == NO:
                root.durable[value] = MAYBE
            newer += status > NO

    def targets(self, place: str) -> list[Save]:
        """The saves to which the root can be rolled back for sure, newest first."""
        root = self.roots[place]
        sure = [self.saves[v] for v, found in root.durable.items() if found == YES]
        newest = {each.step: each for each in sorted(self.saves.values(), key=lambda each: each.value)}
        found = [each for each in sure if self._stands(each, root) == YES and newest[each.step] is each]
        return sorted(found, key=lambda each: -each.value)

    def rolled_back(self, place: str, save: Save) -> None:
        """The root continues from this save: what was saved after it is abandoned, on every host."""
        self._count += 1
        root, last = self.roots[place], max(self.saves)
        root.segments.append(
            Segment(number=self._count, run=-self._count, base=save.value, began=last + 0.5, status=YES)
        )

    def cleaned(self, host: str, tiers: Collection[str]) -> None:
        """A host has removed the slots of jobs that have ended."""
        for save in self.saves.values():
            self._weaken(save, tiers, (host,))
            if RAM in tiers:
                save.peer = min(save.peer, MAYBE)

    # Acts of a run.

    def open(self, place: str, hosts: Sequence[str], config: Any) -> Run:
        """A run starts. A root that is not there is made."""
        self._count += 1
        root = self.roots.setdefault(place, Root(identity=self._count))
        settings = {name: config[name] for name in ("tiers", "keep", "sharded")}
        return Run(number=self._count, hosts=tuple(hosts), root=root, place=place, **settings)

    def restored(self, run: Run, value: int | None) -> None:
        """The run has restored this save: its next save continues from there."""
        run.base, run.segment, run.restored = value or 0, None, True

    def begin_save(self, run: Run, value: int, step: int) -> None:
        """A process has called `save`."""
        run.segment = run.segment or self._begin(run, value)
        run.segment.status = max(run.segment.status, MAYBE if run.writable else NO)
        self.saves[value] = Save(
            value=value, step=step, root=run.root.identity, place=run.place, run=run.number,
            segment=run.segment.number, hosts=run.hosts, sharded=run.sharded,
            fast={tier: [MAYBE] * len(run.hosts) for tier in run.tiers if tier in (RAM, SSD)},
            peer=MAYBE if PEER in run.tiers else NO,
            alone=not run.writable and run.segment.status != YES,
        )  # fmt: skip
        run.root.durable[value] = MAYBE
        run.in_flight.append(value)
        for tier in run.tiers:
            self._prune(run, self.saves[value], tier, certain=False)

    def _begin(self, run: Run, began: float) -> Segment:
        self._count += 1
        run.root.segments.append(Segment(number=self._count, run=run.number, base=run.base, began=began, status=NO))
        return run.root.segments[-1]

    def end_save(self, run: Run, value: int, *, taken: bool) -> None:
        """`save` has returned on all processes."""
        if taken:
            run.restored = False
            return
        run.in_flight.remove(value)
        del self.saves[value], run.root.durable[value]
        if run.segment is not None and run.segment.began == value:
            run.root.segments.remove(run.segment)
            run.segment = None

    def settled(self, run: Run, found: dict[int, Collection[str]]) -> None:
        """All saves are in their tiers: `found` has the tiers of each step, as the manager reports them."""
        for value in run.in_flight:
            save = self.saves[value]
            is_last = not any(self.saves[v].step == save.step for v in run.in_flight if v > value)
            tiers = found.get(save.step, ()) if is_last else ()
            run.root.durable[value] = YES if DURABLE in tiers else NO
            for tier in save.fast:
                save.fast[tier] = [YES if tier in tiers else MAYBE] * len(save.hosts)
            save.peer = YES if PEER in tiers and len(set(save.hosts)) > 1 else save.peer
            if run.segment and tiers and (DURABLE in tiers or not run.troubled):
                run.segment.status = YES
            for tier in tiers:
                self._prune(run, save, tier, certain=True)
        run.in_flight.clear()

    def ended(self, run: Run) -> None:
        """The run is over: a save that is perhaps in the root may have replaced older ones there."""
        for value in run.in_flight:
            self._prune(run, self.saves[value], DURABLE, certain=True)

    def deleted(self, run: Run, step: int, *, certain: bool) -> None:
        """The run has deleted a step."""
        found, durable = self.candidates(run), run.root.durable
        of_step = [(save, status) for save, status in found if save.step == step]
        for older in self.saves.values():  # on hosts that are away: the deleted one had replaced it
            if older.step == step and any(older.value < save.value for save, _ in of_step):
                is_sure = certain and any(older.value < save.value for save, status in of_step if status == YES)
                mark = YES if is_sure else MAYBE
                run.root.deleted[older.value] = max(mark, run.root.deleted.get(older.value, NO))
        for save, status in of_step:
            run.root.deleted[save.value] = YES if certain else MAYBE
            durable[save.value] = min(NO if certain else MAYBE, durable.get(save.value, NO))
            run.restored &= save.value != run.base
            self._may_have_replaced(save)
            self._weaken(save, run.tiers, run.hosts)
            for old, _ in found if status == MAYBE else ():  # it may have replaced them
                durable[old.value] = min(MAYBE, durable.get(old.value, NO))
                self._weaken(old, run.tiers, old.hosts)

    def _prune(self, run: Run, save: Save, tier: str, *, certain: bool) -> None:
        """A tier has taken a save: what is not among the newest there may be gone."""
        kept = run.keep.get(tier)
        if tier == DURABLE:
            held = [v for v, found in run.root.durable.items() if found and v <= save.value]
            on_branch = [v for v in sorted(held, reverse=True) if self._stands(self.saves[v], run.root)]
            for value in held if kept is not None and certain else ():
                if value not in on_branch[:kept]:
                    run.root.durable[value] = MAYBE
            return
        newest = 0
        for old in sorted(self.saves.values(), key=lambda each: -each.value):
            if old.value > save.value or old.place != save.place:
                continue
            alike = old.hosts == save.hosts and old.root == save.root and self._stands(old, run.root) > NO
            newest += alike and (old.peer if tier == PEER else min(old.fast.get(tier, [NO]))) > NO
            if (certain or not alike) and old is not save and not (alike and newest <= (kept or 1)):
                self._weaken(old, [tier], save.hosts)

    @staticmethod
    def _weaken(save: Save, tiers: Collection[str], hosts: Collection[str]) -> None:
        for tier in set(tiers) & set(save.fast):
            save.fast[tier] = [min(f, MAYBE) if host in hosts else f for host, f in save.shares(tier)]
        if PEER in tiers and set(hosts) & set(save.hosts):
            save.peer = min(save.peer, MAYBE)

    # Answers.

    def _known(self, save: Save, root: Root) -> int:
        """Whether the root knows of the run that made a save."""
        for segment in root.segments:
            if segment.number == save.segment and (segment.status or not save.alone):
                return segment.status
        if save.alone:
            later = [s for s in root.segments if s.began > save.value and s.run != save.run and s.status == YES]
            return MAYBE if all(segment.base >= save.value for segment in later) else NO
        return MAYBE if any(segment.run == save.run for segment in root.segments) else NO

    def _stands(self, save: Save, root: Root) -> int:
        """Whether a save is on the branch that the root continues."""
        if save.root != root.identity:
            return NO
        found = min(self._known(save, root), YES - root.deleted.get(save.value, NO))
        for segment in root.segments:
            for left in self._line(segment, root):
                if left.base < save.value < left.began:  # one that began from nothing did not know of it
                    is_sure = left.base and left.run == segment.run
                    found = min(found, YES - segment.status if is_sure else max(MAYBE, YES - segment.status))
        return found

    def _line(self, segment: Segment | None, root: Root) -> Iterator[Segment]:
        """A segment, and those that it continues. A root that knows of it knows what those of its run have abandoned;
        of another run, which could not record itself, perhaps."""
        while segment is not None:
            yield segment
            number = self.saves[int(segment.base)].segment if segment.base else None
            segment = next((each for each in root.segments if each.number == number), None)

    @staticmethod
    def _held(save: Save, run: Run) -> int:
        return max(save.held(run.hosts, run.tiers, run.place), run.root.durable.get(save.value, NO))

    def candidates(self, run: Run, *, durable_only: bool = False) -> list[tuple[Save, int]]:
        """The saves that a restart may give, newest first, and whether it has them for sure."""
        found = []
        for save in sorted(self.saves.values(), key=lambda each: -each.value):
            held = run.root.durable.get(save.value, NO) if durable_only else self._held(save, run)
            status = min(held, self._stands(save, run.root))
            found += [(save, status)] if status > NO else []
        return found

    def answers(self, run: Run, *, step: int | None = None, durable_only: bool = False) -> list[Save | None]:
        """The saves that a restore of the newest one, or of a step, may give; None: nothing."""
        allowed: list[Save | None] = []
        for save, status in self.candidates(run, durable_only=durable_only):
            if step in (None, save.step):
                allowed.append(save)
                if status == YES:
                    return allowed
        return [*allowed, None]

    def steps(self, run: Run) -> tuple[set[int], set[int]]:
        """The steps that `all_steps` must list, and those that it may list."""
        found = self.candidates(run)
        newest = {save.step: save for save, _ in reversed(found)}  # a step is listed once
        # Of the newest that may have replaced older ones:
        unsure = max((s.value for s in self.saves.values() if self._held(s, run) == MAYBE), default=0)
        must = set[int]()
        for save, status in found:
            if status == YES and save.value > unsure:
                alike = save.hosts == run.hosts and replace(save, sharded=True).held(run.hosts, run.tiers, run.place)
                if not must or alike == YES or run.root.durable.get(save.value) == YES:
                    must.add(save.step)  # on other hosts than it was saved on, only the newest is promised
        if run.restored:  # those after the restored one are about to be abandoned
            must = {step for step in must if newest[step].value <= run.base}
        return must, set(newest)

    def strangers(self, run: Run) -> tuple[bool, bool]:
        """Whether hosts of this run surely hold saves that it may not take: of another root, of runs that it does not
        know. A person is told of them at the start."""
        foreign = unknown = False
        for save in self.saves.values():
            shares = [share for tier in run.tiers for share in save.shares(tier)]
            if save.place == run.place and any(found == YES and host in run.hosts for host, found in shares):
                known = save.alone or self._known(save, run.root) > NO
                foreign |= save.root != run.root.identity
                unknown |= save.root == run.root.identity and not known
        return foreign, unknown

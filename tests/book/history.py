"""Histories of a training job, drawn from a seed: what befalls its root and its hosts, and what its runs do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

HOSTS = ("a", "b", "c", "d", "e")
TIER_SETS = (("ram",), ("ram",), ("ram", "ssd"), ("ram", "ssd"), ("ssd",), (), ("ram", "peer"), ("ram", "peer", "ssd"))
PLACES = ("root", "other")
COMMANDS = ("prune", "rollback", "rollback", "scrub", "tiers clean", "ckptkit copy")  # `ckptkit ...` between two runs

Event = tuple[Any, ...]  # its kind, then what it takes; see `World.apply`, and for those of a run `process.py`


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A job's settings and its events, in order. The last one is a run that only looks."""

    seed: int
    config: dict[str, Any]
    events: tuple[Event, ...]

    def without(self, number: int) -> History:
        """The history without one event."""
        return replace(self, events=self.events[:number] + self.events[number + 1 :])

    def smaller(self) -> list[History]:
        """Histories with one event, one act of a run, or one process less; the larger cuts come first."""
        found = [self.without(number) for number in range(len(self.events) - 1)]
        for number, (kind, *rest) in enumerate(self.events):
            if kind != "run":
                continue
            hosts, acts, end = rest
            runs = [(hosts, acts[:at] + acts[at + 1 :], end) for at in range(len(acts))]
            runs += [(hosts[:at] + hosts[at + 1 :], acts, end) for at in range(len(hosts)) if len(hosts) > 1]
            runs += [(hosts, acts, "close")] if end != "close" else []
            for run in runs:
                found.append(replace(self, events=(*self.events[:number], ("run", *run), *self.events[number + 1 :])))
        return found

    def lines(self) -> list[str]:
        """For a report: a line for each event."""
        shown = [f"settings: {self.config}"]
        for number, (kind, *rest) in enumerate(self.events):
            if kind == "run":
                acts = ", ".join(" ".join(map(str, act)) for act in rest[1]) or "only looks"
                shown.append(f"{number}. a run on {' '.join(rest[0])}: {acts}; {rest[2]}")
            else:
                shown.append(f"{number}. {kind} {' '.join(map(str, rest))}")
        return shown


def draw(seed: int, *, processes: int) -> History:
    """The history of a seed. `processes`: the most of a run."""
    rng = random.Random(f"{seed}/{processes}")
    tiers = rng.choice([each for each in TIER_SETS if processes > 1 or "peer" not in each])
    config = {
        "tiers": tiers,
        "every": {"ram": 1, "ssd": rng.choice((1, 2)), "durable": rng.choice((1, 2, 3, 1000)) if tiers else 1},
        "keep": {
            "ram": rng.choice((1, 1, 2, 3)),
            "ssd": rng.choice((1, 2)),
            "peer": 1,
            "durable": rng.choice((None, None, 1, 2)),
        },
        "sharded": rng.random() < 0.75,
    }
    events = _Drawing(rng, processes).events()
    return History(seed=seed, config=config, events=events)


class _Drawing:
    """The hosts as they are, while a history is drawn."""

    def __init__(self, rng: random.Random, processes: int):
        self._rng, self._processes = rng, processes
        self._hosts = self._some_hosts()
        self._value = 0
        self._backups = 0

    def events(self) -> tuple[Event, ...]:
        """A few runs, with what happens between them."""
        if self._rng.random() < 0.2:
            return (*self._two_lives(), *self._last_look())
        events: list[Event] = []
        runs = self._rng.choice((1, 2, 2, 3, 3, 4))
        for number in range(runs):
            events.append(self._run())
            if number < runs - 1 or self._rng.random() < 0.6:
                events += self._between()
        return (*events, *self._last_look())

    def _last_look(self) -> list[Event]:
        return [("run", self._hosts, (("restore", None),), "close")]

    def _two_lives(self) -> list[Event]:
        """Two runs that do not know of each other, on other hosts each; then one on hosts of both, or of the first."""
        rng = self._rng
        kind = rng.choice(("removed", "put back", "unrecorded", "unrecorded"))
        events = [self._run(), ("back up",)] if kind == "put back" else []
        first = self._hosts
        events.append(self._run(unrecorded=kind == "unrecorded"))
        events += {"removed": [("remove",)], "put back": [("put back", 0)]}.get(kind, [])
        free = [host for host in HOSTS if host not in first]
        self._hosts = tuple(rng.sample(free, min(len(free), len(first))))
        second = self._hosts
        events.append(self._run())
        if rng.random() < 0.3:
            events += self._between()
        halves = [rng.choice(pair) for pair in zip(first, second, strict=False)]
        self._hosts = first if rng.random() < 0.3 else tuple(dict.fromkeys(halves))
        return events

    def _some_hosts(self) -> tuple[str, ...]:
        count = self._rng.randint(1, self._processes)
        if self._rng.random() < 0.3:  # several processes of a host
            return tuple(sorted(self._rng.choice(HOSTS[:2]) for _ in range(count)))
        return tuple(self._rng.sample(HOSTS, count))

    def _between(self) -> list[Event]:
        rng, found = self._rng, list[Event]()
        for _ in range(rng.choice((0, 1, 1, 2))):
            kind = rng.choice((*("remove", "back up", "put back") * 2, "copy", "reboot", "replace", "move", *COMMANDS))
            if kind == "back up":
                self._backups += 1
                found.append((kind,))
            elif kind == "put back":
                found.append((kind, rng.randrange(max(1, self._backups))))
            elif kind in ("reboot", "replace", "tiers clean"):
                found.append((kind, rng.choice(HOSTS[:3] if rng.random() < 0.5 else self._hosts)))
            elif kind in ("prune", "rollback"):
                found.append((kind, rng.randrange(1, 3)))
            else:
                found.append((kind,))
        self._change_hosts()
        return found

    def _change_hosts(self) -> None:
        rng, hosts = self._rng, list(self._hosts)
        match rng.choice(("same", "same", "swap", "swap", "order", "other", "fewer")):
            case "swap":  # a spare takes the place of a host, or one that was there before comes back
                free = [host for host in HOSTS if host not in hosts]
                if free:
                    hosts[rng.randrange(len(hosts))] = rng.choice(free)
            case "order":
                rng.shuffle(hosts)
            case "other":
                hosts = list(self._some_hosts())
            case "fewer" if len(hosts) > 1:
                hosts.pop(rng.randrange(len(hosts)))
        self._hosts = tuple(hosts)

    def _run(self, *, unrecorded: bool = False) -> Event:
        rng, acts = self._rng, list[Event]()
        if rng.random() < 0.1:
            acts.append(("clock", rng.choice((-7200.0, -3600.0, 3600.0, 1e6))))
        if rng.random() < 0.93:
            acts.append(("restore", None if rng.random() < 0.9 else rng.randrange(3)))
        if unrecorded or rng.random() < 0.1:  # until its first save is made
            acts += [("read only",), self._save("next", rng.random() < 0.2), ("settle",)]
            acts += [("writable",)] if rng.random() < 0.3 else []
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
            acts += self._acts()
        return ("run", self._hosts, tuple(acts), self._end(acts))

    def _acts(self) -> Sequence[Event]:
        rng, some = self._rng, self._rng.randrange(4)
        settle = [("settle",)] if rng.random() < 0.75 else []
        match rng.choice(
            ("save",) * 9 + ("lower",) * 2 + ("again", "delete", "resave", "back", "newest", "io", "copy")
        ):
            case "save":
                return [self._save("next", rng.random() < 0.2), *settle]
            case "lower":
                return [self._save("lower", True), *settle]
            case "again":
                return [("settle",), self._save("again", True), *settle]
            case "delete":
                return [("settle",), ("delete", some)]
            case "resave":
                return [("settle",), ("delete", some), self._save("deleted", True), *settle]
            case "back":
                return [("settle",), ("restore", some), self._save("next", rng.random() < 0.5), *settle]
            case "newest":
                return [("settle",), ("restore", None)]
            case "copy":
                self._backups += 1
                return [("settle",), ("back up",)]
            case _:
                return [("settle",), (rng.choice(("read only", "writable", "slow")),)]

    def _save(self, which: str, force: bool) -> Event:
        self._value += 1
        return ("save", which, force, self._value)

    def _end(self, acts: list[Event]) -> str:
        rng = self._rng
        if rng.random() < 0.6 or not acts:
            if acts and rng.random() < 0.9:
                acts.append(("settle",))
            return "close"
        victim = rng.randrange(len(self._hosts))
        if rng.random() < 0.3:
            return "killed at the end"
        acts.insert(rng.randrange(len(acts)), ("kill", victim, rng.randint(1, 12)))
        return "killed"

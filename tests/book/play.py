"""Plays a history with real processes, and compares each answer with the book."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tests.book.book import DURABLE, PEER, RAM, Book, Disagreement, Run
from tests.book.history import Event, History
from tests.book.jobs import Jobs
from tests.book.world import World, can_mount

Answers = list[list[dict[str, Any]]]  # of each process


def play(history: History, jobs: Jobs) -> str | None:
    """The first answer of the library that the book does not allow, or None."""
    writes = any(act[0] == "read only" for kind, *rest in history.events if kind == "run" for act in rest[1])
    world, book = World(mounted=writes and can_mount()), Book()
    try:
        for number, event in enumerate(history.events):
            try:
                if event[0] == "run":
                    _RunCheck(history, event, world, book, jobs).work()
                else:
                    world.apply(event, book)
            except Disagreement as found:
                return f"event {number}: {found}"
        return None
    finally:
        world.close()


@dataclass(slots=True)
class _Told:
    """The reports of the processes about one act."""

    begun: list[dict[str, Any]] = field(default_factory=list)  # what they told before they did it
    results: list[Any] = field(default_factory=list)


class _RunCheck:
    """One run: its orders, and the comparison of its answers."""

    def __init__(self, history: History, event: Event, world: World, book: Book, jobs: Jobs):
        self._config, self._world, self._book = history.config, world, book
        _, self._hosts, self._acts, self._end = event
        self._job = jobs.of(len(self._hosts))
        self._troubled = False  # a save may fail
        self._asked = 0  # the highest step of this run

    def work(self) -> None:
        """Raises `Disagreement`."""
        world, book = self._world, self._book
        (world.top / "backups").mkdir(exist_ok=True)
        order = {"acts": self._acts, "end": self._end, "backup": world.backups}
        answers, how = self._job.run([world.order(self._config, host) | order for host in self._hosts])
        world.make_writable()
        run = book.open(world.place, self._hosts, self._config)
        if how == "hung":
            raise Disagreement(f"the run hangs; the last answers are {[each[-1:] for each in answers]}")
        opened = [next((each for each in told if "opened" in each), None) for told in answers]
        _check_mixed(answers)
        if all(opened):
            self._check_start(run, opened)
            self._check_acts(run, answers)
            book.ended(run)
        failures = [each for told in answers for each in told if "failed" in each]
        if how == "failed" and (self._end == "close" or "UNAVAILABLE" not in failures[0]["failed"]):
            # Where one process is killed, others may raise that it is missing before they are killed too.
            raise Disagreement(f"{failures[0]['failed']}\n{failures[0]['trace']}")
        if how == "closed":
            self._check_outside(run, answers[0][-1]["outside"])

    def _check_start(self, run: Run, opened: list[Any]) -> None:
        views = [each["opened"] for each in opened]
        self._check_view(run, views, "at the start")
        latest = views[0]["latest"]
        run.base = next((save.value for save in self._book.answers(run) if save and save.step == latest), 0)
        lines = [text for each in opened for level, text in each["lines"] if level >= logging.WARNING]
        for is_held, what, word in zip(
            self._book.strangers(run),
            ("another root", "a run that the root does not know"),
            ("another root", "does not know"),
            strict=True,
        ):
            if is_held and not any(word in line for line in lines):
                raise Disagreement(f"no warning that the hosts hold saves of {what}; the warnings are {lines}")

    def _check_acts(self, run: Run, answers: Answers) -> None:
        acts = [act for act in self._acts if act[0] not in ("clock", "kill")]
        for number, act in enumerate(acts):
            told = [_told(each, number, len(acts)) for each in answers]
            if not any(each.begun for each in told):
                return
            results = [each.results[0] for each in told if each.results]
            is_done = len(results) == len(answers)
            check = getattr(self, "_" + act[0].replace(" ", "_"), None)
            if check is not None:
                check(run, act, [each.begun for each in told], results, is_done)

    def _check_view(self, run: Run, views: list[dict[str, Any]], when: str) -> None:
        """`latest_step` and `all_steps` are the same on all processes, and in the book."""
        if any(view["latest"] != views[0]["latest"] or view["all"] != views[0]["all"] for view in views):
            raise Disagreement(f"{when} the processes differ: {views}")
        latest, steps = views[0]["latest"], views[0]["all"]
        allowed = {save.step if save else None for save in self._book.answers(run)}
        if run.restored and run.base:
            allowed = {self._book.saves[run.base].step}
        if latest not in allowed:
            raise Disagreement(f"{when} latest_step is {latest}, the book has {_words(allowed)}")
        must, may = self._book.steps(run)
        if len(set(steps)) < len(steps) or not must <= set(steps) <= may:
            raise Disagreement(f"{when} all_steps is {steps}, the book has {sorted(must)} and perhaps {sorted(may)}")

    def _check_outside(self, run: Run, latest: int | None) -> None:
        allowed = {save.step if save else None for save in self._book.answers(run, durable_only=True)}
        if latest not in allowed:
            raise Disagreement(f"ckptkit.latest_step of the root is {latest}, the book has {_words(allowed)}")

    # Acts of a run.

    def _restore(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act, begun
        if not is_done or results[0].get("nothing"):
            return
        values = sorted({value for each in results for value in each["values"]})
        step = results[0]["step"]
        allowed = self._book.answers(run, step=step)
        if values[0] not in [save.value for save in allowed if save]:
            shown = ", ".join(f"{save.value} (step {save.step})" if save else "nothing" for save in allowed)
            raise Disagreement(f"restore({step}) gives value {values[0]:g}, the book has {shown}")
        self._book.restored(run, int(values[0]))
        expected = self._book.saves[int(values[0])].step
        if any(each["latest"] != expected for each in results):
            raise Disagreement(
                f"after restore({step}) latest_step is {[each['latest'] for each in results]}, not {expected}"
            )

    def _save(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        _, _, force, value = act
        steps = {each["saving"] for told in begun for each in told if "saving" in each}
        if not steps:
            return
        if len(steps) > 1:
            raise Disagreement(f"the processes save different steps: {steps}")
        is_settled = not run.in_flight
        self._book.begin_save(run, value, steps.pop())
        if not is_done:
            return
        if len({each["taken"] for each in results}) > 1:
            raise Disagreement(f"save is taken on some processes only: {results}")
        told = results[0]
        self._book.end_save(run, value, taken=told["taken"])
        is_due = force or ((RAM in run.tiers or not run.tiers) and told["step"] > max(told["latest"] or 0, self._asked))
        self._asked = max(self._asked, told["step"])  # a skipped step is not taken again, unless it is forced
        if is_due and is_settled and not told["taken"] and not told["existed"] and not self._troubled:
            raise Disagreement(f"save({told['step']}) is not taken: {told['error']}")

    def _settle(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act, begun
        if not is_done:
            return
        alike = [_without_copies(each["found"]) for each in results]
        if any(each != alike[0] for each in alike):
            raise Disagreement(f"the records of the processes differ: {alike}")
        saved = {self._book.saves[value].step for value in run.in_flight}
        found = {int(step): tiers for step, tiers in results[0]["found"].items()}
        self._book.settled(run, found)
        if self._troubled:
            return
        if results[0]["error"]:
            raise Disagreement(f"wait_until_finished raised {results[0]['error']}")
        first = (
            RAM if RAM in run.tiers else DURABLE if not run.tiers else None
        )  # it takes each save that is not skipped
        if saved and first and not any(first in found.get(step, ()) for step in saved):
            raise Disagreement(f"steps {saved} were saved, and the tiers hold {found}")
        self._check_view(run, results, "after the last save")

    def _delete(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act
        steps = {each["deleting"] for told in begun for each in told if "deleting" in each}
        if len(steps) > 1:
            raise Disagreement(f"the processes delete different steps: {steps}")
        is_done &= not any(each and "error" in each for each in results)
        if steps:
            self._book.deleted(run, steps.pop(), certain=is_done)
            if is_done and not self._troubled and not run.in_flight:
                self._check_view(run, results, "after a deletion")

    def _back_up(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act, begun, results
        if is_done:
            self._world.backed_up(self._book)
        else:
            shutil.rmtree(self._world.backup(self._world.backups), ignore_errors=True)

    def _read_only(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act, begun, is_done
        if results and results[0]:
            run.writable, run.troubled, self._troubled = False, True, True

    def _writable(self, run: Run, act: Event, begun: Any, results: list[Any], is_done: bool) -> None:
        del act, begun, results, is_done
        run.writable = True


def _check_mixed(answers: Answers) -> None:
    """No restore joins parts of two saves: this comes first, as it is the worst that can be found."""
    restores = [
        [each["result"]["values"] for each in told if each.get("ends") == ["restore"] and "values" in each["result"]]
        for told in answers
    ]
    for found in zip(*restores, strict=False):
        if len({value for values in found for value in values}) > 1:
            raise Disagreement(f"a restore has mixed the values {found}")


def _told(answers: list[dict[str, Any]], number: int, count: int) -> _Told:
    """The report of one process about act `number`."""
    del count
    found, at = _Told(), -1
    for each in answers:
        if "begins" in each:
            at += 1
        if at == number and "ends" in each:
            found.results.append(each["result"])
        elif at == number and "closed" not in each and "failed" not in each:
            found.begun.append(each)
    return found


def _without_copies(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Records without `peer`: each process knows only of the copies that it keeps itself."""
    tiers = {step: [tier for tier in each if tier != PEER] for step, each in found.items()}
    return {step: each for step, each in tiers.items() if each}


def _words(steps: Collection[int | None]) -> str:
    return " or ".join("none" if step is None else str(step) for step in sorted(steps, key=lambda each: each or 0))

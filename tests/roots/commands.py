"""The actions that run over every root: the commands of `ckptkit` that take a path, and a job's manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tests.roots.catalog import KINDS

Deletes = Literal["nothing", "prune", "repair", "rollback", "save keep 1"]
Reads = Literal["nothing", "arrays", "step", "root"]
SAVED_STEP: Final = 9000
KEPT: Final = 4  # by a restart: the steps of a run and one more


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places that a command is given: `out` is where it may write, `other` another root."""

    root: str
    subject: str
    number: int
    first: int
    out: str
    other: str
    kind: str

    def filled(self, argument: str) -> str:
        """An argument with its places put in."""
        return argument.format(
            root=self.root, step=self.subject, number=self.number, first=self.first, out=self.out, other=self.other
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One command line, one use of a manager (`call`, which returns what it restored), or the one and then the other.

    `changes`: whether it may change a byte. `deletes`: what the user asks it to delete. `reads`: of what exit code 0
    claims that it is good: a checkpoint, its arrays alone, or every step of the root. `fills`: it writes to `out`.
    `restores`: the manager restores the newest step.
    """

    name: str
    arguments: tuple[str, ...] = ()
    call: Callable[[Places], Any] | None = None
    changes: bool = False
    deletes: Deletes = "nothing"
    reads: Reads = "nothing"
    fills: bool = False
    restores: bool = False

    @property
    def saves(self) -> bool:
        """Whether a job saves."""
        return "save" in self.name or self.name.endswith("restart")


def _command(line: str, **facts: Any) -> Action:
    return Action(name=line.replace("{", "").replace("}", ""), arguments=tuple(line.split()), **facts)


def _both(line: str, **facts: Any) -> list[Action]:
    """For real, and with `--dry-run`, which changes nothing and claims nothing."""
    return [_command(line, changes=True, **facts), _command(f"{line} --dry-run")]


_LOOKS: Final = [
    _command("inspect {root}"),
    _command("inspect {step}"),
    _command("inspect {step} --json"),
    _command("inspect {root} --stats"),
    _command("inspect {step} --stats", reads="arrays"),
    _command("steps {root}"),
    _command("steps {root} --json"),
    _command("steps {root} --tier {root}"),
    _command("plan-restore {root}"),
    _command("plan-restore {root} --like {step}"),
    _command("verify {root} --json", reads="root"),
    _command("verify {step} --json", reads="step"),
    _command("scrub {root} --json", reads="root"),
    _command("du {root}"),
    _command("du {root} --deep --json"),
    _command("du {root} --keep newest=1"),
    _command("doctor {root}"),
    _command("explain {root} --like {step}"),
    _command("diff {step} {step}", reads="arrays"),
    _command("diff {step} {other}/50 --json", reads="arrays"),
    _command("tiers list {root}"),
    _command("goodput {root}"),
    _command("tune {root} --probe 64KiB --rounds 1 --dry-run"),
]
_UPKEEP: Final = [
    *_both("scrub {root} --repair", deletes="repair", reads="root"),
    *_both("prune {root} --keep newest=1", deletes="prune"),
    *_both("prune {root} --keep newest=1 --unread", deletes="prune"),
    *_both("prune {root} --keep bytes=1", deletes="prune"),
    *_both("prune {root} --keep every=1000 --json", deletes="prune"),
    *_both("rollback {root} --to {first}"),
    *_both("rollback {root} --to {number}", reads="step"),
    *_both("pin {root} {number} --reason test"),
    *_both("unpin {root} {number}"),
    *_both("tiers clean {root} --idle 0s"),
    *_both("copy {root} {out}", reads="root"),
    *_both("copy {step} {out}", reads="step"),
    *_both("copy {other} {root}"),
    *_both("copy {other}/50 {root}"),
]
_WRITING: Final = [
    *_both("convert {step} {out}/dst --to orbax", reads="arrays", fills=True),
    *_both("convert {step} {out}/dst --to npz", reads="arrays", fills=True),
    _command("convert {step} {out}/dst --to safetensors", changes=True, reads="arrays", fills=True),
    _command("convert {step} {out}/dst --to hf", changes=True, reads="arrays", fills=True),
    _command("convert {step} {out}/dst --to torch", changes=True, reads="arrays", fills=True),
    _command("convert {root} {out}/dst --to npz --resume", changes=True, fills=True),
    *_both("extract {step} {out}/dst --only ** --to npz", reads="arrays", fills=True),
    *_both("merge {step} {step} {out}/dst --average --to npz", reads="arrays", fills=True),
    *_both("reshard {step} {out}/dst --mesh x=2", reads="arrays", fills=True),
    *_both("convert {other}/50 {root}/4000 --to orbax"),
    *_both("convert {other}/50 {root} --to orbax"),
    *_both("reshard {other}/50 {root}/4000 --mesh x=2"),
]


def _manager(places: Places, **options: Any) -> Any:
    return KINDS[places.kind].open(places.root, "ckptkit", **options)


def _constructed(places: Places) -> None:
    with _manager(places) as manager:
        manager.all_steps()
        manager.latest_step()


def _read_only(places: Places) -> None:
    with _manager(places, read_only=True) as manager:
        manager.all_steps()
        for step in manager.all_steps():
            manager.item_metadata(step)


def _restored(places: Places) -> Any:
    with _manager(places) as manager:
        return manager.restore(None)


def _saved(places: Places, **options: Any) -> None:
    with _manager(places, **options) as manager:
        manager.save(SAVED_STEP, args=KINDS[places.kind].arguments(SAVED_STEP))
        manager.wait_until_finished()


def _continued(places: Places) -> None:
    """A restart as trainers write it: restore what is newest, then save."""
    with _manager(places) as manager:
        if manager.latest_step() is not None:
            manager.restore(None)
        manager.save(SAVED_STEP, args=KINDS[places.kind].arguments(SAVED_STEP))
        manager.wait_until_finished()


def _v1_opened(places: Places) -> None:
    import ckptkit.v1

    with ckptkit.v1.training.Checkpointer(places.root) as checkpointer:
        _ = [each.step for each in checkpointer.checkpoints]


_MANAGERS: Final = [
    Action(name="manager: open and close", call=_constructed, changes=True),
    Action(name="manager: read_only", call=_read_only),
    Action(name="manager: restore(None)", call=_restored, changes=True, restores=True),
    Action(name="manager: save", call=_saved, changes=True),
    Action(name="manager: restore(None), save", call=_continued, changes=True),
    Action(
        name="manager: save, max_to_keep=1",
        call=lambda places: _saved(places, max_to_keep=1),
        changes=True,
        deletes="save keep 1",
    ),
    Action(
        name="manager: save, max_to_keep=1, cleanup_tmp_directories",
        call=lambda places: _saved(places, max_to_keep=1, cleanup_tmp_directories=True),
        changes=True,
        deletes="save keep 1",
    ),
    Action(name="v1: open and close", call=_v1_opened, changes=True),
]


def _then(line: str, call: Callable[[Places], Any], **facts: Any) -> Action:
    """A command, and then a restart of the job: a command may leave what does its harm later."""
    return replace(_command(line, changes=True, **facts), name=f"{_command(line).name}, then restart", call=call)


def _restarted(places: Places) -> Any:
    """A restart: restore what is newest, save, and keep the newest four."""
    with _manager(places, max_to_keep=KEPT) as manager:
        value = manager.restore(None)
        manager.save(SAVED_STEP, args=KINDS[places.kind].arguments(SAVED_STEP))
        manager.wait_until_finished()
        return value


_INTO_NEXT: Final = (
    "copy {other} {next}",
    "copy {other}/50 {next}",
    "convert {step} {next} --to npz",
    "convert {step} {next} --to hf",
    "extract {step} {next} --only ** --to npz",
    "merge {step} {step} {next} --average --to npz",
)
_SEQUENCES: Final = [
    _then("copy {other}/50 {root}", _restarted, restores=True),
    _then("copy {other} {root}", _restarted, restores=True),
    _then("reshard {other}/50 {root}/50 --mesh x=2", _restarted, restores=True),
    _then("convert {other}/50 {root}/4000 --to orbax", _restarted, restores=True),
    _then("scrub {root} --repair", _restarted, deletes="repair"),
    _then("prune {root} --keep newest=1", _restarted, deletes="prune"),
    _then("rollback {root} --to {first}", _restarted, deletes="rollback"),
    # Into the place of the step that the job saves next: whatever is made there, the job goes on.
    *(_then(line.replace("{next}", f"{{root}}/{SAVED_STEP}"), _restarted, restores=True) for line in _INTO_NEXT),
]

_EVERY: Final = (*_LOOKS, *_UPKEEP, *_WRITING, *_MANAGERS, *_SEQUENCES)
ACTIONS: Final[dict[str, Action]] = {each.name: each for each in _EVERY}

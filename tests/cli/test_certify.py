"""`ckptkit certify`: a program's replay from the command line, and what it leaves in the root."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.guard import Certificate, NewSave, ReplayPlan
from tests.cli.conftest import Run

HERE = "tests.cli.test_certify"


@jax.jit
def take_step(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
    return {"w": state["w"] * 0.99 + batch}


def batches(step: int, restored: Any = None) -> Iterator[jax.Array]:
    return (jnp.full(4, float(number)) for number in itertools.count(step))


def plan(words: Sequence[str]) -> ReplayPlan:
    """The plan of the program that `root` ran; an argument is another decay."""
    decay = float(words[0]) if words else None
    return ReplayPlan(
        make_step=lambda: take_step if decay is None else lambda state, batch: {"w": state["w"] * decay + batch},
        make_batches=batches,
        state_of=lambda restored: restored,
    )


def no_plan(words: Sequence[str]) -> int:
    return len(words)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path)


def make_root(home: Path) -> Path:
    """A run that `plan` replays."""
    state, data = {"w": jnp.zeros(4)}, batches(0)
    with ckptkit.CheckpointManager(home / "run") as manager:
        for step in range(1, 10):
            state = take_step(state, next(data))
            if step % 3 == 0:
                manager.save(step, args=ocp.args.StandardSave(state))
    return home / "run"


def certified(root: Path) -> list[int]:
    return [entry.step for entry in ckptkit.list_steps(str(root), host_id="").steps if entry.certified]


def test_certified_saves_are_recorded_and_listed(ckpt: Run, root: Path) -> None:
    """A person would not know which saves a replay came to."""
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--dry-run")
    assert (said.code, certified(root)) == (0, [])
    assert said.out.splitlines()[1] == "  would be certified: 9"
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--first", "3", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out) == {
        "format": "ckptkit.certify/1",
        "root": str(root),
        "replayed_from": 3,
        "steps_replayed": 6,
        "certified": [6, 9],
        "recorded": True,
        "difference": None,
    }
    assert certified(root) == [6, 9]
    for path, shown in {root: True, root / "6": True, root / "6" / "default": True, root / "3": False}.items():
        assert ("  certified: a replay came to these bits" in ckpt("inspect", path).out) == shown, path
        assert json.loads(ckpt("inspect", path, "--json").out)["origin"]["certified"] == shown, path
    shutil.copytree(root / "6", root.parent / "alone")
    assert json.loads(ckpt("inspect", root.parent / "alone", "--json").out)["origin"]["certified"] is None
    rows = [line.split()[:3] for line in ckpt("steps", root).out.splitlines() if "committed" in line]
    assert rows == [["3", "committed", rows[0][2]], ["6", "committed,", "certified"], ["9", "committed,", "certified"]]


def test_difference_has_a_code_and_its_place(ckpt: Run, root: Path) -> None:
    """A script would take a spoiled run for a sound one."""
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--first", "3", "--", "0.98")
    assert said.code == 20
    assert "certified: none" in said.out
    assert "the steps from save 3 to save 6 differ from their replay: leaves w" in said.err
    assert certified(root) == []


def test_what_cannot_be_replayed_is_named(ckpt: Run, root: Path, tmp_path: Path) -> None:
    """A person would get a traceback for a misspelt word."""
    for program, why in {
        "train": "write MODULE:FUNCTION, like train:replay_plan",
        "no_such_module:plan": "No module named",
        f"{HERE}:nothing": "has no attribute",
        f"{HERE}:no_plan": "it returned a int, no ckptkit.guard.ReplayPlan",
    }.items():
        said = ckpt("certify", root, "--replay", program)
        assert (said.code, why in " ".join(said.err.split())) == (2, True), said.err
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--first", "4")
    assert (said.code, "has no committed step 4 (--first); it has [3, 6, 9]" in said.err) == (10, True), said.err
    (tmp_path / "empty").mkdir()
    assert ckpt("certify", tmp_path / "empty", "--replay", f"{HERE}:plan").code == 10


def test_watch_reports_what_it_covered(ckpt: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person would take a run for certified of which the spare host has replayed a tenth."""
    monkeypatch.setattr("ckptkit.guard.certify_command._POLL_S", 0.01)
    first = NewSave(step=3, reason="the first save")
    last = NewSave(step=9, certificate=Certificate(steps=(6, 9), steps_replayed=3))
    saves = [first, NewSave(step=6, reason="3 steps after save 3, and 2 are the most"), last]
    monkeypatch.setattr("ckptkit.guard.certify_command.replay_new", lambda *_, **__: iter(saves))
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--watch", "2")
    assert said.code == 0
    assert said.out.splitlines() == [
        "save 3: the replay begins here (the first save)",
        "save 6: the replay begins here (3 steps after save 3, and 2 are the most)",
        "save 9: 3 steps replayed, certified",
        f"{root}: 3 of 6 steps replayed (50%)",
    ]


def test_watch_leaves_damaged_saves_out_and_reports_them(
    ckpt: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged save would be called a beginning, with exit code 0."""
    first, damaged = NewSave(step=3, reason="the first save"), NewSave(step=6, reason="cell 7 differs", damaged=True)
    monkeypatch.setattr("ckptkit.guard.certify_command.replay_new", lambda *_, **__: iter([damaged, first, damaged]))
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--watch", "2")
    assert (said.code, said.out.splitlines()[0]) == (11, "save 6: left out (cell 7 differs)")
    assert "damaged: save 6: cell 7 differs" in said.err

    def interrupted(*_: object, **__: object) -> Iterator[NewSave]:
        yield first
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptkit.guard.certify_command.replay_new", interrupted)
    said = ckpt("certify", root, "--replay", f"{HERE}:plan", "--watch", "2", "--json")
    assert (said.code, json.loads(said.out)["replayed_from"]) == (130, 3)


def test_watch_ends_without_new_saves(ckpt: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that waits for the end of a job would wait without end, or read another form of JSON."""
    monkeypatch.setattr("ckptkit.guard.certify_command._POLL_S", 0.01)
    watch = ("certify", root, "--replay", f"{HERE}:plan", "--watch", "3")
    said = ckpt(*watch, "--idle-timeout", "0.1", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out) == {
        "format": "ckptkit.certify/1",
        "root": str(root),
        "replayed_from": 9,
        "steps_replayed": 0,
        "certified": [],
        "recorded": True,
        "difference": None,
        "not_replayed": {"9": "the first save"},
    }
    said = ckpt(*watch, "--first", "3")
    assert (said.code, "--watch begins at the newest save" in said.err) == (2, True)
    said = ckpt(*watch[:4], "--idle-timeout", "3")
    assert (said.code, "--idle-timeout belongs to --watch" in said.err) == (2, True)

"""Checkpoints to look at, written once by ckptkit and by stock Orbax; tests that damage one take a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from tests.states import make_state, save_args

HOST = "h0"


@dataclass(frozen=True, slots=True)
class Said:
    """The result of one run of the command."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; an internal error or a traceback fails the test, whatever it asserts."""

    def run(*arguments: object) -> Said:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "internal error" not in said.err, said.err
        assert "Traceback" not in said.err
        assert (said.err == "") == (code == 0), (code, said.err)
        return Said(code, said.out, said.err)

    return run


@pytest.fixture
def ended_at(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the command and ends it, as Ctrl-C does, where it calls `name` of `owner`."""

    def run(owner: object, name: str, *arguments: object) -> None:
        def ends(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(owner, name, ends)
            assert ckpt(*arguments).code == 130

    return run


@dataclass(frozen=True, slots=True)
class Ours:
    """A root with steps 0 to 8 and a rollback to 4: durable 4 and 8; on the ramdisk 7 and 8, and 5 of after it."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "root"

    @property
    def ram(self) -> Path:
        return self.home / "ram"

    @property
    def slots(self) -> Path:
        (found,) = self.ram.glob(f"*/{HOST}/0")
        return found

    def manifest(self, step: int) -> Path:
        (found,) = self.slots.glob(f"step-{step:012d}-*.json")
        return found


def _manager(home: Path) -> ckptkit.CheckpointManager:
    options = ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2)
    tiers = [ckptkit.Tier.ram(str(home / "ram"))]
    return ckptkit.CheckpointManager(home / "root", options=options, tiers=tiers, host_id=HOST)


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """Not to be changed: see `mine`."""
    home = tmp_path_factory.mktemp("ours")
    with _manager(home) as manager:
        for step in range(9):
            manager.save(step, args=save_args(make_state(step), step))
            manager.wait_until_finished()
    with _manager(home) as manager:
        manager.restore(4)
        manager._pipeline.slots._worker.wait_idle(60.0)  # it leases the oldest slot while it looks at it
        manager.save(5, args=save_args(make_state(5), 5))
    return Ours(home)


@pytest.fixture
def mine(ours: Ours) -> Any:
    """`ours`, to be damaged: put back afterwards, because a ramdisk's job is named by the path of its root."""
    kept = ours.home.with_name(ours.home.name + "-kept")
    shutil.copytree(ours.home, kept)
    yield ours
    shutil.rmtree(ours.home)
    kept.rename(ours.home)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stock Orbax: `root` by its manager; `files` (no OCDBT) and `zarr3` by its Checkpointer, without a manager."""
    home = tmp_path_factory.mktemp("stock")
    state = make_state(3)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(home / "root", options=options) as manager:
        manager.save(3, args=save_args(state, 3), metrics={"loss": 0.5})
    plain = {name: leaf for name, leaf in state.items() if name not in ("key", "keys")}  # keys need OCDBT
    extra = {"text": "words", "nothing": None, "empty": {}}
    for name, handler, tree in (
        ("files", ocp.PyTreeCheckpointHandler(use_ocdbt=False), plain),
        ("zarr3", ocp.PyTreeCheckpointHandler(use_zarr3=True), state),
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(home / name, args=ocp.args.PyTreeSave({**tree, **extra}))  # pyright: ignore[reportCallIssue]
    jax.block_until_ready(state)
    return home

"""What a deletion takes first, and what it may never take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import ckptkit
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status


class Died(BaseException):
    """The process ends here."""


def make_manager(root: Path | str, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options), timeout_s=60)


def save(manager: ckptkit.CheckpointManager, step: int, value: int, make: Any = jnp.full) -> None:
    manager.save(step, args=ocp.args.StandardSave({"w": make(5, value)}))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: ckptkit.CheckpointManager) -> int:
    return int(manager.restore(None)["w"][0])


@pytest.mark.parametrize("make", [jnp.full, np.full], ids=["jax", "numpy"])
def test_a_step_that_takes_an_abandoned_number_is_kept(tmp_path: Path, make: Any) -> None:
    """Its own save would prune it, or a restart take it for the abandoned one: committed, and lost."""
    with make_manager(tmp_path, save_interval_steps=2, max_to_keep=2) as manager:
        for step in (2, 4, 6):
            save(manager, step, step, make)
    with make_manager(tmp_path, save_interval_steps=2, max_to_keep=2) as manager:
        manager.restore(4)
        save(manager, 6, 66, make)
        assert manager.all_steps() == [4, 6]
    with make_manager(tmp_path) as manager:
        assert restored(manager) == 66


@pytest.mark.parametrize("background", [False, True], ids=["in place", "background"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_deletion_that_dies_leaves_no_step_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """`latest_step` would name a step that is half gone, at every restart."""
    removed: list[str] = []

    def died(path: epath.Path, *_: Any, **__: Any) -> None:
        removed.append(path.name)
        raise Died

    with make_manager(tmp_path, enable_background_delete=background) as manager:
        save(manager, 1, 1)
        save(manager, 2, 2)
        for deleter in (manager._durable.stock.orbax, manager._durable._writer):
            inner: Any = deleter._checkpoint_deleter  # pyright: ignore[reportOptionalMemberAccess]
            inner = getattr(inner, "_standard_deleter", inner)
            monkeypatch.setattr(inner._path_deleter, "delete", died)
        try:
            manager.delete(2)
            manager.close()
        except Died:
            pass
        monkeypatch.undo()
    assert removed == ["2.orbax-checkpoint-tmp"]
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        assert restored(manager) == 1
        save(manager, 2, 22)
        assert restored(manager) == 22
        manager.delete(2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "_ckptkit") == ["1"]


def test_a_bucket_loses_the_mark_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a bucket, where a deletion is one request for each object."""
    with BucketServer(dir=tmp_path, buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        with make_manager("gs://runs/run") as manager:
            save(manager, 1, 1)
            save(manager, 2, 2)
            refused = Fault(effect=Status(code=403), kinds=(Kind.DELETE,), skip=1)
            server.faults = FaultPlan(faults=(refused,))
            with pytest.raises(Exception, match=r"(?i)forbidden|403|denied|permission"):
                manager.delete(2)
            server.faults = FaultPlan()
        with make_manager("gs://runs/run") as manager:
            assert manager.all_steps() == [1]
            assert restored(manager) == 1

"""`usage`: every byte of a root is counted once, and what nothing needs is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from ckptkit.durable.cells.writer import CellWriter, merge_processes, process_directory
from ckptkit.durable.lifecycle.leases import Lease
from ckptkit.errors import StepNotFoundError
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import pin, plan_rollback, rollback, usage
from ckptkit.verification import verify
from tests.upkeep.conftest import HOST, make_root, restored


def bytes_below(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_steps_are_sorted_by_number(tmp_path: Path) -> None:
    """A person would look for step 10 before step 9, and take the last line for the newest step."""
    make_root(tmp_path / "run", (2, 10))
    assert [each.step for each in usage(str(tmp_path / "run")).steps] == [2, 10]
    assert [each.step for each in verify(str(tmp_path / "run")).steps] == [2, 10]


def test_every_byte_is_counted_once(tmp_path: Path) -> None:
    """A quota would be reported as free, or full, that is not."""
    root, ram = tmp_path / "run", tmp_path / "ram"
    make_root(root, (1, 2, 3), ram=ram)
    rollback(plan_rollback(str(root), 2, host_id=HOST))
    pin(str(root), 1)
    (root / "9.orbax-checkpoint-tmp/state").mkdir(parents=True)
    (root / "9.orbax-checkpoint-tmp/state/x").write_bytes(bytes(1000))
    (root / "notes").mkdir()
    (root / "notes/a.txt").write_bytes(bytes(70))
    (root / "stray.bin").write_bytes(bytes(7))
    (root / paths.SIDECAR_DIR / "_quarantine/5").mkdir(parents=True)
    (root / paths.SIDECAR_DIR / "_quarantine/5/x").write_bytes(bytes(500))
    with Lease(open_store(root), 2, lease_s=60.0):
        found = usage(str(root), tiers=[str(ram)], host_id=HOST)
        assert found.stored_bytes == bytes_below(root)
    assert [(each.step, each.state, each.pinned, each.in_use) for each in found.steps] == [
        (1, "committed", True, False),
        (2, "committed", False, True),
        (3, "abandoned", False, False),
    ]
    for each in found.steps:
        assert each.stored_bytes == sum(each.items.values()) == sum(each.kinds.values())
        assert each.stored_bytes == bytes_below(root / str(each.step))
        sidecars = bytes_below(root / f"{each.step}/default/_ckptkit")
        assert each.kinds["digests"] == sidecars
        assert each.kinds["arrays"] == bytes_below(root / f"{each.step}/default/d")
    assert {(each.kind, Path(each.path).name): each.stored_bytes for each in found.dead} == {
        ("leftover", "9.orbax-checkpoint-tmp"): 1000,
        ("stray", "notes"): 70,
        ("stray", "stray.bin"): 7,
        ("quarantine", "_quarantine"): 500,
        ("abandoned", "3"): bytes_below(root / "3"),
    }
    (arena,) = found.arenas
    assert (len(arena.saves), arena.live) == (3, False)


def test_checkpoints_that_are_not_of_the_run_are_not_dead_weight(tmp_path: Path) -> None:
    """A person would delete the best checkpoint of a run, because `du` called it the leftover of a save."""
    root = tmp_path / "run"
    make_root(root, (100, 200))
    make_root(tmp_path / "other", (100,))
    shutil.copytree(tmp_path / "other/100", root / "best_100")
    shutil.copytree(tmp_path / "other/100/default", root / "params_7")
    shutil.copytree(tmp_path / "other", root / "eval_1")
    (root / "data_2024").mkdir()
    (root / "data_2024/a.csv").write_bytes(bytes(90))
    (root / "latest_200").symlink_to(root / "200")
    (root / "300.orbax-checkpoint-tmp").mkdir()
    found = usage(str(root), host_id=HOST)
    assert found.stored_bytes == sum(bytes_below(each) for each in root.iterdir() if not each.is_symlink())
    names = ("best_100", "data_2024", "eval_1", "params_7")
    assert found.others == {**{f"{root}/{name}": bytes_below(root / name) for name in names}, f"{root}/latest_200": 0}
    assert [(each.kind, Path(each.path).name) for each in found.dead] == [("leftover", "300.orbax-checkpoint-tmp")]


def test_unreferenced_files_are_reported(tmp_path: Path) -> None:
    """A database that was written in several commits would keep what nobody reads, unseen."""
    root = tmp_path / "run"
    make_root(root, (1, 2))
    assert usage(str(root), host_id=HOST, deep=True).dead == (), "what is written once has none"
    database = ts.KvStore.open(f"file://{root}/1/default/|ocdbt:").result()
    for value in (bytes(5000), bytes(9000)):
        database.write("extra", np.frombuffer(value, np.uint8).tobytes()).result()
    assert usage(str(root), host_id=HOST).dead == ()
    dead = usage(str(root), host_id=HOST, deep=True).dead
    assert {each.kind for each in dead} == {"unreferenced"}
    assert sum(each.stored_bytes for each in dead) > 5000
    for each in dead:
        Path(each.path).unlink()
    assert database.read("extra").result().value == bytes(9000)
    assert restored(root, 1) == (1, 1)


def test_values_of_several_processes_are_not_dead(tmp_path: Path) -> None:
    """Files of a job's processes are referred to from the merged database, and would be called dead."""
    base, profile = tmp_path / "run/1/default", DurableProfile()
    for process in range(2):
        part = process_directory(str(base), process)
        os.makedirs(part)
        leaf = LeafRecord(path=(f"w{process}",), keys="d", kind="numpy", shape=(3000,), dtype="uint8", cell=(3000,))
        writer = CellWriter(part, profile)
        writer.add(leaf, [(Box.whole((3000,)), np.arange(3000).astype(np.uint8))], describe=True)
        writer.commit()
    merge_processes(str(base), 2, profile)
    dead = usage(str(tmp_path / "run"), host_id=HOST, deep=True).dead
    values = [each for each in base.glob("ocdbt.process_*/d/*") if each.stat().st_size > 2500]
    assert len(values) == 2
    assert not {str(each) for each in values} & {each.path for each in dead}


def test_damaged_database_is_reported_and_missing_root_raises(tmp_path: Path) -> None:
    """A damaged database would end the count, or a missing root look empty."""
    root = tmp_path / "run"
    make_root(root, (1, 2))
    (root / "1/default/manifest.ocdbt").write_bytes(b"no")
    found = usage(str(root), host_id=HOST, deep=True)
    assert len(found.problems) == 1
    assert "its database cannot be read" in found.problems[0]
    assert len(found.steps) == 2
    with pytest.raises(StepNotFoundError, match="no such root"):
        usage(str(tmp_path / "none"), host_id=HOST)
    (tmp_path / "empty").mkdir()
    assert usage(str(tmp_path / "empty"), host_id=HOST).stored_bytes == 0


def test_usage_of_a_bucket_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Billed bytes would not be counted."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["upkeep"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        make_root("gs://upkeep/run", (1, 2))
        make_root(tmp_path / "run", (1, 2))
        found = usage("gs://upkeep/run", host_id=HOST, deep=True)
        local = usage(str(tmp_path / "run"), host_id=HOST)
        assert found.dead == ()
        assert [each.kinds["arrays"] for each in found.steps] == [each.kinds["arrays"] for each in local.steps]

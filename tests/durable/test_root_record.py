"""The id of a root, and which saves of fast tiers are of its runs."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.root_record import RootRecord, make_root_record, read_root_record
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId, new_id
from ckptkit.store import MemoryStore, open_store

args: Any = ocp.args
ROOT, R1, R2, R3 = (letter * 16 for letter in "abcd")


def opened(store: Any) -> RootRecord:
    records = EpochRecords(store)
    return records.root_record(records.read(), create=True)


def test_root_gets_one_id() -> None:
    """Two runs that open a new root at once would have slots of two roots."""
    store = MemoryStore()
    first = opened(store)
    assert len(first.id) == 16
    assert not first.earlier
    assert opened(store) == make_root_record(store, earlier=False) == read_root_record(store) == first
    assert opened(MemoryStore()) != first


def test_reader_gives_a_root_no_id() -> None:
    """An evaluator would write into a root that it may only read."""
    store = MemoryStore()
    records = EpochRecords(store)
    assert records.root_record(records.read(), create=False) == RootRecord()
    assert store.list_all("") == []


def test_damaged_or_missing_id_comes_from_the_epoch_record() -> None:
    """One flipped bit would take the fast tiers from a run."""
    store = MemoryStore()
    root = opened(store).id
    EpochRecords(store).write(EpochRecords(store).read().begin(1, None, R1))
    whole = store.get(paths.ROOT_KEY)
    for at in range(len(whole)):
        store.put(paths.ROOT_KEY, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert EpochRecords(store).read().root == root
        assert opened(store).id == root, at
        assert store.get(paths.ROOT_KEY) == whole
    store.delete(paths.ROOT_KEY)
    assert opened(store) == RootRecord(root, earlier=False)


def test_damaged_id_without_an_epoch_record_is_refused() -> None:
    """A root would change its id, and its tiers would be ignored without a reason."""
    store = MemoryStore("gs://b/run")
    opened(store)
    store.put(paths.ROOT_KEY, b"{")
    with pytest.raises(CorruptCheckpointError, match=r"root record gs://b/run/_ckptkit/root\.json cannot be read"):
        EpochRecords(store).read()


def save_of(epoch: int, run: str, *, after: str = "", root: str = ROOT, number: int = 0) -> SaveId:
    return SaveId(epoch, 10, number, run, root, after)


@pytest.mark.parametrize(
    ("save", "is_taken", "is_unrecorded"),
    [
        (save_of(2, R2), True, False),
        (save_of(1, R1, after="0-"), True, False),  # recorded later
        (save_of(2, R3, after=f"1-{R1}"), False, False),  # another run has recorded since
        (save_of(3, R3, after=f"1-{R1}"), False, False),
        (save_of(3, R3, after=f"2-{R2}"), True, False),
        (save_of(2, R3), False, True),  # of a record that the root lacks
        (save_of(7, R3), False, True),
        (save_of(2, R2, root=new_id()), False, False),
        (SaveId(2, 10, 0), True, False),  # of an earlier format
    ],
)
def test_restart_takes_saves_of_runs_of_its_branch(save: SaveId, is_taken: bool, is_unrecorded: bool) -> None:
    """A restart would join two branches, or lose what a run had protected."""
    ancestry = Ancestry(root=ROOT).begin(1, None, R1).begin(2, save_of(1, R1), R2)
    assert ancestry.disowned(save) != is_taken
    assert ancestry.is_unrecorded(save) == is_unrecorded


def test_run_before_the_first_that_the_root_knows_is_unrecorded() -> None:
    """A root was put back as it was before its first save, and a run has saved since: hosts that were away would hold
    saves of a run that no warning names."""
    ancestry = Ancestry(root=ROOT).begin(2, None, R2)
    assert ancestry.disowned(save_of(1, R1))
    assert ancestry.is_unrecorded(save_of(1, R1))


def test_base_of_an_unrecorded_run_is_of_the_branch() -> None:
    """The saves that a run continues from would be dropped once it has recorded its own epoch."""
    before = Ancestry(root=ROOT).begin(1, None, R1)
    base = save_of(2, R2, after=before.head, number=4)
    after = before.begin(3, base, R3)
    assert not before.disowned(base)
    assert not after.disowned(base)
    assert not after.superseded(base)
    assert after.superseded(save_of(2, R2, after=before.head, number=5))
    assert Ancestry.from_json(after.to_json()) == after


def test_records_of_many_restarts_are_bounded() -> None:
    """Each restart of a long run would read and write more."""
    ancestry = Ancestry(root=ROOT)
    for epoch in range(1, 5000):
        ancestry = Ancestry(epoch, runs=ancestry.runs, root=ROOT).begin(epoch, None, f"{epoch:016x}")
    assert len(ancestry.runs) == 4096
    assert ancestry.disowned(save_of(1, f"{1:016x}"))
    assert not ancestry.is_unrecorded(save_of(1, f"{1:016x}")), "only its record was dropped"


def manager_of(home: Path, **options: Any) -> Any:
    return ckptkit.CheckpointManager(
        home / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=100, **options),
        tiers=[ckptkit.Tier.ram(str(home / "ram"))],
        host_id="h",
    )


def save(manager: Any, *steps: int) -> None:
    for step in steps:
        assert manager.save(step, args=args.StandardSave({"w": jnp.full(4, float(step))}))
        manager.wait_until_finished()


def as_earlier_format(home: Path) -> None:
    """Rewrites the files as the format before ids had them: no root record, no names in manifests and epoch records."""
    (job,) = (home / "ram").iterdir()
    job.rename(job.with_name(job.name.rpartition("-")[0]))
    (home / "root" / paths.ROOT_KEY).unlink()
    store = open_store(home / "root")
    ancestry = EpochRecords(store).read()
    for path in (home / "root" / paths.EPOCHS_DIR).iterdir():
        path.unlink()
    EpochRecords(store).write(Ancestry(ancestry.epoch))
    for mark in (home / "root").glob(f"*/{paths.COMMIT_MARK}"):
        mark.write_text(mark.read_text().partition(" (ckptkit save")[0])
    of_steps = (home / "root").glob(f"*/*/{paths.SIDECAR_DIR}/process-*.json")
    for path in [*(home / "ram").glob("*/h/0/step-*.json"), *of_steps]:
        manifest = Manifest.from_bytes(path.read_bytes(), path=str(path))
        old = SaveId(manifest.save_id.epoch, manifest.save_id.step, manifest.save_id.number)
        path.write_bytes(replace(manifest, save_id=old).to_bytes())


def test_slots_of_the_format_before_ids_are_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An update would cost each job what only its ramdisks hold."""
    with manager_of(tmp_path) as manager:
        save(manager, 0, 1, 2)
    as_earlier_format(tmp_path)
    with manager_of(tmp_path, read_only=True) as manager:
        assert manager.latest_step() == 2
    caplog.clear()
    with manager_of(tmp_path) as manager:
        assert float(manager.restore(None)["w"][0]) == 2
        save(manager, 3)
    with manager_of(tmp_path) as manager:
        assert manager.latest_step() == 3
    assert not [each for each in caplog.records if "another root" in each.getMessage()]
    (job,) = (tmp_path / "ram").iterdir()
    assert job.name.endswith(read_root_record(open_store(tmp_path / "root")).id)


def test_slots_of_the_format_before_ids_are_not_taken_over_by_a_new_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that begins anew would continue from slots that no id tells apart."""
    with manager_of(tmp_path) as manager:
        save(manager, 0, 1, 2)
    as_earlier_format(tmp_path)
    shutil.rmtree(tmp_path / "root")
    caplog.set_level(logging.WARNING, logger="ckptkit")
    with manager_of(tmp_path) as manager:
        assert manager.latest_step() is None
    assert any("another root" in each.getMessage() for each in caplog.records)


def test_step_of_another_root_is_older_than_all_that_was_saved_here(tmp_path: Path) -> None:
    """A step that somebody copied here by hand would be the newest, and the root's own steps abandoned."""
    for name in ("one", "two"):
        with manager_of(tmp_path / name) as manager:
            save(manager, 0, *([100] if name == "two" else []))
    for _ in range(3):  # it has more epochs than the root it goes to
        with manager_of(tmp_path / "two") as manager:
            manager.restore(None)
            save(manager, manager.latest_step() + 100)
    shutil.copytree(tmp_path / "two/root/400", tmp_path / "one/root/400")
    with manager_of(tmp_path / "one") as manager:
        assert (manager.latest_step(), manager.all_steps()) == (0, [400, 0])
        assert float(manager.restore(400)["w"][0]) == 400
    assert ckptkit.latest_step(str(tmp_path / "one/root")) == 0
    assert [each.state for each in ckptkit.verify(str(tmp_path / "one/root")).steps] == ["proven", "proven"]


def test_deleted_step_does_not_return_from_a_host_that_was_away(tmp_path: Path) -> None:
    """A step that somebody deleted because it is bad would be the newest again, once its host comes back."""

    def on(host: str) -> Any:
        return ckptkit.CheckpointManager(
            tmp_path / "root",
            options=ocp.CheckpointManagerOptions(save_interval_steps=1),
            tiers=[ckptkit.Tier.ram(str(tmp_path / host))],
            host_id=host,
        )

    with on("a") as manager:
        save(manager, 1, 2)
    with on("b") as manager:
        manager.delete(2)
    with on("a") as manager:
        assert (manager.latest_step(), manager.all_steps()) == (1, [1])
        assert float(manager.restore(None)["w"][0]) == 1
        save(manager, 2)
    with on("a") as manager:
        assert manager.latest_step() == 2, "saved again"


def test_jobs_of_one_root_do_not_warn_of_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of two jobs would tell the user to remove the slots of the other."""
    for job in ("one", "two", "one"):
        with ckptkit.CheckpointManager(
            tmp_path / "root", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), job=job)], host_id="h"
        ) as manager:
            save(manager, (manager.latest_step() or 0) + 1)
    assert not [each for each in caplog.records if "another root" in each.getMessage()]


def test_record_of_deleted_saves_is_bounded() -> None:
    """A job that deletes each of its steps would list more at each start."""
    store = MemoryStore()
    records = EpochRecords(store)
    for first in range(0, 3000, 1000):
        records.delete([save_of(1, R1, number=number) for number in range(first, first + 1000)])
    kept = records.read().deleted
    assert (len(kept), min(save.number for save in kept)) == (1000, 2000)


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_commands_find_the_slots_of_a_root_whose_id_is_damaged(tmp_path: Path, harm: str) -> None:
    """`steps` would end at the file, or show no save of a fast tier, though a restart finds them all."""
    with manager_of(tmp_path) as manager:
        save(manager, 0, 1)
    key = tmp_path / "root" / paths.ROOT_KEY
    key.unlink()
    if harm == "damaged":
        key.write_text("{")
    found = ckptkit.list_steps(str(tmp_path / "root"), tiers=[str(tmp_path / "ram")], host_id="h")
    assert [each.step for each in found.steps] == [0, 1]

"""`verify`: a changed bit is found wherever it is, and nothing whole is called damaged."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from ckptkit.durable.read_step import DurableReader
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import LeafRecord, Manifest
from ckptkit.model.paths import array_prefix
from ckptkit.slots.reader import read_manifest
from ckptkit.verification import Verification, VerifyProgress
from ckptkit.verification.pool import CellCheck, Limits, check_cells
from tests.cli.conftest import Run
from tests.states import abstract, assert_same, make_state, restore_args
from tests.verification.conftest import STEPS, Job

NOT_NEEDED = ("_CHECKPOINT_METADATA", "_sharding")  # by a restart of stock Orbax with a template


def states(found: Verification) -> dict[int, str]:
    return {proof.step: proof.state for proof in found.steps}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cells_of(manifest: Manifest) -> int:
    return sum(len(box.digests) for leaves in manifest.arrays.values() for leaf in leaves for box in leaf.boxes)


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_fast_tiers_are_verified_at_every_path_level(saved: Job, tier: str) -> None:
    """A whole tier would be called damaged, or a directory between tier and slot not be understood."""
    slots = saved.slots(tier)
    for path in (slots, slots.parent, slots.parent.parent, saved.home / tier):
        found = ckptkit.verify(str(path))
        assert states(found) == dict.fromkeys(STEPS, "proven"), path
        manifest = read_manifest(saved.manifest(tier, 1))
        assert found.steps[1].checked == (cells_of(manifest), manifest.held_bytes)
        assert found.steps[1].save_id == manifest.save_id


def test_durable_tier_is_verified_at_every_path_level(saved: Job) -> None:
    """A whole step would be called damaged."""
    manifest = read_manifest(saved.manifest("ram", 1))
    for path, steps in (("", STEPS), ("1", [1]), ("1/state", [1])):
        found = ckptkit.verify(str(saved.root / path))
        assert states(found) == dict.fromkeys(steps, "proven"), (path, found)
        assert found.steps[-1].checked == (cells_of(manifest), manifest.held_bytes)
    assert states(ckptkit.verify(str(saved.root), 0)) == {0: "proven"}


def test_damage_to_any_cell_of_a_slot_is_found(job: Job) -> None:
    """A cell that is never read could stay damaged."""
    path = job.manifest("ram", 1)
    manifest = read_manifest(path)
    slot = path.with_name(manifest.slot)
    whole = slot.read_bytes()
    for leaf in manifest.arrays["state"]:
        for record in leaf.boxes:
            flip(slot, record.offset)
            (proof,) = ckptkit.verify(str(path.parent), 1).steps
            (finding,) = proof.findings
            assert (proof.state, finding.leaf, finding.item) == ("corrupt", leaf.name, "state")
            assert finding.expected == record.digests[0] != finding.found
            assert finding.box is not None
            assert finding.box.start == record.box.start
            slot.write_bytes(whole)
    assert states(ckptkit.verify(str(path.parent))) == dict.fromkeys(STEPS, "proven")


def damage_slot(job: Job, how: str) -> None:
    path = job.manifest("ssd", 1)
    slot = path.with_name(read_manifest(path).slot)
    if how == "truncated":
        os.truncate(slot, 4096)
    elif how == "gone":
        slot.unlink()
    elif how == "link":
        slot.unlink()
        slot.symlink_to("/dev/zero")
    elif how == "pipe":
        slot.unlink()
        os.mkfifo(slot)
    elif how == "manifest cut":
        os.truncate(path, 100)
    else:
        flip(path, 200)


@pytest.mark.parametrize("how", ["truncated", "gone", "link", "pipe", "manifest cut", "manifest flipped"])
def test_every_kind_of_slot_damage_is_found(job: Job, how: str) -> None:
    """A damaged file would hang, kill or be skipped."""
    damage_slot(job, how)
    found = ckptkit.verify(str(job.home / "ssd"))
    assert states(found) == {0: "proven", 1: "corrupt"}
    assert found.corrupt


def durable_files(job: Job) -> list[Path]:
    return sorted(path for path in (job.root / "1").rglob("*") if path.is_file())


def test_damage_to_any_file_of_a_durable_step_is_found(job: Job) -> None:
    """A file could be damaged, and the step be called proven, though it is restored wrong or not at all."""
    harmless: list[Path] = []
    for path in durable_files(job):
        whole = path.read_bytes()
        for damaged in (whole[: len(whole) // 2], bytes(len(whole))):
            path.write_bytes(damaged)
            if states(ckptkit.verify(str(job.root), 1)) != {1: "corrupt"}:
                harmless.append(path)
        path.write_bytes(whole)
    # Marks of a commit that a disk does not need, and each process's own tree, which the merged one replaced.
    assert all(path.name == "commit_success.txt" or "ocdbt.process_" in str(path) for path in harmless), harmless
    for path in harmless:
        path.write_bytes(b"damaged")
    with ocp.CheckpointManager(job.root) as manager:
        assert_same(manager.restore(1, args=restore_args(abstract(make_state())))["state"], make_state(1))


def test_changed_small_item_is_found(job: Job) -> None:
    """The data position could be changed unseen, and batches be trained on twice."""
    (job.root / "1/data/metadata").write_text('{"step": 2}')
    found = ckptkit.verify(str(job.root), 1)
    assert states(found) == {1: "corrupt"}
    assert found.steps[0].findings[0].problem == f"{job.root}/1/data/metadata is not what was saved".replace(
        "/metadata", ""
    )


def test_step_with_items_of_two_saves_is_corrupt(tmp_path: Path) -> None:
    """A step that no restore takes would be called proven."""
    for name, steps in (("one", (1,)), ("two", (0, 1))):
        with ckptkit.CheckpointManager(tmp_path / name) as manager:
            for step in steps:
                tree = ocp.args.StandardSave({"w": jnp.arange(4)})
                manager.save(step, args=ocp.args.Composite(a=tree, b=tree))  # pyright: ignore[reportCallIssue]
    shutil.rmtree(tmp_path / "one/1/b")
    shutil.copytree(tmp_path / "two/1/b", tmp_path / "one/1/b")
    (proof,) = ckptkit.verify(str(tmp_path / "one")).steps
    assert proof.state == "corrupt"
    assert "has items of saves 1@1.0, 1@1.1" in str(proof.findings[0])


def test_items_without_digests_are_unproven(job: Job) -> None:
    """Foreign files next to our items would be called proven with them."""
    (job.root / "1/vocabulary").mkdir()
    (job.root / "1/vocabulary/words.txt").write_text("a b c")
    proof = ckptkit.verify(str(job.root)).steps[1]
    assert (proof.state, proof.findings) == ("unproven", ())
    assert proof.reason == "unproven: nothing keeps digests of vocabulary; everything else is proven"


def test_changed_data_iterator_state_is_found(tmp_path: Path) -> None:
    """Stock Orbax goes on from its file: a position that is not the one that was saved would be called proven. And
    JSON with NaN, which is not equal to itself, would be called damaged."""
    grain = pytest.importorskip("grain")
    data = iter(grain.MapDataset.range(64).to_iter_dataset())
    with ckptkit.CheckpointManager(tmp_path) as manager:
        args = {
            "state": ocp.args.StandardSave({"w": jnp.arange(4)}),
            "data": grain.checkpoint.CheckpointSave(data),
            "notes": ocp.args.JsonSave({"loss": float("nan")}),
        }
        manager.save(3, args=ocp.args.Composite(**args))
    assert states(ckptkit.verify(str(tmp_path))) == {3: "proven"}
    (file,) = (tmp_path / "3/data").glob("process_*")
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "next_index": 7}))
    (proof,) = ckptkit.verify(str(tmp_path)).steps
    assert [str(finding) for finding in proof.findings] == [f"{tmp_path}/3/data is not what was saved"]
    file.unlink()
    (file.parent / "process_1-of-2.json").write_text("{}")
    (proof,) = ckptkit.verify(str(tmp_path)).steps
    assert [str(finding) for finding in proof.findings] == [f"{file} is gone"]


def test_standalone_item_has_no_step(stock: Path, saved: Job, ckpt: Run, tmp_path: Path) -> None:
    """It would be called step 0 of a run that there never was."""
    found = ckptkit.verify(str(stock / "zarr3"))
    assert (found.item, found.to_json()["item"]) == ("zarr3", "zarr3")
    assert ckpt("convert", saved.root / "1", tmp_path / "model", "--to", "orbax").code == 0
    assert ckptkit.verify(str(tmp_path / "model")).item == "model"
    said = ckpt("verify", tmp_path / "model").out
    assert "model: item model, of no step: 1 save, 1 proven" in said
    assert [line.split()[:2] for line in said.splitlines() if "proven" in line][1:] == [["-", "proven"]]
    shutil.copytree(saved.root / "1/state", tmp_path / "state")
    found = ckptkit.verify(str(tmp_path / "state"))
    assert (found.item, states(found)) == (None, {1: "proven"})


@pytest.mark.parametrize("run", ["run", "20261128", "run_3"])
def test_tree_by_itself_is_verified_in_a_root_of_any_name(run: str, ckpt: Run, tmp_path: Path) -> None:
    """The number in the root's own name would be taken for the tree's step, and the tree for a damaged one."""
    tree = tmp_path / run / "7"
    tree.parent.mkdir()
    np.savez(tmp_path / "a.npz", w=np.arange(16.0))
    ckpt("convert", tmp_path / "a.npz", tree, "--to", "orbax")
    for place in (tree, tree.parent):
        (proof,) = ckptkit.verify(str(place)).steps
        assert (proof.step, proof.state) == (7, "proven"), proof


def test_sidecar_of_another_step_is_corrupt(job: Job) -> None:
    """An older step's digests would prove an older step's bytes under a newer number."""
    name = "state/_ckptkit/process-0.json"
    shutil.copy(job.root / "0" / name, job.root / "1" / name)
    (proof,) = ckptkit.verify(str(job.root), 1).steps
    assert proof.state == "corrupt"
    assert "has sidecars of step 0, found in step 1" in str(proof.findings[0])


def test_uncommitted_save_is_incomplete(job: Job) -> None:
    """A save under way would be called damaged."""
    (job.root / "1").rename(job.root / "1.orbax-checkpoint-tmp-5")
    assert states(ckptkit.verify(str(job.root))) == {0: "proven", 1: "incomplete"}


def test_tier_with_a_part_of_the_shares_is_incomplete(job: Job) -> None:
    """Half of a save would be called whole, or damaged."""
    path = job.manifest("ram", 1)
    manifest = read_manifest(path)
    arrays = {"state": tuple(dataclasses.replace(leaf, boxes=leaf.boxes[:1]) for leaf in manifest.arrays["state"])}
    path.write_bytes(dataclasses.replace(manifest, arrays=arrays).to_bytes())
    (proof,) = ckptkit.verify(str(job.home / "ram"), 1).steps
    assert proof.state == "incomplete"
    assert "elements of leaf state:" in (proof.reason or "")


@pytest.mark.parametrize(("path", "step"), [("root", 3), ("zarr3", 0), ("files", 0)])
def test_stock_orbax_is_unproven_in_every_layout(stock: Path, path: str, step: int) -> None:
    """Unprovable data would be called proven, or readable data damaged."""
    found = ckptkit.verify(str(stock / path))
    assert states(found) == {step: "unproven"}, found.steps[0].findings
    assert found.steps[0].checked[0] > 5
    assert "stock Orbax keeps no digests" in (found.steps[0].reason or "")


@pytest.mark.parametrize("path", ["root/3", "zarr3", "files"])
def test_truncated_stock_orbax_step_is_corrupt(stock: Path, tmp_path: Path, path: str) -> None:
    """A step that cannot be read would be called readable."""
    for number, cut in enumerate(sorted(p for p in (stock / path).rglob("*") if p.is_file())):
        if "ocdbt.process_" in str(cut) or cut.name in ("commit_success.txt", "descriptor.pbtxt", *NOT_NEEDED):
            continue
        home = tmp_path / str(number)
        shutil.copytree(stock / path, home / "3")
        os.truncate(home / "3" / cut.relative_to(stock / path), cut.stat().st_size // 2)
        assert states(ckptkit.verify(str(home))) == {3: "corrupt"}, cut
        shutil.rmtree(home)


def test_slot_reused_during_verification_is_superseded(job: Job) -> None:
    """A running job's tier would be called damaged with every save."""
    path = job.manifest("ram", 1)
    slot = path.with_name(read_manifest(path).slot)
    slot.write_bytes(bytes(slot.stat().st_size))

    def reuse(progress: VerifyProgress) -> None:
        if progress.step == 1 and path.exists():
            path.unlink()

    found = ckptkit.verify(str(job.home / "ram"), progress=reuse)
    assert states(found) == {0: "proven"}
    assert found.notes == (f"{path.parent}: save 1@1.1 was superseded while it was read",)
    assert not found.corrupt


def test_step_pruned_during_verification_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job's root would be called damaged with every prune."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(50_000) + step}))
            manager.wait_until_finished()

    def pruned(*args: Any, step: int, **more: Any) -> Any:
        if step == 1:
            shutil.rmtree(tmp_path / "1")
        return check_cells(*args, step=step, **more)

    monkeypatch.setattr("ckptkit.verification.durable.check_cells", pruned)
    found = ckptkit.verify(str(tmp_path))
    assert states(found) == {0: "proven"}
    assert "pruned or replaced while it was read" in found.notes[0]


def test_verification_memory_is_bounded(saved: Job) -> None:
    """A hostile or huge cell would take all memory of a machine that trains."""
    (proof,) = ckptkit.verify(str(saved.root / "1"), memory_bytes_max=64).steps
    assert (proof.state, proof.findings) == ("unproven", ()), "not inspected: neither damage nor proof"
    assert "chunks were not read" in str(proof.reason)
    assert "and 64 are allowed" in str(proof.reason)
    assert states(ckptkit.verify(str(saved.home / "ram"), memory_bytes_max=64)) == dict.fromkeys(STEPS, "proven")
    with pytest.raises(ValueError, match="threads=0, memory_bytes_max"):
        ckptkit.verify(str(saved.root), threads=0)


def test_concurrent_reads_share_the_memory_bound() -> None:
    """The bound would be one for each thread."""
    held, most = [0], [0]

    def read() -> str:
        held[0] += 40
        most[0] = max(most[0], held[0])
        for _ in range(1000):
            pass
        held[0] -= 40
        return "x"

    def check() -> CellCheck:
        box = Box((), ())
        return CellCheck(path="", item="", leaf="", box=box, size_bytes=40, memory_bytes=40, expected="x", read=read)

    checked, findings = check_cells(
        [check() for _ in range(200)], 8000, Limits(threads=8, memory_bytes_max=40), path="", step=0
    )
    assert (checked, findings, most) == ((200, 8000), [], [40])


def test_progress_ends_with_all_bytes(saved: Job) -> None:
    """A bar would never reach its end."""
    heard: list[VerifyProgress] = []
    found = ckptkit.verify(str(saved.root / "1"), progress=heard.append)
    assert heard[-1].checked_bytes == heard[-1].total_bytes == found.steps[0].checked[1]


@pytest.mark.parametrize(("path", "step"), [("none", None), ("root", 7), ("ram", 7), ("empty", None)])
def test_absent_path_is_not_found(saved: Job, path: str, step: int | None) -> None:
    """A mistyped path would be called proven."""
    (saved.home / "empty").mkdir(exist_ok=True)
    with pytest.raises(ckptkit.StepNotFoundError):
        ckptkit.verify(str(saved.home / path), step)


def test_json_shape_is_stable(job: Job) -> None:
    """Scripts would break."""
    path = job.manifest("ram", 1)
    flip(path.with_name(read_manifest(path).slot), 0)
    found: dict[str, Any] = json.loads(json.dumps(ckptkit.verify(str(job.home / "ram"), 1).to_json()))
    (step,) = found.pop("steps")
    assert found == {"format": 1, "path": str(job.home / "ram"), "item": None, "notes": [], "problems": []}
    (finding,) = step.pop("findings")
    assert set(finding) == {"path", "problem", "item", "leaf", "box", "expected", "found", "shared_with"}
    assert set(step) == {"step", "state", "kind", "path", "save_id", "cells", "bytes", "reason", "unread"}


@pytest.mark.parametrize("changed", [{"order": "F"}, {"filters": [{"id": "delta"}]}, {"compressor": {"id": "zlib"}}])
def test_a_description_that_gives_other_values_is_damage(job: Job, changed: dict[str, Any]) -> None:
    """The bytes are those that were saved: stock Orbax would decode them to other values, or to none."""
    item = job.root / "1/state"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    leaf = next(each for each in read_manifest(job.manifest("ram", 1)).arrays["state"] if each.name == "w")
    key = f"{array_prefix(leaf.name)}.zarray"
    store.write(key, json.dumps({**json.loads(store[key]), **changed})).result()
    (proof,) = ckptkit.verify(str(job.root), 1).steps
    assert (proof.state, {each.leaf for each in proof.findings}) == ("corrupt", {leaf.name}), proof.findings


def test_plain_leaves_are_read_without_an_array_of_tensorstore_for_each(job: Job, monkeypatch: Any) -> None:
    """It took a quarter of a millisecond for each leaf: two minutes for 200 steps of 4,000."""
    opened: list[str] = []
    real = DurableReader._opened

    def counted(self: DurableReader, item: str, leaf: LeafRecord, prefix: str) -> Any:
        opened.append(leaf.name)
        return real(self, item, leaf, prefix)

    monkeypatch.setattr(DurableReader, "_opened", counted)
    leaves = read_manifest(job.manifest("ram", 1)).arrays["state"]
    assert states(ckptkit.verify(str(job.root), 1)) == {1: "proven"}
    assert set(opened) == {leaf.name for leaf in leaves if any(map(operator.mod, leaf.shape, leaf.cell))}

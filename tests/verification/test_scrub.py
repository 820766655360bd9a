"""`scrub`: a damaged copy is made whole from another one, bit for bit; nothing whole is touched, nothing deleted."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.leases import PruneGuard
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.slots.reader import read_manifest
from ckptkit.store import open_store
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock
from ckptkit.upkeep import list_arenas
from ckptkit.verification import Scrub, mending
from ckptkit.verification.scrub import others_may_hold
from tests.states import abstract, assert_same, make_state, restore_args
from tests.verification.conftest import HOST, Job
from tests.verification.test_verify import damage_slot, flip


def scrubbed(job: Job, tiers: tuple[str, ...] | None = None, *, repair: bool = True) -> Scrub:
    return ckptkit.scrub(str(job.root), job.tiers if tiers is None else tiers, repair=repair, host_id=HOST)


def content(home: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and "repair-" not in str(path)
    }


def acts(found: Scrub) -> list[tuple[int, str, str, bool]]:
    return [(each.step, each.kind, each.act, each.done) for each in found.treatments]


def assert_whole(job: Job) -> None:
    for path in (*job.tiers, job.root):
        found = ckptkit.verify(str(path))
        assert {proof.state for proof in found.steps} == {"proven"}, found


def test_undamaged_job_is_not_changed(job: Job) -> None:
    """A check would change what it checks."""
    before = content(job.home)
    found = scrubbed(job)
    assert (found.checked, found.treatments, found.damaged) == (6, (), False)
    assert content(job.home) == before


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone", "link", "pipe", "zeroed"])
def test_slot_is_repaired_from_another_tier(job: Job, how: str) -> None:
    """A tier would stay damaged though another has every byte of it."""
    path = job.manifest("ssd", 1)
    slot = path.with_name(read_manifest(path).slot)
    whole = slot.read_bytes()
    if how == "flipped":
        flip(slot, 0)
    elif how == "zeroed":
        slot.write_bytes(bytes(len(whole)))
    else:
        damage_slot(job, how)
    damaged = {} if how in ("pipe", "link") else content(job.home)
    assert acts(scrubbed(job, repair=False)) == [(1, "slot", "repair", False)]
    assert how in ("pipe", "link") or content(job.home) == damaged, "without repair nothing is written"
    found = scrubbed(job)
    assert acts(found) == [(1, "slot", "repair", True)]
    assert found.treatments[0].sources
    assert_whole(job)
    if how == "flipped":
        assert slot.read_bytes() == whole


def restored(job: Job) -> None:
    """Stock Orbax, and ckptkit from the durable tier alone, get the very bits."""
    with ocp.CheckpointManager(job.root) as manager:
        assert_same(manager.restore(1, args=restore_args(abstract(make_state())))["state"], make_state(1))
    with ckptkit.CheckpointManager(job.root) as manager:
        found = manager.restore(1, args=restore_args(abstract(make_state())))
    assert_same(found["state"], make_state(1))
    assert found["data"] == {"step": 1}


@pytest.mark.parametrize(
    "how",
    [
        *("tree", "node", "sidecar", "no sidecars", "no sidecar directory", "json", "no json", "data of another step"),
        *("directory for a file", "file for a directory"),
    ],
)
def test_durable_step_is_repaired_from_a_slot(job: Job, how: str) -> None:
    """The only copy that outlives the host would stay damaged though a slot has every byte of it."""
    state = job.root / "1/state"
    if how == "tree":
        (state / "manifest.ocdbt").unlink()
    elif how == "node":
        for path in (state / "d").iterdir():
            path.write_bytes(bytes(path.stat().st_size))
    elif how == "sidecar":
        flip(state / "_ckptkit/process-0.json", 300)
    elif how == "no sidecars":
        (state / "_ckptkit/process-0.json").unlink()
    elif how == "no sidecar directory":
        shutil.rmtree(state / "_ckptkit")
    elif how == "json":
        (job.root / "1/data/metadata").write_text("{")
    elif how == "no json":
        shutil.rmtree(job.root / "1/data")
    elif how == "directory for a file":
        (state / "manifest.ocdbt").unlink()
        (state / "manifest.ocdbt/below").mkdir(parents=True)
    elif how == "file for a directory":
        shutil.rmtree(state / "d")
        (state / "d").write_text("not a directory")
    else:
        for name in ("d", "manifest.ocdbt"):
            target = state / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            source = job.root / "0/state" / name
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    before = content(job.home)
    assert acts(scrubbed(job, repair=False)) == [(1, "durable", "repair", False)]
    assert content(job.home) == before, "without repair nothing is written"
    found = ckptkit.scrub(str(job.root), repair=True, host_id=HOST)  # it finds the tiers, also by an older step
    assert acts(found) == [(1, "durable", "repair", True)], found
    assert_whole(job)
    restored(job)
    assert (job.root / "_ckptkit" / QUARANTINE_DIR / "1").is_dir(), "what was damaged is kept"
    assert not list((job.root / "_ckptkit").glob("repair-*"))


def test_step_whose_tiers_nobody_knows_is_not_put_aside(job: Job) -> None:
    """A cron job without `--tier` moved the only step to the quarantine; its ramdisk had every byte."""
    shutil.rmtree(job.root / "0")
    for path in (job.root / "1").glob("*/_ckptkit/process-0.json"):
        flip(path, 300)
    before = content(job.home)
    (treatment,) = ckptkit.scrub(str(job.root), repair=True, host_id=HOST).treatments
    assert (treatment.act, treatment.done) == ("leave", False)
    assert "give --tier" in str(treatment.reason)
    assert content(job.home) == before
    assert acts(scrubbed(job)) == [(1, "durable", "repair", True)]


def test_step_with_an_item_of_stock_orbax_is_repaired(job: Job) -> None:
    """The item that nothing keeps digests of would keep ours from being mended."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(job.root / "1/extra", {"w": jnp.arange(4)})
    (job.root / "1/state/manifest.ocdbt").unlink()
    found = scrubbed(job)
    assert acts(found) == [(1, "durable", "repair", True)], found
    assert ckptkit.verify(str(job.root)).steps[1].state == "unproven"
    restored(job)


def test_unreadably_large_step_is_not_quarantined(job: Job, stock: Path) -> None:
    """A step of large chunks would be taken out of its root, although nothing is wrong with it."""
    for root, tiers in ((job.root, job.tiers), (stock / "root", ())):
        before = content(root.parent)
        found = ckptkit.scrub(str(root), tiers, repair=True, host_id=HOST, memory_bytes_max=64)
        assert acts(found) == []
        assert content(root.parent) == before


def test_leftovers_of_a_crashed_repair_are_removed_after_a_day(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of whole steps would fill the root; or a repair that lives would lose its copy."""
    below = job.root / "_ckptkit"
    (job.root / "1/state/manifest.ocdbt").unlink()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mending, "_copy_aside", die)
        patched.setattr(mending, "_remove", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            scrubbed(job)
    (left,) = below.glob("repair-*")
    assert acts(scrubbed(job)) == [(1, "durable", "repair", True)]
    assert list(below.glob("repair-*")) == [left], "it may live"
    monkeypatch.setattr(mending, "wall_s", lambda: time.time() + 1.1 * 86400)
    assert acts(scrubbed(job)) == []
    assert not list(below.glob("repair-*"))


def test_unrepairable_copies_are_quarantined(job: Job) -> None:
    """A damaged copy would be met by every restart, or be deleted with what could still be read of it."""
    for tier in ("ram", "ssd"):
        path = job.manifest(tier, 1)
        flip(path.with_name(read_manifest(path).slot), 0)
    for path in (job.root / "1/state/d").iterdir():
        path.write_bytes(b"damaged")
    found = scrubbed(job)
    assert {(step, act, done) for step, _, act, done in acts(found)} == {(1, "quarantine", True)}
    assert found.damaged, "what was put aside is lost"
    assert_whole(job)
    assert len(list((job.slots("ram") / QUARANTINE_DIR).iterdir())) == 2, "the manifest and its slot"
    assert (job.root / "_ckptkit" / QUARANTINE_DIR / "1/state/d").is_dir()
    with job.manager() as manager:
        found = manager.restore(None, args=restore_args(abstract(make_state())))
    assert found["data"] == {"step": 0}
    assert_same(found["state"], make_state(0))


def test_step_of_several_processes_is_left_where_no_copy_is_seen(job: Job) -> None:
    """A repair on the wrong host first, or without its tiers, would put a step aside that another host can repair."""
    sidecars = job.root / "1/state/_ckptkit"
    shutil.copy(sidecars / "process-0.json", sidecars / "process-1.json")
    for path in sidecars.iterdir():
        path.write_bytes(b"{")
    found = scrubbed(job, tiers=())
    (treated,) = [each for each in found.treatments if each.kind == "durable"]
    assert (treated.act, treated.done, "other hosts" in (treated.reason or "")) == ("leave", False, True)
    assert (job.root / "1/state/d").is_dir()


def test_damaged_manifest_is_quarantined(job: Job) -> None:
    """Its slot could never be reused, or a whole slot be moved with it."""
    damage_slot(job, "manifest flipped")
    found = scrubbed(job)
    assert acts(found) == [(1, "slot", "quarantine", True)]
    assert (job.slots("ssd") / QUARANTINE_DIR).is_dir()
    assert_whole(job)


def test_slot_with_a_lost_manifest_is_quarantined(job: Job) -> None:
    """A tier that lost its newest step would look like one that never had it."""
    path = job.manifest("ssd", 1)
    path.unlink()
    (proof,) = [each for each in ckptkit.verify(job.tiers[1]).steps if each.step == 1]
    assert (proof.state, proof.reason) == ("corrupt", "its manifest is missing")
    listed = ckptkit.list_steps(str(job.root), tiers=job.tiers, host_id=HOST)
    assert [problem for problem in listed.problems if f"manifest {path} is missing" in problem]
    assert acts(scrubbed(job, repair=False)) == [(1, "slot", "quarantine", False)]
    found = scrubbed(job)
    assert acts(found) == [(1, "slot", "quarantine", True)]
    assert found.treatments[0].reason == "its manifest is missing: its slot is free"
    assert_whole(job)
    assert acts(scrubbed(job)) == [], "it is reported once"


def test_step_being_deleted_by_its_job_is_left(job: Job) -> None:
    """A step half deleted would be put aside or made whole again, while its job takes it away."""
    (job.root / "1/state/manifest.ocdbt").unlink()
    doomed = job.root / "_ckptkit/doomed.json"
    guard = PruneGuard(open_store(str(job.root)))
    guard.announce({1})
    before = content(job.home)
    found = scrubbed(job)
    assert acts(found) == [(1, "durable", "leave", False)]
    assert found.treatments[0].reason == "its job has announced that it deletes this step"
    assert content(job.home) == before
    guard.settle()
    for text in ('{"steps": [0]}', "{", '{"steps": 1}'):  # another step's, or nobody's
        doomed.write_text(text)
        assert acts(scrubbed(job, repair=False)) == [(1, "durable", "repair", False)]
    assert acts(scrubbed(job)) == [(1, "durable", "repair", True)]


def test_damaged_epoch_record_is_repaired_from_its_copy(job: Job) -> None:
    """A second fault would leave a root that nobody can open."""
    record, copy = sorted((job.root / "_ckptkit/epochs").iterdir(), reverse=True)
    whole = record.read_bytes()
    assert copy.read_bytes() == whole
    for path in (record, copy):
        path.write_bytes(b"{")
        assert ckptkit.verify(str(job.root)).problems
        assert scrubbed(job, repair=False).damaged
        assert not scrubbed(job).damaged
        assert path.read_bytes() == whole


def test_two_damaged_copies_repair_each_other(job: Job) -> None:
    """Cells that are whole in a damaged copy would be thrown away."""
    for tier, leaf in (("ram", 0), ("ssd", 3)):
        path = job.manifest(tier, 1)
        manifest = read_manifest(path)
        flip(path.with_name(manifest.slot), manifest.arrays["state"][leaf].boxes[0].offset)
    shutil.rmtree(job.root / "1")
    assert acts(scrubbed(job)) == [(1, "slot", "repair", True)] * 2
    for tier in job.tiers:
        assert {proof.state for proof in ckptkit.verify(tier).steps} == {"proven"}


def test_stale_manifest_does_not_overwrite_the_newer_save(job: Job) -> None:
    """The bytes of an older save would be written over those of a newer one, whose slot it names."""
    path = job.manifest("ram", 0)
    stale = path.read_bytes()
    with job.manager() as manager:
        for step in range(2, 5):  # the slot of step 0 is reused
            manager.save(step, args=ckpt_args(step))
            manager.wait_until_finished()
    path.write_bytes(stale)
    newest = {proof.step for proof in ckptkit.verify(str(job.home / "ram")).steps if proof.state == "proven"}
    found = scrubbed(job)
    assert [(step, act) for step, kind, act, _ in acts(found) if kind == "slot"] == [(0, "quarantine")]
    assert {proof.step for proof in ckptkit.verify(str(job.home / "ram")).steps} == newest
    assert_whole(job)


def ckpt_args(step: int) -> object:
    from tests.states import save_args

    return save_args(make_state(step), step)


def test_damage_in_a_locked_directory_is_only_reported(job: Job) -> None:
    """A running job's slot would be written while it is reused."""
    slot = job.slots("ram") / read_manifest(job.manifest("ram", 1)).slot
    flip(slot, 0)
    damaged = slot.read_bytes()
    with arena_lock(job.slots("ram")) as held:
        assert held
        found = scrubbed(job)
    assert acts(found) == [(1, "slot", "leave", False)]
    assert "a running process holds its directory" in (found.treatments[0].reason or "")
    assert slot.read_bytes() == damaged
    assert found.damaged


def test_damage_in_orbax_metadata_only_is_left(job: Job) -> None:
    """A step that can be restored would be taken away because stock Orbax may not read it."""
    os.truncate(job.root / "1/state/_METADATA", 10)
    found = scrubbed(job)
    assert acts(found) == [(1, "durable", "leave", False)]
    assert "ckptkit can restore it" in (found.treatments[0].reason or "")


def test_step_replaced_during_the_repair_is_left(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer save of the same number would be swapped for the older one."""
    flip(job.root / "1/state/_ckptkit/process-0.json", 300)
    inner = mending.RootStep._require_whole

    def replaced(*arguments: Any) -> None:
        (job.root / "1/_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 5}')
        inner(*arguments)

    monkeypatch.setattr(mending.RootStep, "_require_whole", replaced)
    found = scrubbed(job)
    assert acts(found) == [(1, "durable", "leave", False)]
    assert (job.root / "1/_CHECKPOINT_METADATA").read_text() == '{"commit_timestamp_nsecs": 5}'


def damage(job: Job) -> dict[str, bytes]:
    """Flips bits in every data file and in a record of step 1, and removes a manifest."""
    for path in (job.root / "1/state/d").iterdir():
        flip(path, 300)
    flip(job.root / "1/state/_ckptkit/process-0.json", 300)
    (job.root / "1/state/manifest.ocdbt").unlink()
    return content(job.root / "1")


def test_damaged_files_are_kept_in_the_quarantine(job: Job) -> None:
    """A wrong repair would destroy what could still be read of the step."""
    before = damage(job)
    assert acts(scrubbed(job)) == [(1, "durable", "repair", True)]
    assert ckptkit.verify(str(job.root)).steps[1].state == "proven"
    assert_whole(job)
    restored(job)
    assert content(job.root / "_ckptkit" / QUARANTINE_DIR / "1") == before
    assert not list((job.root / "_ckptkit").glob("repair-*"))
    assert acts(scrubbed(job)) == []


def test_repair_on_a_disk_is_completed_after_a_crash(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between two files would lose what was left of the step, or leave one that nothing can repair."""
    replace, deaths = os.replace, 0
    while True:
        damage(job)
        left = deaths

        def dying(*names: Any, **descriptors: Any) -> None:
            nonlocal left
            if "dst_dir_fd" in descriptors:
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
            replace(*names, **descriptors)

        with monkeypatch.context() as patched:
            patched.setattr(mending.os, "replace", dying)
            try:
                scrubbed(job)
                break
            except KeyboardInterrupt:
                deaths += 1
        scrubbed(job)
        assert ckptkit.verify(str(job.root)).steps[1].state == "proven"
        restored(job)
    assert deaths == 4, "a data file, a manifest of a tree, and two records"


def test_step_pruned_during_a_repair_stays_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a deleted step would appear under its name, and pass for a step."""
    damage(job)
    inner = mending._make_way

    def pruned(*arguments: Any) -> None:
        if (job.root / "1").exists():
            (job.root / "1").rename(job.home / "pruned")
        inner(*arguments)

    monkeypatch.setattr(mending, "_make_way", pruned)
    found = scrubbed(job)
    assert acts(found) == [(1, "durable", "leave", False)]
    assert found.treatments[0].reason == "it was pruned meanwhile"
    assert not (job.root / "1").exists()


def test_repair_works_without_locks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without the mount option `flock` answers ENOSYS: a repair would end in a traceback."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (job.root / "1/state/manifest.ocdbt").unlink()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert acts(scrubbed(job)) == [(1, "durable", "repair", True)]
    assert all(each.live for each in list_arenas(job.tiers)), "nobody knows whether a process holds them"


def test_other_hosts_are_named_only_if_the_job_had_them() -> None:
    """The operator of a job of one host would look for hosts that never existed, and the damage stay."""

    def share(process: int, host: str, slot: str = "") -> Manifest:
        writer = Writer(process=process, count=2, host=host)
        return Manifest(save_id=SaveId(1, 7, 0), writer=writer, slot=slot, arrays={}, inline={})

    assert not others_may_hold([share(0, "a"), share(1, "a")], "a"), "its slots hold newer saves by now"
    assert others_may_hold([share(0, "a"), share(1, "b")], "a")
    assert others_may_hold([share(0, "a", "slot-0.bin")], "a"), "the host of process 1 is not known"
    assert not others_may_hold([share(0, "a", "slot-0.bin"), share(1, "b", "slot-0.bin")], "a"), "both are here"
    assert not others_may_hold([], "a")

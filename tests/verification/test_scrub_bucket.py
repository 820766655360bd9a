"""`verify` and `scrub` of a root in a bucket: what is damaged is found, and mended from a slot, object by object."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model import paths
from ckptkit.store import RetryStore, Store, open_store
from ckptkit.store.quarantine import QUARANTINE_DIR
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status
from ckptkit.verification import Scrub, mending
from tests.cases import long_except
from tests.states import abstract, assert_same, make_state, restore_args, save_args
from tests.verification.conftest import HOST

ROOT = "gs://runs/run"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """With a run of steps 0 and 1, which a ramdisk holds too."""
    home = tmp_path_factory.mktemp("scrub-bucket")
    with BucketServer(dir=home / "bucket", buckets=["runs"]) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env().items():
            patch.setenv(name, value)
        with make_manager(home) as manager:
            for step in (0, 1):
                manager.save(step, args=save_args(make_state(step), step))
                manager.wait_until_finished()
        server.home = home  # pyright: ignore[reportAttributeAccessIssue]
        yield server


@pytest.fixture
def home(bucket: BucketServer) -> Iterator[Path]:
    """The directory of the ramdisk; bucket and ramdisk are put back after each test."""
    found: Path = bucket.home  # pyright: ignore[reportAttributeAccessIssue]
    store = open_store(ROOT)
    kept = {key: store.get(key) for key in store.list_all("")}
    shutil.copytree(found / "ram", found / "kept")
    yield found
    bucket.faults = FaultPlan()
    shutil.rmtree(found / "ram")
    (found / "kept").rename(found / "ram")
    there = {key: store.get(key) for key in store.list_all("")}
    store.delete_many([key for key in there if key not in kept])
    for key, data in kept.items():
        if there.get(key) != data:
            store.put(key, data)


def make_manager(home: Path) -> ckptkit.CheckpointManager:
    tiers = [ckptkit.Tier.ram(str(home / "ram"))]
    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    return ckptkit.CheckpointManager(
        ROOT, options=options, tiers=tiers, host_id=HOST, processes=ckptkit.ProcessOptions(timeout_s=60)
    )


def scrubbed(home: Path, *, repair: bool = True) -> Scrub:
    return ckptkit.scrub(ROOT, [str(home / "ram")], repair=repair, host_id=HOST)


def acts(found: Scrub) -> list[tuple[int, str, str, bool]]:
    return [(each.step, each.kind, each.act, each.done) for each in found.treatments]


def states() -> dict[int, str]:
    return {proof.step: proof.state for proof in ckptkit.verify(ROOT).steps}


def assert_restored(home: Path) -> None:
    """Stock Orbax, and ckptkit from the bucket alone, get the very bits."""
    with ocp.CheckpointManager(ROOT) as manager:
        assert_same(manager.restore(1, args=restore_args(abstract(make_state())))["state"], make_state(1))
    with ckptkit.CheckpointManager(ROOT) as manager:
        found = manager.restore(1, args=restore_args(abstract(make_state())))
    assert_same(found["state"], make_state(1))
    assert found["data"] == {"step": 1}


def damage(store: Store, how: str) -> None:
    data = store.list_all("1/state/d")
    match how:
        case "flipped":
            key = max(data, key=lambda each: len(store.get(each)))
            found = bytearray(store.get(key))
            found[len(found) // 2] ^= 1
            store.put(key, bytes(found))
        case "data gone":
            store.delete_many(data)
        case "tree gone":
            store.delete("1/state/manifest.ocdbt")
        case "sidecar":
            store.put("1/state/_ckptkit/process-0.json", b"{")
        case "sidecar gone":
            store.delete("1/state/_ckptkit/process-0.json")
        case "json":
            store.put("1/data/metadata", b'{"step": 7}')
        case _:
            raise ValueError(how)


DAMAGE = ["flipped", "data gone", "tree gone", "sidecar", "sidecar gone", "json"]


@pytest.mark.parametrize("how", long_except(["flipped", "sidecar gone"], DAMAGE))
def test_bucket_step_is_repaired_from_a_slot(home: Path, how: str) -> None:
    """The only copy that outlives the host would stay damaged though a slot has every byte of it."""
    store = open_store(ROOT)
    assert states() == {0: "proven", 1: "proven"}
    damage(store, how)
    damaged = {key: store.get(key) for key in store.list_all("1")}
    assert states() == {0: "proven", 1: "corrupt"}
    assert acts(scrubbed(home, repair=False)) == [(1, "durable", "repair", False)]
    assert {key: store.get(key) for key in store.list_all("1")} == damaged, "without repair nothing is written"
    found = scrubbed(home)
    assert acts(found) == [(1, "durable", "repair", True)], found
    assert found.treatments[0].sources
    assert states() == {0: "proven", 1: "proven"}
    assert_restored(home)
    aside = f"_ckptkit/{QUARANTINE_DIR}/"
    assert {key.removeprefix(aside): store.get(key) for key in store.list_all(aside[:-1])} == damaged
    assert not repairs(store)


def test_step_without_another_copy_is_quarantined(home: Path) -> None:
    """It would be met by every restart, or be deleted with what could still be read of it."""
    store = open_store(ROOT)
    damage(store, "flipped")
    before = {key: store.get(key) for key in store.list_all("1")}
    shutil.rmtree(home / "ram")
    (home / "ram").mkdir()
    assert acts(scrubbed(home, repair=False)) == [(1, "durable", "quarantine", False)]
    assert acts(scrubbed(home)) == [(1, "durable", "quarantine", True)]
    assert store.list_all("1") == []
    aside = f"_ckptkit/{QUARANTINE_DIR}/"
    assert {key.removeprefix(aside): store.get(key) for key in store.list_all(aside[:-1])} == before
    with ckptkit.CheckpointManager(ROOT) as manager:
        assert manager.restore(None, args=restore_args(abstract(make_state())))["data"] == {"step": 0}


def test_slot_is_repaired_from_a_bucket(home: Path) -> None:
    """A ramdisk would stay damaged though the bucket has every byte of it."""
    (slot,) = (home / "ram").rglob("slot-1.bin")
    with slot.open("r+b") as file:
        file.write(b"damaged")
    (step,) = [each.step for each in ckptkit.verify(str(home / "ram")).steps if each.state == "corrupt"]
    assert acts(scrubbed(home)) == [(step, "slot", "repair", True)]
    assert {proof.state for proof in ckptkit.verify(str(home / "ram")).steps} == {"proven"}


def test_damaged_epoch_record_in_a_bucket_is_repaired(home: Path) -> None:
    """A second fault would leave a root that nobody can open."""
    store = open_store(ROOT)
    record = f"{paths.EPOCHS_DIR}/{paths.epoch_name(1)}"
    whole = store.get(record)
    store.put(record, b"{")
    assert scrubbed(home, repair=False).damaged
    assert not scrubbed(home).damaged
    assert store.get(record) == whole


def test_refusing_bucket_is_an_error_not_damage(home: Path, bucket: BucketServer) -> None:
    """Unreachable is not corrupt: a scrub would put every step aside on a bad day."""
    bucket.faults = FaultPlan(faults=(Fault(effect=Status(code=403), kinds=(Kind.READ, Kind.LIST)),))
    with pytest.raises(ckptkit.StoreError):
        scrubbed(home)
    with pytest.raises(ckptkit.StoreError):
        ckptkit.verify(ROOT)
    bucket.faults = FaultPlan()
    assert states() == {0: "proven", 1: "proven"}


def test_step_saved_again_during_the_repair_is_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of the older save would be put into the newer one of the same number."""
    store = open_store(ROOT)
    damage(store, "sidecar")
    anew = {"1/state/manifest.ocdbt": b"another save's", "1/state/_ckptkit/process-0.json": b"another save's"}
    copy_aside = mending._copy_aside

    def replaced(*args: Any) -> None:
        copy_aside(*args)
        for key, data in anew.items():
            store.put(key, data)

    monkeypatch.setattr(mending, "_copy_aside", replaced)
    found = scrubbed(home)
    assert acts(found) == [(1, "durable", "leave", False)]
    assert found.treatments[0].reason == "it was pruned or replaced meanwhile"
    assert {key: store.get(key) for key in anew} == anew


def test_step_saved_again_during_the_quarantine_is_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer save of that number would be deleted for the damage of the older one."""
    store, anew = open_store(ROOT), ("1/_CHECKPOINT_METADATA", b'{"another": "save"}')
    damage(store, "flipped")
    before = store.list_all("1")
    shutil.rmtree(home / "ram")
    (home / "ram").mkdir()
    remove_step = mending.remove_step

    def replaced_before(*args: Any) -> Any:
        store.put(*anew)
        return remove_step(*args)

    monkeypatch.setattr(mending, "remove_step", replaced_before)
    assert acts(scrubbed(home)) == [(1, "durable", "leave", False)]
    assert store.list_all("1") == before
    assert store.get(anew[0]) == anew[1]


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(
    ("how", "stride"),
    [
        ("data gone", 27),
        pytest.param("data gone", 9, marks=pytest.mark.long),
        pytest.param("data gone", 1, marks=pytest.mark.slow),
        pytest.param("sidecar gone", 1, marks=pytest.mark.slow),
    ],
)
def test_crashed_repair_is_completed_by_the_next(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str, stride: int
) -> None:
    """A step would be left that proves as something else, or that no repair can mend any more."""
    changes = {name: getattr(RetryStore, name) for name in ("put", "copy", "delete_many")}
    left = 1 << 30

    def counted(name: str) -> Any:
        def change(self: RetryStore, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Died
            left -= 1
            return changes[name](self, *args, **kwargs)

        return change

    store = open_store(ROOT)
    damage(store, how)
    damaged = {key: store.get(key) for key in store.list_all("1")}
    for name in changes:
        monkeypatch.setattr(RetryStore, name, counted(name))
    points, ended = 0, False
    while not ended:
        left = points
        try:
            assert acts(scrubbed(home)) == [(1, "durable", "repair", True)]
            ended = True
        except Died:
            left = 1 << 30
            state = states()[1]
            if state == "corrupt":
                assert acts(scrubbed(home)) == [(1, "durable", "repair", True)]
            assert states() == {0: "proven", 1: "proven"}, points
            store.delete_many(store.list_all("1"))
            for key, data in damaged.items():
                store.put(key, data)
        left = 1 << 30
        points += stride
    assert points > 10
    assert_restored(home)
    assert repairs(store), "what died mid-way has left its copy"
    scrubbed(home)
    assert repairs(store), "it may live"
    monkeypatch.setattr(mending, "wall_s", lambda: time.time() + 1.1 * 86400)
    scrubbed(home)
    assert not repairs(store)


def repairs(store: Store) -> list[str]:
    return [key for key in store.list_all("_ckptkit") if "repair-" in key]

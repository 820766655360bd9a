"""Checkpoints that somebody made to do harm: a clear error, and nothing hung, filled, or touched outside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.errors import CheckpointError
from ckptkit.model import paths
from ckptkit.store import LocalStore
from tests.cases import long_except
from tests.model.hostile import HOST, HOSTILE, bounded, changed, places, sealed
from tests.states import make_state, save_args


class Saved:
    """A job with two steps in every tier, and a canary next to it that must not change."""

    def __init__(self, home: Path):
        self.job, self.canary = home / "job", home / "canary"
        with self.manager() as manager:
            for step in (0, 1):
                manager.save(step, args=save_args(make_state(step), step))
                manager.wait_until_finished()
        (self.canary / "_ckptkit/epochs").mkdir(parents=True)
        for name in ("slot-0.bin", "process-0.json", "_ckptkit/epochs/00000009.json", "metadata"):
            (self.canary / name).write_bytes(b"canary")
        self.content = self._content()

    def manager(self, *, fast: bool = True) -> ckptkit.CheckpointManager:
        tiers = [ckptkit.Tier.ram(str(self.job / "ram"))] if fast else []
        options = ocp.CheckpointManagerOptions(save_interval_steps=1)
        return ckptkit.CheckpointManager(
            self.job / "root",
            options=options,
            tiers=tiers,
            host_id=HOST,
            processes=ckptkit.ProcessOptions(timeout_s=30),
        )

    def slot_dir(self) -> Path:
        (found,) = (self.job / "ram").glob(f"*/{HOST}/0")
        return found

    def manifest(self) -> Path:
        (found,) = self.slot_dir().glob("step-000000000001-*.json")
        return found

    def _content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.canary.rglob("*")) if path.is_file()}

    def looked_at(self) -> None:
        """Everything that reads: none may hang, or do more than raise one of our errors."""

        def restore(*, fast: bool) -> None:
            with self.manager(fast=fast) as manager:
                manager.restore(None)

        acts: list[Callable[[], Any]] = [
            lambda: ckptkit.verify(str(self.job / "ram")),
            lambda: ckptkit.verify(str(self.job / "root")),
            lambda: ckptkit.list_steps(str(self.job / "root"), tiers=[str(self.job / "ram")], host_id=HOST),
            lambda: ckptkit.inspect(str(self.job / "root")),
            lambda: restore(fast=True),
            lambda: restore(fast=False),
            lambda: ckptkit.scrub(str(self.job / "root"), [str(self.job / "ram")], repair=True, host_id=HOST),
        ]
        with bounded(self.canary):
            for act in acts:
                with suppress(CheckpointError):
                    act()
        assert self._content() == self.content


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def resealed(path: Path, change: Callable[[Any], None]) -> None:
    record = json.loads(path.read_bytes())["manifest"]
    change(record)
    path.write_bytes(sealed(record))


def grow(record: Any) -> None:
    """A leaf of 4 TB in one cell, which a sparse slot could even hold."""
    (leaf,) = [leaf for leaf in record["arrays"]["state"] if leaf["path"] == ["w"]]
    leaf.update(shape=[2**20, 2**20], cell=[2**20, 2**20], boxes=[[[0, 0], [2**20, 2**20], 1 << 30, ["a" * 32]]])


def outside(record: Any) -> None:
    record["arrays"]["../../../canary"] = record["arrays"].pop("state")


@pytest.mark.parametrize("change", [grow, outside])
@pytest.mark.parametrize("where", long_except(["slot"], ["slot", "sidecar", "both"]))
def test_commands_survive_a_hostile_manifest(saved: Saved, change: Callable[[Any], None], where: str) -> None:
    """A repair would write, or a restore allocate, any size in a manifest."""
    if where != "sidecar":
        resealed(saved.manifest(), change)
    if where != "slot":
        resealed(saved.job / "root/1/state/_ckptkit/process-0.json", change)
    saved.looked_at()


@pytest.mark.parametrize(
    "what",
    long_except(
        ["slot", "sidecars", "records", "newest"],
        ["slot", "manifest", "sidecars", "epochs", "records", "item", "json", "newest"],
    ),
)
def test_links_out_of_the_tree_are_not_followed(saved: Saved, what: str) -> None:
    """The target of a link would be read as ours, or overwritten by a repair."""
    if what == "epochs":
        old = saved.job / "root/_ckptkit/epochs"
        old.rename(saved.job / "epochs-were-here")
        old.symlink_to(saved.canary / "_ckptkit/epochs")
    elif what == "records":
        old = saved.job / "root/_ckptkit"
        old.rename(saved.job / "records-were-here")
        old.symlink_to(saved.canary / "_ckptkit")
    elif what in ("sidecars", "item"):
        old = saved.job / "root/1/state" / ("_ckptkit" if what == "sidecars" else "")
        old.rename(saved.job / "was-here")
        (saved.job / "root/1/state" / ("_ckptkit" if what == "sidecars" else "")).symlink_to(saved.canary)
    else:
        slot = saved.slot_dir() / json.loads(saved.manifest().read_bytes())["manifest"]["slot"]
        newest = saved.slot_dir() / "newest.json"
        old = {"slot": slot, "manifest": saved.manifest(), "newest": newest, "json": saved.job / "root/1/data/metadata"}
        old[what].unlink()
        old[what].symlink_to(saved.canary / "slot-0.bin")
    saved.looked_at()


@pytest.mark.parametrize("tier", long_except(["ram"], ["ram", "ssd"]))
@pytest.mark.parametrize("what", ["slots", "pipe", "lock", "directory", "host", "job"])
def test_a_link_in_a_tier_is_not_written_through(tmp_path: Path, tier: str, what: str) -> None:
    """A save would overwrite whatever file of this user a link in a ramdisk names."""
    canary, root = tmp_path / "canary", tmp_path / tier
    canary.mkdir()
    (canary / "file").write_bytes(b"canary")
    kinds = (
        [ckptkit.Tier.ram(str(root))] if tier == "ram" else [ckptkit.Tier.ssd(str(root), save=ckptkit.EverySteps(1))]
    )
    options = ocp.CheckpointManagerOptions(save_interval_steps=1)

    def run(steps: range) -> None:
        with ckptkit.CheckpointManager(
            tmp_path / "root",
            options=options,
            tiers=kinds,
            host_id=HOST,
            processes=ckptkit.ProcessOptions(timeout_s=30),
        ) as manager:
            for step in steps:
                manager.save(step, args=save_args(make_state(step), step))
                manager.wait_until_finished()
            assert manager.restore(None)["data"] == {"step": steps[-1]}

    run(range(2))
    (slot_dir,) = root.glob(f"*/{HOST}/0")
    if what in ("slots", "pipe"):
        for slot in slot_dir.glob("slot-*.bin"):
            slot.unlink()
            os.mkfifo(slot) if what == "pipe" else slot.symlink_to(canary / "file")
    else:
        at = {"lock": slot_dir / "lock", "directory": slot_dir, "host": slot_dir.parent, "job": slot_dir.parent.parent}
        shutil.rmtree(at[what]) if at[what].is_dir() else at[what].unlink()
        at[what].symlink_to(canary / "file" if what == "lock" else canary)
    with bounded(canary):
        if what in ("slots", "pipe"):
            run(range(2, 5))
            assert {proof.state for proof in ckptkit.verify(str(root)).steps} == {"proven"}
        else:
            with pytest.raises(ckptkit.TierUnusableError, match=r"link|symbolic"):
                run(range(2, 5))
    assert sorted(path.name for path in canary.iterdir()) == ["file"]
    assert (canary / "file").read_bytes() == b"canary"


def test_deletion_does_not_follow_links_in_a_durable_root(tmp_path: Path) -> None:
    """A prune would empty a directory that somebody linked to."""
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_bytes(b"canary")
    root = tmp_path / "root"
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=save_args(make_state(1), 1))
        manager.wait_until_finished()
    leaving = root / paths.LEAVING_DIR
    leaving.mkdir(exist_ok=True)
    (leaving / "1-link").symlink_to(canary)
    (root / paths.temporary_name("5", 0, "a" * 32)).symlink_to(canary)
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(2, args=save_args(make_state(2), 2))
        manager.wait_until_finished()
        assert list(leaving.iterdir()) == []
        leaving.rmdir()
        leaving.symlink_to(canary)
        with pytest.raises(ckptkit.StoreError, match="is a link"):
            manager.delete(1)
        manager.reload()
        assert manager.all_steps() == [1, 2]
    with pytest.raises(ckptkit.StoreError, match="leads out of"):
        ckptkit.CheckpointManager(root)
    assert [path.name for path in canary.iterdir()] == ["file"]


def test_circular_links_terminate(tmp_path: Path) -> None:
    """Two links to the root that holds them would be followed a trillion ways."""
    (tmp_path / "a").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"1")
    assert LocalStore(tmp_path).list_all("") == ["d/x"]


@pytest.mark.parametrize(
    "name",
    long_except(
        ["state/_METADATA"],
        ["state/_METADATA", "state/array_metadatas/process_0", "_CHECKPOINT_METADATA", "state/_sharding"],
    ),
)
def test_commands_survive_hostile_orbax_metadata(saved: Saved, name: str) -> None:
    """A tool that looks at a checkpoint would die of it."""
    path = saved.job / "root/1" / name
    whole = path.read_bytes()
    record = json.loads(whole)
    chosen = np.random.default_rng(3)
    ways = list(places(record))
    with bounded(saved.canary):
        for at in (ways[i] for i in chosen.choice(len(ways), size=min(len(ways), 5), replace=False)):
            for value in (HOSTILE[i] for i in chosen.choice(len(HOSTILE), size=2, replace=False)):
                path.write_text(json.dumps(changed(record, at, value)))
                for act in (ckptkit.verify, ckptkit.inspect):
                    with suppress(CheckpointError):
                        act(str(saved.job / "root/1"))
        for data in (b"[" * 100_000, b"\xff\xfe\0", b"9" * 100_000):
            path.write_bytes(data)
            with suppress(CheckpointError):
                ckptkit.verify(str(saved.job / "root/1"))


def test_store_does_not_leave_its_root(tmp_path: Path) -> None:
    """A record would be read from, or written to, wherever a link leads; a pipe would be waited for."""
    root, other = tmp_path / "root", tmp_path / "other"
    for directory in (root / "a", other):
        directory.mkdir(parents=True)
    (other / "x").write_bytes(b"canary")
    (root / "link").symlink_to(other)
    (root / "inside").symlink_to(root / "a")
    os.mkfifo(root / "pipe")
    store = LocalStore(root)
    store.put("inside/x", b"1")
    assert store.get("a/x") == b"1"
    for act in (
        lambda: store.get("link/x"),
        lambda: store.put("link/x", b"2"),
        lambda: store.delete("link/x"),
        lambda: store.stat("link/x"),
        lambda: store.list("link"),
        lambda: store.list_all("link"),
        lambda: store.list_all(""),
        lambda: store.delete_many(["a/x", "link/x"]),
    ):
        with pytest.raises(ckptkit.StoreError, match="leads out of"):
            act()
    with pytest.raises(ckptkit.StoreError, match="a pipe or a device"):
        store.get("pipe")
    assert (other / "x").read_bytes() == b"canary"

"""Items that only a handler can write: held by every tier, proven, and given back to the handler."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.verification import verify

A = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
STATE = {"w": jnp.arange(4.0)}
HOST = "here"


class StoryHandler(ocp.CheckpointHandler):
    """A handler of the caller's own: one file, and one in a directory."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "notes").mkdir()
        (directory / "notes" / "one.txt").write_text(args.text)
        (directory / "length").write_bytes(bytes([len(args.text)]))

    def restore(self, directory: Any, args: Any = None) -> str:
        text = (directory / "notes" / "one.txt").read_text()
        assert (directory / "length").read_bytes() == bytes([len(text)])
        return text


class _Story(A.CheckpointArgs):
    def __init__(self, text: str = ""):
        self.text = text


@ocp.args.register_with_handler(StoryHandler, for_save=True)
class StorySave(_Story):
    pass


@ocp.args.register_with_handler(StoryHandler, for_restore=True)
class StoryRestore(_Story):
    pass


def manager(root: Path, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(
        root / "run", host_id=HOST, tiers=[ckptkit.Tier.ram(str(root / "ram"), slots=2)], **options
    )


def saved(root: Path, **others: Any) -> Path:
    with manager(root) as made:
        made.save(1, args=A.Composite(state=A.StandardSave(STATE), story=StorySave("once"), **others))
        made.wait_until_finished()
    return root


def lose_all_but(root: Path, left: str) -> None:
    shutil.rmtree(root / "ram") if left == "durable" else shutil.rmtree(root / "run" / "1")


@pytest.mark.parametrize("left", ["ram", "durable"])
def test_item_of_a_handler_is_held_by_each_tier(left: str, tmp_path: Path) -> None:
    """One odd item moved the whole step out of the ramdisk, and to Orbax on the thread of the step loop."""
    lose_all_but(saved(tmp_path), left)
    with manager(tmp_path) as made:
        found = made.restore(1, args=A.Composite(state=A.StandardRestore(STATE), story=StoryRestore()))
        assert found["story"] == "once"
        assert (found["state"]["w"] == STATE["w"]).all()


def test_items_beside_that_of_a_handler_are_written_with_it(tmp_path: Path) -> None:
    """Random keys and single arrays have handlers of Orbax, which would write the whole step."""
    key, numpy_key = jax.random.key(3), np.random.get_state()
    saved(
        tmp_path,
        key=A.JaxRandomKeySave(key),
        numpy_key=A.NumpyRandomKeySave(numpy_key),
        vector=A.ArraySave(jnp.arange(3)),
        words=A.JsonSave({"a": 1}),
    )
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        found = stock.restore(
            1,
            args=A.Composite(
                state=A.StandardRestore(STATE),
                story=StoryRestore(),
                key=A.JaxRandomKeyRestore(),
                numpy_key=A.NumpyRandomKeyRestore(),
                vector=A.ArrayRestore(),
                words=A.JsonRestore(),
            ),
        )
    assert found["story"] == "once"
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(key)).all()
    assert all(np.array_equal(x, y) for x, y in zip(found["numpy_key"], numpy_key, strict=True))
    assert (found["vector"] == jnp.arange(3)).all()
    assert not verify(str(tmp_path / "run")).corrupt


def test_changed_file_of_a_handler_is_found(tmp_path: Path) -> None:
    """Nothing kept digests of such items: a changed bit was restored."""
    path = saved(tmp_path) / "run/1/story/notes/one.txt"
    assert {step.state for step in verify(str(tmp_path / "run")).steps} == {"proven"}
    path.write_text("onve")
    report = verify(str(tmp_path / "run"))
    assert report.corrupt
    assert "notes/one.txt is not what was saved" in str(report.steps)
    shutil.rmtree(tmp_path / "ram")
    with manager(tmp_path) as made:
        assert made.restore(1, args=A.Composite(story=StoryRestore()))["story"] == "once"


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a manifest would hold are taken for larger ones."""
    monkeypatch.setattr("ckptkit.manager.save.INLINE_BYTES_MAX", 3)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("left", ["ram", "durable"])
def test_large_item_of_a_handler_is_held_by_each_tier(left: str, tmp_path: Path) -> None:
    """Manifests are read whole at every start: large files lie in the slot, and were in no fast tier before."""
    with manager(tmp_path) as made:
        for step in (1, 2):
            args: Any = A.Composite(state=A.StandardSave(STATE), story=StorySave("once" * step))
            assert made.save(step, args=args)
        made.wait_until_finished()
        assert {tier for record in made.steps() for tier in record.tiers} == {"ram", "durable"}
    assert not list((tmp_path / "ram").rglob(".item-*"))
    assert (tmp_path / "run/2/story/notes/one.txt").read_text() == "onceonce"
    for place in ("run", "ram"):
        assert {step.state for step in verify(str(tmp_path / place)).steps} == {"proven"}
    shutil.rmtree(tmp_path / "ram") if left == "durable" else shutil.rmtree(tmp_path / "run" / "2")
    with manager(tmp_path) as made:
        found = made.restore(None, args=A.Composite(state=A.StandardRestore(STATE), story=StoryRestore()))
        assert found["story"] == "onceonce"
        assert (found["state"]["w"] == STATE["w"]).all()
    with manager(tmp_path) as made:
        assert made.restore(2)["story"] == "onceonce"


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("damage", ["changed", "cut short", "gone"])
def test_damaged_large_file_is_found_and_not_restored(damage: str, tmp_path: Path) -> None:
    """The handler would give back other values, or fail with an error of its own."""
    path = saved(tmp_path) / "run/1/story/notes/one.txt"
    path.unlink() if damage == "gone" else path.write_text("onve" if damage == "changed" else "on")
    report = verify(str(tmp_path / "run"))
    assert report.corrupt
    assert "one.txt" in str(report.steps)
    with manager(tmp_path) as made:  # the ramdisk has it whole
        assert made.restore(1, args=A.Composite(story=StoryRestore()))["story"] == "once"
    shutil.rmtree(tmp_path / "ram")
    with manager(tmp_path) as made, pytest.raises(ckptkit.CorruptCheckpointError, match=r"one\.txt"):
        made.restore(1, args=A.Composite(story=StoryRestore()))


@pytest.mark.usefixtures("all_large")
def test_large_file_in_a_damaged_slot_is_restored_from_the_durable_step(tmp_path: Path) -> None:
    """A flipped bit of the ramdisk must not reach the handler."""
    saved(tmp_path)
    (slot,) = (path for path in (tmp_path / "ram").rglob("slot-*.bin") if b"once" in path.read_bytes())
    slot.write_bytes(slot.read_bytes().replace(b"once", b"onve"))
    with manager(tmp_path) as made:
        assert made.restore(1, args=A.Composite(story=StoryRestore()))["story"] == "once"


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("damage", ["changed", "cut short", "gone", "sidecars gone"])
def test_damaged_file_of_a_handler_is_repaired_from_the_ramdisk(
    damage: str, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub set the step aside although each byte of it was in the ramdisk."""
    if is_large:
        monkeypatch.setattr("ckptkit.manager.save.INLINE_BYTES_MAX", 3)
    step = saved(tmp_path) / "run/1"
    path = step / "story/notes/one.txt"
    if damage == "gone":
        path.unlink()
    else:
        path.write_text("on" if damage == "cut short" else "onve")
    if damage == "sidecars gone":
        shutil.rmtree(step / "state" / "_ckptkit")
    (treatment,) = ckptkit.scrub(str(tmp_path / "run"), [str(tmp_path / "ram")], repair=True, host_id=HOST).treatments
    assert (treatment.act, treatment.done) == ("repair", True), treatment
    shutil.rmtree(tmp_path / "ram")
    assert {each.state for each in verify(str(tmp_path / "run")).steps} == {"proven"}
    with manager(tmp_path) as made:
        assert made.restore(1, args=A.Composite(story=StoryRestore()))["story"] == "once"


@pytest.mark.usefixtures("all_large")
def test_directory_of_a_handler_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """A process that is killed while the handler writes would fill the ramdisk, run by run."""
    saved(tmp_path)
    (lock,) = (tmp_path / "ram").rglob("lock")
    left = lock.parent / ".item-left"
    (left / "item").mkdir(parents=True)
    (left / "item" / "large").write_bytes(b"x" * 100)
    with manager(tmp_path) as made:
        assert made.restore(1, args=A.Composite(story=StoryRestore()))["story"] == "once"
        assert not left.exists()


@pytest.mark.parametrize("what", ["link", "linked directory", "empty directory", "name that is not UTF-8"])
def test_what_is_no_file_is_left_to_orbax(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore from a fast tier would not have it."""
    plain, name = StoryHandler.save, "more\udcff" if what == "name that is not UTF-8" else "more"

    def save(self: Any, directory: Any, args: Any) -> None:
        plain(self, directory, args)
        if what == "empty directory":
            (directory / "more").mkdir()
        elif name != "more":
            Path(str(directory), name).write_bytes(b"?")
        else:
            os.symlink("length" if what == "link" else "notes", directory / "more")

    monkeypatch.setattr(StoryHandler, "save", save)
    assert (saved(tmp_path) / "run/1/story" / name).exists()
    shutil.rmtree(tmp_path / "run" / "1")
    with manager(tmp_path) as made:
        assert made.all_steps() == []


def test_error_of_a_handler_is_raised_by_save(tmp_path: Path) -> None:
    """The step is then in no tier."""
    with manager(tmp_path) as made:
        with pytest.raises(TypeError):
            made.save(1, args=A.Composite(state=A.StandardSave(STATE), story=StorySave(None)))  # type: ignore[arg-type]
        assert made.all_steps() == []
        assert made.save(2, args=A.Composite(state=A.StandardSave(STATE), story=StorySave("x")))


@pytest.mark.parametrize("left", ["ram", "durable"])
def test_item_is_restored_without_an_argument(left: str, tmp_path: Path) -> None:
    """Orbax finds the handler by its name in the step's metadata; without it the item is left out."""
    lose_all_but(saved(tmp_path), left)
    with manager(tmp_path) as made:
        assert made.restore(None)["story"] == "once"
    with manager(tmp_path) as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr("ckptkit.durable.orbax.file_items.registered", lambda *_: None)
        patched.setattr("ckptkit.restore.execute.registered", lambda *_: None)
        assert set(made.restore(None).keys()) == {"state"}


@pytest.mark.usefixtures("server", "all_large")
def test_large_item_of_a_handler_in_a_bucket_is_proven(tmp_path: Path) -> None:
    """The files of an item would be lost, or unproven, where the durable tier is a bucket."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=2)]
    with ckptkit.CheckpointManager("gs://runs/run", tiers=tiers, host_id=HOST) as made:
        made.save(1, args=A.Composite(state=A.StandardSave(STATE), story=StorySave("once")))
        made.wait_until_finished()
    assert {step.state for step in verify("gs://runs/run").steps} == {"proven"}
    shutil.rmtree(tmp_path / "ram")
    with ckptkit.CheckpointManager("gs://runs/run") as made:
        assert made.restore(None, args=A.Composite(story=StoryRestore()))["story"] == "once"


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("left", ["ram", "durable"])
def test_step_of_a_large_item_alone_is_restored(left: str, tmp_path: Path) -> None:
    """No array item has a sidecar that could describe it."""
    with manager(tmp_path) as made:
        made.save(1, args=A.Composite(story=StorySave("once")))
        made.wait_until_finished()
    lose_all_but(tmp_path, left)
    with manager(tmp_path) as made:
        assert made.restore(None, args=A.Composite(story=StoryRestore()))["story"] == "once"
        assert made.latest_step() == 1

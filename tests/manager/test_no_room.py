"""A run that cannot hold what it saves: it learns so at its start, and its last line names what is not durable."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.mounts import Mounts

args: Any = ocp.args
MIB = 1 << 20
PLACES = ("ram", "ssd", "durable")


def state() -> dict[str, Any]:
    return {"w": jnp.arange(MIB)}


def manager_of(home: Path, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(
        home / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=options.pop("every", 1)),
        tiers=[ckptkit.Tier.ram(str(home / "ram")), ckptkit.Tier.ssd(str(home / "ssd"))],
        host_id="host",
        **options,
    )


def check_words(error: BaseException, place: Path) -> None:
    """One line: where, the bytes needed and free, what to do."""
    said = str(error)
    assert said.startswith(str(place)), said
    assert " needs " in said, said
    assert " are free " in said, said
    assert "; " in said, said
    assert "\n" not in said, said


@pytest.mark.parametrize("call", ["save", "prepare", "prepare abstract"])
@pytest.mark.parametrize("place", PLACES)
def test_no_room_is_an_error_at_start(tmp_path: Path, mounts: Mounts, place: str, call: str) -> None:
    """A run trained to its end with two warnings, and its last step was nowhere."""
    mount = mounts.small(tmp_path / place, "3m")
    with manager_of(tmp_path) as manager:
        given = args.StandardSave(jax.eval_shape(state) if call == "prepare abstract" else state())
        act = partial(manager.save, 1, args=given) if call == "save" else partial(manager.prepare, given)
        with pytest.raises(ckptkit.StoreFullError) as caught:
            act()
        check_words(caught.value, mount)
        assert manager.all_steps() == []


def test_first_save_raises_once_and_later_ones_degrade_the_tier(tmp_path: Path, mounts: Mounts) -> None:
    """A program that catches the error, to train without this tier, would never save."""
    mounts.small(tmp_path / "ssd", "3m")
    with manager_of(tmp_path) as manager:
        with pytest.raises(ckptkit.StoreFullError):
            manager.save(1, args=args.StandardSave(state()))
        assert manager.save(2, args=args.StandardSave(state()))
        manager.wait_until_finished()
        assert {tier for record in manager.steps() if record.step == 2 for tier in record.tiers} >= {"durable", "ram"}


@pytest.mark.parametrize("place", ["ram", "ssd"])
def test_restore_without_room_for_the_slots_is_an_error(tmp_path: Path, mounts: Mounts, place: str) -> None:
    """A restart on a host with a smaller ramdisk would train, and hold nothing there."""
    with manager_of(tmp_path) as manager:
        manager.save(1, args=args.StandardSave(state()))
        manager.wait_until_finished()
    mount = mounts.small(tmp_path / place, "3m")
    with manager_of(tmp_path) as manager:
        with pytest.raises(ckptkit.StoreFullError) as caught:
            manager.restore(None, args=args.StandardRestore(jax.eval_shape(state)))
        check_words(caught.value, mount)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ckptkit.CheckpointManager(tmp_path / "durable", options=options) as manager:
        found: Any = manager.restore(None, args=args.StandardRestore(jax.eval_shape(state)))
    np.testing.assert_array_equal(found["w"], state()["w"])


def test_full_root_with_steps_warns_at_start(tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture) -> None:
    """A later step may share unchanged bytes, so it may fit: an error would be false."""
    mounts.small(tmp_path / "durable", "6m")
    with manager_of(tmp_path) as manager:
        manager.save(1, args=args.StandardSave(state()))
    manager = manager_of(tmp_path)
    manager.save(2, args=args.StandardSave(state()))
    assert [each for each in caplog.messages if "the next durable save fails, unless most leaves" in each]
    with pytest.raises(ckptkit.SaveFailedError, match="No space left on device; free some"):
        manager.close()


def test_last_line_of_a_run_names_the_step_that_is_not_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run ended with exit code 0 and its last step only in the ramdisk, without a message."""
    with manager_of(tmp_path, every=10) as manager:
        for step in (0, 3):
            manager.save(step, args=args.StandardSave(state()))
            manager.wait_until_finished()
    assert "the run ends, and its last step 3 is only in tier ram: the durable tier has step 0." in caplog.messages[-1]
    caplog.clear()
    with manager_of(tmp_path, every=10) as manager:
        manager.restore(None, args=args.StandardRestore(state()))
        manager.save(4, args=args.StandardSave(state()), force=True)
    with manager_of(tmp_path, every=10) as manager:
        assert manager.all_steps()
    assert not [each for each in caplog.messages if "durable tier has" in each]


def test_last_line_names_a_step_that_no_tier_has(
    tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """The tmpfs was filled by others in mid-run: the last save was lost."""
    mount = mounts.small(tmp_path / "ram", "16m")
    with manager_of(tmp_path, every=10) as manager:
        manager.save(0, args=args.StandardSave(state()))
        manager.wait_until_finished()
        mounts.read_only(mount)
        manager.save(1, args=args.StandardSave(state()))
        with pytest.raises(ckptkit.SaveFailedError):
            manager.wait_until_finished()
    assert "its last step 1 is in no tier: the durable tier has step 0." in caplog.messages[-1]

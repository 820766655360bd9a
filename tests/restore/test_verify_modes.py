"""`verify=` of a restore: the findings of each mode, its report, and how often a sample misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.verify_mode import Verify, VerifyMode, VerifySelection, begin
from ckptkit.slots.reader import read_manifest
from tests.states import abstract, assert_same

LEAVES = 40


def make_state(seed: int) -> dict[str, Any]:
    return {f"leaf {number}": jnp.full(16, seed + number, jnp.float32) for number in range(LEAVES)}


class Job:
    def __init__(self, home: Path):
        self.home = home
        self.events: list[ckptkit.Event] = []

    def manager(self, **options: Any) -> ckptkit.CheckpointManager:
        log = ckptkit.EventLog()
        log.observe(self.events.append)
        return ckptkit.CheckpointManager(
            self.home / "root",
            options=ocp.CheckpointManagerOptions(save_interval_steps=1),
            tiers=[ckptkit.Tier.ram(str(self.home / "ram"))],
            host_id="h0",
            events=log,
            **options,
        )

    def save(self) -> None:
        with self.manager() as manager:
            for step in (0, 1):
                manager.save(step, args=ocp.args.StandardSave(make_state(step)))  # pyright: ignore[reportCallIssue]
                manager.wait_until_finished()

    def flip(self, leaves: int) -> None:
        """Flips a bit in the first leaves of the newest slot."""
        (path,) = (self.home / "ram").rglob("step-000000000001-*.json")
        manifest = read_manifest(path)
        with path.with_name(manifest.slot).open("r+b") as file:
            for leaf in manifest.arrays["default"][:leaves]:
                file.seek(leaf.boxes[0].offset + 1)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))

    def restore(self, **options: Any) -> tuple[Any, list[ckptkit.Event], list[ckptkit.StepRecord]]:
        self.events.clear()
        with self.manager(**options) as manager:
            found = manager.restore(None, args=ocp.args.StandardRestore(abstract(make_state(0))))  # pyright: ignore[reportCallIssue]
            return found, [e for e in self.events if e.kind == ckptkit.Kind.RESTORED], manager.steps()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = Job(tmp_path)
    found.save()
    return found


def test_each_mode_detects_the_documented_damage(job: Job) -> None:
    """A mode would promise what another one does."""
    job.flip(LEAVES)
    found, (restored,), _ = job.restore()
    assert_same(found, make_state(1))
    assert (restored.fields["sources"], restored.fields["verify"]) == ({"durable": LEAVES * 64}, "always")
    found, (restored,), _ = job.restore(restoring=ckptkit.RestoreOptions(verify="never"))
    assert restored.fields["sources"] == {"ram": LEAVES * 64}
    saved = make_state(1)
    changed = [key for key, leaf in found.items() if np.asarray(leaf).tobytes() != np.asarray(saved[key]).tobytes()]
    assert len(changed) == LEAVES, "nothing is compared: this is what never means"
    found, (restored,), _ = job.restore(restoring=ckptkit.RestoreOptions(verify=ckptkit.Sample(share=0.5, seed=7)))
    assert_same(found, make_state(1))
    assert restored.fields["verify"] == "always", "a sample that finds damage gives way to a proof of everything"
    assert restored.fields["sources"] == {"durable": LEAVES * 64}


@pytest.mark.long
def test_sample_miss_rate_matches_its_formula(job: Job) -> None:
    """A share that is not the share would let through more than documented."""
    job.flip(1)
    seeds, share = 60, 0.4
    missed = 0
    for seed in range(seeds):
        _, (restored,), _ = job.restore(restoring=ckptkit.RestoreOptions(verify=ckptkit.Sample(share=share, seed=seed)))
        missed += "durable" not in restored.fields["sources"]
    # (1 - share) ** 1 of 60: 36, with a standard deviation of 3.8.
    assert 36 - 16 < missed < 36 + 16


@pytest.mark.parametrize("cells", [1, 3, 10])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_miss_probability_matches_its_formula(cells: int, share: float) -> None:
    """The formula in the docstring would not be that of the code."""
    leaf = LeafRecord(path=("w",), keys="d", kind="jax", shape=(100,), dtype="uint8", cell=(1,))
    runs = 4000
    boxes = [Box((at,), (at + 1,)) for at in range(cells)]
    missed = sum(not any(VerifySelection("sample", share, seed)(leaf, box) for box in boxes) for seed in range(runs))
    expected = (1 - share) ** cells
    deviation = (expected * (1 - expected) / runs) ** 0.5
    assert abs(missed / runs - expected) <= 5 * deviation + 1e-3


def test_unverified_restore_is_never_reported_as_verified(job: Job) -> None:
    """Somebody would trust a step as verified that nobody has read."""
    modes: tuple[tuple[VerifyMode, bool], ...] = (("always", True), ("sample", False), ("never", False))
    for verify, proven in modes:
        _, (restored,), records = job.restore(restoring=ckptkit.RestoreOptions(verify=verify))
        assert restored.fields["verify"] == verify
        (record,) = [record for record in records if record.step == 1]
        assert (record.verified_s is not None) == proven
        assert ("seed" in restored.fields) == (verify == "sample")


def test_missing_slot_is_detected_in_every_mode(job: Job) -> None:
    """A mode that compares nothing would give bytes that were never written."""
    for path in (job.home / "ram").rglob("slot-*.bin"):
        with path.open("r+b") as file:
            file.truncate(0)
    found, (restored,), _ = job.restore(restoring=ckptkit.RestoreOptions(verify="never"))
    assert_same(found, make_state(1))
    assert list(restored.fields["sources"]) == ["durable"]


def test_mode_applies_to_the_durable_tier_and_v1(job: Job) -> None:
    """The choice would hold for one tier, or for one of the two surfaces."""
    import shutil

    from ckptkit.v1 import Checkpointer

    shutil.rmtree(job.home / "ram")
    found, (restored,), _ = job.restore(restoring=ckptkit.RestoreOptions(verify="never"))
    assert_same(found, make_state(1))
    assert restored.fields["verify"] == "never"
    with Checkpointer(job.home / "v1", restoring=ckptkit.RestoreOptions(verify="never")) as checkpointer:
        checkpointer.save(0, make_state(0))
        checkpointer.load(0, abstract(make_state(0)))
        (record,) = checkpointer.manager.steps()
        saved_s = record.verified_s
        assert saved_s is not None, "its own save proved it"
        checkpointer.load(0, abstract(make_state(0)))
        assert checkpointer.manager.steps()[0].verified_s == saved_s, "a restore that proves nothing changes nothing"


@pytest.mark.parametrize("verify", ["sometimes", None, 0.5])
def test_unknown_mode_is_refused(tmp_path: Path, verify: Any) -> None:
    """A mistyped mode would prove nothing."""
    with pytest.raises(ValueError, match=r"give 'always', 'sample', 'never' or ckptkit\.Sample"):
        ckptkit.CheckpointManager(tmp_path, restoring=ckptkit.RestoreOptions(verify=verify))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.0, 1.0, -1, 2])
def test_invalid_sample_share_is_refused(share: float) -> None:
    """`Sample(share=0)` would be `never` by another name."""
    with pytest.raises(ValueError, match="give a share between 0 and 1"):
        ckptkit.Sample(share=share)


def test_every_restore_uses_another_seed() -> None:
    """All restores would miss the same fault."""
    verify: Verify = "sample"
    assert len({begin(verify).seed for _ in range(8)}) == 8
    assert begin(ckptkit.Sample(seed=3)).seed == 3

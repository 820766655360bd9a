"""The kill campaign's parts: its plan, its oracle, its verdict. The campaign itself: `make campaign NAME=kill`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from bench.kill import MOMENTS, plan
from bench.kill_oracle import Save, newest_covered
from bench.kill_report import judge
from ckptkit import EventLog, Kind


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    """Tiers with steps 1 and 3 (ram), and 2 (everywhere)."""
    tiers = [
        ckptkit.Tier.ram(str(tmp_path / "ram")),
        ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(2)),
    ]
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers, options=options) as manager:
        for step in (1, 2, 3):
            state = {"w": jnp.full((64, 3), step, jnp.bfloat16), "n": jnp.int32(step)}
            assert manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
    return {name: tmp_path / name for name in ("ram", "ssd", "durable")}


def newest(roots: dict[str, Path]) -> int | None:
    save = newest_covered([roots["ram"]], [roots["ssd"]], roots["durable"])
    return None if save is None else save.step


def test_the_oracle_finds_the_newest_save_that_the_files_cover(roots: dict[str, Path]) -> None:
    """An oracle that expects too little would call a lost step recovered."""
    assert newest(roots) == 3
    (manifest,) = roots["ram"].rglob("step-000000000003-*.json")
    record = json.loads(manifest.read_text())["manifest"]
    slot = manifest.parent / record["slot"]
    data = bytearray(slot.read_bytes())
    (leaves,) = record["arrays"].values()
    data[leaves[0]["boxes"][0][2]] ^= 1
    slot.write_bytes(data)
    assert newest(roots) == 2, "a slot that does not match its digests covers nothing"
    for path in [*roots["ram"].rglob("step-*.json"), *roots["ssd"].rglob("step-*.json")]:
        path.unlink()
    assert newest(roots) == 2, "the durable step"


def test_the_oracle_knows_abandoned_branches(roots: dict[str, Path]) -> None:
    """A rollback's higher steps would be demanded of a restore that rightly leaves them."""
    (record,) = (roots["durable"] / "_ckptkit" / "epochs").glob("????????.json")
    epoch = json.loads(record.read_text())["epoch"] + 1
    (record.parent / f"{epoch:08d}.json").write_text(json.dumps({"epoch": epoch, "ancestry": [[epoch, 1, 1, 0]]}))
    assert newest(roots) == 1


def test_seed_repeats_its_plan_with_every_kill_moment() -> None:
    """A failure could not be repeated, or mid-restore never be tried."""
    kills = plan(50, 4, 3)
    assert kills == plan(50, 4, 3) != plan(50, 4, 4)
    assert set(Counter(kill.moment for kill in kills)) == set(MOMENTS)
    assert {kill.victims for kill in kills} == {(0,), (1,), (2,), (3,), (0, 1), (2, 3)}
    assert 20 <= sum(kill.wipes for kill in kills) <= 30


def test_verdict_detects_wrong_bits_wrong_step_and_missing_job(tmp_path: Path) -> None:
    """A campaign could end well whatever came back."""
    kills = plan(3, 2, 0)
    log = EventLog(tmp_path / "launcher.jsonl", process=-1)
    log.emit(Kind.STARTED, attempt=0)
    for attempt in range(3):
        log.emit(Kind.DISRUPTED, attempt=attempt, lost=0, cause="SIGKILL", wiped=[], detect_s=0.1)
    reference = [[step, f"digest {step}"] for step in range(1, 20)]

    def life(attempt: int, restored: int | None, digests: list[list[object]]) -> None:
        own = tmp_path / "host-0"
        events = EventLog(own / "events" / f"attempt-{attempt}-process-0.jsonl")
        events.emit(Kind.STARTED, attempt=attempt)
        if restored is not None:
            events.emit(Kind.RESTORED, step=restored, save_id=f"{restored}@1.0", sources={"ram": 5}, duration_s=0.1)
        events.emit(Kind.RESUMED, step=restored or 0)
        events.close()
        (own / f"proof-{attempt}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in digests))

    life(-1, None, [*reference])
    life(0, None, [*reference[:6]])
    life(1, 4, [*reference[4:9]])
    life(2, 6, [[7, "digest 8"]])
    saves = [Save(epoch=1, number=0, step=step, run="a") for step in (4, 8, 6)]
    result = judge(tmp_path, kills, saves)
    assert result["recovered"] == 1
    assert [row["why"] for row in result["rows"]] == [
        None,
        "restored 6@1.0, the files covered 8@1.0",
        "the job never came back",
    ]
    assert result["rows"][0]["lost_steps"] == 2
    saves[1] = saves[2]
    assert judge(tmp_path, kills, saves)["rows"][1]["why"] == "host-0: other bits at step 7"

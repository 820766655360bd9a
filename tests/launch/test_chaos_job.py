"""`ckptkit chaos` on a training script with a manager: the events and the report have each fault; the end is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.events import Kind, read_events
from ckptkit.goodput import goodput_page, goodput_report, load_run, timeline_of
from tests.mounts import Mounts

# README's loop: root, ramdisk, disk.
TRAIN = """
import sys, time, jax, jax.numpy as jnp, orbax.checkpoint as ocp
import ckptkit
state = {"w": jnp.arange(4096.0), "key": jax.random.key(0)}
step_fn = jax.jit(lambda s: {**s, "w": s["w"] * 1.01 + 1})
root, *places = sys.argv[1:]
tiers = [tier(place) for tier, place in zip((ckptkit.Tier.ram, ckptkit.Tier.ssd), places)]
options = ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2)
with ckptkit.CheckpointManager(root, options=options, tiers=tiers) as manager:
    if manager.latest_step() is not None:
        state = manager.restore(None, args=ocp.args.StandardRestore(state))
    for step in range((manager.latest_step() or 0) + 1, STEPS):
        state = step_fn(state)
        time.sleep(0.05)
        manager.save(step, args=ocp.args.StandardSave(state))
ckptkit.state_digest(state)
"""


def script(tmp_path: Path, steps: int) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace("STEPS", str(steps)))
    return [sys.executable, str(path)]


@pytest.mark.long
def test_report_has_every_fault_and_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The person would have to find the job's directories and its logs to learn what a campaign had shown."""
    monkeypatch.chdir(tmp_path)
    words = ["--mtbf", "0.2s", "--wipe", "ram:1", "--flip", "ssd:1", "--seed", "7", "--faults", "2", "--report", "out/"]
    places = [str(tmp_path / name) for name in ("root", "ram", "ssd")]
    assert main(["chaos", *words, "--", *script(tmp_path, 60), *places]) == 0
    shown = capfd.readouterr().out
    assert shown.endswith("\n\n" + Path("out/report.txt").read_text())
    assert "goodput " in shown
    found = json.loads(Path("out/report.json").read_text())
    assert [each["fault"]["kind"] for each in found["faults"]] == ["kill", "kill"]
    assert (found["back_s_samples"], found["back_s_p99"]) == (2, None)
    assert 0 < found["goodput"] < 1
    assert found["steps_repeated"] > 0
    assert found["repeated_s"] > 0
    events = [event for event in read_events("out/events/launcher.jsonl") if event.kind == Kind.INJECTED]
    told = [(event.fields["fault"], event.fields["what"], event.fields["target"]) for event in events]
    ram = str(tmp_path / "ram")
    harms = [("kill", "process 0"), ("wipe", ram), ("flip", str(tmp_path / "ssd"))]
    expected = [(number, *harm) for number in (0, 1) for harm in harms]
    assert told in (expected, [*expected[:2], *expected[3:]])  # at the first fault the SSD may have no copy yet
    lost = [event for event in read_events("out/events/launcher.jsonl") if event.kind == Kind.DISRUPTED]
    assert [event.fields["wiped"] for event in lost] == [[ram], [ram]]
    kills = [event for event in events if event.fields["what"] == "kill"]
    assert all(kill.at_s <= loss.at_s for kill, loss in zip(kills, lost, strict=True))
    logs = load_run("out/events")
    assert [each.did for each in goodput_report(logs).injected] == [event.fields["did"] for event in events]
    page = Path("out/goodput.html").read_text()
    assert page == goodput_page(goodput_report(logs), timeline_of(logs), title="Goodput under faults")
    assert page.count('<g class="injected">') == len(events)
    assert f"emptied {ram}: " in page
    assert main(["goodput", "out/events"]) == 0
    assert f"emptied {ram}: " in capfd.readouterr().out
    assert main(["chaos", *words, "--", "true"]) == 2
    assert "out is not empty" in capfd.readouterr().err


@pytest.mark.long
def test_job_lives_through_a_full_disk_and_without_its_bucket(
    tmp_path: Path, mounts: Mounts, capfd: pytest.CaptureFixture[str]
) -> None:
    """The helpers would be tested, and not whether a training goes on, saves again and ends with the same bits."""
    disk = mounts.small(tmp_path / "disk", "24m")
    words = ["--kind", "fill:1", "--fill", str(disk), "--kind", "outage:1", "--bucket", f"run={tmp_path / 'objects'}"]
    words += ["--mtbf", "0.3", "--for", "1.5", "--faults", "3", "--seed", "7", "--compare", "--json"]
    places = ["gs://run/{run}", str(tmp_path / "ram-{run}"), str(disk / "{run}")]
    report = ["--report", str(tmp_path / "out")]
    assert main(["chaos", *words, *report, "--", *script(tmp_path, 130), *places]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {each["fault"]["kind"] for each in found["faults"]} == {"fill", "outage"}
    assert (found["state"], found["unplanned"]) == ("equal", [])
    (launcher, job) = (read_events(tmp_path / "out" / "events" / name) for name in LOGS)
    injected = [event.fields for event in launcher if event.kind == Kind.INJECTED]
    assert [(each["what"], each["target"], each["lasts_s"]) for each in injected] == [
        (each["fault"]["kind"], TARGETS[each["fault"]["kind"]], 1.5) for each in found["faults"]
    ]
    assert not [event for event in launcher if event.kind == Kind.DISRUPTED]
    troubled = {event.tier for event in job if event.kind in (Kind.RETRIED, Kind.FAILED, Kind.DEGRADED)}
    assert "ssd" in troubled, "no save met the full disk"
    committed = [event for event in job if event.kind == Kind.COMMITTED and event.tier == "durable"]
    ends_s = [event.at_s + 1.5 for event in launcher if event.fields.get("what") == "outage"]
    waited = [each for each in committed if any(each.at_s - each.fields["duration_s"] < s < each.at_s for s in ends_s)]
    assert waited, "no save waited for the bucket"
    assert committed[-1].step == 128, "saves go on after the faults"


LOGS = ("launcher.jsonl", "attempt-0-process-0.jsonl")
TARGETS = {"fill": "the disk", "outage": "the bucket"}

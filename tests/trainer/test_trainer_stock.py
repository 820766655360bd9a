"""The same loop over stock Orbax: it resumes as ours does, and its events count the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit import Event, EventLog, Kind
from tests.trainer.test_trainer_loop import proof_of, run_config
from trainer.config import ManagerName, RunConfig
from trainer.loop import train


def over(manager: ManagerName, config: RunConfig) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, manager=manager))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("orbax_may_fail")
def test_stock_orbax_runs_resume_bit_exact_and_flips_are_seen(tmp_path: Path) -> None:
    """The peer would be held against a loop that is not the same; or wrong bits never show."""
    root, text = tmp_path, str(tmp_path / "poem.txt")
    Path(text).write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    train(run_config(root, text, "straight", steps=7), EventLog())
    events: list[Event] = []
    for manager in ("orbax", "orbax-sync"):
        here = root / manager
        for steps in (5, 7):
            log = EventLog()
            log.observe(events.append)
            config = run_config(root, text, f"{manager}-resumed", steps=steps, checkpoint=True)
            config = replace(config, checkpoint=replace(config.checkpoint, directory=str(here)))
            train(over(manager, config), log)
        assert proof_of(root, f"{manager}-resumed") == proof_of(root, "straight")
    assert [event.step for event in events if event.kind == Kind.RESUMED] == [5, 5]
    assert {event.step for event in events if event.kind == Kind.STAGED} == {1, 4, 5, 7}
    committed = [event for event in events if event.kind == Kind.COMMITTED]
    assert {event.step for event in committed} >= {5, 7}
    assert all(event.tier == "durable" and event.fields["bytes"] > 10_000 for event in committed)

    path = max((root / "orbax" / "7").rglob("d/*"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 97):  # a single bit may be in a part of the file that nobody reads
        data[at] ^= 16
    path.write_bytes(data)
    config = run_config(root, text, "flipped", steps=8, checkpoint=True)
    config = over("orbax", replace(config, checkpoint=replace(config.checkpoint, directory=str(root / "orbax"))))
    train(run_config(root, text, "eight", steps=8), EventLog())
    try:
        train(config, EventLog())
    except Exception:  # noqa: BLE001  it noticed, in whatever words
        return
    assert proof_of(root, "flipped")[1] != proof_of(root, "eight")[1]

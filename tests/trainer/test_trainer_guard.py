"""The trainer with a guard on poisoned text: it goes back, skips, and comes to bits that chance has no part in."""

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptkit import EventLog, Kind
from ckptkit.errors import GuardStopError
from ckptkit.guard import Alarm, Guard, GuardRecord, Rollback
from tests.forked import Forked
from trainer.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    InputError,
    LoopConfig,
    ModelConfig,
    ModelSize,
    OptimizerConfig,
    RunConfig,
)
from trainer.data import shuffled_ids
from trainer.loop import LoopState, train

SMALL = ModelSize(layers=1, d_model=32, heads=2, kv_heads=1, d_ff=64, vocab=256, seq_len=16)
RECORDS, RECORD_BYTES, BATCH, STEPS = 400, SMALL.seq_len + 1, 4, 64
POISON = range(40, 46)  # batches: two windows


ROOT = Path(__file__).parents[2]


class Killed(Exception):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts that differ in the records of the poisoned batches alone."""
    root = tmp_path_factory.mktemp("guarded")
    line = b"the quick brown fox jumps over the lazy dog\n"
    text = (line * (RECORDS * RECORD_BYTES // len(line) + 1))[: RECORDS * RECORD_BYTES]
    records = np.frombuffer(text, np.uint8).reshape(RECORDS, RECORD_BYTES).copy()
    (root / "clean.txt").write_bytes(records.tobytes())
    order, rng = shuffled_ids(RECORDS, seed=0), np.random.default_rng(0)
    for place in range(POISON.start * BATCH, POISON.stop * BATCH):
        records[order[place]] = rng.integers(128, 256, RECORD_BYTES)
    (root / "poisoned.txt").write_bytes(records.tobytes())
    return root


def config_of(root: Path, name: str, *, text: str = "poisoned", guard: bool = True) -> RunConfig:
    places = CheckpointConfig(
        directory=str(root / name / "durable"), ram=str(root / name / "ram"), ram_every=4, save_every=20, host_id="h"
    )
    return RunConfig(
        model=ModelConfig(size=SMALL, dropout=0.1),
        optimizer=OptimizerConfig(schedule_steps=STEPS, warmup_steps=5, learning_rate=1e-2),
        data=DataConfig(data=str(root / f"{text}.txt"), corpus_dir=str(root / "corpus"), global_batch=BATCH),
        checkpoint=places,
        loop=LoopConfig(
            steps=STEPS,
            proof=str(root / name / "proof"),
            log_every=None,
            compile_cache=os.environ["JAX_COMPILATION_CACHE_DIR"],
        ),
        guard=GuardConfig() if guard else None,
    )


def end_of(root: Path, name: str) -> dict[str, dict[str, str]]:
    return json.loads((root / name / "proof" / "state-0.json").read_text())


def losses_of(root: Path, name: str) -> dict[int, float]:
    """The loss of every step that was kept: the last line of a step counts."""
    lines = map(json.loads, (root / name / "proof" / "losses-0.jsonl").read_text().splitlines())
    return {line["step"]: float.fromhex(line["loss"]) for line in lines}


@pytest.fixture(scope="module")
def guarded(root: Path) -> tuple[LoopState, list]:
    heard: list = []
    events = EventLog()
    events.observe(heard.append)
    return train(config_of(root, "guarded"), events), heard


@pytest.mark.long
def test_guarded_run_ends_like_a_clean_one(root: Path, guarded: tuple[LoopState, list]) -> None:
    """The guard would do no good, or harm."""
    end, heard = guarded
    train(config_of(root, "clean", text="clean", guard=False), EventLog())
    train(config_of(root, "unguarded", guard=False), EventLog())
    tails = {
        name: float(np.mean([losses_of(root, name)[step] for step in range(STEPS - 10, STEPS)]))
        for name in ("clean", "guarded", "unguarded")
    }
    assert abs(tails["guarded"] - tails["clean"]) < 0.25 * (tails["unguarded"] - tails["clean"]), tails
    skips = end.position.skips
    assert [kind for kind in (event.kind for event in heard) if kind in (Kind.ALARM, Kind.ROLLED_BACK)]
    assert set(POISON) - {batch for first, stop in skips.ranges for batch in range(first, stop)} == set()
    assert max(losses_of(root, "guarded")[step] for step in range(POISON.start - 5, STEPS)) < 4


@pytest.mark.long
def test_skipped_records_are_read_by_no_kept_step(root: Path, guarded: tuple[LoopState, list]) -> None:
    """The position would skip records that the model has seen."""
    skips = guarded[0].position.skips
    order = shuffled_ids(RECORDS, seed=0)
    left_out = {order[p] for first, stop in skips.ranges for p in range(first * BATCH, stop * BATCH)}
    lines = map(json.loads, (root / "guarded" / "proof" / "records-0.jsonl").read_text().splitlines())
    kept = {line["step"]: [record for _, record in line["rows"]] for line in lines}
    read = [record for records in kept.values() for record in records]
    assert left_out.isdisjoint(read)
    assert len(read) == len(set(read)) == STEPS * BATCH


@pytest.mark.long
def test_run_killed_within_a_rollback_comes_to_the_same_bits(
    root: Path, guarded: tuple[LoopState, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second failure at the worst moment would change the model."""
    back = Guard.roll_back

    def killed(*args: object, **keywords: object) -> object:
        back(*args, **keywords)  # pyright: ignore[reportArgumentType]
        raise Killed

    name = "killed"
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "roll_back", killed)
        with pytest.raises(Killed):
            train(config_of(root, name), EventLog())
    end = train(config_of(root, name), EventLog())
    assert end.position == guarded[0].position
    assert end_of(root, name) == end_of(root, "guarded")


@pytest.mark.long
def test_run_that_knew_the_skips_from_the_start_has_the_same_bits(
    root: Path, guarded: tuple[LoopState, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run would depend on which save served the rollback."""
    skips = guarded[0].position.skips
    alarm = Alarm(rule="known", signal="loss", step=0, onset=0, value=0.0, limit=0.0)
    known = [Rollback(alarm=alarm, first_step=0, first_batch=a, stop_batch=b) for a, b in skips.ranges]
    record = GuardRecord(rollbacks=tuple(known)).to_json()
    monkeypatch.setattr("trainer.loop.start_position", _with_record(record))
    train(config_of(root, "known", guard=False), EventLog())
    assert end_of(root, "known") == end_of(root, "guarded")


def _with_record(record: dict):
    from trainer.data import start_position

    return lambda *args, **keywords: replace(start_position(*args, **keywords), guard=record)


WORKER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_trainer_guard import config_of
from ckptkit import EventLog
from trainer.config import ClusterConfig, MeshConfig
from trainer.loop import train
root, process = Path(sys.argv[2]), int(sys.argv[4])
config = config_of(root, "two")
places = replace(config.checkpoint, host_id=f"h{process}")
cluster = ClusterConfig(coordinator=f"127.0.0.1:{sys.argv[3]}", processes=2, process=process)
end = train(replace(config, checkpoint=places, cluster=cluster, mesh=MeshConfig(data=2)), EventLog())
print("skipped:", end.position.skips)
"""


@pytest.mark.long
def test_two_processes_return_together(root: Path) -> None:
    """Processes would restore different saves, or wait for each other until the timeout."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(root), str(port)]
    env = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=1"}
    workers = [Forked([*words, str(process)], cwd=ROOT, env=env) for process in range(2)]
    try:
        ended = [worker.communicate(timeout=170)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    skipped = {line for text in ended for line in text.splitlines() if line.startswith("skipped:")}
    assert len(skipped) == 1
    assert skipped != {"skipped: none"}
    first, second = (json.loads((root / "two" / "proof" / f"state-{process}.json").read_text()) for process in range(2))
    assert first == second


@pytest.mark.long
def test_alarm_before_any_save_ends_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would go on from what is not finite."""
    config = config_of(root, "early")
    monkeypatch.setattr(Guard, "watch", lambda self, step, loss: _alarm(step) if step == 3 else None)
    with pytest.raises(GuardStopError, match="no save is 5 steps older than step 3"):
        train(config, EventLog())


def _alarm(step: int) -> Alarm:
    return Alarm(rule="non-finite", signal="loss", step=step, onset=step, value=float("nan"), limit=float("inf"))


def test_guard_without_checkpoints_is_refused(root: Path) -> None:
    """An alarm would have nowhere to go back to."""
    with pytest.raises(InputError, match="--guard goes back to saves of ckptkit"):
        replace(config_of(root, "nowhere"), checkpoint=CheckpointConfig())

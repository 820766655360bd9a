"""The loop in one process on the 4 devices of every test: interrupt, resume, compare; and bad input."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptkit import EventLog, Kind
from ckptkit.cli import main as ckptkit_command
from tests.forked import run_forked
from trainer.__main__ import main, read_flags
from trainer.config import (
    PRESETS,
    CheckpointConfig,
    DataConfig,
    InputError,
    LoopConfig,
    ModelConfig,
    ModelSize,
    OptimizerConfig,
    Preset,
    RunConfig,
)
from trainer.loop import train
from trainer.sharding import named_leaves
from trainer.step import State

SMALL = ModelSize(layers=1, d_model=32, heads=2, kv_heads=1, d_ff=64, vocab=256, seq_len=16)


SPANS = {"initialization", "training_prep", "compile", "checkpoint_restore", "data_loading", "step", "checkpoint_save"}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "poem.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return str(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, as compiled programs are: the runs below differ in what is cheap."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def straight(root: Path, text: str) -> tuple[dict, dict]:
    train(run_config(root, text, "straight", steps=9), EventLog())
    return proof_of(root, "straight")


def run_config(root: Path, text: str, proof: str, *, steps: int, seed: int = 0, checkpoint: bool = False) -> RunConfig:
    return RunConfig(
        model=ModelConfig(size=SMALL, dropout=0.1),
        optimizer=OptimizerConfig(schedule_steps=9, warmup_steps=2),
        data=DataConfig(data=text, corpus_dir=str(root / "corpus"), global_batch=4, seed=seed),
        checkpoint=CheckpointConfig(directory=str(root / "checkpoints") if checkpoint else None, save_every=4),
        loop=LoopConfig(
            steps=steps, proof=str(root / proof), log_every=None, compile_cache=os.environ["JAX_COMPILATION_CACHE_DIR"]
        ),
    )


def proof_of(root: Path, name: str) -> tuple[dict, dict]:
    steps: dict[int, dict] = {}
    for kind in ("records", "losses"):
        for line in (root / name / f"{kind}-0.jsonl").read_text().splitlines():
            noted = json.loads(line)
            steps.setdefault(noted["step"], {}).update(noted)
    return steps, json.loads((root / name / "state-0.json").read_text())


def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(root: Path, text: str, straight):
    """A failure would change the model: weights, moments, dropout or data order would not be what they were."""
    train(run_config(root, text, "resumed", steps=6, checkpoint=True), EventLog())
    log, spans = EventLog(), []
    log.observe(lambda event: spans.append((event.fields.get("span"), event.step)))
    end = train(run_config(root, text, "resumed", steps=9, checkpoint=True), log)
    assert end.position.step == 9
    resumed = proof_of(root, "resumed")
    assert resumed[0] == straight[0]
    assert resumed[1] == straight[1]
    assert [step for kind, step in spans if kind == "step"] == [6, 7, 8]
    assert {kind for kind, _ in spans if kind} == SPANS
    with pytest.raises(InputError, match="seed is 0 in the checkpoint, 1 here"):
        train(run_config(root, text, "other", steps=9, seed=1, checkpoint=True), EventLog())


@pytest.mark.long
def test_offloaded_moments_give_the_same_bits_and_stay_on_the_host(root: Path, text: str, straight):
    """Offloading would train something else, or a restart would fill the device's memory with the moments."""

    def train_offloaded(proof: str, steps: int, heard: list) -> State:
        config = run_config(root, text, proof, steps=steps)
        places = CheckpointConfig(directory=str(root / "offloaded"), ram=str(root / "offloaded-ram"), save_every=4)
        log = EventLog()
        log.observe(heard.append)
        optimizer = replace(config.optimizer, offload=True)
        return train(replace(config, checkpoint=places, optimizer=optimizer), log).state

    train_offloaded("moved", 6, [])
    heard = []
    leaves = named_leaves(train_offloaded("moved", 9, heard))
    assert [event.step for event in heard if event.kind == Kind.RESTORED] == [6]
    moments = {path: leaf for path, leaf in leaves.items() if "/mu/" in path or "/nu/" in path}
    assert len(moments) == 2 * sum(path.startswith("model/") for path in leaves)
    assert {leaf.sharding.memory_kind for leaf in moments.values()} == {"pinned_host"}
    others = {leaf.sharding.memory_kind for path, leaf in leaves.items() if path not in moments}
    assert others == {"device"}
    assert proof_of(root, "moved") == straight


@pytest.mark.long
def test_run_is_certified_from_the_command_line(
    root: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A person who suspects a device would have to write the replay of the trainer."""
    small = Preset(model=ModelConfig(size=SMALL, dropout=0.1), global_batch=4, learning_rate=1e-3)
    monkeypatch.setitem(PRESETS, "tiny", small)
    words = ["--preset", "tiny", "--steps", "6", "--data", text, "--corpus-dir", str(root / "corpus"), "--quiet"]
    words += ["--checkpoint", str(tmp_path / "run"), "--save-every", "2"]
    train(read_flags(main.make_context("trainer", list(words)).params), EventLog())
    command = ["certify", str(tmp_path / "run"), "--replay", "trainer.replaying:plan", "--first", "2", "--json"]
    assert ckptkit_command([*command, "--", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps_replayed"], found["certified"], found["difference"]) == (4, [4, 6], None)


def test_restart_makes_a_non_durable_last_step_durable(root: Path, text: str, tmp_path: Path, straight):
    """A restart would find the last step in the ramdisk, do nothing and exit with 0; the ramdisk is deleted with the
    job."""
    places = CheckpointConfig(directory=str(tmp_path / "durable"), ram=str(tmp_path / "ram"), save_every=4, ram_every=1)
    config = replace(run_config(root, text, "ended", steps=9), checkpoint=places)
    train(config, EventLog())
    shutil.rmtree(tmp_path / "durable" / "9")  # as if it had been killed when the ramdisk had it
    log, heard = EventLog(), []
    log.observe(heard.append)
    train(config, log)
    assert next(e.fields["sources"] for e in heard if e.kind == Kind.RESTORED)["ram"] > 0
    shutil.rmtree(tmp_path / "ram")
    log, heard = EventLog(), []
    log.observe(heard.append)
    train(config, log)
    assert [e.step for e in heard if e.kind == Kind.RESTORED] == [9]
    assert not any(e.kind == Kind.SPAN and e.fields["span"] == "step" for e in heard)
    assert proof_of(root, "ended")[1] == straight[1]


@pytest.mark.long
def test_proof_detects_a_different_seed(root: Path, text: str, straight):
    """Equal proofs would mean nothing."""
    train(run_config(root, text, "one", steps=2, seed=1), EventLog())
    steps, state = proof_of(root, "one")
    assert steps[0]["rows"] != straight[0][0]["rows"]
    assert state["model/embed"] != straight[1]["model/embed"]
    assert state["dropout/key"] != straight[1]["dropout/key"]


def test_help_names_every_flag():
    """A person could not find out what the trainer takes."""
    help_text = CliRunner().invoke(main, ["--help"]).output
    undocumented = [option.name for option in main.params if not getattr(option, "help", None)]
    assert undocumented == []
    for flag in ("--preset", "--mesh", "--checkpoint", "--ram", "--ssd", "--coordinator", "--heartbeat-s", "--proof"):
        assert flag in help_text
    assert "[default: tiny]" in help_text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "tensor=2"], "Error: --mesh 'tensor=2': cannot read 'tensor=2'"),
        (["--mesh", "fsdp=3"], "--mesh data=1,fsdp=3,model=1 needs 3 devices, this job has 4"),
        (["--data", "/no/such/text"], "Error: --data /no/such/text: there is no such file or directory"),
        (["--checkpoint", "/proc/none"], "Error: --checkpoint /proc/none:"),
        (["--grace-s", "0"], "--grace-s"),
        (["--events", "/proc/none"], "Error: --events /proc/none:"),
        (["--events", "gs://bucket/logs"], "Error: --events gs://bucket/logs: give a directory of this host, no URL"),
        (["--checkpoint", "/tmp/x", "--ram", "gs://bucket/ram"], "--ram gs://bucket/ram: give a directory"),
        (["--ram", "/tmp"], "also give --checkpoint"),
        (["--checkpoint", "/tmp/x", "--peer-copies", "1"], "--peer-copies are of what --ram holds: also give --ram"),
        (["--checkpoint", "/tmp/x", "--ram", "/tmp", "--manager", "orbax"], "--manager orbax has no tiers"),
        (["--processes", "2"], "needs --coordinator HOST:PORT"),
        (["--accumulate", "3"], "does not split into --accumulate 3 microbatches"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(tmp_path: Path, text: str, flags: list[str], message: str):
    """A person would read a traceback, or learn of it after an hour."""
    done = CliRunner().invoke(main, ["--data", text, "--run-dir", str(tmp_path), *flags])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_plan_command_runs():
    """The command in the README would not run."""
    words = ["plan", "--preset", "gpt3-175b", "--mesh", "data=8,model=8"]
    done = run_forked([sys.executable, "-m", "trainer", *words], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "The smallest fsdp that does is 6" in " ".join(done.stdout.split())


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", "muon", "lion", "adafactor"])
def test_every_optimizer_trains_and_resumes_with_the_same_bits(root: Path, text: str, tmp_path: Path, name: str):
    """A run with another optimizer would resume with other moments, or not at all."""
    config = run_config(root, text, f"{name}-straight", steps=4)
    config = replace(config, optimizer=replace(config.optimizer, name=name))  # pyright: ignore[reportArgumentType]
    train(config, EventLog())
    again = replace(config, checkpoint=CheckpointConfig(directory=str(tmp_path), save_every=2))
    for steps in (2, 4):
        loop = replace(again.loop, steps=steps, proof=str(root / f"{name}-resumed"))
        train(replace(again, loop=loop), EventLog())
    assert proof_of(root, f"{name}-resumed") == proof_of(root, f"{name}-straight")

"""A poisoned stretch of data, without a guard and with one: `make campaign NAME=demo-guard`, two minutes at most.

Four runs of the reference trainer read the same text: `clean`, `unguarded`, `guarded`, and `again` (guarded, and saved
to the ramdisk at other steps). For all but the first, the records of 24 batches in a row are noise. The
demo checks that the guarded run skipped the noise, that it ends like the clean one, and that both guarded runs
have the same bits. It draws `guard.png`.

Exit codes: 0 if all of that holds, else 1.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import click
import numpy as np

from ckptkit.events import EventLog
from ckptkit.goodput import Part, goodput_report, load_run
from ckptkit.guard import Skips
from ckptkit.util.clock import monotonic_s
from trainer.config import (
    CheckpointConfig,
    DataConfig,
    GuardConfig,
    LoopConfig,
    ModelConfig,
    ModelSize,
    OptimizerConfig,
    RunConfig,
)
from trainer.data import shuffled_ids
from trainer.loop import train

STEPS, BATCH, RECORDS, TAIL = 140, 8, 2000, 30
LEARNING_RATE, CLIP_NORM = 3e-2, 1e9  # a high rate and no clipping: noise does harm
POISON = range(80, 104)  # batches
MODEL = ModelSize(layers=2, d_model=64, heads=4, kv_heads=2, d_ff=128, vocab=256, seq_len=32)
RUNS = {"clean": "clean", "unguarded": "poisoned", "guarded": "poisoned", "again": "poisoned"}
ROOT = Path("runs/demo-guard")
MEMORY = Path("/dev/shm/ckptkit-demo-guard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The records of a run: the loss of every step as it was taken, and the digests of its last state."""

    taken: list[tuple[int, float]]
    kept: dict[int, float]
    end: dict[str, dict[str, str]]
    skips: Skips

    @property
    def tail(self) -> list[float]:
        """The losses of the last steps."""
        return [self.kept[step] for step in range(STEPS - TAIL, STEPS)]


def main() -> int:
    """Runs the demo; returns the exit code."""
    started_s = monotonic_s()
    for directory in (ROOT, MEMORY):
        shutil.rmtree(directory, ignore_errors=True)
    try:
        write_texts(ROOT)
        runs = {name: run_one(name, text) for name, text in RUNS.items()}
    finally:
        shutil.rmtree(MEMORY, ignore_errors=True)
    for name, each in runs.items():
        click.echo(f"{name:10} mean loss of the last {TAIL} steps {fmean(each.tail):.3f}; skipped: {each.skips}")
    report = goodput_report(load_run(ROOT / "guarded" / "events"))
    click.echo(f"steps that the guard undid took {report.parts_s[Part.WASTED_BY_SPIKE]:.2f} s of {report.wall_s:.1f} s")
    failures = check(runs)
    click.echo(f"the picture: {draw(runs, ROOT / 'guard.png')}")
    for failure in failures:
        click.echo(f"NOT PROVEN: {failure}", err=True)
    click.echo(f"{'proven' if not failures else 'failed'} in {monotonic_s() - started_s:.0f} s")
    return 1 if failures else 0


def write_texts(root: Path) -> None:
    """`clean.txt`, and `poisoned.txt`, in which the records that the poisoned batches read are noise."""
    record_bytes = MODEL.seq_len + 1
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    records = np.frombuffer(text.replace(b"\0", b"")[: RECORDS * record_bytes], np.uint8)
    records = records.reshape(RECORDS, record_bytes).copy()
    root.mkdir(parents=True)
    (root / "clean.txt").write_bytes(records.tobytes())
    order, noise = shuffled_ids(RECORDS, seed=0), np.random.default_rng(0)
    for place in range(POISON.start * BATCH, POISON.stop * BATCH):
        records[order[place]] = noise.integers(1, 256, record_bytes)
    (root / "poisoned.txt").write_bytes(records.tobytes())


def run_one(name: str, text: str) -> Run:
    """One run of the trainer in this process."""
    own, every = ROOT / name, {"guarded": 4, "again": 10}.get(name)
    config = RunConfig(
        model=ModelConfig(size=MODEL),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM, schedule_steps=STEPS),
        data=DataConfig(data=str(ROOT / f"{text}.txt"), corpus_dir=str(ROOT / "corpus"), global_batch=BATCH),
        checkpoint=CheckpointConfig(
            directory=str(own / "durable"), ram=str(MEMORY / name), ram_every=every, save_every=40, host_id="demo"
        )
        if every
        else CheckpointConfig(),
        loop=LoopConfig(
            steps=STEPS, proof=str(own / "proof"), log_every=40, compile_cache=str(ROOT / "cache"), events=None
        ),
        guard=GuardConfig(skip_ahead_steps=16) if every else None,
    )
    click.echo(f"--- {name}")
    events = EventLog(own / "events" / "attempt-0-process-0.jsonl")
    end = train(config, events)
    events.close()
    lines = [json.loads(line) for line in (own / "proof" / "losses-0.jsonl").read_text().splitlines()]
    taken = [(line["step"], float.fromhex(line["loss"])) for line in lines]
    digests = json.loads((own / "proof" / "state-0.json").read_text())
    return Run(taken=taken, kept=dict(taken), end=digests, skips=end.position.skips)


def check(runs: dict[str, Run]) -> list[str]:
    """The claims that do not hold; empty if all hold."""
    clean, unguarded, guarded = (fmean(runs[name].tail) for name in ("clean", "unguarded", "guarded"))
    # Both means are of batches of their own: three standard errors of their difference.
    noise = 3 * stdev(runs["clean"].tail) * (2 / TAIL) ** 0.5
    skipped = {batch for first, stop in runs["guarded"].skips.ranges for batch in range(first, stop)}
    failures = []
    if not skipped.issuperset(POISON):
        failures.append(f"batches {sorted(set(POISON) - skipped)} of noise were trained on")
    if abs(guarded - clean) > noise:
        failures.append(f"the guarded run ends at {guarded:.3f}, the clean one at {clean:.3f} +- {noise:.3f}")
    if unguarded < clean + noise:
        failures.append(f"without a guard the run ends at {unguarded:.3f}: the noise did no harm")
    if runs["guarded"].end != runs["again"].end:
        failures.append("the two guarded runs have other bits")
    return failures


def draw(runs: dict[str, Run], path: Path) -> Path:
    """The losses of the runs, the poisoned batches, and the way back."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(POISON.start, POISON.stop, color="#e8a33d", alpha=0.25, label="batches of noise")
    looks = {"unguarded": ("#b0b0b0", "-"), "clean": ("#1b1f23", ":"), "guarded": ("#1f6f8b", "-")}
    for name, (colour, line) in looks.items():
        taken = runs[name].taken
        axes.plot(range(len(taken)), [loss for _, loss in taken], line, color=colour, label=name, linewidth=1.4)
    backs = [place for place, (a, b) in enumerate(pairwise(runs["guarded"].taken)) if b[0] <= a[0]]
    for number, place in enumerate(backs):
        axes.axvline(place + 0.5, color="#d55e00", linewidth=1, label=None if number else "rollback")
    axes.set_xlabel("steps as they were taken")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    sys.exit(main())

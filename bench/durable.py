"""The durable tier: commits and restores on a local disk, then on a fake bucket that takes 20 ms for each answer."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from bench.contenders import Contender, make_durable_contenders
from bench.figures import Measured, Recorder
from bench.measure import PeakMemory, allocated_bytes, cpu_s, now_s, settle
from bench.runs import Run
from bench.states import Tree, assert_same_bits
from ckptkit.testing.bucket import Delay, Fault, FaultPlan, Fixed, client_env

LATENCY_S = 0.02  # of each request: what a bucket in the same region takes to its first byte
_BUCKET = "bench"


class FakeBucket:
    """The bucket of `ckptkit.testing` in a process of its own, so that its processor time is nobody's."""

    def __init__(self, directory: Path):
        plan = directory.parent / "faults.json"
        plan.write_text(
            json.dumps(FaultPlan(faults=(Fault(effect=Delay(latency=Fixed(seconds=LATENCY_S))),)).as_json())
        )
        command = [sys.executable, "-m", "ckptkit.testing.bucket", "--dir", str(directory), "--bucket", _BUCKET]
        self._process = subprocess.Popen(
            [*command, "--faults", str(plan), "--stop-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().strip()

    def env(self) -> Mapping[str, str]:
        """The environment in which clients find it."""
        return client_env(self._url)

    def requests(self) -> int:
        """How many requests it has answered."""
        with urllib.request.urlopen(f"{self._url}/_ckptkit/log", timeout=60) as answer:
            return sum(total["count"] for total in json.load(answer)["totals"].values())

    @property
    def root(self) -> str:
        """Where to write in it."""
        return f"gs://{_BUCKET}"

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(run: Run) -> Measured:
    """`disk_*` and `bucket_*`: GB/s, processor time, files, bytes, requests, and memory besides the snapshot."""
    recorder = Recorder()
    state = run.case.make()
    for place in run.places:
        recorder.add(f"{place}_peak_extra_bytes", "state", run.case.state_bytes)
    if "disk" in run.places:
        _measure_place(run, state, recorder, "disk", str(run.disk / "durable"), None)
    if "bucket" in run.places:
        recorder.add("bucket_save_requests", "one", 1)
        with closing(FakeBucket(run.disk / "bucket")) as bucket:
            _measure_place(run, state, recorder, "bucket", f"gs://{_BUCKET}/run", bucket)
    return Measured(samples=recorder.samples)


def _measure_place(run: Run, state: Tree, recorder: Recorder, place: str, root: str, bucket: FakeBucket | None) -> None:
    """All contenders' saves and restores, alternating. A save is settled, and its step deleted, before the next is
    timed."""
    environ = bucket.env() if bucket is not None else {}
    with ExitStack() as stack:
        contenders = make_durable_contenders(run.contenders, root, run.ramdisk / place, environ)
        for contender in contenders:
            stack.callback(contender.close)
        for number in run.rounds(f"durable, {place}"):
            for contender in contenders:
                stored = Path(root) / contender.name
                samples = _save(run, contender, state, number + 1, bucket)
                if bucket is None:
                    step = stored / str(number + 1)
                    samples["files"] = sum(path.is_file() for path in step.rglob("*"))
                    samples["bytes"] = allocated_bytes(step)
                samples |= _restore(run, contender, state, number + 1, bucket, check=number == 0)
                contender.forget(number + 1)
                for figure, value in samples.items() if number else ():
                    recorder.add(f"{place}_{figure}", contender.name, value)


def _save(run: Run, contender: Contender, state: Tree, step: int, bucket: FakeBucket | None) -> dict[str, float]:
    gigabytes = run.case.state_bytes / 1e9
    settle()
    requests = bucket.requests() if bucket is not None else 0
    with PeakMemory() as memory:
        used_s, start_s = cpu_s(), now_s()
        contender.save(step, state)
        committed_s = contender.committed_s() - start_s
        contender.settled()
        used_s = cpu_s() - used_s
    figures = {
        "commit_gbps": gigabytes / committed_s,
        "save_cpu_s_per_gb": used_s / gigabytes,
        "peak_extra_bytes": memory.extra_bytes,
    }
    return {**figures, **({"save_requests": bucket.requests() - requests} if bucket is not None else {})}


def _restore(
    run: Run, contender: Contender, state: Tree, step: int, bucket: FakeBucket | None, *, check: bool
) -> dict[str, float]:
    gigabytes = run.case.state_bytes / 1e9
    settle()
    requests = bucket.requests() if bucket is not None else 0
    start_s = now_s()
    found = contender.restore(step, run.case.abstract)
    restored_s = now_s() - start_s
    if check:
        assert_same_bits(found, state, contender.name)
    figures = {"restore_gbps": gigabytes / restored_s}
    return {**figures, **({"restore_requests": bucket.requests() - requests} if bucket is not None else {})}

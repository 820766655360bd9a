"""How fast a save is committed, what processor time and memory it takes: ramdisk first, then a disk."""

from __future__ import annotations

from typing import Any

import jax

from bench.contenders import Contender
from bench.contenders_ours import CkptKit
from bench.contenders_theirs import TorchCheckpointing
from bench.figures import Measured, Recorder
from bench.limits import DiskLimit
from bench.measure import PeakMemory, cpu_s, now_s, settle
from bench.runs import Run
from bench.states import Tree, assert_same_bits, changed


def measure(run: Run) -> Measured:
    """`commit_gbps`, `cpu_s_per_gb`, `peak_extra_bytes` and `ssd_commit_gbps` of the case."""
    recorder = Recorder()
    details: dict[str, Any] = {}
    state = run.case.make()
    measure_ramdisk(run, state, recorder, details)
    if "ckptkit" in run.contenders:
        measure_disk(run, state, recorder)
    return Measured(samples=recorder.samples, details=details)


def measure_ramdisk(run: Run, state: Tree, recorder: Recorder, details: dict[str, Any]) -> None:
    """All contenders' saves into the ramdisk, alternating."""
    gigabytes = run.case.state_bytes / 1e9
    recorder.add("peak_extra_bytes", "state", run.case.state_bytes)
    with run.saving() as contenders, run.memory_limit(state) as limit:
        for number in run.rounds("commit to ramdisk"):
            for contender in contenders:
                samples = one_save(run, contender, state, number + 1)
                if number == 0:
                    found = contender.restore(number + 1, run.case.abstract)
                    assert_same_bits(found, state, contender.name)
                    del found
                contender.forget(number + 1)
                for figure, value in samples.items() if number else ():
                    recorder.add(figure, contender.name, value)
                if isinstance(contender, CkptKit):
                    details["arena_bytes"] = contender.arena_bytes
            if run.limited:
                settle()
                used_s = cpu_s()
                copied_s = limit.copy_in(state, threads=2)
                used_s = cpu_s() - used_s
                alone_s = limit.copy_in(state, threads=1)
                if number:
                    recorder.add("commit_gbps", "limit", gigabytes / copied_s)
                    recorder.add("commit_gbps", "limit_1_thread", gigabytes / alone_s)
                    recorder.add("cpu_s_per_gb", "limit", used_s / gigabytes)


def one_save(run: Run, contender: Contender, state: Tree, step: int) -> dict[str, float]:
    """The figures of one save, from the call until it is committed; processor time until nothing of it runs."""
    gigabytes = run.case.state_bytes / 1e9
    settle()
    with PeakMemory() as memory:
        used_s, start_s = cpu_s(), now_s()
        contender.save(step, state)
        committed_s = contender.committed_s() - start_s
        contender.settled()
        used_s = cpu_s() - used_s
    if isinstance(contender, TorchCheckpointing):  # a process of its own writes: what this one spends tells little
        return {"commit_gbps": gigabytes / committed_s}
    return {
        "commit_gbps": gigabytes / committed_s,
        "cpu_s_per_gb": used_s / gigabytes,
        "peak_extra_bytes": memory.extra_bytes,
    }


def measure_disk(run: Run, state: Tree, recorder: Recorder) -> None:
    """ckptkit's SSD tier, behind its ramdisk tier, against direct I/O over a file that exists. Donates `state`."""
    gigabytes = run.case.state_bytes / 1e9
    contender = CkptKit(run.ramdisk / "ckptkit-ssd", disk=run.disk / "ckptkit")
    path = run.disk / "limit.bin"
    limit = DiskLimit(path, run.case.state_bytes) if run.limited else None
    try:
        for number in run.rounds("commit to disk"):
            state = jax.block_until_ready(changed(state))
            settle()
            start_s = now_s()
            contender.save(number + 1, state)
            committed_s = contender.committed_s() - start_s
            contender.settled()
            written_s = limit.write() if limit is not None else None
            if number:
                recorder.add("ssd_commit_gbps", contender.name, gigabytes / committed_s)
                if written_s is not None:
                    recorder.add("ssd_commit_gbps", "limit", gigabytes / written_s)
    finally:
        if limit is not None:
            limit.close()
            path.unlink()
        contender.close()

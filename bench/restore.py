"""How fast a committed state comes back from the ramdisk to arrays that are ready on their devices."""

from __future__ import annotations

from bench.figures import Measured, Recorder
from bench.measure import PeakMemory, cpu_s, now_s, settle
from bench.runs import Run
from bench.states import assert_same_bits

_STEP = 1


def measure(run: Run) -> Measured:
    """`restore_gbps` of the case, with processor time, and memory above the restored arrays themselves."""
    recorder = Recorder()
    gigabytes = run.case.state_bytes / 1e9
    state = run.case.make()
    with run.saving() as contenders, run.memory_limit(state) as limit:
        for contender in contenders:
            contender.save(_STEP, state)
            contender.committed_s()
            contender.settled()
        for number in run.rounds("restore from ramdisk"):
            for contender in contenders:
                settle()
                with PeakMemory() as memory:
                    used_s, start_s = cpu_s(), now_s()
                    found = contender.restore(_STEP, run.case.abstract)
                    restored_s = now_s() - start_s
                    used_s = cpu_s() - used_s
                if number == 0:
                    assert_same_bits(found, state, contender.name)
                else:
                    recorder.add("restore_gbps", contender.name, gigabytes / restored_s)
                    recorder.add("restore_cpu_s_per_gb", contender.name, used_s / gigabytes)
                    extra_bytes = max(0, memory.extra_bytes - run.case.state_bytes)
                    recorder.add("restore_peak_extra_bytes", contender.name, extra_bytes)
                del found
            if run.limited:
                settle()
                two_s = limit.copy_out(threads=2)
                settle()
                one_s = limit.copy_out(threads=1)
                if number:
                    recorder.add("restore_gbps", "limit", gigabytes / two_s)
                    recorder.add("restore_gbps", "limit_1_thread", gigabytes / one_s)
    return Measured(samples=recorder.samples)

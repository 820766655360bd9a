"""Two processes of the trainer, one killed at each phase boundary of a save, its tiers wiped: the resume is exact.

Default: one phase, and the run that lists the phases; `make campaign NAME=long` has another.
All of them: `make campaign NAME=kill-phases`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import ckptkit
from ckptkit.goodput import load_run
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from tests.multiprocess.worker import DURABLE_EVERY, PROCESSES, SSD_EVERY, STEPS
from tools.proof import compare

# tier, phase: in the order in which a save crosses them. `test_the_list_of_phases_is_complete` holds it to the code.
PHASES = [
    ("", "begun"),
    ("ram", "staged"),
    ("ram", "committed_here"),
    ("ram", "committed"),
    ("ssd", "begun"),
    ("ssd", "copied"),
    ("ssd", "committed_here"),
    ("ssd", "committed"),
    ("durable", "begun"),
    ("durable", "written"),
    ("durable", "committed_here"),
    ("durable", "committed"),
]
WIPES = {"ramdisk": ("ram",), "host": ("ram", "ssd")}
STEP = 8  # due in every tier; step 4 is committed in every tier by then
assert STEP % SSD_EVERY == STEP % DURABLE_EVERY == 0


class Job:
    """Runs of one seed below one directory: the corpus is shared."""

    def __init__(self, root: Path):
        self._root = root
        self.output: list[str] = []

    def run(self, name: str, *flags: str, wiped: tuple[str, ...] = ()) -> Path:
        """Runs the job to its end, with one restart where a process dies; returns its directory."""
        directory = self._root / name
        directory.mkdir()
        command = [sys.executable, "-m", "tests.multiprocess.worker", "--process", "{process}"]
        command += ["--coordinator", "{coordinator}", "--attempt", "{attempt}"]
        command += [*flags, str(directory)]

        def wipe(attempt: int, process: int) -> None:
            assert attempt == 0, "the job died again"
            for tier in wiped:
                for lost in (directory / tier).glob(f"*/host-{process}"):
                    shutil.rmtree(lost)

        launcher = Launcher(
            Workers(command, processes=PROCESSES, devices_per_process=2, warm=WARM),
            policy=RestartPolicy(restarts=1, backoff_s=0, grace_s=0),
            events=ckptkit.EventLog(directory / "events" / "launcher.jsonl", process=-1),
            hooks=Hooks(
                on_output=lambda process, line: self.output.append(f"{name} {process}: {line}"),
                on_lost=wipe,
                say=lambda line: self.output.append(f"{name}: {line}"),
            ),
        )
        assert launch_forked(launcher) == ExitCode.OK, "\n".join(self.output[-60:])
        return directory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def reference(job: Job) -> Path:
    """The uninterrupted run, which reads and writes no checkpoint."""
    return job.run("reference", "--plain")


@pytest.fixture(scope="module")
def undisturbed(job: Job) -> Path:
    """A run with all tiers to which nothing happens, and which writes down every path that it opens."""
    return job.run("undisturbed", "--trace-opens")


def events_of(directory: Path) -> list[ckptkit.Event]:
    return [event for log in load_run(directory / "events") for event in log]


@pytest.mark.long
def test_the_list_of_phases_is_complete(undisturbed: Path) -> None:
    """A phase that was added to a save would never be killed at."""
    crossed = set()
    for event in events_of(undisturbed):
        if event.kind == ckptkit.Kind.PHASE:
            crossed.add((event.tier or "", event.fields["phase"]))
        elif event.kind == ckptkit.Kind.COMMITTED:
            crossed.add((event.tier or "", "committed"))
    assert crossed == set(PHASES)


@pytest.mark.long
def test_saving_does_not_change_training(reference: Path, undisturbed: Path) -> None:
    """A snapshot that touched the state would change the training."""
    verdict = compare(reference / "proof" / "0", undisturbed / "proof" / "0")
    assert verdict.is_identical, verdict.differences


@pytest.mark.long
def test_process_opens_only_slots_of_its_own_host(undisturbed: Path) -> None:
    """On hosts that share a mount, one would take another's slots for its own, or destroy them."""
    opened = {}
    for process in range(PROCESSES):
        paths = (undisturbed / f"opened-{process}.txt").read_text().splitlines()
        opened[process] = {path for path in paths if "/ram/" in path or "/ssd/" in path}
        assert any(f"/host-{process}/" in path for path in opened[process])
        others = {path for path in opened[process] if "/host-" in path and f"/host-{process}" not in path}
        assert others == set()


def check_resume(job: Job, reference: Path, tier: str, phase: str, process: int, wipe: str) -> None:
    name = f"{tier or 'step'}-{phase}-{process}-{wipe}"
    directory = job.run(name, "--die", f"{tier}:{phase}:{STEP}:{process}", wiped=WIPES[wipe])
    events = events_of(directory)
    lost = [event for event in events if event.kind == ckptkit.Kind.DISRUPTED]
    assert [(event.fields["lost"], event.fields["cause"]) for event in lost] == [(process, "SIGKILL")]
    restored = [event.step for event in events if event.kind == ckptkit.Kind.RESTORED]
    assert len(restored) == PROCESSES
    survived = [
        event.step
        for event in events
        if event.kind == ckptkit.Kind.COMMITTED and event.tier not in WIPES[wipe] and event.at_s < lost[0].at_s
    ]
    assert len(set(restored)) == 1, "one verdict for all"
    assert restored[0] is not None
    assert restored[0] >= max(step for step in survived if step is not None), "a committed step was lost"
    verdict = compare(reference / "proof" / "0", merged_proof(directory))
    assert verdict.is_identical, verdict.differences
    assert verdict.steps == STEPS


def merged_proof(directory: Path) -> Path:
    """The proofs of both attempts as one: every step that was taken, and the final state."""
    merged = directory / "proof" / "merged"
    merged.mkdir()
    for process in range(PROCESSES):
        for name in (f"records-{process}.jsonl", f"losses-{process}.jsonl"):
            parts = [directory / "proof" / str(attempt) / name for attempt in (0, 1)]
            (merged / name).write_text("".join(path.read_text() for path in parts if path.exists()))
        shutil.copy(directory / "proof" / "1" / f"state-{process}.json", merged)
    return merged


@pytest.mark.parametrize(
    ("tier", "phase", "process", "wipe"),
    [("ram", "committed_here", 0, "ramdisk"), ("durable", "written", 1, "host")],
)
@pytest.mark.long
def test_a_kill_at_a_phase_of_a_save_loses_nothing_committed(
    job: Job, reference: Path, tier: str, phase: str, process: int, wipe: str
) -> None:
    """A crash in mid-save would lose the newest committed step, or resume from a torn one."""
    check_resume(job, reference, tier, phase, process, wipe)


@pytest.mark.slow
@pytest.mark.parametrize("wipe", list(WIPES))
@pytest.mark.parametrize("process", range(PROCESSES))
@pytest.mark.parametrize(("tier", "phase"), PHASES)
def test_a_kill_at_every_phase_of_a_save_loses_nothing_committed(
    job: Job, reference: Path, tier: str, phase: str, process: int, wipe: str
) -> None:
    """A crash in mid-save would lose the newest committed step, or resume from a torn one."""
    check_resume(job, reference, tier, phase, process, wipe)

"""Faults on real processes: each happens as planned, the job comes back, and the table is true."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from ckptkit.cli import main
from ckptkit.events import EventLog
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.launch.chaos import Chaos, ChaosRun, Injected, Targets
from ckptkit.launch.chaos_command import ChaosReport
from ckptkit.launch.faults import Fault, FaultKind, FaultPlan, Hazard
from ckptkit.launch.harm import FullDisk, LocalBucket, emptied, flipped
from ckptkit.launch.status import AttachedJob, write_status
from ckptkit.util.clock import time_text
from tests.launch.test_launcher import wait_until
from tests.mounts import Mounts

AT_THE_END = "the job ended without a loss"

# A job that counts to 40 in a file, continues from there, and prints at its end what it has counted: its "state".
COUNTS = """
import os, sys, time
from pathlib import Path
from ckptkit.util import heartbeat
home = Path(sys.argv[1])
home.mkdir(parents=True, exist_ok=True)
saved = home / f"saved-{os.environ['CKPTKIT_PROCESS']}"
count = int(saved.read_text()) if saved.exists() else 0
while count < 40:
    time.sleep(0.02)
    count += 1
    heartbeat.beat(count)
    if count % 4 == 0:
        saved.with_suffix(".new").write_text(str(count))
        saved.with_suffix(".new").replace(saved)
told = os.environ.get("CKPTKIT_STATE_DIGEST")
if told:
    Path(told.replace("{process}", os.environ["CKPTKIT_PROCESS"])).write_text(str(count + WRONG))
"""


def script(tmp_path: Path, wrong: str = "0") -> str:
    path = tmp_path / "counts.py"
    tmp_path.mkdir(exist_ok=True)
    path.write_text(COUNTS.replace("WRONG", wrong))
    return str(path)


def run(tmp_path: Path, plan: FaultPlan, *, processes: int = 2, lasting_s: float = 5.0) -> tuple[ChaosRun, list[str]]:
    said: list[str] = []
    command = [sys.executable, script(tmp_path), str(tmp_path / "job")]
    workers = Workers(command, processes=processes, warm=WarmStart(is_cold=True))
    events = EventLog(process=-1)
    events.observe(lambda event: said.append(f"event {event.fields['what']}: {event.fields['did']}"))
    places = {"ram": str(tmp_path / "ram"), "ssd": str(tmp_path / "disk"), "durable": "/"}
    chaos = Chaos(
        tuple(plan.faults(processes)),
        lasting_s=lasting_s,
        targets=Targets(places=lambda process: places),
        events=events,
        say=said.append,
    )
    return chaos.run(launched(workers), on_output=lambda process, line: said.append(line)), said


def launched(workers: Workers, restarts: int = 10, grace_s: float = 0.1) -> Callable[[Hooks, int], Launcher]:
    policy = RestartPolicy(restarts=restarts, backoff_s=0.0, grace_s=grace_s)
    return lambda hooks, attempt: Launcher(workers, policy=policy, first_attempt=attempt, hooks=hooks)


def test_same_seed_plans_the_same_faults() -> None:
    """A campaign that found a fault of the job could not be repeated."""

    def plan(seed: int) -> list[Fault]:
        hazards = (wipe("/home/{process}/ram", 0.5),)
        weights: dict[FaultKind, float] = {"kill": 2.0, "freeze": 1.0}
        return list(FaultPlan(seed=seed, mtbf_s=3.0, count=200, weights=weights, wipes=hazards).faults(4))

    faults = plan(7)
    assert faults == plan(7)
    assert faults != plan(8)
    assert {fault.victims for fault in faults} == {(0,), (1,), (2,), (3,)}
    assert 2.0 < sum(fault.after_s for fault in faults) / 200 < 4.0
    assert 100 < sum(fault.kind == "kill" for fault in faults) < 170
    assert 60 < sum(fault.wipes == (f"/home/{fault.victims[0]}/ram",) for fault in faults) < 140


def wipe(path: str, chance: float) -> Hazard:
    return Hazard(path=path, chance=chance)


@pytest.mark.parametrize(("path", "chance"), [("/", 0.5), ("/home", 0.5), ("runs/x", 0.5), ("/home/x", 1.5)])
def test_directories_that_are_not_the_jobs_own_are_refused(path: str, chance: float) -> None:
    """A mistyped path would empty a disk."""
    with pytest.raises(ValueError, match=path):
        wipe(path, chance)


def test_job_comes_back_from_every_kind_of_fault(tmp_path: Path) -> None:
    """The table would show what was planned, and not what the job went through."""
    (tmp_path / "ram").mkdir()
    (tmp_path / "ram" / "slot").write_bytes(bytes(100))
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "step").write_bytes(bytes(100))
    plan = FaultPlan(
        seed=3,
        mtbf_s=0.05,
        count=6,
        weights={"kill": 1.0, "freeze": 1.0, "preempt": 1.0},
        wipes=(wipe("ram", 1.0),),
        flips=(wipe("any", 1.0),),
    )
    planned = list(plan.faults(2))
    assert {fault.kind for fault in planned} == {"kill", "freeze", "preempt"}
    ended, said = run(tmp_path, plan, lasting_s=0.2)
    assert (ended.code, ended.unplanned) == (ExitCode.OK, ())
    done = [each.fault for each in ended.injected]
    assert done == planned[: len(done)]
    assert len(done) >= 3, said
    assert [(tmp_path / "job" / f"saved-{process}").read_text() for process in (0, 1)] == ["40", "40"]
    told = [line.partition(": ") for line in said if line.startswith("event ")]
    harms = [[did for did in each.did if did != AT_THE_END] for each in ended.injected]
    assert [did for *_, did in told] == [did for each in harms for did in each], "each harm is an event"
    kinds = [[each.fault.kind, "wipe", "flip"][: len(harm)] for each, harm in zip(ended.injected, harms, strict=True)]
    assert [what for what, *_ in told] == [f"event {kind}" for each in kinds for kind in each]
    for each in ended.injected:
        if each.fault.kind == "freeze":
            assert each.did == [f"froze process {each.fault.victims[0]} for 0.2 s"]
            continue
        if each is ended.injected[-1] and AT_THE_END in each.did:
            continue  # it came as the job ended
        assert each.did[1].startswith(f"emptied {tmp_path}/ram: ")
        assert each.did[2].startswith(f"flipped a bit of {tmp_path}/disk/step, byte ")
        assert each.back_s is None or each.back_s > 0
    assert list((tmp_path / "ram").iterdir()) == []
    assert any(each.back_s is not None for each in ended.injected)


def test_fault_that_came_as_the_job_ended_lost_nothing(tmp_path: Path) -> None:
    """The table would show a loss that never was, and files as wiped that are there."""
    ram = tmp_path / "ram"
    ram.mkdir()
    (ram / "slot").write_bytes(bytes(100))
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(0))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    workers = Workers([sys.executable, "-c", code], processes=1, warm=WarmStart(is_cold=True))
    chaos = Chaos(say=lambda line: None)
    fault = Fault(number=0, after_s=0.0, kind="preempt", victims=(0,), wipes=(str(ram),))
    taken: list[bool] = []

    def on_output(process: int, line: str) -> None:
        taken.append(chaos.inject(fault))

    ended = chaos.run(launched(workers, grace_s=30.0), on_output=on_output)
    assert (ended.code, ended.unplanned, taken) == (ExitCode.OK, (), [True])
    assert [each.did for each in ended.injected] == [["preempted the job", AT_THE_END]]
    assert (ram / "slot").exists()


def test_loss_that_no_fault_explains_is_named(tmp_path: Path) -> None:
    """A job that crashes by itself would be counted as one that survived its faults."""
    code = "import sys; sys.exit(3 if sys.argv[1] == '0' else 0)"
    workers = Workers([sys.executable, "-c", code, "{attempt}"], processes=1)
    faults = tuple(FaultPlan(seed=0, mtbf_s=60.0, count=1).faults(1))
    ended = Chaos(faults, say=lambda line: None).run(launched(workers, 2), on_output=lambda process, line: None)
    assert (ended.code, ended.injected) == (ExitCode.OK, ())
    assert ended.unplanned == ("attempt 0: process 0 was lost by itself",)


def test_faults_at_chosen_moments_do_their_damage_once(tmp_path: Path) -> None:
    """A benchmark that kills in mid-save would kill on its own, or wipe again at each later loss of the job."""
    ram = tmp_path / "ram"
    losses: list[tuple[int, list[int]]] = []
    left: list[int] = []

    def lost(attempt: int, process: int, struck: Sequence[Injected]) -> None:
        del process
        losses.append((attempt, [each.fault.number for each in struck]))
        left.append(len(list(ram.iterdir())))
        (ram / "slot").write_bytes(bytes(100))

    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
        "sys.exit(3 if sys.argv[1] == '1' else time.sleep(60 if sys.argv[1] == '0' else 0))"
    )
    workers = Workers([sys.executable, "-c", code, "{attempt}"], processes=2)
    chaos = Chaos(on_lost=lost, say=lambda line: None)
    faults = [
        Fault(number=number, after_s=0.0, kind="kill", victims=(number,), wipes=(str(ram),)) for number in range(2)
    ]
    lines: list[str] = []

    def on_output(process: int, line: str) -> None:
        lines.append(line)
        if len(lines) == 2:  # both run, and both are hit before the loss of one is noticed
            assert [chaos.inject(fault) for fault in faults] == [True, True]

    ram.mkdir()
    (ram / "slot").write_bytes(bytes(100))
    ended = chaos.run(launched(workers, grace_s=30.0), on_output=on_output)
    assert ended.code == ExitCode.OK
    assert losses == [(0, [0, 1]), (1, [])]
    assert left == [0, 1]
    assert not chaos.inject(faults[0])


def test_faults_since_the_launch_wait_for_no_step(tmp_path: Path) -> None:
    """Of two jobs the one that takes longer to start would be hit later, and compared on other faults."""
    fault = Fault(number=0, after_s=0.3, since="launch", kind="kill", victims=(0,))
    code = "import sys, time; time.sleep(60 if sys.argv[1] == '0' else 0)"
    workers = Workers([sys.executable, "-c", code, "{attempt}"], processes=1)
    ended = Chaos([fault], say=lambda line: None).run(launched(workers), on_output=lambda process, line: None)
    assert ended.code == ExitCode.OK
    (injected,) = ended.injected
    assert 0.3 <= injected.at_s < 30.0


def test_host_fault_kills_all_processes_of_a_host(tmp_path: Path) -> None:
    """A tier that holds its copies on the same host would look as safe as one with copies elsewhere."""
    plan = FaultPlan(seed=1, mtbf_s=0.05, count=1, weights={"host": 1.0}, hosts=2)
    (fault,) = plan.faults(4)
    assert fault.victims in {(0, 1), (2, 3)}
    ended, said = run(tmp_path, plan, processes=4)
    assert (ended.code, ended.unplanned) == (ExitCode.OK, ())
    assert ended.injected[0].did == [f"killed the host of processes {fault.victims[0]}, {fault.victims[1]}"], said
    assert ended.injected[0].back_s is not None


def test_bucket_goes_away_and_comes_back_with_its_objects(tmp_path: Path) -> None:
    """A job would be tested against a bucket that forgets, or one that never went away."""
    bucket = LocalBucket(tmp_path / "objects", ("run",))
    try:
        url = bucket.env["STORAGE_EMULATOR_HOST"] + "/storage/v1/b/run"
        assert urlopen(url, timeout=30).status == 200
        bucket.begin()
        with pytest.raises(URLError):
            urlopen(url, timeout=30)
        bucket.end()
        assert urlopen(url, timeout=30).status == 200
    finally:
        bucket.close()


def test_disk_is_full_for_the_time_of_the_fault(tmp_path: Path, mounts: Mounts) -> None:
    """A job that fails on the first full disk would pass."""
    own = mounts.small(tmp_path / "disk", "1m")
    disk = FullDisk(str(own))
    assert disk.begin() > 900_000
    with pytest.raises(OSError, match="No space left"):
        (own / "step").write_bytes(bytes(8192))
    disk.end()
    (own / "step").write_bytes(bytes(8192))


def test_disk_that_others_need_is_not_filled() -> None:
    """The machine would stop, not the job."""
    with pytest.raises(ValueError, match="is on the file system of /"):
        FullDisk("/usr/lib")


def test_running_job_is_hit_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Faults could be tried only on a job that was started for them."""
    status, ram = tmp_path / "status.json", tmp_path / "ram"
    ram.mkdir()
    (ram / "slot").write_bytes(bytes(100))
    words = ["run", "--processes", "2", "--cold", "--status", str(status), "--"]
    until_hit = (
        'while count < 40:\n    while count == 4 and os.environ["CKPTKIT_ATTEMPT"] == "0":\n        time.sleep(0.02)'
    )
    job_script = Path(script(tmp_path))  # a busy machine takes longer to begin the faults than the job to end
    job_script.write_text(job_script.read_text().replace("while count < 40:", until_hit))
    command = [sys.executable, "-m", "ckptkit.cli", *words, sys.executable, str(job_script), str(tmp_path / "job")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        while not status.exists() or "newest_attempt_with_steps" not in status.read_text():
            assert job.poll() is None, "it ended before its first step"
            time.sleep(0.02)
        hit = ["chaos", "--attach", str(status), "--faults", "1", "--mtbf", "0.01", "--wipe", f"{ram}:1", "--json"]
        assert main(hit) == 0
        assert job.stderr is not None
        said = job.stderr.read()
    told = json.loads(capfd.readouterr().out)
    assert [each["did"][0] for each in told["faults"]] == [f"emptied {ram}: 1 file"]
    assert told["faults"][0]["back_s"] > 0
    assert (told["code"], told["unplanned"]) == (None, [])
    assert job.returncode == 0, said
    assert "was lost (SIGKILL)" in said
    assert [(tmp_path / "job" / f"saved-{process}").read_text() for process in (0, 1)] == ["40", "40"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_campaign_that_is_ended_ends_its_lasting_fault(tmp_path: Path, signum: int) -> None:
    """A worker would stay frozen, or a disk full, after the end of the command: the job would hang without a reason."""
    status = tmp_path / "status.json"
    endless = Path(script(tmp_path))
    endless.write_text(endless.read_text().replace("while count < 40:", "while True:"))
    words = ["run", "--cold", "--status", str(status), "--", sys.executable, str(endless), str(tmp_path / "job")]
    with subprocess.Popen([sys.executable, "-m", "ckptkit.cli", *words], stdout=subprocess.DEVNULL) as job:
        assert wait_until(lambda: status.exists() and "newest_attempt_with_steps" in status.read_text())
        (worker,) = json.loads(status.read_text())["workers"]
        words = ["chaos", "--attach", str(status), "--kind", "freeze:1", "--for", "600", "--mtbf", "0.01"]
        with subprocess.Popen(
            [sys.executable, "-m", "ckptkit.cli", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as campaign:
            assert wait_until(lambda: is_stopped(worker["pid"]))
            campaign.send_signal(signum)
            said = campaign.communicate(timeout=60)[1]
        assert campaign.returncode == 130, said
        assert not is_stopped(worker["pid"])
        job.send_signal(signal.SIGTERM)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_processes_that_are_not_of_the_job_are_left_alone(tmp_path: Path) -> None:
    """A status file of an earlier job would have strangers killed: process ids come again."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        status = tmp_path / "status.json"
        found = {"state": "running", "agent": 1, "attempt": 0, "losses": [], "recoveries": []}
        write_status(status, {**found, "workers": [{"process": 0, "pid": stranger.pid}]})
        job = AttachedJob(status)
        assert not job.kill([0], None)
        assert not job.signal(0, signal.SIGKILL)
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no status of a job"),
        ("{", "no status of a job"),
        ("{}", "not written by"),
        ('{"format": "ckptkit/run/1", "state": "ended", "agent": 1}', "the job has ended"),
    ],
)
def test_file_that_is_no_status_of_a_running_job_is_refused(
    text: str | None, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command would wait without end, or end with a traceback."""
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    assert main(["chaos", "--attach", str(tmp_path / "status.json")]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("is_short", [False, True])
def test_wiped_files_are_freed_while_the_job_starts_again(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which a ramdisk is freed would count as the job's recovery; without room the job would find none."""
    ram = tmp_path / "ram"
    (ram / "job").mkdir(parents=True)
    (ram / "job" / "small").write_bytes(b"x")
    large = ram / "job" / "slot"
    large.touch()
    os.truncate(large, 64 << 20)
    free = 1 << (20 if is_short else 40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free))
    may_free, close = threading.Event(), os.close
    if is_short:
        may_free.set()

    def close_later(fd: int) -> None:
        if "slot (deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
            assert may_free.wait(30)
        close(fd)

    monkeypatch.setattr("ckptkit.launch.harm.os.close", close_later)
    assert emptied(ram) == 2
    assert list(ram.iterdir()) == []
    assert contents_held("slot") is not is_short
    may_free.set()
    for thread in threading.enumerate():
        if thread.name == "ckptkit-chaos-free":
            thread.join()
    assert not contents_held("slot")


class Usage:
    """The answer of `shutil.disk_usage` that matters here."""

    def __init__(self, free: int):
        self.free = free


def contents_held(name: str) -> bool:
    """Whether this process holds a deleted file of that name open."""
    found = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return any(os.readlink(link).endswith(f"/{name} (deleted)") for link in found if os.path.lexists(link))


def test_flip_changes_one_bit(tmp_path: Path) -> None:
    """A flip that changes nothing, or a whole file, would prove nothing about checksums."""
    data = os.urandom(1000)
    (tmp_path / "step").write_bytes(data)
    (tmp_path / "small").write_bytes(b"x")
    assert str(tmp_path / "step") in str(flipped(tmp_path, random.Random(0)))
    after = (tmp_path / "step").read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(data, after, strict=True)) == 1
    assert (tmp_path / "small").read_bytes() == b"x"


@pytest.mark.parametrize(("count", "p99"), [(99, None), (100, 98.01)])
def test_99th_percentile_is_given_for_enough_times_only(
    count: int, p99: float | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of five recoveries the longest would pass for the 99th percentile."""
    fault = Fault(number=0, after_s=0.0, kind="kill", victims=(0,))
    injected = [Injected(fault=fault, at_s=0.0, attempt=0, back_s=float(n), repeated=2) for n in range(count)]
    injected.append(Injected(fault=fault, at_s=0.0, attempt=0))
    run = ChaosRun(code=ExitCode.OK, seconds=1.0, injected=tuple(injected), missed=0, unplanned=())
    report = ChaosReport(run, 0, None, None)
    assert (report.found["back_s_samples"], report.found["back_s_p99"]) == (count, p99)
    report.show()
    out = capfd.readouterr().out
    assert (", p99 " in out) == (p99 is not None)
    assert f"work lost: {2 * count} steps\nno goodput: give --report, or --events" in out


def chaos_command(tmp_path: Path, *words: str, wrong: str = "0") -> list[str]:
    command = [sys.executable, script(tmp_path, wrong), str(tmp_path / "{run}")]
    return ["chaos", "--processes", "2", "--cold", *words, "--", *command]


def test_command_reports_each_fault_and_compares_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The reader would have to find out from logs whether the job is what it would have been."""
    words = ("--faults", "2", "--mtbf", "0.05", "--compare", "--json")
    assert main(chaos_command(tmp_path, *words)) == 0
    shown = capfd.readouterr()
    told = json.loads(shown.out)
    lines = [line for line in shown.err.splitlines() if "after the loss" in line]
    assert [line.split(" is done ")[1].split(" after ")[0] for line in lines] == [
        time_text(each["back_s"]) for each in told["faults"]
    ], "one figure for one loss"
    assert told["state"] == "equal"
    assert told["code"] == 0
    assert [each["fault"]["kind"] for each in told["faults"]] == ["kill", "kill"]
    assert told["back_s_max"] > 0
    assert main(chaos_command(tmp_path / "again", *words[:-1])) == 0
    out = capfd.readouterr().out
    assert "the job ended well after" in out
    assert "s: 2 faults\n" in out
    assert re.search(r"next step: p50 \S+ m?s after the fault, at most \S+ m?s \(2 faults\)\n  work lost: ", out), out
    assert out.endswith("state at the end: equal to that of the undisturbed run, on every process\n")


def test_different_state_at_the_end_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job that resumes wrongly would pass."""
    wrong = "('disturbed' in sys.argv[1].split('/'))"
    words = ("--faults", "1", "--mtbf", "0.05", "--compare")
    assert main(chaos_command(tmp_path, *words, wrong=wrong)) == 20
    assert "state at the end: DIFFERENT from that of the undisturbed run" in capfd.readouterr().out


def test_job_that_ends_before_the_first_fault_has_not_passed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A test of a script would be green without a fault."""
    assert main(chaos_command(tmp_path, "--faults", "2", "--mtbf", "1h")) == 1
    shown = capfd.readouterr()
    assert "s: 0 faults, 2 more planned for a later time\n" in shown.out
    assert "the job ended before the first fault came; give it more steps, or a shorter --mtbf" in shown.err


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The person would learn which directory is emptied by seeing it empty."""
    words = ("--faults", "3", "--wipe", f"{tmp_path}/ram-{{run}}-{{process}}:1", "--dry-run")
    assert main(chaos_command(tmp_path, *words)) == 0
    out = capfd.readouterr().out.splitlines()
    assert len(out) == 3
    for line in out:
        victim = line.partition("kill process ")[2][0]
        assert line.endswith(f"; empty {tmp_path}/ram-disturbed-{victim}")
    assert not (tmp_path / "disturbed").exists()
    words = ("--mtbf", "60s", "--wipe", "ram:0.5", "--flip", "0.1", "--seed", "7", "--report", "out/", "--dry-run")
    assert main(["chaos", *words, "--", "python", "train.py"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert len(out) == 5
    assert {line.partition("; ")[2] for line in out} >= {"", "empty ram"}
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "explode:1"], "choose among kill, host, freeze, preempt, fill, outage"),
        (["--kind", "fill:1"], "needs a directory on the file system to fill"),
        (["--kind", "fill:1", "--fill", "/usr/lib"], "is on the file system of /"),
        (["--kind", "outage:1"], "needs a bucket to take away"),
        (["--processes", "3", "--hosts", "2"], "3 processes are not as many on each of 2 hosts"),
        (["--processes", "3", "--hosts", "2", "--dry-run"], "3 processes are not as many on each of 2 hosts"),
        (["--bucket", "run"], "write NAME=DIR"),
        (["--kind", "kill:0"], "of which one is above 0"),
        (["--wipe", "/:0.5"], "give a directory of the job's own"),
        (["--wipe", "/dev/shm/x"], "write DIR:CHANCE"),
        (["--flip", "/dev/shm/x:2"], "the chance is 2, expected 0 to 1"),
        (["--compare"], "give each run its own directories"),
    ],
)
def test_wrong_plan_is_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half a campaign would have run, or the wrong directory been emptied."""
    assert main(["chaos", *words, "--", sys.executable, "-c", f"open('{tmp_path}/ran', 'w')"]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()

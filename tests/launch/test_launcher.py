"""The launcher, with small Python children: what is lost is noticed, told, and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.events import Event, EventLog, Kind
from ckptkit.launch import ExitCode, Hooks, Launcher, OncePrinter, RestartPolicy, Workers, worker

QUICK = RestartPolicy(restarts=2, backoff_s=0.0, grace_s=0.5)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def child(code: str, *words: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *words]


class Spy:
    """Collects the output of a launcher and its children, and its events."""

    def __init__(self):
        self.lines: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.events: list[Event] = []
        self.log = EventLog(process=-1)
        self.log.observe(self.events.append)

    def launcher(
        self,
        command: list[str],
        *,
        processes: int = 2,
        policy: RestartPolicy = QUICK,
        on_lost: Callable[[int, int], None] = lambda attempt, process: None,
        devices_per_process: int | None = None,
    ) -> Launcher:
        return Launcher(
            Workers(command, processes=processes, devices_per_process=devices_per_process),
            policy=policy,
            events=self.log,
            hooks=Hooks(
                on_output=lambda process, line: self.lines.append((process, line)),
                on_lost=on_lost,
                say=self.said.append,
            ),
        )

    @property
    def kinds(self) -> list[Kind]:
        return [event.kind for event in self.events]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_successful_job_exits_0_with_placeholders_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a placeholder is not replaced, other braces are, or XLA does not get the devices with its flags."""
    level = "--xla_backend_optimization_level=1"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=4 {level}")
    spy = Spy()
    code = "import os, sys; print(*sys.argv[1:], os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'])"
    command = child(code, "{process}/{processes}", "{coordinator}", "{attempt}", '{"a": {}}')
    assert spy.launcher(command, devices_per_process=3).run() == ExitCode.OK
    words = {process: line.split(" ", 3) for process, line in spy.lines}
    assert [words[p][0] for p in (0, 1)] == ["0/2", "1/2"]
    assert words[0][1] == words[1][1]
    assert words[0][1].startswith("127.0.0.1:")
    assert words[0][2] == "0"
    assert words[0][3] == f'{{"a": {{}}}} {level} --xla_force_host_platform_device_count=3 cpu'
    assert spy.kinds == [Kind.STARTED, Kind.FINISHED]
    assert spy.said == []


def test_killed_process_is_reported_and_all_restart() -> None:
    """Breaks when a loss is not noticed, its event is wrong, or a survivor lives on into the next attempt."""
    spy = Spy()
    alive_at_loss: list[bool] = []

    def on_lost(attempt: int, process: int) -> None:
        pids = [int(line.split()[2]) for _, line in spy.lines if line.startswith("up")]
        alive_at_loss.extend(is_alive(pid) for pid in pids)
        assert (attempt, process) == (0, 1)

    code = (
        "import os, sys, time\n"
        "print('up', sys.argv[2], os.getpid(), sys.argv[1], flush=True)\n"
        "time.sleep(60 if sys.argv[1] == '0' else 0)"
    )
    launcher = spy.launcher(child(code, "{attempt}", "{coordinator}"), on_lost=on_lost)
    threading.Thread(
        target=lambda: wait_until(lambda: len(spy.lines) == 2) and launcher.kill(1, wiped=["ram", "ssd"])
    ).start()
    assert launcher.run() == ExitCode.OK
    assert alive_at_loss == [False, False]
    assert len({line.split()[1] for _, line in spy.lines}) == 2, "one port per attempt"
    assert spy.kinds == [Kind.STARTED, Kind.DISRUPTED, Kind.RELAUNCHED, Kind.FINISHED]
    expected = {"attempt": 0, "lost": 1, "cause": "SIGKILL", "wiped": ("ram", "ssd")}
    assert 0.0 <= spy.events[1].fields["detect_s"] < 10.0
    assert {**spy.events[1].fields, "detect_s": 0} == {**expected, "detect_s": 0}
    assert spy.events[2].fields == {"attempt": 1}
    assert spy.said == [
        "attempt 0: process 1 was lost (SIGKILL)",
        "restarting all 2 processes in 0 s (1 restart left)",
    ]


def test_process_that_a_real_time_signal_ends_is_a_loss() -> None:
    """Such a signal has no name: the launcher ended with a traceback, and its job with it."""
    spy = Spy()
    code = "import os, signal, sys; sys.argv[1] == '0' and os.kill(os.getpid(), signal.SIGRTMIN + 7)"
    assert spy.launcher(child(code, "{attempt}"), processes=1).run() == ExitCode.OK
    assert spy.said[0] == f"attempt 0: process 0 was lost (signal {signal.SIGRTMIN + 7})"


def test_kill_may_be_called_from_on_output() -> None:
    """Breaks when a callback that kills waits for a lock that the run holds (the demo kills at a step)."""
    launcher: Launcher

    def on_output(process: int, line: str) -> None:
        if line == "up 0":
            assert launcher.kill(process)
            assert not launcher.kill(7)

    code = "import sys, time; print('up', sys.argv[1], flush=True); time.sleep(60 if sys.argv[1] == '0' else 0)"
    launcher = Launcher(
        Workers(child(code, "{attempt}"), processes=1),
        policy=QUICK,
        hooks=Hooks(on_output=on_output, say=lambda line: None),
    )
    assert launcher.run() == ExitCode.OK


def test_spent_restart_budget_exits_1_at_once() -> None:
    """Breaks when a loss is noticed only when the survivors end, or restarts never end."""
    spy = Spy()
    code = "import sys, time; time.sleep(60) if sys.argv[1] == '0' else sys.exit(3)"
    start_s = time.monotonic()
    assert spy.launcher(child(code, "{process}")).run() == ExitCode.BUDGET_SPENT
    assert time.monotonic() - start_s < 10.0
    assert spy.said[0] == "attempt 0: process 1 was lost (exit code 3)"
    assert spy.said[-1] == "all 2 restarts are spent: giving up"
    assert spy.kinds.count(Kind.DISRUPTED) == 3
    assert spy.kinds.count(Kind.RELAUNCHED) == 2
    assert spy.events[-1].fields == {"code": 1}


def test_bad_input_is_never_restarted() -> None:
    """Breaks when a wrong flag of the trainer is tried three times."""
    spy = Spy()
    code = "import sys, time; print('no such corpus'); sys.exit(2) if sys.argv[1] == '1' else time.sleep(60)"
    assert spy.launcher(child(code, "{process}")).run() == ExitCode.USAGE
    assert spy.said == ["process 1 refused its input (exit code 2): not restarted"]
    assert spy.kinds == [Kind.STARTED, Kind.FINISHED]


def test_survivor_ignoring_sigterm_is_killed_after_the_grace() -> None:
    """Breaks when a hung JAX process, whose notifier eats SIGTERM, keeps the job from restarting."""
    spy = Spy()
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'terminated\\n'))\n"
        "print('up', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end: time.sleep(0.1)"
    )
    launcher = spy.launcher(child(code), policy=RestartPolicy(restarts=0, grace_s=1.0))
    threading.Thread(target=lambda: wait_until(lambda: len(spy.lines) == 2) and launcher.kill(0)).start()
    start_s = time.monotonic()
    assert launcher.run() == ExitCode.BUDGET_SPENT
    assert (1, "terminated") in spy.lines
    assert 1.0 <= time.monotonic() - start_s < 10.0


def test_child_without_newlines_does_not_block() -> None:
    """Breaks when output waits in a full pipe (64 KiB), or is held in memory until a newline comes."""
    sizes: list[int] = []
    code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.write('y' * 1_000_000)"
    launcher = Launcher(
        Workers(child(code), processes=2),
        policy=QUICK,
        hooks=Hooks(on_output=lambda process, line: sizes.append(len(line))),
    )
    assert launcher.run() == ExitCode.OK
    assert sum(sizes) == 2 * 4_000_000
    assert max(sizes) <= 65536


def test_exception_in_a_callback_stops_the_job() -> None:
    """Breaks when an error in a reader thread is lost and the job runs on unwatched."""

    def on_output(process: int, line: str) -> None:
        raise RuntimeError(f"cannot use {line}")

    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="cannot use up"):
        Launcher(Workers(child(SLEEP), processes=2), policy=QUICK, hooks=Hooks(on_output=on_output)).run()
    assert time.monotonic() - start_s < 10.0


def test_processes_started_by_a_child_are_killed_with_it() -> None:
    """Breaks when a data worker of a dead process goes on, holding its pipe and its files."""
    spy = Spy()
    code = (
        "import subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
        "sys.exit(1)"
    )
    launcher = spy.launcher(child(code), processes=1, policy=RestartPolicy(restarts=0, grace_s=0.1))
    assert launcher.run() == ExitCode.BUDGET_SPENT
    assert wait_until(lambda: not is_alive(int(spy.lines[0][1])), timeout_s=2.0)


def test_missing_command_is_a_usage_error() -> None:
    """Breaks when a typing error in the command is restarted, or shown as a traceback."""
    spy = Spy()
    assert spy.launcher(["no-such-command"]).run() == ExitCode.USAGE
    assert "cannot start no-such-command: No such file or directory" in [line for _, line in spy.lines]


def test_wrong_arguments_are_refused() -> None:
    """Breaks when a launcher can be made that starts nothing, or waits for a negative time."""
    with pytest.raises(ValueError, match="no command to launch: give it after --"):
        Launcher(Workers([], processes=1))
    with pytest.raises(ValueError, match="processes is 0, expected 1 or more"):
        Launcher(Workers(["true"], processes=0))
    with pytest.raises(ValueError, match="devices per process is 0"):
        Launcher(Workers(["true"], processes=1, devices_per_process=0))
    with pytest.raises(ValueError, match=r"grace_s is -1.0, expected 0 or more"):
        RestartPolicy(grace_s=-1.0)


def test_identical_line_of_several_processes_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Breaks when N processes show the same message N times, or a repeated line of one process is swallowed."""
    show = OncePrinter()
    for process, line in [(0, "a"), (1, "a"), (1, "a"), (0, "b"), (0, "b"), (0, "a")]:
        show(process, line)
    assert capsys.readouterr().out.splitlines() == ["[0] a", "[1] a", "[0] b", "[0] b"]


def start_cli(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ckptkit.cli", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[1]) for _ in range(count)]


def test_command_line_shows_a_refusal_once_and_exits_2(tmp_path: Path) -> None:
    """Breaks when bad input is told once per process, or the exit code does not show that the input is bad."""
    refuse = child("import sys; print('no corpus'); sys.exit(2)")
    process = start_cli("--processes", "2", "--events", str(tmp_path), "--", *refuse)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert out.splitlines() in (["[0] no corpus"], ["[1] no corpus"])
    assert "refused its input (exit code 2): not restarted" in err
    last = (tmp_path / "launcher.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["code"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "2"], "no command to launch"),
        (["--processes", "0", "--", "true"], "0 is not in the range"),
        (["--processes", "two", "--", "true"], "is not a valid integer range"),
    ],
)
def test_wrong_usage_of_the_command_line_exits_2(words: list[str], message: str) -> None:
    """Breaks when a wrong flag gives a traceback, or an exit code that reads as a failed job."""
    process = start_cli(*words)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err
    assert "Traceback" not in err


SAVE_AND_GO = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(float(sys.argv[1])), os._exit(int(sys.argv[2]))))\n"
    "print('up', os.getpid(), flush=True)\n"
    "time.sleep(60)"
)


@pytest.mark.parametrize(
    ("save_s", "code", "grace_s", "expected"),
    [("1.0", "75", 20.0, ExitCode.PREEMPTED), ("0", "0", 20.0, ExitCode.OK), ("30", "75", 0.3, ExitCode.INTERRUPTED)],
)
def test_preempted_job_gets_its_grace_and_reports_its_save(
    save_s: str, code: str, grace_s: float, expected: ExitCode
) -> None:
    """Breaks when processes are killed in mid-save, or a job that lost its last save reads as one that has it."""
    spy = Spy()
    policy = RestartPolicy(restarts=3, grace_s=0.1, preempt_grace_s=grace_s)
    launcher = spy.launcher(child(SAVE_AND_GO, save_s, code), policy=policy)
    threading.Thread(target=lambda: wait_until(lambda: len(spy.lines) == 2) and launcher.preempt()).start()
    assert launcher.run() == expected
    assert spy.kinds == [Kind.STARTED, Kind.FINISHED]
    assert spy.events[-1].fields == {"code": int(expected)}
    assert spy.said[0] == f"preempted: the processes have {grace_s:g} s to save their last step"
    if expected == ExitCode.PREEMPTED:
        assert spy.said[1] == "preempted: the same command continues from the newest save"


def test_processes_preempted_by_the_cluster_are_not_a_loss() -> None:
    """Breaks when a job that saved its last step is started again on a machine that is about to go."""
    spy = Spy()
    assert spy.launcher(child("import sys; sys.exit(75)")).run() == ExitCode.PREEMPTED
    assert Kind.DISRUPTED not in spy.kinds


def test_sigterm_gives_processes_time_to_save(tmp_path: Path) -> None:
    """Breaks when a cluster that stops the launcher stops the job without its last save."""
    words = ["--processes", "2", "--grace", "0.1", "--events", str(tmp_path), "--"]
    process = start_cli(*words, *child(SAVE_AND_GO, "1.0", "75"))
    assert process.stdout is not None
    assert [process.stdout.readline().split()[1] for _ in range(2)] == ["up", "up"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err


def test_attempt_numbers_continue_over_launches(tmp_path: Path) -> None:
    """Breaks when a second launch of a run writes over the first one's logs, and the account mixes both."""
    command = [*child("import sys; print('attempt', sys.argv[1]); sys.exit(3)", "{attempt}")]
    words = ["--processes", "1", "--max-restarts", "1", "--backoff", "0", "--events", str(tmp_path), "--", *command]
    seen = [start_cli(*words).communicate(timeout=60)[0].splitlines() for _ in range(2)]
    assert seen == [["[0] attempt 0", "[0] attempt 1"], ["[0] attempt 2", "[0] attempt 3"]]


def test_user_signal_before_an_attempt_does_not_end_its_workers() -> None:
    """A warning of the scheduler during a restart would end the workers, which have no handlers yet."""
    spy = Spy()
    launcher = spy.launcher(child("import time; time.sleep(0.3)"))
    launcher.pass_on(signal.SIGUSR1)
    assert launcher.run() == ExitCode.OK
    assert spy.said == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_launcher_stops_its_children_and_exits_130(signum: int) -> None:
    """Breaks when Ctrl-C leaves trainers behind."""
    process = start_cli("--processes", "2", "--grace", "1", "--", *child("import os;print(os.getpid());" + SLEEP))
    pids = read_pids(process, 1)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err
    assert not any(map(is_alive, pids))


def test_stop_from_another_thread_ends_the_backoff() -> None:
    """Breaks when a job that waits to be restarted cannot be stopped."""
    spy = Spy()
    policy = RestartPolicy(restarts=1, backoff_s=50.0, grace_s=0.1)
    launcher = spy.launcher(child("import sys; sys.exit(1)"), policy=policy)
    threading.Thread(target=lambda: wait_until(lambda: len(spy.said) == 2) and launcher.stop()).start()
    start_s = time.monotonic()
    assert launcher.run() == ExitCode.INTERRUPTED
    assert time.monotonic() - start_s < 10.0
    assert spy.events[-1].fields == {"code": 130}
    launcher.stop()  # after the end: nothing to wake


def test_children_do_not_outlive_a_killed_launcher() -> None:
    """Breaks when a launcher that is killed (or out of memory) leaves processes that hold ports and /dev/shm."""
    process = start_cli("--processes", "2", "--", *child("import os;print(os.getpid());" + SLEEP))
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        word = process.stdout.readline().split()[1]
        pids += [int(word)] if word.isdecimal() else []
    assert all(map(is_alive, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_worker_waits_until_process_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC tries a refused connection again a second later: each restart would take that second."""
    tried = threading.Semaphore(0)
    connect = socket.create_connection

    def counted(*words: Any, **named: Any) -> socket.socket:
        tried.release()
        return connect(*words, **named)

    monkeypatch.setattr(socket, "create_connection", counted)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        waiting = threading.Thread(target=worker._await_listener, args=(f"127.0.0.1:{listener.getsockname()[1]}",))
        waiting.start()
        for _ in range(3):  # refused
            tried.acquire()
        assert waiting.is_alive()
        listener.listen()
        waiting.join()
        listener.accept()[0].close()
        monkeypatch.setattr(worker, "_LISTENER_S", 0.0)
    worker._await_listener("127.0.0.1:1")  # nobody comes: JAX tells it

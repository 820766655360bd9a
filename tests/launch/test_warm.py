"""Workers that are forked from a template: they are what a cold start gives, and no fork is made that is not safe."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ckptkit.launch import ExitCode, HangPolicy, Hooks, Launcher, RestartPolicy, WarmStart, Workers, import_watch
from ckptkit.launch.policy import JobPlace, specs_of
from tests.cases import long_except
from tests.launch.test_launcher import is_alive, wait_until

PYTHON = sys.executable
QUICK = RestartPolicy(restarts=2, backoff_s=0.0, grace_s=0.1)
TOLD = """
import os, sys
found = [__name__, __file__, __spec__ is None, sys.argv, sys.path[0], __builtins__ is not None]
found.append(sys.modules["__main__"].__dict__ is globals())
found += [sys._getframe().f_code.co_filename, __loader__.path]
print(found, os.getsid(0) == os.getpid(), flush=True)
"""


class Job:
    """A warm job whose lines and sayings are kept."""

    def __init__(
        self,
        command: list[str],
        *,
        processes: int = 1,
        policy: RestartPolicy = QUICK,
        warm: WarmStart | None = None,
        hang: HangPolicy | None = None,
        on_attempt: Callable[[int], None] = lambda attempt: None,
    ):
        self.lines: list[tuple[int, str]] = []
        self.said: list[str] = []
        self.status: dict[str, object] = {}
        self.launcher = Launcher(
            Workers(command, processes=processes, warm=warm or WarmStart(preload=("json",))),
            policy=policy,
            hang=hang,
            hooks=Hooks(
                on_output=lambda process, line: self.lines.append((process, line)),
                on_attempt=on_attempt,
                on_status=self.status.update,
                say=self.said.append,
            ),
        )

    def run(self) -> ExitCode:
        return self.launcher.run()

    @property
    def texts(self) -> list[str]:
        return [line for _, line in self.lines]


def write(path: Path, code: str) -> str:
    path.write_text(code)
    return str(path)


def ran_cold(job: Job) -> bool:
    return any("cold" in line or "cannot be used" in line for line in job.said)


def test_forked_script_and_module_see_what_a_cold_start_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that asks for its name, path or arguments would behave otherwise after a restart."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "told.py", TOLD)
    entry = write(tmp_path / "entry", f"#!{PYTHON}\n{TOLD}")
    Path(entry).chmod(0o755)
    for words in (
        [PYTHON, "told.py", "a", "{b}"],
        [PYTHON, "-m", "told", "a"],
        [entry, "a"],
        [PYTHON, "-X", "dev", "told.py"],
    ):
        cold = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True)
        for warm in (WarmStart(preload=("json",)), WarmStart(is_cold=True)):
            job = Job(words, warm=warm)
            assert job.run() == ExitCode.OK
            assert job.texts == cold.stdout.splitlines(), (words, warm)
            assert not job.said


def test_last_words_name_the_step_that_is_not_durable(tmp_path: Path) -> None:
    """A job ended well, and its last step was only in the memory of the host."""
    script = write(
        tmp_path / "s.py",
        "import sys\n"
        "from ckptkit.util import heartbeat\n"
        "heartbeat.beat(60)\n"
        "if sys.argv[1] == '0':\n"
        "    heartbeat.ended(heartbeat.Behind(step=60, durable=int(sys.argv[2]) or None))\n",
    )
    for durable, there in ((50, "step 50"), (0, "no step")):
        job = Job([PYTHON, script, "{process}", str(durable)], processes=2, warm=WarmStart(is_cold=True))
        assert job.run() == ExitCode.OK
        said = f"the job has ended, and the durable tier does not have step 60: it has {there}"
        assert job.said == [f"{said}; the last warning of process 0 has the reason"]


def test_modules_are_imported_once_for_all_workers(tmp_path: Path) -> None:
    """Every restart would pay for the imports again, which is what a template is for."""
    write(tmp_path / "heavy.py", "import os\nHERE = os.getpid()")
    # One write for a line: the first worker to exit with 3 ends the others, in the middle of a line too.
    script = write(
        tmp_path / "s.py",
        "import heavy, os, sys\nprint(f'{heavy.HERE} {os.getppid()}')\nsys.exit(3 * (sys.argv[1] == '0'))",
    )
    job = Job([PYTHON, script, "{attempt}"], processes=3, warm=WarmStart(preload=("heavy",)))
    assert job.run() == ExitCode.OK
    homes = {line.split()[0] for line in job.texts}
    parents = {line.split()[1] for line in job.texts}
    assert len(homes) == 1
    assert parents == {str(os.getpid())}
    assert not ran_cold(job)


WARMTH = "import gc, sys\nprint(gc.get_freeze_count() > 0, flush=True)\nsys.exit(3 * (sys.argv[1] == '0'))\n"


def test_every_attempt_is_forked_with_the_first_imports_of_the_script(tmp_path: Path) -> None:
    """A job that is lost in its first minute would start cold again."""
    job = Job([PYTHON, write(tmp_path / "s.py", f"import numpy\n{WARMTH}"), "{attempt}"], warm=WarmStart())
    assert job.run() == ExitCode.OK
    assert job.texts == ["True", "True"]
    assert not ran_cold(job)


def test_program_that_begins_with_another_statement_starts_cold_and_says_so(tmp_path: Path) -> None:
    """A library would be imported before the variable is set that it reads."""
    code = f"import os\nos.environ['JAX_ENABLE_X64'] = '1'\nimport jax\n{WARMTH}"
    job = Job([PYTHON, write(tmp_path / "s.py", code), "{attempt}"], warm=WarmStart())
    assert job.run() == ExitCode.OK
    assert job.texts == ["False", "False"]
    (line,) = [line for line in job.said if "cold" in line]
    assert (
        line == f"all starts are cold: {tmp_path}/s.py line 2 sets os.environ['JAX_ENABLE_X64'] before it imports jax"
    )


def test_reason_of_a_cold_start_is_printed_once_for_all_prefixes(tmp_path: Path) -> None:
    """A job with a prefix for each of its processes would repeat the line as often as it has processes."""
    said: list[str] = []
    job = Launcher(
        Workers(
            [PYTHON, write(tmp_path / "s.py", "print(1)\nimport numpy")],
            processes=3,
            prefixes=[["env", f"A={process}"] for process in range(3)],
            warm=WarmStart(),
        ),
        policy=QUICK,
        hooks=Hooks(on_output=lambda process, line: None, say=said.append),
    )
    assert job.run() == ExitCode.OK
    assert said == [f"all starts are cold: {tmp_path}/s.py line 1 calls print(1) before it imports numpy"]


def test_main_module_of_a_package_is_run_once_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its top level would run a second time in the template, and Python would warn in every restarted process."""
    (tmp_path / "job").mkdir()
    write(tmp_path / "job" / "__init__.py", "")
    write(
        tmp_path / "job" / "__main__.py",
        "import sys, wave\nif __name__ == '__main__':\n    sys.exit(3 * (sys.argv[1] == '0'))",
    )
    monkeypatch.chdir(tmp_path)
    job = Job([PYTHON, "-m", "job", "{attempt}"], processes=2, warm=WarmStart())
    assert job.run() == ExitCode.OK
    assert not job.texts, "a warning of Python's runpy"


def test_failures_look_like_those_of_a_cold_start(tmp_path: Path) -> None:
    """A traceback would lead the user into our files, or an exit code be lost."""
    script = write(tmp_path / "s.py", "def f():\n    raise ValueError('mine')\nf()")
    cold = subprocess.run([PYTHON, script], capture_output=True, text=True)
    job = Job([PYTHON, script], policy=RestartPolicy(restarts=0))
    assert job.run() == ExitCode.BUDGET_SPENT
    assert job.texts == cold.stderr.splitlines()
    assert job.said[0] == "attempt 0: process 0 was lost (exit code 1)"
    job = Job([PYTHON, write(tmp_path / "t.py", "import sys; sys.exit(2)")])
    assert job.run() == ExitCode.USAGE
    job = Job(
        [PYTHON, write(tmp_path / "u.py", "import os; os.kill(os.getpid(), 9)")], policy=RestartPolicy(restarts=0)
    )
    assert job.run() == ExitCode.BUDGET_SPENT
    assert job.said[0] == "attempt 0: process 0 was lost (SIGKILL)"


def test_exit_handlers_run_in_workers_and_not_in_the_template(tmp_path: Path) -> None:
    """The output that a library flushes at its end would be lost, or written twice."""
    write(tmp_path / "heavy.py", "import atexit\natexit.register(lambda: print('ended', flush=True))")
    job = Job([PYTHON, write(tmp_path / "s.py", "import heavy")], processes=2, warm=WarmStart(preload=("heavy",)))
    assert job.run() == ExitCode.OK
    assert job.texts == ["ended", "ended"]


def test_edited_source_is_run_after_a_restart(tmp_path: Path) -> None:
    """A user who mends a module while the job restarts would run the old code, and not know."""
    module = tmp_path / "mine.py"
    write(module, "VALUE = 1")
    code = (
        "import mine, sys\n"
        "print(mine.VALUE, flush=True)\n"
        f"if sys.argv[1] == '0': open({str(module)!r}, 'w').write('VALUE = 22'); sys.exit(3)"
    )
    job = Job([PYTHON, write(tmp_path / "s.py", code), "{attempt}"], warm=WarmStart(preload=("mine",)))
    assert job.run() == ExitCode.OK
    assert job.texts == ["1", "22"]
    assert any(f"{module} has changed since it was imported" in line for line in job.said)


UNSAFE = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='mine').start()",
        "the Python thread mine runs",
    ),
    "lock": (
        "import threading, time\nLOCK = threading.Lock()\n"
        "def keep():\n    with LOCK:\n        time.sleep(60)\n"
        "threading.Thread(target=keep, daemon=True, name='keeper').start()",
        "the Python thread keeper runs",
    ),
    "socket": ("import socket\nKEPT = socket.socket()", "a socket is open"),
    "file": ("KEPT = open(__file__ + '.log', 'w')", "bad.py.log is open for writing"),
    "backend": ("import jax\njax.devices()", "JAX has a backend already"),
}


@pytest.mark.disk
@pytest.mark.parametrize("kind", long_except(set(UNSAFE) - {"backend"}, UNSAFE))
def test_process_that_is_not_safe_to_fork_is_not_forked(kind: str, tmp_path: Path) -> None:
    """Workers would share a lock, a connection, a file's position or a device, and hang or write over another."""
    code, reason = UNSAFE[kind]
    write(tmp_path / "bad.py", code)
    script = write(tmp_path / "s.py", "import bad, os\nprint(os.getpid())")
    job = Job([PYTHON, script], processes=2, warm=WarmStart(preload=("json", "bad")))
    assert job.run() == ExitCode.OK
    assert len(set(job.texts)) == 2
    assert any(f"importing bad: {reason}" in line.replace(str(tmp_path) + "/", "") for line in job.said), job.said


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import random\nrandom.seed(7)\nseen = lambda: random.random()", "it seeds random"),
        ("import numpy\nnumpy.random.seed(7)\nseen = lambda: numpy.random.rand()", "it seeds numpy.random"),
        (
            "import os\nRANK = os.environ.get('CKPTKIT_PROCESS', '0')\nseen = lambda: RANK",
            "it looks for CKPTKIT_PROCESS",
        ),
        ("import sys\nARGUMENTS = sys.argv[1:]\nseen = lambda: ARGUMENTS", None),
    ],
)
def test_module_that_asks_or_seeds_while_it_is_imported_gives_what_a_cold_start_gives(
    tmp_path: Path, code: str, reason: str | None
) -> None:
    """All workers would take themselves for process 0, or a run that was seeded would not be the same again."""
    write(tmp_path / "mine.py", code)
    words = [PYTHON, write(tmp_path / "s.py", "import mine\nprint(mine.seen(), flush=True)"), "--steps", "5"]
    cold, warm = (
        Job(words, processes=2, warm=WarmStart(preload=("json", "mine"), is_cold=is_cold)) for is_cold in (True, False)
    )
    assert cold.run() == warm.run() == ExitCode.OK
    assert sorted(warm.texts) == sorted(cold.texts)
    assert ran_cold(warm) == (reason is not None)
    assert reason is None or any(f"importing mine: {reason}" in line for line in warm.said), warm.said


def test_every_variable_of_a_worker_is_watched_for() -> None:
    """A module that asks for a new one would find nothing in a template, and no worker would import it for itself."""
    place = JobPlace(first=0, here=1, processes=1, coordinator="", attempt=0)
    (spec,) = specs_of(["python"], place)
    assert set(spec.environment) == import_watch._OWN_VARIABLES


def test_template_that_says_much_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    """A module that warns in a loop would fill the pipe: the job would wait for five minutes, then start cold."""
    write(tmp_path / "chatty.py", "for _ in range(20_000):\n    print('x' * 100)")
    script = write(tmp_path / "s.py", "import chatty")
    job = Job([PYTHON, script], warm=WarmStart(preload=("chatty",)))
    assert job.run() == ExitCode.OK
    assert not ran_cold(job)


def test_job_can_be_stopped_while_its_template_imports(tmp_path: Path) -> None:
    """Ctrl-C would seem to be ignored for as long as the imports take, up to five minutes."""
    begun = tmp_path / "begun"
    write(tmp_path / "slow.py", f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(200)")
    job = Job([PYTHON, write(tmp_path / "s.py", "import slow")], warm=WarmStart(preload=("slow",)))
    start_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: wait_until(begun.exists) and job.launcher.stop())
        assert job.run() == ExitCode.INTERRUPTED
    assert time.monotonic() - start_s < 100.0, "half of the import"


def test_workers_draw_different_numbers(tmp_path: Path) -> None:
    """Workers of one template would shuffle alike, and write files of the same name over each other."""
    code = (
        "import random, numpy, sys, os, tempfile\n"
        "import tensorstore as ts\n"
        "d = tempfile.mkdtemp(dir=sys.argv[1])\n"
        "kv = ts.KvStore.open({'driver': 'ocdbt', 'base': 'file://' + d}).result()\n"
        "kv.write(b'key', b'x' * 10000).result()\n"
        "print(random.random(), numpy.random.random(), os.path.basename(d), *os.listdir(d + '/d'))"
    )
    script = write(tmp_path / "s.py", code)
    job = Job(
        [PYTHON, script, str(tmp_path)], processes=3, warm=WarmStart(preload=("random", "tensorstore", "tempfile"))
    )
    assert job.run() == ExitCode.OK
    assert not ran_cold(job)
    for column in zip(*(line.split() for line in job.texts), strict=True):
        assert len(set(column)) == 3, column


def children_of(pid: int) -> set[int]:
    """Also those that have ended and were not reaped. `task/*/children` would lose one whose thread ends meanwhile."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(process.name))
    return found


def template_pids() -> set[int]:
    """The templates among this process's children, that of `tests.forked` too. The workers that they fork are not."""
    found = set()
    for child in children_of(os.getpid()):
        with suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")  # its arguments, later its title
            if b"template" in words or words[0].startswith(b"ckptkit: template"):
                found.add(child)
    return found


def test_killed_template_harms_no_worker_and_is_replaced(tmp_path: Path) -> None:
    """A template that the machine kills for its memory would take the job with it."""
    code = (
        "import os, sys, time\n"
        "print('up', flush=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "sys.exit(3 if sys.argv[2] == '0' else 0)"
    )
    flag = tmp_path / "go"
    others = template_pids()
    job = Job([PYTHON, write(tmp_path / "s.py", code), str(flag), "{attempt}"], processes=2)

    def kill() -> int:
        try:
            assert wait_until(lambda: len(job.lines) == 2)
            (template,) = template_pids() - others
            os.kill(template, signal.SIGKILL)
            assert wait_until(lambda: bool(template_pids() - others - {template}))
            return len(job.lines)
        finally:
            flag.touch()  # else the job never ends

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill)
        assert job.run() == ExitCode.OK
        assert killer.result() == 2, "the workers went on"
    assert any("the template ended" in line for line in job.said)
    assert job.texts == ["up"] * 4


def test_killed_agent_takes_forked_workers_and_template_with_it(tmp_path: Path) -> None:
    """A job without an agent would hold ports, memory and devices, and nobody would restart it."""
    script = write(tmp_path / "s.py", "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    words = ["--processes", "2", "--preload", "json", "--", PYTHON, script]
    agent = subprocess.Popen([PYTHON, "-m", "ckptkit.cli", "run", *words], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pids = [int(agent.stdout.readline().split()[1]) for _ in range(2)]
    children = children_of(agent.pid)
    assert set(pids) < children, "the agent is their parent, and that of the template"
    agent.kill()
    agent.communicate()
    assert wait_until(lambda: not any(is_alive(pid) for pid in children))
    with suppress(ChildProcessError):  # this process may be their reaper
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("is_cold", [True, False])
def test_sigterm_is_for_the_worker_and_not_for_its_helpers(tmp_path: Path, is_cold: bool) -> None:
    """The data loader's processes would be gone before the last save: the worker would fail, and the step be lost."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    print('helper', helper.poll(), flush=True)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    job = Job([PYTHON, write(tmp_path / "s.py", code)], warm=WarmStart(preload=("json",), is_cold=is_cold))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: wait_until(lambda: "up" in job.texts) and job.launcher.preempt())
        assert job.run() == ExitCode.PREEMPTED
    assert job.texts == ["up", "helper None"]


def test_sigterm_reaches_a_worker_behind_a_wrapper(tmp_path: Path) -> None:
    """A shell passes no signal on: the worker would be killed without its last save."""
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nprint('up', flush=True)\n"
    script = write(tmp_path / "s.py", f"{code}time.sleep(60)\n")
    shell = 'trap : TERM\n"$0" "$1" &\nwait $!; wait $!; exit $?'
    job = Job(["sh", "-c", shell, PYTHON, script])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: wait_until(lambda: "up" in job.texts) and job.launcher.preempt())
        assert job.run() == ExitCode.PREEMPTED


def held() -> tuple[int, int, int]:
    """Open files, threads, and children of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children_of(os.getpid()))


@pytest.mark.long
def test_hundred_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """A job that restarts for weeks would run out of files, of processes or of memory in /dev/shm."""
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "sys.exit(3 if int(sys.argv[1]) < 100 else 0)"
    )
    seen: list[tuple[int, int, int]] = []
    job = Job(
        [PYTHON, write(tmp_path / "s.py", code), "{attempt}"],
        processes=2,
        policy=RestartPolicy(restarts=100, backoff_s=0.0, grace_s=0.0),
        warm=WarmStart(preload=("json", "subprocess")),
        on_attempt=lambda attempt: seen.append(held()),
    )
    shm = set(os.listdir("/dev/shm"))
    before = held()
    assert job.run() == ExitCode.OK
    assert len(seen) == 101
    for what, early, last in zip(("files", "threads", "children"), seen[2], seen[100], strict=True):
        assert last <= early + 1, (what, early, last)
    assert wait_until(lambda: held() == before), (held(), before)
    assert not any(name.startswith("ckptkit") for name in set(os.listdir("/dev/shm")) - shm)
    assert not ran_cold(job)


BEATS = (
    "import os, sys, time\n"
    "from ckptkit.util import heartbeat\n"
    "begin = 1 if sys.argv[1] == '0' else 4\n"
    "def stuck():\n"
    "    time.sleep(60)\n"
    "for step in range(begin, 9):\n"
    "    time.sleep(0.02)\n"
    "    heartbeat.beat(step)\n"
    "    if sys.argv[1] == '0' and step == 5:\n"
    "        print('at 5', flush=True)\n"
    "        if sys.argv[2] == 'hang' or os.environ['CKPTKIT_PROCESS'] != '0':\n"
    "            stuck()\n"
    "        sys.exit(3)\n"  # at once: a step just before a loss counts
)


@pytest.mark.parametrize("warm", [WarmStart(preload=("json",)), WarmStart(is_cold=True)])
def test_job_that_hangs_is_dumped_and_restarted(warm: WarmStart, tmp_path: Path) -> None:
    """A job in a deadlock would hold its machines until somebody looks, and nobody would know where it hung."""
    script = write(tmp_path / "s.py", BEATS)
    job = Job([PYTHON, script, "{attempt}", "hang"], processes=2, warm=warm, hang=HangPolicy(limit_s=5.0))
    assert job.run() == ExitCode.OK
    assert any(re.search(r"was lost \(no step for \d+ s, the limit is 5 s", line) for line in job.said), job.said
    assert sum("in stuck" in line for line in job.texts) == 2, "the stacks of both"
    assert any(line.endswith("steps 4 to 5 again") for line in job.said), job.said


def test_screen_says_how_long_a_loss_took_and_what_it_cost(tmp_path: Path) -> None:
    """A user would see a restart and not know what it cost."""
    job = Job([PYTHON, write(tmp_path / "s.py", BEATS), "{attempt}", "exit"], processes=2)
    assert job.run() == ExitCode.OK
    (line,) = [line for line in job.said if "after the loss" in line]
    assert re.fullmatch(r"attempt 1: step 4 is done [\d.]+ m?s after the loss; steps 4 to 5 again", line)
    (recovery,) = job.status["recoveries"]  # type: ignore[misc]
    assert (recovery["step"], recovery["reached"], recovery["repeated"]) == (4, 5, 2)  # type: ignore[index]
    assert (job.status["newest_attempt_with_steps"], job.status["step"]) == (1, 8)
    assert job.status["state"] == "ended"


def test_restart_after_a_step_is_not_delayed(tmp_path: Path) -> None:
    """The wait that spares a machine a job which cannot start would be added to every recovery."""
    policy = RestartPolicy(restarts=2, backoff_s=30.0, grace_s=0.1)
    job = Job([PYTHON, write(tmp_path / "s.py", BEATS), "{attempt}", "exit"], processes=2, policy=policy)
    start_s = time.monotonic()
    assert job.run() == ExitCode.OK
    assert time.monotonic() - start_s < 20.0


def test_attempts_that_fail_at_the_same_step_wait_longer_each_time(tmp_path: Path) -> None:
    """An error in the script would spend ten restarts in ten seconds; so would a bucket that is away for a minute."""
    code = (
        "import sys\nfrom ckptkit.util import heartbeat\nheartbeat.beat(int(sys.argv[2]))\nsys.exit(int(sys.argv[1]))"
    )
    script = write(tmp_path / "s.py", code)
    policy = RestartPolicy(restarts=3, backoff_s=0.01, grace_s=0.1)
    job = Job([PYTHON, script, "1", "7"], policy=policy)
    assert job.run() == ExitCode.BUDGET_SPENT
    again = "it failed after step 7 again; restarting the process in"
    assert [line for line in job.said if "restarting" in line] == [
        "restarting the process in 0 s (2 restarts left)",
        f"{again} 0.01 s (1 restart left)",
        f"{again} 0.02 s (0 restarts left)",
    ]
    further = Job([PYTHON, script, "1", "{attempt}"], policy=policy)
    assert further.run() == ExitCode.BUDGET_SPENT
    assert not any("again;" in line for line in further.said)


def test_job_that_is_stopped_before_a_restart_reports_no_recovery(tmp_path: Path) -> None:
    """The last step of the lost attempt would be shown as the first one of an attempt that never began."""
    code = "import sys\nfrom ckptkit.util import heartbeat\nheartbeat.beat(7)\nsys.exit(3)"
    policy = RestartPolicy(restarts=3, backoff_s=60.0, grace_s=0.1)
    job = Job([PYTHON, write(tmp_path / "s.py", code)], policy=policy)
    stop = threading.Thread(
        target=lambda: wait_until(lambda: any("in 60 s" in line for line in job.said), 60) and job.launcher.stop()
    )
    stop.start()
    assert job.run() == ExitCode.INTERRUPTED
    stop.join()
    assert [line for line in job.said if "after the loss" in line and not line.startswith("attempt 1: ")] == []


def test_jax_finds_the_job_without_arguments(tmp_path: Path) -> None:
    """A script that runs under srun would need changes to run under `ckptkit run`."""
    code = (
        "import jax\n"
        "jax.distributed.initialize()\n"
        "print(jax.process_index(), jax.process_count())\n"
        "jax.distributed.shutdown()"
    )
    script = write(tmp_path / "s.py", code)
    for warm in (WarmStart(preload=("jax",)), WarmStart(is_cold=True)):
        job = Job([PYTHON, script], processes=2, warm=warm)
        assert job.run() == ExitCode.OK, job.lines
        assert sorted(job.texts) == ["0 2", "1 2"]
        assert not job.said


def test_nested_run_keeps_its_own_job(tmp_path: Path) -> None:
    """A script that launches processes itself would reach the outer job's coordinator, or outlive it."""
    inner = write(
        tmp_path / "inner.py",
        "import os\nprint('inner', os.environ['CKPTKIT_PROCESS'], os.environ['CKPTKIT_PROCESSES'])",
    )
    code = (
        "import subprocess, sys\n"
        f"words = ['run', '--processes', '2', '--preload', 'json', '--', sys.executable, {inner!r}]\n"
        "subprocess.run([sys.executable, '-m', 'ckptkit.cli', *words], check=True)"
    )
    job = Job([PYTHON, write(tmp_path / "outer.py", code)])
    assert job.run() == ExitCode.OK, job.lines
    assert sorted(job.texts) == ["[0] inner 0 2", "[1] inner 1 2"]


@pytest.mark.parametrize("words", [["/bin/echo", "hi"], [PYTHON, "-c", "print('hi')"], ["sh", "-c", "echo hi"]])
def test_commands_that_cannot_be_forked_run_as_they_are(words: list[str]) -> None:
    """A command in another language would be refused."""
    job = Job(words, processes=2)
    assert job.run() == ExitCode.OK
    assert job.texts == ["hi", "hi"]


def test_json_and_status_say_what_happened(tmp_path: Path) -> None:
    """A script around the command would have to read sentences."""
    script = write(tmp_path / "s.py", BEATS)
    words = ["--processes", "2", "--preload", "json", "--status", str(tmp_path / "status"), "--log-dir", str(tmp_path)]
    done = subprocess.run(
        [PYTHON, "-m", "ckptkit.cli", "run", "--json", *words, "--", PYTHON, script, "{attempt}", "exit"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown == json.loads((tmp_path / "status").read_text())
    assert [loss["cause"] for loss in shown["losses"]] == ["exit code 3"]
    assert shown["losses"][0]["ended_s"] > 0
    assert [each["attempt"] for each in shown["recoveries"]] == [1]
    assert shown["code"] == 0
    assert (tmp_path / "attempt-0-process-0.log").read_text() == "at 5\n"
    plan = subprocess.run(
        [PYTHON, "-m", "ckptkit.cli", "run", "--dry-run", "--json", *words, "--", PYTHON, script],
        capture_output=True,
        text=True,
    )
    assert json.loads(plan.stdout)["start"] == "warm"


def test_a_worker_has_the_name_of_its_process_and_command(tmp_path: Path) -> None:
    """A person who looks for the worker to kill would find the template's command line for each."""
    code = "import os\nprint(open('/proc/self/cmdline').read().rstrip(chr(0)), flush=True)"
    script = write(tmp_path / "s.py", code)
    for warm in (WarmStart(preload=("json",)), WarmStart(is_cold=True)):
        job = Job([PYTHON, script, "a"], processes=2, warm=warm)
        assert job.run() == ExitCode.OK, job.lines
        whole = [f"ckptkit: process {process} of 2: python {script} a" for process in (0, 1)]
        assert len(job.texts) == 2
        for expected, shown in zip(whole, sorted(job.texts), strict=True):
            assert expected.startswith(shown), "cut where the place of the arguments ends"
            assert shown.startswith(expected[:32])

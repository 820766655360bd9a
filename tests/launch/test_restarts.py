"""A restart runs what a cold start would run now: the settings, the files, the random numbers and the patches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers

# All processes of both attempts print, and mark a step as training does. The first attempt lives long enough that a
# launcher could look at what its workers have imported (a former one did after 2 s), and is lost.
FOOTER = """
import gc, os, sys, time
from ckptkit.util import heartbeat
heartbeat.beat(1)
attempt, process = os.environ["CKPTKIT_ATTEMPT"], os.environ["CKPTKIT_PROCESS"]
print("seen", *seen, "warm" if gc.get_freeze_count() else "cold", flush=True)
open(f"{attempt}-{process}", "w").close()
while not (os.path.exists(f"{attempt}-0") and os.path.exists(f"{attempt}-1")):
    time.sleep(0.01)
if attempt == "0":
    time.sleep(2.5 + int(process))  # process 0 ends the attempt
    sys.exit(3)
"""


def seen_by(words: list[str], files: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words that two processes print in an attempt and in its restart."""
    for name, code in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(code)
    monkeypatch.chdir(home)
    lines: list[str] = []
    job = Launcher(
        Workers([sys.executable, *words], processes=2, env={"FLAVOUR": "sweet"}, warm=WarmStart()),
        policy=RestartPolicy(restarts=1, backoff_s=0.0, grace_s=0.1),
        hooks=Hooks(on_output=lambda process, line: lines.append(line), say=lines.append),
    )
    assert job.run() == ExitCode.OK, lines
    found = [line.split()[1:] for line in lines if line.startswith("seen ")]
    assert [each.pop() for each in found] == ["warm"] * 4, lines
    return found


def test_restart_has_the_variables_and_the_path_that_the_script_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job would go on in float32, with another mode, and with the other module of that name."""
    script = (
        "import numpy, os, sys\n"
        "os.environ['JAX_ENABLE_X64'], os.environ['FLAVOUR'] = '1', 'sour'\n"
        "sys.path.insert(0, os.path.abspath('second'))\n"
        "import jax, mine\n"
        "seen = [jax.numpy.ones(1).dtype, mine.FLAVOUR, mine.VERSION]\n"
    )
    module = "import os\nFLAVOUR, VERSION = os.environ['FLAVOUR'], {}\n"
    files = {"s.py": script + FOOTER, "mine.py": module.format(1), "second/mine.py": module.format(2)}
    assert seen_by(["s.py"], files, tmp_path, monkeypatch) == [["float64", "sour", "2"]] * 4


def test_every_process_of_every_attempt_draws_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would shuffle alike, take the same id, and write into one folder."""
    module = (
        "import os, secrets, tempfile, uuid\n"
        "import numpy\n"
        "DRAWN = [numpy.random.default_rng().integers(1 << 60), uuid.uuid4(), secrets.token_hex(8)]\n"
        "DRAWN.append(os.path.basename(tempfile.mkdtemp(dir='.')))\n"
    )
    files = {"s.py": "import numpy, mine\nseen = mine.DRAWN\n" + FOOTER, "mine.py": module}
    for column in zip(*seen_by(["s.py"], files, tmp_path, monkeypatch), strict=True):
        assert len(set(column)) == 4, column


def test_restart_reads_the_file_that_a_module_reads_at_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who mends a configuration would see the restart run with the old one."""
    script = (
        "import numpy, mine, os, time\n"
        "seen = [mine.RATE]\n"
        "if os.environ['CKPTKIT_PROCESS'] == '1':\n"
        "    while not os.path.exists('0-0'):\n"  # process 0 of the first attempt has read the first file
        "        time.sleep(0.01)\n"
        "    with open('new', 'w') as file:\n"
        "        file.write('0.5')\n"
        "    os.rename('new', 'rate.json')\n"
    )
    module = "import json\nRATE = json.load(open('rate.json'))\n"
    files = {"s.py": script + FOOTER, "mine.py": module, "rate.json": "0.1"}
    assert seen_by(["s.py"], files, tmp_path, monkeypatch) == [["0.1"]] * 2 + [["0.5"]] * 2


def test_restart_of_a_patched_script_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/migrate.md would raise at every restart that the patch came too late."""
    files = {
        "s.py": "import mine\nseen = [mine.CheckpointManager.__module__.partition('.')[0]]\n" + FOOTER,
        "mine.py": "from orbax.checkpoint import CheckpointManager\n",
    }
    words = ["-m", "ckptkit.patch", "--ram", str(tmp_path / "ram"), "--", "s.py"]
    assert seen_by(words, files, tmp_path, monkeypatch) == [["ckptkit"]] * 4

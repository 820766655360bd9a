"""Every command on hostile paths and damaged files: a documented code and one sentence; never a traceback, a hang, a
file outside, or memory without end. All cases run in one process of limited memory and file size."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptkit.cli import main
from ckptkit.cli.exits import Exit
from tests.cases import long_except
from tests.formats.writers import by_flax, by_numpy, by_safetensors
from tests.upkeep.conftest import make_root
from tools.cli_docs import named_commands

SEED = int(os.environ.get("CKPTKIT_FUZZ_SEED", "11"))
MEMORY_BYTES = 16 << 30  # of addresses: libraries map a lot that they never touch
FILE_BYTES = 64 << 20
CALL_S_MAX = 120

# The command, in a process that receives Ctrl-C even if a shell has started us in the background, which ignores it.
_HEARD = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("ckptkit.cli", run_name="__main__", alter_sys=True)
"""

# How each command is called with one path, and where it may write.
CALLS: dict[str, list[list[str]]] = {
    "certify": [["certify", "{path}", "--replay", "tests.cli.test_certify:plan"]],
    "chaos": [
        ["chaos", "--dry-run", "--wipe", "{path}:0.5", "--", "true"],
        ["chaos", "--dry-run", "--events", "{path}", "--", "true"],
    ],
    "convert": [
        ["convert", "{path}", "{out}", "--to", "npz"],
        ["convert", "{good}", "{path}", "--to", "npz", "--dry-run"],
    ],
    "copy": [["copy", "{path}", "{out}"], ["copy", "{root}", "{path}", "--dry-run"]],
    "diff": [["diff", "{path}", "{good}"], ["diff", "{good}", "{good}", "--map", "{path}"]],
    "doctor": [
        ["doctor", "{path}"],
        ["doctor", "{root}", "--events", "{path}"],
        ["doctor", "{root}", "--tier", "{path}"],
    ],
    "du": [["du", "{path}", "--deep"], ["du", "{root}", "--tier", "{path}"]],
    "explain": [
        ["explain", "{path}", "--like", "{good}"],
        ["explain", "{out}", "--like", "{path}"],
        ["explain", "{out}", "--like", "{good}", "--profile", "{path}"],
    ],
    "extract": [["extract", "{path}", "{out}", "--only", "a", "--to", "safetensors"]],
    "goodput": [["goodput", "{path}"]],
    "inspect": [["inspect", "{path}"], ["inspect", "{path}", "--stats", "--memory", "8MB"]],
    "merge": [
        ["merge", "{path}", "{good}", "{out}", "--to", "npz"],
        ["merge", "{good}", "{path}", "{out}", "--average", "--to", "orbax"],
        ["merge", "{good}", "{path}", "{out}", "--lora", "--to", "npz"],
    ],
    "pin": [["pin", "{path}", "1", "--dry-run"]],
    "plan-restore": [["plan-restore", "{path}"], ["plan-restore", "{root}", "--like", "{path}"]],
    "prune": [["prune", "{path}", "--keep", "newest=1"]],
    "reshard": [
        ["reshard", "{path}", "{out}", "--mesh", "x=2"],
        ["reshard", "{good}", "{path}", "--mesh", "x=2", "--dry-run"],
        ["reshard", "{good}", "{out}", "--mesh", "x=2", "--rules", "{path}"],
        ["reshard", "{good}", "{out}", "--mesh", "x=2", "--like", "{path}"],
    ],
    "rollback": [["rollback", "{path}", "--to", "1"]],
    "run": [
        ["run", "--dry-run", "--", "{path}"],
        ["run", "--max-restarts", "0", "--cold", "--", "{path}"],
        ["run", "--dry-run", "--events", "{path}", "--", "true"],
    ],
    "scrub": [["scrub", "{path}"], ["scrub", "{root}", "--tier", "{path}"]],
    "sign": [["sign", "{path}", "--key", "{path}"], ["sign", "{root}/1", "--key", "{path}", "--dry-run"]],
    "simulate": [["simulate", "--trace", "{path}", "--runs", "2", "--days", "1"]],
    "steps": [["steps", "{path}"], ["steps", "{root}", "--tier", "{path}"]],
    "tiers clean": [["tiers", "clean", "{path}", "--idle", "0s"]],
    "tiers list": [["tiers", "list", "{path}"]],
    "tune": [["tune", "{out}", "--like", "{path}", "--probe", "1MB", "--rounds", "1"]],
    "unpin": [["unpin", "{path}", "1"]],
    "verify": [["verify", "{path}"], ["verify", "{root}", "--key", "{path}"]],
}


def test_every_command_is_covered_by_these_tests() -> None:
    """A new command would be the one that ends in a traceback."""
    assert set(CALLS) == {name for name, _ in named_commands()}


def hostile_paths(home: Path) -> Iterator[str]:
    """Paths that are not a checkpoint."""
    (home / "empty").write_bytes(b"")
    (home / "empty_dir").mkdir()
    (home / "noise").write_bytes(random.Random(SEED).randbytes(4096))
    (home / "loop").symlink_to("loop")
    (home / "dangling").symlink_to("/nowhere/at/all")
    os.mkfifo(home / "pipe")
    odd = home / "odd\n\x1b[2J name"
    odd.mkdir()
    (odd / "1").mkdir()
    (odd / "1/manifest.ocdbt").write_bytes(b"\xff" * 64)
    (odd / "_ckptkit/epochs").mkdir(parents=True)
    (odd / "_ckptkit/epochs/00000001.json").write_text("{}")
    deep = home / "deep"
    deep.mkdir()
    (deep / "5.orbax-checkpoint-tmp").mkdir()
    (deep / "7").symlink_to(deep)
    (deep / "_ckptkit/leases").mkdir(parents=True)
    (deep / "_ckptkit/leases/pin-x.json").write_text("[" * 5000)
    (deep / "_ckptkit/doomed.json").write_text("[]")
    yield from map(str, sorted(home.iterdir()))
    yield from ("", "/dev/zero", "/proc/self/mem", "x" * 5000, "../" * 300 + "etc/passwd", "\udcff")
    yield from ("gs://", "s3://", "what://a/b", "file://", "://")


def damaged_files(home: Path) -> Iterator[str]:
    """Files of every format, cut and with bits turned over."""
    chance = random.Random(SEED)
    home.mkdir()
    tree = {"a": np.arange(600.0), "b": np.arange(10, dtype=np.int8)}
    made = [
        by_safetensors(home / "s.safetensors", tree),
        by_numpy(home / "n.npz", tree),
        by_numpy(home / "c.npz", tree, compressed=True),
        by_flax(home / "f.msgpack", tree),
    ]
    assert main(["convert", str(made[0]), str(home / "t.pt"), "--to", "torch"]) == 0
    for path in (*made, home / "t.pt"):
        whole = path.read_bytes()
        for number in range(6):
            data = bytearray(whole[: chance.randrange(1, len(whole))] if number < 3 else whole)
            if number >= 3:
                for _ in range(4):
                    data[chance.randrange(min(len(data), 400) if number < 5 else len(data))] ^= 1 << chance.randrange(8)
            damaged = home / f"{number}-{path.name}"
            damaged.write_bytes(data)
            yield str(damaged)


def tried(home: Path) -> Iterator[tuple[list[str], int, float]]:
    """Every call on every path, with its code and seconds."""
    good = by_safetensors(home / "good.safetensors", {"a": np.arange(600.0), "b": np.arange(10, dtype=np.int8)})
    root = home / "root"
    root.mkdir()
    (home / "paths").mkdir()
    cases = [(path, set(CALLS)) for path in hostile_paths(home / "paths")]
    reads = {"inspect", "diff", "convert", "extract", "merge"}
    cases += [(path, reads) for path in damaged_files(home / "files")]
    for path, names in cases:
        for name in sorted(names):
            for call in CALLS[name]:
                out = home / "out"
                words = [word.format(path=path, out=out, good=good, root=root) for word in call]
                start_s = time.monotonic()
                signal.alarm(CALL_S_MAX)  # ends a hanging call, and the process with it: the last line names it
                print(json.dumps(words), flush=True)
                code = main(words)
                signal.alarm(0)
                yield words, code, time.monotonic() - start_s
                shutil.rmtree(out, ignore_errors=True)
                if out.is_file():
                    out.unlink()


def run(home: Path) -> None:
    """In the limited process: prints a line of JSON for each call."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    os.chdir(home / "cwd")
    for words, code, took_s in tried(home):
        print(json.dumps([words, code, took_s]), flush=True)


def test_hostile_input_never_gives_a_traceback(tmp_path: Path) -> None:
    """A wrong path would give a page of Python, or a machine without memory."""
    (tmp_path / "cwd").mkdir()
    environment = {**os.environ, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "CKPTKIT_FUZZ_SEED": str(SEED)}
    command = [sys.executable, "-m", "tests.cli.test_every_command", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=900, env=environment, check=False)
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    assert done.returncode == 0, (SEED, out[-500:], err[-3000:])
    assert "Traceback" not in err, (SEED, err[-3000:])
    assert "internal error" not in err, (SEED, re.findall(r".*internal error.*", err)[:20])
    calls = [json.loads(line) for line in out.splitlines() if line.startswith('[["')]
    assert {call[0] for call, _, _ in calls} == {name.split()[0] for name in CALLS}
    assert {code for _, code, _ in calls} <= {int(code) for code in Exit}
    assert list((tmp_path / "cwd").iterdir()) == [], "written where nobody asked"


@pytest.mark.parametrize("command", long_except(["copy"], ["merge", "copy"]))
def test_ctrl_c_leaves_no_partial_output(tmp_path: Path, command: str) -> None:
    """Ctrl-C in the middle would leave half of what was asked for where it was asked for."""
    target = tmp_path / "target"
    if command == "merge":
        big = by_safetensors(tmp_path / "a.safetensors", {"a": np.ones((200, 1 << 17))})  # 210 MB, in blocks of 2
        other = by_safetensors(tmp_path / "b.safetensors", {"b": np.ones(4)})
        words = ["merge", str(big), str(other), str(target), "--to", "safetensors", "--memory", "16MB"]
        part = tmp_path / ".target.ckptkit-part"
    else:
        make_root(tmp_path / "run", (1,))
        for number in range(4000):  # of an item of somebody's own: nothing reads them but the copy
            (tmp_path / "run/1/default/d" / f"{number:04d}").write_bytes(bytes(1000))
        words = ["copy", str(tmp_path / "run"), str(target)]
        part = target / "1.orbax-checkpoint-tmp-copy"
    process = subprocess.Popen([sys.executable, "-c", _HEARD, *words], stderr=subprocess.PIPE)
    while not part.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    *_, said, how_to_go_on = err.decode().splitlines()
    assert (process.returncode, said) == (130, "ckptkit: interrupted")
    assert "the same command with --resume continues it" in how_to_go_on
    assert not (target / "1").exists()
    assert target.exists() == (command == "copy")


if __name__ == "__main__":
    run(Path(sys.argv[1]))


@pytest.mark.parametrize("command", [name for name, _ in named_commands() if name in CALLS])
def test_an_empty_path_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable of a shell would name the current directory, also for a command that deletes."""
    for call in CALLS[command]:
        parts = [part.replace("{path}", "") for part in call]
        assert main(parts) == Exit.USAGE, parts
        assert "Error: Invalid value" in capsys.readouterr().err

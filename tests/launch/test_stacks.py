"""Which threads of a process that hangs are shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckptkit.launch.stacks import BusyStacks

HANGS = """
import faulthandler, queue, sys, threading
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(3)
for _ in range(3):
    pool.submit(threading.Barrier(1).wait).result()
threading.Thread(target=queue.Queue().get, daemon=True).start()
gate = threading.Event()
def stuck_elsewhere():
    gate.wait()
threading.Thread(target=stuck_elsewhere, daemon=True).start()
def stuck():
    print("before", flush=True)
    faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
    print("after", flush=True)
stuck()
gate.set()
"""


def shown(text: str) -> list[str]:
    stacks = BusyStacks()
    lines = [line for each in text.splitlines() for line in stacks.taken(each)]
    return [*lines, *stacks.rest()]


def test_threads_that_wait_for_work_are_left_out_of_a_dump(tmp_path: Path) -> None:
    """The one stack that tells where a job hangs would be among those of forty idle threads."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    text = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60).stdout
    lines = shown(text)
    assert text.count("thread 0x") + text.count("Thread 0x") == 4, (
        "the dump has every thread: one of the pool, two more, and the first"
    )
    assert any(line.endswith("in stuck_elsewhere") for line in lines)
    assert any(line.endswith("in stuck") for line in lines)
    assert not any("in _worker" in line for line in lines)
    assert any(line.endswith("left out)") for line in lines)
    assert (lines[0], lines[-1]) == ("before", "after")


def test_other_output_is_passed_on_as_it_is() -> None:
    """A line of the program would be lost, or come too late."""
    text = 'Thread 0x\n  File "a", line 3 in b\n\nThread 0xf1 (most recent call first):\n  text\nThread\n'
    assert shown(text)[-1] == "Thread"
    plain = "one\n\n  File 'x'\nThread one\nThread 0x (most\n"
    assert shown(plain) == plain.splitlines()
    assert shown('Thread 0xf1 (most recent call first):\n  File "/x/threading.py", line 1 in run') == [
        "Thread 0xf1 (most recent call first):",
        '  File "/x/threading.py", line 1 in run',
    ], "the end of the output: nothing is left out"

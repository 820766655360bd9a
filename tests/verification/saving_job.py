"""A job that saves all the time: `python -m tests.verification.saving_job HOME`, until it is told `stop`; then it
restores."""

from __future__ import annotations

import sys
import threading
from pathlib import Path


def main() -> None:
    from tests.states import abstract, assert_same, make_state, restore_args, save_args
    from tests.verification.conftest import Job

    home, step, told = Path(sys.argv[1]), 0, threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    with Job(home).manager(max_to_keep=3) as manager:
        while step < 3 or not told.is_set():
            manager.save(step, args=save_args(make_state(step), step))
            manager.wait_until_finished()
            step += 1
            if step == 3:
                print("saving", flush=True)
    with Job(home).manager(max_to_keep=3) as manager:
        found = manager.restore(None, args=restore_args(abstract(make_state())))
    assert found["data"] == {"step": step - 1}, (found["data"], step)
    assert_same(found["state"], make_state(step - 1))
    print(step, flush=True)


if __name__ == "__main__":
    main()

"""Programs that end without closing their manager: run by `test_ends.py`.

    python -m tests.manager.ending DIR

Each way of ending is a fork of one process that has imported everything and started nothing. Writes DIR/WAY/err, what
the program has logged, and DIR/WAY/code, its exit code.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMITTED = {"return": 0, "sys.exit": 7, "exception": 1}  # the ways in which the last save survives, and their codes
WAYS = (*COMMITTED, "hanging", "closed")


def main(root: Path) -> None:
    """Forks once for each way: imports take longer than all of them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import orbax.checkpoint  # noqa: F401

    import ckptkit.manager.checkpoint_manager  # noqa: F401

    children = {}
    memory = Path(tempfile.mkdtemp(prefix="ckptkit-ending-", dir="/dev/shm"))
    for way in WAYS:
        (root / way).mkdir()
        children[os.fork()] = way
        if 0 in children:
            _run(way, root / way, memory / way)
            return
    for pid, way in children.items():
        _, status = os.waitpid(pid, 0)
        (root / way / "code").write_text(str(os.waitstatus_to_exitcode(status)))
    shutil.rmtree(memory)


def _run(way: str, root: Path, memory: Path) -> None:
    err = os.open(root / "err", os.O_WRONLY | os.O_CREAT)
    os.dup2(err, 1)
    os.dup2(err, 2)
    _train(way, root, memory)


def _train(way: str, root: Path, memory: Path) -> None:
    """The program; nothing refers to its manager at its end."""
    import numpy as np
    import orbax.checkpoint as ocp

    import ckptkit

    limit_s = 0.3 if way == "hanging" else 60.0
    manager: Any = ckptkit.CheckpointManager(
        root / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1),
        tiers=[ckptkit.Tier.ram(str(memory))],
        processes=ckptkit.ProcessOptions(close_timeout_s=limit_s),
    )
    save = manager._durable.save

    def slow(save_id: Any, *args: Any, **words: Any) -> Any:
        time.sleep(0.0 if save_id.step < 3 else 30.0 if way == "hanging" else 0.7)
        return save(save_id, *args, **words)

    manager._durable.save = slow
    for step in range(10):
        args: Any = ocp.args.StandardSave({"w": np.arange(1000.0), "step": step})  # pyright: ignore[reportCallIssue]
        manager.save(step, args=args)
        if step < 3:
            continue
        time.sleep(0.3)  # the ramdisk has it
        match way:
            case "sys.exit":
                sys.exit(COMMITTED[way])
            case "exception":
                raise RuntimeError("the loop raises")
            case "closed":
                manager.close()
                return
            case _:
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One of two processes of a job, the second of which is late in a restore: run by `test_late_process.py`.

    python -m tests.reports.late_process PROCESS PORT DIR

Prints what each process found.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S, LATE_S = 2.0, 6.0


def main() -> None:
    process, port, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import numpy as np
    import orbax.checkpoint as ocp

    import ckptkit
    from ckptkit.restore.flow import RestoreFlow
    from tests.states import abstract, assert_same_shards

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def put(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))

    state = {
        "w": put(np.arange(8.0), "x"),
        "whole": put(np.zeros((0, 3), np.float32)),
        "split": put(np.zeros((4, 0), np.float32), "x"),
        "host": np.zeros((2, 0)),
    }
    args: Any = ocp.args
    with ckptkit.CheckpointManager(root, processes=ckptkit.ProcessOptions(timeout_s=60)) as manager:
        manager.save(1, args=args.StandardSave(state))
        manager.wait_until_finished()
        found = manager.restore(1, args=args.StandardRestore(abstract(state)))
        assert_same_shards(found, state)
        print("arrays without elements: same", flush=True)
    if process == 1:
        read: Any = RestoreFlow._read

        def late(*given: Any) -> Any:
            time.sleep(LATE_S)
            return read(*given)

        RestoreFlow._read = late  # pyright: ignore[reportAttributeAccessIssue]
    manager = ckptkit.CheckpointManager(root, processes=ckptkit.ProcessOptions(timeout_s=LIMIT_S))
    begin_s = time.monotonic()
    try:
        manager.restore(1, args=args.StandardRestore(abstract(state)))
        print("restored", flush=True)
    except ckptkit.CheckpointError as error:
        took_s = time.monotonic() - begin_s
        print(f"after {took_s:.1f} s {type(error).__name__}: {error}", flush=True)
    if process == 0:
        time.sleep(max(0.0, LATE_S + 2 - (time.monotonic() - begin_s)))  # it has the service of the other one
    os._exit(0)  # the two would wait for each other


if __name__ == "__main__":
    main()

"""One process of a job that joins a collective again and again, until it is ended.

    python -m tests.multiprocess.beating COORDINATOR PROCESSES PROCESS ATTEMPT HEARTBEAT_S

Prints `ready PID` after the first collective. Any attempt but the first ends well there.
"""

from __future__ import annotations

import os
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def main() -> None:
    coordinator, processes, process, attempt, heartbeat_s = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(processes), int(process), heartbeat_timeout_seconds=int(heartbeat_s))
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    total = jax.jit(lambda w: w.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    values = np.arange(jax.device_count(), dtype=np.float32)
    w = jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, PartitionSpec("all")), lambda index: values[index]
    )
    total(w).block_until_ready()
    print("ready", os.getpid(), flush=True)
    while attempt == "0":
        total(w).block_until_ready()
        time.sleep(0.02)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

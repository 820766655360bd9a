"""Saves a state of 192 MB and prints how many bytes of host memory that took at most, without the state itself.

python -m tests.system.saving_process durable|ssd DIR
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

LEAVES, LEAF_BYTES = 6, 32_000_000


def held_bytes() -> int:
    """Memory of this process that no file on a disk backs: what counts against a container's limit."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, found)) * 1024


def main() -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    import ckptkit

    root = Path(sys.argv[2])
    tiers = [ckptkit.Tier.ssd(str(root / "ssd"), save=ckptkit.EverySteps(1))] if sys.argv[1] == "ssd" else []
    state = {str(leaf): jnp.full((LEAF_BYTES // 4,), leaf, jnp.float32) for leaf in range(LEAVES)}
    jax.block_until_ready(state)
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen[0] = max(seen[0], held_bytes())
            time.sleep(0.002)

    with ckptkit.CheckpointManager(root / "durable", options=options, tiers=tiers) as manager:
        before_bytes = held_bytes()
        watcher = threading.Thread(target=watch)
        watcher.start()
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        stop.set()
        watcher.join()
    print(seen[0] - before_bytes)


if __name__ == "__main__":
    main()

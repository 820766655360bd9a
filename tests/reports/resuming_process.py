"""Restores a state of 128 MB and prints how many bytes of host memory that took at most, besides what was there before.

    python -m tests.reports.resuming_process abstract|state DIR

`state`: the template is a state that stays in memory, as that of a program that initialises before it restores.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

LEAVES, LEAF_BYTES = 4, 32_000_000


def main() -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    import ckptkit
    from tests.system.saving_process import held_bytes

    args: Any = ocp.args
    root = Path(sys.argv[2])

    def make() -> Any:
        return {str(leaf): jnp.full((LEAF_BYTES // 4,), leaf, jnp.float32) for leaf in range(LEAVES)}

    if sys.argv[1] == "save":
        with ckptkit.CheckpointManager(root) as manager:
            manager.save(0, args=args.StandardSave(make()))
        return
    before_bytes = held_bytes()
    template = make() if sys.argv[1] == "state" else jax.eval_shape(make)
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen[0] = max(seen[0], held_bytes())
            time.sleep(0.001)

    with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        watcher = threading.Thread(target=watch)
        watcher.start()
        found = manager.restore(0, args=args.StandardRestore(template))
        jax.block_until_ready(found)
        stop.set()
        watcher.join()
    print(seen[0] - before_bytes)


if __name__ == "__main__":
    main()

"""Records of a run, by which a resumed run can be compared with an uninterrupted one, bit for bit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from trainer.sharding import named_leaves


class Proof:
    """Writes `records-<process>.jsonl` and `losses-<process>.jsonl`, a line per step, and at the end
    `state-<process>.json`.

    A run that is killed and resumed into the same directory writes the repeated steps again: the last line of a step
    counts. Each line is flushed to the system, so SIGKILL loses none. Records are noted before a step is taken:
    another process can end and save the step while this one is killed in it, and then the step is never repeated.
    """

    def __init__(self, directory: Path, process: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._process = directory, process
        self._records = (directory / f"records-{process}.jsonl").open("a")
        self._losses = (directory / f"losses-{process}.jsonl").open("a")

    def add_records(self, step: int, rows: np.ndarray) -> None:
        """Note what a step will read, int64[rows, 2] of global row and record id."""
        self._records.write(json.dumps({"step": step, "rows": rows.tolist()}) + "\n")
        self._records.flush()

    def add_loss(self, step: int, loss: float) -> None:
        """Note the loss of a step to its last bit, before the step is saved."""
        self._losses.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
        self._losses.flush()

    def close(self, state: Any) -> None:
        """Note the digests of the final state."""
        self._records.close()
        self._losses.close()
        path = self._directory / f"state-{self._process}.json"
        path.write_text(json.dumps(digest_state(state), indent=1, sort_keys=True) + "\n")


def digest_state(state: Any) -> dict[str, dict[str, str]]:
    """Leaf name to box (`0:64,0:128`) to the xxh3-128 hex digest of its bytes, for each box that this process holds.

    Typed PRNG keys count through their key data. The cost is one host copy of a leaf at a time.
    """
    return {path: _digest_leaf(leaf) for path, leaf in named_leaves(state).items()}


def _digest_leaf(leaf: jax.Array) -> dict[str, str]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    boxes: dict[str, str] = {}
    for shard in leaf.addressable_shards:
        spans = (index.indices(size)[:2] for index, size in zip(shard.index, leaf.shape, strict=True))
        box = ",".join(f"{start}:{stop}" for start, stop in spans)
        if box not in boxes:
            boxes[box] = xxhash.xxh3_128_hexdigest(np.array(shard.data, order="C").tobytes())
    return boxes

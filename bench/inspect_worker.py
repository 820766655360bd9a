"""Stock Orbax's part of `bench inspect`: writes a checkpoint of many leaves, or lists its leaves."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from bench.inspect import names_of, shape_of
from bench.measure import now_s


def save(path: str, leaves: int) -> None:
    """The leaves of the other cases, as Orbax writes NumPy arrays."""
    tree: dict[str, Any] = {}
    for at, name in enumerate(names_of(leaves)):
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = np.zeros(shape_of(at), np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def metadata(path: str, leaves: int) -> None:
    """Prints the seconds of Orbax's own call; raises where it did not see all leaves."""
    import jax

    with ocp.StandardCheckpointer() as checkpointer:
        began_s = now_s()
        found = checkpointer.metadata(path)
        call_s = now_s() - began_s
    tree = getattr(getattr(found, "item_metadata", found), "tree", found)
    seen = sum(hasattr(leaf, "shape") for leaf in jax.tree.leaves(tree))
    if seen != leaves:
        raise RuntimeError(f"{path}: Orbax saw {seen} of {leaves} leaves")
    print(json.dumps({"call_s": call_s}))


if __name__ == "__main__":
    {"save": save, "metadata": metadata}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))

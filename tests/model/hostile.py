"""Values that somebody made to do harm, and the limits that nothing may break over them."""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ckptkit.errors import CorruptCheckpointError, NewerFormatError
from ckptkit.model.digests import digest_of

DISK_BYTES = 256 << 20
BUDGET_BYTES = 64 << 20  # far above what a state of some kilobytes takes, far below what is asked for
HOST = "h"

# Any value that a JSON parser returns, and that must not be trusted.
HOSTILE: list[Any] = [
    None, True, "", "x", "1", "../../../../canary", "/etc/passwd", "a/../../b", "\0", -1, 0, 1, 2**31, 2**63, 10**30,
    1.5, math.nan, math.inf, [], [[]], {}, {"": None}, [-1], [2**62], [2**40, 2**40], ["8", "8"], [[0], [2**60]],
]  # fmt: skip
ANYTHING = st.recursive(
    st.one_of(st.sampled_from(HOSTILE), st.integers(), st.floats(), st.text(max_size=5), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


def body() -> dict[str, Any]:
    """The manifest of two leaves in three boxes."""

    def leaf(name: str, shape: list[int], boxes: list[Any]) -> dict[str, Any]:
        common = {"keys": "d", "kind": "jax", "dtype": "float32", "extra": {}}
        return {"path": [name], "shape": shape, "cell": [2, 4], "boxes": boxes, **common}

    w = leaf("w", [4, 4], [[[0, 0], [2, 4], 0, ["a" * 32]], [[2, 0], [4, 4], 4096, ["b" * 32]]])
    return {
        "format": 1,
        "save_id": {"epoch": 1, "step": 5, "number": 2},
        "writer": {"process": 0, "count": 1, "host": HOST},
        "slot": "slot-0.bin",
        "arrays": {"state": [w, leaf("b", [2, 4], [[[0, 0], [2, 4], 8192, ["c" * 32]]])]},
        "inline": {"data": {"kind": "json", "value": {"step": 5}}},
    }


def sealed(record: Any) -> bytes:
    """As a writer seals it: whoever can write a manifest can also write its digest."""
    text = json.dumps(record, separators=(",", ":"), sort_keys=True)
    return f'{{"digest":"{digest_of(text.encode())}","manifest":{text}}}'.encode()


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document."""
    if at:
        yield at
    pairs = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in pairs:
        yield from places(value, (*at, key))


def changed(record: Any, at: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(record)
    node = found
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    return found


@contextmanager
def bounded(canary: Path | None = None) -> Iterator[None]:
    """Nothing allocates more than the budget, or opens what is below `canary`."""
    opened: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_NOFOLLOW:
            opened.append(os.path.realpath(arguments[0]))
        elif event in ("os.remove", "os.rename", "os.mkdir", "os.truncate", "os.link"):  # of a link: the link itself
            paths = [each for each in arguments[:2] if isinstance(each, str)]
            opened.extend(
                os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths
            )

    if canary is not None:
        sys.addaudithook(audit)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))  # a file is not filled up either
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BUDGET_BYTES
    finally:
        watching = False
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if canary is not None:
        assert [path for path in opened if path.startswith(str(canary))] == []


def refused(parse: Callable[[], Any]) -> bool:
    try:
        parse()
    except (CorruptCheckpointError, NewerFormatError):
        return True
    return False

"""Reading OCDBT trees again and again takes no more memory than reading one."""

from __future__ import annotations

import os
from pathlib import Path

import tensorstore as ts

from ckptkit.durable.cells import ocdbt


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_look_at_many_trees_keeps_nothing_of_them() -> None:
    """`verify` and `du --deep` grew by 4 MiB with every step of 4,000 leaves: TensorStore keeps its dumps."""
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    tree = ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=context).result()
    with ts.Transaction() as transaction:
        for number in range(8000):
            tree.with_transaction(transaction).write(f"layer_{number}/.zarray", b"x" * 99).result()
    found = ocdbt.places(base, lambda future: future.result())
    assert set(found.values()) == {b"x" * 99}
    assert len(found) == 8000
    before = resident_bytes()
    for _ in range(20):
        assert ocdbt.places(base, lambda future: future.result()) == found
    assert resident_bytes() - before < 20 << 20, "four times as much, where dumps stay"

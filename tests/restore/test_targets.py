"""The wanted leaves of a tree, and what they have in common."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ckptkit.errors import TreeMismatchError
from ckptkit.model.manifest import LeafRecord
from ckptkit.restore.tree import Target, targets_of
from tests.states import mesh

SPECS: list[tuple[Any, ...]] = [(), ("data",), ("fsdp",), ("data", "fsdp")]


class MadeAnew(jax.ShapeDtypeStruct):
    """A leaf that gives a new sharding each time that it is asked for one."""

    @property
    def sharding(self) -> Any:
        return NamedSharding(mesh(), super().sharding.spec)


def leaf_of(number: int, kind: type = jax.ShapeDtypeStruct) -> Any:
    return kind((8, 8), np.float32, sharding=NamedSharding(mesh(), PartitionSpec(*SPECS[number % 4])))


def targets(leaves: list[Any]) -> list[Target]:
    stored = [
        LeafRecord(path=(str(number),), keys="d", kind="jax", shape=(8, 8), dtype="float32", cell=(8, 8))
        for number in range(len(leaves))
    ]
    wanted = [((str(number),), leaf) for number, leaf in enumerate(leaves)]
    return targets_of("default", wanted, stored, step=1, where="here")


@pytest.mark.parametrize("kind", [jax.ShapeDtypeStruct, MadeAnew])
def test_leaves_alike_share_a_form_with_their_own_sharding(kind: type) -> None:
    """A leaf would be restored as another one is sharded, or all would be worked out anew for each of thousands."""
    found = targets([leaf_of(number, kind) for number in range(400)])
    assert [each.key for each in found] == [("default", (str(number),)) for number in range(400)]
    for number, each in enumerate(found):
        assert each.form.sharding == leaf_of(number).sharding
        assert len(each.form.boxes) == (1, 2, 2, 4)[number % 4]
    assert len({each.form for each in found}) == 4


def test_arrays_as_templates_share_forms_too() -> None:
    """Restoring into the live state would place each of thousands of leaves by itself."""
    arrays = [jax.device_put(np.zeros((8, 8), np.float32), leaf_of(number).sharding) for number in range(8)]
    assert len({each.form for each in targets(arrays)}) == 4


def test_leaf_that_is_asked_for_twice_hides_no_other() -> None:
    """A tree without a leaf that was saved would be restored without a message."""
    stored = [
        LeafRecord(path=(name,), keys="d", kind="jax", shape=(8, 8), dtype="float32", cell=(8, 8)) for name in "ab"
    ]
    with pytest.raises(TreeMismatchError, match=r"default:b is float32\[8,8\] on disk, but not in abstract_state"):
        targets_of("default", [(("a",), leaf_of(0)), (("a",), leaf_of(0))], stored, step=1, where="here")

"""The contexts that training loops set: a mesh, a transfer guard, 64-bit types, NaN checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax.sharding import AxisType, Mesh


def mesh_of(axis: AxisType) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(axis,) * 2)


@contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "set_mesh, automatic axes": lambda: jax.set_mesh(mesh_of(AxisType.Auto)),
    "set_mesh, explicit axes": lambda: jax.set_mesh(mesh_of(AxisType.Explicit)),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "transfer guard of all threads": lambda: setting("jax_transfer_guard", "disallow"),
    "64-bit types": lambda: setting("jax_enable_x64", True),
    "NaN checks": lambda: setting("jax_debug_nans", True),
}

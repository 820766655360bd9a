"""How a stored leaf becomes what a template says: dtypes and kinds are cast as Orbax does, shapes never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.model.manifest import LeafRecord
from ckptkit.snapshot.describe import kind_of_number

Finish = Callable[[Any], Any]


def as_template(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    """What to read of a stored leaf, as it is stored, and what to make of it to have what `template` says.

    What cannot be cast (shapes, typed keys, an array for a number) is given back as it is: the comparison with what is
    stored names it. Raises ValueError for a template that is no array and no number.
    """
    if isinstance(template, bool | int | float):
        return _as_number(template, record)
    if not hasattr(template, "dtype") or not hasattr(template, "shape"):
        raise ValueError(
            f"Unsupported type: {type(template)} for leaf {record.name}: give an array, a jax.ShapeDtypeStruct "
            "or a number"
        )
    if isinstance(template, np.generic) or _is_key(template.dtype) or "key_impl" in record.extra:
        return template, None
    if tuple(template.shape) != record.shape:
        return template, None
    if isinstance(template, np.ndarray) or (getattr(template, "sharding", None) is None and record.kind != "jax"):
        return _on_host(template, record)
    return _on_devices(template, record)


def _as_number(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    kind = type(template)
    if record.shape or "key_impl" in record.extra or record.kind == kind_of_number(template):
        return template, None
    return np.empty((), np.dtype(record.dtype)), lambda block: kind(block.item())


def _on_host(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    block = np.empty(record.shape, np.dtype(record.dtype))
    return block, None if template.dtype == block.dtype else lambda stored: stored.astype(template.dtype)


def _on_devices(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    stored, wanted = np.dtype(record.dtype), np.dtype(template.dtype)
    if stored == wanted:
        return template, None
    sharding = template.sharding
    if record.kind == "jax":
        return jax.ShapeDtypeStruct(record.shape, stored, sharding=sharding), lambda array: array.astype(wanted)

    def place(block: np.ndarray) -> jax.Array:
        # Cast before it is placed, for devices may not know the stored dtype; one block per device, for one that is
        # donated must not take another's memory with it.
        cast = np.asarray(block).astype(wanted)
        return jax.make_array_from_callback(cast.shape, sharding, lambda index: cast[index].copy())

    return np.empty(record.shape, stored), place


def _is_key(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)

"""A stored leaf as its metadata describes it, and its sharding as short text: `P('fsdp', None) on data=2,fsdp=2`.

No device is asked.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafInfo:
    """One leaf of an array item. `dtype`, `shape` and `cell` are None if it is not an array (a string, an empty dict).

    `cell` is the smallest part that is read whole: our cells, zarr's chunks. `held_bytes` is what a fast-tier slot
    holds of the leaf, None for a durable one.
    """

    path: tuple[str, ...]
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    cell: tuple[int, ...] | None = None
    sharding: str | None = None
    key_impl: str | None = None
    held_bytes: int | None = None

    @property
    def name(self) -> str:
        """The path as Orbax writes it."""
        return ".".join(self.path)

    @property
    def array_bytes(self) -> int:
        """Bytes of the whole array in memory; compression may make it less on disk."""
        if self.dtype is None or self.shape is None:
            return 0
        return math.prod(self.shape) * _itemsize(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        fields = {field: getattr(self, field) for field in self.__slots__}  # `asdict` copies deeply: 20 times slower
        return {"name": self.name, "bytes": self.array_bytes, **fields}


@lru_cache(maxsize=4096)  # many leaves, few shardings
def sharding_words(text: str) -> str:
    """The short form of Orbax's JSON of a sharding; raises ValueError if it is not a sharding."""
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"{text[:100]!r} is no sharding")
    kind = record.get("sharding_type")
    if kind == "NamedSharding":
        sizes = zip(record["axis_names"], record["shape"], strict=True)
        axes = ",".join(f"{_text(name)}={int(size)}" for name, size in sizes)
        return f"P({', '.join(map(_part, record['partition_spec']))}) on {axes}"
    if kind == "SingleDeviceSharding":
        return f"one device ({record.get('device_str')})"
    return str(kind)


def parsed_sharding(words: str | None) -> tuple[tuple[tuple[str, ...], ...], dict[str, int]] | None:
    """The axes of each dimension and the axis sizes of a mesh, from the result of `sharding_words`; None for a sharding
    without a mesh."""
    match = re.fullmatch(r"P\((.*)\) on (.*)", words or "", re.DOTALL)
    if match is None:
        return None
    spec = ast.literal_eval(f"({match[1]},)" if match[1] else "()")
    sizes = re.findall(r"(.*?)=(-?[0-9]+)(?:,|$)", match[2], re.DOTALL)  # a name may have commas
    return tuple(map(axes_of, spec)), {axis: int(size) for axis, size in sizes}


def axes_of(entry: Any) -> tuple[str, ...]:
    """The axes that split a dimension, from its entry in a partition spec: None, an axis or several."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(map(str, entry))


def dtype_name(text: Any) -> str:
    """NumPy's name of a stored dtype; raises ValueError or TypeError for what no array of numbers has."""
    if not isinstance(text, str):
        raise ValueError(f"dtype {text!r} is none that Orbax writes")
    return _name_of(text)


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which NumPy makes anew each time."""
    return dtype.name


@lru_cache(maxsize=256)
def _name_of(text: str) -> str:
    dtype = np.dtype(text)
    registered = dtype.isbuiltin == 2  # bfloat16 and its kin, which have kind V
    if dtype.kind not in "biufc" and not registered:
        raise ValueError(f"dtype {text!r} is none that Orbax writes")
    return dtype.name


def _part(part: Any) -> str:
    if part is None:
        return "None"
    if isinstance(part, list):
        names = ", ".join(map(_part, part))
        return f"({names},)" if len(part) == 1 else f"({names})"
    return repr(_text(part))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not an axis name")
    return value


@lru_cache(maxsize=256)
def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize

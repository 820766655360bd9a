"""The same tensors in every format, by the formats' own packages: what our readers and writers are held against."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

PLAIN = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
LOW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
RARE = ("int4", "uint4", "complex64", "complex128", "float8_e4m3b11fnuz")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (0,), (4, 0, 2), (2, 3, 4, 5))


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name, small ones too."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bits of every kind (NaN payloads, -0.0 and infinities among them), as the dtype allows."""
    dtype, rng = dtype_of(name), np.random.default_rng([seed, *map(ord, name), *shape])
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if name in ("int4", "uint4"):
        return rng.integers(-8 if name == "int4" else 0, 8, shape).astype(dtype)
    raw = rng.integers(0, 256, (int(np.prod(shape)) * dtype.itemsize,), np.uint8)
    return raw.view(dtype).reshape(shape)


def tree(names: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    """A nested tree over dtypes and shapes: `{dtype: {s0: ..., s1: ...}}`."""
    return {name: {f"s{at}": values(name, shape, seed) for at, shape in enumerate(SHAPES)} for name in names}


def flat(nested: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """The leaves by their names, joined with dots."""
    if not isinstance(nested, dict):
        return {prefix: nested}
    return {k: v for key, inner in nested.items() for k, v in flat(inner, f"{prefix}.{key}" if prefix else key).items()}


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit."""
    found, expected = np.asarray(found), np.asarray(expected)
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def by_safetensors(path: Path, nested: Any) -> Path:
    """By the `safetensors` package."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(leaf).reshape(leaf.shape) for name, leaf in flat(nested).items()}, path)
    return path


def by_numpy(path: Path, nested: Any, *, compressed: bool = False) -> Path:
    """By NumPy."""
    (np.savez_compressed if compressed else np.savez)(path, **flat(nested))  # pyright: ignore[reportArgumentType]
    return path


def by_flax(path: Path, nested: Any) -> Path:
    """By Flax's msgpack."""
    from flax import serialization

    path.write_bytes(serialization.msgpack_serialize(nested))
    return path


def by_torch(path: Path, nested: Any) -> Path:
    """By torch, as a nested dict of tensors."""
    import torch  # pyright: ignore[reportMissingImports]  an extra

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {name: tensor(inner) for name, inner in leaf.items()}
        leaf = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
        known = leaf.dtype.isbuiltin == 1
        raw = leaf if known else leaf.view(f"int{8 * leaf.dtype.itemsize}")
        made = (
            torch.from_numpy(raw.copy())
            if raw.shape
            else torch.tensor(raw.item(), dtype=getattr(torch, raw.dtype.name))
        )
        return made if known else made.view(getattr(torch, leaf.dtype.name))

    torch.save(tensor(nested), path)
    return path


def by_orbax(path: Path, nested: Any, **options: Any) -> Path:
    """By stock Orbax's checkpointer."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(nested))  # pyright: ignore[reportCallIssue]
    return path


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """An archive of these members."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(array: np.ndarray) -> bytes:
    """An npy file's bytes."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


Write = Callable[[Path, Any], Path]

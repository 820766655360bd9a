"""Items that only a handler of Orbax, or of the caller, can write: it writes files, and we hold what is in them.

Single arrays and random keys are such items too. Their files are made here: plain zarr, one chunk for each array."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint._src.handlers import handler_type_registry
from orbax.checkpoint.experimental.v1._src.handlers import stateful_checkpointable_handler

from ckptkit.durable.cells.writer import zarr_text
from ckptkit.durable.orbax.files import process_files, tree_files
from ckptkit.durable.orbax.host_shards import HostShards
from ckptkit.durable.orbax.partial import names_in
from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.durable.orbax.v1 import HandledSave
from ckptkit.model import paths
from ckptkit.model.manifest import LeafRecord

_MEMORY = "/dev/shm"  # a file of a small item takes no turn of a disk
_UNMERGED = "ocdbt.process_"  # begins the name of what a process writes of arrays, until process 0 merges it
_ARRAY, _JAX_KEY, _NUMPY_KEY = "checkpoint", "jax_random_key", "np_random_key"  # Orbax's names, which are settings


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSave:
    """The files of an item by their paths below it, as `handler` writes them on this process."""

    files: Mapping[str, Any]  # bytes, or flat arrays of them
    handler: str  # its name, for the step's metadata

    @property
    def is_large(self) -> bool:
        """Whether the files are mapped: they are too many bytes for a manifest."""
        return any(isinstance(data, np.ndarray) for data in self.files.values())


def written_by(handler: Any, arg: Any, *, mapped_from: int, home: Path | None = None) -> FilesSave | None:
    """The files that a handler of Orbax writes on this process for a save argument.

    The handler writes into a directory of this process's own below `home` (default: memory), which is then removed. Of
    `mapped_from` bytes on, the files are mapped, not copied. In a job of several processes each returns its own
    files; None for a handler that puts together what several have written (`needs_one_directory`). None too, on one
    process, for what is not made of files alone: links, and directories without anything in them.

    Raises what the handler raises, and `ValueError` for such things on one of several processes: all would have to know
    of them. Cost: what the handler costs, and a copy of its files where they are small.
    """
    if jax.process_count() > 1 and needs_one_directory(handler, arg):
        return None
    with _directory(home) as place:
        handler.save(place, args=arg)
        if jax.process_index() == 0:  # as Orbax has it
            handler.finalize(place)
        written = _files_below(place)
        if jax.process_count() > 1:
            _refuse_unshared(place, written)
        if written is None:
            return None
        take = _mapped if sum(map(os.path.getsize, written)) >= mapped_from else _read
        found = {os.path.relpath(path, place): take(path) for path in written}
        return FilesSave(files=found, handler=handler.typestr())


def handler_name(arg: Any) -> str:
    """Orbax's handler for a kind of save argument, as the metadata of a step names it."""
    return checkpoint_args.get_registered_handler_cls(arg).typestr()


def needs_one_directory(handler: Any, arg: Any) -> bool:
    """Whether a handler counts on a directory that all processes share: those of arrays, which process 0 merges, and of
    Orbax's newer API any that is not for a `StatefulCheckpointable`. The same on every process."""
    if isinstance(arg, HandledSave):
        return type(arg.handler) is not stateful_checkpointable_handler.StatefulCheckpointableHandler
    return type(handler).finalize is not ocp.CheckpointHandler.finalize


def read_by(handler: Any, arg: Any, files: Mapping[str, Any]) -> Any:
    """Restores an item from these files by a handler of Orbax. Raises the errors of the handler.

    The paths of the files stay below the item: `check_small_item` has refused any others.
    """
    with _directory(_roomy(sum(map(len, files.values())))) as place:
        for name, data in files.items():
            path = os.path.join(place, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        return handler.restore(place) if arg is None else handler.restore(place, args=arg)


def registered(handler_for: Callable[[str, Any], Any], item: str, kind: str) -> tuple[Any, Any] | None:
    """The handler of an item that is restored without an argument, and the argument that Orbax makes for it.

    The handler is the one that the caller gave, or else the one of this `kind` (its name in a step's metadata). None
    without either.
    """
    try:
        found = handler_for(item, None)
    except ValueError:
        try:
            found = handler_type_registry.get_handler_type(kind)
        except KeyError:
            return None
    try:
        arg = checkpoint_args.get_registered_args_cls(found)[1]()
        return handler_for(item, arg), arg
    except (TypeError, ValueError):  # no argument can be made for it
        return None


@contextmanager
def _directory(home: Path | None) -> Iterator[epath.Path]:
    if home is None and os.access(_MEMORY, os.W_OK):
        home = Path(_MEMORY)
    with tempfile.TemporaryDirectory(prefix=paths.HANDLER_PREFIX, dir=home) as place:
        below = epath.Path(place) / "item"
        below.mkdir()
        yield below


def _roomy(size_bytes: int) -> Path | None:
    """A directory on a disk for what would take much of the memory."""
    with suppress(OSError):
        if shutil.disk_usage(_MEMORY).free > 2 * size_bytes:
            return None
    return Path(tempfile.gettempdir())


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _mapped(path: str) -> np.ndarray:
    """A file's bytes, which stay when its name is removed."""
    return np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8)


def _refuse_unshared(place: epath.Path, found: list[str] | None) -> None:
    if found is None:
        raise ValueError(
            f"the handler of an item left a link, an empty directory or a name that is not UTF-8 on process "
            f"{jax.process_index()} of {jax.process_count()}: let it write files alone"
        )
    unmerged = sorted({part for path in found for part in Path(path).parts if part.startswith(_UNMERGED)})
    if unmerged:
        raise ValueError(
            f"the handler of an item writes arrays of {jax.process_count()} processes ({unmerged[0]}): save them as a "
            "tree (StandardSave, PyTreeSave)"
        )


def _files_below(place: epath.Path) -> list[str] | None:
    """Every file, in order; None where there is a link, an empty directory or a name that is not UTF-8, which files by
    name do not give back. A process of several may have written nothing."""
    found: list[str] = []
    for directory, directories, names in os.walk(place):
        files = [os.path.join(directory, name) for name in names]
        links = any(map(os.path.islink, [*files, *(os.path.join(directory, name) for name in directories)]))
        is_empty = not (directories or names) and not (directory == str(place) and jax.process_count() > 1)
        if links or is_empty or not all(map(paths.is_utf8, names)):
            return None
        found += files
    return sorted(found)


def array_files(value: Any) -> dict[str, bytes]:
    """The item of an array or a number that this process holds whole."""
    return _tree_files({_ARRAY: value})


def jax_key_files(key: jax.Array) -> dict[str, bytes]:
    """The item of a random key of JAX, typed or not."""
    typed = bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
    return _key_files(_JAX_KEY, array_files(jax.random.key_data(key)), {"typed": typed})


def numpy_key_files(state: tuple[Any, ...] | dict[str, Any]) -> dict[str, bytes]:
    """The item of a random state of NumPy."""
    return _key_files(_NUMPY_KEY, _tree_files(state), {"legacy": isinstance(state, tuple)})


def _key_files(name: str, files: dict[str, bytes], words: dict[str, bool]) -> dict[str, bytes]:
    parts = {name: files, f"{name}_metadata": {paths.JSON_VALUE: json.dumps(words).encode()}}
    marks = {f"{part}/{paths.COMMIT_MARK}": b"Checkpoint commit was successful" for part in parts}
    return {f"{part}/{file}": data for part, below in parts.items() for file, data in below.items()} | marks


def _tree_files(tree: Any) -> dict[str, bytes]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    files, stored = dict[str, bytes](), list[Any]()
    for keypath, leaf in leaves:
        if isinstance(leaf, str):
            stored.append(leaf)
            continue
        record, block = _described(names_in(keypath), leaf)
        below = paths.array_prefix(record.name)
        files[f"{below}.zarray"] = zarr_text(record.dtype, record.shape, record.cell)
        if block.size:
            files[below + (".".join("0" * block.ndim) or "0")] = block.tobytes()
        stored.append(HostShards(record=record, blocks=[]) if isinstance(leaf, jax.Array) else leaf)
    shards = [leaf for leaf in stored if isinstance(leaf, HostShards)]
    if shards:
        files |= process_files(shards, 0)
    return files | tree_files(treedef.unflatten(stored), ocdbt=False)


def _described(path: tuple[str, ...], leaf: Any) -> tuple[LeafRecord, np.ndarray]:
    extra = {}
    if isinstance(leaf, jax.Array):
        extra = {} if (sharding := sharding_text(leaf.sharding)) is None else {"sharding": sharding}
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            extra["key_impl"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
    block = np.asarray(leaf)
    shape = block.shape
    cell = tuple(max(1, rows) for rows in shape)
    record = LeafRecord(path=path, keys="", kind="jax", shape=shape, dtype=block.dtype.name, cell=cell, extra=extra)
    return record, block

"""Items that only a handler of Orbax, or of the caller, can write: it writes files, and we hold what is in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint._src.handlers import handler_type_registry

from ckptkit.errors import CorruptCheckpointError

_MEMORY = "/dev/shm"  # a file of a small item takes no turn of a disk


@dataclass
class FilesSave(ocp.args.CheckpointArgs):
    """The files of an item by their paths below it, as `handler` has written them."""

    files: Mapping[str, bytes]
    handler: str  # its name, for the step's metadata


def written_by(handler: Any, arg: Any, *, bytes_max: int) -> FilesSave | None:
    """What a handler of Orbax writes for a save argument; None for more than `bytes_max`, and for what is not made of
    files alone: links, and directories without anything in them.

    Raises what the handler raises. Cost: what the handler costs, and a copy of its files.
    """
    with _directory() as place:
        handler.save(place, args=arg)
        handler.finalize(place)
        found: dict[str, bytes] = {}
        left_bytes = bytes_max
        paths = _files_below(place)
        if paths is None:
            return None
        for path in paths:
            left_bytes -= os.path.getsize(path)
            if left_bytes < 0:
                return None
            with open(path, "rb") as file:
                found[os.path.relpath(path, place)] = file.read()
        return FilesSave(found, handler.typestr())  # pyright: ignore[reportCallIssue]


def read_by(handler: Any, arg: Any, files: Mapping[str, bytes]) -> Any:
    """What a handler of Orbax restores from these files. Raises what it raises.

    Raises `CorruptCheckpointError`, and writes nothing, where a path does not stay below the item: a manifest may come
    from anybody.
    """
    outside = sorted(name for name in files if not _stays_below(name))
    if outside:
        raise CorruptCheckpointError(f"an item has files outside of its directory: {', '.join(map(repr, outside[:5]))}")
    with _directory() as place:
        for name, data in files.items():
            path = os.path.join(place, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        return handler.restore(place) if arg is None else handler.restore(place, args=arg)


def registered(handler_for: Callable[[str, Any], Any], item: str, kind: str) -> tuple[Any, Any] | None:
    """The handler of an item that is restored without an argument, and the argument that Orbax makes for it: the one
    that the caller gave, or else the one of this `kind` (its name in a step's metadata); None where there is none."""
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
def _directory() -> Iterator[epath.Path]:
    home = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptkit-item-", dir=home) as place:
        below = epath.Path(place) / "item"
        below.mkdir()
        yield below


def _files_below(place: epath.Path) -> list[str] | None:
    """Every file, in order; None where there is a link or an empty directory, which files alone do not give back."""
    found: list[str] = []
    for directory, directories, names in os.walk(place):
        paths = [os.path.join(directory, name) for name in names]
        links = any(map(os.path.islink, [*paths, *(os.path.join(directory, name) for name in directories)]))
        if links or not (directories or names):
            return None
        found += paths
    return sorted(found)


def _stays_below(name: str) -> bool:
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")

"""Reads of metadata that somebody else wrote: bounded, never following what could hang, and never writing; and what its
names alone show of a directory: a step, an item of one, or neither."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, final

from typing_extensions import override

from ckptkit.durable.lifecycle import classify
from ckptkit.durable.lifecycle.classify import PROCESS_TREE, Content, content_of, kind_of_item, shown_by
from ckptkit.durable.lifecycle.classify import ItemKind as ItemKind
from ckptkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    OutsideRootError,
    StepNotFoundError,
    StoreError,
    TransientStoreError,
)
from ckptkit.model import paths
from ckptkit.model.manifest import MANIFEST_BYTES_MAX
from ckptkit.store import Store, open_store
from ckptkit.store.base import StoreOperation, T, WrapperStore
from ckptkit.util.words import command_line

_REASON_CHARS = 200  # of a library's own words in a message
_DEFAULT_ITEM = "default"
_LEVELS = 4  # above a path that are looked at: a step, its item, a process's part of it, and the data in that
_SLOT_LOOKS = 4  # directories of a job, and of a host, that are looked into
_ABOVE_S = 20.0
_AGGREGATE_READ = 1 << 20  # a larger file of this name is not the text of another library
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})  # the first byte of a map in msgpack
_ARRAYS_LOOKED_AT = 8  # directories of what may be a tree without a file of its own
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@final
class ReadOnlyStore(WrapperStore):
    """A store that is only looked at: every write is refused, and a read is of a regular file of bounded size.

    A named pipe or a link to a device in a checkpoint would otherwise hang the reader or fill its memory: `get` raises
    `CorruptCheckpointError` for such an object.
    """

    @override
    def _run(self, operation: StoreOperation, key: str, request: Callable[[], T]) -> T:
        if operation in ("put", "delete"):
            raise StoreError(f"{self.url} is opened for inspection only; nothing in it was changed")
        if operation == "get":
            self._require_plausible(key)
        return request()

    def _require_plausible(self, key: str) -> None:
        where = f"{self.url}/{key}"
        if self.properties.file_system:
            require_regular(where)
        found = self._inner.stat(key)
        if found is not None and found.size_bytes > MANIFEST_BYTES_MAX:
            raise CorruptCheckpointError(
                f"{where} has {found.size_bytes} bytes, and metadata has at most {MANIFEST_BYTES_MAX}", path=where
            )


@final
class Place:
    """A directory of a disk or a bucket, and those below it. Listings are taken once: a look is at one moment.

    `prefix` is its path in `store`, empty for the root of it.
    """

    def __init__(self, store: Store, prefix: str = ""):
        self.store = store
        self.prefix = prefix
        self._names: list[str] | None = None
        self._signs: list[str] | None = None
        self._has: dict[str, bool] = {}
        self._below: dict[str, Place] = {}

    @classmethod
    def open(cls, url: str, *, timeout_s: float) -> Place:
        """The directory at `url`; nothing is read yet."""
        return cls(ReadOnlyStore(open_store(url, deadline_s=timeout_s)))

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{self.store.url}/{self.prefix}" if self.prefix else self.store.url

    @property
    def name(self) -> str:
        """Its own name, without the directories before it."""
        return self.url.rstrip("/").rpartition("/")[2]

    def below(self, name: str) -> Place:
        """A directory in it."""
        if name not in self._below:
            self._below[name] = Place(self.store, self._key(name))
        return self._below[name]

    def above(self, *, timeout_s: float) -> Place:
        """The directory that it is in."""
        if self.prefix:
            return Place(self.store, self.prefix.rpartition("/")[0])
        return Place.open(self.url.rpartition("/")[0], timeout_s=timeout_s)

    def again(self) -> Place:
        """The same directory, to be listed afresh."""
        return Place(self.store, self.prefix)

    def names(self) -> list[str]:
        """Its entries, sorted; directories end in `/`. Empty if it does not exist, and for a link out of the root."""
        if self._names is None:
            with readable(self.url):
                try:
                    self._names = self.store.list(self.prefix)
                except OutsideRootError:
                    self._names = []
        return self._names

    def signs(self) -> list[str]:
        """The names that show what it is: its entries, without a file `checkpoint` that is not Orbax's (TensorFlow
        writes a text of this name, others a pickle). Cost: with such a file, a small read, and a look for steps."""
        if self._signs is None:
            other = paths.AGGREGATE in self.names() and (not self._has_aggregate() or _has_steps(self))
            self._signs = [name for name in self.names() if not (other and name == paths.AGGREGATE)]
        return self._signs

    def has(self, name: str) -> bool:
        """Whether an object of this name is in it, and may be seen. Cost: the first time one request, and no
        listing."""
        if name not in self._has:
            self._has[name] = self._has_now(name)
        return self._has[name]

    def _has_now(self, name: str) -> bool:
        with suppress(CorruptCheckpointError, PermissionError):
            try:
                return self.store.stat(self._key(name)) is not None
            except TransientStoreError:
                raise
            except StoreError:
                return False
        return False

    def _has_aggregate(self) -> bool:
        """Whether its file begins as Orbax's does: a map with text as its first key, or an empty one and nothing more.
        A pickle begins as a map does, but with a number. In a bucket a large file is not asked."""
        with suppress(CheckpointError, OSError):
            if self.store.properties.file_system:
                require_regular(f"{self.url}/{paths.AGGREGATE}")
                with open(f"{self.url}/{paths.AGGREGATE}", "rb") as file:
                    return _begins_a_tree(file.read(8))
            found = self.store.stat(self._key(paths.AGGREGATE))
            large = found is not None and found.size_bytes > _AGGREGATE_READ
            return large or _begins_a_tree(self.read(paths.AGGREGATE) or b"")
        return False

    def is_link(self, name: str) -> bool:
        """Whether a name in it is a link, which only a disk has."""
        return self.store.properties.file_system and os.path.islink(f"{self.url}/{name}")

    def directories(self) -> list[str]:
        """The names of the directories in it."""
        return [name.rstrip("/") for name in self.names() if name.endswith("/")]

    def read(self, name: str) -> bytes | None:
        """A small object in it; None where there is none."""
        with suppress(FileNotFoundError), readable(f"{self.url}/{name}"):
            return self.store.get(self._key(name))
        return None

    def json(self, name: str) -> Any:
        """A JSON object in it; None if there is none. Raises `CorruptCheckpointError` for text that is not JSON."""
        data = self.read(name)
        with readable(f"{self.url}/{name}"):
            return None if data is None else json.loads(data)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name


@contextmanager
def readable(where: str) -> Iterator[None]:
    """In this context, metadata that is not what a writer writes is corrupt, for any error of a parser."""
    try:
        yield
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(
            f"{where} cannot be read ({said[:_REASON_CHARS]}); it is damaged, or no writer would write it so",
            path=where,
        ) from error


def local_kind(path: str) -> int | None:
    """The kind of file (`stat.S_IFMT`) at a local path; None where there is none. Raises `StoreError`."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; look at its permissions and links", path=path) from error


def require_regular(path: str) -> None:
    """Raises `CorruptCheckpointError` where a local path is there and no regular file (a pipe, a device)."""
    kind = local_kind(path)
    if kind is not None and kind != stat.S_IFREG:
        raise CorruptCheckpointError(f"{path} is not a regular file, as every file of a checkpoint is", path=path)


def nothing_at(url: str, why: str) -> StepNotFoundError:
    """The error for a path with nothing to look at."""
    return StepNotFoundError(f"{url}: {why}", path=url)


PlaceKind = Literal["step", "item", "array", "slots", "tier", "record"]
_KINDS: dict[PlaceKind, str] = {
    "step": "a step",
    "item": "an item of a step, or a tree that was saved without a manager",
    "array": "an array of an item",
    "slots": "a slot directory of a fast tier",
    "tier": "a fast tier",
    "record": "what a root records of itself",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlace:
    """A path that cannot be a root. `at`: this path, or the directory around it that is of `kind`; `root`: the root of
    `at`, if it has one."""

    url: str
    at: str
    kind: PlaceKind
    root: str | None

    @property
    def words(self) -> str:
        """The kind of the path, for a message."""
        what = _KINDS[self.kind]
        return f"it is {what}" if self.at == self.url else f"it is inside {self.at}, which is {what}"

    @property
    def error(self) -> StepNotFoundError:
        """For a command that takes a root: it names the right call."""
        if self.root is not None:
            remedy = f"name the root, {self.root}, or for a new root a place outside"
        elif self.kind in ("slots", "tier"):
            tiers = "a fast tier with --tier; a fast tier's slots are <tier>/<job>/<host id>/<rank>"
            remedy = f"name the durable root, and {tiers} (`{command_line('tiers', 'list', self.at)}`)"
        else:
            remedy = f"it has no root; `{command_line('verify', self.at)}` and `inspect` take it"
        return nothing_at(self.url, f"{self.words}, and a root with steps is expected: {remedy}")


def other_place(place: Place, *, around: bool = True) -> OtherPlace | None:
    """Classifies a path that cannot be a root: a step, an item, a fast tier, `_ckptkit`; with `around` also a path
    inside one of them. None for a root, and for every path that could become one.

    Cost: its listing, and with `around` that of `place_around`.
    """
    if _before_record(place.url) is not None:
        return place_around(place)
    shown = _shown(place)
    looks = around and not _has_steps(place)
    if shown is None and looks:
        jobs = [name for name in place.directories() if paths.is_job(name)]
        shown = "tier" if any(_has_slots(place.below(name), 2) for name in jobs[:_SLOT_LOOKS]) else None
    if shown == "item" and place.name.startswith(PROCESS_TREE) and (item := place_around(place)) is not None:
        return item
    if shown is not None:
        return OtherPlace(url=place.url, at=place.url, kind=shown, root=_root_of(place, shown))
    return place_around(place) if looks else None


def require_possible_root(place: Place, *, around: bool = True) -> None:
    """Raises `StepNotFoundError`, with the right call, for a path that `other_place` finds not to be a root."""
    if (other := other_place(place, around=around)) is not None:
        raise other.error


def place_around(place: Place, *, timeout_s: float = _ABOVE_S) -> OtherPlace | None:
    """The step, item, slots or `_ckptkit` that a path lies in, whether it exists or not; None where it is outside.

    Cost: listings of a few directories above; in a bucket of the one above, and of those with names of steps. A
    directory above that may not be listed is left out. Raises `TransientStoreError` for a bucket that does not answer.
    """
    if (before := _before_record(place.url)) is not None:
        inside = other_place(Place.open(before, timeout_s=timeout_s))
        if inside is not None:
            return OtherPlace(url=place.url, at=inside.at, kind=inside.kind, root=inside.root)
        return OtherPlace(url=place.url, at=f"{before}/{paths.SIDECAR_DIR}", kind="record", root=before)
    above = place
    for level in range(_LEVELS):
        if above.url.partition("://")[2].count("/") == 0 if "://" in above.url else above.url.count("/") < 2:
            return None  # the bucket, or the top of this host's directories
        above = above.above(timeout_s=timeout_s)
        if not (level == 0 or above.store.properties.file_system or paths.step_of_name(above.name) is not None):
            continue
        try:
            kind = _shown(above)
        except TransientStoreError:
            raise
        except (CheckpointError, OSError):
            continue
        if kind is not None:
            return OtherPlace(url=place.url, at=above.url, kind=kind, root=_root_of(above, kind))
    return None


def _before_record(url: str) -> str | None:
    before, record, _ = f"{url}/".partition(f"/{paths.SIDECAR_DIR}/")
    return before if record else None


def _shown(place: Place) -> PlaceKind | None:
    shown = shown_by(place.names())
    if shown == "step" and paths.STEP_METADATA not in place.names() and _has_steps(place):
        return None  # a root into which a mark was copied
    if shown in ("step", "item", "slots"):
        return shown
    if f"{paths.SIDECAR_DIR}/" in place.names():
        return None
    if _holds_array(place) and not _has_steps(place):
        return "array"
    if paths.AGGREGATE in place.signs() or _is_bare_item(place):
        return "item"
    if _is_old_step(place):
        return "step"
    return "tier" if paths.is_job(place.name) and _has_slots(place, 2) else None


def _is_bare_item(place: Place) -> bool:
    """Whether it is a tree of an early version: directories of zarr's arrays, and no file that describes them."""
    directories = place.directories()
    if not directories or len(directories) + (paths.COMMIT_MARK in place.names()) < len(place.names()):
        return False
    return all(_is_array(place.below(name)) for name in directories[:_ARRAYS_LOOKED_AT])


def _is_array(place: Place) -> bool:
    """Asked of directories that may be anybody's: nothing is listed."""
    return not place.name.endswith(".zarr") and any(map(place.has, paths.ZARR_METADATA))


def _holds_array(place: Place) -> bool:
    version_2, version_3 = (name in place.names() for name in paths.ZARR_METADATA)
    if version_2 or not version_3:
        return version_2
    described = place.json(paths.ZARR_METADATA[1])  # also of a group, which may hold anything
    return isinstance(described, dict) and described.get("node_type") == "array"


def _begins_a_tree(data: bytes) -> bool:
    if data[:1] in (b"\xde", b"\xdf"):  # a map of more than 15 entries, with their number
        data = data[:1] + data[3 if data[0] == 0xDE else 5 :]
    is_map = data[:1] != b"" and (data[0] in _MAPS)
    is_text = len(data) > 1 and (0xA0 <= data[1] < 0xC0 or data[1] in (0xD9, 0xDA, 0xDB))
    return data == b"\x80" or (is_map and data[0] != 0x80 and is_text)


def is_step(place: Place) -> bool:
    """Whether a directory shows by itself that it is a step of a manager."""
    return _shown(place) == "step"


def _is_old_step(place: Place) -> bool:
    """Whether it is a step of an early version, which has no file of its own but Orbax's own name for its item."""
    if paths.step_of_name(place.name) is None or f"{_DEFAULT_ITEM}/" not in place.names():
        return False
    return content_in(place) == "step"


def _has_steps(place: Place) -> bool:
    named = (place.below(name) for name in place.directories() if paths.step_of_name(name) is not None)
    return f"{paths.SIDECAR_DIR}/" in place.names() or any(content_in(each) == "step" for each in named)


def _has_slots(place: Place, levels: int) -> bool:
    """Whether a directory of a fast tier, at most `levels` above its slots, has any."""
    if not place.store.properties.file_system:
        return False
    below = place.directories()[:_SLOT_LOOKS] if levels else []
    return shown_by(place.names()) == "slots" or any(_has_slots(place.below(name), levels - 1) for name in below)


def _root_of(place: Place, kind: PlaceKind) -> str | None:
    """The root of a step or an item, by their names; None where they have none."""
    above, _, name = place.url.rpartition("/")
    root, _, step = above.rpartition("/")
    if kind not in ("step", "item"):
        return None
    if paths.step_of_name(name) is not None:
        return above
    if paths.step_of_name(step) is not None:
        with suppress(CheckpointError, OSError):
            return root if is_step(Place.open(above, timeout_s=_ABOVE_S)) else None
    return None


def item_kind(place: Place) -> ItemKind | None:
    """The kind of item in a directory; None if it holds no item."""
    names = place.signs()
    if (kind := kind_of_item(names)) is not None or paths.STEP_METADATA not in names:
        return kind or ("arrays" if _is_bare_item(place) else None)
    # A step may hold files of an item's names; an item that was saved without a manager names one handler for itself.
    kind = kind_of_item([name for name in names if name != paths.STEP_METADATA])
    return kind if kind is not None and "" in item_handlers(place) else None


def json_value(place: Place, name: str) -> Any:
    """The content of a small item, which must be JSON that can be printed again."""
    value = place.json(name)
    with readable(f"{place.url}/{name}"):
        json.dumps(value)
    return value


def step_items(place: Place) -> list[str]:
    """The directories in a step that are its items."""
    return [name for name in place.directories() if name != paths.SIDECAR_DIR]


def item_handlers(place: Place) -> dict[str, str]:
    """The handlers of Orbax that a step names for its items, by item; the item `""` is a directory that is one itself.
    Empty where nothing names them, or what does is damaged."""
    try:
        named = (place.json(paths.STEP_METADATA) or {}).get("item_handlers") or {}
    except (CorruptCheckpointError, AttributeError):
        return {}
    if isinstance(named, str):
        return {"": named}
    return {str(name): str(handler) for name, handler in named.items()} if isinstance(named, dict) else {}


def content_in(place: Place) -> Content:
    """The class of a directory (see `classify.content_of`)."""
    if _is_bare_item(place):
        return "item"
    return content_of(place.signs(), lambda below: place.below(below).signs())


def is_committed(place: Place) -> bool:
    """Whether a step is committed (see `classify.is_committed`)."""
    return classify.is_committed(place.name, place.names(), place.store.properties, place.read)


def committed_at_s(place: Place) -> float | None:
    """When Orbax committed a step, in seconds of the wall clock; None if it does not record it."""
    recorded = place.json(paths.STEP_METADATA)
    with readable(f"{place.url}/{paths.STEP_METADATA}"):
        nanoseconds = (recorded or {}).get("commit_timestamp_nsecs")
        return None if nanoseconds is None else int(nanoseconds) / 1e9

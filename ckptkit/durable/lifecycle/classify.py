"""Classifies the directories of a durable root. The manager and every command use this, so they cannot disagree.

Pure: a caller lists directories and reads marks in its own way. The order of the questions:

1. Does the name have the format of this root's steps (`NameFormat`)? A link is never a step.
2. Does something in the directory show that it is a step (`content_of`)? A decimal name alone does not.
3. Who wrote it, is all of it understood, and is it damaged (`class_of`)?
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, final

from ckptkit.durable.sidecars import marked_save
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store.base import Properties

Content = Literal["step", "item", "root", "slots", "nothing"]
ItemKind = Literal["arrays", "json", "grain", "other"]
Below = Callable[[str], Collection[str]]  # the names right below a directory; those of directories end in `/`

_ARRAY_SIGNS = frozenset({paths.TREE_METADATA, paths.OCDBT_MANIFEST, paths.SHARDINGS, f"{paths.ARRAY_METADATAS}/"})
_JSON_NAMES = (paths.JSON_VALUE_V1, paths.JSON_VALUE, paths.METRICS)
_GRAIN = re.compile(r"process_\d+-of-\d+\.json")
_STEP_SIGNS = frozenset({paths.STEP_METADATA, paths.COMMIT_MARK})
_WRITTEN = frozenset(
    {
        *(name.rstrip("/") for name in _ARRAY_SIGNS),
        *_STEP_SIGNS,
        paths.SIDECAR_DIR,
        paths.COPY_JOURNAL,
        "d",  # the data of an OCDBT database
        *paths.ZARR_METADATA,
    }
)
PROCESS_TREE = "ocdbt.process_"  # and a number: what one process has written of an item
_STANDARD = re.compile(r"(?!ocdbt\.process_)(?:(.*)_)?([0-9]{1,18})", re.DOTALL)
_LOOKS_MAX = 64  # directories below one that are looked into: a step has few items


class StepClass(StrEnum):
    """The classes of a root's steps. `unfinished` and `abandoned` are states of a step of any class."""

    WHOLE = "our save, whole"
    DAMAGED = "our save, damaged"
    STOCK = "stock step"
    PARTLY = "stock step of which a part is not understood"

    @property
    def ours(self) -> bool:
        """Whether ckptkit wrote it."""
        return self in (StepClass.WHOLE, StepClass.DAMAGED)


@final
@dataclass(frozen=True, slots=True)
class NameFormat:
    """How a root names its steps, one of Orbax's standard formats: `23`, `0023`, `step_23`, `step_0023`."""

    prefix: str | None = None
    digits: int | None = None
    """The length to which numbers are filled with zeros; None: they are not."""

    def step_of(self, name: str) -> int | None:
        """The step of a directory's name; None for a name that does not have this format."""
        prefix, number = _split(name)
        if number is None or prefix != self.prefix or (number[0] == "0" and number != "0" and self.digits is None):
            return None
        fits = self.digits is None or len(number) == self.digits or (len(number) > self.digits and number[0] != "0")
        return int(number) if fits else None

    def name_of(self, step: int) -> str:
        """The name of the directory of a step."""
        number = str(step) if self.digits is None else f"{step:0{self.digits}d}"
        return number if self.prefix is None else f"{self.prefix}_{number}"

    def __str__(self) -> str:
        number = "<step>" if self.digits is None else f"<step, {self.digits} digits>"
        return number if self.prefix is None else f"{self.prefix}_{number}"


def format_of(names: Iterable[str], newest_of_ours: str | None = None, *, prefix: str | None = None) -> NameFormat:
    """The name format of a root whose directories with a step in them are `names`.

    `prefix` is the user's choice, empty for none. Without it the directory of `newest_of_ours` (the newest of our
    saves) decides, then plain numbers, then the one prefix that there is. Where several prefixes are left, no name has
    the format: it is that of plain numbers.
    """
    groups: dict[str | None, list[str]] = {}
    for name in names:
        found, number = _split(name)
        if number is not None:
            groups.setdefault(found, []).append(number)
    if prefix is not None:
        chosen = prefix or None
    elif newest_of_ours is not None:
        chosen = _split(newest_of_ours)[0]
    else:
        chosen = next(iter(groups)) if len(groups) == 1 else None
    own = None if newest_of_ours is None else _split(newest_of_ours)
    example = own[1] if own is not None and own[0] == chosen else None
    return NameFormat(chosen, _digits_of(groups.get(chosen, []), example))


def run_format(
    names: Collection[str], mark_of: Callable[[str], bytes | None], *, prefix: str | None = None
) -> NameFormat:
    """The name format of a run's steps: the user's choice, or that of `names`; where these do not agree, that of the
    newest of our saves. `mark_of` reads the mark of a step, and is called only where names do not agree.

    A mark counts only under the name that it was written for: a copy of a step under another name is not the run's.
    """
    if prefix is not None or not has_several_formats(names):
        return format_of(names, prefix=prefix)
    saves: dict[str, SaveId] = {}
    for name in names:
        mark = mark_of(name) or b""
        save = marked_save(mark)
        if save is not None and f"/{name} (ckptkit save ".encode() in mark:
            saves[name] = save
    return format_of(names, max(saves, key=lambda name: saves[name], default=None))


def has_several_formats(names: Iterable[str]) -> bool:
    """Whether names differ so that only marks show which are the run's."""
    numbers: dict[str | None, list[str]] = {}
    for name in names:
        prefix, number = _split(name)
        if number is not None:
            numbers.setdefault(prefix, []).append(number)
    return len(numbers) > 1 or any(_filled(found) and _digits_of(found, None) is None for found in numbers.values())


def kind_of_item(names: Collection[str]) -> ItemKind | None:
    """The kind of item of a directory with these names; None if nothing shows it."""
    if _ARRAY_SIGNS.intersection(names) or (paths.AGGREGATE in names and paths.STEP_METADATA not in names):
        return "arrays"
    if paths.STEP_METADATA in names:
        return None
    if json_name_in(names) is not None:
        return "json"
    return "grain" if grain_names_in(names) else None


def json_name_in(names: Collection[str]) -> str | None:
    """The file of a JSON item; None where there is none."""
    return next((name for name in _JSON_NAMES if name in names), None)


def grain_names_in(names: Iterable[str]) -> list[str]:
    """The files of a data iterator's item, one per process."""
    return [name for name in names if _GRAIN.fullmatch(name)]


def shown_by(names: Collection[str]) -> Content | None:
    """The class of a directory that the names in it show by themselves; None where they do not suffice."""
    if any(paths.slot_index(name) is not None or paths.save_of_manifest(name) for name in names):
        return "slots"
    if _ARRAY_SIGNS.intersection(names):
        return "item"
    return "step" if _STEP_SIGNS.intersection(names) else None


def content_of(names: Collection[str], below: Below) -> Content:
    """The class of a directory, from the names in it, and if they do not suffice from those one level below.

    `item`: a tree that was saved without a manager; a manager does not restore it as a step. `root`: it holds steps
    itself. Cost: nothing for a directory with a step's metadata or mark; else a listing for each directory in it.
    """
    if (shown := shown_by(names)) is not None:
        return shown
    directories = [name.rstrip("/") for name in names if name.endswith("/")]
    if paths.SIDECAR_DIR in directories:
        return "root"
    found = "nothing"
    for name in sorted(directories)[:_LOOKS_MAX]:
        inside = below(name)
        # One that is being written has the parts of its processes first.
        is_item = kind_of_item(inside) is not None or any(each.startswith(PROCESS_TREE) for each in inside)
        if not is_item and not _STEP_SIGNS.intersection(inside):
            continue
        if paths.step_of_name(name) is not None:
            return "root"
        found = "step" if is_item else found
    return "item" if found == "nothing" and paths.AGGREGATE in names else found


def is_committed(
    name: str, names: Collection[str], properties: Properties, read: Callable[[str], bytes | None]
) -> bool:
    """Whether a step's directory is committed, by the rules of its store: by its name where a directory is renamed in
    one step, else by the mark in it.

    `names` are its entries, `read` reads a file in it. Stock Orbax renames steps on every mount, and older ones put no
    mark. So a directory without a mark is committed if its metadata has a commit time, and names no save of ckptkit.
    Cost: of such a directory alone a read.
    """
    if properties.atomic_rename:
        return paths.TEMPORARY not in name
    if paths.COMMIT_MARK in names:
        return True
    if not properties.file_system or paths.TEMPORARY in name or paths.STEP_METADATA not in names:
        return False
    try:
        recorded = json.loads(read(paths.STEP_METADATA) or b"{}")
        renamed = recorded.get("commit_timestamp_nsecs") is not None
        return renamed and paths.SAVE_ID_FIELD not in (recorded.get("custom_metadata") or {})
    except (ValueError, AttributeError, TypeError):
        return False


def has_been_written(keys: Iterable[str]) -> bool:
    """Whether objects below a directory, by their keys in it, are those of a save that was not committed.

    False for the files of others, and for a root of its own: nothing there may be deleted for a save of that number.
    """
    found = False
    for parts in (key.split("/") for key in keys):
        if len(parts) > 1 and parts[1] == paths.STEP_METADATA and paths.step_of_name(parts[0]) is not None:
            return False
        found = found or any(part in _WRITTEN or part.startswith(PROCESS_TREE) for part in parts)
        found = found or (len(parts) > 1 and (parts[-1] in _JSON_NAMES or _GRAIN.fullmatch(parts[-1]) is not None))
    return found


def class_of(
    save_id: SaveId | None, items: Mapping[str, ItemKind | None], damage: Sequence[str], *, lost: bool = False
) -> StepClass:
    """The class of a step. `save_id`: which of our saves its records name; `lost`: an item shows that it had records
    and has none. `damage`: what is known to be damaged, by its records or after a read of all of it."""
    if (save_id is not None and save_id.ours) or lost:
        return StepClass.DAMAGED if damage or lost else StepClass.WHOLE
    return StepClass.PARTLY if None in items.values() or not items else StepClass.STOCK


def _split(name: str) -> tuple[str | None, str | None]:
    match = _STANDARD.fullmatch(name)
    return (match[1], match[2]) if match else (None, None)


def _filled(numbers: Iterable[str]) -> set[int]:
    return {len(number) for number in numbers if number[0] == "0" and number != "0"}


def _digits_of(numbers: Sequence[str], example: str | None) -> int | None:
    """The length to which all of `numbers` are filled with zeros; None where they are not, or do not agree.

    `example` is a number that has the format for certain.
    """
    if example is not None and _filled([example]):
        return len(example)
    filled = _filled(numbers)
    if len(filled) != 1:
        return None
    (length,) = filled
    shortest = min(len(number) for number in numbers) if example is None else len(example)
    return length if shortest >= length else None

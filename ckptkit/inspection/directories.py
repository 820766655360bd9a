"""What a durable directory is: a step, an item of one, or neither; and the facts that its names alone tell."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from ckptkit.inspection.places import Place, readable
from ckptkit.model import paths

ItemKind = Literal["arrays", "json", "grain", "other"]

_ARRAY_SIGNS = frozenset({paths.TREE_METADATA, paths.OCDBT_MANIFEST, paths.SHARDINGS, f"{paths.ARRAY_METADATAS}/"})
_JSON_NAMES = (paths.JSON_VALUE, paths.METRICS)
_GRAIN = re.compile(r"process_\d+-of-\d+\.json")


def item_kind(place: Place) -> ItemKind | None:
    """What kind of item a directory is; None for what holds no item."""
    names = place.names()
    if _ARRAY_SIGNS.intersection(names):
        return "arrays"
    if paths.STEP_METADATA in names:
        return None
    if json_name(place) is not None:
        return "json"
    if any(_GRAIN.fullmatch(name) for name in names):
        return "grain"
    return None


def json_name(place: Place) -> str | None:
    """The file of a JSON item; None where there is none."""
    return next((name for name in _JSON_NAMES if name in place.names()), None)


def json_value(place: Place, name: str) -> Any:
    """The content of a small item, which must be JSON that can be printed again."""
    value = place.json(name)
    with readable(f"{place.url}/{name}"):
        json.dumps(value)
    return value


def grain_names(place: Place) -> list[str]:
    """The files of a data iterator's item, one per process."""
    return [name for name in place.names() if _GRAIN.fullmatch(name)]


def step_items(place: Place) -> list[str]:
    """The directories in a step that are its items."""
    return [name for name in place.directories() if name != paths.SIDECAR_DIR]


def is_slot_directory(names: list[str]) -> bool:
    """Whether these are the names of a fast tier's slot directory."""
    return any(paths.slot_index(name) is not None or paths.save_of_manifest(name) for name in names)


def is_committed(place: Place) -> bool:
    """Whether Orbax has committed a step: by its name on a disk, by a file in it on a bucket."""
    if place.store.properties.atomic_rename:
        return paths.TEMPORARY not in place.name
    return paths.COMMIT_MARK in place.names()


def committed_at_s(place: Place) -> float | None:
    """When Orbax committed a step, in seconds of the wall clock; None where it does not say."""
    recorded = place.json(paths.STEP_METADATA)
    with readable(f"{place.url}/{paths.STEP_METADATA}"):
        nanoseconds = (recorded or {}).get("commit_timestamp_nsecs")
        return None if nanoseconds is None else int(nanoseconds) / 1e9

"""Classifies a durable directory as a step, an item of one, or neither; and the facts that its names alone tell."""

from __future__ import annotations

import json
from typing import Any

from ckptkit.durable.lifecycle import classify
from ckptkit.durable.lifecycle.classify import ItemKind as ItemKind
from ckptkit.durable.lifecycle.classify import grain_names_in, json_name_in, kind_of_item
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.places import Place, readable
from ckptkit.model import paths


def item_kind(place: Place) -> ItemKind | None:
    """The kind of item in a directory; None if it holds no item."""
    if (kind := kind_of_item(place.names())) is not None or paths.STEP_METADATA not in place.names():
        return kind
    # A step may hold files of an item's names; an item that was saved without a manager names one handler for itself.
    kind = kind_of_item([name for name in place.names() if name != paths.STEP_METADATA])
    return kind if kind is not None and "" in item_handlers(place) else None


def json_name(place: Place) -> str | None:
    """The file of a JSON item; None where there is none."""
    return json_name_in(place.names())


def json_value(place: Place, name: str) -> Any:
    """The content of a small item, which must be JSON that can be printed again."""
    value = place.json(name)
    with readable(f"{place.url}/{name}"):
        json.dumps(value)
    return value


def grain_names(place: Place) -> list[str]:
    """The files of a data iterator's item, one per process."""
    return grain_names_in(place.names())


def step_items(place: Place) -> list[str]:
    """The directories in a step that are its items."""
    return [name for name in place.directories() if name != paths.SIDECAR_DIR]


def is_slot_directory(names: list[str]) -> bool:
    """Whether these are the names of a fast tier's slot directory."""
    return any(paths.slot_index(name) is not None or paths.save_of_manifest(name) for name in names)


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


def is_committed(place: Place) -> bool:
    """Whether a step is committed (see `classify.is_committed`)."""
    return classify.is_committed(place.name, place.names(), place.store.properties, place.read)


def committed_at_s(place: Place) -> float | None:
    """When Orbax committed a step, in seconds of the wall clock; None if it does not record it."""
    recorded = place.json(paths.STEP_METADATA)
    with readable(f"{place.url}/{paths.STEP_METADATA}"):
        nanoseconds = (recorded or {}).get("commit_timestamp_nsecs")
        return None if nanoseconds is None else int(nanoseconds) / 1e9

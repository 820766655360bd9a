"""Records as plain values, as `--json` prints them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def plain_fields(record: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass by name, each as `plain` gives it."""
    return {each.name: plain(getattr(record, each.name)) for each in fields(record) if each.name not in without}


def plain(value: Any) -> Any:
    """A record as its `to_json` gives it, or else by its fields; so too what mappings and sequences hold."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):  # a named one too, whose type takes its fields one by one
        return tuple(map(plain, value))
    return list(map(plain, value)) if isinstance(value, list) else value

"""Partial responses: the part of a resource that `fields` asks for, as `name,metadata(a,b)` or `items/name`. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.records import JsonObject

_WORD: Final = re.compile(r"[A-Za-z0-9_-]+|\*|[(),/]")
_DEPTH_MAX: Final = 8
Selection = dict[str, Any]  # by field: what is selected below it; empty: all of it


def selected(resource: JsonObject, fields: str) -> JsonObject:
    """The selected part of `resource`. Raises 400 for an invalid selection."""
    return _cut(resource, parse_fields(fields))


def parse_fields(text: str) -> Selection:
    """A selection as a tree. Raises 400 for what is none."""
    words = _WORD.findall(text)
    if "".join(words) != text.replace(" ", "") or not words:
        raise _refused(text)
    selection, rest = _list(words, text, 0)
    if rest:
        raise _refused(text)
    return selection


def _list(words: list[str], text: str, depth: int) -> tuple[Selection, list[str]]:
    selection: Selection = {}
    while True:
        name, below, words = _field(words, text, depth)
        selection[name] = {**selection.get(name, {}), **below}
        if words[:1] != [","]:
            return selection, words
        words = words[1:]


def _field(words: list[str], text: str, depth: int) -> tuple[str, Selection, list[str]]:
    """One field, the selection below it, and the words after it."""
    if not words or words[0] in "(),/" or depth > _DEPTH_MAX:
        raise _refused(text)
    name, words = words[0], words[1:]
    below: Selection = {}
    if words[:1] == ["("]:
        below, words = _list(words[1:], text, depth + 1)
        if words[:1] != [")"]:
            raise _refused(text)
        words = words[1:]
    elif words[:1] == ["/"]:
        child, grandchildren, words = _field(words[1:], text, depth + 1)
        below = {child: grandchildren}
    return name, below, words


def _cut(value: Any, selection: Selection) -> Any:
    if not selection:
        return value
    if isinstance(value, list):
        return [_cut(each, selection) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        below = selection.get(name, selection.get("*"))
        if below is not None:
            found[name] = _cut(each, below)
    return found


def _refused(text: str) -> errors.GoogleError:
    return errors.GoogleError(
        400, "invalidParameter", f"Invalid field selection {text[:64]}", location=("parameter", "fields")
    )

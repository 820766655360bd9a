"""Values that are stored as JSON: refused at the call that gives them, with the place of what JSON cannot hold."""

from __future__ import annotations

import json
from typing import Any

_FIT = "give text, numbers, booleans, None, and lists and dicts of these"
_NAMED_MAX = 20  # levels of a place, in one message
_KEYS = str | int | float | bool | None  # of a dict: JSON makes text of them


def require_json(value: Any, name: str) -> None:
    """Raises the error of JSON's encoder (TypeError, ValueError) if `value` cannot be stored as JSON. `name` is what
    the caller gave it as. The message names the first key or value that does not fit. Cost: encodes `value` once."""
    if (why := _problem(value)) is not None:
        kind = TypeError if isinstance(why, TypeError) else ValueError
        raise kind(f"{_place(value, name)} cannot be stored as JSON: {why}; {_FIT}")


def require_json_dict(value: Any, name: str) -> None:
    """The same for a dict, whose keys are text as Orbax asks for; None is accepted. Raises ValueError for another type,
    as Orbax does in the background."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}, not a dict; give a dict whose keys are text")
    if others := [key for key in value if not isinstance(key, str)]:
        raise ValueError(f"{name} has the key {others[0]!r}, a {type(others[0]).__name__}: its keys are text")
    require_json(value, name)


def _problem(value: Any) -> TypeError | ValueError | None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        return error
    except RecursionError as error:
        return ValueError(str(error))
    return None


def _place(value: Any, name: str) -> str:
    """The place of the first part of `value` that JSON cannot hold, as Python writes it."""
    above: set[int] = set()
    while id(value) not in above and len(above) < _NAMED_MAX:
        above.add(id(value))
        keyed = list(value.items()) if isinstance(value, dict) else []
        if bad := [key for key, _ in keyed if not isinstance(key, _KEYS)]:
            return f"{name}[{bad[0]!r}]"
        parts = keyed or (list(enumerate(value)) if isinstance(value, list | tuple) else [])
        key, inner = next(((key, each) for key, each in parts if _problem(each) is not None), (None, None))
        if inner is None:
            return name
        value, name = inner, f"{name}[{key!r}]"
    return name

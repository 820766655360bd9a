"""Lists in messages."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of some names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more

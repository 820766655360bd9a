"""Records as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit.util.plain import plain, plain_fields


class Part(NamedTuple):
    name: str
    nbytes: int


@dataclass
class Whole:
    parts: tuple[Any, ...]
    hidden: int = 0


def test_records_inside_sequences_become_plain() -> None:
    """`--json` would end with a TypeError, or print the text of an object."""
    whole = Whole(parts=(Part("a", 1), [Whole(parts=())], {"b": Part("b", 2)}))
    expected = (("a", 1), [{"parts": (), "hidden": 0}], {"b": ("b", 2)})
    assert plain(whole) == {"parts": expected, "hidden": 0}
    assert plain_fields(whole, without=["hidden"]) == {"parts": expected}

"""Patterns of the names of leaves, and how a leaf that matches one is named anew.

Leaves are named as in every message: the keys of the path joined by dots (`encoder.layers.0.kernel`). The `value` that
NNX puts at the end of every path is left out. In a pattern `*` matches a part of one key, `**` any text with its dots,
`?` one character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NNX_LEAF = ".value"
_WILDCARDS = re.compile(r"\*\*\.|\*\*|\*|\?")
_AS_REGEX = {"**.": r"((?:.+\.)?)", "**": r"(.*)", "*": r"([^.]*)", "?": r"([^.])"}


@dataclass(frozen=True, slots=True)
class Rename:
    """Stored leaves that match `old` go to `new`; its wildcards are replaced by the matches of those of `old`, in
    order.

    With `regex=True`, `old` is a regular expression for the whole name and `new` its replacement (`\\1`, `\\g<name>`).
    Raises ValueError where the wildcards of the two differ, or the expression is none.
    """

    old: str
    new: str
    regex: bool = False

    def __post_init__(self) -> None:
        if self.regex:
            try:
                re.compile(self.old)
            except re.error as error:
                raise ValueError(f"{self.old!r} is not a regular expression: {error}") from error
        elif _WILDCARDS.findall(self.old) != _WILDCARDS.findall(self.new):
            raise ValueError(f"the wildcards of {self.new!r} must be those of {self.old!r}, in the same order")

    def target_of(self, name: str) -> str | None:
        """Where a stored leaf goes; None where the rule does not match."""
        match = re.fullmatch(self.old, name) if self.regex else _match(self.old, name)
        if match is None:
            return None
        if self.regex:
            return match.expand(self.new)
        found = iter(match.groups())
        return _WILDCARDS.sub(lambda _: next(found), self.new)


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the `value` that NNX puts at the end of every path; all as they are if two would be equal."""
    short = [without_nnx_leaf(name) for name in names]
    return short if len(set(short)) == len(names) else list(names)


def without_nnx_leaf(name: str) -> str:
    """A name without the `value` at its end."""
    return name.removesuffix(_NNX_LEAF)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name."""
    return _match(pattern, name) is not None


def _match(pattern: str, name: str) -> re.Match[str] | None:
    parts, at = [], 0
    for wildcard in _WILDCARDS.finditer(pattern):
        parts += [re.escape(pattern[at : wildcard.start()]), _AS_REGEX[wildcard[0]]]
        at = wildcard.end()
    # A name may hold a newline, which `.` matches only so.
    return re.fullmatch("".join([*parts, re.escape(pattern[at:])]), name, re.DOTALL)

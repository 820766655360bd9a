"""The rules of a surgery: which stored leaves go where in a changed model, and which of its leaves begin afresh.

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
class Take:
    """Stored leaves that match go to the leaf of the same name."""

    pattern: str

    def target_of(self, name: str) -> str | None:
        """Where a stored leaf goes; None where the rule does not match."""
        return name if matches(self.pattern, name) else None


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


@dataclass(frozen=True, slots=True)
class Skip:
    """Stored leaves that match are not read: the new model has no use for them."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Init:
    """Leaves of the new model that match keep the value that they have in it."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Cast:
    """Leaves of the new model that match take their own dtype instead of the stored one.

    Keys are never cast, and complex numbers never to real ones. A Python number takes a stored value without loss, or
    the surgery fails.
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Quantize:
    """Weights that match are int8 or float8_e4m3fn with scales on one side, and floats on the other: those of the new
    model are quantised, those of the checkpoint are read back.

    `pattern` and `scale` name the two leaves of a weight on the side that has scales; the wildcards of `scale` are
    replaced as in `Rename`. By default the leaf with the scales is NAME_scale. Its shape determines which elements
    share a scale: `[1, out]` for a weight `[in, out]` is one for each output channel. `block` has the sizes of the
    blocks along the last dimensions (`(128, 128)`), for shapes that can be of several: the last block of a dimension
    may be cut by the edge.
    Raises ValueError where the wildcards of the two differ, or a size is not positive.
    """

    pattern: str
    scale: str | None = None
    block: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.block is not None and (not self.block or min(self.block) < 1):
            raise ValueError(f"{self.block} is not a block: give positive sizes, such as (128, 128)")
        if self.scale is not None:
            Rename(self.pattern, self.scale)

    def scale_of(self, name: str) -> str | None:
        """The leaf with the scales of a weight; None where the rule does not match."""
        if self.scale is not None:
            return Rename(self.pattern, self.scale).target_of(name)
        return f"{name}_scale" if matches(self.pattern, name) else None


Rule = Take | Rename | Skip | Init | Cast | Quantize


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

"""Flags whose text a function turns into a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class Parsed(click.ParamType):
    """The value that `parse` makes of a flag's text. A ValueError that it raises is click's usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]):
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or click's message. A default that is not text is a value already."""
        try:
            return self.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def named_number(form: str) -> Parsed:
    """A name and its number, as `form` has them: `KIND:WEIGHT` or `TIER=SECONDS`."""
    separator = "=" if "=" in form else ":"

    def parse(text: str) -> tuple[str, float]:
        name, found, number = text.rpartition(separator)
        if not name or not found:
            raise ValueError(f"{text!r}: write {form}")
        try:
            return name, float(number)
        except ValueError:
            raise ValueError(f"{number!r} is not a number; write {form}") from None

    return Parsed(form, parse)

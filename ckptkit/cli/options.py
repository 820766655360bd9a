"""The flags that several commands have."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli.text import size_text
from ckptkit.formats.tensors import MEMORY_BYTES
from ckptkit.model import paths
from ckptkit.model.tiers import EverySteps, KeepBytes, KeepNewest
from ckptkit.store.backends import properties_of

if TYPE_CHECKING:
    from ckptkit.upkeep import Keep
import importlib
import os
from pathlib import Path

from ckptkit.util.package import install_command

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(s|m|min|h|d)")
_TIME_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGT]?)(i?B)?", re.IGNORECASE)


def _size_bytes(text: str) -> int:
    """Bytes, from `512MB`: binary units, as everywhere in ckptkit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write 512MB, 4GiB or a number of bytes")
    return max(1, int(float(match[1]) * (1 << _UNITS[match[2].upper()])))


def _keep(text: str) -> Keep:
    """The library's policy, from `newest=5`, `bytes=2TiB` or `every=1000`."""
    word, _, amount = text.partition("=")
    if word == "bytes":
        return KeepBytes(_size_bytes(amount))
    try:
        return {"newest": KeepNewest, "every": EverySteps}[word](int(amount))
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not a rule; write newest=5, bytes=2TiB or every=1000") from None


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


class _Seconds(click.FloatRange):
    """A number of seconds, which may have a unit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The seconds, or click's message."""
        found = _TIME.fullmatch(value) if isinstance(value, str) else None
        try:
            number = float(value) if found is None else float(found[1]) * _TIME_UNITS[found[2]]
        except ValueError:
            self.fail(f"{value!r} is not a length of time; write 90s, 30min, 12h or 7d", param, ctx)
        seconds = super().convert(number, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


SIZE = Parsed("size", _size_bytes)
KEEP = Parsed("rule", _keep)


def seconds(*names: str, default: float | None = None, least: float = 0, help: str) -> Any:
    """An option with a time of `least` seconds or more; also written as `60s`, `5m`, `1h` or `7d`."""
    shown, kind = default is not None, _Seconds(min=least)
    return click.option(*names, type=kind, default=default, show_default=shown, metavar="SECONDS", help=help)


def size(*names: str, default: int, help: str) -> Any:
    """An option with a size in bytes, as `512MB`."""
    shown = size_text(default)
    return click.option(*names, type=SIZE, default=default, show_default=shown, metavar="SIZE", help=help)


TIMEOUT = seconds(
    "--timeout",
    "timeout_s",
    least=0.1,
    default=20.0,
    help="How long to retry requests to a bucket that does not answer.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout (docs/CLI.md has its shape).")
MEMORY = size(
    "--memory",
    "memory_bytes",
    default=MEMORY_BYTES,
    help="The most array data that is held at once; a chunk above a quarter of it is an error.",
)
MAP = click.option("--map", "map_path", metavar="FILE", help="Rules that rename, split, stack, transpose (TOML).")


def _tiers(default: str = "") -> Any:
    kind = Parsed("path", lambda text: text.removeprefix("file://"))
    told = f"A fast tier's path on this host; may be repeated{default}."
    return click.option("--tier", "tiers", multiple=True, metavar="PATH", type=kind, help=told)


TIERS = _tiers()
FOUND_TIERS = _tiers(" [default: those that the newest durable step was saved with]")
HOST_ID = click.option("--host-id", metavar="ID", help="The host whose slots are read [default: this machine's name].")
STEP_PREFIX = click.option(
    "--step-prefix",
    metavar="TEXT",
    help="Steps are named TEXT_<number>, or <number> where TEXT is empty [default: as the run's own steps are].",
)
TOP = click.option("--top", type=click.IntRange(min=1), metavar="N", help="Print only the first N rows.")
DEPTH = click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Group leaves by N parts of their names.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")


def root_and_step(root: str, step: int | None) -> tuple[str, int]:
    """ROOT and STEP of a command that also takes them as one path, ROOT/STEP; a usage error for a root alone."""
    if step is not None:
        return root, step
    parent, _, name = root.rstrip("/").rpartition("/")
    found = paths.step_of_name(name, temporary=False) if parent else None
    if found is None:
        raise click.UsageError(f"{root!r} has no step: write ROOT STEP, or ROOT/STEP as in {root.rstrip('/')}/100")
    return parent, found


def fast_tiers(tiers: Sequence[str], host_id: str | None) -> str:
    """The host whose slots are meant; a usage error for what can be no tier or no host."""
    for tier in tiers:
        if not properties_of(tier).file_system:
            raise click.BadParameter(f"{tier!r} is not a local directory; a fast tier is one", param_hint="--tier")
    try:
        return paths.checked_name(host_id or socket.gethostname(), "host id")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--host-id") from error


class OutputFile(click.Path):
    """A file that will be written. A missing directory is reported before the work starts, not an hour later."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or click's message."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.path.isdir(path.parent):
            self.fail(f"{path.parent} is not a directory; make it first", param, ctx)
        return path


def needed(module: str, extra: str) -> Any:
    """An optional package, or a usage error that shows how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise click.UsageError(f"this needs {module}: {install_command(extra)}") from error

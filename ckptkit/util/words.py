"""Sizes, lists, counts and commands in messages."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache


@lru_cache(maxsize=4096)  # many leaves, few sizes
def size_text(size_bytes: int) -> str:
    """Bytes in binary units: `1.5 GiB`."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if size < 1024 or unit == "EiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of some names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def count_text(count: int, one: str, several: str | None = None) -> str:
    """How many of what: `1 leaf`, `2 leaves`; without `several`, an s makes them more."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def command_line(*words: object) -> str:
    """A command for a shell: `ckptkit` and these words, each quoted where a shell would read it in a way of its own."""
    return shlex.join(["ckptkit", *map(str, words)])


def repair_command(root: str, tiers: Iterable[object], host_ids: Iterable[str] = ()) -> str:
    """The command that repairs what these directories of fast tiers and `root` hold, from copies that are intact.

    `host_ids` are of this host (`own_host_id`).
    """
    given = [word for tier in tiers for word in ("--tier", tier)]
    hosts = [word for host_id in host_ids for word in own_host_id(host_id)]
    return command_line("scrub", root, *given, *hosts, "--repair")


def own_host_id(host_id: str) -> list[str]:
    """The option of a command for a host; none for the name of this machine, which commands take by themselves."""
    return [] if host_id in ("", socket.gethostname()) else ["--host-id", host_id]


def on_each_host(command: str) -> str:
    """A command to run on each host of a job: one that names a host has another name on each."""
    own = ", with its own --host-id" if " --host-id " in command else ""
    return f"on each host{own}: `{command}`"

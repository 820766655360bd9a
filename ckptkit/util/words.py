"""Lists and commands in messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of some names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def command_line(*words: object) -> str:
    """A command for a shell: `ckptkit` and these words, each quoted where a shell would read it in a way of its own."""
    return shlex.join(["ckptkit", *map(str, words)])


def repair_command(root: str, tiers: Iterable[object], host_ids: Iterable[str] = ()) -> str:
    """The command that repairs what these directories of fast tiers and `root` hold, from copies that are intact."""
    options = [*(("--tier", tier) for tier in tiers), *(("--host-id", host_id) for host_id in host_ids)]
    return command_line("scrub", root, *(word for option in options for word in option), "--repair")

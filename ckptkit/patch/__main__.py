"""Runs a script or module with Orbax's managers and checkpointers replaced by ours.

    python -m ckptkit.patch [--tiers FILE] [--ram DIR] [--ssd DIR] -- SCRIPT ARGUMENTS...
    python -m ckptkit.patch [--tiers FILE] [--ram DIR] [--ssd DIR] -- -m MODULE ARGUMENTS...

`--tiers` is a TOML file (`ckptkit.patch.replacing`); `--ram` and `--ssd` are tiers with the usual policies.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys

from ckptkit.model.tiers import Tier
from ckptkit.patch import patch_orbax, read_tiers


def run(words: list[str]) -> None:
    """Patches this process, then runs what follows `--` as `python` would."""
    options, program = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="python -m ckptkit.patch",
        usage="%(prog)s [--tiers FILE] [--ram DIR] [--ssd DIR] -- SCRIPT|-m MODULE [ARGUMENTS...]",
        description="Run a program with the managers and checkpointers of Orbax replaced by those of ckptkit.",
    )
    parser.add_argument("--tiers", metavar="FILE", help="TOML file with the fast tiers")
    parser.add_argument("--ram", metavar="DIR", help="a ramdisk tier with the usual policies")
    parser.add_argument("--ssd", metavar="DIR", help="a disk tier with the usual policies")
    given = parser.parse_args(options)
    if not program or program == ["-m"]:
        parser.error("give the program after --")
    try:
        tiers, ours = read_tiers(given.tiers) if given.tiers else ([], {})
        tiers += [Tier.ram(given.ram)] if given.ram else []
        tiers += [Tier.ssd(given.ssd)] if given.ssd else []
        _show_info()
        patch_orbax(tiers, **ours)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def _show_info() -> None:
    """The line that lists the replaced classes goes to standard error: nothing configures logging before it."""
    log = logging.getLogger("ckptkit")
    log.setLevel(logging.INFO)
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    run(sys.argv[1:])

"""The names of ckptkit that users may have written down: import paths, signatures, event kinds, exit codes, commands,
file names.

`python -m tests.packaging.surface > tests/packaging/surface.json` writes the list anew, for a release that takes
something away on purpose.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any

import click

from ckptkit.cli.command import commands
from ckptkit.cli.exits import Exit

PACKAGES = (
    "ckptkit",
    "ckptkit.cli",
    "ckptkit.diagnosis",
    "ckptkit.diagnosis.simulation",
    "ckptkit.direct",
    "ckptkit.emergency",
    "ckptkit.errors",
    "ckptkit.guard",
    "ckptkit.manager",
    "ckptkit.patch",
    "ckptkit.resume",
    "ckptkit.store",
    "ckptkit.surgery",
    "ckptkit.testing",
    "ckptkit.testing.bucket",
    "ckptkit.testing.crash",
    "ckptkit.testing.damage",
    "ckptkit.testing.faulty_store",
    "ckptkit.testing.store_contract",
    "ckptkit.v1",
)


def exported(package: str) -> list[str]:
    """The public names of a package: `__all__`, or what its module defines or hands on."""
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and not inspect.ismodule(value)
            and "ckptkit" in getattr(value, "__module__", "")
        ]
    return sorted(names)


def parameters(value: Any) -> list[str]:
    """The arguments of a function or class, in order; none where they cannot be told."""
    try:
        found = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []
    return [name for name in found if name not in ("args", "kwargs")]


def options(command: click.Command) -> list[str]:
    """Every argument and option of a command, as it is typed."""
    return sorted(word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts))


def found() -> dict[str, Any]:
    """The whole surface, sorted, as JSON."""
    import ckptkit

    context = click.Context(commands)
    by_name = {name: commands.get_command(context, name) for name in commands.list_commands(context)}
    words = {}
    for name, command in by_name.items():
        assert command is not None
        words[name] = options(command)
        if isinstance(command, click.Group):
            words |= {f"{name} {inner}": options(each) for inner, each in command.commands.items()}
    return {
        "names": {package: exported(package) for package in PACKAGES},
        "parameters": {name: parameters(getattr(ckptkit, name)) for name in sorted(ckptkit.__all__)},
        "members": {
            name: sorted(member for member in vars(getattr(ckptkit, name)) if not member.startswith("_"))
            for name in ("CheckpointManager", "Tier", "EventLog")
        },
        "event_kinds": {kind.name: kind.value for kind in ckptkit.Kind},
        "exit_codes": {code.name: int(code) for code in Exit},
        "commands": words,
    }


if __name__ == "__main__":
    json.dump(found(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")

"""The tiers of a job in a TOML file, for `patch_orbax` and `python -m ckptkit.patch`.

host_id = "node-7"        # optional: names this host below a tier's path

[ram]                     # as Tier.ram
path = "/dev/shm/job"
every_steps = 1           # or every_seconds = 30
keep_newest = 2           # or keep_bytes = 8_000_000_000, or keep_unflushed = 2

[ssd]                     # as Tier.ssd
path = "/mnt/disk/job"
every_steps = 10

[peer]                    # as Tier.peer
copies = 1
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from ckptkit.model.tiers import EverySeconds, EverySteps, KeepBytes, KeepNewest, KeepUnflushed, Tier

_MAKERS: dict[str, Any] = {"ram": Tier.ram, "ssd": Tier.ssd, "peer": Tier.peer}
_SAVE = {"every_steps": EverySteps, "every_seconds": EverySeconds}
_KEEP = {"keep_newest": KeepNewest, "keep_bytes": KeepBytes, "keep_unflushed": KeepUnflushed}
_PLAIN = {"ram": {"path", "slots", "job"}, "ssd": {"path", "slots", "job"}, "peer": {"copies", "slots", "rack"}}


def read_tiers(file: str | os.PathLike[str]) -> tuple[list[Tier], dict[str, Any]]:
    """The tiers of a TOML file, and the keywords of a manager that it names (`host_id`).

    Raises ValueError with the file and the key for one that is not known or cannot be, FileNotFoundError.
    """
    path = Path(file)
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    ours = {"host_id": content.pop("host_id")} if "host_id" in content else {}
    if unknown := sorted(set(content) - set(_MAKERS)):
        raise ValueError(f"{path}: {', '.join(unknown)}: expected host_id and the tables {', '.join(_MAKERS)}")
    return [_tier(path, name, table) for name, table in content.items()], ours


def _tier(path: Path, name: str, table: Any) -> Tier:
    known = {*_PLAIN[name], *_SAVE, *(() if name == "peer" else _KEEP)}
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [{name}]: not a table: expected {', '.join(sorted(known))}")
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{path}: [{name}]: keys {', '.join(unknown)}: expected {', '.join(sorted(known))}")
    settings = {key: value for key, value in table.items() if key in _PLAIN[name]}
    for argument, policies in (("save", _SAVE), ("keep", _KEEP)):
        given = [key for key in policies if key in table]
        if len(given) > 1:
            raise ValueError(f"{path}: [{name}]: {' and '.join(given)}: give one of both")
        if given:
            settings[argument] = policies[given[0]](table[given[0]])
    try:
        return _MAKERS[name](settings.pop("path"), **settings) if name != "peer" else Tier.peer(**settings)
    except KeyError as error:
        raise ValueError(f"{path}: [{name}]: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: [{name}]: {error}") from error

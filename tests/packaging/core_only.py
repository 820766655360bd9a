"""The work that the core dependencies alone must do, run with an installed wheel: save, restore, inspect, verify.

    python core_only.py DIRECTORY [--block]

With `--block` no module of another distribution is found, as if it were not installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class CoreOnly:
    """Finds what is on the path, but nothing of distributions that ckptkit does not require, directly or not."""

    def __init__(self) -> None:
        required = self._closure("ckptkit-jax")
        self._refused = {
            module
            for module, owners in importlib.metadata.packages_distributions().items()
            if not {_plain(owner) for owner in owners} & required
        }

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """As the finder of `sys.path`."""
        return None if fullname.partition(".")[0] in self._refused else PathFinder.find_spec(fullname, path, target)

    def _closure(self, name: str) -> set[str]:
        todo, found = [(name, frozenset[str]())], set()
        while todo:
            name, extras = todo.pop()
            if (name, extras) in found:
                continue
            found.add((name, extras))
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # for another platform
                continue
            todo += [pair for line in lines if (pair := _requirement(line, extras)) is not None]
        return {_plain(name) for name, _ in found}


def _requirement(line: str, extras: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """Name and extras of a requirement that holds with `extras`; other markers than `extra` are taken to hold."""
    told, _, marker = line.partition(";")
    extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", marker)
    parts = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^]]*)\])?", told)
    if parts is None or (extra is not None and extra[1] not in extras):
        return None
    return parts[1], frozenset(each.strip() for each in (parts[2] or "").split(",") if each.strip())


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def block() -> None:
    """Refuses everything else from now on."""
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, CoreOnly()]


def main(root: Path) -> None:
    """Fails where anything of it does not work."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    import ckptkit
    from ckptkit.cli import main as command

    state = {"w": jnp.arange(4096.0).reshape(64, 64), "key": jax.random.key(1), "n": jnp.int32(3)}
    tiers = [ckptkit.Tier.ram(str(root / "ram")), ckptkit.Tier.ssd(str(root / "ssd"))]
    for expected in (None, 2):
        with ckptkit.CheckpointManager(root / "run", tiers=tiers) as manager:
            assert manager.latest_step() == expected
            if expected is None:
                for step in (1, 2):
                    manager.save(step, args=ocp.args.StandardSave(state))
                    manager.wait_until_finished()
            else:
                found = manager.restore(None, args=ocp.args.StandardRestore(ckptkit.abstract_state(state)))
                assert found["w"].tobytes() == state["w"].tobytes()
    assert not ckptkit.verify(str(root / "run")).corrupt
    for words in (["inspect", str(root / "run" / "2")], ["steps", str(root / "run")], ["verify", str(root / "run")]):
        assert command(words) == 0, words
    where = Path(ckptkit.__file__).parent
    assert (where / "py.typed").is_file()
    print(f"CORE ONLY: {where}")


if __name__ == "__main__":
    if "--block" in sys.argv:
        block()
    main(Path(sys.argv[1]))

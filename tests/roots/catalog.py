"""The kinds of saves that trees are made of, and a store of saves of each: written once, then copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from tests.roots.kinds import (
    ARRAY,
    CUSTOM,
    ITERATOR,
    JAX_KEY,
    NUMPY_KEY,
    Run,
    SaveKind,
    Writer,
    by_manager,
    by_v1,
    data,
    direct,
    state,
    tree,
)

STEPS: Final = (1, 2, 3)  # of every saved run


def _text(step: int) -> dict[str, Any]:
    return {"name": f"step {step}", "w": jnp.arange(4.0) + step}


def _containers(step: int) -> dict[str, Any]:
    return {"empty": {}, "nothing": None, "list": [], "w": jnp.arange(4.0) + step}


def _key_without_characters(step: int) -> dict[str, Any]:
    return {"": jnp.arange(4.0) + step, "w": jnp.ones(2) * step}


def _host_only(step: int) -> dict[str, Any]:
    return {"array": np.arange(4) + step, "count": step}


def _named(step: int) -> dict[str, Any]:
    """Names that shells, terminals and patterns read in ways of their own."""
    return {"a b": jnp.ones(2) * step, "n\nl": jnp.ones(2) + step, "é*?[x]": jnp.zeros(2) - step}


def _mostly_unchanged(step: int) -> dict[str, Any]:
    """A frozen leaf of 1.2 MB, whose data file ckptkit's third step has in common with its second."""
    return {"frozen": jnp.arange(300_000.0), "w": jnp.ones(2) * step}


_PREFIXED: Final = {"step_name_format": ocp.path.step.standard_name_format(step_prefix="step")}
_PADDED: Final = {"step_name_format": ocp.path.step.standard_name_format(step_format_fixed_length=8)}

_RUNS: Final[dict[str, Run]] = {
    "composite": Run(items={"state": tree(), "data": data()}),
    "single": Run(item=tree()),
    "metrics": Run(item=tree(), metrics=True),
    "custom handler": Run(items={"state": tree(), "story": CUSTOM}),
    "custom handler alone": Run(items={"story": CUSTOM}),
    "iterator": Run(items={"state": tree(), "iter": ITERATOR}),
    "random keys": Run(items={"state": tree(), "jax_key": JAX_KEY, "numpy_key": NUMPY_KEY}),
    "random keys alone": Run(items={"jax_key": JAX_KEY, "numpy_key": NUMPY_KEY}),
    "bare array": Run(item=tree(lambda step: jnp.arange(3.0) + step)),
    "bare number": Run(item=tree(lambda step: step)),
    "array item": Run(items={"state": tree(), "vector": ARRAY}),
    "json alone": Run(item=data()),
    "text leaves": Run(items={"state": tree(_text)}),
    "empty containers": Run(item=tree(_containers)),
    "empty key": Run(item=tree(_key_without_characters)),
    "host arrays": Run(items={"state": tree(), "host": tree(_host_only)}),
    "odd leaf names": Run(item=tree(_named)),
    "unchanged leaf": Run(item=tree(_mostly_unchanged)),
    "step prefix": Run(items={"state": tree(), "data": data()}, options=_PREFIXED),
    "padded steps": Run(items={"state": tree()}, options=_PADDED),
}
_LAYOUTS: Final[dict[str, Run]] = {
    "zarr2 files": Run(items={"state": tree(use_ocdbt=False)}),
    "zarr3 ocdbt": Run(items={"state": tree(use_zarr3=True)}),
    "zarr3 files": Run(items={"state": tree(use_ocdbt=False, use_zarr3=True)}),
    "zarr2 ocdbt chunks": Run(items={"state": tree(chunks=True)}),
    "zarr2 files chunks": Run(items={"state": tree(chunks=True, use_ocdbt=False)}),
    "zarr3 ocdbt chunks": Run(items={"state": tree(chunks=True, use_zarr3=True)}),
    "zarr3 files chunks": Run(items={"state": tree(chunks=True, use_ocdbt=False, use_zarr3=True)}),
}


def _checkpointables(step: int) -> dict[str, Any]:
    return {"state": state(step), "meta": {"epoch": step}}


def _every_kind() -> list[SaveKind]:
    writers: tuple[Writer, ...] = ("orbax", "ckptkit")
    kinds = [by_manager(f"{writer} {name}", writer, run) for writer in writers for name, run in _RUNS.items()]
    kinds += [by_manager(f"orbax {name}", "orbax", run) for name, run in _LAYOUTS.items()]
    kinds += [by_v1(f"{writer} v1", writer, _checkpointables) for writer in writers]
    kinds.append(by_v1("orbax v1 json", "orbax", _checkpointables, as_json="meta"))
    return [*kinds, direct("orbax direct"), direct("orbax direct files", use_ocdbt=False)]


def _continued(root: Path, _: object) -> None:
    """Stock Orbax saves two steps, and ckptkit the third in the same root."""
    _RUNS["composite"].save(root, STEPS[:2], "orbax")
    _RUNS["composite"].save(root, STEPS[2:], "ckptkit")


def _rolled_back(root: Path, _: object) -> None:
    """A run restores its second step, which abandons the third, and saves a fourth."""
    run = _RUNS["composite"]
    run.save(root, STEPS, "ckptkit")
    with run.open(root, "ckptkit") as manager:
        manager.restore(STEPS[1])
        manager.save(STEPS[2] + 1, args=run.arguments(STEPS[2] + 1))
        manager.wait_until_finished()


def _restarted(root: Path, _: object) -> None:
    """One run after another, each with one step: five epochs."""
    for step in range(46, 51):
        _RUNS["composite"].save(root, [step], "ckptkit")


# Runs with a history. Their steps are of the kind `ckptkit composite`, except those of stock Orbax.
HISTORIES: Final = {"continued": _continued, "rolled back": _rolled_back, "restarted": _restarted}
KINDS: Final[dict[str, SaveKind]] = {kind.name: kind for kind in _every_kind()}


@final
class SavedRuns:
    """One saved run of each kind below `home`: written when it is first asked for, never changed afterwards."""

    def __init__(self, home: Path):
        self._home = home

    def root(self, kind: str) -> Path:
        """The root of a run with the steps `STEPS`, or of one of the `HISTORIES`. Cost: about 0.2 s the first time."""
        root = self._home / kind.replace(" ", "-")
        if not root.exists():
            save = HISTORIES.get(kind) or KINDS[kind].save
            save(root, STEPS)
        return root

    def step(self, kind: str, step: int) -> Path:
        """The directory of one of its steps."""
        steps = {int(path.name.rpartition("_")[2]): path for path in self.root(kind).iterdir() if path.name[0] != "_"}
        return steps[step]

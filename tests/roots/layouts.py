"""Every layout that Orbax writes or ever wrote, and every directory of each: what is a root, a step and an item, and
what is inside of one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import aggregate_handlers

from tests.roots.kinds import ITERATOR, JAX_KEY, NUMPY_KEY

LevelKind = Literal["root", "step", "item", "inside"]
AGGREGATE: Final = "checkpoint"  # the file in which old versions kept a tree: all leaves, or some
TOP: Final = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`build` writes it to an empty directory's `run`. `roots`, `steps` and `items` are paths below; every other
    directory is inside of one of them. `arrays`: the items that have the arrays of `tree`."""

    build: Callable[[Path], None]
    roots: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    arrays: tuple[str, ...] = (TOP,)

    def levels(self, home: Path) -> dict[str, LevelKind]:
        """Every directory of what was built in `home`, by its path there."""
        found = [home / TOP, *sorted(path for path in (home / TOP).rglob("*") if path.is_dir())]
        return {path: self._kind_of(path) for path in (str(each.relative_to(home)) for each in found)}

    def _kind_of(self, path: str) -> LevelKind:
        if path in self.roots:
            return "root"
        return "step" if path in self.steps else "item" if path in self.items else "inside"


def tree() -> dict[str, Any]:
    """Names that end in digits, as those of layers do, and one that is a digit."""
    return {
        "0": jnp.arange(4.0),
        "layer_1": {"w_0": jnp.arange(6.0).reshape(2, 3) + 1, "b": jnp.ones(3, jnp.bfloat16)},
        "count": 7,
    }


def write_aggregate(item: Path, value: Any) -> None:
    """The file of an old version, by the handler of Orbax that reads it."""
    item.mkdir(parents=True, exist_ok=True)
    on_host = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, value)

    async def write() -> None:
        (await aggregate_handlers.MsgpackHandler().serialize(epath.Path(item / AGGREGATE), on_host)).result()

    asyncio.run(write())


def _direct(handler: Callable[[], Any], args: Callable[[Any], Any]) -> Callable[[Path], None]:
    def build(home: Path) -> None:
        with ocp.Checkpointer(handler()) as checkpointer:
            checkpointer.save(home / TOP, args=args(tree()))

    return build


def _pytree(**layout: Any) -> Callable[[Path], None]:
    """As old versions wrote it on a disk: without marks."""
    build = _direct(lambda: ocp.PyTreeCheckpointHandler(**layout), lambda value: ocp.args.PyTreeSave(value))  # pyright: ignore[reportCallIssue]
    return lambda home: (build(home), _without(home, "commit_success.txt"))[0]


def _without(home: Path, *names: str) -> None:
    for path in [path for name in names for path in home.rglob(name)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _managed(item_args: Callable[[], Any], step: int = 300, **options: Any) -> Callable[[Path], None]:
    def build(home: Path) -> None:
        made = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, **options)
        metrics = {"loss": 0.5} if "best_fn" in options else None
        with ocp.CheckpointManager(home / TOP, options=made) as manager:
            manager.save(step, args=item_args(), metrics=metrics)

    return build


def _state() -> Any:
    return ocp.args.StandardSave(tree())  # pyright: ignore[reportCallIssue]


def _items() -> Any:
    return ocp.args.Composite(
        state_1=_state(),
        data=ocp.args.JsonSave({"position": 3}),
        key=JAX_KEY.save(JAX_KEY.value(1)),
        numpy_key=NUMPY_KEY.save(NUMPY_KEY.value(1)),
        vector_2=ocp.args.ArraySave(jnp.arange(3.0)),
        iterator=ITERATOR.save(ITERATOR.value(1)),
    )


def _processes(home: Path) -> None:
    """The parts of two processes that nothing has merged: each is a database of its own."""
    _managed(lambda: ocp.args.Composite(state=_state()))(home)
    item = home / TOP / "300/state"
    shutil.copytree(item / "ocdbt.process_0", item / "ocdbt.process_1")
    shutil.copy(item / "array_metadatas/process_0", item / "array_metadatas/process_1")


def _aggregate(home: Path) -> None:
    write_aggregate(home / TOP, tree())


def _aggregate_in_a_step(home: Path) -> None:
    write_aggregate(home / TOP / "300/default", tree())


def _aggregate_with_metadata(home: Path) -> None:
    """`SaveArgs(aggregate=True)` of versions that wrote the names of the leaves too."""
    _pytree(use_ocdbt=False)(home)
    described = json.loads((home / TOP / "_METADATA").read_text())
    for entry in described["tree_metadata"].values():
        entry["value_metadata"]["skip_deserialize"] = True
    for name in [path for path in (home / TOP).iterdir() if path.is_dir()]:
        shutil.rmtree(name)
    (home / TOP / "_METADATA").write_text(json.dumps(described))
    (home / TOP / "_sharding").unlink()
    write_aggregate(home / TOP, tree())


def _with_placeholders(home: Path, *, described: bool, **layout: Any) -> None:
    """Arrays of their own, and a file that has the other leaves and names them."""
    _pytree(**layout)(home)
    placed = tree()
    placed["0"], placed["layer_1"]["w_0"] = "PLACEHOLDER://0", "PLACEHOLDER://layer_1.w_0"
    for name in ("count", "layer_1.b"):
        if (home / TOP / name).is_dir():
            shutil.rmtree(home / TOP / name)
    _without(home, "_CHECKPOINT_METADATA", "array_metadatas", *([] if described else ["_METADATA", "_sharding"]))
    if described:
        recorded = json.loads((home / TOP / "_METADATA").read_text())
        for name in ("('count',)", "('layer_1', 'b')"):
            recorded["tree_metadata"][name]["value_metadata"]["skip_deserialize"] = True
        (home / TOP / "_METADATA").write_text(json.dumps(recorded))
    write_aggregate(home / TOP, placed)


def _bare_files(home: Path) -> None:
    """The oldest: a directory of zarr for each leaf, and nothing else."""
    _pytree(use_ocdbt=False)(home)
    for path in (home / TOP).iterdir():
        if path.name[0] in "_ac" and path.name != "count":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _v1_pytree(home: Path) -> None:
    from orbax.checkpoint import v1

    v1.save(str(home / TOP), tree())


def _v1_checkpointables(home: Path) -> None:
    from orbax.checkpoint import v1

    v1.save_checkpointables(str(home / TOP), {"state": tree(), "meta_1": {"epoch": 3}})


def _v1_training(home: Path) -> None:
    from orbax.checkpoint import v1

    with v1.training.Checkpointer(str(home / TOP)) as checkpointer:
        checkpointer.save(300, tree())


def _old_manager(home: Path) -> None:
    """A run of a version that wrote no metadata of a step."""
    _managed(_state)(home)
    _without(home, "commit_success.txt", "_CHECKPOINT_METADATA", "array_metadatas", "ocdbt.process_0")


def _ours(home: Path) -> None:
    import ckptkit

    with ckptkit.CheckpointManager(home / TOP) as manager:
        manager.save(300, args=ocp.args.Composite(state_1=_state(), data=ocp.args.JsonSave({"position": 3})))


def _unfinished(home: Path) -> None:
    _managed(lambda: ocp.args.Composite(state_1=_state()))(home)
    shutil.copytree(home / TOP / "300", home / TOP / "400.orbax-checkpoint-tmp")


_RUN: Final[dict[str, Any]] = {"roots": (TOP,), "steps": (f"{TOP}/300",)}
_TREE: Final[dict[str, Any]] = {"items": (TOP,)}
_ONE: Final[dict[str, Any]] = {**_RUN, "items": (f"{TOP}/300/default",), "arrays": (f"{TOP}/300/default",)}
_STATE: Final[dict[str, Any]] = {**_RUN, "items": (f"{TOP}/300/state_1",), "arrays": (f"{TOP}/300/state_1",)}
_NAMES: Final = ocp.path.step.standard_name_format

LAYOUTS: Final[dict[str, Layout]] = {
    "pytree": Layout(build=_pytree(), **_TREE),
    "pytree files": Layout(build=_pytree(use_ocdbt=False), **_TREE),
    "pytree zarr3": Layout(build=_pytree(use_zarr3=True), **_TREE),
    "pytree zarr3 files": Layout(build=_pytree(use_ocdbt=False, use_zarr3=True), **_TREE),
    "bare files": Layout(build=_bare_files, **_TREE),
    "aggregate": Layout(build=_aggregate, **_TREE),
    "aggregate with metadata": Layout(build=_aggregate_with_metadata, **_TREE),
    "aggregate in a step": Layout(build=_aggregate_in_a_step, **_ONE),
    "placeholders": Layout(build=lambda home: _with_placeholders(home, described=False, use_ocdbt=False), **_TREE),
    "placeholders with metadata": Layout(
        build=lambda home: _with_placeholders(home, described=True, use_ocdbt=False), **_TREE
    ),
    "placeholders ocdbt": Layout(build=lambda home: _with_placeholders(home, described=True), **_TREE),
    "standard": Layout(
        build=_direct(ocp.StandardCheckpointHandler, lambda value: ocp.args.StandardSave(value)),
        **_TREE,  # pyright: ignore[reportCallIssue]
    ),
    "composite": Layout(
        build=_direct(
            ocp.CompositeCheckpointHandler,
            lambda value: ocp.args.Composite(state_1=ocp.args.StandardSave(value)),  # pyright: ignore[reportCallIssue]
        ),
        steps=(TOP,),
        items=(f"{TOP}/state_1",),
        arrays=(f"{TOP}/state_1",),
    ),
    "manager": Layout(build=_managed(_state), **_ONE),
    "manager of items": Layout(
        build=_managed(_items, best_fn=lambda metrics: metrics["loss"]),
        **{
            **_STATE,
            "items": tuple(
                f"{TOP}/300/{name}"
                for name in (
                    *("key/jax_random_key", "key/jax_random_key_metadata"),
                    *("numpy_key/np_random_key", "numpy_key/np_random_key_metadata"),
                    "state_1",
                    "data",
                    "key",
                    "numpy_key",
                    "vector_2",
                    "iterator",
                    "metrics",
                )
            ),
        },
    ),
    "manager with a prefix": Layout(
        build=_managed(_state, step_prefix="model"),
        roots=(TOP,),
        steps=(f"{TOP}/model_300",),
        items=(f"{TOP}/model_300/default",),
        arrays=(f"{TOP}/model_300/default",),
    ),
    "manager with padded steps": Layout(
        build=_managed(_state, step_name_format=_NAMES(step_format_fixed_length=8)),
        roots=(TOP,),
        steps=(f"{TOP}/00000300",),
        items=(f"{TOP}/00000300/default",),
        arrays=(f"{TOP}/00000300/default",),
    ),
    "manager of an old version": Layout(build=_old_manager, **_ONE),
    "several processes": Layout(
        build=_processes, **{**_RUN, "items": (f"{TOP}/300/state",), "arrays": (f"{TOP}/300/state",)}
    ),
    "unfinished": Layout(
        build=_unfinished,
        **{
            **_STATE,
            "steps": (f"{TOP}/300", f"{TOP}/400.orbax-checkpoint-tmp"),
            "items": (f"{TOP}/300/state_1", f"{TOP}/400.orbax-checkpoint-tmp/state_1"),
        },
    ),
    "v1 pytree": Layout(build=_v1_pytree, steps=(TOP,), items=(f"{TOP}/state",), arrays=(f"{TOP}/state",)),
    "v1 checkpointables": Layout(
        build=_v1_checkpointables,
        steps=(TOP,),
        items=(f"{TOP}/state", f"{TOP}/meta_1"),
        arrays=(f"{TOP}/state",),
    ),
    "v1 training": Layout(
        build=_v1_training,
        **{**_RUN, "items": (f"{TOP}/300/state",), "arrays": (f"{TOP}/300/state",)},
    ),
    "ckptkit": Layout(build=_ours, **{**_STATE, "items": (f"{TOP}/300/state_1", f"{TOP}/300/data")}),
}

"""Kinds of saves: what a step holds, how stock Orbax or ckptkit saves it, and how stock Orbax restores it."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import ckptkit

Writer = Literal["orbax", "ckptkit"]
_MANAGERS: dict[Writer, Any] = {"orbax": ocp.CheckpointManager, "ckptkit": ckptkit.CheckpointManager}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a step: its value, how it is saved and restored, and the handler that it needs."""

    value: Callable[[int], Any]
    save: Callable[[Any], Any]
    restore: Callable[[Any], Any]
    handler: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveKind:
    """A kind of save. `save` writes steps into a root; `read` restores one step directory with stock Orbax.

    `open` makes a manager of either writer over such a root and `arguments` are what it saves as a step.
    """

    name: str
    writer: Writer
    value: Callable[[int], Any]
    save: Callable[[Path, Sequence[int]], None]
    read: Callable[[str, int], Any]
    open: Callable[..., Any]
    arguments: Callable[[int], Any]


class _TextArgs(ocp.args.CheckpointArgs):
    def __init__(self, text: str = ""):
        self.text = text


class _TextHandler(ocp.CheckpointHandler):
    """A handler of a user's own: a file of text under a name that no other tool knows."""

    file_name = "story.bin"

    def save(self, directory: Any, args: Any) -> None:
        (directory / self.file_name).write_text(args.text)

    def restore(self, directory: Any, args: Any = None) -> str:
        del args
        return (directory / self.file_name).read_text()


class _IteratorHandler(_TextHandler):
    """Writes what Grain's handler writes: one JSON file for each process."""

    file_name = "process_0-of-1.json"


@ocp.args.register_with_handler(_TextHandler, for_save=True)
class _TextSave(_TextArgs):
    pass


@ocp.args.register_with_handler(_TextHandler, for_restore=True)
class _TextRestore(_TextArgs):
    pass


@ocp.args.register_with_handler(_IteratorHandler, for_save=True)
class _IteratorSave(_TextArgs):
    pass


@ocp.args.register_with_handler(_IteratorHandler, for_restore=True)
class _IteratorRestore(_TextArgs):
    pass


def state(step: int) -> dict[str, Any]:
    """A small tree: jax arrays of two widths, bits that do not compress, a number; different for every step."""
    chance = np.random.default_rng(step)
    return {
        "params": {
            "w": jnp.asarray(chance.standard_normal((4, 6)), jnp.float32),
            "b": jnp.asarray(chance.standard_normal(3), jnp.bfloat16),
        },
        "count": step,
    }


def _on_host(value: Any) -> Any:
    """How to restore it: every array as NumPy's, so that no file of shardings is needed."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | np.ndarray):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.RestoreArgs(restore_type=type(leaf))

    return jax.tree.map(of, value)


def _restore_tree(value: Any) -> Any:
    return ocp.args.PyTreeRestore(item=value, restore_args=_on_host(value))  # pyright: ignore[reportCallIssue]


def _save_tree(value: Any) -> Any:
    return ocp.args.PyTreeSave(value)  # pyright: ignore[reportCallIssue]


def _in_chunks(value: Any) -> Any:
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32), value)
    return ocp.args.PyTreeSave(value, save_args=arguments)  # pyright: ignore[reportCallIssue]


def tree(value: Callable[[int], Any] = state, *, chunks: bool = False, **layout: Any) -> Item:
    """An item of arrays. `layout` is what `PyTreeCheckpointHandler` takes: `use_ocdbt`, `use_zarr3`."""
    handler = (lambda: ocp.PyTreeCheckpointHandler(**layout)) if layout else None
    return Item(value=value, save=_in_chunks if chunks else _save_tree, restore=_restore_tree, handler=handler)


def _item(save: Any, restore: Any, value: Callable[[int], Any]) -> Item:
    return Item(value=value, save=save, restore=lambda _: restore())


def data(value: Callable[[int], Any] = lambda step: {"position": step}) -> Item:
    """An item of JSON."""
    return _item(ocp.args.JsonSave, ocp.args.JsonRestore, value)


def _words(step: int) -> str:
    return f"of step {step}"


CUSTOM = _item(_TextSave, _TextRestore, _words)
ITERATOR = _item(_IteratorSave, _IteratorRestore, lambda step: f'{{"next": {step}}}')
JAX_KEY = _item(ocp.args.JaxRandomKeySave, ocp.args.JaxRandomKeyRestore, jax.random.key)
NUMPY_KEY = _item(
    ocp.args.NumpyRandomKeySave,
    ocp.args.NumpyRandomKeyRestore,
    lambda step: np.random.RandomState(step).get_state(),
)
ARRAY = _item(ocp.args.ArraySave, ocp.args.ArrayRestore, lambda step: jnp.arange(3.0) + step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The arguments of a manager: items by name (or one without a name), options, metrics."""

    items: Mapping[str, Item] = field(default_factory=dict)
    item: Item | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    metrics: bool = False

    @property
    def named(self) -> dict[str, Item]:
        """Every item under the name that it has in the step directory."""
        return dict(self.items) if self.item is None else {"default": self.item}

    def value(self, step: int) -> Any:
        """The values of a step, by item."""
        return {name: item.value(step) for name, item in self.named.items()}

    def arguments(self, step: int) -> Any:
        """What `CheckpointManager.save` takes."""
        if self.item is not None:
            return self.item.save(self.item.value(step))
        return ocp.args.Composite(**{name: item.save(item.value(step)) for name, item in self.items.items()})

    def open(self, root: Path | str, writer: Writer, **options: Any) -> Any:
        """A manager over a root."""
        handlers = {name: item.handler() for name, item in self.items.items() if item.handler is not None}
        single = None if self.item is None or self.item.handler is None else self.item.handler()
        given = {"enable_async_checkpointing": writer == "ckptkit", **self.options, **options}
        if self.metrics:
            given["best_fn"] = lambda metrics: metrics["loss"]
        return _MANAGERS[writer](
            root, options=ocp.CheckpointManagerOptions(**given), item_handlers=single or handlers or None
        )

    def save(self, root: Path, steps: Sequence[int], writer: Writer) -> None:
        """Saves the steps in one run."""
        with self.open(root, writer) as manager:
            for step in steps:
                metrics = {"loss": 1 / (1 + step)} if self.metrics else None
                manager.save(step, args=self.arguments(step), metrics=metrics)
                manager.wait_until_finished()

    def read(self, directory: str, step: int) -> Any:
        """The items of a step directory, as stock Orbax restores them."""
        handlers = {name: item.handler() for name, item in self.named.items() if item.handler is not None}
        wanted = {name: item.restore(item.value(step)) for name, item in self.named.items()}
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as checkpointer:
            found = checkpointer.restore(directory, args=ocp.args.Composite(**wanted))
        return {name: found[name] for name in wanted}


def by_manager(name: str, writer: Writer, run: Run) -> SaveKind:
    """A kind that a `CheckpointManager` saves: Orbax's, or ckptkit's in its place."""
    return SaveKind(
        name=name,
        writer=writer,
        value=run.value,
        save=lambda root, steps: run.save(root, steps, writer),
        read=run.read,
        open=run.open,
        arguments=run.arguments,
    )


def direct(name: str, value: Callable[[int], Any] = state, **layout: Any) -> SaveKind:
    """A tree that a `Checkpointer` of stock Orbax saves without a manager: the step directory is the item."""
    item = tree(value, **layout)

    def save(root: Path, steps: Sequence[int]) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**layout)) as checkpointer:
            for step in steps:
                checkpointer.save(root / str(step), args=item.save(item.value(step)))

    def read(directory: str, step: int) -> Any:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**layout)) as checkpointer:
            return checkpointer.restore(directory, args=item.restore(item.value(step)))

    run = Run(item=item)
    return SaveKind(
        name=name, writer="orbax", value=value, save=save, read=read, open=run.open, arguments=run.arguments
    )


def by_v1(name: str, writer: Writer, value: Callable[[int], dict[str, Any]], *, as_json: str | None = None) -> SaveKind:
    """Checkpointables that a `Checkpointer` of Orbax's v1 saves, or ckptkit's in its place.

    `as_json` names the one that its JSON handler is to hold, in a file `data.json`.
    """

    def save(root: Path, steps: Sequence[int]) -> None:
        from orbax.checkpoint import v1

        import ckptkit.v1

        training: Any = v1.training if writer == "orbax" else ckptkit.v1.training
        with _v1_context(as_json), training.Checkpointer(root) as checkpointer:
            for step in steps:
                checkpointer.save_checkpointables(step, value(step))

    def read(directory: str, step: int) -> Any:
        from orbax.checkpoint import v1

        with _v1_context(as_json):
            abstract = {name: None if name == as_json else each for name, each in value(step).items()}
            return v1.load_checkpointables(directory, abstract)

    run = Run(items={each: tree(partial(_one_of, value, each)) for each in value(0)})
    return SaveKind(name=name, writer=writer, value=value, save=save, read=read, open=run.open, arguments=run.arguments)


def _one_of(value: Callable[[int], dict[str, Any]], name: str, step: int) -> Any:
    return value(step)[name]


def _v1_context(as_json: str | None) -> Any:
    from orbax.checkpoint import v1

    context = v1.Context()
    if as_json is not None:
        registry = v1.handlers.local_registry()
        registry.add(v1.handlers.JsonHandler, checkpointable_name=as_json)
        context.checkpointables.registry = registry
    return context


def leaves(value: Any) -> dict[str, tuple[Any, ...]]:
    """The leaves of a value as plain bytes, by their paths: equal exactly where two values are bit for bit the same."""
    found = jax.tree_util.tree_flatten_with_path(value)[0]
    return {_path(path): _plain(leaf) for path, leaf in found}


def _path(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _plain(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, str):
        return (leaf,)
    array = np.asarray(leaf)
    if array.dtype == ml_dtypes.bfloat16:
        array = array.view(np.uint16)
    return array.dtype.kind, array.dtype.itemsize, array.shape, array.tobytes()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the logs and warnings of libraries, which report the damage that is intended here."""
    disabled, hook = logging.root.manager.disable, sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # Orbax leaves coroutines of a failed restore to the garbage collector
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        sys.unraisablehook = hook

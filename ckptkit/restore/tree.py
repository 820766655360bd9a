"""Both ends of a restore: compares the requested tree with the stored one, and places verified boxes on devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.durable.orbax.partial import anywhere, on_every_process
from ckptkit.durable.orbax.shardings import sharding_of_text
from ckptkit.errors import TreeMismatchError
from ckptkit.model.boxes import Box, boxes_held
from ckptkit.model.manifest import LeafKind, LeafRecord, describe
from ckptkit.restore.plan import Key
from ckptkit.snapshot.describe import LeafPath, kind_of_number
from ckptkit.snapshot.empty_nodes import Empty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """The properties that leaves share, and their place (`sharding` None: host memory). A large state has few forms."""

    kind: LeafKind
    shape: tuple[int, ...]  # of the stored array: for typed keys, of the key data
    dtype: str
    sharding: jax.sharding.Sharding | None
    boxes: tuple[Box, ...]  # the distinct ones that this process needs
    key_impl: str | None = None


class Target(NamedTuple):
    """One leaf that is to be restored."""

    key: Key
    form: Form


def boxes_needed(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...], process: int) -> tuple[Box, ...]:
    """The distinct boxes of an array that a process needs; all of it where it stays in host memory."""
    return (Box.whole(shape),) if sharding is None else boxes_held(sharding, shape, process)


def targets_of(
    item: str, wanted: Sequence[tuple[LeafPath, Any]], stored: Sequence[LeafRecord], *, step: int, where: str
) -> list[Target]:
    """The `wanted` leaves, each checked against what is stored; all differences are raised at once.

    Raises `TreeMismatchError`: shapes, dtypes, leaves missing on either side. Nothing is cast, padded or cut.
    """
    on_disk = {leaf.path: leaf for leaf in stored}
    differences, targets = [], []
    process = jax.process_index()
    forms: dict[Any, Form] = {}
    plain: dict[Any, Form] = {}  # by shape, dtype and sharding: found with half of the work
    for path, leaf in wanted:
        record = on_disk.get(path)
        if record is None:
            name = f"{item}:{'.'.join(path)}"
            differences.append(f"{name} is {_describe_abstract(leaf)} in abstract_state, but not on disk")
        elif isinstance(leaf, jax.ShapeDtypeStruct) and (sharding := leaf.sharding) and is_plain_match(leaf, record):
            if (form := plain.get(known := (record.shape, record.dtype, sharding))) is None:
                plain[known] = form = _form(leaf, record, process, forms)
            targets.append(Target((item, path), form))
        elif not _same(leaf, record):
            name, described = f"{item}:{record.name}", _describe_abstract(leaf)
            differences.append(f"{name} is {_describe_stored(record, leaf)} on disk, {described} in abstract_state")
        else:
            targets.append(Target((item, path), _form(leaf, record, process, forms)))
    if missing := on_disk.keys() - [path for path, _ in wanted]:
        differences += [
            f"{item}:{leaf.name} is {leaf.describe()} on disk, but not in abstract_state"
            for path, leaf in on_disk.items()
            if path in missing
        ]
    if differences:
        raise TreeMismatchError(differences, step=step, where=where)
    return targets


def abstract_of(stored: Sequence[LeafRecord], empties: Sequence[Empty] = ()) -> Any:
    """An abstract tree made from the records alone: nested dicts and lists. It has the shardings of the save if today's
    devices allow it. Otherwise everything is on the first device, or complete on every device of several processes.

    `empties` are the nodes without leaves (`ckptkit.snapshot.empty_nodes`).
    """
    root: dict[str, Any] = {}
    for leaf in stored:
        if not leaf.path:
            return _abstract_leaf(leaf)
        put_at(root, leaf.path, _abstract_leaf(leaf))
    for path, _, node_there in empties:
        if not path:
            return node_there
        put_at(root, path, node_there)
    letters = {path: letters for path, letters, _ in empties}
    return _with_sequences(root, {leaf.path: leaf.keys for leaf in stored} | letters)


def put_at(tree: dict[str, Any], path: LeafPath, value: Any) -> None:
    """Puts a value into nested dicts, of which missing ones are made; `path` has a name at least."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def key_shape(leaf: LeafRecord) -> tuple[int, ...]:
    """The shape of a leaf as its user sees it: of typed keys without the dimensions of their data."""
    trailing = _key_of(leaf.extra["key_impl"])[1] if "key_impl" in leaf.extra else 0
    return leaf.shape[: len(leaf.shape) - trailing]


def abstract_keys(leaf: LeafRecord, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    """The typed keys of a leaf, with `sharding` (of the keys or of their data), or that of the save."""
    shape, dtype = key_shape(leaf), _key_of(leaf.extra["key_impl"])[0]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of_keys(sharding, shape) or _stored_sharding(leaf))


def sharding_of_keys(sharding: Any, shape: tuple[int, ...]) -> Any:
    """The sharding of typed keys of `shape` for one that may be of their data, whose own dimensions are never split."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec[: len(shape)])
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _form(leaf: Any, record: LeafRecord, process: int, forms: dict[Any, Form]) -> Form:
    """The form of a stored leaf that is wanted as `leaf`; an equal one of `forms` is used again."""
    impl = record.extra.get("key_impl")
    kind: LeafKind = "jax"
    sharding = None
    if isinstance(leaf, bool | int | float):
        kind, impl = kind_of_number(leaf), None
    elif isinstance(leaf, np.ndarray | np.generic):
        kind, impl = "numpy", None
    else:
        sharding = getattr(leaf, "sharding", None) or _stored_sharding(record)
        if impl is not None and isinstance(sharding, jax.sharding.NamedSharding):
            # The key data has trailing dimensions of its own, which are never split.
            spec = jax.sharding.PartitionSpec(*sharding.spec, *([None] * (len(leaf.shape) - len(sharding.spec))))
            sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    shape, dtype = record.shape, record.dtype
    if (form := forms.get(about := (kind, shape, dtype, sharding, impl))) is None:
        boxes = boxes_needed(sharding, shape, process)
        form = Form(kind=kind, shape=shape, dtype=dtype, sharding=sharding, boxes=boxes, key_impl=impl)
        forms[about] = form
    return form


def _same(leaf: Any, record: LeafRecord) -> bool:
    if isinstance(leaf, bool | int | float):
        return record.kind == kind_of_number(leaf)
    impl = record.extra.get("key_impl")
    if _is_typed_key(leaf):
        return impl is not None and leaf.dtype == _key_of(impl)[0] and tuple(leaf.shape) == key_shape(record)
    return is_plain_match(leaf, record)


def is_plain_match(leaf: Any, record: LeafRecord) -> bool:
    """Whether a stored leaf is not a typed key, and has the shape and dtype of `leaf`."""
    shape, dtype = record.shape, record.dtype
    return "key_impl" not in record.extra and tuple(leaf.shape) == shape and _name_of(leaf.dtype) == dtype


@lru_cache
def _name_of(dtype: Any) -> str:
    """NumPy works the name out each time it is asked."""
    return dtype.name


@lru_cache
def _key_of(impl: str) -> tuple[Any, int]:
    """The dtype of keys of an implementation, and the dimensions of their data. Makes no key: a transfer guard would
    refuse it."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return key.dtype, jax.eval_shape(jax.random.key_data, key).ndim


def _is_typed_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _describe_stored(record: LeafRecord, leaf: Any) -> str:
    """In the terms of the template's leaf: next to typed keys without the dimensions of their data."""
    if "key_impl" in record.extra and _is_typed_key(leaf):
        return describe(_key_of(record.extra["key_impl"])[0].name, key_shape(record))
    return record.describe()


def _describe_abstract(leaf: Any) -> str:
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    dtype = getattr(leaf, "dtype", None)
    return describe(dtype.name, leaf.shape) if dtype is not None else type(leaf).__name__


def _abstract_leaf(leaf: LeafRecord) -> Any:
    if leaf.kind != "jax":
        block = np.empty(leaf.shape, np.dtype(leaf.dtype))
        return block if leaf.kind == "numpy" else block.item()
    if "key_impl" in leaf.extra:
        return abstract_keys(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=_stored_sharding(leaf))


def _stored_sharding(leaf: LeafRecord) -> jax.sharding.Sharding:
    sharding = sharding_of_text(leaf.extra.get("sharding", "{}"))
    return sharding if sharding is not None and on_every_process(sharding) else anywhere()


def _with_sequences(root: Any, keys: Mapping[tuple[str, ...], str]) -> Any:
    """Turns the levels that were sequences back into lists."""
    kinds = {path[:depth]: letters[depth] for path, letters in keys.items() for depth in range(len(path))}

    def rebuild(node: Any, at: tuple[str, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        children = {name: rebuild(child, (*at, name)) for name, child in node.items()}
        if kinds.get(at) == "s":
            return [children[name] for name in sorted(children, key=int)]
        return children

    return rebuild(root, ())

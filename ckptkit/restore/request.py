"""The request of a restore in Orbax's terms, and its comparison with a stored tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.host_shards import TextLeaf, is_text_leaf, with_plain_text
from ckptkit.durable.orbax.manager import DEFAULT_ITEM, StockManager
from ckptkit.durable.orbax.v1 import TreeRestore
from ckptkit.errors import ItemNotFoundError, TreeMismatchError
from ckptkit.model.manifest import STRUCTURE, LeafRecord, Manifest, merged_leaves
from ckptkit.restore.tree import abstract_keys, abstract_of, is_plain_match, key_shape, sharding_of_keys
from ckptkit.snapshot.describe import LeafPath, kind_of_number, leaves_by_path, names_of
from ckptkit.snapshot.empty_nodes import Empty, empties_of
from ckptkit.snapshot.small_items import gives_back

Finish = Callable[[Any], Any]  # what is made of a leaf that was read


class Choice(Protocol):
    """A part of a save that is chosen once its leaves are known: the same part whenever it is asked."""

    def choose(self, stored: Mapping[str, Sequence[LeafRecord]]) -> Mapping[str, Any]:
        """From the stored leaves, by item, to nested dicts of those that are wanted."""
        ...

    def read_stock(self, step_url: str) -> dict[str, Any]:
        """The part of a step that stock Orbax wrote, by item. Raises Orbax's errors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """The request. `args` None means every item as it was saved, or the part of `choice`; None for one item means as it
    was saved."""

    args: Mapping[str, Any] | None
    default_item: bool | None  # None: as the step was saved
    named: bool = False  # the manager's items have names since an earlier call: one of them may be called `default`
    choice: Choice | None = None

    def check_mode(self, held: set[str]) -> None:
        """Raises ValueError, as Orbax does, where named items are asked of a step of an unnamed one, or the reverse."""
        if self.default_item is None or not held or self.default_item == (DEFAULT_ITEM in held) or self.named:
            return
        if self.default_item:
            raise ValueError(
                "Must provide `args` of type `Composite` when dealing with multiple checkpointable objects."
            )
        raise ValueError(
            "Cannot provide `args` of type `Composite` when dealing with a single, unnamed (default) checkpointable "
            "object."
        )


def request_of(stock: StockManager, items: Any, restore_kwargs: Any, args: Any) -> RestoreRequest:
    """The request in the arguments of `restore`; raises Orbax's errors for arguments that do not go together."""
    by_name = stock.restore_args(items, restore_kwargs, args)
    default_item = stock.default_item
    named = default_item is False
    if by_name is not None:
        if default_item is None:
            default_item = DEFAULT_ITEM in by_name and not isinstance(args, ocp.args.Composite)
        for name, arg in by_name.items():
            stock.handler(name, arg)
    return RestoreRequest(args=by_name, default_item=default_item, named=named)


@dataclass(frozen=True, slots=True)
class PartialTree:
    """Some leaves of a stored tree, as nested dicts; the others are left where they are."""

    tree: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRequest:
    """The request to one stored save: trees and small items that ckptkit returns, and items that only Orbax can."""

    trees: Mapping[str, Any] = field(default_factory=dict)  # item -> Orbax's argument, or None
    inline: Mapping[str, Any] = field(default_factory=dict)
    orbax: Mapping[str, Any] = field(default_factory=dict)  # None: as it was saved


def sorted_request(
    wanted: RestoreRequest, manifests: Sequence[Manifest], *, where: str, unproven: Sequence[str] = ()
) -> SortedRequest:
    """Sorts what is wanted by who can give it; raises `ItemNotFoundError` for an item that the save does not hold.

    `unproven` are the items of the step that no manifest describes.
    """
    trees = {name for manifest in manifests for name in manifest.trees}
    inline = {n: s["kind"] for m in manifests for n, s in m.inline.items() if s["kind"] != STRUCTURE}
    held = trees | set(inline) | set(unproven)
    wanted.check_mode(held)
    if wanted.choice is not None:
        chosen = wanted.choice.choose({item: merged_leaves(manifests, item) for item in sorted(trees)})
        return SortedRequest(trees={item: PartialTree(tree) for item, tree in chosen.items()})
    if wanted.args is None:
        names = {DEFAULT_ITEM} if wanted.default_item else held
        return SortedRequest(
            trees=dict.fromkeys(sorted(trees & names)),
            inline={n: None for n in sorted(inline) if n in names},
            orbax={n: None for n in unproven if n in names},
        )
    sorted_out: dict[str, dict[str, Any]] = {"trees": {}, "inline": {}, "orbax": {}}
    for name, arg in wanted.args.items():
        if name not in held:
            raise ItemNotFoundError(
                f'Item "{name}" was not found in {where}. Available items: {sorted(held)}', path=where
            )
        if name in trees:
            sorted_out["trees" if _gives_back_tree(arg) else "orbax"][name] = arg
        elif name in inline:
            sorted_out["inline" if gives_back(inline[name], arg) else "orbax"][name] = arg
        else:
            sorted_out["orbax"][name] = arg
    return SortedRequest(**sorted_out)


def stored_tree(manifests: Sequence[Manifest], item: str, stored: Sequence[LeafRecord]) -> Any:
    """The abstract tree of a saved array item, nested dicts and lists, from its merged leaves; text is in it as
    `TextLeaf`.

    Cost: 15 microseconds per leaf.
    """
    return abstract_of(stored, _nodes_without_leaves(manifests, item))


def _nodes_without_leaves(manifests: Sequence[Manifest], item: str) -> list[Empty]:
    recorded = (m.inline[item]["value"] for m in manifests if m.inline.get(item, {}).get("kind") == STRUCTURE)
    return empties_of(next(recorded, []))


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAnswer:
    """How a tree is given back: what to place, and what is then made of each placed leaf."""

    wanted: Sequence[tuple[LeafPath, Any]]  # the leaves to read, with the shapes and dtypes that are stored
    leaves: Sequence[LeafRecord]  # of the stored ones, those that have to be in `wanted`
    finishes: Sequence[Finish | None]  # one for each of `wanted`
    tree: Any  # what is returned: a tree whose leaves are indices into `wanted`, or `...`

    def finished(self, placed: Iterable[Any]) -> Any:
        """The tree, from the placed leaves of `wanted`, taken one after another."""
        made = [finish(leaf) if finish else leaf for finish, leaf in zip(self.finishes, placed, strict=True)]
        return with_plain_text(self.tree, lambda at: made[at] if isinstance(at, int) else at)


def tree_answer(arg: Any, manifests: Sequence[Manifest], item: str, *, step: int, where: str) -> TreeAnswer:
    """The request of `arg` to a stored tree. Raises `TreeMismatchError` with all differences."""
    stored = merged_leaves(manifests, item)
    texts = {path: node for path, _, node in _nodes_without_leaves(manifests, item) if is_text_leaf(node)}
    if texts and getattr(arg, "item", None) is not None:
        arg = _with_texts(arg, texts, item, step=step, where=where)
    if isinstance(arg, PartialTree):
        picked = {path for path, _ in leaves_by_path(arg.tree)}
        return _plainly(arg.tree, [leaf for leaf in stored if leaf.path in picked])
    if isinstance(arg, ocp.args.PyTreeRestore) and not (arg.item is None and arg.restore_args is None):
        whole = stored_tree(manifests, item, stored)
        return _pytree_answer(arg, stored, whole, item, step=step, where=where)
    wanted = getattr(arg, "item", None)
    if wanted is None:
        return _plainly(stored_tree(manifests, item, stored), stored)
    if isinstance(arg, TreeRestore):
        whole = stored_tree(manifests, item, stored)
        return _as_abstract(wanted, stored, whole, item, step=step, where=where, partial=arg.partial)
    return _as_templates(wanted, stored, item, step=step, where=where)


def plain_answer(stored: Sequence[LeafRecord]) -> TreeAnswer:
    """These leaves as they were saved."""
    return _plainly(abstract_of(stored), stored)


def _with_texts(arg: Any, texts: Mapping[tuple[str, ...], TextLeaf], item: str, *, step: int, where: str) -> Any:
    """`arg` with the stored text in place of what it has there, as Orbax gives it back; None and `...` stay.

    Raises `TreeMismatchError` for a text that is not asked for, and in the newer API for one asked for as an array.
    """
    asked: set[tuple[str, ...]] = set()
    differences: list[str] = []

    def text_or_leaf(keypath: Any, leaf: Any) -> Any:
        path = names_of(keypath)
        asked.add(path)
        if path not in texts or leaf is None or leaf is ...:
            return leaf
        if isinstance(arg, TreeRestore) and not isinstance(leaf, str) and leaf is not str:
            kind = leaf.__name__ if isinstance(leaf, type) else type(leaf).__name__
            differences.append(f"{item}:{'.'.join(path)} is text on disk, {kind} in abstract_state")
        return texts[path]

    tree = jax.tree_util.tree_map_with_path(text_or_leaf, arg.item, is_leaf=lambda leaf: leaf is None)
    partial = getattr(arg, "partial", getattr(arg, "partial_restore", False))
    missing = [] if partial else sorted(set(texts) - asked)
    differences += [f"{item}:{'.'.join(path)} is text on disk, and not in the restore item" for path in missing]
    if differences:
        raise TreeMismatchError(differences, step=step, where=where)
    return replace(arg, item=tree)


def _gives_back_tree(arg: Any) -> bool:
    """Whether we give a tree back as `arg` asks; transformations, padding and layouts are Orbax's."""
    if arg is None:
        return True
    if isinstance(arg, ocp.args.StandardRestore):
        return arg.strict and not arg.support_layout and arg.fallback_sharding is None
    if not isinstance(arg, ocp.args.PyTreeRestore) or arg.transforms is not None or arg.legacy_transform_fn is not None:
        return False
    wishes = jax.tree.leaves(arg.restore_args, is_leaf=lambda node: isinstance(node, ocp.RestoreArgs))
    return all(wish is ... or (isinstance(wish, ocp.RestoreArgs) and _plain_wish(wish)) for wish in wishes)


def _plain_wish(wish: Any) -> bool:
    """Whether no padding, cutting or other object is asked for. With `strict` a shape has to be the stored one."""
    kind = wish.restore_type
    value = isinstance(kind, type) and issubclass(kind, bool | int | float | np.number | str)
    return (value or kind in (None, jax.Array, np.ndarray, EllipsisType)) and getattr(wish, "strict", True)


def _other_shape(wish: Any, record: LeafRecord) -> tuple[int, ...] | None:
    """The shape that a wish names, where it is not that of the stored leaf; for typed keys, that of the key data."""
    for shape in (getattr(wish, "global_shape", None), getattr(wish, "shape", None)):
        if shape is not None and tuple(shape) not in (record.shape, key_shape(record)):
            return tuple(shape)
    return None


def _plainly(abstract: Any, stored: Sequence[LeafRecord]) -> TreeAnswer:
    wanted = leaves_by_path(abstract)
    tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract), range(len(wanted)))
    return TreeAnswer(wanted=wanted, leaves=stored, finishes=[None] * len(wanted), tree=tree)


def _as_templates(template: Any, stored: Sequence[LeafRecord], item: str, *, step: int, where: str) -> TreeAnswer:
    """As Orbax's StandardRestore: each leaf becomes what the template's is; a None there is left out.

    Raises `TreeMismatchError` for `...`, which Orbax refuses there, too: no other source of the step could give it.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(template, is_leaf=lambda leaf: leaf is None)
    placeholders = [".".join(names_of(keypath)) for keypath, leaf in flat if leaf is ...]
    if placeholders:
        why = "is `...` in abstract_state: leave it out with PyTreeRestore, or None"
        raise TreeMismatchError([f"{item}:{name} {why}" for name in placeholders], step=step, where=where)
    by_path = {record.path: record for record in stored}
    wanted: list[tuple[LeafPath, Any]] = []
    finishes: list[Finish | None] = []
    numbered: list[int | None] = []
    for keypath, leaf in flat:
        path = names_of(keypath)
        if leaf is None:
            by_path.pop(path, None)
            numbered.append(None)
            continue
        record, finish = by_path.get(path), None
        if record is not None and not _is_as_saved(leaf, record):
            leaf, finish = _as_template(leaf, record)
        numbered.append(len(wanted))
        wanted.append((path, leaf))
        finishes.append(finish)
    tree = jax.tree_util.tree_unflatten(treedef, numbered)
    return TreeAnswer(wanted=wanted, leaves=list(by_path.values()), finishes=finishes, tree=tree)


def _as_abstract(
    wanted: Any, stored: Sequence[LeafRecord], whole: Any, item: str, *, step: int, where: str, partial: bool
) -> TreeAnswer:
    """As in Orbax's newer API: a type sets the type of a leaf, `...` leaves the leaf in storage; with `partial`, leaves
    that are not in the tree stay there too."""
    as_saved = dict(leaves_by_path(whole))
    of_types: dict[tuple[str, ...], Finish | None] = {}

    def template(keypath: Any, leaf: Any) -> Any:
        path = names_of(keypath)
        if not isinstance(leaf, type) or path not in as_saved:
            return None if leaf is ... else leaf
        target, of_types[path] = _wished(as_saved[path], ocp.RestoreArgs(restore_type=_restored_type(leaf)))
        return target

    templates = jax.tree_util.tree_map_with_path(template, wanted)
    paths = [path for path, _ in leaves_by_path(templates)]
    chosen = [record for record in stored if not partial or record.path in set(paths)]
    answer = _as_templates(templates, chosen, item, step=step, where=where)
    finishes = [of_types.get(path, finish) for path, finish in zip(paths, answer.finishes, strict=True)]
    numbers = iter(range(len(paths)))
    tree = jax.tree.map(lambda leaf: ... if leaf is ... else next(numbers), wanted)
    return replace(answer, finishes=finishes, tree=tree)


def _restored_type(kind: type) -> Any:
    """The result of a leaf whose abstract leaf is a type."""
    if issubclass(kind, bool | int | float | np.number):
        return kind
    return np.ndarray if issubclass(kind, np.ndarray) else jax.Array


def _is_as_saved(template: Any, record: LeafRecord) -> bool:
    """Whether it asks for what was saved: most templates do."""
    return isinstance(template, jax.ShapeDtypeStruct) and record.kind == "jax" and is_plain_match(template, record)


def _as_template(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    """The read of a stored leaf in its stored form, and the conversion to the form of `template`.

    Typed keys are represented by their key data, as in Orbax. A value that cannot be cast (other shape, an array for a
    number) is returned unchanged: the comparison with the stored leaf names it. Raises ValueError for a template that
    is neither an array nor a number.
    """
    if isinstance(template, bool | int | float):
        return _cast_number(template, record)
    if not hasattr(template, "dtype") or not hasattr(template, "shape"):
        raise ValueError(
            f"Unsupported type: {type(template)} for leaf {record.name}: give an array, a jax.ShapeDtypeStruct "
            "or a number"
        )
    if isinstance(template, np.generic) or _is_key(template.dtype):
        return template, None
    if "key_impl" in record.extra:
        is_data = tuple(template.shape) == record.shape and template.dtype == record.dtype
        return abstract_keys(record, getattr(template, "sharding", None)) if is_data else template, None
    if tuple(template.shape) != record.shape:
        return template, None
    if isinstance(template, np.ndarray) or (getattr(template, "sharding", None) is None and record.kind != "jax"):
        return _cast_on_host(template, record)
    return _cast_on_devices(template, record)


def _cast_number(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    kind = type(template)
    if record.shape or "key_impl" in record.extra or record.kind == kind_of_number(template):
        return template, None
    return np.empty((), np.dtype(record.dtype)), lambda block: kind(block.item())


def _cast_on_host(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    block = np.empty(record.shape, np.dtype(record.dtype))
    return block, None if template.dtype == block.dtype else lambda stored: stored.astype(template.dtype)


def _cast_on_devices(template: Any, record: LeafRecord) -> tuple[Any, Finish | None]:
    stored, wanted = np.dtype(record.dtype), np.dtype(template.dtype)
    if stored == wanted:
        return template, None
    sharding = template.sharding
    if record.kind == "jax":
        return jax.ShapeDtypeStruct(record.shape, stored, sharding=sharding), lambda array: array.astype(wanted)

    def place(block: np.ndarray) -> jax.Array:
        # Cast before it is placed, for devices may not know the stored dtype; one block per device, for one that is
        # donated must not take another's memory with it.
        cast = np.asarray(block).astype(wanted)
        return jax.make_array_from_callback(cast.shape, sharding, lambda index: cast[index].copy())

    return np.empty(record.shape, stored), place


def _is_key(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _pytree_answer(
    arg: Any, stored: Sequence[LeafRecord], whole: Any, item: str, *, step: int, where: str
) -> TreeAnswer:
    """As Orbax's PyTreeRestore: `item` gives the structure alone, `restore_args` sets the form of each leaf."""
    as_saved = dict(leaves_by_path(whole))
    shape = arg.item if arg.item is not None else whole
    flat, treedef = jax.tree_util.tree_flatten_with_path(shape)
    wishes: list[Any] = [None] * len(flat)
    if arg.restore_args is not None:
        by_path = arg.partial_restore or any(map(is_text_leaf, jax.tree.leaves(shape, is_leaf=is_text_leaf)))
        wishes = _wishes_by_path(arg, flat) if by_path else treedef.flatten_up_to(arg.restore_args)
    wanted: list[tuple[LeafPath, Any]] = []
    finishes: list[Finish | None] = []
    numbered: list[Any] = []
    differences, left_out = [], []
    by_path = {record.path: record for record in stored}
    for (keypath, leaf), wish in zip(flat, wishes, strict=True):
        path = names_of(keypath)
        if leaf is ...:
            numbered.append(...)
            left_out.append(path)
        elif path not in as_saved:
            differences.append(f"{item}:{'.'.join(path)} is in the restore item, but not on disk")
        else:
            numbered.append(len(wanted))
            if (shape := _other_shape(wish, by_path[path])) is not None:
                name = f"{item}:{'.'.join(path)}"
                differences.append(f"{name} is {by_path[path].describe()} on disk, of shape {shape} in restore_args")
            target, finish = _wished(as_saved[path], wish)
            wanted.append((path, target))
            finishes.append(finish)
    asked = {path for path, _ in wanted}
    if not arg.partial_restore:
        missing = [path for path in as_saved if path not in asked and path not in left_out]
        differences += [f"{item}:{'.'.join(path)} is on disk, but not in the restore item" for path in missing]
    if differences:
        raise TreeMismatchError(differences, step=step, where=where)
    tree = jax.tree_util.tree_unflatten(treedef, numbered)
    return TreeAnswer(wanted=wanted, leaves=[by_path[path] for path, _ in wanted], finishes=finishes, tree=tree)


def _wishes_by_path(arg: Any, flat: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The wishes for the leaves of a tree: `restore_args` may be those of a larger one, and have some for text."""
    given, _ = jax.tree_util.tree_flatten_with_path(
        arg.restore_args, is_leaf=lambda node: isinstance(node, ocp.RestoreArgs)
    )
    by_path = {names_of(keypath): wish for keypath, wish in given}
    return [by_path.get(names_of(keypath)) for keypath, _ in flat]


def _wished(saved: Any, wish: Any) -> tuple[Any, Finish | None]:
    """The placement and conversion of a stored leaf, for one `RestoreArgs`. Typed keys are never cast."""
    if wish is None or wish is ...:
        return saved, None
    if hasattr(saved, "dtype") and _is_key(saved.dtype):
        return saved.update(sharding=sharding_of_keys(_sharding(wish), saved.shape) or saved.sharding), None
    kind, dtype = wish.restore_type, wish.dtype
    if kind is None and isinstance(wish, ocp.ArrayRestoreArgs):
        kind = jax.Array
    on_device = kind is jax.Array or (kind is None and isinstance(saved, jax.ShapeDtypeStruct))
    stored = saved if hasattr(saved, "dtype") else np.asarray(saved)
    shape, stored_dtype = stored.shape, stored.dtype
    if on_device:
        sharding = _sharding(wish) or getattr(saved, "sharding", None)
        sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.ShapeDtypeStruct(shape, stored_dtype, sharding=sharding)
        return target, None if dtype is None else lambda leaf: leaf.astype(dtype)
    if kind is None and isinstance(saved, bool | int | float):
        return saved, None if dtype is None else lambda leaf: np.asarray(leaf).astype(dtype).item()
    target = np.empty(shape, stored_dtype)
    if isinstance(kind, type) and issubclass(kind, bool | int | float | np.number):
        return target, lambda leaf: kind(np.asarray(leaf).astype(dtype or leaf.dtype).item())
    return target, None if dtype is None else lambda leaf: leaf.astype(dtype)


def _sharding(wish: Any) -> Any:
    sharding = getattr(wish, "sharding", None)
    if sharding is not None:
        return sharding if isinstance(sharding, jax.sharding.Sharding) else sharding.to_jax_sharding()
    mesh = getattr(wish, "mesh", None)
    if mesh is not None and getattr(wish, "mesh_axes", None) is not None:
        return jax.sharding.NamedSharding(mesh, wish.mesh_axes)
    return None

"""Rules that turn the tensors of one checkpoint into those of another: rename, split, stack, transpose, merge, cast.

Nothing is computed when rules are applied: a mapped tensor reads the boxes of its sources that a box of it needs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np

from ckptkit.conversion.casting import Cast
from ckptkit.conversion.leaf_patterns import Rename, matches, short_names
from ckptkit.conversion.scales import scaled_text
from ckptkit.durable.lifecycle.places import local_kind, nothing_at, require_regular
from ckptkit.errors import CheckpointError, StepNotFoundError
from ckptkit.formats.dtypes import plain_dtype
from ckptkit.formats.tensors import Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.util.words import first_of

_T = TypeVar("_T")
_WHAT_A_RULE_HAS = "a rule has `from` and `to`, or `from` and `drop = true`"

Tensors = Mapping[str, Tensor]

_PART = 1 << 20  # elements that are made wide at once


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRule:
    """One `[[rule]]` of a file. `old` and `new` have one name, or several on one side of a split or a stack.

    Applied in this order. `split` cuts an axis into its indexes (the axis goes away). `divide` makes two axes of one
    (with the size of the inner one). `transpose` follows. `merge` joins an axis with the next. `stack` joins the
    sources along a new axis.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    split: int | None = None
    divide: tuple[int, int] | None = None
    transpose: tuple[int, ...] | None = None
    merge: int | None = None
    stack: int | None = None
    drop: bool = False

    def __post_init__(self) -> None:
        several = (len(self.old) > 1, len(self.new) > 1)
        if several != (self.stack is not None, self.split is not None):
            raise ValueError(
                f"rule for {self.old[0]}: several names in `from` need `stack`, several in `to` need `split`"
            )
        if self.drop != (not self.new) or not self.old:
            raise ValueError(_WHAT_A_RULE_HAS)
        if not self.drop:
            for old in self.old:
                for new in self.new:
                    Rename(old, new)


def read_rules(path: str) -> list[MapRule]:
    """The rules of a TOML file. Raises `CheckpointError` saying what is wrong in it."""
    return read_rule_tables(path, _rule)


def read_rule_tables(path: str, rule: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """The results of `rule` for each `[[rule]]` of a TOML file. Raises its errors as `CheckpointError` with the path,
    and `StepNotFoundError` if the file does not exist."""
    if local_kind(path) is None:
        raise nothing_at(path, "there is no such file of rules; check the path")
    try:
        require_regular(path)
        described = tomllib.loads(Path(path).read_text())
        tables = described.get("rule")
        if set(described) - {"rule"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise ValueError("a rule file has [[rule]] tables and nothing else")
        return [rule(table) for table in tables]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}", path=path) from error


def _rule(table: dict[str, Any]) -> MapRule:
    unknown = set(table) - {"from", "to", "split", "divide", "transpose", "merge", "stack", "drop"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is not a key of a rule")
    if "from" not in table:
        raise ValueError(_WHAT_A_RULE_HAS)
    numbers = {key: table.get(key) for key in ("split", "merge", "stack")}
    lists = {key: tuple(table[key]) if key in table else None for key in ("divide", "transpose")}
    flat = [*(v for v in numbers.values() if v is not None), *(n for v in lists.values() for n in v or ())]
    if any(type(number) is not int or number < 0 for number in flat) or len(lists["divide"] or (0, 0)) != 2:
        raise ValueError(f"the axes of the rule for {table['from']} are not whole numbers")
    divide: Any = lists["divide"]
    return MapRule(
        old=_names(table["from"]),
        new=_names(table.get("to", [])),
        drop=table.get("drop", False),
        divide=divide,
        transpose=lists["transpose"],
        **numbers,
    )


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{value!r} is neither a name of a leaf nor a list of names")
    return tuple(names)


def mapped(tensors: Tensors, rules: Sequence[MapRule]) -> dict[str, Tensor]:
    """The tensors after the rules; the first rule that matches a name takes it, what no rule matches stays as it is.

    Raises `StepNotFoundError` for a rule that matches nothing, `CheckpointError` for one that does not fit a shape,
    gives a name twice, or stacks a leaf that was taken before.
    """
    if not rules:
        return dict(tensors)
    made: dict[str, Tensor] = {}
    taken: set[str] = set()
    names = LeafNames(tensors)
    for rule in rules:
        firsts = {name: form for name, form in names.matching(rule.old[0]).items() if name not in taken}
        if not firsts:
            raise StepNotFoundError(
                f"the rule for {rule.old[0]} matches no leaf; the leaves are {first_of(sorted(tensors), 5)}"
            )
        for form in firsts.values():
            forms = [Rename(rule.old[0], old).target_of(form) or "" for old in rule.old]
            stored = [name for each in forms if (name := names.stored(each)) is not None]
            if len(stored) < len(forms):
                missing = next(each for each in forms if names.stored(each) is None)
                raise CheckpointError(f"the rule for {rule.old[0]} needs leaf {missing}, which does not exist")
            if again := [name for at, name in enumerate(stored) if name in taken or name in stored[:at]]:
                raise CheckpointError(f"the rule for {rule.old[0]} needs leaf {again[0]}, which a rule has used before")
            taken.update(stored)
            for index, new in enumerate(rule.new):
                target = Rename(rule.old[0], new).target_of(form) or ""
                _add(made, target, _changed(rule, [tensors[name] for name in stored], index, target))
    for name, tensor in tensors.items():
        if name not in taken:
            _require_new(made, name)
            made[name] = tensor  # with its path in its item, so that it keeps all of its names
    return made


def cast(tensors: Tensors, casts: Iterable[tuple[str, str]], *, advice: str = "") -> dict[str, Tensor]:
    """The tensors with those that match a pattern in another dtype (`*.kernel`, `bfloat16`); the last match wins.

    Rounds once to nearest even. PRNG keys, booleans, integers and complex numbers stay as they are. Raises
    `CheckpointError` for a dtype that is not one of floats, and for leaves that have scales (with the `advice` for
    them), `StepNotFoundError` for a pattern that matches no leaf.
    """
    made = dict(tensors)
    for pattern, word in casts:
        try:
            dtype = plain_dtype(word)
        except ValueError as error:
            raise CheckpointError(f"--dtype {pattern}={word}: {error}") from error
        if not (dtype.kind in "fc" or "float" in dtype.name):
            raise CheckpointError(
                f"--dtype {pattern}={word}: {dtype} is not a dtype of floats, and most values would be lost; give "
                "--quantize int8 or fp8 for weights with scales"
            )
        chosen = LeafNames(made).matching(pattern)
        if not chosen:
            raise StepNotFoundError(
                f"--dtype {pattern}={word} matches no leaf; the leaves are {first_of(sorted(made), 5)}"
            )
        for name in chosen:
            tensor = tensors[name]
            real = tensor.dtype.kind != "c"  # a cast would drop the imaginary part
            if is_floating(tensor) and real:
                leaf = replace(tensor.leaf, dtype=dtype.name)
                made[name] = Tensor(item=tensor.item, leaf=leaf, fetch=Cast(tensor, dtype), sources=(tensor,))
    scaled = [text for name in made if isinstance(made[name].fetch, Cast) and (text := scaled_text(name, tensors))]
    if scaled:
        raise CheckpointError(f"--dtype: {first_of(scaled, 5)}. A cast would leave out the scales. {advice}".rstrip())
    return made


def is_floating(tensor: Tensor) -> bool:
    """Whether its elements are floating-point or complex numbers; those of keys and of small integers are not."""
    small = tensor.dtype.isbuiltin == 2 and "float" in tensor.dtype.name
    return tensor.leaf.key_impl is None and (tensor.dtype.kind in "fc" or small)


def _require_new(made: Mapping[str, Tensor], name: str) -> None:
    if name in made:
        raise CheckpointError(f"the rules give two leaves the name {name}")


def _add(made: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    _require_new(made, name)
    path = tensor.leaf.path if tensor.name == name else tuple(name.split("."))
    made[name] = replace(tensor, leaf=replace(tensor.leaf, path=path))


def _changed(rule: MapRule, sources: Sequence[Tensor], index: int, name: str) -> Tensor:
    try:
        changes = (rule.split, rule.divide, rule.transpose, rule.merge, rule.stack)
        if any(each is not None for each in changes) and any(source.leaf.key_impl for source in sources):
            raise ValueError("it holds PRNG keys, which would become plain integers; they can only be renamed")
        if rule.split is not None:
            sources = [_split(source, rule.split, index, len(rule.new)) for source in sources]
        if rule.divide is not None:
            sources = [_divided(source, *rule.divide) for source in sources]
        if rule.transpose is not None:
            sources = [_transposed(source, rule.transpose) for source in sources]
        if rule.merge is not None:
            sources = [_merged(source, rule.merge) for source in sources]
        return sources[0] if rule.stack is None else _stacked(sources, rule.stack)
    except (ValueError, IndexError) as error:
        why = "it has no such axis" if isinstance(error, IndexError) else error
        raise CheckpointError(f"the rule for {name} does not fit {rule.old[0]}, {sources[0].shape}: {why}") from error


def _of(
    sources: Sequence[Tensor],
    shape: Sequence[int],
    fetch: Callable[[Box], np.ndarray],
    cell: Sequence[int] | None = None,
) -> Tensor:
    """A tensor computed from `sources`, each of the same shape and dtype. `cell`: the box that one chunk of a source
    becomes, where it is a box."""
    first = sources[0]
    leaf = LeafInfo(
        path=first.leaf.path,
        kind="tensor",
        dtype=first.leaf.dtype,
        shape=tuple(shape),
        cell=None if cell is None else tuple(cell),
    )
    return Tensor(item=first.item, leaf=leaf, fetch=fetch, sources=tuple(sources))


def _split(source: Tensor, axis: int, index: int, count: int) -> Tensor:
    if source.shape[axis] != count:
        raise ValueError(f"axis {axis} is split into {count} and has {source.shape[axis]}")

    def fetch(box: Box) -> np.ndarray:
        wanted = Box(_put(box.start, axis, index), _put(box.stop, axis, index + 1))
        return source.read(wanted).reshape(box.shape)

    cell = source.leaf.cell
    return _of([source], _without(source.shape, axis), fetch, None if cell is None else _without(cell, axis))


def _stacked(sources: Sequence[Tensor], axis: int) -> Tensor:
    first = sources[0]
    if any((each.shape, each.dtype) != (first.shape, first.dtype) for each in sources):
        raise ValueError("the stacked leaves differ in shape or dtype")
    if axis > len(first.shape):
        raise ValueError(f"axis {axis} does not exist")

    def fetch(box: Box) -> np.ndarray:
        inner = Box(_without(box.start, axis), _without(box.stop, axis))
        made = np.empty(box.shape, first.dtype)
        for row, at in enumerate(range(box.start[axis], box.stop[axis])):
            made[(*[slice(None)] * axis, row)] = sources[at].read(inner)
        return made

    cell = first.leaf.cell
    return _of(sources, _put(first.shape, axis, len(sources)), fetch, None if cell is None else _put(cell, axis, 1))


def _transposed(source: Tensor, axes: tuple[int, ...]) -> Tensor:
    if sorted(axes) != list(range(len(source.shape))):
        raise ValueError(f"{list(axes)} is not an order of its axes")
    back = np.argsort(axes)

    def fetch(box: Box) -> np.ndarray:
        wanted = Box(tuple(box.start[at] for at in back), tuple(box.stop[at] for at in back))
        return source.read(wanted).transpose(axes)

    cell = source.leaf.cell
    return _of([source], [source.shape[at] for at in axes], fetch, None if cell is None else [cell[at] for at in axes])


def _merged(source: Tensor, axis: int) -> Tensor:
    """Axes `axis` and `axis + 1` as one. Of a row that a box only touches, no more than that is read."""
    inner = source.shape[axis + 1]

    def fetch(box: Box) -> np.ndarray:
        made = np.empty(box.shape, source.dtype)
        for low, high, start, stop in _rows(box.start[axis], box.stop[axis], inner):
            wanted = Box(
                (*box.start[:axis], low, start, *box.start[axis + 1 :]),
                (*box.stop[:axis], high, stop, *box.stop[axis + 1 :]),
            )
            begin, elements = low * inner + start - box.start[axis], (high - low) * (stop - start)
            of_box = (*[slice(None)] * axis, slice(begin, begin + elements))
            part = source.read(wanted)
            made[of_box] = part.reshape((*part.shape[:axis], elements, *part.shape[axis + 2 :]))
        return made

    shape = (*source.shape[:axis], source.shape[axis] * inner, *source.shape[axis + 2 :])
    cell = source.leaf.cell
    whole_rows = cell is not None and cell[axis + 1] >= inner
    return _of(
        [source], shape, fetch, (*cell[:axis], cell[axis] * inner, *cell[axis + 2 :]) if cell and whole_rows else None
    )


def _rows(start: int, stop: int, inner: int) -> Iterator[tuple[int, int, int, int]]:
    """The elements from `start` to `stop` of rows of `inner`, as rows and a part of each: the end of one row, whole
    rows, and the begin of one."""
    while start < stop:
        row, at = divmod(start, inner)
        rows = 0 if at else (stop - start) // inner
        end = inner if rows else min(inner, at + stop - start)
        yield row, row + max(1, rows), at, end
        start += max(1, rows) * (end - at)


def _divided(source: Tensor, axis: int, inner: int) -> Tensor:
    """Axis `axis` as two, the inner one of size `inner`."""
    if inner < 1 or source.shape[axis] % inner:
        raise ValueError(f"axis {axis} has {source.shape[axis]}, which {inner} does not divide")

    def fetch(box: Box) -> np.ndarray:
        made = np.empty(box.shape, source.dtype)
        low, high = box.start[axis + 1], box.stop[axis + 1]
        at_once = box.shape[axis] if high - low == inner else 1  # rows: of parts of them one
        for row in range(box.start[axis], box.stop[axis], max(1, at_once)):
            wanted = Box(
                (*box.start[:axis], row * inner + low, *box.start[axis + 2 :]),
                (*box.stop[:axis], (row + at_once - 1) * inner + high, *box.stop[axis + 2 :]),
            )
            of_box = (*[slice(None)] * axis, slice(row - box.start[axis], row - box.start[axis] + at_once))
            part = source.read(wanted)
            made[of_box] = part.reshape((*part.shape[:axis], at_once, high - low, *part.shape[axis + 1 :]))
        return made

    outer = source.shape[axis] // inner
    cell = source.leaf.cell
    whole_rows = cell is not None and cell[axis] % inner == 0
    return _of(
        [source],
        (*source.shape[:axis], outer, inner, *source.shape[axis + 1 :]),
        fetch,
        (*cell[:axis], cell[axis] // inner, inner, *cell[axis + 1 :]) if cell and whole_rows else None,
    )


def add_into(total: np.ndarray, found: np.ndarray) -> None:
    """Adds a block that may be of a narrower dtype, made wide part by part."""
    flat, other = total.reshape(-1), found.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, other.size, _PART):
            flat[at : at + _PART] += other[at : at + _PART].astype(total.dtype)


def _put(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis:])


def _without(values: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :])


@final
class LeafNames:
    """The names of tensors: as stored, without NNX's last `value`, and either of them after `item:`, as `inspect`
    prints it. Where no leaf has such a name, a name without its item is one, if only one item has it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._items = {name: tensor.item for name, tensor in tensors.items()}
        self._forms: dict[str, tuple[str, ...]] = {}
        self._without_item: dict[str, tuple[str, ...]] = {}
        short = short_names(list(tensors))
        full = [f"{tensor.item}:{tensor.name}" for tensor in tensors.values()]
        for (name, tensor), shorter, *of_item in zip(tensors.items(), short, full, short_names(full), strict=True):
            with_item = of_item if tensor.item else ()
            self._forms[name] = tuple(dict.fromkeys((name, shorter, *with_item)))
            self._without_item[name] = tuple(form[len(tensor.item) + 1 :] for form in of_item)
        self._stored = {form: name for name, forms in self._forms.items() for form in forms[::-1]}
        self._stored.update({name: name for name in self._forms})
        self._of_items: dict[str, set[str]] = {}
        for name, forms in self._without_item.items():
            for form in forms:
                self._of_items.setdefault(form, set()).add(name)

    def matching(self, pattern: str) -> dict[str, str]:
        """The leaves whose name matches a pattern: by stored name, the first form that matched.

        Raises `CheckpointError` for a pattern without an item that only matches in several items.
        """
        return self._found(pattern, lambda form: matches(pattern, form))

    def below(self, pattern: str) -> set[str]:
        """The stored names of the leaf or sub-tree of that name, and of the leaves that match it as a pattern. Raises
        as `matching`."""
        inside = f"{pattern}."
        found = self._found(pattern, lambda form: form == pattern or form.startswith(inside) or matches(pattern, form))
        if not found and "/" in pattern:  # as Flax and Hugging Face write a path
            return self.below(pattern.replace("/", "."))
        return set(found)

    def stored(self, form: str) -> str | None:
        """The stored name of the leaf that is called so; None where there is none. Raises as `matching`."""
        if form in self._stored:
            return self._stored[form]
        found = self._of_items.get(form, set())
        self._require_one_item(form, found)
        return next(iter(found), None)

    def _found(self, wanted: str, fits: Callable[[str], bool]) -> dict[str, str]:
        """The first form that fits, by stored name."""
        if chosen := _first_fits(self._forms, fits):
            return chosen
        chosen = _first_fits(self._without_item, fits)
        self._require_one_item(wanted, chosen)
        return chosen

    def _require_one_item(self, wanted: str, names: Iterable[str]) -> None:
        items = sorted({self._items[name] for name in names})
        if len(items) > 1:
            candidates = ", ".join(f"{item}:{wanted}" for item in items)
            raise CheckpointError(f"{wanted} is in {len(items)} items; name one of {candidates}")


def _first_fits(forms: Mapping[str, Sequence[str]], fits: Callable[[str], bool]) -> dict[str, str]:
    found = {name: next(filter(fits, several), None) for name, several in forms.items()}
    return {name: form for name, form in found.items() if form is not None}

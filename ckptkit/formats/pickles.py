"""What a pickle of torch says, without executing it: an interpreter of our own for the operations that tensors and
containers need. Nothing is imported, nothing is called; every other operation and every other name is refused.

The operations are those of `pickletools`, which documents the format.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptkit.formats.dtypes import TORCH

_OPERATIONS_MAX = 5_000_000  # 30 per tensor; each may make a container of 64 bytes
_SIZES_MAX = 64  # of a shape, or a set: copied at every use
_CALLS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch", "Size"),
        ("builtins", "set"),
        ("__builtin__", "set"),
    }
)


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle names: never looked up."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """What a persistent id names: the member of the archive, and the kind of its elements."""

    kind: str
    key: str
    elements: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A tensor as a view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None = None


_MARK = object()


def unpickled(data: bytes) -> Any:
    """The value: dicts, lists, tuples, sets, text, numbers, `Name` of dtypes, `Rebuilt` tensors.

    Raises ValueError for anything else, and for what is no pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for count, (operation, argument, at) in enumerate(pickletools.genops(io.BytesIO(data))):
        if count > _OPERATIONS_MAX:
            raise ValueError("a pickle of too many operations")
        if operation.name == "STOP":
            return stack[-1]
        act = _ACTS.get(operation.name)
        if act is None:
            raise ValueError(f"operation {operation.name} at byte {at}, which no tensor needs; it is not executed")
        act(stack, memo, argument)
    raise ValueError("a pickle without an end")


def _since_mark(stack: list[Any]) -> list[Any]:
    found = []
    while (value := stack.pop()) is not _MARK:
        found.append(value)
    return found[::-1]


def _push(stack: list[Any], memo: dict[int, Any], value: Any) -> None:
    del memo
    stack.append(value)


def _constant(make: Callable[[], Any]) -> Callable[..., None]:
    return lambda stack, memo, argument: stack.append(make())


def _tuple(count: int) -> Callable[..., None]:
    def act(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
        stack[-count:] = [tuple(stack[-count:])]

    return act


def _put(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    memo[len(memo) if argument is None else int(argument)] = stack[-1]


def _get(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    stack.append(memo[int(argument)])


def _append(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    value = stack.pop()
    _of(list, stack[-1]).append(value)


def _appends(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    values = _since_mark(stack)
    _of(list, stack[-1]).extend(values)


def _set_item(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    value, key = stack.pop(), stack.pop()
    _of(dict, stack[-1])[_key(key)] = value


def _set_items(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    values = _since_mark(stack)
    target = _of(dict, stack[-1])
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[_key(key)] = value


def _global(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    module, _, name = str(argument).partition(" ")
    stack.append(_allowed(module, name))


def _stack_global(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_allowed(_of(str, module), _of(str, name)))


def _allowed(module: str, name: str) -> Name:
    plain = module in ("torch", "torch.storage") and (name.endswith("Storage") or name in TORCH)
    if (module, name) not in _CALLS and not plain:
        raise ValueError(
            f"the pickle names {module[:60]}.{name[:60]}, and only tensors and containers are read; it was not run"
        )
    return Name(module, name)


def _call(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    arguments, called = stack.pop(), stack.pop()
    stack.append(_made(called, _of(tuple, arguments)))


def _made(called: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(called, Name) or (called.module, called.name) not in _CALLS:
        raise ValueError(f"the pickle calls {_words(called)}, which is refused; nothing was executed")
    if called.name == "OrderedDict" and arguments in ((), ([],)):
        return {}
    if called.name in ("Size", "set"):
        (values,) = arguments
        if type(values) not in (list, tuple) or len(values) > _SIZES_MAX:
            raise ValueError(f"the pickle makes a {called.name} of what torch does not give it")
        return tuple(values)
    if called.name == "_rebuild_parameter":
        return _of(Rebuilt, arguments[0])
    if called.name.startswith("_rebuild_tensor"):
        storage, offset, shape, strides = arguments[:4]
        dtype = _of(Name, arguments[6]).name if called.name == "_rebuild_tensor_v3" else None
        # Marks of a view whose elements are to be conjugated, or negated, when somebody reads them.
        told = arguments[7 if dtype else 6 :] if called.name != "_rebuild_tensor" else ()
        if told and (marks := [str(key) for key, on in _of(dict, told[0]).items() if on]):
            raise ValueError(
                f"a tensor's elements are not those of its storage ({', '.join(marks)[:60]}); "
                "save tensor.resolve_conj().resolve_neg() instead"
            )
        return Rebuilt(_of(Storage, storage), _of(int, offset), _of(tuple, shape), _of(tuple, strides), dtype)
    raise ValueError(f"the pickle calls {called.name} with what torch does not give it")


def _words(value: Any) -> str:
    """A value in a message: never the whole of a container, which may be anything in size and depth."""
    return f"{value.module[:60]}.{value.name[:60]}" if isinstance(value, Name) else f"a {type(value).__name__}"


def _persistent(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    words = _of(tuple, stack.pop())
    if len(words) != 5 or words[0] != "storage":
        raise ValueError(f"a persistent id of {len(words)} parts that names no storage")
    stack.append(Storage(_of(Name, words[1]).name, _of(str, words[2]), _of(int, words[4])))


def _build(stack: list[Any], memo: dict[int, Any], argument: Any) -> None:
    """A state dict carries `_metadata` beside its entries, which says nothing of tensors: left out."""
    stack.pop()
    _of(dict, stack[-1])


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _key(value: Any) -> Any:
    """Keys are text or numbers: hashing what is nested would follow it down."""
    if type(value) not in (str, int, float, bool):
        raise ValueError(f"a {type(value).__name__} as a key of a dict")
    return value


def _marked(make: Callable[[list[Any]], Any]) -> Callable[..., None]:
    return lambda stack, memo, argument: stack.append(make(_since_mark(stack)))


_ACTS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda stack, memo, argument: None),
    **dict.fromkeys(
        ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BININT", "BININT1", "BININT2", "INT", "LONG"),
        _push,
    ),
    **dict.fromkeys(("LONG1", "LONG4", "BINFLOAT", "FLOAT", "BINBYTES", "SHORT_BINBYTES"), _push),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "MARK": _constant(lambda: _MARK),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    "TUPLE": _marked(tuple),
    "LIST": _marked(list),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), _get),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "BINPERSID": _persistent,
    "BUILD": _build,
    "POP": lambda stack, memo, argument: stack.pop(),
}

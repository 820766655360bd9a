"""Reads a torch pickle without executing it, with the standard library's interpreter, reduced to the operations that
tensors and containers need. Nothing is imported, nothing is called; every other operation and name is refused.

It uses the interpreter in Python, not the one in C (`pickle.Unpickler`). The one in C crashes on a deeply nested key,
and its memo takes 16 bytes for each number up to the highest index (docs/decisions/0006).
"""

from __future__ import annotations

import io
import pickle
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
_OPERATIONS = """
    PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1
    TUPLE2 TUPLE3 LIST PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET APPEND APPENDS SETITEM SETITEMS GLOBAL
    STACK_GLOBAL REDUCE BINPERSID BUILD
""".split()  # noqa: SIM905  a list would be a line for each


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle names: never looked up. Where torch would call it, its name is kept."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        """The value that torch would build from `arguments`. Raises ValueError for arguments that torch does not
        write."""
        if (self.module, self.name) not in _CALLS:
            raise ValueError(f"the pickle calls {_words(self)}, which is refused; nothing was executed")
        if self.name == "OrderedDict" and arguments in ((), ([],)):
            return {}
        if self.name in ("Size", "set"):
            (values,) = arguments
            if type(values) not in (list, tuple) or len(values) > _SIZES_MAX:
                raise ValueError(f"the pickle makes a {self.name} of what torch does not give it")
            return tuple(values)
        if self.name == "_rebuild_parameter":
            return _of(Rebuilt, arguments[0])
        if self.name.startswith("_rebuild_tensor"):
            return _rebuilt(self.name, *arguments)
        raise ValueError(f"the pickle calls {self.name} with what torch does not give it")


@dataclass(frozen=True, slots=True)
class TorchStorage:
    """The target of a persistent id: the member of the archive, and the kind of its elements."""

    kind: str
    key: str
    elements: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A tensor as a view of a storage; offset and strides in elements."""

    storage: TorchStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | None = None


class UnsupportedValueError(Exception):
    """A pickle that may be sound, and has a value that is not read."""


def unpickled(data: bytes) -> Any:
    """The value: dicts, lists, tuples, sets, text, numbers, `Name` of dtypes, `Rebuilt` tensors.

    Raises `UnsupportedValueError` for a value of another type, ValueError for anything else, and for bytes that are not
    a pickle.
    """
    try:
        return _Interpreter(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError(f"a pickle that is damaged, or was not written by torch: {str(error)[:200]}") from error


class _Allowed(dict[int, Callable[[Any], None]]):
    """The interpreter's operations; any other is refused by name."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        names = {ord(operation.code): operation.name for operation in pickletools.opcodes}
        raise ValueError(f"operation {names.get(code, hex(code))}, which no tensor needs; it is not executed")


class _Interpreter(pickle._Unpickler):  # the interpreter in Python; its public name is the one in C
    """Bounded in operations; keys are text or numbers; names and storages are kept as such."""

    stack: list[Any]  # what it has made so far, since the last mark

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._left = _OPERATIONS_MAX

    def find_class(self, module: str, name: str) -> Name:
        """The name, if it is one of torch's."""
        plain = module in ("torch", "torch.storage") and (name.endswith("Storage") or name in TORCH)
        if (module, name) not in _CALLS and not plain:
            raise UnsupportedValueError(
                f"it has a value made by {module[:60]}.{name[:60]}, which is not supported: only tensors, containers, "
                f"text and numbers are read, and nothing was run; {_instead_of(module, name)}"
            )
        return Name(module, name)

    def persistent_load(self, pid: Any) -> TorchStorage:
        """A storage, which torch names by `("storage", type, key, device, elements)`."""
        words = _of(tuple, pid)
        if len(words) != 5 or words[0] != "storage":
            raise ValueError(f"a persistent id of {len(words)} parts that names no storage")
        return TorchStorage(_of(Name, words[1]).name, _of(str, words[2]), _of(int, words[4]))

    def set_items(self, pairs: list[Any]) -> None:
        """Keys are text or numbers: hashing what is nested would follow it down."""
        target = _of(dict, self.stack[-1])
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int, float, bool):
                raise UnsupportedValueError(
                    f"it has a {type(key).__name__} as a key of a dict, which is not supported; save it with text as "
                    "the key instead"
                )
            target[key] = value

    def build(self) -> None:
        """A state dict also carries `_metadata`. It holds no tensors and is left out."""
        self.stack.pop()
        _of(dict, self.stack[-1])


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def act(interpreter: _Interpreter) -> None:
        interpreter._left -= 1
        if interpreter._left < 0:
            raise ValueError("a pickle with too many operations")
        load(interpreter)

    return act


_OURS: dict[str, Callable[[Any], None]] = {
    "SETITEM": lambda interpreter: interpreter.set_items([interpreter.stack.pop(-2), interpreter.stack.pop()]),
    "SETITEMS": lambda interpreter: interpreter.set_items(interpreter.pop_mark()),
    "BUILD": _Interpreter.build,
}
_CODES = {name: getattr(pickle, name)[0] for name in _OPERATIONS}
_Interpreter.dispatch = _Allowed(
    {code: _counted(_OURS.get(name, pickle._Unpickler.dispatch[code])) for name, code in _CODES.items()}
)


def _rebuilt(name: str, storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Rebuilt:
    """`_rebuild_tensor(storage, offset, shape, strides)`; _v2 and _v3 add whether it needs gradients, hooks, a dtype
    (_v3), and marks of a view whose elements must be conjugated or negated when read."""
    dtype = _of(Name, more[2]).name if name == "_rebuild_tensor_v3" else None
    metadata = more[3 if dtype else 2 :] if name != "_rebuild_tensor" else ()
    if metadata and (marks := [str(key) for key, on in _of(dict, metadata[0]).items() if on]):
        raise ValueError(
            f"a tensor's elements are not those of its storage ({', '.join(marks)[:60]}); "
            "save tensor.resolve_conj().resolve_neg() instead"
        )
    return Rebuilt(_of(TorchStorage, storage), _of(int, offset), _of(tuple, shape), _of(tuple, strides), dtype)


def _instead_of(module: str, name: str) -> str:
    """The advice in the error for a value that torch pickles by this name."""
    if module.partition(".")[0] == "numpy":
        return "save value.item() of a NumPy scalar, and torch.from_numpy(value) of an array, instead"
    if name == "complex":
        return "save torch.tensor(value) of a complex number instead"
    return "load the file where it can be trusted, and save its tensors alone"


def _words(value: Any) -> str:
    """A value in a message: never the whole of a container, which may be anything in size and depth."""
    return f"{value.module[:60]}.{value.name[:60]}" if isinstance(value, Name) else f"a {type(value).__name__}"


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value

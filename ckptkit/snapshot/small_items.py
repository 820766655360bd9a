"""Items that are small enough for a manifest: JSON, data iterators, single arrays, random keys, metrics, and
the files of other handlers.

`capture` takes the value as it is now, in two forms: plain values for manifests, and the files that Orbax's handler
would write for the durable tier. `give_back` makes the item of the plain values again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.file_items import FilesSave, array_files, handler_name, jax_key_files, numpy_key_files
from ckptkit.durable.orbax.shardings import sharding_of_text, sharding_text
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.manifest import FILES
from ckptkit.model.paths import JSON_VALUE
from ckptkit.util.own_context import own_context

INLINE_BYTES_MAX = 16 << 20  # manifests are read whole at every start

Captured = tuple[Mapping[str, Any], FilesSave]  # for manifests; for the durable tier


@own_context()
def capture(arg: Any) -> Captured | None:
    """The small item of a save argument, taken now; None where it is of another kind, or too large, or of values that
    zarr cannot hold."""
    if isinstance(arg, ocp.args.JsonSave):
        text = json.dumps(arg.item)
        return {"kind": "json", "value": json.loads(text)}, _as_files(arg, {JSON_VALUE: text.encode()})
    if is_grain(arg):
        state = _iterator_state(arg.item)
        file = f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        return {"kind": "grain", "value": state.decode()}, _as_files(arg, {file: state})
    try:
        return _captured_arrays(arg)
    except (TypeError, ValueError):  # Orbax reports what it cannot save
        return None


def _captured_arrays(arg: Any) -> Captured | None:
    if isinstance(arg, ocp.args.ArraySave) and arg.save_args is None and _is_held_whole(arg.item):
        return {"kind": "array", "value": _plain(arg.item)}, _as_files(arg, array_files(arg.item))
    if isinstance(arg, ocp.args.JaxRandomKeySave) and arg.save_args is None and _is_held_whole(arg.item):
        return {"kind": "jax_key", "value": _plain(arg.item)}, _as_files(arg, jax_key_files(arg.item))
    if isinstance(arg, ocp.args.NumpyRandomKeySave) and isinstance(arg.item, tuple | dict):
        return {"kind": "numpy_key", "value": _plain_tree(arg.item)}, _as_files(arg, numpy_key_files(arg.item))
    return None


def _as_files(arg: Any, files: Mapping[str, bytes]) -> FilesSave:
    return FilesSave(files=files, handler=handler_name(arg))


def captured_files(saved: FilesSave) -> Captured:
    """The small item of what a handler wrote."""
    texts = {name: base64.b64encode(data).decode() for name, data in saved.files.items()}
    return {"kind": FILES, "handler": saved.handler, "value": texts}, saved


def file_leaves(saved: FilesSave) -> dict[str, dict[str, np.ndarray]]:
    """The files of a handler as a tree, for what is too large for a manifest: by the process, then by their paths."""
    return {str(jax.process_index()): {name: np.frombuffer(data, np.uint8) for name, data in saved.files.items()}}


def files_in(stored: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a stored small item of kind `files`, by their paths; none of those that have leaves. Raises
    `CorruptCheckpointError` for text that no writer writes."""
    try:
        return {name: base64.b64decode(text, validate=True) for name, text in stored["value"].items()}
    except ValueError as error:
        raise CorruptCheckpointError(f"the sidecars have a file that cannot be decoded: {error}") from error


def gives_back(kind: str, arg: Any) -> bool:
    """Whether `give_back` can do what a restore argument asks of a stored small item; None asks for what was saved."""
    if arg is None or kind == FILES:
        return True
    if kind == "grain":
        return is_grain(arg)
    if kind == "array":
        return isinstance(arg, ocp.args.ArrayRestore) and arg.restore_args is None
    kinds = {
        "json": ocp.args.JsonRestore,
        "metrics": ocp.args.JsonRestore,
        "jax_key": ocp.args.JaxRandomKeyRestore,
        "numpy_key": ocp.args.NumpyRandomKeyRestore,
    }
    return isinstance(arg, kinds.get(kind, ())) and getattr(arg, "restore_args", None) is None


def give_back(stored: Mapping[str, Any], arg: Any) -> Any:
    """A small item from its stored form; an iterator is set to its state and returned."""
    value = stored["value"]
    if stored["kind"] == "grain" and arg is not None:
        return _set_iterator(arg.item, value)
    if stored["kind"] in ("array", "jax_key"):
        with own_context():
            return _from_plain(value)
    if stored["kind"] == "numpy_key":
        return _from_plain_tree(value)
    return value


def is_grain(arg: Any) -> bool:
    """Whether an argument is one of Grain's, which name the iterator `item`."""
    return type(arg).__module__.split(".")[0] == "grain" and hasattr(arg, "item")


def _iterator_state(iterator: Any) -> bytes:
    state = iterator.get_state()
    return state if isinstance(state, bytes) else json.dumps(state, indent=4).encode()


def _set_iterator(iterator: Any, text: str) -> Any:
    """Sets an iterator to a state in the form of its own `get_state`: bytes of `DataLoader`'s, else plain values."""
    iterator.set_state(text.encode() if isinstance(iterator.get_state(), bytes) else json.loads(text))
    if hasattr(iterator, "start_prefetch"):
        iterator.start_prefetch()
    return iterator


def _is_held_whole(value: Any) -> bool:
    """Whether this process has all of a small array, alone: then it can be copied here, and written from anywhere."""
    if isinstance(value, jax.Array):
        whole = value.is_fully_replicated and len(value.sharding.device_set) == jax.device_count()
        return (jax.process_count() == 1 or whole) and value.nbytes <= INLINE_BYTES_MAX
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.nbytes <= INLINE_BYTES_MAX
    return isinstance(value, bool | int | float)


def _plain(value: Any) -> Any:
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    extra: dict[str, Any] = {"on": "numpy"}
    if isinstance(value, jax.Array):
        extra = {"on": "jax", "sharding": sharding_text(value.sharding)}
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            extra["key_impl"] = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
    block = np.ascontiguousarray(value)
    data = base64.b64encode(block.tobytes()).decode()
    return {**extra, "dtype": block.dtype.name, "shape": list(np.shape(value)), "data": data}


def _from_plain(stored: Any) -> Any:
    if not isinstance(stored, dict):
        return stored
    block = np.frombuffer(base64.b64decode(stored["data"]), np.dtype(stored["dtype"])).reshape(stored["shape"]).copy()
    if stored["on"] == "numpy":
        return block
    if "key_impl" in stored:
        return jax.random.wrap_key_data(jnp.array(block, copy=True), impl=stored["key_impl"])
    sharding = sharding_of_text(stored["sharding"]) if stored["sharding"] else None
    return jax.device_put(block, sharding) if sharding is not None else jnp.array(block, copy=True)


def _plain_tree(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_plain_tree(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": {name: _plain_tree(each) for name, each in value.items()}}
    return {"leaf": _plain(value.item() if isinstance(value, np.generic) else value)}


def _from_plain_tree(stored: Mapping[str, Any]) -> Any:
    if "tuple" in stored:
        return tuple(_from_plain_tree(each) for each in stored["tuple"])
    if "dict" in stored:
        return {name: _from_plain_tree(each) for name, each in stored["dict"].items()}
    return _from_plain(stored["leaf"])

"""`patch_orbax`: Orbax's public names for managers and checkpointers get classes of ours, with tiers bound to them.

The tiers may come from a TOML file."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint.experimental import v1 as orbax_v1
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbax_emergency

from ckptkit import direct, emergency, v1
from ckptkit.errors import CheckpointError
from ckptkit.manager import CheckpointManager
from ckptkit.model.tiers import EverySeconds, EverySteps, KeepBytes, KeepNewest, KeepUnflushed, Tier, checked_tiers

_log = logging.getLogger("ckptkit")
_OWN = ("orbax", "ckptkit")  # packages whose modules use the stock classes
_NAMED_MAX = 8
_LOCAL = frozenset({"tiers"})  # of an emergency manager: its call names a local directory, which is its tier

_CHECKPOINTERS = (
    (ocp.Checkpointer, direct.Checkpointer),
    (ocp.AsyncCheckpointer, direct.AsyncCheckpointer),
    (ocp.StandardCheckpointer, direct.StandardCheckpointer),
    (ocp.PyTreeCheckpointer, direct.PyTreeCheckpointer),
)
_replaced: list[str] = []  # in this process
_MAKERS: dict[str, Any] = {"ram": Tier.ram, "ssd": Tier.ssd, "peer": Tier.peer}
_SAVE = {"every_steps": EverySteps, "every_seconds": EverySeconds}
_KEEP = {"keep_newest": KeepNewest, "keep_bytes": KeepBytes, "keep_unflushed": KeepUnflushed}
_PLAIN = {"ram": {"path", "slots", "job"}, "ssd": {"path", "slots", "job"}, "peer": {"copies", "slots", "rack"}}


def patch_orbax(tiers: Sequence[Tier] | str | os.PathLike[str] = (), **ours: Any) -> list[str]:
    """Replaces Orbax's managers (v0, v1 and emergency) and checkpointers in this process by those of ckptkit.

    From then on `ocp.CheckpointManager`, `ocp.v1.training.Checkpointer`, `ocp.StandardCheckpointer` and the others are
    classes of ours: a job gets tiers, digests and fallback without a change of its source. Returns the names that were
    replaced; one log line at INFO has them. Orbax's own modules keep the stock classes. The patch cannot be
    undone, and a process that the job starts is not patched.

    Args:
      tiers: the fast tiers of each manager (not of an emergency manager, whose local directory is its tier), or the
        path of a TOML file with them (`read_tiers`).
      ours: further keywords of `ckptkit.CheckpointManager`, for each manager that is not given them: `host_id`,
        `events`, `durable`, `saving`, `processes`.

    Raises `CheckpointError` with all places where a class is in use already, and replaces nothing then. A place is an
    instance, a subclass, or a module that imported the class by name. It may also be a dict of a module, an attribute
    of a class, or the default of a function: they would keep the stock class. Raises ValueError for tiers
    that cannot be.
    """
    if _replaced:
        raise CheckpointError(f"patch_orbax was called before in this process, and replaced {', '.join(_replaced)}")
    if isinstance(tiers, str | os.PathLike):
        tiers, named = read_tiers(tiers)
        ours = {**named, **ours}
    bound = {"tiers": checked_tiers(tuple(tiers)), **ours}
    unbound = {name: value for name, value in bound.items() if name not in _LOCAL}
    classes: dict[type, type] = {
        checkpoint_manager.CheckpointManager: _with_defaults(CheckpointManager, bound),
        orbax_v1.training.Checkpointer: _with_defaults(v1.Checkpointer, bound),
        orbax_emergency.CheckpointManager: _with_defaults(emergency.CheckpointManager, unbound),
        **dict(_CHECKPOINTERS),
    }
    if found := [*_held(classes), *(place for stock in classes for place in _uses(stock))]:
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        raise CheckpointError(
            f"patch_orbax came too late: {'; '.join(found[:_NAMED_MAX])}{more}. Call it before the imports of the job, "
            "or start the job with `python -m ckptkit.patch -- SCRIPT`"
        )
    for module, name, stock in list(_public_places(classes)):
        setattr(module, name, classes[stock])
        _replaced.append(f"{module.__name__}.{name}")
    shown = ", ".join(f"{tier.name} at {tier.path}" if tier.path else tier.name for tier in bound["tiers"]) or "none"
    _log.info("patch_orbax replaced %s; fast tiers: %s", ", ".join(_replaced), shown)
    return list(_replaced)


def _with_defaults(base: type, defaults: dict[str, Any]) -> type:
    """A class of ours that takes `defaults` for what a call does not give."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, *args, **{**defaults, **options})

    words = {"__init__": __init__, "__doc__": base.__doc__, "__module__": base.__module__}
    return type(base)(base.__name__, (base,), words)


def _public_places(classes: dict[type, type]) -> Iterator[tuple[Any, str, type]]:
    """Each public name of Orbax for one of the classes: module, name, class."""
    inner = {stock for stock, _ in _CHECKPOINTERS}
    for module_name, module in sorted(sys.modules.items()):
        if module is None or not module_name.startswith("orbax.") or "._" in module_name:
            continue
        for name, value in list(vars(module).items()):
            # Orbax's manager makes the checkpointer that it is made of by the names of its own module.
            if isinstance(value, type) and value in classes and not (module is checkpoint_manager and value in inner):
                yield module, name, value


def _held(classes: Collection[type]) -> Iterator[str]:
    """Where the modules of the job hold a stock class already, in words. A tuple or a set of classes is most likely for
    `isinstance`, and right for our classes too."""
    names = {id(stock): _name(stock) for stock in classes}
    for module_name, module in sorted(sys.modules.items()):
        if module is None or module_name.partition(".")[0] in _OWN:
            continue
        of_module = f"module {module_name}"
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            kind = type(value)  # a look at anything else of it may run its code
            if id(value) in names:
                yield f"{of_module} has imported {names[id(value)]} as {attribute}"
            elif kind is dict and not attribute.startswith("__"):
                held = [(key, names[id(each)]) for key, each in list(value.items()) if id(each) in names]
                yield from (f"{of_module} has {name} in {attribute}[{key!r}]" for key, name in held)
            elif issubclass(kind, type) and value.__module__ == module_name:
                for name, each in list(vars(value).items()):
                    if id(each) in names:
                        yield f"{of_module} has {names[id(each)]} as {attribute}.{name}"
                    yield from _defaults(each, f"{of_module}: {attribute}.{name}", names)
            elif kind is functools.partial or (kind is FunctionType and value.__module__ == module_name):
                yield from _defaults(value, f"{of_module}: {attribute}", names)


def _defaults(function: Any, where: str, names: Mapping[int, str]) -> Iterator[str]:
    """The stock classes among the defaults of a function, and the one of a `functools.partial`."""
    if type(function) is functools.partial:
        held = [function.func, *function.args, *function.keywords.values()]
    elif type(function) is FunctionType:
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        return
    yield from (f"{where} has {names[id(each)]} as an argument" for each in held if id(each) in names)


def _name(stock: type) -> str:
    return f"{stock.__module__}.{stock.__qualname__}"


def _uses(stock: type) -> Iterator[str]:
    """The subclasses and instances of a stock class that the job has already, in words."""
    name = _name(stock)
    for subclass in stock.__subclasses__():
        if subclass.__module__.partition(".")[0] not in _OWN:
            yield f"{subclass.__module__}.{subclass.__qualname__} is a subclass of {name}"
    count = sum(type(each) is stock for each in gc.get_objects())
    if count:
        yield f"{count} instances of {name} exist"


def read_tiers(file: str | os.PathLike[str]) -> tuple[list[Tier], dict[str, Any]]:
    """The tiers of a TOML file, and the keywords of a manager that it names (`host_id`).

    Raises ValueError with the file and the key for one that is not known or cannot be, FileNotFoundError.
    """
    path = Path(file)
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    ours = {"host_id": content.pop("host_id")} if "host_id" in content else {}
    if unknown := sorted(set(content) - set(_MAKERS)):
        raise ValueError(f"{path}: {', '.join(unknown)}: expected host_id and the tables {', '.join(_MAKERS)}")
    return [_tier(path, name, table) for name, table in content.items()], ours


def _tier(path: Path, name: str, table: Any) -> Tier:
    known = {*_PLAIN[name], *_SAVE, *(() if name == "peer" else _KEEP)}
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [{name}]: not a table: expected {', '.join(sorted(known))}")
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{path}: [{name}]: keys {', '.join(unknown)}: expected {', '.join(sorted(known))}")
    settings = {key: value for key, value in table.items() if key in _PLAIN[name]}
    for argument, policies in (("save", _SAVE), ("keep", _KEEP)):
        given = [key for key in policies if key in table]
        if len(given) > 1:
            raise ValueError(f"{path}: [{name}]: {' and '.join(given)}: give one of both")
        if given:
            settings[argument] = policies[given[0]](table[given[0]])
    try:
        return _MAKERS[name](settings.pop("path"), **settings) if name != "peer" else Tier.peer(**settings)
    except KeyError as error:
        raise ValueError(f"{path}: [{name}]: {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: [{name}]: {error}") from error

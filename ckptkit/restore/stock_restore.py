"""Restores by Orbax: complete steps by its own manager, or parts of them if that manager cannot."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.cells.tensorstore_wait import is_damage
from ckptkit.durable.lifecycle.classify import json_name_in
from ckptkit.durable.lifecycle.places import Place, item_kind, readable, step_items
from ckptkit.durable.orbax.manager import DEFAULT_ITEM
from ckptkit.durable.orbax.partial import elsewhere, read_item
from ckptkit.durable.orbax.v1 import NEWER_HANDLER
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CorruptCheckpointError, ItemNotFoundError
from ckptkit.model.paths import JSON_VALUE, JSON_VALUE_V1, STEP_METADATA
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.request import RestoreRequest

_TIMEOUT_S = 60.0


def as_saved(step_url: str, names: Iterable[str]) -> dict[str, Any]:
    """Items of a durable step as they were saved: trees, and JSON. Launches no barrier, locks no item to a handler.

    Leaves out the directories of `names` that hold neither: a user may keep notes in a step.
    """
    step = Place.open(step_url, timeout_s=_TIMEOUT_S)
    found = {}
    for name in names:
        place = step.below(name)
        kind = item_kind(place)
        if kind == "arrays":
            found[name] = read_item(place.url, elsewhere(place.url))
        elif kind == "json" and (file := json_name_in(place.names())) is not None:
            found[name] = place.json(file)
    return found


def whole_step(step_url: str) -> dict[str, Any] | None:
    """Every item of a step that Orbax's manager does not restore by itself: one was saved on devices that are not
    there today, or by Orbax's newer API. None for any other step. Locks no item to a handler.

    Raises `ItemNotFoundError` for a step of the newer API with an item that only its own handler restores.
    """
    arrays = array_items(step_url)
    moved = {name: elsewhere(place.url) for name, place in arrays.items()}
    step = Place.open(step_url, timeout_s=_TIMEOUT_S)
    if not any(moved.values()) and not _by_newer_api(step):
        return None
    files = {name: json_name_in(step.below(name).names()) for name in step_items(step)}
    small = {name: step.below(name).json(file) for name, file in files.items() if file in (JSON_VALUE, JSON_VALUE_V1)}
    unknown = [name for name in files if item_kind(step.below(name)) is None]
    if unknown and _by_newer_api(step):
        raise ItemNotFoundError(
            f"{step_url}: {', '.join(unknown)} can be restored by its own handler only; name the items to restore: "
            f"args=ocp.args.Composite({', '.join(f'{name}=...' for name in [*arrays, *small])})"
        )
    return {**small, **{name: read_item(place.url, moved[name]) for name, place in arrays.items()}}


def _by_newer_api(step: Place) -> bool:
    recorded = step.json(STEP_METADATA)
    with readable(f"{step.url}/{STEP_METADATA}"):
        handlers = (recorded or {}).get("item_handlers") or {}
        names = handlers.values() if isinstance(handlers, dict) else [handlers]
        return any(NEWER_HANDLER in str(name) for name in names)


def array_items(step_url: str) -> dict[str, Place]:
    """The items of arrays in a step, by name; of an item's own directory itself, as `default`."""
    place = Place.open(step_url, timeout_s=_TIMEOUT_S)
    if item_kind(place) == "arrays":  # an item's own directory, or a step that was saved without a manager
        return {"default": place}
    return {name: place.below(name) for name in step_items(place) if item_kind(place.below(name)) == "arrays"}


def restore_stock(durable: DurableSteps, step: int, wanted: RestoreRequest) -> dict[str, Any]:
    """A step that stock Orbax wrote, read by stock Orbax: correct bytes cannot be proven, only readability.

    Raises `CorruptCheckpointError` if it cannot be read or has lost an item, `ItemNotFoundError`, and Orbax's other
    errors.
    """
    if not durable.reader(step).item_names():
        raise CorruptCheckpointError(f"step {step} in {durable.url} holds no item", step=step, tier=DURABLE)
    try:
        return _restored(durable, step, wanted)
    except ItemNotFoundError:
        durable.reader(step).require_all_items()
        raise
    except Exception as error:
        if is_damage(error) and not _is_of_an_iterator(error):
            message = f"step {step} in {durable.url}: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(message, step=step, tier=DURABLE) from error
        raise


def _is_of_an_iterator(error: Exception) -> bool:
    """Whether the caller's data iterator refused the state that was read: its pipeline is another one."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "set_state" for frame, _ in frames)


def restore_items(durable: DurableSteps, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Some items of a durable step, by Orbax's manager and the caller's handlers."""
    orbax, place = durable.stock.orbax, Place.open(durable.reader(step).url, timeout_s=_TIMEOUT_S)
    values = {name: value for name, arg in args.items() for value in _by_us(place, name, arg)}
    rest = {name: arg for name, arg in args.items() if name not in values}
    if set(rest) == {DEFAULT_ITEM} and durable.stock.default_item is not False:
        values[DEFAULT_ITEM] = orbax.restore(step, args=rest[DEFAULT_ITEM])
    elif rest:
        values.update(orbax.restore(step, args=ocp.args.Composite(**rest)).items())
    return values


def _by_us(step: Place, name: str, arg: Any) -> Iterator[Any]:
    """The value of an item that stock Orbax cannot restore here; nothing for any other.

    These are a JSON item whose file only Orbax's newer API reads, and a tree that `arg` leaves on the devices of its
    save, where these are not here today.
    """
    if isinstance(arg, ocp.args.JsonRestore):
        item = step.below(name)
        if JSON_VALUE_V1 in item.names():
            yield item.json(JSON_VALUE_V1)
    elif type(arg) in (ocp.args.StandardRestore, ocp.args.PyTreeRestore):
        if any(getattr(arg, word, None) is not None for word in ("item", "restore_args", "transforms")):
            return
        place = step if name == DEFAULT_ITEM and item_kind(step) == "arrays" else step.below(name)
        if item_kind(place) == "arrays" and (moved := elsewhere(place.url)) is not None:
            yield read_item(place.url, moved)


def _restored(durable: DurableSteps, step: int, wanted: RestoreRequest) -> dict[str, Any]:
    held = set(durable.reader(step).item_names())
    wanted.check_mode(held)
    if wanted.args is not None:
        if missing := sorted(set(wanted.args) - held):
            raise ItemNotFoundError(
                f'Item "{missing[0]}" was not found in step {step}. Available items: {sorted(held)}', step=step
            )
        return restore_items(durable, step, wanted.args)
    if wanted.choice is not None:
        return wanted.choice.read_stock(durable.reader(step).url)
    if (found := whole_step(durable.reader(step).url)) is not None:
        return found
    found = durable.stock.orbax.restore(step)
    return dict(found.items()) if isinstance(found, ocp.args.Composite) else {DEFAULT_ITEM: found}

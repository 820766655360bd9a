"""What Orbax's own manager restores for us: steps of stock Orbax, and what only the caller's handlers can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.reader import is_damage
from ckptkit.durable.steps import DurableSteps
from ckptkit.durable.stock import DEFAULT_ITEM
from ckptkit.errors import CorruptCheckpointError, ItemNotFoundError
from ckptkit.manager.asked import RestoreItems
from ckptkit.manager.partly import choose_of_stock, whole_step
from ckptkit.manager.taken import DURABLE


def restore_stock(durable: DurableSteps, step: int, wanted: RestoreItems) -> dict[str, Any]:
    """A step that stock Orbax wrote, read by stock Orbax: correct bytes cannot be proven, only readability.

    Raises `CorruptCheckpointError` for what cannot be read, `ItemNotFoundError`, and what Orbax raises beside that.
    """
    if not durable.reader(step).item_names():
        raise CorruptCheckpointError(f"step {step} in {durable.url} holds no item", step=step, tier=DURABLE)
    try:
        return _restored(durable, step, wanted)
    except ItemNotFoundError:
        raise
    except Exception as error:
        if is_damage(error):
            message = f"step {step} in {durable.url}: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(message, step=step, tier=DURABLE) from error
        raise


def restore_items(durable: DurableSteps, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """Some items of a durable step, by Orbax's manager and the caller's handlers."""
    orbax = durable.stock.orbax
    if set(args) == {DEFAULT_ITEM}:
        return {DEFAULT_ITEM: orbax.restore(step, args=args[DEFAULT_ITEM])}
    return dict(orbax.restore(step, args=ocp.args.Composite(**args)).items())


def _restored(durable: DurableSteps, step: int, wanted: RestoreItems) -> dict[str, Any]:
    held = set(durable.reader(step).item_names())
    wanted.check_mode(held)
    if wanted.args is not None:
        if missing := sorted(set(wanted.args) - held):
            raise ItemNotFoundError(
                f'Item "{missing[0]}" was not found in step {step}. Available items: {sorted(held)}', step=step
            )
        return restore_items(durable, step, wanted.args)
    if wanted.choose is not None:
        return choose_of_stock(durable.reader(step).url, wanted.choose)
    if (found := whole_step(durable.reader(step).url)) is not None:
        return found
    found = durable.stock.orbax.restore(step)
    return dict(found.items()) if isinstance(found, ocp.args.Composite) else {DEFAULT_ITEM: found}

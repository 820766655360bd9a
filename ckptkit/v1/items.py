"""From checkpointables, which name no kind, to the arguments of the manager, which do; and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.orbax.v1 import is_tree
from ckptkit.inspection.directories import item_kind, step_items
from ckptkit.inspection.places import Place

_TIMEOUT_S = 60.0


def save_args(checkpointables: Mapping[str, Any]) -> Any:
    """The arguments that save them. Raises TypeError naming what cannot be saved."""
    return ocp.args.Composite(**{name: _save_arg(name, value) for name, value in checkpointables.items()})


def restore_args(abstract: Mapping[str, Any], step_url: str) -> Any:
    """The arguments that restore them: by what is asked for, or (None) by what the durable step holds.

    Cost for what is asked for by None: a listing of the step.
    """
    unknown = [name for name, value in abstract.items() if value is None]
    kinds = stored_kinds(step_url) if unknown else {}
    return ocp.args.Composite(**{name: _restore_arg(value, kinds.get(name)) for name, value in abstract.items()})


def stored_kinds(step_url: str) -> dict[str, str | None]:
    """The items of a durable step with their kinds; empty for a step that is not there."""
    place = Place.open(step_url, timeout_s=_TIMEOUT_S)
    return {name: item_kind(place.below(name)) for name in step_items(place)}


def _save_arg(name: str, value: Any) -> Any:
    if _is_grain(value):
        from grain import checkpoint

        return checkpoint.CheckpointSave(value)
    if is_tree(value):
        return ocp.args.StandardSave(value)  # pyright: ignore[reportCallIssue]
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"checkpointable {name!r} is a {type(value).__name__}; what can be saved is a tree of arrays, numbers and "
            "text, a Grain iterator, or plain JSON"
        ) from error
    return ocp.args.JsonSave(value)  # pyright: ignore[reportCallIssue]


def _restore_arg(value: Any, kind: str | None) -> Any:
    if value is None:
        return ocp.args.JsonRestore() if kind == "json" else ocp.args.StandardRestore()  # pyright: ignore[reportCallIssue]
    if _is_grain(value):
        from grain import checkpoint

        return checkpoint.CheckpointRestore(value)
    return ocp.args.StandardRestore(value)  # pyright: ignore[reportCallIssue]


def _is_grain(value: Any) -> bool:
    is_iterator = hasattr(value, "get_state") and hasattr(value, "set_state")
    return is_iterator and type(value).__module__.split(".")[0] == "grain"

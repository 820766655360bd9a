"""What of Orbax's newer API (v1) has no public name: its checks of arguments, and which writer a step names."""

from __future__ import annotations

from typing import Any

import jax
from orbax.checkpoint.experimental.v1._src.deletion import validation as deletion
from orbax.checkpoint.experimental.v1._src.loading import validation as loading
from orbax.checkpoint.experimental.v1._src.saving import validation as saving
from orbax.checkpoint.experimental.v1._src.tree import types_validation

NEWER_HANDLER = ".experimental.v1."  # in the names of the handlers that a step records


def check_state(state: Any) -> None:
    """Raises ValueError for a leaf that Orbax does not save."""
    saving.validate_state(state)


def check_checkpointables(checkpointables: Any) -> None:
    """Raises ValueError for what is no dictionary of checkpointables, or has a reserved name."""
    saving.validate_save_checkpointables(checkpointables)


def check_abstract_state(abstract: Any) -> None:
    """Raises TypeError for a leaf that Orbax does not load into."""
    loading.validate_abstract_state(abstract)


def check_abstract_checkpointables(abstract: Any) -> None:
    """Raises ValueError for what is no dictionary of abstract checkpointables, or has a reserved name."""
    loading.validate_abstract_checkpointables(abstract)


def check_deletion(step: Any, checkpointable_name: Any, missing_ok: Any) -> None:
    """Raises TypeError or ValueError for what names no step or no checkpointable."""
    deletion.validate_step(step)
    deletion.validate_arguments(checkpointable_name, missing_ok)


def is_tree(checkpointable: Any) -> bool:
    """Whether Orbax saves it as a tree: every leaf is an array, a number or text."""
    return all(types_validation.is_supported_leaf(leaf) for leaf in jax.tree.leaves(checkpointable))

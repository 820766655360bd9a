"""The methods of a subclass that Orbax's manager would ask, and ours does not."""

from __future__ import annotations

import logging

_log = logging.getLogger("ckptkit")
# Methods that `save`, `restore(None)`, `delete` and `close` of Orbax's manager call on themselves.
_ASKED_BY_ORBAX = (
    "all_steps",
    "is_saving_in_progress",
    "latest_step",
    "reached_preemption",
    "should_save",
    "wait_until_finished",
)


def warn_of_overrides(kind: type, base: type) -> None:
    """One WARNING for a subclass `kind` of `base` whose methods decide nothing here."""
    overridden = [name for name in _ASKED_BY_ORBAX if getattr(kind, name) is not getattr(base, name)]
    if overridden:
        _log.warning(
            "%s overrides %s: save, restore, delete and close do not ask these methods, unlike stock Orbax's. Decide "
            "with CheckpointManagerOptions(save_decision_policy=...), or override save and restore themselves",
            *(kind.__qualname__, ", ".join(overridden)),
        )

"""Subclasses of the manager: what they override is called by their users, and not by the manager itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.manager.start_warnings import _ASKED_BY_ORBAX

args: Any = ocp.args


class Counted(ckptkit.CheckpointManager):
    """Notes each step that it is asked to save."""

    saved: tuple[int, ...] = ()

    def save(self, step: int, *given: Any, **words: Any) -> bool:
        self.saved = (*self.saved, step)
        return super().save(step, *given, **words)


def test_overridden_save_is_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that wraps `save` would lose its own part of it."""
    manager = Counted(tmp_path)
    with manager:
        assert manager.save(0, args=args.StandardSave({"w": np.zeros(4)}))
    assert manager.saved == (0,)
    assert not [line for line in caplog.messages if "overrides" in line]


@pytest.mark.parametrize("name", _ASKED_BY_ORBAX)
def test_method_that_decides_nothing_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A subclass that chooses the steps to save would be left out without a message."""
    kind = type("Own", (ckptkit.CheckpointManager,), {name: lambda self, *given: None})
    kind(tmp_path).close()
    (line,) = [line for line in caplog.messages if "overrides" in line]
    assert line.startswith(f"Own overrides {name}: save, restore, delete and close do not ask these methods")


def test_stock_orbax_asks_the_named_methods(tmp_path: Path) -> None:
    """The list would have methods that nobody misses."""
    asked: set[str] = set()

    def noting(name: str) -> Any:
        def noted(self: Any, *given: Any) -> Any:
            asked.add(name)
            return getattr(super(kind, self), name)(*given)

        return noted

    kind: Any = type("Own", (ocp.CheckpointManager,), {name: noting(name) for name in _ASKED_BY_ORBAX})
    options = ocp.CheckpointManagerOptions(enable_should_save_is_saving_in_progress_check=True)
    with kind(tmp_path, options=options) as manager:
        manager.save(0, args=args.StandardSave({"w": np.zeros(4)}))
        manager.restore(None, args=args.StandardRestore({"w": np.zeros(4)}))
    assert asked == set(_ASKED_BY_ORBAX)

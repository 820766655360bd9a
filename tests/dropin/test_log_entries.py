"""Entries of saves and restores for Orbax's loggers, compared with those of stock Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit

args: Any = ocp.args


class Entries(ocp.logging.AbstractLogger):
    """Keeps them."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def log_entry(self, entry: Any) -> None:
        self.found.append(dict(entry))


def entries(kind: Any, root: Path, **options: Any) -> list[dict[str, Any]]:
    logger = Entries()
    with kind(root, logger=logger, **options) as manager:
        for step in range(2):
            manager.save(step, args=args.StandardSave({"w": jnp.arange(4.0)}))
            manager.wait_until_finished()
        manager.restore(1, args=args.StandardRestore({"w": jnp.arange(4.0)}))
        manager.restore(1)
    return logger.found


@pytest.mark.parametrize("ram", [False, True])
def test_entries_have_every_field_that_stock_orbax_fills(tmp_path: Path, ram: bool) -> None:
    """Dashboards that read them would lose curves with the change of an import."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if ram else []
    ours = entries(ckptkit.CheckpointManager, tmp_path / "ours", tiers=tiers)
    stock = entries(ocp.CheckpointManager, tmp_path / "stock")
    assert [entry["event_type"] for entry in ours] == [entry["event_type"] for entry in stock]
    for found, expected in zip(ours, stock, strict=True):
        filled = {name for name, value in expected.items() if value is not None}
        assert not {name for name in filled if found[name] is None}
        assert {type(found[name]) for name in filled if name.endswith("_secs")} <= {float}

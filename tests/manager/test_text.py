"""Trees with text: in every tier, given back as stock Orbax gives them back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.errors import TreeMismatchError
from ckptkit.verification import verify

A = ocp.args


def tree(run: str = "x") -> dict[str, Any]:
    return {"w": jnp.arange(4.0), "meta": {"run": run, "n": 3, "none": {}, "names": ["a", 1.0]}, "µ\n": "ü\x00"}


def manager(root: Path, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(root / "run", tiers=[ckptkit.Tier.ram(str(root / "ram"), slots=2)], **options)


def saved(root: Path, *steps: int) -> Path:
    with manager(root) as made:
        for step in steps:
            assert made.save(step, args=A.PyTreeSave(tree(f"run {step}")))
            made.wait_until_finished()
    return root


def lost(root: Path, tier: str) -> None:
    shutil.rmtree(root / "ram") if tier == "durable" else shutil.rmtree(root / "run" / "1")


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        type(x) is type(y) and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("left", ["ram", "durable"])
@pytest.mark.parametrize("how", ["nothing", "template", "types", "wishes", "standard"])
def test_text_is_given_back_by_each_tier(left: str, how: str, tmp_path: Path) -> None:
    """A tree with one word in it lost the ramdisk, and was written by Orbax on the thread of the step loop."""
    lost(saved(tmp_path, 1), left)
    wanted = tree("other")
    args = {
        "nothing": None,
        "template": A.PyTreeRestore(wanted),
        "types": A.PyTreeRestore({**wanted, "µ\n": str}),
        "wishes": A.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted, set_global_shape=False)
        ),
        "standard": A.StandardRestore(wanted),
    }[how]
    with manager(tmp_path) as made:
        assert same(made.restore(1, args=args), tree("run 1"))


def test_stock_restores_text_that_we_wrote(tmp_path: Path) -> None:
    """Orbax looks for each text in a file of its own, by the name of the leaf."""
    saved(tmp_path, 1)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        wishes = ocp.checkpoint_utils.construct_restore_args(tree())
        assert same(stock.restore(1, args=A.PyTreeRestore(tree(), restore_args=wishes)), tree("run 1"))


@pytest.mark.parametrize("left", ["ram", "durable"])
def test_part_of_a_tree_with_text(left: str, tmp_path: Path) -> None:
    """Text that is not asked for stays where it is; text that is missing in a whole template is a mismatch."""
    lost(saved(tmp_path, 1), left)
    with manager(tmp_path) as made:
        part = made.restore(1, args=A.PyTreeRestore({"meta": {"run": ""}}, partial_restore=True))
        assert part == {"meta": {"run": "run 1"}}
    without = {name: value for name, value in tree().items() if name != "µ\n"}
    with manager(tmp_path) as made, pytest.raises(TreeMismatchError, match="is text on disk"):
        made.restore(1, args=A.PyTreeRestore(without))


def test_metadata_names_text_of_each_tier(tmp_path: Path) -> None:
    """`item_metadata` of a step that only a fast tier holds showed no leaf for it."""
    lost(saved(tmp_path, 1), "ram")
    with manager(tmp_path) as made:
        assert isinstance(made.item_metadata(1).tree["meta"]["run"], ocp.metadata.StringMetadata)


def test_text_under_a_name_that_orbax_reads_as_a_path(tmp_path: Path) -> None:
    """Orbax takes the name for a pointer into its file: it writes such a step itself."""
    with manager(tmp_path) as made:
        made.save(1, args=A.PyTreeSave({"a/b": "x", "n": 2}))
        made.wait_until_finished()
        assert made.restore(1) == {"a/b": "x", "n": 2}
    assert json.loads((tmp_path / "run/1/default/_strings.json").read_text()) == {"a": {"b": "x"}}


def test_verify_finds_text_that_was_changed(tmp_path: Path) -> None:
    """Stock Orbax would restore another text, and no digest of arrays shows it."""
    strings = saved(tmp_path, 1) / "run/1/default/_strings.json"
    assert not verify(str(tmp_path / "run")).corrupt
    text = json.loads(strings.read_text())
    strings.write_text(json.dumps({**text, "meta.run": "run 2"}))
    report = verify(str(tmp_path / "run"))
    assert report.corrupt
    assert "not the text that was saved: meta.run" in str(report.steps)

"""`verify` of what stock Orbax wrote: lost chunks in every layout, damaged counts, and side files nobody needs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from ckptkit.model.paths import array_prefix
from ckptkit.verification import StepProof
from tests.cases import long_except
from tests.states import abstract, assert_same

SIDE = 64
LAYOUTS = list(itertools.product(("zarr2", "zarr3"), ("files", "ocdbt"), ("whole", "subchunked")))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`<zarr>-<store>-<chunks>` for each of `LAYOUTS`, where `w` is all zeros; `-unnamed`: that leaf has no name."""
    home = tmp_path_factory.mktemp("layouts")
    rest = {"n": 3, "s": np.float32(2)}
    for (zarr, store, chunks), name in itertools.product(LAYOUTS, ("w", "")):
        tree = {name: jnp.zeros((SIDE, SIDE)), **rest}
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr == "zarr3", use_ocdbt=store == "ocdbt")
        small = ocp.SaveArgs(chunk_byte_size=SIDE * SIDE) if chunks == "subchunked" else ocp.SaveArgs()
        save_args = {name: small, **dict.fromkeys(rest, ocp.SaveArgs())}
        with ocp.Checkpointer(handler) as checkpointer:
            args = ocp.args.PyTreeSave(tree, save_args=save_args)  # pyright: ignore[reportCallIssue]
            checkpointer.save(home / "-".join((zarr, store, chunks, *([] if name else ["unnamed"]))), args=args)
    return home


def proof_of(path: Path) -> StepProof:
    (proof,) = ckptkit.verify(str(path)).steps
    return proof


def forget(item: Path, key: str) -> None:
    """Deletes a key of an item, from its files or from its OCDBT database."""
    base = f"file://{item}/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base} if (item / "manifest.ocdbt").exists() else base).result()
    assert store.read(key).result().state == "value", key
    store.write(key, None).result()


@pytest.mark.parametrize("name", ["w", ""], ids=["named", "unnamed"])
@pytest.mark.parametrize("layout", ["-".join(each) for each in LAYOUTS])
def test_lost_chunk_is_found_in_every_layout(layouts: Path, tmp_path: Path, layout: str, name: str) -> None:
    """A restore would read zeros, and `prune` would delete the last good step before it."""
    source, item = layouts / (layout if name else f"{layout}-unnamed"), tmp_path / "item"
    assert proof_of(source).state == "unproven"
    last = 0 if "whole" in layout else 1
    shutil.copytree(source, item)
    forget(item, array_prefix(name) + (f"c/{last}/0" if layout.startswith("zarr3") else f"{last}.0"))
    proof = proof_of(item)
    assert (proof.state, proof.findings[0].leaf) == ("corrupt", name)
    assert "the chunk is not there" in str(proof.findings[0])
    assert proof.findings[0].box is not None


def test_lost_chunks_are_counted_beyond_the_first(layouts: Path, tmp_path: Path) -> None:
    """A lost directory would print a line for each of its chunks."""
    item = tmp_path / "item"
    shutil.copytree(layouts / "zarr2-files-whole", item)
    described = json.loads((item / "w/.zarray").read_text())
    (item / "w/.zarray").write_text(json.dumps({**described, "shape": [SIDE * 1000, SIDE]}))
    named, counted = proof_of(item).findings[:-1], proof_of(item).findings[-1]
    assert len(named) == 8
    assert "991 more chunks are not there: of 1000 1 are stored" in str(counted)


VERIFY = """
import resource, sys
import ckptkit
bound = resource.getrlimit(resource.RLIMIT_AS)[1]
with open("/proc/self/statm") as file:
    held = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (2 << 30), bound))
found = ckptkit.verify(sys.argv[1])
print(found.steps[0].state, len(found.steps[0].findings))
"""


@pytest.mark.parametrize(
    "layout", long_except(["zarr3-files-whole"], ["zarr2-files-whole", "zarr3-files-whole", "zarr3-files-subchunked"])
)
def test_damaged_shape_takes_no_memory(layouts: Path, tmp_path: Path, layout: str) -> None:
    """One changed digit would make `verify` take all memory of a machine that trains."""
    item = tmp_path / "item"
    shutil.copytree(layouts / layout, item)
    file = item / ("w/zarr.json" if "zarr3" in layout else "w/.zarray")
    described = json.loads(file.read_text())
    file.write_text(json.dumps({**described, "shape": [1 << 36, SIDE]}))
    run = subprocess.run(
        [sys.executable, "-c", VERIFY, str(item)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    state, findings = run.stdout.split()
    assert state == "corrupt"
    assert int(findings) < 200


def test_damaged_shard_shape_is_read_to_a_bound(layouts: Path, tmp_path: Path) -> None:
    """A shard that claims any number of chunks would be read without an end."""
    item = tmp_path / "item"
    shutil.copytree(layouts / "zarr3-files-subchunked", item)
    described = json.loads((item / "w/zarr.json").read_text())
    described["shape"] = described["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 36, SIDE]
    (item / "w/zarr.json").write_text(json.dumps(described))
    proof = proof_of(item)
    assert proof.state == "corrupt"
    assert len(proof.findings) < 200


def _state() -> dict[str, Any]:
    return {"a": jnp.arange(8.0), "k": jax.random.key(1), "n": {"x": np.ones(3), "i": 3}}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("side")
    with ocp.CheckpointManager(root) as manager:
        items = {"state": ocp.args.StandardSave(_state()), "js": ocp.args.JsonSave({"x": 1})}
        manager.save(3, args=ocp.args.Composite(**items))
    return root / "3"


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("file", "damage", "noted"),
    [
        ("_CHECKPOINT_METADATA", Path.unlink, False),
        ("_CHECKPOINT_METADATA", _cut, True),
        ("state/_METADATA", Path.unlink, True),
        ("state/_sharding", Path.unlink, False),
        ("state/_sharding", _cut, True),
    ],
)
def test_side_file_that_a_restart_does_not_need(
    step: Path, tmp_path: Path, file: str, damage: Callable[[Path], None], noted: bool
) -> None:
    """A step that stock Orbax restores would be called damaged, and put aside."""
    root = tmp_path / "root"
    shutil.copytree(step, root / "3")
    damage(root / "3" / file)
    template = abstract(_state())
    args = {"state": ocp.args.StandardRestore(template), "js": ocp.args.JsonRestore()}
    with ocp.CheckpointManager(root) as manager:
        assert_same(manager.restore(3, args=ocp.args.Composite(**args))["state"], _state())
    found = ckptkit.verify(str(root))
    assert (found.steps[0].state, found.corrupt) == ("unproven", False)
    seen, listed = ckptkit.inspect(str(root)), ckptkit.list_steps(str(root), host_id="h")
    assert (seen.problems, listed.problems) == ((), ())
    assert any(Path(file).name in note for note in found.notes) == noted, found.notes
    assert any(Path(file).name in note for note in seen.notes) == noted, seen.notes


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("state/_METADATA", _cut),
        ("state/array_metadatas/process_0", _cut),
        ("js/metadata", _cut),
        ("js/metadata", Path.unlink),
        ("state/manifest.ocdbt", Path.unlink),
    ],
)
def test_side_file_that_every_restart_needs(
    step: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """A step that stock Orbax refuses would be called readable."""
    shutil.copytree(step, tmp_path / "3")
    damage(tmp_path / "3" / file)
    assert proof_of(tmp_path).state == "corrupt"


@pytest.mark.parametrize("name", ["3", "model"])
def test_step_without_step_metadata_is_verified(step: Path, tmp_path: Path, name: str) -> None:
    """A good step of an early version of Orbax would be called no step."""
    shutil.copytree(step, tmp_path / name)
    (tmp_path / name / "_CHECKPOINT_METADATA").unlink()
    (tmp_path / name / "commit_success.txt").unlink()
    assert proof_of(tmp_path / name).state == "unproven"

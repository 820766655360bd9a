"""`ckptkit inspect`: its output for each kind of checkpoint, from metadata alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ckptkit.util.words import size_text
from tests.cases import long_except
from tests.cli.conftest import HOST, Ours, Run
from tests.states import make_state

CHECK_BACKEND = """
import sys
from ckptkit.cli import main
code = main(sys.argv[1:])
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was initialised"
sys.exit(code)
"""


def leaves_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {leaf["name"]: leaf for item in found["items"] for leaf in item["leaves"]}


def expected_leaf(name: str, value: Any) -> tuple[list[int], str]:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return list(array.shape), array.dtype.name


def flat(state: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(state)
    return {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in pairs}


def assert_describes(found: dict[str, Any], state: Any) -> None:
    leaves, expected = leaves_of(found), flat(state)
    assert expected.keys() <= leaves.keys()
    for name, value in expected.items():
        shape, dtype = expected_leaf(name, value)
        assert (leaves[name]["shape"], leaves[name]["dtype"]) == (shape, dtype), name
        assert leaves[name]["bytes"] == int(np.prod(shape)) * np.dtype(dtype).itemsize, name


@pytest.mark.parametrize(
    ("path", "layout"),
    [
        ("root/3", "ocdbt, zarr2"),
        ("root/3/state", "ocdbt, zarr2"),
        ("zarr3", "ocdbt, zarr3"),
        ("files", "files, zarr2"),
    ],
)
def test_inspects_stock_orbax_in_every_layout(ckpt: Run, stock: Path, path: str, layout: str) -> None:
    """A checkpoint that ckptkit did not write would be shown wrong, or not at all."""
    found = json.loads(ckpt("inspect", stock / path, "--json").out)
    state = make_state(3)
    if path == "files":
        state = {name: leaf for name, leaf in state.items() if name not in ("key", "keys")}
    assert_describes(found, state)
    assert [item["layout"] for item in found["items"] if item["kind"] == "arrays"] == [layout]
    assert found["origin"]["writer"] == "orbax"
    assert not found["origin"]["proven"]
    assert found["origin"]["processes"] == 1
    leaves = leaves_of(found)
    assert leaves["x"]["sharding"] == "P('data', 'fsdp') on data=2,fsdp=2"
    assert leaves["x"]["cell"] == [4, 4]
    if path != "files":
        assert leaves["keys"]["key_impl"] == "threefry2x32"
    if not path.startswith("root"):
        assert {leaves[name]["kind"] for name in ("text", "nothing", "empty")} == {"string", "None", "Dict"}


def test_inspects_a_ckptkit_step(ckpt: Run, ours: Ours) -> None:
    """Our own steps would not be called ours, proven, or be given their save and cells."""
    found = json.loads(ckpt("inspect", ours.root / "4", "--json").out)
    assert_describes(found, make_state(4))
    assert (found["kind"], found["step"], found["path"]) == ("step", 4, str(ours.root / "4"))
    origin = found["origin"]
    assert (origin["writer"], origin["proven"], origin["processes"], origin["hosts"]) == ("ckptkit", True, 1, [HOST])
    assert origin["save_id"].items() >= {"epoch": 1, "step": 4, "number": 4}.items()
    leaves = leaves_of(found)
    assert leaves["w"]["sharding"] == "P('fsdp') on data=2,fsdp=2"
    assert leaves["w"]["cell"] == [4, 8]
    assert leaves["key"]["key_impl"] == "threefry2x32"
    assert leaves["w"]["held_bytes"] is None
    values = {item["name"]: item["value"] for item in found["items"] if item["kind"] == "json"}
    assert values == {"data": {"step": 4}}


def test_sidecars_and_orbax_metadata_agree(ckpt: Run, mine: Ours) -> None:
    """ckptkit's record of a leaf would differ from stock Orbax's view of the same step."""
    ours_said = leaves_of(json.loads(ckpt("inspect", mine.root / "4", "--json").out))
    shutil.rmtree(mine.root / "4/state/_ckptkit")
    found = json.loads(ckpt("inspect", mine.root / "4", "--json").out)
    assert (found["origin"]["writer"], found["origin"]["proven"]) == ("ckptkit", False)
    stock_said = leaves_of(found)
    assert ours_said.keys() == stock_said.keys()
    for name, leaf in ours_said.items():
        for fact in ("dtype", "shape", "bytes", "cell", "sharding", "key_impl"):
            assert leaf[fact] == stock_said[name][fact], (name, fact)


def test_root_shows_its_newest_step_not_superseded(ckpt: Run, ours: Ours) -> None:
    """A root would show an abandoned branch as its newest state."""
    said = ckpt("inspect", ours.root)
    assert said.code == 0
    assert said.out.startswith(f"{ours.root / '4'}: step 4, ")
    assert f"the only committed step in {ours.root}" in said.out


def test_inspects_a_slot_directory_and_a_manifest_file(ckpt: Run, ours: Ours) -> None:
    """Nobody could see what a ramdisk holds, or which process's share it is."""
    found = json.loads(ckpt("inspect", ours.slots, "--json").out)
    assert (found["kind"], found["step"]) == ("slot", 5)
    assert found["origin"]["save_id"].items() >= {"epoch": 2, "step": 5, "number": 0}.items()
    assert_describes(found, make_state(5))
    assert found["notes"][0].startswith(f"the newest of 3 saves in {ours.slots}; the others are of steps 8, 7")
    assert found["notes"][1] == f"the share of process 0 of 1, on host {HOST}"
    older = json.loads(ckpt("inspect", ours.manifest(7), "--json").out)
    assert (older["kind"], older["step"]) == ("slot", 7)
    assert leaves_of(older)["w"]["held_bytes"] == 256
    sidecar = json.loads(ckpt("inspect", ours.root / "4/state/_ckptkit/process-0.json", "--json").out)
    assert (sidecar["kind"], sidecar["step"], sidecar["origin"]["proven"]) == ("item", 4, True)


def test_manifest_whose_slot_was_deleted_is_reported(ckpt: Run, mine: Ours) -> None:
    """A manifest that names no bytes any more would pass for a save."""
    body = json.loads(mine.manifest(5).read_text())["manifest"]
    (mine.slots / body["slot"]).unlink()
    said = ckpt("inspect", mine.manifest(5))
    assert said.code == 11
    assert f"{mine.slots / body['slot']} is missing" in said.err
    assert "step 5" in said.out


def test_text_table_has_all_columns(ckpt: Run, ours: Ours) -> None:
    """The text that people read would lose a column, a total or a small item."""
    lines = ckpt("inspect", ours.root / "4").out.splitlines()
    row = next(line.split() for line in lines if line.startswith("state:w "))
    assert row == ["state:w", "float32", "[8,8]", "256", "B", "P('fsdp')", "on", "data=2,fsdp=2", "[4,8]"]
    assert "  proven: every cell has a digest (not checked here)" in lines
    assert any(line.startswith("float32 ") for line in lines)
    assert 'data (json): {"step": 4}' in lines


def test_table_fits_a_narrow_terminal(ckpt: Run, ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal names would be cut, or a bracket be taken for markup."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    out = re.sub(r"\x1b\[[0-9;]*m", "", ckpt("inspect", ours.root / "4", "--match", "x").out)
    rows = [line for line in out.splitlines() if line.startswith(("state:x", "     "))]
    assert "float32" in rows[0]
    assert "".join("".join(rows[:4]).split()).count("[4,4]") == 1
    assert max(map(len, rows)) <= 60


def test_match_depth_and_sort_options(ckpt: Run, ours: Ours) -> None:
    """A large tree could not be narrowed, grouped or ordered."""
    found = json.loads(ckpt("inspect", ours.root / "4", "--json", "--match", "list.*", "--depth", "2").out)
    assert leaves_of(found).keys() == {"list.0", "list.1"}
    assert found["totals"]["by_group"] == {
        "state:list.0": {"leaves": 1, "bytes": 4},
        "state:list.1": {"leaves": 1, "bytes": 8},
    }
    assert found["totals"]["by_dtype"] == {
        "float32": {"leaves": 1, "bytes": 4},
        "float16": {"leaves": 1, "bytes": 8},
    }
    by_bytes = json.loads(ckpt("inspect", ours.root / "4", "--json", "--sort", "bytes").out)
    sizes = [leaf["bytes"] for leaf in leaves_of(by_bytes).values()]
    assert sizes == sorted(sizes, reverse=True)
    by_name = json.loads(ckpt("inspect", ours.root / "4", "--json", "--sort", "name", "--match", "state:*").out)
    assert list(leaves_of(by_name)) == sorted(flat(make_state()))
    grouped = ckpt("inspect", ours.root / "4", "--depth", "1").out
    assert "state:list" in grouped
    assert "state:list.0" not in grouped


def test_stored_bytes_are_reported(ckpt: Run, ours: Ours, stock: Path, tmp_path: Path) -> None:
    """Nobody could see what compression saves, or the cost of a checkpoint in its place."""
    item = stock / "root/3/state"
    taken = sum(path.stat().st_size for path in item.rglob("*") if path.is_file())
    items = {each["name"]: each for each in json.loads(ckpt("inspect", stock / "root/3", "--json").out)["items"]}
    assert items["state"]["stored_bytes"] == taken
    assert f"bytes), {size_text(taken)} stored" in ckpt("inspect", item).out
    assert " stored" not in ckpt("inspect", item, "--match", "w").out
    (slot,) = [each for each in json.loads(ckpt("inspect", ours.slots, "--json").out)["items"] if each["leaves"]]
    assert slot["stored_bytes"] is None
    path = tmp_path / "a.npz"
    np.savez_compressed(path, w=np.zeros(100_000))
    assert json.loads(ckpt("inspect", path, "--json").out)["items"][0]["stored_bytes"] == path.stat().st_size
    assert "  1 leaf, 781.2 KiB (800000 bytes), " in ckpt("inspect", path).out


def test_json_shape_is_documented(ckpt: Run, ours: Ours) -> None:
    """Scripts that read `--json` would break: docs/CLI.md promises these names."""
    found = json.loads(ckpt("inspect", ours.root / "4", "--json").out)
    top = ["format", "path", "kind", "step", "origin", "items", "totals", "shared", "notes", "problems"]
    assert list(found) == top
    assert found["format"] == 1
    origin = ["writer", "proven", "save_id", "processes", "hosts", "committed_at_s", "provenance", "certified"]
    assert list(found["origin"]) == origin
    assert list(found["items"][0]) == ["name", "kind", "layout", "stored_bytes", "value", "leaves"]
    leaf = ["name", "bytes", "path", "kind", "dtype", "shape", "cell", "sharding", "key_impl", "held_bytes"]
    assert list(leaves_of(found)["w"]) == leaf
    assert list(found["totals"]) == ["leaves", "bytes", "by_dtype", "by_group"]
    page = (Path(__file__).parents[2] / "docs/CLI.md").read_text()
    assert [name for name in (*top, *origin, *leaf) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("root", long_except(["ours"], ["ours", "stock"]))
def test_runs_without_a_backend_and_with_one_device(root: str, ours: Ours, stock: Path) -> None:
    """A login node without accelerators, or with fewer than the job had, could not look at a checkpoint."""
    path = ours.root if root == "ours" else stock / "root"
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = [sys.executable, "-c", CHECK_BACKEND, "inspect", str(path), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert leaves_of(json.loads(done.stdout))["w"]["sharding"] == "P('fsdp') on data=2,fsdp=2"


def test_python_m_runs_the_command(ours: Ours) -> None:
    """`python -m ckptkit.cli` would not pass on its exit code, or end a pipe with a traceback."""
    command = f"{sys.executable} -m ckptkit.cli"
    missing = subprocess.run(f"{command} inspect {ours.home}/none", shell=True, capture_output=True, text=True)
    assert (missing.returncode, missing.stdout) == (10, "")
    cut = subprocess.run(f"{command} inspect {ours.root} | true", shell=True, capture_output=True, text=True)
    assert cut.stderr == ""


def test_array_bytes_are_not_read(ckpt: Run, mine: Ours) -> None:
    """Looking at a checkpoint would cost as much as restoring it."""
    for data in (mine.root / "4/state").rglob("d/*"):
        data.unlink()
    for slot in mine.slots.glob("slot-*.bin"):
        os.truncate(slot, 0)
    assert ckpt("inspect", mine.root / "4").code == 0
    assert ckpt("inspect", mine.slots).code == 0

"""`ckptkit convert`: every dtype and shape into every format and back, read by the formats' own packages."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.conversion.mapping import MapRule, cast, mapped
from ckptkit.errors import CheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo
from tests.cli.conftest import Ours, Run
from tests.formats import writers
from tests.formats.writers import LOW, PLAIN, RARE, dtype_of, flat, same_bits, tree
from tests.states import make_state, raw

ZARR = ("int2", "int4", "complex64", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn")  # rare ones that it can hold
TARGETS = ("orbax", "safetensors", "hf", "npz", "torch")


def read(path: Path | str) -> dict[str, np.ndarray]:
    with open_checkpoint(str(path)) as opened:
        return {name: tensor.read() for name, tensor in opened.by_name().items()}


def everything(path: Path, names: tuple[str, ...]) -> tuple[Path, dict[str, np.ndarray]]:
    """Every dtype in every shape, by Flax."""
    nested = tree(names)
    return writers.by_flax(path / "all.msgpack", nested), flat(nested)


@pytest.mark.parametrize("to", TARGETS)
def test_round_trip_of_every_dtype_and_shape(to: str, ckpt: Run, tmp_path: Path) -> None:
    """A dtype, an empty array or a scalar would come back as something else, through any of the formats."""
    source, expected = everything(tmp_path, (*PLAIN, *LOW, *RARE) if to != "orbax" else (*PLAIN, *LOW, *ZARR))
    assert ckpt("convert", source, tmp_path / "there", "--to", to, "--memory", "64KiB").code == 0
    assert ckpt("convert", tmp_path / "there", tmp_path / "back.npz", "--to", "npz").code == 0
    for path in (tmp_path / "there", tmp_path / "back.npz"):
        found = read(path)
        assert found.keys() == expected.keys()
        for name, leaf in expected.items():
            assert same_bits(found[name], leaf), name
    assert sorted(os.listdir(tmp_path)) == ["all.msgpack", "back.npz", "there"]


def assert_same_bits(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert same_bits(np.asarray(found[name]), leaf), name


def test_output_is_read_by_safetensors_and_numpy(ckpt: Run, tmp_path: Path) -> None:
    """Other programs could not read our files, or would get other bits."""
    package = pytest.importorskip("safetensors.numpy")
    nested = tree((*PLAIN, "bfloat16"))
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    assert ckpt("convert", source, tmp_path / "a.safetensors", "--to", "safetensors").code == 0
    assert_same_bits(package.load_file(tmp_path / "a.safetensors"), flat(nested))
    plain = tree(PLAIN)
    source = writers.by_flax(tmp_path / "b.msgpack", plain)
    assert ckpt("convert", source, tmp_path / "b.npz", "--to", "npz").code == 0
    with np.load(tmp_path / "b.npz") as loaded:
        assert_same_bits(dict(loaded), flat(plain))
    assert ckpt("convert", source, tmp_path / "hf", "--to", "hf", "--shard-size", "1KiB").code == 0
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    loaded = {name: package.load_file(tmp_path / "hf" / file)[name] for name, file in index.items()}
    assert_same_bits(loaded, flat(plain))


def test_output_is_read_by_torch(ckpt: Run, tmp_path: Path) -> None:
    """`torch.load` would refuse our archive, or give other bits."""
    torch = pytest.importorskip("torch")
    nested = tree((*PLAIN, *LOW, "complex64", "complex128"))
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    assert ckpt("convert", source, tmp_path / "a.pt", "--to", "torch").code == 0
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    for name, leaf in flat(nested).items():
        found = loaded[name]
        assert (tuple(found.shape), str(found.dtype)) == (leaf.shape, f"torch.{leaf.dtype.name}"), name
        view = found if leaf.dtype.isbuiltin == 1 else found.view(getattr(torch, f"int{8 * leaf.dtype.itemsize}"))
        assert view.numpy().tobytes() == leaf.tobytes(), name


def test_output_is_read_by_stock_orbax(ckpt: Run, tmp_path: Path) -> None:
    """Stock Orbax would not restore what we write, or `verify` not prove it."""
    nested = tree(("float32", "bfloat16", "int8", "bool", "int4"))
    for leaves in nested.values():
        del leaves["s4"], leaves["s5"]  # stock Orbax restores no arrays without elements
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    assert ckpt("convert", source, tmp_path / "7", "--to", "orbax").code == 0
    with ocp.PyTreeCheckpointer() as checkpointer:
        target = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), nested)
        found = checkpointer.restore(tmp_path / "7", restore_args=target)
    assert_same_bits(flat(found), flat(nested))
    assert "1 proven, 0 corrupt" in ckpt("verify", tmp_path / "7").out


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_tree_that_is_one_array_is_converted(ckpt: Run, tmp_path: Path) -> None:
    """Its leaf has no name: the command ended with an internal error."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", np.arange(3, dtype=np.float32))
    assert ckpt("convert", tmp_path / "one", tmp_path / "made", "--to", "orbax").code == 0
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert raw(checkpointer.restore(tmp_path / "made")) == raw(np.arange(3, dtype=np.float32))


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_typed_keys_survive_a_round_trip(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """Typed PRNG keys would become numbers on the way there and back, without a message."""
    said = ckpt("convert", ours.root / "4", tmp_path / "a.safetensors", "--to", "safetensors")
    assert "PRNG keys are stored as their key data" in said.out
    assert "left out: item data" in said.out
    assert ckpt("convert", tmp_path / "a.safetensors", tmp_path / "4", "--to", "orbax").code == 0
    state = make_state(4)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "4")
    assert raw(found["w"]) == raw(state["w"])
    assert raw(found["key"]) == raw(state["key"])
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(state["key"])


def test_rules_and_casts_change_the_right_elements(ckpt: Run, tmp_path: Path) -> None:
    """A rule would move the wrong elements, or a cast touch integers."""
    rng = np.random.default_rng(0)
    kv = rng.normal(size=(6, 2, 4, 5)).astype(np.float32)
    experts = {f"e{at}": {"w": rng.normal(size=(3, 4)).astype(np.float32)} for at in range(2)}
    source = writers.by_flax(
        tmp_path / "a.msgpack", {"b0": {"kv": kv}, **experts, "n": np.arange(3), "junk": np.zeros(1)}
    )
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nfrom = "*.kv"\nto = ["m.*.k", "m.*.v"]\nsplit = 1\ntranspose = [1, 2, 0]\nmerge = 0\n'
        '[[rule]]\nfrom = ["e0.w", "e1.w"]\nto = "experts"\nstack = 0\n'
        '[[rule]]\nfrom = "junk"\ndrop = true\n'
    )
    options = ("--map", rules, "--dtype", "experts=bfloat16", "--dtype", "n=float32", "--memory", "400")
    assert ckpt("convert", source, tmp_path / "b.npz", "--to", "npz", *options).code == 0
    found = read(tmp_path / "b.npz")
    expected = {f"m.b0.{k}": kv[:, at].transpose(1, 2, 0).reshape(20, 6) for at, k in enumerate("kv")}
    stacked = np.stack([experts["e0"]["w"], experts["e1"]["w"]]).astype(found["experts"].dtype)
    assert found["experts"].dtype.name == "bfloat16"
    assert_same_bits(found, {**expected, "experts": stacked, "n": np.arange(3)})
    back = tmp_path / "back.toml"
    back.write_text(
        '[[rule]]\nfrom = ["m.*.k", "m.*.v"]\nto = "*.kv"\ndivide = [0, 5]\ntranspose = [2, 0, 1]\nstack = 1\n'
    )
    assert (
        ckpt("convert", tmp_path / "b.npz", tmp_path / "c.npz", "--to", "npz", "--map", back, "--memory", "400").code
        == 0
    )
    assert same_bits(read(tmp_path / "c.npz")["b0.kv"], kv)


class _Source:
    """A tensor in memory that notes the elements of each read."""

    def __init__(self, array: np.ndarray, cell: tuple[int, ...] | None = None):
        self.array, self.reads = array, list[int]()
        leaf = LeafInfo(path=("w",), kind="numpy", dtype=array.dtype.name, shape=array.shape, cell=cell)
        self.tensor = Tensor(item="", leaf=leaf, fetch=self._fetch)

    def _fetch(self, box: Box) -> np.ndarray:
        self.reads.append(box.size)
        return self.array[box.slices()]


RULES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "merge": ({"merge": 1}, lambda w: w.reshape(4, 30, 7)),
    "merge-first": ({"merge": 0}, lambda w: w.reshape(20, 6, 7)),
    "divide": ({"divide": (2, 3)}, lambda w: w.reshape(4, 5, 2, 3, 7)),
    "divide-last": ({"divide": (3, 7)}, lambda w: w.reshape(4, 5, 6, 1, 7)),
    "transpose": ({"transpose": (3, 1, 0, 2)}, lambda w: w.transpose(3, 1, 0, 2)),
    "all": (
        {"divide": (2, 2), "transpose": (4, 2, 0, 3, 1), "merge": 2},
        lambda w: w.reshape(4, 5, 3, 2, 7).transpose(4, 2, 0, 3, 1).reshape(7, 3, 8, 5),
    ),
}


@pytest.mark.parametrize("kind", RULES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_rule_reads_what_a_box_holds(kind: str, data: st.DataObject) -> None:
    """A merge or a division would read whole rows: --memory 64MB took 1.7 GiB."""
    facts, change = RULES[kind]
    source = _Source(np.arange(840.0).reshape(4, 5, 6, 7))
    made = mapped({"w": source.tensor}, [MapRule(old=("w",), new=("v",), **facts)])["v"]
    expected = change(source.array)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    box = Box(start, tuple(data.draw(st.integers(at, size)) for at, size in zip(start, expected.shape, strict=True)))
    assert np.array_equal(made.read(box), expected[box.slices()])
    assert sum(source.reads) == box.size


@pytest.mark.parametrize("cell", [(4, 5, 6, 1), (1, 5, 2, 7)])
@pytest.mark.parametrize("kind", RULES)
def test_chunks_that_a_block_touches_stay_in_the_budget(kind: str, cell: tuple[int, ...]) -> None:
    """A thin block lies across many chunks, which are read whole: all of them would be in memory together."""
    facts, change = RULES[kind]
    source = _Source(np.arange(840.0).reshape(4, 5, 6, 7), cell)
    touched: list[int] = []

    def fetch(box: Box) -> np.ndarray:
        counts = [-(-b // size) - a // size for a, b, size in zip(box.start, box.stop, cell, strict=True)]
        touched.append(math.prod(counts) * math.prod(cell) * 8)
        return source.array[box.slices()]

    tensor = replace(source.tensor, fetch=fetch)
    made = mapped({"w": tensor}, [MapRule(old=("w",), new=("v",), **facts)])["v"]
    memory_bytes = 4 * math.prod(cell) * 8
    blocks = list(made.blocks(memory_bytes))
    whole = np.empty(made.shape)
    for box in blocks:
        whole[box.slices()] = made.read(box)
    assert np.array_equal(whole, change(source.array))
    assert max(touched) <= memory_bytes // 4
    with pytest.raises(CheckpointError, match="give --memory at least"):
        made.block_shape(memory_bytes - 1)


def test_cast_counts_the_wider_side(tmp_path: Path) -> None:
    """A chunk of float64 would count as one of bfloat16: a quarter of what reading it takes."""
    source = _Source(np.zeros((64, 64)), (64, 64))
    for tensors in (
        cast({"w": source.tensor}, [("w", "bfloat16")]),
        cast(mapped({"v": source.tensor}, [MapRule(old=("v",), new=("w",), transpose=(1, 0))]), [("w", "bfloat16")]),
    ):
        with pytest.raises(CheckpointError, match="chunks of 32768 bytes"):
            tensors["w"].block_shape(4 * 32768 - 1)
    wider = cast({"w": _Source(np.zeros((64, 64), np.float32), (64, 64)).tensor}, [("w", "float64")])["w"]
    with pytest.raises(CheckpointError, match="chunks of 32768 bytes"):  # what becomes of a chunk of 16 KiB
        wider.block_shape(4 * 32768 - 1)
    plain = cast({"w": _Source(np.zeros((64, 64))).tensor}, [("w", "bfloat16")])["w"]
    assert max(box.size for box in plain.blocks(65536)) * 8 <= 65536 // 8


def test_cast_keeps_small_integers(ckpt: Run, tmp_path: Path) -> None:
    """`--dtype '*=float8_e5m2'` would round the quantised weights: 9 has no float of that kind."""
    nested = {"q": np.arange(16).astype(dtype_of("uint4")), "w": np.arange(4, dtype=np.float32)}
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    target = tmp_path / "b.npz"
    assert ckpt("convert", source, target, "--to", "npz", "--dtype", "*=float8_e5m2").code == 0
    expected = {"q": nested["q"], "w": nested["w"].astype(dtype_of("float8_e5m2"))}
    assert_same_bits(read(target), expected)


@pytest.mark.parametrize("word", ["int8", "uint8", "int64", "int4", "bool"])
def test_cast_to_a_dtype_without_floats_is_refused(ckpt: Run, tmp_path: Path, word: str) -> None:
    """0.4 would become 0 and 300 become 44."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.asarray([0.4, 300], np.float32)})
    said = ckpt("convert", source, tmp_path / "b.npz", "--to", "npz", "--dtype", f"w={word}")
    assert (said.code, f"--dtype w={word}: {word} is not a dtype of floats" in said.err) == (1, True), said.err
    assert "--quantize int8 or fp8" in said.err
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize("to", ["npz", "orbax"])
@pytest.mark.parametrize(
    ("word", "notes"),
    [
        (
            "float8_e4m3fn",
            ["finite values became infinite or NaN: v (1 in float8_e4m3fn), w (3 in float8_e4m3fn)"],
        ),
        ("float8_e5m2", ["finite values became infinite or NaN: w (2 in float8_e5m2)"]),
        ("float16", ["finite values became infinite or NaN: w (2 in float16)"]),
        ("bfloat16", []),
    ],
)
def test_values_that_a_cast_loses_are_counted(ckpt: Run, tmp_path: Path, word: str, notes: list[str], to: str) -> None:
    """Weights would become NaN without a note."""
    w = np.asarray([[1, -500, np.nan, np.inf], [1e5, 448, -1e6, 0]], np.float32)
    tree = {"v": np.asarray([2.0**14]), "w": w, "n": np.arange(3)}
    source = writers.by_numpy(tmp_path / "a.npz", tree)
    words = ("convert", source, tmp_path / "b", "--to", to, "--dtype", f"**={word}")
    dry = ckpt(*words, "--dry-run", "--json")
    assert json.loads(dry.out)["notes"] == []
    said = ckpt(*words, "--json", "--memory", "160")
    assert json.loads(said.out)["notes"] == notes
    assert all(note in ckpt("convert", source, tmp_path / "c", *words[3:]).out for note in notes)


def test_cast_rounds_once_and_the_last_pattern_begins_anew(ckpt: Run, tmp_path: Path) -> None:
    """float64 would be rounded twice: by way of float32, or by a pattern that another replaces."""
    wide = {"w": np.asarray([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8]), "x": np.asarray([1 + 2.0**-20])}
    source = writers.by_numpy(tmp_path / "a.npz", wide)
    casts = ("--dtype", "**=bfloat16", "--dtype", "x=float32")
    assert ckpt("convert", source, tmp_path / "b.npz", "--to", "npz", *casts).code == 0
    found = read(tmp_path / "b.npz")
    assert found["w"].astype(np.float64).tolist() == [1 + 2.0**-7, 1]
    assert (found["x"].dtype, found["x"].tolist()) == (np.dtype(np.float32), [1 + 2.0**-20])


def test_infinities_that_a_dtype_does_not_have_are_counted(ckpt: Run, tmp_path: Path) -> None:
    """A diverged model would look like a healthy one."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.asarray([1, np.inf, np.nan], np.float32)})
    said = ckpt("convert", source, tmp_path / "b", "--to", "npz", "--dtype", "w=float6_e2m3fn")
    assert "infinite or NaN values became finite: w (2 in float6_e2m3fn)" in said.out


def test_rules_keep_typed_keys(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A stacked or split PRNG key would come out as plain integers, without a message."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nfrom = "keys"\nto = ["k0", "k1", "k2", "k3"]\nsplit = 0\n')
    said = ckpt("convert", ours.root / "4", tmp_path / "b.npz", "--to", "npz", "--map", rules)
    assert (said.code, "it holds PRNG keys" in said.err) == (1, True), said.err
    rules.write_text('[[rule]]\nfrom = "keys"\nto = "rngs"\n')
    assert ckpt("convert", ours.root / "4", tmp_path / "b.npz", "--to", "npz", "--map", rules).code == 0
    with open_checkpoint(str(tmp_path / "b.npz")) as opened:
        assert opened.by_name()["rngs"].leaf.key_impl == "threefry2x32"


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ('to = "x"', "a rule has `from` and `to`"),
        ('from = "w"', "a rule has `from` and `to`"),
        ("from = 3\ndrop = true", "3 is neither a name of a leaf"),
        ('from = "w"\nto = ["a", 2]\nsplit = 0', "is neither a name of a leaf nor a list of names"),
        ('from = "w"\nto = "x"\nsplt = 1', "'splt' is not a key of a rule"),
        ('from = "w"\nto = ["a", "b"]', "several in `to` need `split`"),
        ('from = "w"\nto = "x"\ntranspose = [0, 0]', "the rule for x does not fit w, (3, 2): [0, 0] is not an order"),
        ('from = "w"\nto = "x"\nmerge = 1', "the rule for x does not fit w, (3, 2): it has no such axis"),
        ('from = "w"\nto = ["a", "b"]\nsplit = 0', "axis 0 is split into 2 and has 3"),
        ('from = "w"\nto = "x', "rules.toml: "),
    ],
)
def test_invalid_rules_are_refused(ckpt: Run, tmp_path: Path, rule: str, why: str) -> None:
    """A slip in a rule file would be answered in Python's words."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.zeros((3, 2))})
    (tmp_path / "rules.toml").write_text(f"[[rule]]\n{rule}\n")
    said = ckpt("convert", source, tmp_path / "b", "--to", "npz", "--map", tmp_path / "rules.toml")
    assert (said.code, (tmp_path / "b").exists()) == (1, False)
    assert why in said.err


@pytest.mark.parametrize(
    ("before", "stacked"),
    [
        ('from = "b"\ndrop = true', '["a", "b"]'),
        ('from = "b"\nto = "c"', '["a", "b"]'),
        ('from = ["b", "x"]\nto = "c"\nstack = 0', '["a", "b"]'),
        ('from = "x"\ndrop = true', '["b", "b"]'),
    ],
)
def test_leaf_is_used_by_one_rule_alone(ckpt: Run, tmp_path: Path, before: str, stacked: str) -> None:
    """A leaf that a rule dropped or renamed would be written again, inside a stack."""
    source = writers.by_numpy(tmp_path / "a.npz", {name: np.zeros((3, 2)) for name in ("a", "b", "x")})
    rules = f'[[rule]]\n{before}\n[[rule]]\nfrom = {stacked}\nto = "s"\nstack = 0\n'
    (tmp_path / "rules.toml").write_text(rules)
    said = ckpt("convert", source, tmp_path / "t.npz", "--to", "npz", "--map", tmp_path / "rules.toml")
    assert (said.code, "needs leaf b, which a rule has used before" in said.err) == (1, True), said.err
    assert not (tmp_path / "t.npz").exists()


def test_arrays_without_dimensions_are_stacked(ckpt: Run, tmp_path: Path) -> None:
    """Orbax gives them chunks without a size: the command ended with an internal error."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"a": np.float32(1), "b": np.float32(2)})
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = ["a", "b"]\nto = "s"\nstack = 0\n')
    assert ckpt("convert", tmp_path / "a", tmp_path / "t.npz", "--map", tmp_path / "rules.toml").code == 0
    assert_same_bits(read(tmp_path / "t.npz"), {"s": np.array([1, 2], np.float32)})


def test_dry_run_writes_nothing_and_existing_target_is_kept(ckpt: Run, tmp_path: Path) -> None:
    """A dry run would write, or a file that is there be overwritten."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.arange(3)})
    said = ckpt("convert", source, tmp_path / "b.pt", "--to", "torch", "--dry-run")
    assert "would be written" in said.out
    assert os.listdir(tmp_path) == ["a.npz"]
    assert ckpt("convert", source, source, "--to", "npz").code == 1
    assert ckpt("convert", source, tmp_path / "no/b.npz", "--to", "npz").code == 1
    said = ckpt("convert", source, "memory://somewhere/b", "--to", "orbax")
    assert (said.code, "Orbax's checkpoints are written to disks, gs:// and s3://" in said.err) == (1, True)
    assert ckpt("convert", source, tmp_path / "c", "--to", "npz", "--map", source).code == 1


@pytest.mark.parametrize("to", TARGETS)
def test_unsupported_dtype_is_refused_before_any_write(to: str, ckpt: Run, tmp_path: Path) -> None:
    """A dry run would promise it, an archive be written that nobody reads again, or half a work be left behind."""
    wide = writers.by_numpy(tmp_path / "a.npz", {"w": np.arange(3, dtype=np.longdouble)})
    said = ckpt("convert", wide, tmp_path / "t", "--to", to, "--dry-run")
    assert (said.code, "which no format can give back" in said.err) == (1, True), said.err
    assert ckpt("convert", wide, tmp_path / "t", "--to", to, "--dtype", "w=float64").code == 0
    assert_same_bits(read(tmp_path / "t"), {"w": np.arange(3.0)})
    if to == "orbax":
        small = writers.by_flax(tmp_path / "b.msgpack", {"q": np.arange(3).astype(dtype_of("uint4"))})
        said = ckpt("convert", small, tmp_path / "q", "--to", to, "--dry-run")
        assert (said.code, "zarr cannot hold" in said.err) == (1, True), said.err
    assert not list(tmp_path.glob(".*"))


def test_npz_name_outside_its_directory_is_refused(ckpt: Run, tmp_path: Path) -> None:
    """A program that unpacks our archive would write outside its directory."""
    source = writers.by_flax(tmp_path / "a.msgpack", {"../../x": np.arange(3)})
    assert ckpt("convert", source, tmp_path / "b.npz", "--to", "npz").code == 1
    assert os.listdir(tmp_path) == ["a.msgpack"]


def test_names_that_numpy_takes_for_one_another_are_refused(ckpt: Run, tmp_path: Path) -> None:
    """`numpy.load` would give the one array for the other."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", {"x": np.arange(3), "x.npy": np.ones(2)})
    said = ckpt("convert", source, tmp_path / "b.npz", "--to", "npz")
    assert (said.code, "npz cannot tell 'x' from 'x.npy'" in said.err) == (1, True)
    assert ckpt("convert", source, tmp_path / "b.pt", "--to", "torch").code == 0


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("n" * 70_000, "npz", "has a name of 70004 bytes with .npy, and npz has at most 65535"),
        ("n" * 65_532, "npz", "has a name of 65536 bytes"),
        ("é" * 32_766, "npz", "has a name of 65536 bytes"),
        *[("\ud800", to, "is not a name in UTF-8") for to in ("npz", "torch", "orbax", "safetensors", "hf")],
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_name_that_an_archive_cannot_have_is_refused(name: str, to: str, why: str, ckpt: Run, tmp_path: Path) -> None:
    """The command would end with an internal error, after all data is written."""
    header = json.dumps({name: {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    said = ckpt("convert", tmp_path / "a.safetensors", tmp_path / "b", "--to", to)
    assert (said.code, why in said.err, len(said.err) < 400) == (1, True, True), said.err[:1000]
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_longest_name_of_an_archive_is_written(ckpt: Run, tmp_path: Path) -> None:
    """A name that fits would be refused, or not be read again."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", {"n" * 65_531: np.arange(3)})
    assert ckpt("convert", source, tmp_path / "b.npz", "--to", "npz").code == 0
    with np.load(tmp_path / "b.npz") as loaded:
        assert_same_bits(dict(loaded), read(tmp_path / "b.npz"))
    assert ckpt("convert", source, tmp_path / "b.pt", "--to", "torch").code == 0
    assert_same_bits(read(tmp_path / "b.pt"), read(source))


def test_omitted_items_and_leaves_are_reported(ckpt: Run, ours: Ours, stock: Path, tmp_path: Path) -> None:
    """Text and small items would be lost without a message."""
    said = ckpt("convert", ours.root / "4", tmp_path / "4", "--to", "orbax").out
    assert "left out: item data, which is not an array" in said
    other = writers.by_numpy(tmp_path / "v.npz", {"v": np.ones(2)})
    merged = ckpt("merge", ours.root / "4", other, tmp_path / "m", "--to", "npz").out
    assert "left out: item data, which is not an array" in merged
    for to in ("orbax", "safetensors"):
        said = ckpt("convert", stock / "zarr3", tmp_path / f"z-{to}", "--to", to, "--dry-run").out
        (line,) = [line for line in said.splitlines() if "left out" in line]
        assert line.endswith(", which are not arrays")
        assert all(leaf in line for leaf in ("text (string)", "nothing (None)", "empty (Dict)"))


def test_cast_that_matches_no_leaf_is_refused(ckpt: Run, tmp_path: Path) -> None:
    """A slip in a pattern would be a checkpoint of twice the size, and nobody would know."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.arange(3.0)})
    said = ckpt("convert", source, tmp_path / "b", "--to", "npz", "--dtype", "kernel=bfloat16")
    assert (said.code, (tmp_path / "b").exists()) == (10, False)
    assert "--dtype kernel=bfloat16 matches no leaf; the leaves are w" in said.err
    one = ckpt("convert", source, tmp_path / "b", "--to", "npz", "--dtype", "w=float16")
    assert one.out.startswith(f"{tmp_path / 'b'}: 1 leaf, ")


def test_damaged_source_leaves_no_partial_target(ckpt: Run, mine: Ours, tmp_path: Path) -> None:
    """Unusable work would stay on the disk, under a hidden name."""
    data = max((mine.root / "4/state").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    (tmp_path / "out").mkdir()
    for to in TARGETS:
        said = ckpt("convert", mine.root / "4", tmp_path / "out/4", "--to", to)
        assert (said.code, len(said.err.splitlines())) == (11, 1), said.err
        assert os.listdir(tmp_path / "out") == []


def test_convertible_damage_is_reported(ckpt: Run, stock: Path, tmp_path: Path) -> None:
    """Keys whose kind cannot be read any more come out as plain integers without a message."""
    shutil.copytree(stock / "zarr3", tmp_path / "item")
    for file in (tmp_path / "item/array_metadatas").iterdir():
        file.write_text("{")
    for command in (
        ("convert", tmp_path / "item", tmp_path / "t", "--to", "orbax"),
        ("diff", *[tmp_path / "item"] * 2),
    ):
        said = ckpt(*command)
        assert said.code == 11, command
        assert [line for line in said.err.splitlines() if "damaged: " in line and "array_metadatas" in line], said.err

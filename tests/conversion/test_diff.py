"""`ckptkit diff` and `inspect --stats` against NumPy's own answers, across formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ckptkit.cli import main
from ckptkit.conversion import diff
from ckptkit.formats.tensors import Tensor
from ckptkit.model.leaf_info import LeafInfo
from tests.cli.conftest import Ours, Run
from tests.formats import writers
from tests.formats.writers import dtype_of


def difference(path: Path, a: dict[str, Any], b: dict[str, Any], *options: str, capsys: Any) -> tuple[int, Any]:
    one, two = writers.by_numpy(path / "a.npz", a), writers.by_flax(path / "b.msgpack", b)
    code = main(["diff", str(one), str(two), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_value_differences_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A difference would be given the wrong size, or not be seen."""
    a = np.linspace(1, 2, 1000, dtype=np.float32)
    b = a.copy()
    b[10] = np.nextafter(np.nextafter(b[10], np.float32(9)), np.float32(9))
    b[20] += np.float32(0.25)
    code, found = difference(tmp_path, {"w": a, "same": a}, {"w": b, "same": a}, capsys=capsys)
    assert (code, found["same"], found["equal"]) == (20, False, 1)
    (leaf,) = found["values"]
    wide = np.abs(a.astype(float) - b)
    assert leaf["changed"] == 2 / 1000
    assert leaf["max_abs"] == wide.max()
    assert leaf["max_rel"] == (wide / b).max()
    assert leaf["ulp"] == int(abs(int(a[20:21].view("i4")[0]) - int(b[20:21].view("i4")[0])))
    assert leaf["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-6)
    assert difference(tmp_path, {"w": a}, {"w": b}, "--atol", "0.26", capsys=capsys)[0] == 0
    assert difference(tmp_path, {"w": a}, {"w": b}, "--rtol", "0.1", capsys=capsys)[0] == 20


def test_differences_of_64_bit_integers_are_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step counters and hashes that differ would be within every tolerance, since float64 rounds them."""
    big = np.array([2**53, -(2**62), 5], np.int64)
    code, found = difference(tmp_path, {"w": big}, {"w": big + 1}, "--atol", "0.5", capsys=capsys)
    assert (code, found["values"][0]["max_abs"]) == (20, 1)
    assert difference(tmp_path, {"w": big}, {"w": big + 1}, "--atol", "1", capsys=capsys)[0] == 0
    ends = np.array([2**64 - 1, 2**63 + 3], np.uint64)
    code, found = difference(tmp_path, {"w": ends}, {"w": ends - np.uint64(2)}, "--atol", "1.5", capsys=capsys)
    assert (code, found["values"][0]["max_abs"]) == (20, 2)
    mixed = {"w": np.array([2**53 + 1, -(2**63)], np.int64)}, {"w": np.array([2**53, 2**64 - 1], np.uint64)}
    code, found = difference(tmp_path, *mixed, "--atol", "1", capsys=capsys)
    assert (code, found["values"][0]["changed"], found["values"][0]["max_abs"]) == (20, 1, pytest.approx(1.5 * 2**64))


def test_overflow_in_a_comparison_is_infinite(tmp_path: Path, ckpt: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy's warnings would appear on stderr (here they are errors), or the command would end in one."""
    large = np.array([1e308, -1e308, 5e-324])
    code, found = difference(tmp_path, {"w": large}, {"w": -large}, capsys=capsys)
    assert (code, found["values"][0]["max_abs"], found["values"][0]["cosine"]) == (20, "Infinity", None)
    assert ckpt("inspect", writers.by_numpy(tmp_path / "l.npz", {"w": large}), "--stats").code == 0


def test_signed_zeros_nans_and_infinities_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-0.0 would pass for 0.0, or a NaN that became a number for a small difference."""
    zero, nan = np.zeros(3, np.float32), np.array([0, np.nan, 0], np.float32)
    _, found = difference(tmp_path, {"w": zero}, {"w": -zero}, capsys=capsys)
    assert (found["values"][0]["changed"], found["values"][0]["max_abs"], found["values"][0]["ulp"]) == (1, 0, 0)
    code, found = difference(tmp_path, {"w": zero}, {"w": nan}, "--atol", "9", capsys=capsys)
    assert (code, found["values"][0]["max_abs"]) == (20, "Infinity")
    assert difference(tmp_path, {"w": nan}, {"w": nan.copy()}, capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("name", "one", "two", "ulp"),
    [
        ("int4", -7, 7, None),
        ("uint2", 0, 3, None),
        ("int8", -7, 7, None),
        ("longdouble", 1, 2, None),
        ("complex64", 1, 2, None),
        ("bfloat16", 1, 1.015625, 2),
        ("float8_e4m3fn", -(2.0**-9), 2.0**-9, 2),
        ("float6_e2m3fn", -0.125, 0.125, 2),
        ("float4_e2m1fn", -0.5, 0.5, 2),
        ("float8_e8m0fnu", 1, 8, 3),
        ("float8_e8m0fnu", 4, 8, 1),
    ],
)
def test_ulp_counts_the_numbers_of_each_dtype(name: str, one: float, two: float, ulp: int | None) -> None:
    """Integers would be measured as floats, and floats without a sign or of 4 bits at the wrong places."""
    sides = [np.asarray([value]).astype(dtype_of(name)) for value in (one, two)]
    leaf = LeafInfo(path=("w",), kind="tensor", dtype=sides[0].dtype.name, shape=(1,))
    a, b = ({"w": Tensor(item="", leaf=leaf, fetch=lambda box, side=side: side)} for side in sides)
    assert diff(a, b).values[0].ulp == ulp


def test_missing_leaves_shapes_and_dtypes_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A leaf that one side lacks, or that changed its shape, would go unseen."""
    x = np.arange(4, dtype=np.float32)
    a, b = {"x": x, "y": x, "z": x}, {"x": x.reshape(2, 2), "y": x.astype(ml_dtypes.bfloat16), "q": x}
    code, found = difference(tmp_path, a, b, capsys=capsys)
    assert code == 20
    assert (found["only_a"], found["only_b"]) == (["z"], ["q"])
    assert found["shapes"] == [["x", "float32[4]", "float32[2,2]"], ["y", "float32[4]", "bfloat16[4]"]]


def test_diff_applies_rules_and_reads_steps_and_slots(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """Two names of one leaf could not be held against each other, nor a step against a slot or a file."""
    text = ckpt("diff", ours.root / "4", ours.root / "4").out
    assert (
        text == "12 leaves are the same, 0 differ in their values\n  not compared: item data, which is not an array\n"
    )
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nfrom = "w"\nto = "kernel"\ntranspose = [1, 0]\n[[rule]]\nfrom = "**"\ndrop = true\n')
    w = np.arange(64, dtype=np.float32).reshape(8, 8) + 4
    assert (
        ckpt("diff", ours.root / "4", writers.by_numpy(tmp_path / "w.npz", {"kernel": w.T}), "--map", rules).code == 0
    )


def test_keys_of_another_implementation_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bits draw other numbers: a run would not continue as before, and `diff` would report no difference."""
    for impl in ("rbg", "unsafe_rbg"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / impl, {"key": jax.random.key(1, impl=impl)})
    one, two = str(tmp_path / "rbg"), str(tmp_path / "unsafe_rbg")
    assert main(["diff", one, two, "--json"]) == 20
    assert json.loads(capsys.readouterr().out)["shapes"] == [["key", "rbg[4]", "unsafe_rbg[4]"]]
    assert main(["diff", one, one]) == 0


def test_statistics_are_exact(ckpt: Run, tmp_path: Path) -> None:
    """The statistics would be of other numbers than those in the file, or NaN would poison them."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=3_000_000) + 100).astype(np.float32)
    x = np.array([1, np.nan, np.inf, -np.inf, 3], np.float32)
    path = writers.by_numpy(tmp_path / "s.npz", {"w": w, "x": x, "e": np.zeros((0, 2))})
    found = {each["name"]: each for each in json.loads(ckpt("inspect", path, "--stats", "--json").out)["stats"]}
    wide = w.astype(float)
    expected = (wide.min(), wide.max(), wide.mean(), wide.std(), np.linalg.norm(wide), 0, 0)
    keys = ("minimum", "maximum", "mean", "std", "norm", "nan", "inf")
    assert tuple(found["w"][key] for key in keys) == pytest.approx(expected, rel=1e-9)
    assert tuple(found["x"][key] for key in keys) == pytest.approx((1, 3, 2, 1, 10**0.5, 1, 2))
    assert tuple(found["e"][key] for key in keys) == (None, None, None, None, 0.0, 0, 0)
    assert "3.162" in ckpt("inspect", path, "--stats").out


def test_statistics_survive_one_damaged_leaf(ckpt: Run, tmp_path: Path) -> None:
    """One damaged cell would hide the numbers of every other leaf."""
    source = writers.by_numpy(tmp_path / "a.npz", {"w": np.arange(1e5), "x": np.ones(3)})
    step = tmp_path / "4"
    assert ckpt("convert", source, step, "--to", "orbax").code == 0
    bits = np.arange(4e4, 4e4 + 4).tobytes()
    (data,) = [file for file in step.rglob("d/*") if bits in file.read_bytes()]
    data.write_bytes(data.read_bytes().replace(bits, bytes(32)))
    said = ckpt("inspect", step, "--stats", "--json")
    assert said.code == 11
    told = json.loads(said.out)
    assert [(each["name"], each["norm"]) for each in told["stats"]] == [("x", pytest.approx(3**0.5))]
    assert len([problem for problem in told["problems"] if "leaf 4:w" in problem or "leaf w" in problem]) == 1
    text = ckpt("inspect", step, "--stats")
    assert (text.code, "4:w " in text.out, "1.732" in text.out, "damaged: " in text.err) == (11, True, True, True)


def test_text_uses_singular_and_plural(ckpt: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person would read `1 leaves are the same`."""
    x = np.arange(4, dtype=np.float32)
    one = writers.by_numpy(tmp_path / "a.npz", {"x": x, "y": x})
    two = writers.by_numpy(tmp_path / "b.npz", {"x": x, "y": x + 1})
    assert ckpt("diff", one, one).out == "2 leaves are the same, 0 differ in their values\n"
    assert main(["diff", str(one), str(two)]) == 20
    assert capsys.readouterr().out.startswith("1 leaf is the same, 1 differs in its values\n")


def test_most_changed_leaves_come_first(ckpt: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a thousand leaves people would have to find the changed ones themselves."""
    a = {"m.a": np.zeros(10), "m.b": np.zeros(10), "o.c": np.zeros(10)}
    b = {"m.a": np.eye(10)[0], "m.b": np.ones(10), "o.c": np.arange(10.0) // 5}
    one, two = writers.by_numpy(tmp_path / "a.npz", a), writers.by_numpy(tmp_path / "b.npz", b)
    assert main(["diff", str(one), str(two), "--top", "2"]) == 20
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["m.b", "o.c", "..."]
    assert lines[-1] == "... and 1 more"
    assert main(["diff", str(one), str(two), "--depth", "1"]) == 20
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["m", "2", "100"],
        ["o", "1", "50"],
    ]
    other = writers.by_numpy(tmp_path / "c.npz", {"z.big": np.zeros(99)})
    lines = ckpt("merge", one, other, tmp_path / "t", "--to", "npz", "--dry-run", "--top", 1).out.splitlines()
    assert (lines[1].split()[0], lines[2]) == ("z.big", "... and 3 more")

"""`extract` and `merge`: parts taken out and put together, against NumPy's own arithmetic, within the memory budget."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit.conversion as conversion
from ckptkit.conversion import converting
from ckptkit.errors import CheckpointError, MergeError
from ckptkit.formats import open_checkpoint
from tests.cli.conftest import Run
from tests.cli.conftest import ckpt as ckpt  # the fixture
from tests.formats.writers import by_flax, by_safetensors, flat, same_bits

RNG = np.random.default_rng(5)


def model(seed: float, dtype: Any = np.float32) -> dict[str, Any]:
    values = np.random.default_rng(int(seed)).standard_normal((6, 4)).astype(dtype)
    return {
        "params": {"a": {"kernel": values, "bias": values[0] * 2}, "ab": values[:, :2]},
        "opt_state": {"mu": values * 3, "count": np.int32(7)},
        "mask": np.arange(4) % 2 == 0,
    }


def read(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(str(path)) as opened:
        return {name: tensor.read() for name, tensor in opened.by_name().items()}


@pytest.mark.parametrize("to", ["orbax", "safetensors", "npz"])
def test_extract_takes_exactly_one_subtree(ckpt: Run, tmp_path: Path, to: str) -> None:
    """The extracted checkpoint would lack a leaf, have one too many, or other bits."""
    source, tree = by_safetensors(tmp_path / "a.safetensors", model(1)), flat(model(1))
    assert ckpt("extract", source, tmp_path / "p", "--only", "params", "--without", "params.a.b*", "--to", to).code == 0
    found = read(tmp_path / "p")
    assert sorted(found) == ["params.a.kernel", "params.ab"]
    assert all(same_bits(found[name], tree[name]) for name in found)
    said = ckpt("extract", source, tmp_path / "q", "--only", "param", "--to", to)
    assert (said.code, (tmp_path / "q").exists()) == (10, False)
    assert "has no leaf param, nor a sub-tree; at its top are mask, opt_state, params" in said.err


def test_patterns_match_names_with_newlines(ckpt: Run, tmp_path: Path) -> None:
    """A leaf would be left out of `**` without a message."""
    source = by_safetensors(tmp_path / "a.safetensors", {"n\nl": np.arange(3.0), "a": {"b\n": np.arange(2)}})
    assert ckpt("extract", source, tmp_path / "p", "--only", "**", "--to", "npz").code == 0
    assert sorted(read(tmp_path / "p")) == ["a.b\n", "n\nl"]


def test_slashes_name_a_subtree_too(ckpt: Run, tmp_path: Path) -> None:
    """A path as Flax and Hugging Face write it was refused: only dots were accepted."""
    tree = {"params": {"dense": {"kernel": np.arange(4.0)}, "other": np.ones(2)}}
    source = by_flax(tmp_path / "a.msgpack", tree)
    assert ckpt("extract", source, tmp_path / "p.npz", "--only", "params/dense").code == 0
    assert list(read(tmp_path / "p.npz")) == ["params.dense.kernel"]


def test_extract_applies_rules(ckpt: Run, tmp_path: Path) -> None:
    """A sub-tree could not become the whole."""
    source = by_safetensors(tmp_path / "a.safetensors", model(1))
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = "params.**"\nto = "**"\n')
    arguments = ("--only", "params", "--map", tmp_path / "rules.toml", "--to", "npz")
    assert ckpt("extract", source, tmp_path / "p", *arguments).code == 0
    assert sorted(read(tmp_path / "p")) == ["a.bias", "a.kernel", "ab"]


@pytest.fixture
def two_items(tmp_path: Path) -> Path:
    """A step with two array items; `shared` is in both."""
    leaves = {name: np.full((2, 3), at, np.float32) for at, name in enumerate("wbm")}
    state = {"params": {"w": leaves["w"], "b": {"value": leaves["b"]}}, "shared": {"s": leaves["w"]}}
    args = {"state": state, "ema": {"mean": {"m": leaves["m"]}, "shared": {"s": leaves["m"]}}}
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, args=ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in args.items()}))
    return tmp_path / "root/1"


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("params", ["state.params.b.value", "state.params.w"]),
        ("params.w", ["state.params.w"]),
        ("params.b", ["state.params.b.value"]),
        ("mean.*", ["ema.mean.m"]),
        ("ema:shared", ["ema.shared.s"]),
        ("ema", ["ema.mean.m", "ema.shared.s"]),
        ("**.s", ["ema.shared.s", "state.shared.s"]),
    ],
)
def test_leaf_of_several_items_is_found_without_its_item(
    only: str, expected: list[str], two_items: Path, ckpt: Run, tmp_path: Path
) -> None:
    """A name that only one item has would match nothing unless the item is named, against the documents."""
    assert ckpt("extract", two_items, tmp_path / "p", "--only", only, "--to", "npz").code == 0
    assert sorted(read(tmp_path / "p")) == expected


@pytest.mark.parametrize("command", ["convert", "extract", "with rules"])
@pytest.mark.parametrize(
    "name", ["params.w", "state:params.w", "state.params.w", "params.*", "params.b", "state:params.b"]
)
def test_cast_takes_the_same_names_in_every_command(
    name: str, command: str, two_items: Path, ckpt: Run, tmp_path: Path
) -> None:
    """A cast would take a leaf by one of its names in one command, and not in another, or not with rules."""
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = "mean.*"\nto = "m.*"\n')
    rules = ("--map", tmp_path / "rules.toml") if command == "with rules" else ()
    words = ("extract", "--only", "ema", "--only", "state") if command == "extract" else ("convert",)
    first, *more = words
    flags = ("--to", "orbax", "--dtype", f"{name}=float16", *more, *rules)
    assert ckpt(first, two_items, tmp_path / "p", *flags).code == 0
    found = read(tmp_path / "p")
    assert found["state.params.b.value" if name.endswith("b") else "state.params.w"].dtype == np.float16
    assert found["state.shared.s"].dtype == found["ema.shared.s"].dtype == np.float32
    assert ("m.m" if rules else "ema.mean.m") in found


@pytest.mark.parametrize(
    "flags",
    [("--only", "shared"), ("--only", "share?.s"), ("--only", "ema", "--only", "state", "--dtype", "shared.s=float16")],
)
def test_name_that_several_items_have_is_refused(
    flags: tuple[str, ...], two_items: Path, ckpt: Run, tmp_path: Path
) -> None:
    """Leaves of another item would be written too, or the error would report that there are none."""
    said = ckpt("extract", two_items, tmp_path / "p", "--to", "npz", *flags)
    name = flags[-1].partition("=")[0]
    assert (said.code, f"{name} is in 2 items; name one of ema:{name}, state:{name}" in said.err) == (1, True), said.err


def test_merge_keeps_the_leaves_of_every_source(ckpt: Run, tmp_path: Path) -> None:
    """Leaves of one would be lost under those of another."""
    one = by_safetensors(tmp_path / "one.safetensors", {"a": np.arange(3.0), "b": {"c": np.arange(4)}})
    two = by_safetensors(tmp_path / "two.safetensors", {"d": np.arange(5.0)})
    assert ckpt("merge", one, two, tmp_path / "all", "--to", "orbax").code == 0
    assert {name: leaf.size for name, leaf in read(tmp_path / "all").items()} == {"a": 3, "b.c": 4, "d": 5}
    said = ckpt("merge", one, two, one, tmp_path / "no", "--to", "npz")
    assert (said.code, (tmp_path / "no").exists()) == (12, False)
    assert f"(2 differences):\n  a is in {one} and in {one}\n  b.c is in" in said.err
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = "d"\nto = "a"\n')
    said = ckpt("merge", one, two, tmp_path / "no", "--to", "npz", "--map", tmp_path / "rules.toml")
    assert said.code == 12
    (tmp_path / "rules.toml").write_text('[[rule]]\nfrom = "x"\nto = "a"\n')
    said = ckpt("merge", one, two, tmp_path / "no", "--to", "npz", "--map", tmp_path / "rules.toml")
    assert (said.code, "matches no leaf of any of them" in said.err) == (10, True)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "complex64"])
def test_average_of_several_rounds_once(tmp_path: Path, name: str) -> None:
    """Rounding at every term would lose what averaging is for."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = [(RNG.standard_normal((5, 33)) * 3).astype(dtype) for _ in range(4)]
    paths = [by_npz(tmp_path / f"{at}.npz", {"w": each, "n": np.int32(3)}) for at, each in enumerate(values)]
    opened = [open_checkpoint(str(path)) for path in paths]
    made = conversion.averaged(opened).by_name()
    wide = np.complex128 if dtype.kind == "c" else np.float64
    expected = np.stack([each.astype(wide) for each in values]).sum(0) / 4
    assert made["w"].dtype == dtype
    found = made["w"].read().astype(wide)
    step = {"float64": 1e-15, "float32": 1e-7, "complex64": 1e-7}.get(name, float(ml_dtypes.finfo(dtype).eps))
    assert np.abs(found - expected).max() <= step * np.abs(expected).max()
    if name == "float32":
        assert same_bits(made["w"].read(), expected.astype(np.float32))
    assert same_bits(made["n"].read(), np.asarray(np.int32(3)))
    for each in opened:
        each.__exit__(None, None, None)


def by_npz(path: Path, tree: dict[str, Any]) -> Path:
    plain: Any = {name: np.asarray(leaf) for name, leaf in tree.items() if np.asarray(leaf).dtype.kind != "V"}
    np.savez(path, **plain)
    if any(np.asarray(leaf).dtype.kind == "V" for leaf in tree.values()):  # NumPy keeps no name of these
        return by_safetensors(path.with_suffix(".safetensors"), tree)
    return path


def test_average_refuses_leaves_without_a_mean(ckpt: Run, tmp_path: Path) -> None:
    """A step counter would be averaged, or a checkpoint of another model."""
    one, two = model(1), model(2)
    a = by_safetensors(tmp_path / "a.safetensors", one)
    b = by_safetensors(tmp_path / "b.safetensors", two)
    assert ckpt("merge", a, b, tmp_path / "mean", "--average", "--to", "safetensors").code == 0
    found = read(tmp_path / "mean")["params.a.kernel"]
    assert np.allclose(found, (one["params"]["a"]["kernel"] + two["params"]["a"]["kernel"]) / 2)
    two["opt_state"]["count"] = np.int32(8)
    two["params"]["ab"] = two["params"]["ab"].astype(np.float16)
    del two["mask"]
    b = by_safetensors(tmp_path / "c.safetensors", two)
    said = ckpt("merge", a, b, tmp_path / "no", "--average", "--to", "safetensors")
    assert said.code == 12
    for line in (
        f"mask is only in {a}",
        f"opt_state.count is int32, has no mean, and differs in {b}",
        "params.ab is float32[6,2] in",
    ):
        assert line in said.err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", ["peft", "nnx"])
def test_lora_merge_equals_base_plus_adapter(ckpt: Run, tmp_path: Path, kind: str) -> None:
    """A merged model would not compute what base and adapter do together."""
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    base = RNG.standard_normal((8, 6)).astype(np.float32)  # [in, out]
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 2), (2, 6)))
    expected = x @ base + 16 / 2 * (x @ a @ b)
    other = np.arange(5.0)
    if kind == "peft":
        (tmp_path / "adapter").mkdir()
        update = {"base_model.model.l.0.q.lora_A.weight": a.T, "base_model.model.l.0.q.lora_B.weight": b.T}
        adapter = by_safetensors(tmp_path / "adapter/adapter_model.safetensors", update)
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"lora_alpha": 16, "r": 2}))
        root, name = by_safetensors(tmp_path / "b.safetensors", {"l.0.q.weight": base.T, "o": other}), "l.0.q.weight"
        flags: tuple[object, ...] = ()
    else:
        adapter = by_safetensors(tmp_path / "adapter.safetensors", {"l.0.q.lora_a": a, "l.0.q.lora_b": b})
        root, name = by_safetensors(tmp_path / "b.safetensors", {"l.0.q.kernel": base, "o": other}), "l.0.q.kernel"
        assert ckpt("merge", root, adapter, tmp_path / "no", "--lora", "--to", "npz").code == 1
        flags = ("--lora-alpha", 16)
    assert ckpt("merge", root, adapter, tmp_path / "m", "--lora", *flags, "--to", "safetensors").code == 0
    found = read(tmp_path / "m")
    assert sorted(found) == sorted([name, "o"])
    kernel = found[name].T if kind == "peft" else found[name]
    assert np.abs(x @ kernel - expected).max() < 1e-4
    assert same_bits(found["o"], other)


def test_resume_with_another_lora_alpha_is_refused(ckpt: Run, tmp_path: Path, ended_at: Callable[..., None]) -> None:
    """Half of the layers would have the update at another strength."""
    base = by_safetensors(tmp_path / "b.safetensors", {"q.kernel": RNG.standard_normal((8, 6)).astype(np.float32)})
    update = {"q.lora_a": np.ones((8, 2), np.float32), "q.lora_b": np.ones((2, 6), np.float32)}
    adapter = by_safetensors(tmp_path / "a.safetensors", update)
    words = ("merge", base, adapter, tmp_path / "m", "--lora", "--to", "safetensors", "--lora-alpha")
    ended_at(converting.os, "rename", *words, 8)
    said = ckpt(*words, 16, "--resume")
    assert (said.code, "is other work than this" in said.err) == (1, True)
    assert re.fullmatch(rf"{tmp_path}/m: 1 leaf, \d+ B written as safetensors\n", ckpt(*words, 8, "--resume").out)


def test_unfitting_lora_updates_are_refused(tmp_path: Path) -> None:
    """An adapter of another model would be folded in where it happens to fit."""
    base = by_safetensors(tmp_path / "b.safetensors", {"q.weight": np.zeros((4, 6)), "n.weight": np.zeros(4)})
    adapter = by_safetensors(
        tmp_path / "a.safetensors",
        {
            "q.lora_A.weight": np.zeros((2, 5)),
            "q.lora_B.weight": np.zeros((4, 2)),
            "n.lora_A.weight": np.zeros((2, 5)),
            "k.lora_A.weight": np.zeros((2, 5)),
            "head.weight": np.zeros(3),
        },
    )
    with open_checkpoint(str(base)) as one, open_checkpoint(str(adapter)) as two:
        with pytest.raises(MergeError) as error:
            conversion.lora_merged(one, two, alpha=1)
        assert error.value.differences == (
            f"head.weight of {adapter} is not a low-rank update",
            "k.weight has an update and is not in the base",
            "n.weight has one half of an update: lora_A",
            "q.weight is float64[4,6], and its update [4, 2] x [2, 5]",
        )
        (tmp_path / "adapter_config.json").write_text('{"lora_alpha": "much"}')
        with pytest.raises(CheckpointError, match="its lora_alpha is 'much', not a number"):
            conversion.lora_merged(one, two)


def test_resume_is_refused_if_a_source_changed(ckpt: Run, tmp_path: Path, ended_at: Callable[..., None]) -> None:
    """The halves of two different models would become one."""
    one = by_safetensors(tmp_path / "one.safetensors", {"a": np.arange(3.0)})
    two = by_safetensors(tmp_path / "two.safetensors", {"b": np.arange(3.0)})
    arguments = ("merge", one, two, tmp_path / "dst", "--to", "safetensors")
    ended_at(converting.os, "rename", *arguments)
    assert not (tmp_path / "dst").exists()
    by_safetensors(tmp_path / "two.safetensors", {"b": np.arange(3.0) + 1})
    said = ckpt(*arguments, "--resume")
    assert said.code == 1
    assert "leave --resume out to begin anew" in said.err
    assert ckpt(*arguments).code == 0
    assert read(tmp_path / "dst")["b"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.long
def test_merge_memory_is_bounded(tmp_path: Path) -> None:
    """A laptop could not merge what is larger than its memory."""
    rows, dtype = 4_000, ml_dtypes.bfloat16  # 64 MB
    path = by_safetensors(tmp_path / "a.safetensors", {"q.weight": np.ones((rows, 8_000), dtype)})
    halves = {"q.lora_A.weight": np.ones((2, 8_000), dtype), "q.lora_B.weight": np.ones((rows, 2), dtype)}
    update = by_safetensors(tmp_path / "l.safetensors", halves)
    rest = ["--to", "safetensors", "--memory", "16MB"]
    runs = [
        ["merge", str(path), str(path), str(tmp_path / "mean"), "--average", *rest],
        ["merge", str(path), str(update), str(tmp_path / "lora"), "--lora", "--lora-alpha", "4", *rest],
    ]
    code = (
        "import resource\nfrom ckptkit.cli import main\n"
        "peak_kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"before = peak_kib()\ncodes = [main(each) for each in {runs!r}]\nprint(*codes, peak_kib() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    *codes, grown_kib = map(int, done.stdout.splitlines()[-1].split())
    assert codes == [0, 0], done.stderr
    assert grown_kib * 1024 < 60 << 20, "16 MB and what libraries load late; the tensor has 64"
    for name, value in (("mean", 1.0), ("lora", 5.0)):
        assert float(read(tmp_path / name)["q.weight"][17, 4_000]) == value

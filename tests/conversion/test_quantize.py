"""`convert --quantize` against NumPy written out block by block, and against Hugging Face's own loader."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.conversion import Quantization, convert, plan_convert
from ckptkit.conversion.quantized_values import DTYPES
from ckptkit.conversion.quantizing import Weight
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.leaf_info import LeafInfo
from tests.cli.conftest import Run
from tests.conversion.test_assembling import read
from tests.formats.writers import by_safetensors

RNG = np.random.default_rng(11)
FP8 = ml_dtypes.float8_e4m3fn
LIMITS = {"int8": 127.0, "fp8": 448.0}


def weights(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Rows of very different sizes, one of zeros, one of a single large value."""
    made = RNG.standard_normal(shape) * 10.0 ** RNG.uniform(-3, 3, (shape[0], *[1] * (len(shape) - 1)))
    made[1] = 0
    made[2], made[2, 0] = 0, -3e4
    return made.astype(dtype)


def by_hand(weight: np.ndarray, to: str, block: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales, one block after the other."""
    limit, one = np.float32(LIMITS[to]), np.float32(1)
    values = np.zeros(weight.shape, np.int8 if to == "int8" else FP8)
    scales = np.zeros([n // b for n, b in zip(weight.shape, block, strict=True)], np.float32)
    for place in itertools.product(*map(range, scales.shape)):
        part = tuple(slice(i * b, (i + 1) * b) for i, b in zip(place, block, strict=True))
        plain = weight[part].astype(np.float32)
        scales[place] = max(np.abs(plain).max() * (one / limit), np.float32(2.0**-100))
        units = np.minimum(np.maximum(plain * (one / scales[place]), -limit), limit)
        values[part] = np.rint(units).astype(np.int8) if to == "int8" else units.astype(FP8)
    return values, scales


def undone(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    block = [n // s for n, s in zip(values.shape, scales.shape, strict=True)]
    return values.astype(np.float32) * np.kron(scales, np.ones(block, np.float32))


def model(tmp_path: Path, **more: np.ndarray) -> Path:
    """A directory of Hugging Face's with a configuration."""
    (tmp_path / "src").mkdir()
    tensors = {
        "model.embed_tokens.weight": weights((8, 16)),
        "model.layers.0.q.weight": weights((96, 256)),
        "model.layers.0.k.weight": weights((32, 64), ml_dtypes.bfloat16),
        "model.norm.weight": np.ones(16, np.float32),
        "lm_head.weight": weights((8, 16)),
        **more,
    }
    by_safetensors(tmp_path / "src" / "model.safetensors", tensors)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "quantization_config": {"an": "old one"}}
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    return tmp_path / "src"


@pytest.mark.parametrize(
    ("words", "block", "strategy"),
    [
        ("int8", None, {"strategy": "channel"}),
        ("fp8", None, {"strategy": "channel"}),
        ("fp8:32x32", (32, 32), {"strategy": "block", "block_structure": [32, 32]}),
        ("int8:1x16", (1, 16), {"strategy": "group", "group_size": 16}),
    ],
)
def test_quantised_weights_are_those_of_numpy(
    ckpt: Run, tmp_path: Path, words: str, block: tuple[int, int] | None, strategy: dict[str, Any]
) -> None:
    """Weights would be scaled by a neighbour's scale, rounded another way, or depend on the memory of the machine."""
    source = model(tmp_path)
    flags = ("--quantize", words, "--to", "hf", "--json", "--memory", "256KiB")  # blocks of 32 rows of the largest
    done = ckpt("convert", source, tmp_path / "hf", *flags)
    assert done.code == 0
    before, found, errors = read(source), read(tmp_path / "hf"), json.loads(done.out)["errors"]
    assert list(errors) == ["model.layers.0.q.weight", "model.layers.0.k.weight"]
    assert found.keys() == {*before, *(f"{name}_scale" for name in errors)}
    for name, weight in before.items():
        if name not in errors:
            assert found[name].tobytes() == weight.tobytes()
            continue
        values, scales = by_hand(weight, words[: words.find("8") + 1], block or (1, weight.shape[1]))
        assert (found[name].dtype, found[name].tobytes()) == (values.dtype, values.tobytes())
        assert (found[f"{name}_scale"].shape, found[f"{name}_scale"].tobytes()) == (scales.shape, scales.tobytes())
        lost = np.abs(weight.astype(np.float64) - undone(values, scales))
        relative = math.sqrt(np.square(lost).sum() / np.square(weight.astype(np.float64)).sum())
        np.testing.assert_allclose([*errors[name].values()], [lost.max(), relative], rtol=1e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"]) == (["LlamaForCausalLM"], 16)
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert strategy.items() <= group["weights"].items()
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert config["quantization_config"]["format"] == group["format"]


@pytest.mark.parametrize("block", [(1, 96), (64, 1), (16, 48), (8, 8)])
def test_scales_span_the_parts_in_which_a_weight_is_read(block: tuple[int, int]) -> None:
    """A weight in chunks would get the scales of its last chunk, or be read once for each of them."""
    weight = weights((64, 96))
    reads: list[Box] = []

    def fetch(box: Box) -> np.ndarray:
        reads.append(box)
        return weight[box.slices()]

    leaf = LeafInfo(path=("x",), kind="tensor", dtype="float32", shape=weight.shape, cell=(20, 36))
    source = Tensor(item="", leaf=leaf, fetch=fetch)
    quantised = Weight(source, DTYPES["int8"], block, 12_000, {})
    found = np.empty(weight.shape, np.int8)
    boxes = list(source.blocks(12_000))
    assert len(boxes) > 4
    for box in boxes:
        found[box.slices()] = quantised.values(box)
    values, scales = by_hand(weight, "int8", block)
    assert found.tobytes() == values.tobytes()
    assert quantised.scales(Box.whole(scales.shape)).tobytes() == scales.tobytes()
    assert sorted(reads) == sorted(boxes * 2)
    assert quantised.error is not None


def test_temporary_arrays_are_small_beside_a_block() -> None:
    """A conversion within a budget would need several times as much: a block as float32, scaled, rounded and back."""
    weight = RNG.standard_normal((4096, 1024), dtype=np.float32)  # 16 MiB
    leaf = LeafInfo(path=("x",), kind="tensor", dtype="float32", shape=weight.shape)
    source = Tensor(item="", leaf=leaf, fetch=lambda box: weight[box.slices()])
    quantised = Weight(source, DTYPES["fp8"], (1, 1024), 1 << 30, {})
    tracemalloc.start()
    try:
        values = quantised.values(Box.whole(weight.shape))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < values.nbytes + (8 << 20)


def test_quantised_weights_are_read_back(ckpt: Run, tmp_path: Path) -> None:
    """A quantised model could not be trained on, or came back with another block's scales."""
    source = model(tmp_path)
    assert ckpt("convert", source, tmp_path / "q", "--quantize", "fp8:32x32", "--to", "hf").code == 0
    flags = ("--quantize", "none", "--memory", "64KiB")
    assert ckpt("convert", tmp_path / "q", tmp_path / "hf", "--to", "hf", *flags).code == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text()).keys() == {"architectures", "hidden_size"}
    before, quantised, found = read(source), read(tmp_path / "q"), read(tmp_path / "hf")
    assert found.keys() == before.keys()
    for name in ("model.layers.0.q.weight", "model.layers.0.k.weight"):
        assert found[name].tobytes() == undone(quantised[name], quantised[f"{name}_scale"]).tobytes()
    said = ckpt("convert", source, tmp_path / "again", "--to", "hf", "--quantize", "none")
    assert (said.code, "no leaf of int8 or float8_e4m3fn has its scales" in said.err) == (10, True)


def in_blocks(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    """The scale of each element, block after block, the last of which the edge cuts."""
    grown = np.kron(scales, np.ones(block, np.float32))
    return grown[tuple(slice(n) for n in shape)]


BY_TRANSFORMERS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def of_compressed_tensors(strategy: str, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"strategy": strategy, "num_bits": 8, **more}}}}


@pytest.mark.parametrize(
    ("shape", "scales", "config", "block"),
    [
        ((192, 576), (2, 5), BY_TRANSFORMERS, (128, 128)),
        ((192, 256), (2, 2), BY_TRANSFORMERS, (128, 128)),
        ((192, 256), (2, 2), of_compressed_tensors("block", block_structure=[128, 128]), (128, 128)),
        ((192, 256), (2, 2), of_compressed_tensors("block", block_structure="96x128"), (96, 128)),
        ((4, 192), (4, 2), of_compressed_tensors("group", group_size=96), (1, 96)),
        ((300, 100), (3, 1), {"weight_block_size": [120, 120]}, (120, 120)),
        ((192, 64), (192, 1), BY_TRANSFORMERS, (1, 64)),
        ((2, 192, 130), (2, 2, 2), BY_TRANSFORMERS, (1, 128, 128)),
        ((576, 64), (5, 1), None, (128, 64)),
        ((96, 256), (3, 8), None, (32, 32)),
        ((48, 64), (4, 1), None, (12, 64)),
        ((64, 64), (1,), BY_TRANSFORMERS, (64, 64)),
        ((64, 64), (), None, (64, 64)),
        ((64, 64), (1, 1, 1), None, (64, 64)),
    ],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_scales_belong_to_the_blocks_of_the_configuration(
    ckpt: Run, tmp_path: Path, shape: Any, scales: Any, config: Any, block: Any, as_file: bool
) -> None:
    """Rows 96 to 127 of a weight of 192 would get the scale of the next block, and 576 rows be refused."""
    values = RNG.standard_normal(shape).astype(FP8)
    scale = RNG.uniform(1, 2, scales).astype(np.float32)
    (tmp_path / "src").mkdir()
    tensors = {"x.weight": values, "x.weight_scale_inv": np.asarray(scale)}
    path = by_safetensors(tmp_path / "src" / "model.safetensors", tensors)
    if config is not None:
        (tmp_path / "src" / "config.json").write_text(json.dumps({"quantization_config": config}))
    source = path if as_file else path.parent
    said = ckpt("convert", source, tmp_path / "b.npz", "--to", "npz", "--quantize", "none", "--memory", "64KiB")
    assert said.code == 0, said.err
    of_each = scale.reshape([-(-n // b) for n, b in zip(shape, block, strict=True)])
    expected = values.astype(np.float32) * in_blocks(of_each, shape, block)
    assert read(tmp_path / "b.npz")["x.weight"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("config", [None, {"weight_block_size": [64, 64]}])
def test_scales_that_fit_two_blocks_are_refused(ckpt: Run, tmp_path: Path, config: Any) -> None:
    """Every second weight of 192 rows would be wrong, and the command succeed."""
    tensors = {"x.weight": np.ones((192, 128), FP8), "x.weight_scale": np.ones((2, 1), np.float32)}
    path = by_safetensors(tmp_path / "a.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    said = ckpt("convert", path, tmp_path / "b", "--to", "npz", "--quantize", "none")
    assert (said.code, "may be of blocks of 96x128 or blocks of 128x128 of x.weight" in said.err) == (1, True), said.err
    assert f"Put the model's config.json into {tmp_path}" in " ".join(said.err.split())
    assert '{"quantization_config": {"weight_block_size": [ROWS, COLUMNS]}}' in said.err


def test_moments_of_an_optimizer_stay_floats_unless_named(ckpt: Run, tmp_path: Path) -> None:
    """A run would resume from moments of 8 bits, which nobody has asked for."""
    places = ["params", "opt_state.0.mu", "opt_state.0.nu", "optimizer.0", "trace.a", "moments", "mu"]
    tensors = {f"{place}.up.kernel": weights((8, 16)) for place in places}
    path = by_safetensors(tmp_path / "a.safetensors", tensors)
    said = ckpt("convert", path, tmp_path / "b", "--to", "npz", "--quantize", "int8", "--json")
    told = json.loads(said.out)
    assert list(told["errors"]) == ["params.up.kernel"]
    (note,) = told["notes"]
    assert re.fullmatch(
        r"left as floats: (\S+\.up\.kernel,? ){5}and 1 more \(an optimizer's state, which only a pattern .*", note
    ), note
    assert ckpt("convert", path, tmp_path / "c", "--to", "npz", "--quantize", "**.mu.**=int8").code == 0
    narrow = {name for name, value in read(tmp_path / "c").items() if value.dtype == np.int8}
    assert narrow == {"opt_state.0.mu.up.kernel", "mu.up.kernel"}
    only = by_safetensors(tmp_path / "d.safetensors", {"opt_state.0.mu.up.kernel": weights((8, 16))})
    said = ckpt("convert", only, tmp_path / "e", "--to", "npz", "--quantize", "int8")
    assert (said.code, "has two dimensions except in an optimizer's state; name them" in said.err) == (10, True)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_values_with_scales_are_not_cast_averaged_or_quantised(ckpt: Run, tmp_path: Path, suffix: str) -> None:
    """Weights would be written without their scales, and the command succeed."""
    tensors = {
        "x.weight": np.ones((4, 4), FP8),
        f"x.weight{suffix}": np.full((4, 1), 0.5, np.float32),
        "y": np.ones(2, np.float32),
    }
    one, two = (by_safetensors(tmp_path / f"{name}.safetensors", tensors) for name in ("one one", "two"))
    halves = {
        "x.lora_A.weight": np.ones((2, 4), np.float32),
        "x.lora_B.weight": np.ones((4, 2), np.float32),
    }
    adapter = by_safetensors(tmp_path / "adapter.safetensors", halves)
    to = (tmp_path / "b", "--to", "npz")
    pair = f"x.weight is quantised: its scale is x.weight{suffix}"
    command = f"`ckptkit convert '{one}' 'one one-float32.safetensors' --to safetensors --quantize none`"
    for words, code in [
        (("convert", one, *to, "--dtype", "**=bfloat16"), 1),
        (("merge", one, two, *to, "--average"), 12),
        (("merge", one, adapter, *to, "--lora", "--lora-alpha", 1), 12),
    ]:
        said = ckpt(*words)
        assert (said.code, pair in said.err, command in said.err) == (code, True, True), said.err
    plain = by_safetensors(tmp_path / "plain.safetensors", {"z": np.ones(2, np.float32)})
    said = ckpt("merge", one, plain, *to, "--dtype", "x.weight=float32")
    assert (said.code, pair in said.err) == (1, True)
    assert "`ckptkit convert --quantize none` of the checkpoint with them" in " ".join(said.err.split())
    said = ckpt("convert", one, *to, "--quantize", "int8")
    assert (said.code, f"x.weight{suffix} exists already" in said.err) == (1, True)
    assert not (tmp_path / "b").exists()
    assert ckpt("convert", one, *to, "--dtype", "y=bfloat16").code == 0
    words = shlex.split(command.strip("`"))
    assert ckpt(*words[1:3], tmp_path / words[3], *words[4:], "--dtype", "**=bfloat16").code == 0
    assert (read(tmp_path / words[3])["x.weight"] == 0.5).all()


@pytest.mark.parametrize(
    ("kind", "to", "target"),
    [("hf", "hf", "src-float32"), ("torch", "torch", "a-float32.torch"), ("orbax", "orbax", "src-float32")],
)
def test_advised_command_writes_the_format_of_its_source(
    ckpt: Run, tmp_path: Path, kind: Any, to: str, target: str
) -> None:
    """The advice would name a format or a file that the command refuses."""
    tensors = {"x.weight": np.ones((4, 4), FP8), "x.weight_scale": np.ones((4, 1), np.float32)}
    first = by_safetensors(tmp_path / "w.safetensors", tensors)
    source = tmp_path / ("a.pt" if kind == "torch" else "src")
    assert ckpt("convert", first, source, "--to", kind).code == 0
    said = ckpt("convert", source, tmp_path / "b", "--to", "npz", "--dtype", "x.weight=float32")
    assert f"`ckptkit convert {source} {target} --to {to} --quantize none`" in said.err
    assert ckpt("convert", source, tmp_path / target, "--to", to, "--quantize", "none").code == 0


def test_kernels_of_a_run_have_a_scale_for_each_output(ckpt: Run, tmp_path: Path) -> None:
    """A Flax kernel keeps its output channels last: a scale for each input would lose most of the bits."""
    kernel = np.ascontiguousarray(weights((32, 48)).T)
    tree = {"up": {"kernel": {"value": kernel}, "bias": {"value": np.ones(32, np.float32)}}}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
    said = ckpt("convert", tmp_path / "run", tmp_path / "item", "--quantize", "int8", "--to", "orbax")
    assert said.code == 0
    assert said.out.split()[-3] == "up.kernel.value"
    values, scales = by_hand(kernel, "int8", (48, 1))
    with ocp.StandardCheckpointer() as stock:
        found = stock.restore(tmp_path / "item")
    assert found["up"].keys() == {"kernel", "kernel_scale", "bias"}
    assert np.asarray(found["up"]["kernel"]["value"]).tobytes() == values.tobytes()
    assert np.asarray(found["up"]["kernel_scale"]["value"]).tobytes() == scales.tobytes()
    assert ckpt("verify", tmp_path / "item").code == 0


def test_resumed_run_writes_the_same_bytes(ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed conversion would mix two sets of scales, or report the error of a part as that of the leaf."""
    source, words = model(tmp_path), ("--quantize", "int8", "--to", "hf")
    monkeypatch.setattr("ckptkit.conversion.converting._PROGRESS_BYTES", 1)
    left: list[str] = []

    def interrupt(written: int, total: int) -> None:
        if left.pop(0) == "model.layers.0.q.weight":
            raise KeyboardInterrupt

    with open_checkpoint(str(source)) as opened:
        plan = plan_convert(opened, str(tmp_path / "hf"), "hf", quantize=Quantization("int8"))
        left += plan.tensors
        with pytest.raises(KeyboardInterrupt):
            convert(opened, plan, progress=interrupt)
    said = ckpt("convert", source, tmp_path / "hf", "--to", "hf", "--quantize", "fp8", "--resume")
    assert (said.code, "is other work than this" in said.err) == (1, True)
    done = ckpt("convert", source, tmp_path / "hf", *words, "--resume", "--json")
    assert done.code == 0
    errors = json.loads(done.out)["errors"]
    assert {name: error is None for name, error in errors.items()} == {
        "model.layers.0.q.weight": True,
        "model.layers.0.k.weight": "model.layers.0.k.weight" not in left,
    }
    assert ckpt("convert", source, tmp_path / "other", *words).code == 0
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "why", "code"),
    [
        ("model.embed_tokens.weight=int8", "read quantised weights of linear layers alone", 1),
        ("int8:64x64", "which blocks of 64x64 do not divide", 1),
        ("model.norm.weight=int8", "matches no floating-point leaf of two dimensions", 10),
        ("none:2x2", "is not none, or [PATTERN=]int8 or fp8", 2),
        ("int4", "is not none, or [PATTERN=]int8 or fp8", 2),
        ("bad.weight=fp8", "bad.weight has values that are not finite in float32", 1),
    ],
)
def test_what_cannot_be_quantised_is_refused(ckpt: Run, tmp_path: Path, words: str, why: str, code: int) -> None:
    """A model would be written that loads and answers nonsense."""
    source = model(tmp_path, **{"bad.weight": np.full((4, 4), np.nan, np.float32)})
    said = ckpt("convert", source, tmp_path / "hf", "--to", "hf", "--quantize", words)
    assert (said.code, why in " ".join(said.err.split())) == (code, True), said.err
    assert not (tmp_path / "hf").exists()


def test_weights_that_have_scales_already_are_refused(ckpt: Run, tmp_path: Path) -> None:
    """Scales would be replaced by scales of other values; a zero point would be left out of the weights."""
    tensors = {"x.weight": weights((4, 4)), "x.weight_scale": np.ones((4, 1), np.float32)}
    path = by_safetensors(tmp_path / "a.safetensors", tensors)
    said = ckpt("convert", path, tmp_path / "b", "--to", "npz", "--quantize", "int8")
    assert (said.code, "x.weight_scale exists already" in said.err) == (1, True)
    tensors = {"x.weight": np.ones((4, 4), np.int8), "x.weight_scale": np.ones((3, 1), np.float32)}
    path = by_safetensors(tmp_path / "c.safetensors", tensors)
    said = ckpt("convert", path, tmp_path / "b", "--to", "npz", "--quantize", "none")
    assert (said.code, "its dimensions do not divide those of x.weight" in said.err) == (1, True)
    path = by_safetensors(tmp_path / "d.safetensors", {**tensors, "x.weight_zero_point": np.ones((3, 1), np.int8)})
    said = ckpt("convert", path, tmp_path / "b", "--to", "npz", "--quantize", "none")
    assert (said.code, "only symmetric weights are read" in said.err) == (1, True)


@pytest.mark.parametrize("words", ["int8", "fp8", "fp8:32x32", "int8:1x32"])
def test_hugging_face_loads_the_quantised_model(ckpt: Run, tmp_path: Path, words: str) -> None:
    """The tools that the format is for would refuse it, or scale its weights in another way."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    transformers.utils.logging.disable_progress_bar()
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=1, tie_word_embeddings=False, **size)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "src")
    assert ckpt("convert", tmp_path / "src", tmp_path / "hf", "--to", "hf", "--quantize", words).code == 0
    tensors = read(tmp_path / "hf")
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    llama(torch.zeros((1, 4), dtype=torch.int64))  # it gives the weights back at the first pass
    found = llama.state_dict()
    quantised = [name for name in tensors if f"{name}_scale" in tensors]
    assert len(quantised) == 7
    for name in quantised:
        expected = undone(tensors[name], tensors[f"{name}_scale"])
        np.testing.assert_array_equal(found[name].float().numpy(), expected, err_msg=name)

"""LoRA adapters, PEFT's and NNX's: which tensors are low-rank updates, how strong each is, and the base with them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.conversion.leaf_patterns import short_names
from ckptkit.conversion.mapping import LeafNames, add_into, is_floating
from ckptkit.conversion.scales import plain_advice, scaled_text
from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import CheckpointError, MergeError
from ckptkit.formats.tensors import Checkpoint, Tensor
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import describe

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's, next to an adapter's weights

_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<of>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_NNX = re.compile(r"(?P<of>.+)\.lora_(?P<side>[ab])")  # flax.nnx.LoRA: x @ lora_a @ lora_b
_OF_LINEAR = ".lora"  # of flax.nnx.LoRALinear, which has its kernel next to this module
# Settings of PEFT 0.21's LoraConfig that only guide the training.
_WITHOUT_EFFECT = frozenset(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode
    layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core peft_version
    qalora_group_size revision runtime_config target_modules task_type""".split()  # noqa: SIM905  one name a line is long
)
_UNDERSTOOD = frozenset(
    """alpha_pattern bias fan_in_fan_out init_lora_weights lora_alpha peft_type r rank_pattern use_rslora""".split()  # noqa: SIM905
)
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base before the training


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The part of PEFT's `adapter_config.json` that decides about merged weights.

    A key of a pattern matches a module whose name is the key or ends in it after a dot. It may be a regular expression,
    and the first match counts, as in PEFT.
    """

    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    rank_stabilized: bool = False
    transposed: bool = False  # the base keeps weights as [in, out]

    def alpha_of(self, module: str) -> float | None:
        """The numerator of the scale of a module; None where the config has none."""
        return _of_pattern(self.alphas, module, self.alpha)

    def rank_of(self, module: str) -> int | None:
        """The rank that the update of a module must have; None where the config does not fix it."""
        return _of_pattern(self.ranks, module, self.rank)


def lora_merged(base: Checkpoint, adapter: Checkpoint, *, alpha: float | None = None) -> dict[str, Tensor]:
    """The tensors of `base` with the low-rank updates of `adapter` added: W + alpha / rank x (the product of the two).

    The method is that of E. Hu et al., "LoRA", 2021, section 4.1. Updates have the names of PEFT or of NNX:
    - PEFT: `base_model.model.X.lora_A.weight` of [rank, in] and `lora_B` of [out, rank], for `X.weight`.
    - NNX: `X.lora_a` of [in, rank] and `lora_b` of [rank, out], for `X.kernel`. Each may end in NNX's `value`. In a
      LoRALinear they are `X.lora.lora_a` and `X.lora.lora_b`.

    PEFT's `adapter_config.json` next to the adapter is honoured; `alpha` replaces its `lora_alpha`, and its
    `alpha_pattern` still applies. Computed in float32, or in float64 if the base is float64, and rounded once.

    Raises `MergeError` for an update without a base or its other half, and for shapes or a rank that differ from the
    config. The same for a base whose values have scales, and for tensors that are not updates. Raises `CheckpointError`
    without an alpha, and for an unsupported setting of the config.
    """
    config = adapter_config(adapter)
    config = config if alpha is None else replace(config, alpha=alpha)
    tensors, made = base.by_name(), dict(base.by_name())
    names = LeafNames(tensors)
    pairs, differences = _pairs(adapter)
    updated = [_base_of(names, module, kind) for module, (kind, _) in pairs.items()]
    scaled = [text for name in updated if name in tensors and (text := scaled_text(name, tensors)) is not None]
    if scaled:
        raise MergeError(scaled, advice=plain_advice([base]))
    for module, (kind, halves) in pairs.items():
        name = _base_of(names, module, kind)
        why = _unfit(name, halves, tensors.get(name), config, module)
        if why is None and made[name] is not tensors[name]:
            why = f"{name} has a second update, {module}.lora_*"
        if why is not None:
            differences.append(why)
            continue
        scale = _scale(config, module, halves, adapter.path)
        left, right = _factors(halves)
        fetch = partial(_updated, tensors[name], left, right, scale, _is_transposed(halves, config))
        made[name] = replace(tensors[name], fetch=fetch, stored=None, sources=(tensors[name], left, right))
    if differences:
        raise MergeError(differences, advice="Rename the leaves of one side with `ckptkit convert --map`.")
    return made


def adapter_config(adapter: Checkpoint) -> LoraConfig:
    """PEFT's config next to an adapter; an empty one if there is none. Cost: one small read.

    Raises `CheckpointError` for a config that is damaged, or that has a setting which changes the result and is not
    supported.
    """
    directory, where = _beside(adapter), config_path(adapter)
    text = Place.open(directory, timeout_s=20.0).read(ADAPTER_CONFIG)
    if text is None:
        return LoraConfig()
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError("it is not an object")
        return _parsed(found)
    except (ValueError, TypeError, KeyError, RecursionError, re.error) as error:
        raise CheckpointError(f"{where} cannot be used: {str(error)[:400]}", path=where) from error


def config_path(adapter: Checkpoint) -> str:
    """Where PEFT's config of an adapter is, if it has one."""
    return f"{_beside(adapter)}/{ADAPTER_CONFIG}"


def _beside(adapter: Checkpoint) -> str:
    path = adapter.path.rstrip("/")
    return path.rpartition("/")[0] if adapter.facts.kind == "file" else path


def _parsed(found: Mapping[str, Any]) -> LoraConfig:
    peft_type = found.get("peft_type", "LORA")
    if peft_type != "LORA":
        raise ValueError(f"its peft_type is {peft_type!r}, and only LORA adapters can be merged")
    refused = [key for key in sorted(found) if not _is_supported(key, found[key])]
    if refused:
        settings = ", ".join(f"{key} = {json.dumps(found[key])[:80]}" for key in refused)
        raise ValueError(
            f"{settings} would change the merged weights, and is not supported; merge with PEFT's merge_and_unload"
        )
    alphas = {key: _number(value, f"alpha_pattern {key}") for key, value in (found.get("alpha_pattern") or {}).items()}
    ranks = {key: _rank(value, f"rank_pattern {key}") for key, value in (found.get("rank_pattern") or {}).items()}
    for key in (*alphas, *ranks):
        re.compile(key)
    return LoraConfig(
        alpha=None if found.get("lora_alpha") is None else _number(found["lora_alpha"], "lora_alpha"),
        rank=None if found.get("r") is None else _rank(found["r"], "r"),
        alphas=alphas,
        ranks=ranks,
        rank_stabilized=_flag(found, "use_rslora"),
        transposed=_flag(found, "fan_in_fan_out"),
    )


def _is_supported(key: str, value: Any) -> bool:
    """Whether a setting is understood, or has no effect; PEFT's defaults of unknown settings have none."""
    if key == "bias":
        return value in (None, "none")
    if key == "init_lora_weights":
        return value in _INITIALISATIONS
    return key in _WITHOUT_EFFECT or key in _UNDERSTOOD or value in (None, False, "", [], {})


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"its {name} is {value!r}, not a number")
    return float(value)


def _rank(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"its {name} is {value!r}, not a rank")
    return value


def _flag(found: Mapping[str, Any], name: str) -> bool:
    value = found.get(name) or False
    if not isinstance(value, bool):
        raise ValueError(f"its {name} is {value!r}, not true or false")
    return value


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


_Pairs = dict[str, tuple[str, dict[str, Tensor]]]  # by module: the name of its weight, and its halves by side


def _pairs(adapter: Checkpoint) -> tuple[_Pairs, list[str]]:
    pairs: _Pairs = {}
    differences = []
    tensors = adapter.by_name()
    for (name, tensor), short in zip(tensors.items(), short_names(list(tensors)), strict=True):
        match = _PEFT.fullmatch(name) or _NNX.fullmatch(short)
        if match is None:
            differences.append(f"{name} of {adapter.path} is not a low-rank update")
            continue
        kind = "weight" if match["side"] in "AB" else "kernel"
        halves = pairs.setdefault(match["of"], (kind, {}))[1]
        if match["side"] in halves:
            differences.append(f"{name} of {adapter.path} is a second update of the same weight")
        halves[match["side"]] = tensor
    return pairs, differences


def _base_of(names: LeafNames, module: str, kind: str) -> str:
    """The stored name of the weight of a module; where the base has none, the name that it would have."""
    name = names.stored(f"{module}.{kind}")
    if name is None and kind == "kernel":
        name = names.stored(f"{module.removesuffix(_OF_LINEAR)}.{kind}")
    return name or f"{module}.{kind}"


def _factors(halves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The left and the right factor of the update: [out, in] of PEFT, [in, out] of NNX."""
    return (halves["B"], halves["A"]) if "A" in halves else (halves["a"], halves["b"])


def _is_transposed(halves: Mapping[str, Tensor], config: LoraConfig) -> bool:
    return config.transposed and "A" in halves


def _scale(config: LoraConfig, module: str, halves: Mapping[str, Tensor], path: str) -> float:
    alpha = config.alpha_of(module)
    if alpha is None:
        raise CheckpointError(f"{path} has no {ADAPTER_CONFIG} with a lora_alpha; give --lora-alpha")
    rank = _factors(halves)[0].shape[1]
    return alpha / (math.sqrt(rank) if config.rank_stabilized else rank)


def _unfit(name: str, halves: Mapping[str, Tensor], base: Tensor | None, config: LoraConfig, module: str) -> str | None:
    if base is None:
        return f"{name} has an update and is not in the base"
    if len(halves) != 2 or not (set(halves) == {"A", "B"} or set(halves) == {"a", "b"}):
        return f"{name} has one half of an update: lora_{next(iter(halves))}"
    left, right = _factors(halves)
    fits = len(left.shape) == len(right.shape) == 2 and left.shape[1] == right.shape[0]
    transposed = _is_transposed(halves, config)
    made = ((right.shape[1], left.shape[0]) if transposed else (left.shape[0], right.shape[1])) if fits else None
    if base.shape != made or not is_floating(base):
        what = describe(base.dtype.name, base.shape)
        how = ", transposed by fan_in_fan_out" * transposed
        return f"{name} is {what}, and its update {list(left.shape)} x {list(right.shape)}{how}"
    rank = config.rank_of(module)
    if rank is not None and rank != left.shape[1]:
        return f"{name} has an update of rank {left.shape[1]}, and {ADAPTER_CONFIG} has rank {rank}"
    return None


def _updated(base: Tensor, left: Tensor, right: Tensor, scale: float, transposed: bool, box: Box) -> np.ndarray:
    wide = np.dtype(np.float64 if base.dtype.itemsize == 8 else np.float32)
    start, stop = (box.start[::-1], box.stop[::-1]) if transposed else (box.start, box.stop)
    rows = left.read(Box((start[0], 0), (stop[0], left.shape[1]))).astype(wide)
    columns = right.read(Box((0, start[1]), (right.shape[0], stop[1]))).astype(wide)
    made = columns.T @ rows.T if transposed else rows @ columns
    made *= wide.type(scale)
    add_into(made, base.read(box))
    with np.errstate(over="ignore", invalid="ignore"):
        return made.astype(base.dtype)

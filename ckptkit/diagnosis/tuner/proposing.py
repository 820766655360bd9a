"""Which profile suits a storage and a state: what was tried, what it gave, and why the one that is proposed."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from ckptkit.diagnosis.tuner.probing import (
    Compression,
    Probe,
    ProbedLatency,
    Samples,
    Trial,
    compressibility,
    leaves_of,
    take_samples,
)
from ckptkit.durable.lifecycle.places import Place, require_possible_root
from ckptkit.formats import open_checkpoint
from ckptkit.model.durable_profile import Codec, DurableProfile
from ckptkit.store.backends import properties_of
from ckptkit.store.roots import root_url
from ckptkit.util.plain import plain_fields

PROBE_BYTES = 256 << 20
_LARGE_BYTES = 64 << 20  # a leaf of a probe without a state: the largest cell
_LEAVES_MAX = 2000  # of a probe like a state with more
_WORTH = 1.1  # what is faster by less is noise, or not worth more requests: the default stays
_WORTH_STORED = 0.98  # less is not worth a trial
_UNMEASURED = "in_flight_bytes, write_bytes_per_s and operation_timeout_s stay: they bound memory, rate and patience"
TrialProgress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The profile, what it follows from, and why, in words."""

    url: str
    profile: DurableProfile
    probe_bytes: int
    latency: ProbedLatency
    trials: tuple[Trial, ...]  # the first is the default
    compressions: tuple[Compression, ...]  # by dtype; empty without a checkpoint to sample
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The proposal as plain values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunePlan:
    """The trials on a root: each profile `rounds` times, after one that does not count, with the same leaves."""

    url: str
    profiles: tuple[DurableProfile, ...]
    rounds: int
    leaves: tuple[np.ndarray, ...]
    compressions: tuple[Compression, ...]
    encodings: tuple[_Encoding, ...]
    sampled: bool

    @property
    def probe_bytes(self) -> int:
        """Of one trial."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def written_bytes(self) -> int:
        """Of all trials; as many are read."""
        return self.probe_bytes * len(self.profiles) * (self.rounds + 1)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        sizes = {"probe_bytes": self.probe_bytes, "written_bytes": self.written_bytes}
        return {**plain_fields(self, without=("leaves", "encodings", "sampled")), **sizes}


def tune(
    url: str,
    *,
    like: str | None = None,
    probe_bytes: int = PROBE_BYTES,
    rounds: int = 3,
    timeout_s: float = 20.0,
    progress: TrialProgress = lambda said: None,
) -> Proposal:
    """Proposes a profile for the durable root `url`, for states like the checkpoint `like` (default: few large leaves
    of bytes that do not compress): `plan_tune`, then `measure`. Raises what they raise."""
    plan = plan_tune(url, like=like, probe_bytes=probe_bytes, rounds=rounds, timeout_s=timeout_s, progress=progress)
    return measure(plan, progress=progress)


def plan_tune(
    url: str,
    *,
    like: str | None = None,
    probe_bytes: int = PROBE_BYTES,
    rounds: int = 3,
    timeout_s: float = 20.0,
    progress: TrialProgress = lambda said: None,
) -> TunePlan:
    """The trials for `measure`; nothing is written.

    It reads the metadata of `like` and a piece of its largest leaves, and builds the leaves of the probe from them. It
    varies one knob at a time. If compression saves bytes of the sample, it tries two codecs: the one that should pay on
    the fastest storage, and the one that saves most. Raises the errors of `open_checkpoint`, and ValueError for a
    `probe_bytes` or `rounds` below 1, `StepNotFoundError` for a place that can be no root.
    """
    if probe_bytes < 1 or rounds < 1:
        raise ValueError(f"probe_bytes={probe_bytes}, rounds={rounds}: give 1 or more")
    root, default = root_url(url), DurableProfile()
    require_possible_root(Place.open(root, timeout_s=timeout_s))
    samples: Samples = {}
    sizes = _large_leaves(probe_bytes)
    if like is not None:
        with open_checkpoint(like, timeout_s=timeout_s) as opened:
            progress("compressing a sample of the largest leaves")
            samples = take_samples(opened.tensors)
            sizes = _leaves_like([(tensor.dtype.name, tensor.nbytes) for tensor in opened.tensors], probe_bytes)
    compressions = compressibility(samples)
    leaves = leaves_of(samples, sizes)
    remote = properties_of(root).round_trips
    profiles = [default, *_variants(default, sum(leaf.nbytes for leaf in leaves), remote=remote)]
    encodings = _worth_trying(compressions, leaves, default)
    profiles += [dataclasses.replace(default, compression=each.codec) for each in encodings]
    return TunePlan(
        url=root,
        profiles=tuple(dict.fromkeys(profiles)),
        rounds=rounds,
        leaves=tuple(leaves),
        compressions=tuple(compressions),
        encodings=tuple(encodings),
        sampled=like is not None,
    )


def measure(plan: TunePlan, *, progress: TrialProgress = lambda said: None) -> Proposal:
    """Runs the trials of the plan, and proposes a profile.

    Writes and reads `plan.written_bytes` below `<url>/_ckptkit`, and deletes them. Host memory: three times
    `plan.probe_bytes`. Raises `StoreError` where the root cannot be written.
    """
    probe = Probe(plan.url, plan.leaves)
    progress("measuring the latency")
    latency = probe.latency()
    count, times = len(plan.profiles), plan.rounds + 1
    progress(f"writing and reading {probe.nbytes} bytes with {count} profiles, {times} times each")
    trials = probe.trials(plan.profiles, plan.rounds)
    profile, reasons = propose(trials)
    return Proposal(
        url=plan.url,
        profile=profile,
        probe_bytes=probe.nbytes,
        latency=latency,
        trials=tuple(trials),
        compressions=plan.compressions,
        reasons=(*reasons, *_said_of(plan.encodings, trials, profile, sampled=plan.sampled), _UNMEASURED),
    )


def propose(trials: Sequence[Trial]) -> tuple[DurableProfile, list[str]]:
    """The profile that follows from the trials; the first trial is the default. Each knob gets the value with the best
    rate that is not slower in the other direction, if the gain is large enough. With a compression, `copied_bytes`
    stays the default's: leaves below it are never encoded, and the compression was measured with it."""
    base = trials[0]
    chosen: dict[str, Any] = {}
    reasons = []
    for knob in ("compression", "data_file_bytes", "write_concurrency", "copied_bytes", "read_ahead_bytes"):
        if knob == "copied_bytes" and "compression" in chosen:
            reasons.append(f"{knob} stays at {base.profile.copied_bytes}: smaller leaves are not compressed")
            continue
        reads = knob == "read_ahead_bytes"  # nothing of it is in a save
        varied = [trial for trial in trials[1:] if getattr(trial.profile, knob) != getattr(base.profile, knob)]
        fit = [trial for trial in varied if _rates(trial, reads)[1] * _WORTH >= _rates(base, reads)[1]]
        best = max(fit, key=lambda trial: _rates(trial, reads)[0], default=None)
        if best is not None and _rates(best, reads)[0] > _rates(base, reads)[0] * _WORTH:
            chosen[knob] = getattr(best.profile, knob)
            if knob == "compression":
                continue  # `_said_of` adds to it
            times, verb = _rates(best, reads)[0] / _rates(base, reads)[0], "reads" if reads else "writes"
            reasons.append(f"{knob} {chosen[knob]}: {verb} {times:.2f} times as fast as {getattr(base.profile, knob)}")
        elif knob != "compression":
            why = "nothing was faster by a tenth" if varied else "so small a probe shows no difference"
            reasons.append(f"{knob} stays at {getattr(base.profile, knob)}: {why}")
    if "write_concurrency" in chosen:
        chosen["read_concurrency"] = chosen["write_concurrency"]
    return dataclasses.replace(base.profile, **chosen), reasons


def _rates(trial: Trial, reads: bool) -> tuple[float, float]:
    """That of the direction which a knob is for, and the other."""
    rates = trial.write_bytes_per_s, trial.read_bytes_per_s
    return (rates[1], rates[0]) if reads else rates


def _variants(default: DurableProfile, nbytes: int, *, remote: bool) -> list[DurableProfile]:
    """One knob at a time; what is as large as the probe would be the same as the default's."""
    sizes = [size for size in (16 << 20, 64 << 20) if size < nbytes]
    made = [dataclasses.replace(default, data_file_bytes=size) for size in sizes]
    counts = (64,) if remote else (4,)
    made += [dataclasses.replace(default, write_concurrency=n, read_concurrency=n) for n in counts]
    made += [dataclasses.replace(default, copied_bytes=size) for size in (32 << 10, 2 << 20)]
    aheads = [size for size in (32 << 20, 512 << 20) if min(size, default.read_ahead_bytes) < nbytes]
    return made + [dataclasses.replace(default, read_ahead_bytes=size) for size in aheads]


def _large_leaves(probe_bytes: int) -> list[tuple[str, int]]:
    count = -(-probe_bytes // _LARGE_BYTES)
    return [("", min(_LARGE_BYTES, probe_bytes - index * _LARGE_BYTES)) for index in range(count)]


def _leaves_like(tensors: Sequence[tuple[str, int]], probe_bytes: int) -> list[tuple[str, int]]:
    """Dtypes and sizes of the state's leaves, or of every n-th of them, until the probe is full. The smallest come
    first, up to half of the probe, then the largest, so that both kinds occur."""
    tensors = sorted(tensors, key=lambda tensor: tensor[1])
    stride = max(1, -(-len(tensors) // _LEAVES_MAX))
    taken, left = [], probe_bytes
    waiting = deque(tensors[::stride])
    while waiting and left > 0:
        dtype, nbytes = waiting.popleft() if 2 * left > probe_bytes else waiting.pop()
        while nbytes > 0 and left > 0:
            taken.append((dtype, min(nbytes, left, _LARGE_BYTES)))
            nbytes, left = nbytes - taken[-1][1], left - taken[-1][1]
    return taken or _large_leaves(probe_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Encoding:
    """A codec over all leaves of the probe whose cells it would encode."""

    codec: Codec
    ratio: float
    bytes_per_s: float

    @property
    def pays_below_bytes_per_s(self) -> float:
        """The rate of a storage below which encoding makes a save faster, with one core and no other load.

        Encoding takes n / speed and sending r n / rate, against n / rate.
        """
        return self.bytes_per_s * (1 - self.ratio)


def _worth_trying(
    compressions: Sequence[Compression], leaves: Sequence[np.ndarray], default: DurableProfile
) -> list[_Encoding]:
    """Of those that save bytes of what they would encode: the codec that pays up to the highest rate of a storage, and
    the one that saves most; mostly they are two."""
    weights: dict[str, int] = {}
    for leaf in leaves:
        if leaf.nbytes >= default.copied_bytes:  # the others are never encoded
            weights[leaf.dtype.name] = weights.get(leaf.dtype.name, 0) + leaf.nbytes
    found = []
    for codec in get_args(Codec):
        mine = {each.dtype: each for each in compressions if each.codec == codec and each.dtype in weights}
        before = sum(weights[dtype] for dtype in mine)
        if before:
            ratio = sum(weights[dtype] * each.ratio for dtype, each in mine.items()) / before
            taken_s = sum(weights[dtype] / each.bytes_per_s for dtype, each in mine.items())
            found.append(_Encoding(codec=codec, ratio=ratio, bytes_per_s=before / taken_s))
    fit = [each for each in found if each.ratio < _WORTH_STORED]
    if not fit:
        return []
    chosen = max(fit, key=lambda each: each.pays_below_bytes_per_s), min(fit, key=lambda each: each.ratio)
    return list(dict.fromkeys(chosen))


def _said_of(
    encodings: Sequence[_Encoding], trials: Sequence[Trial], profile: DurableProfile, *, sampled: bool
) -> list[str]:
    if not encodings:
        why = (
            "none of the codecs saves a fiftieth of what it would encode" if sampled else "give --like to sample leaves"
        )
        return [f"compression stays off: {why}"]
    base, said = trials[0], []
    for each in encodings:
        tried = next(trial for trial in trials if trial.profile.compression == each.codec)
        write = tried.write_bytes_per_s / base.write_bytes_per_s
        read = tried.read_bytes_per_s / base.read_bytes_per_s
        said.append(
            f"compression {each.codec} is {'taken' if profile.compression == each.codec else 'left'}: it stores "
            f"{each.ratio:.2f} of what it encodes, at {each.bytes_per_s / 1e6:.0f} MB/s of a core, so it should pay "
            f"below {each.pays_below_bytes_per_s / 1e6:.0f} MB/s of a storage; this one took "
            f"{base.write_bytes_per_s / 1e6:.0f} plain, and with it wrote {write:.2f} and read {read:.2f} times as fast"
        )
    return said

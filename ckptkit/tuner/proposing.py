"""Which profile suits a storage and a state: what was tried, what it gave, and why the one that is proposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ckptkit.formats import open_checkpoint
from ckptkit.store.roots import is_remote, root_url
from ckptkit.tuner.probing import Latency, Probe, Trial
from ckptkit.tuner.sampling import Compression, compressibility
from ckptkit.tuning import DurableProfile

PROBE_BYTES = 256 << 20
_LARGE_BYTES = 64 << 20  # a leaf of a probe without a state: the largest cell
_LEAVES_MAX = 2000  # of a probe like a state with more
_WORTH = 1.1  # what is faster by less is noise, or not worth more requests: the default stays
_WORTH_STORED = 0.98  # less is not worth a word
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The profile, what it follows from, and why, in words."""

    url: str
    profile: DurableProfile
    probe_bytes: int
    latency: Latency
    trials: tuple[Trial, ...]  # the first is the default
    compressions: tuple[Compression, ...]
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The proposal as plain values."""
        return dataclasses.asdict(self)


def tune(
    url: str,
    *,
    like: str | None = None,
    probe_bytes: int = PROBE_BYTES,
    rounds: int = 3,
    timeout_s: float = 20.0,
    progress: Progress = lambda said: None,
) -> Proposal:
    """Proposes a profile for the durable root `url`, for states like the checkpoint `like` (default: few large leaves).

    Writes and reads `probe_bytes` about `6 * (rounds + 1)` times below `<url>/_ckptkit`, and deletes them; of `like` it
    reads the metadata and a piece of its largest leaves. Host memory: twice `probe_bytes`. One knob is varied at a
    time. Raises `StoreError` where the root cannot be written, what `open_checkpoint` raises, ValueError for a
    `probe_bytes` or `rounds` below 1.
    """
    if probe_bytes < 1 or rounds < 1:
        raise ValueError(f"probe_bytes={probe_bytes}, rounds={rounds}: give 1 or more")
    root = root_url(url)
    compressions: list[Compression] = []
    leaves = _large_leaves(probe_bytes)
    if like is not None:
        with open_checkpoint(like, timeout_s=timeout_s) as opened:
            progress("compressing a sample of the largest leaves")
            compressions = compressibility(opened.tensors)
            leaves = _leaves_like([tensor.nbytes for tensor in opened.tensors], probe_bytes)
    probe = Probe(root, leaves)
    progress("measuring the latency")
    latency = probe.latency()
    default = DurableProfile()
    profiles = list(dict.fromkeys([default, *_variants(default, probe.nbytes, remote=is_remote(root))]))
    progress(f"writing and reading {probe.nbytes} bytes with {len(profiles)} profiles, {rounds + 1} times each")
    trials = probe.trials(profiles, rounds)
    profile, reasons = propose(trials)
    return Proposal(
        url=root,
        profile=profile,
        probe_bytes=probe.nbytes,
        latency=latency,
        trials=tuple(trials),
        compressions=tuple(compressions),
        reasons=(*reasons, *_said_of(compressions, trials[0])),
    )


def propose(trials: Sequence[Trial]) -> tuple[DurableProfile, list[str]]:
    """The profile that follows from the trials, of which the first is the default: for each knob the value with the
    best write rate that reads no slower, where it is worth it."""
    base = trials[0]
    chosen: dict[str, Any] = {}
    reasons = []
    for knob in ("data_file_bytes", "write_concurrency", "copied_bytes"):
        varied = [trial for trial in trials[1:] if getattr(trial.profile, knob) != getattr(base.profile, knob)]
        fit = [trial for trial in varied if trial.read_bytes_per_s * _WORTH >= base.read_bytes_per_s]
        best = max(fit, key=lambda trial: trial.write_bytes_per_s, default=None)
        if best is not None and best.write_bytes_per_s > base.write_bytes_per_s * _WORTH:
            chosen[knob] = getattr(best.profile, knob)
            times = best.write_bytes_per_s / base.write_bytes_per_s
            reasons.append(f"{knob} {chosen[knob]}: writes {times:.2f} times as fast as {getattr(base.profile, knob)}")
        else:
            reasons.append(f"{knob} stays at {getattr(base.profile, knob)}: nothing was faster by a tenth")
    if "write_concurrency" in chosen:
        chosen["read_concurrency"] = chosen["write_concurrency"]
    return dataclasses.replace(base.profile, **chosen), reasons


def _variants(default: DurableProfile, nbytes: int, *, remote: bool) -> list[DurableProfile]:
    """One knob at a time; a data file as large as the probe would be the same as the default's."""
    sizes = [size for size in (16 << 20, 64 << 20) if size < nbytes]
    made = [dataclasses.replace(default, data_file_bytes=size) for size in sizes]
    counts = (64,) if remote else (4,)
    made += [dataclasses.replace(default, write_concurrency=n, read_concurrency=n) for n in counts]
    return made + [dataclasses.replace(default, copied_bytes=size) for size in (32 << 10, 2 << 20)]


def _large_leaves(probe_bytes: int) -> list[int]:
    count = -(-probe_bytes // _LARGE_BYTES)
    return [min(_LARGE_BYTES, probe_bytes - index * _LARGE_BYTES) for index in range(count)]


def _leaves_like(sizes: Sequence[int], probe_bytes: int) -> list[int]:
    """The sizes of the state's leaves, or every n-th of them, until the probe is full."""
    stride = max(1, -(-len(sizes) // _LEAVES_MAX))
    leaves, left = [], probe_bytes
    for nbytes in sorted(sizes)[::stride]:
        while nbytes > 0 and left > 0:
            leaves.append(min(nbytes, left, _LARGE_BYTES))
            nbytes, left = nbytes - leaves[-1], left - leaves[-1]
    return leaves or _large_leaves(probe_bytes)


def _said_of(compressions: Sequence[Compression], base: Trial) -> list[str]:
    """Cells are stored plain: what compression would have been worth, for whoever pays by the byte."""
    said = []
    for dtype in dict.fromkeys(each.dtype for each in compressions):
        mine = [each for each in compressions if each.dtype == dtype]
        least = min(each.ratio for each in mine)
        if least > _WORTH_STORED:
            said.append(f"{dtype}: does not compress (best {least:.2f})")
            continue
        best = max(mine, key=lambda each: each.pays_below_bytes_per_s())
        below = best.pays_below_bytes_per_s()
        faster = "faster" if base.write_bytes_per_s < below else "slower"
        said.append(
            f"{dtype}: {best.codec} would store {best.ratio:.2f} of the bytes (at best {least:.2f}) and make saves "
            f"{faster} here: it pays below {below / 1e6:.0f} MB/s; cells are stored plain"
        )
    return said

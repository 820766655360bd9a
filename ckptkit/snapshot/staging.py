"""How a save keeps the state alive while the next step donates it: what the step loop pays now, and what is done later.

| strategy | on the step loop | later, in the writer thread | the next donating step |
|---|---|---|---|
| slot_copy | the copy into the slot | nothing | at once |
| block | the same, through a transfer from the device | nothing | at once |
| device_copy | dispatch of a copy on the device | transfer of the copy | at once |
| alias | views (CPU: of arrays that are ready) | the copy | at once, and allocates afresh |
| gate | nothing | the copy | only after `wait_until_staged` |

Host arrays are copied on the step loop by every strategy: their owner may change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.model.policies import StagingChoice, Strategy
from ckptkit.snapshot.describe import Description, Digests, Shard, copy_shards, local_shards

# XLA's CPU client runs a program of fewer than 1,000 floating-point operations on the caller's thread once its inputs
# are ready, and a copy of gigabytes has none. With these it goes to a thread of its own.
_BALLAST = np.ones(1024, np.float32)
_HEADROOM = 0.9  # of the device memory that was never in use: the step's own peak may still move


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A state that is on its way into a slot. `finish` moves what is left, once, lets the arrays go, and returns the
    digests of every box by its number."""

    strategy: Strategy
    reason: str
    finish: Callable[[], dict[int, Digests]]


def begin(
    choice: StagingChoice,
    description: Description,
    trees: Mapping[str, Any],
    memory: np.ndarray,
    copied: Callable[[int, int], None] | None = None,
    compared: Sequence[Shard] = (),
) -> Staging:
    """Stages the state of one save by `choice`; returns as soon as the strategy lets the step loop go on.

    With `gate` the caller must not donate the state before `finish` has returned; with the others it may at once.
    `copied(start, stop)` is told, on any thread, which bytes of `memory` are final. `compared` are shards of the same
    state that are only digested (`ckptkit.snapshot.replicas`), at the same moment as the others.
    """
    copy = partial(copy_shards, memory=memory, copied=copied or _untold)
    shards = [*local_shards(description, trees), *compared]
    host = [shard for shard in shards if isinstance(shard[0], np.ndarray)]
    device = [shard for shard in shards if not isinstance(shard[0], np.ndarray)]
    digests = copy(host)
    strategy, reason = choose(choice, [array for array, _ in device])
    later: Sequence[Shard] = ()
    if strategy == "gate":
        later = device
    elif strategy == "alias":
        later = [(np.asarray(array), extent) for array, extent in device]
    elif strategy == "device_copy":
        fitting = _within_budget(device, everything=choice == "device_copy")
        later = _device_copies(fitting)
        if len(later) < len(device):
            rest = device[len(later) :]
            reason += f"; {len(rest)} of {len(device)} boxes do not fit beside the state and are waited for"
            digests |= copy(rest)
    elif strategy in ("slot_copy", "block"):
        digests |= copy(device)
    else:
        assert_never(strategy)
    return Staging(strategy=strategy, reason=reason, finish=_once(copy, later, digests))


def choose(choice: StagingChoice, arrays: Sequence[Any]) -> tuple[Strategy, str]:
    """The strategy for these local arrays, and why."""
    if choice != "auto":
        return choice, "asked for"
    if not arrays or next(iter(arrays[0].devices())).platform == "cpu":
        return "slot_copy", "on the CPU backend one copy straight into the slot is the floor"
    free = min(_free_bytes(device) for device in {device for array in arrays for device in array.devices()})
    if free <= 0:
        return "block", "the devices say nothing of free memory, or have none: the transfer is waited for"
    return "device_copy", f"{free / 1e9:.1f} GB of each device were never in use: a copy there costs one dispatch"


def _untold(start: int, stop: int) -> None:
    """Nobody follows the copy."""


def _once(
    copy: Callable[[Sequence[Shard]], dict[int, Digests]], later: Sequence[Shard], digests: dict[int, Digests]
) -> Callable[[], dict[int, Digests]]:
    """A function that copies `later` and forgets it: what the closure held would keep device memory in use."""
    held = list(later)

    def finish() -> dict[int, Digests]:
        digests.update(copy(held))
        held.clear()
        return digests

    return finish


def _within_budget(shards: Sequence[Shard], *, everything: bool) -> list[Shard]:
    """The first shards that fit into the free memory of their devices; all of them when they were asked for."""
    if everything:
        return list(shards)
    left: dict[Any, float] = {}
    for count, (array, _) in enumerate(shards):
        (device,) = array.devices()
        left.setdefault(device, _HEADROOM * _free_bytes(device))
        left[device] -= array.nbytes
        if left[device] < 0:
            return list(shards[:count])
    return list(shards)


def _device_copies(shards: Sequence[Shard]) -> list[Shard]:
    """Copies of the arrays on their own devices: one dispatch per device, of local programs only.

    A device that has no room after all ends the list where its first shard stands; what follows is not copied.
    """
    by_device: dict[Any, list[int]] = {}
    for index, (array, _) in enumerate(shards):
        by_device.setdefault(next(iter(array.devices())), []).append(index)
    copies: list[Any] = [None] * len(shards)
    for device, indices in by_device.items():
        try:
            copied, _ = _copy([shards[index][0] for index in indices], jax.device_put(_BALLAST, device))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            copied = [None] * len(indices)
        for index, copy in zip(indices, copied, strict=True):
            copies[index] = copy
    whole = next((index for index, copy in enumerate(copies) if copy is None), len(copies))
    return [(copies[index], shards[index][1]) for index in range(whole)]


@jax.jit
def _copy(arrays: list[jax.Array], ballast: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    return [jnp.copy(array) for array in arrays], ballast @ ballast


def _free_bytes(device: Any) -> int:
    """Device memory that was never in use so far; 0 where the device does not tell."""
    stats = device.memory_stats() or {}
    used = max(stats.get("peak_bytes_in_use", 0), stats.get("bytes_in_use", 0))
    return max(0, stats.get("bytes_limit", 0) - used)

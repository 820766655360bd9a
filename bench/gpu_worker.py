"""One contender and one state on the devices of one platform, in a process of its own: saves, restores and memory.

The peak of a device's memory cannot be reset, so contenders that share a process cannot be told apart by it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bench.contenders import Contender
from bench.contenders_ours import CkptKit
from bench.contenders_theirs import OrbaxManager, OrbaxV1
from bench.measure import PeakMemory, now_s, settle

OURS = {
    "ckptkit": "auto",
    "ckptkit_device_copy": "device_copy",
    "ckptkit_pinned_host": "pinned_host",
    "ckptkit_block": "block",
}
PEERS = ("orbax_async", "orbax_v1", "orbax_sync")
LIMITS = "limits"  # of the machine, instead of a contender
STEPS_AFTER = 8  # whose times are compared with those before the save
_STEP_S = 0.2
_ON_CPU = (0.01, 128)  # virtual devices: these are not figures of a GPU, so no time is spent on them
_LARGE_BYTES = 1 << 30
_SQUARE = 8192  # of the matrices whose products fill a step: smaller ones are bound by their launches


def make_state(size_bytes: int, weights: str) -> dict[str, Any]:
    """A transformer's parameters with Adam's moments in float32, split over all local devices by rows."""
    mesh = jax.make_mesh((jax.local_device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    per_parameter = np.dtype(jnp.bfloat16 if weights == "bfloat16" else np.float32).itemsize + 8
    width = 512 if size_bytes <= 64 << 20 else 1024 if size_bytes <= 4 << 30 else 4096
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layer_bytes = per_parameter * (sum(high * wide for high, wide in shapes.values()) + 2 * width)
    layers = max(1, size_bytes // layer_bytes)

    @cache  # a program for each shape, not for each leaf
    def maker(shape: tuple[int, ...], dtype: Any) -> Callable[[int], Any]:
        sharding = rows if shape[0] % jax.local_device_count() == 0 else whole
        return jax.jit(
            lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype),
            out_shardings=sharding,
        )

    def leaf(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
        return maker(shape, dtype)(seed)

    def tree(dtype: Any) -> dict[str, Any]:
        return {
            f"layer{at}": {name: leaf(shape, dtype, at) for name, shape in {**shapes, "norm": (2 * width,)}.items()}
            for at in range(layers)
        }

    return {"params": tree(weights), "mu": tree("float32"), "nu": tree("float32"), "count": jnp.int32(0)}


def make_step(step_s: float, side: int) -> tuple[Callable[[Any], Any], float]:
    """A step that changes and donates the state, and spends about `step_s` in products of matrices of this
    side; and the time of one product."""
    square = jnp.ones((side, side), jnp.float32) / side

    def work(rounds: int) -> Callable[[Any], Any]:
        def step(state: Any) -> Any:
            spent = jax.lax.fori_loop(0, rounds, lambda _, value: value @ square, square)[0, 0]
            return jax.tree.map(lambda leaf: leaf + (spent * 1e-30).astype(leaf.dtype), state)

        return jax.jit(step, donate_argnums=0)

    small = {"x": jnp.zeros(8)}
    timed: list[float] = []
    for rounds in (8, 64):
        step = work(rounds)
        small = jax.block_until_ready(step(small))
        began_s = now_s()
        small = jax.block_until_ready(step(small))
        timed.append(now_s() - began_s)
    each_s = max((timed[1] - timed[0]) / 56, 1e-6)
    return work(max(1, min(100_000, int(step_s / each_s)))), each_s


@final
class Staged:
    """ckptkit with one strategy, in a manager and a ramdisk of its own."""

    def __init__(self, name: str, root: Path, staging: str):
        self.name = name
        self._inner = CkptKit(root)
        self._inner.stage_by(staging)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def contender(name: str, root: Path) -> Contender:
    """The contender of that name."""
    if name in OURS:
        return Staged(name, root, OURS[name])  # pyright: ignore[reportReturnType]
    if name == "orbax_v1":
        return OrbaxV1(root)
    return OrbaxManager(name, root, background=name == "orbax_async", compressed=True)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of each compilation within."""
    found: list[float] = []
    listening = [True]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if listening[0] and "backend_compile" in event:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        listening[0] = False


def device_peak_bytes() -> int | None:
    """The most that any local device has held; None where the backend does not report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((each.get("peak_bytes_in_use", 0) for each in stats), default=0) if all(stats) else None


def measure(
    who: Contender, state: Any, step: Callable[[Any], Any], repeats: int, ends_s: float
) -> Iterator[dict[str, Any]]:
    """Every sample of one contender so far, before and after each restore: `repeats` turns after the first, or as many
    as begin before `ends_s`. `state` is donated."""
    samples: dict[str, list[Any]] = {}
    settle()
    state = jax.block_until_ready(step(step(state)))  # compiled, and the peak of the device is that of steps
    base_bytes = device_peak_bytes()

    def note(name: str, value: Any) -> None:
        samples.setdefault(name, []).append(value)

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    number = 0
    for turn in range(repeats + 1):  # the first one is reported apart: it makes slots, and compiles where anything does
        if turn and now_s() > ends_s:
            return
        where = "first_" if turn == 0 else ""
        settle()
        before_s: list[float] = []
        for _ in range(STEPS_AFTER):
            began_s = now_s()
            state = jax.block_until_ready(step(state))
            before_s.append(now_s() - began_s)
        samples.setdefault("step_s", []).extend(before_s)
        usual_s = median(before_s)
        with ExitStack() as watched:
            peak = watched.enter_context(PeakMemory())
            compiled = watched.enter_context(compilations())
            began_s = now_s()
            who.save(number, state)
            note(f"{where}ready_s", now_s() - began_s)
            for _ in range(STEPS_AFTER):
                stepped_s = now_s()
                state = jax.block_until_ready(step(state))
                note(f"{where}step_after_save_s", now_s() - stepped_s)
                note(f"{where}inflation_s", now_s() - stepped_s - usual_s)
            note(f"{where}loss_s", now_s() - began_s - STEPS_AFTER * usual_s)
            note(f"{where}committed_s", who.committed_s() - began_s)
            who.settled()
        note(f"{where}compiled_s", sum(compiled))
        note("host_bytes", peak.extra_bytes)
        number += 1
        state = step(state)  # in flight
        began_s = now_s()
        who.save(number, state)
        note(f"{where}in_flight_s", now_s() - began_s)
        state = jax.block_until_ready(step(state))
        note(f"{where}in_flight_step_s", now_s() - began_s)
        who.committed_s()
        who.settled()
        if turn == 0 and base_bytes is not None:  # of saves alone: a restore raises the peak
            note("device_extra_bytes", (device_peak_bytes() or 0) - base_bytes)
        yield samples
        state = None  # there may not be room for two
        began_s = now_s()
        state = jax.block_until_ready(who.restore(number, abstract))
        note(f"{where}restore_s", now_s() - began_s)
        for each in (number - 1, number):
            who.forget(each)
        number += 1
        yield samples


def limits(repeats: int, size_bytes: int, ends_s: float) -> dict[str, list[float]]:
    """Bytes per second of one large buffer between host and device, pageable and pinned; `repeats` after the first, or
    as many as begin before `ends_s`."""
    device = jax.local_devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    has_pinned = any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    usual = device.default_memory().kind
    host = np.ones(size_bytes // 4, np.float32)
    found: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], Any]) -> Any:
        began_s = now_s()
        result = act()
        found.setdefault(name, []).append(size_bytes / (now_s() - began_s))
        return result

    def put(value: Any, where: Any) -> Any:
        return jax.block_until_ready(jax.device_put(value, where))

    for turn in range(repeats + 1):
        if turn > 1 and now_s() > ends_s:
            break
        fresh = jax.block_until_ready(jax.device_put(put(host, device), device, may_alias=False))
        note("d2h_pageable", partial(np.array, fresh))
        note("h2d_pageable", partial(put, host, device))
        if has_pinned:
            moved = note("d2h_pinned", partial(put, fresh, pinned))
            note("h2d_pinned", partial(put, moved, jax.sharding.SingleDeviceSharding(device, memory_kind=usual)))
    return {name: rates[1:] for name, rates in found.items()}


def main() -> None:
    """Prints the samples so far as a line of JSON, again and again: if this process is ended, the last line counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--ramdisk", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    ends_s = now_s() + given.seconds
    logging.getLogger("ckptkit").setLevel(logging.ERROR)  # warns of a durable tier in memory, which is not used
    if given.contender == LIMITS:
        _tell(_limits(given, ends_s))
        return
    on_cpu = jax.local_devices()[0].platform == "cpu"
    step, _ = make_step(*(_ON_CPU if on_cpu else (_STEP_S, _SQUARE)))
    who = contender(given.contender, given.ramdisk / given.contender)
    try:
        for samples in measure(who, make_state(given.bytes, given.weights), step, given.repeats, ends_s):
            _tell(samples)
    finally:
        who.close()


def _tell(found: dict[str, Any]) -> None:
    print("\n" + json.dumps(found), flush=True)  # on a line of its own: libraries print too


def _limits(given: argparse.Namespace, ends_s: float) -> dict[str, Any]:
    device = jax.local_devices()[0]
    found: dict[str, Any] = {
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "count": jax.local_device_count(),
            "version": device.client.platform_version,
            "memory_stats": dict(device.memory_stats() or {}),
        },
        "limits": limits(given.repeats, min(_LARGE_BYTES, given.bytes // 2), ends_s),
    }
    state = jax.eval_shape(partial(make_state, given.bytes, given.weights))
    found["state_bytes"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    found["leaves"] = len(jax.tree.leaves(state))
    found["empty_save_s"] = _empty_saves(given.ramdisk / "empty", given.repeats)
    return found


def _empty_saves(root: Path, repeats: int) -> list[float]:
    """Seconds that `save` blocks for a state of one number: what is not the transfer."""
    who = CkptKit(root)
    found = []
    try:
        for number in range(repeats + 1):
            began_s = now_s()
            who.save(number, {"count": jnp.int32(number)})
            found.append(now_s() - began_s)
            who.committed_s()
            who.settled()
    finally:
        who.close()
    return found[1:]


if __name__ == "__main__":
    main()

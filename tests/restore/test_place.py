"""Proven blocks onto devices: CPU devices that pass for accelerators, and many leaves at once."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from bench.gpu_worker import compilations
from ckptkit.restore import landing, place
from ckptkit.restore.landing import Landing
from ckptkit.restore.tree import Form, Target, boxes_needed
from ckptkit.snapshot import describe
from tests.states import abstract, assert_same, make_state, mesh


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """The arguments of each call of `jax.device_put`, on devices that pass for accelerators."""
    found: list[list[Any]] = []
    put = jax.device_put

    def noted(values: Any, *where: Any, **how: Any) -> Any:
        if isinstance(values, list):
            found.append([*zip(values, *where, strict=True)])
        return put(values, *where, **how)

    monkeypatch.setattr(describe, "is_accelerator", lambda device: True)
    monkeypatch.setattr(jax, "device_put", noted)
    place._local_devices.cache_clear()  # what an earlier test asked about these devices
    yield found
    place._local_devices.cache_clear()


SMALL = (8, 8)
LARGE = (512, 128)  # a quarter of it is a large block, too


@functools.cache
def form(spec: tuple[Any, ...], shape: tuple[int, ...] = SMALL, dtype: str = "float32") -> Form:
    sharding = NamedSharding(mesh(), PartitionSpec(*spec))
    boxes = boxes_needed(sharding, shape, 0)
    return Form(kind="jax", shape=shape, dtype=dtype, sharding=sharding, boxes=boxes)


def target(number: int, *spec: Any, shape: tuple[int, ...] = SMALL) -> Target:
    return Target(("default", (str(number),)), form(spec, shape))


def blocks_of(wanted: Target, number: int) -> dict[Any, np.ndarray]:
    whole = np.full(wanted.form.shape, number, np.float32)
    return {box: whole[box.slices()].copy() for box in wanted.form.boxes}


SPECS: list[tuple[Any, ...]] = [(), ("data",), ("data", "fsdp"), (None, "fsdp")]


def placed(wanted: list[Target]) -> place.Placer:
    """The arrays of these leaves, each full of its number, and compared with that."""
    placer = place.Placer()
    for number, each in enumerate(wanted):
        placer.add(each, blocks_of(each, number))
    placer.finish()
    for number, each in enumerate(wanted):
        array = placer.leaves[each.key]
        assert array.sharding == each.form.sharding
        assert all((np.asarray(shard.data) == number).all() for shard in array.addressable_shards)
    return placer


def test_each_large_block_crosses_to_the_devices_once(puts: list[list[Any]]) -> None:
    """A replicated leaf would be transferred once for each device, all of it through the host's memory."""
    wanted = [target(number, *SPECS[number % 4], shape=LARGE) for number in range(40)]
    placed(wanted)
    from_host, relayed = puts
    assert all(isinstance(value, np.ndarray) for value, _ in from_host)
    assert all(isinstance(value, jax.Array) for value, _ in relayed)
    assert len(from_host) == sum(len(each.form.boxes) for each in wanted if len(each.form.boxes) < 4)
    load = Counter[Any]()
    for value, sharding in from_host:
        load.update(dict.fromkeys(sharding.device_set, value.nbytes))
    assert len(load) == 4
    assert max(load.values()) <= 1.2 * min(load.values())


def test_small_leaves_are_given_to_all_devices_by_one_call(
    puts: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of small replicated leaves would take a call for each device: 0.7 milliseconds a leaf on eight."""
    put, calls = place.batched_device_put, list[Any]()

    def noted(aval: Any, sharding: Any, parts: Any, devices: Any) -> Any:
        calls.append(devices)
        return put(aval, sharding, parts, devices)  # pyright: ignore[reportOptionalCall]

    monkeypatch.setattr(place, "batched_device_put", noted)
    placed([target(number, *SPECS[number % 4]) for number in range(40)])
    assert not puts, "no list of single transfers"
    assert len(calls) == 40 - len(SPECS), "all but the first of each form"
    assert {len(devices) for devices in calls} == {4}


def test_batches_bound_the_blocks_that_are_under_way(puts: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole state would be in host memory at once, in addition to the slot."""
    monkeypatch.setattr(place, "BATCH_BYTES", 1000 << 10)
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    placer = place.Placer()
    wanted = [target(number, shape=LARGE) for number in range(40)]

    def add(numbers: range) -> None:
        for number in numbers:
            placer.add(wanted[number], blocks_of(wanted[number], number))

    threads = [threading.Thread(target=add, args=(range(start, 40, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    placer.finish()
    assert len(placer.leaves) == 40
    assert len(puts) == 2 * 10  # 256 KiB each: four leaves a batch, by two calls
    assert len(waited) == 8  # all but the last two batches


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_accelerators_get_back_what_was_saved(puts: list[list[Any]], tmp_path: Path, kind: str) -> None:
    """Leaves would come back on other devices, in other memory, or with other bits."""
    state = {
        **{name: leaf for name, leaf in make_state(3).items() if "key" not in name},
        "embedding": jax.device_put(np.arange(65536.0).reshape(LARGE), NamedSharding(mesh(), PartitionSpec("data"))),
        "moments": jax.device_put(np.arange(8.0), NamedSharding(mesh(), PartitionSpec("data"), memory_kind=kind)),
    }
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3)]
    with ckptkit.CheckpointManager(tmp_path / "d", tiers=tiers) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        puts.clear()
        with compilations() as compiled:
            given = manager.restore(1, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
            found = manager.restore(1)
    assert compiled == [], "the first restore of thousands of leaves would wait for a compiler"
    assert [len(sent) for sent in puts] == [2, 2] * 2, "the two large blocks to a device, and to another"
    assert_same(given, state)
    assert_same(found, state)
    for restored in (given, found):
        assert restored["moments"].sharding.memory_kind == kind
        assert restored["w"].sharding == state["w"].sharding


def test_typed_keys_are_placed_on_accelerators(puts: list[list[Any]], tmp_path: Path) -> None:
    """A restore of random keys would raise, or return their data."""
    state = {name: leaf for name, leaf in make_state(3).items() if "key" in name}
    with ckptkit.CheckpointManager(tmp_path / "d") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        assert_same(manager.restore(1, args=ocp.args.StandardRestore(abstract(state))), state)  # pyright: ignore[reportCallIssue]
    assert place.is_transferred(form(())), "the devices pass for accelerators"


def test_private_jax_placement_is_where_expected() -> None:
    """Each of thousands of small leaves would take 7 microseconds more to restore. If it failed, a new JAX has moved
    the function to which `jax.make_array_from_callback` comes: follow it there."""
    assert place.batched_device_put is not None


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("public", [False, True])
def test_leaves_of_one_form_are_placed_alike(spec: tuple[Any, ...], public: bool, monkeypatch: Any) -> None:
    """A leaf would get the bits of another one, or be an array of another type than the first of its form."""
    if public:
        monkeypatch.setattr(place, "batched_device_put", None)
    wanted = [target(number, *spec) for number in range(3)]
    wholes = [np.random.default_rng(number).standard_normal((8, 8), np.float32) for number in range(3)]
    placer = place.Placer()
    for each, whole in zip(wanted, wholes, strict=True):
        placer.add(each, {box: whole[box.slices()].copy() for box in each.form.boxes})
    assert not placer.leaves, "small leaves are placed together"
    placer.finish()
    first = placer.leaves[wanted[0].key]
    for each, whole in zip(wanted, wholes, strict=True):
        array = placer.leaves[each.key]
        assert (array.aval, array.sharding, array.committed) == (first.aval, each.form.sharding, True)
        assert all((shard.data == whole[shard.index]).all() for shard in array.addressable_shards)
        assert len({shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}) == 4


def test_wide_numbers_are_placed_as_jax_takes_them() -> None:
    """Without 64 bits, a float64 would be placed as it was saved in all leaves but the first."""
    wanted = [Target(("default", (str(number),)), form((), (4,), "float64")) for number in range(3)]
    placer = place.Placer()
    for each in wanted:
        placer.add(each, {box: np.full(4, 1 / 3) for box in each.form.boxes})
    placer.finish()
    assert {leaf.dtype for leaf in placer.leaves.values()} == {np.dtype("float32")}


def test_blocks_are_used_again_once_they_are_transferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each box would be read into fresh memory, whose first touch takes longer than the copy; or a box would be read
    into memory that is still being transferred."""
    taken, under_way = list[int](), list[set[int]]()
    usual_made, usual_take, wait = place._made, Landing.take, jax.block_until_ready

    def as_accelerators_do(batch: Any, load: Any) -> dict[Any, Any]:  # CPU devices would take the memory itself
        under_way.append({block.ctypes.data for _, blocks in batch for block in blocks.values()})
        return usual_made([(each, {box: b.copy() for box, b in blocks.items()}) for each, blocks in batch], load)

    def take(self: Any, *args: Any) -> np.ndarray:
        block = usual_take(self, *args)
        taken.append(block.ctypes.data)
        assert all(block.ctypes.data not in read for read in under_way), "it is still being transferred"
        return block

    def waited(value: Any) -> Any:
        if under_way:
            under_way.pop(0)
        return wait(value)

    state = {str(n): jax.device_put(np.full(1 << 19, n, np.float32), jax.devices()[0]) for n in range(48)}
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        with monkeypatch.context() as patched:
            patched.setattr(describe, "is_accelerator", lambda device: True)
            patched.setattr(place, "can_allocate", lambda *_: False)
            patched.setattr(place, "_copying_device", lambda sharding: jax.devices()[0])
            patched.setattr(place, "BATCH_BYTES", 4 << 20)
            patched.setattr(place, "_made", as_accelerators_do)
            patched.setattr(Landing, "take", take)
            patched.setattr(place.jax, "block_until_ready", waited)
            place._local_devices.cache_clear()
            restored = manager.restore(1, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
        place._local_devices.cache_clear()
    assert_same(restored, state)
    assert len(taken) == 48
    assert len(set(taken)) <= 30, "three batches of two, and the eight that each thread reads together"


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each block of pinned memory, of which there are at most four MiB."""
    monkeypatch.setattr(landing, "is_read_from_pinned", lambda device: True)
    monkeypatch.setattr(landing, "PINNED_MAX_BYTES", 4 << 20)
    found: list[int] = []
    usual = landing._pinned_block

    def noted(size_bytes: int, device: Any) -> Any:
        found.append(size_bytes)
        return usual(size_bytes, device)

    monkeypatch.setattr(landing, "_pinned_block", noted)
    return found


MIB, BYTES = 1 << 20, np.dtype(np.uint8)


def test_memory_for_gpus_is_pinned_up_to_a_limit(pinned: list[int]) -> None:
    """A restore would pin as much memory as the state has, at 0.7 s for each GB, while no step runs."""
    memory, device, waited = Landing(), jax.devices()[0], list[int]()

    def reclaim() -> bool:
        waited.append(len(pinned))
        if len(waited) == 1:
            return False
        memory.give_back([blocks[0], np.zeros(3)])
        return True

    with jax.transfer_guard("disallow"):
        blocks = [memory.take((2, MIB), BYTES, device, reclaim) for _ in range(3)]
    assert pinned == [2 * MIB] * 2
    assert waited == [2], "no transfer is under way: the third is of other memory"
    for number, block in enumerate(blocks):
        block[:] = number
    assert [block.mean() for block in blocks] == [0, 1, 2]
    again = memory.take((700, 1400), np.dtype("bfloat16"), device, reclaim)
    assert again.ctypes.data == blocks[0].ctypes.data, "it is waited for"
    assert len(waited) == 2
    memory.take((5, MIB), BYTES, device, reclaim)
    assert len(waited) == 2, "a box beyond the limit waits for nothing"


def test_pinned_memory_of_other_sizes_makes_room(pinned: list[int]) -> None:
    """Large blocks that nothing uses would keep all smaller boxes from pinned memory."""
    memory, device = Landing(), jax.devices()[0]
    memory.give_back([memory.take((2, MIB), BYTES, device) for _ in range(2)])
    small = [memory.take((MIB,), BYTES, device, lambda: pytest.fail("nothing to wait for")) for _ in range(4)]
    assert pinned == [2 * MIB] * 2 + [MIB] * 4
    memory.give_back(small)
    large = [np.asarray(memory.take((3, MIB), BYTES, device)) for _ in range(3)]
    memory.give_back(large)
    assert sum(block.nbytes for block in memory._free) <= 4 * MIB, "the host's memory would fill with unused blocks"


def test_refused_pinned_memory_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> None:
    """JAX may wait for seconds before it reports that it has none, and a restore would wait so for each leaf."""

    def refuse(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory")

    monkeypatch.setattr(jax, "device_put", refuse)
    memory, device = Landing(), jax.devices()[0]
    blocks = [memory.take((MIB,), BYTES, device, lambda: pytest.fail("it would not help")) for _ in range(3)]
    assert pinned == [MIB]
    for number, block in enumerate(blocks):
        block[:] = number
    assert [block[0] for block in blocks] == [0, 1, 2]

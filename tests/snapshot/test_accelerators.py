"""Staging on accelerators: CPU devices that pass for such, with a model of their allocator."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ckptkit
from bench.gpu_worker import compilations
from ckptkit.slots.host_memory import HostMemory
from ckptkit.snapshot import copying, describe, replicas, shards
from ckptkit.snapshot.describe import SlotExtent
from ckptkit.snapshot.staging import Stager
from ckptkit.util import sharing
from tests.snapshot.allocator import FULL, PIECE, Allocator, Run, pieces
from tests.states import abstract, make_state, mesh

pytestmark = pytest.mark.usefixtures("accelerators")


def test_groups_without_room_fall_back() -> None:
    """A state larger than the free memory would end the job, where `device_copy` is forced."""
    run = Run(7 * PIECE, 4)
    assert run.save("device_copy") == 2 * PIECE
    assert "block 0.000131 GB" in run.under_way[-1][0].reason
    run.step(PIECE)  # what was waited for may be donated
    run.finish()


def test_a_full_device_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA may wait for room for seconds before it reports that it has none, and a save would wait so for each group."""
    run, calls = Run(100 * PIECE, 12), list[int]()

    def put(arrays: Any, shardings: Any) -> Any:
        calls.append(len(arrays))
        raise jax.errors.JaxRuntimeError(FULL)  # in pieces, none of which is large enough

    monkeypatch.setattr(run.allocator, "put", put)
    assert run.save("device_copy") == 0
    assert calls == [12]
    assert run.under_way[-1][0].strategy == "block"
    run.finish()


def test_other_errors_of_a_copy_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken device would look like a full one, and the save would hang on it later."""
    run = Run(20 * PIECE, 2)

    def put(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    monkeypatch.setattr(run.allocator, "put", put)
    with pytest.raises(jax.errors.JaxRuntimeError, match="device lost"):
        run.save("device_copy")


def test_pinned_memory_is_counted() -> None:
    """The container would be killed: the copies in pinned memory are a second snapshot in addition to the slots."""
    host = HostMemory(bytes_max=9 * PIECE)
    run = Run(100 * PIECE, 4, Stager(host))
    run.save("pinned_host")
    assert host.taken_bytes == 4 * PIECE
    run.finish()
    assert host.taken_bytes == 0


def test_a_whole_state_is_copied_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop would wait for a call for each group: 20 ms for 16 GB on a GPU."""
    run, calls = Run(100 * PIECE, 9), list[int]()
    put = run.allocator.put

    def counted(arrays: Any, shardings: Any) -> Any:
        calls.append(len(arrays))
        return put(arrays, shardings)

    monkeypatch.setattr(run.allocator, "put", counted)
    run.save()
    run.step(PIECE)
    run.finish()
    assert calls == [], "before the first step"
    assert run.save() == 9 * PIECE
    assert calls == [9]
    run.finish()


@pytest.mark.parametrize("pool_pieces", [100, 3, 9])
@pytest.mark.parametrize("strategy", ["device_copy", "block"])
def test_a_gpu_is_read_through_a_window_of_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, pool_pieces: int
) -> None:
    """A transfer to other memory takes 28 times as long on a GPU, and the pool of pinned memory may have no room."""
    monkeypatch.setattr(copying, "window_bytes", lambda devices: 4 * PIECE)
    monkeypatch.setattr(copying, "is_read_from_pinned", shards.has_pinned)
    windows: list[int] = []
    usual = shards.in_pinned_memory

    def transferred(several: Any) -> Any:
        windows.append(len(several))
        if sum(windows) > pool_pieces:
            raise jax.errors.JaxRuntimeError(FULL)
        return usual(several)

    monkeypatch.setattr(copying, "in_pinned_memory", transferred)
    run = Run(1000 * PIECE, 20, Stager())
    with jax.transfer_guard("disallow"):
        run.save(strategy)
        run.finish()  # compares all bytes
    assert windows[0] == max(windows) == 4
    if pool_pieces == 100:
        assert sum(windows) == 20
    else:
        assert sum(windows[:-1]) <= pool_pieces, "a full pool is asked once"


def test_offloaded_leaves_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer in host memory would be copied there once more before it is in the slot."""
    on = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {"moments": jax.device_put(np.arange(PIECE, dtype=np.float32), on)}
    description = describe.describe_items({"default": state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    viewed: list[Any] = []
    view_of = shards.view_of
    monkeypatch.setattr(shards, "view_of", lambda array: (viewed.append(array.shape), view_of(array))[1])
    allocator = Allocator(1 << 30)
    for strategy in ("auto", "block", "device_copy"):
        Stager(None, allocator).begin(strategy, description, {"default": state}, memory).finish()
        assert (memory.view(np.float32)[:PIECE] == np.arange(PIECE)).all()
        memory[:] = 0
    assert viewed == [(PIECE,)] * 3
    assert allocator.puts == []


def test_windows_in_use_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is made meanwhile would find memory that is not free."""
    host, taken = HostMemory(), list[int]()
    run = Run(100 * PIECE, 4, Stager(host))
    description = describe.describe_items({"default": run.state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    run.stager.begin("block", description, {"default": run.state}, memory, lambda *_: taken.append(host.taken_bytes))
    assert taken == [4 * PIECE] * 4
    assert host.taken_bytes == 0


def test_pinned_copies_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte would be copied within host memory once more before it is in the slot."""
    run = Run(100 * PIECE, 4)
    state = {**run.state, "tall": jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3))}
    state["packed"] = jax.device_put(np.arange(8).astype("int4"))
    description = describe.describe_items({"default": state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    begun = run.stager.begin("pinned_host", description, {"default": state}, memory)
    converted: list[str] = []
    convert = np.asarray

    def noted(value: Any, *args: Any, **how: Any) -> Any:
        if isinstance(value, jax.Array):
            converted.append(value.dtype.name)
        return convert(value, *args, **how)

    monkeypatch.setattr(np, "asarray", noted)
    begun.finish()
    assert converted == ["int4"], "which is packed, and cannot be read as it is"
    places = {leaf.record.name: at for leaf, at in zip(description.items["default"], description.extents, strict=True)}
    assert memory[places["tall"].offset :][:24].view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert memory[places["packed"].offset :][:8].view("int8").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_copies_are_dropped_as_soon_as_they_are_in_the_slot() -> None:
    """Device memory would be taken until the last byte is on the host."""
    run = Run(100 * PIECE, 16)
    description = describe.describe_items({"default": run.state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    alive = []

    def buffers(start: int, stop: int, _: str) -> None:
        alive.append(
            len({array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.shape == (PIECE // 4,)})
        )

    begun = run.stager.begin("device_copy", description, {"default": run.state}, memory, buffers)
    begun.finish()
    assert len(alive) == 16
    assert alive[-1] <= alive[0] - 14, alive


def test_the_state_is_not_kept_alive_by_the_copies() -> None:
    """The device memory of two states would be in use while the first is transferred."""
    run = Run(100 * PIECE, 4)
    refs = [weakref.ref(array) for array in run.state.values()]
    begun = run.save("device_copy")
    run.state = {}
    assert begun
    assert not any(ref() is not None for ref in refs)
    run.state = pieces(4)
    run.finish()


@pytest.mark.parametrize("strategy", ["block", "device_copy", "pinned_host"])
def test_no_host_copy_stays_with_the_users_arrays(strategy: Any) -> None:
    """Frozen weights would have a copy in host memory as long as they live: JAX keeps what it has transferred."""
    state = {
        "split": jax.device_put(
            np.arange(64).reshape(8, 8).astype("int4"), NamedSharding(mesh(), PartitionSpec("data", "fsdp"))
        ),
        "replicated": jax.device_put(np.arange(8).astype("int4"), NamedSharding(mesh(), PartitionSpec())),
        "one": jax.device_put(np.arange(8).astype("int4"), SingleDeviceSharding(jax.devices()[1])),
    }
    description = describe.describe_items({"default": state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    Stager().begin(strategy, description, {"default": state}, memory).finish()
    for name, array in state.items():
        for each in (array, *(shard.data for shard in array.addressable_shards)):
            assert each._npy_value is None, name  # pyright: ignore[reportAttributeAccessIssue]


def test_transfers_stay_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of the whole state at once take as much host memory as the slot itself."""
    monkeypatch.setattr(copying, "window_bytes", lambda devices: 3 * PIECE)
    begun: list[int] = []
    ended: list[int] = []
    most = []

    class Array:
        def __init__(self, array: Any, number: int):
            self.array, self.number = array, number

        def copy_to_host_async(self) -> None:
            begun.append(self.number)
            most.append(len(begun) - len(ended))

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            return np.array(self.array)

    state = pieces(40)
    description = describe.describe_items({"default": state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    local = shards.local_shards(description, {"default": state})
    watched = [(Array(array, number), extent) for number, (array, extent) in enumerate(local)]
    digests = copying.copy_shards(watched, memory, lambda start, stop, _: ended.append(start))
    assert len(begun) == len(ended) == len(digests) == 40
    assert 1 < max(most) <= 4  # a cell is told before it leaves the window
    assert copying.transfer_bytes(description.extents) == 7 * PIECE - PIECE
    assert copying.transfer_bytes(description.extents, pinned=True) == 40 * PIECE


def test_all_devices_transfer_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight links to the host would be used one after the other, in the order of the leaves."""
    monkeypatch.setattr(copying, "window_bytes", lambda devices: 2 * PIECE)
    counts = dict(zip(jax.devices(), (12, 4, 6, 8), strict=True))
    begun, ended = Counter[Any](), Counter[Any]()
    idle: list[set[Any]] = []

    class Array:
        def __init__(self, device: Any):
            self.device = device

        def copy_to_host_async(self) -> None:
            begun[self.device] += 1

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            idle.append({each for each, count in counts.items() if begun[each] < count and begun[each] == ended[each]})
            return np.zeros(PIECE, np.uint8)

    watched: list[Any] = []
    for device in [device for device, count in counts.items() for _ in range(count)]:
        number, start = len(watched), len(watched) * PIECE
        watched.append((Array(device), SlotExtent(number, start, start + PIECE, ((start, start + PIECE),), device)))
    of_slot = {extent.offset: extent.device for _, extent in watched}
    memory = np.zeros(len(watched) * PIECE, np.uint8)
    copying.copy_shards(watched, memory, lambda start, *_: ended.update([of_slot[start]]))
    assert idle == [set()] * 30, "a device that has something left is transferring it"


@pytest.mark.parametrize("abstract_leaves", [False, True])
def test_prepare_counts_the_host_memory_of_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract_leaves: bool
) -> None:
    """`prepare` would report that a run fits, and the container would be killed at its first save."""
    state = pieces(8)
    args = ocp.args.StandardSave(abstract(state) if abstract_leaves else state)  # pyright: ignore[reportCallIssue]

    def prepare(name: str, host_bytes_max: int, staging: Any = "auto") -> None:
        saving = ckptkit.SaveOptions(host_bytes_max=host_bytes_max, staging=staging)
        with ckptkit.CheckpointManager(tmp_path / name, saving=saving) as manager:
            manager.prepare(args)

    prepare("room", 16 * PIECE)  # a slot, and a transfer of all of it, which is less than the windows
    with pytest.raises(ckptkit.StoreFullError, match=r"and 512.0 KiB for transfers from devices"):
        prepare("none", 16 * PIECE - 1)
    monkeypatch.setattr(copying, "window_bytes", lambda devices: PIECE)
    prepare("windows", 10 * PIECE)
    with pytest.raises(ckptkit.StoreFullError, match=r"and 512.0 KiB for transfers from devices"):
        prepare("pinned", 16 * PIECE - 1, "pinned_host")


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("bad", [0, 1, 3, 6])
def test_failed_transfer_ends_the_copy(monkeypatch: pytest.MonkeyPatch, bad: int, window: int, begins: bool) -> None:
    """The thread of the saves would wait without end for a transfer that has failed."""
    monkeypatch.setattr(copying, "window_bytes", lambda devices: window * PIECE)
    monkeypatch.setattr(copying, "copy_threads", lambda nbytes: 4)

    class Gone:
        def copy_to_host_async(self) -> None:
            if begins:
                raise RuntimeError("the buffer was donated")

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise RuntimeError("the buffer was donated")

    state = pieces(8)
    description = describe.describe_items({"default": state})
    memory = np.zeros(description.slot_bytes, np.uint8)
    local = shards.local_shards(description, {"default": state})
    broken = [(Gone() if number == bad else array, extent) for number, (array, extent) in enumerate(local)]
    with pytest.raises(RuntimeError, match="donated"):
        copying.copy_shards(broken, memory)


def test_replicated_leaves_are_read_from_all_their_devices() -> None:
    """All transfers of data parallel training would go through the first device."""
    on = NamedSharding(mesh(), PartitionSpec())
    state = {str(number): jax.device_put(np.zeros(PIECE // 4, np.float32), on) for number in range(8)}
    state["first"] = jax.device_put(np.zeros(PIECE // 2, np.float32), SingleDeviceSharding(jax.devices()[0]))
    description = describe.describe_items({"default": state})
    load = Counter[Any]()
    for extent in description.extents:
        load[extent.device] += extent.stop - extent.offset
    assert set(load) == set(jax.devices())
    assert max(load.values()) <= 4 * PIECE
    for shard, extent in shards.local_shards(description, {"default": state}):
        assert shard.devices() == {extent.device}


def test_windows_are_shared_by_the_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes with a device each would pin eight times the memory, and copy with 96 threads."""
    monkeypatch.setattr(sharing, "COPY_THREADS", 12)
    monkeypatch.setitem(sharing._host, "processes", 1)
    assert (copying.window_bytes(1), sharing.copy_threads(1 << 30)) == (1536 << 20, 12)
    assert copying.window_bytes(8) == 256 << 20
    sharing.share_host(8)
    assert (copying.window_bytes(1), sharing.copy_threads(1 << 30)) == (256 << 20, 4)


def test_a_copy_by_name_keeps_within_the_callers_limit() -> None:
    """`device_copy_bytes_max=0` would not keep a save from copying the whole state on the device."""
    run = Run(100 * PIECE, 8, kept_free=3 * PIECE)
    assert run.save("device_copy") == 2 * PIECE
    run.finish()


def test_compared_copies_of_offloaded_leaves_stay_on_the_host() -> None:
    """A leaf that was moved away from the device would be copied into its memory at every save."""
    on = NamedSharding(mesh(), PartitionSpec(), memory_kind="pinned_host")
    state = {"moments": jax.device_put(np.arange(PIECE, dtype=np.float32), on)}
    description = describe.describe_items({"default": state})
    twins = replicas.Rotation(ckptkit.ReplicaPolicy()).choose(replicas.LocalReplicasOf(description))
    compared = replicas.twin_shards(description, {"default": state}, twins)
    assert compared
    assert {held.kind for held in compared} == {"pinned_host"}


def test_offloaded_leaves_never_take_device_memory() -> None:
    """An optimizer in host memory would be copied through the device that it was moved away from."""
    on = NamedSharding(mesh(), PartitionSpec("data"), memory_kind="pinned_host")
    state = {
        "moments": jax.device_put(np.arange(PIECE, dtype=np.float32), on),
        "weights": jax.device_put(
            np.arange(PIECE // 4, dtype=np.float32), NamedSharding(mesh(), PartitionSpec("data"))
        ),
    }
    description = describe.describe_items({"default": state})
    assert [extent.device is None for extent in description.extents] == [True, True, False, False]
    memory = np.zeros(description.slot_bytes, np.uint8)
    allocator = Allocator(1 << 30)
    Stager(None, allocator).begin("device_copy", description, {"default": state}, memory).finish()
    assert allocator.puts == [(PIECE // 2, "device")] * 2
    assert (memory[: 4 * PIECE].view(np.float32) == np.arange(PIECE)).all()


def test_staging_compiles_nothing() -> None:
    """The step loop would wait for a compiler at the first save: a minute for thousands of leaves on eight devices."""
    state = {name: leaf for name, leaf in make_state(3).items() if name != "list"}
    jax.block_until_ready(state)
    with compilations() as compiled:
        description = describe.describe_items({"default": state})
        memory = np.zeros(description.slot_bytes, np.uint8)
        for strategy in ("device_copy", "pinned_host", "block", "auto"):
            Stager().begin(strategy, description, {"default": state}, memory).finish()
    assert compiled == []

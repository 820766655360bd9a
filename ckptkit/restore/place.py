"""Places verified boxes on devices. A CPU device's own memory is made before the read, which fills it."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, final

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.sharding import SingleDeviceSharding

from ckptkit.model.boxes import Box, local_devices_by_box
from ckptkit.restore.landing import Landing
from ckptkit.restore.plan import Key
from ckptkit.restore.tree import Form, Target
from ckptkit.snapshot import describe
from ckptkit.snapshot.shards import lies_as_in_numpy, view_of
from ckptkit.util.own_context import own_context
from ckptkit.util.pages import ALIGNMENT_BYTES, advise_huge, empty_block
from ckptkit.util.sharing import SMALL_BYTES

try:  # no public name; tests/restore/test_place.py probes for it
    from jaxlib._jax import batched_device_put
except ImportError:
    batched_device_put = None

_log = logging.getLogger(__name__)
DEVICE_BUFFER_BYTES = 1 << 20  # leaves from it on get memory of their device
_SMALL_BATCH = 512  # leaves that are placed together
BATCH_BYTES = 128 << 20  # of blocks whose transfers are dispatched together
_Leaf = tuple[Target, Mapping[Box, np.ndarray]]
_ByForm = dict[Form, tuple[list[Key], list[Mapping[Box, np.ndarray]]]]


class DeviceBuffer(np.ndarray):
    """Host memory that is a CPU device's array. A view keeps the array alive, but does not prevent its donation."""

    array: jax.Array | None = None


def device_buffers_of(targets: Iterable[Target]) -> dict[Key, DeviceBuffer]:
    """Device buffers for the leaves of `targets` that can have one (`can_allocate`); none where JAX cannot."""
    by_sharding: dict[Any, list[Target]] = {}
    for target in targets:
        form = target.form
        if form.sharding is not None and can_allocate(form.shape, np.dtype(form.dtype), form.sharding):
            by_sharding.setdefault(form.sharding, []).append(target)
    found: dict[Key, DeviceBuffer] = {}
    for sharding, several in by_sharding.items():
        try:
            wanted = [(target.form.shape, np.dtype(target.form.dtype)) for target in several]
            blocks = allocate_buffers(wanted, sharding)
        except Exception as error:  # noqa: BLE001 - experimental: without it a restore is slower, and no less right
            _log.debug("restored arrays take over the memory that is read into: %s", error)
            return found
        found |= zip((target.key for target in several), blocks, strict=True)
    return found


def can_allocate(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> bool:
    """Whether an array gets memory of its device's own: large ones that are whole on a single CPU device."""
    if sharding is None or math.prod(shape) * dtype.itemsize < DEVICE_BUFFER_BYTES or sharding.num_devices != 1:
        return False
    (device,) = sharding.device_set
    usual = sharding.memory_kind in (None, device.default_memory().kind)
    return usual and device.platform == "cpu" and lies_as_in_numpy(dtype) and dtype == canonicalize_dtype(dtype)


@own_context()
def allocate_buffers(
    wanted: Iterable[tuple[tuple[int, ...], np.dtype]], sharding: jax.sharding.Sharding
) -> list[DeviceBuffer]:
    """Uninitialised arrays, each with its host memory, to be written before anything else uses it.

    An array that takes over other memory cannot be donated: the first step would copy it. Nothing is touched here: the
    first write makes the pages, huge ones where the kernel gives them. Cost: one small program, compiled in 20 ms and
    0.2 ms for each array. Raises what JAX raises where it has no such program.
    """
    make = _allocation(tuple((shape, dtype.name) for shape, dtype in wanted), sharding)
    found = []
    for array in jax.block_until_ready(make()):
        advise_huge(array.unsafe_buffer_pointer(), array.nbytes)
        landing = view_of(array).view(DeviceBuffer)
        landing.array = array
        found.append(landing)
    return found


@lru_cache(maxsize=4)
def _allocation(wanted: tuple[tuple[tuple[int, ...], str], ...], sharding: jax.sharding.Sharding) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    results = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in wanted]
    # XLA passes uninitialised memory for the results to a callback that works in place; this one does not touch it.
    return jax.jit(buffer_callback(lambda context, out: None, results), out_shardings=sharding)


def place(target: Target, blocks: Mapping[Box, np.ndarray]) -> Any:
    """The leaf from its verified blocks. Never references tier memory: the blocks are this restore's own.

    On the CPU backend the array takes the memory of a block that one device wants as it is; of a block that several
    want, each gets a copy. On other backends the blocks are transferred (`Placer`), under any `jax.transfer_guard`:
    the caller has asked for it.
    """
    (leaf,) = _made([(target, blocks)], Counter()).values()
    return leaf


def is_transferred(form: Form) -> bool:
    """Whether leaves of this form have boxes on devices of this process that have memory of their own."""
    if form.sharding is None or not form.boxes:
        return False
    return _local_devices(form.sharding)[1]


@lru_cache(maxsize=4096)
def _local_devices(sharding: jax.sharding.Sharding) -> tuple[int, bool]:
    """How many devices of this process it has, and whether they have memory of their own."""
    devices = sharding.addressable_devices
    return len(devices), any(map(describe.is_accelerator, devices))


@lru_cache(maxsize=4096)
def _copying_device(sharding: jax.sharding.Sharding) -> Any:
    """A device of this process, if all of its devices copy the memory that they are given; None otherwise. CPU devices
    take the memory of a block as it is, and for other kinds of host memory it is not known."""
    devices = list(sharding.addressable_devices)
    usual = sharding.memory_kind in (None, devices[0].default_memory().kind)
    return devices[0] if usual and all(device.platform != "cpu" for device in devices) else None


@final
class Placer:
    """Places leaves as they are verified, from any thread: transfers are dispatched for many leaves at once, and small
    leaves are placed many at a time.

    Host memory: two batches of `BATCH_BYTES` in transfer, one that is being filled, and blocks that wait to be used
    again (`Landing`). A larger leaf is a batch of its own. The leaves of the last batch are in `leaves` after `finish`.
    """

    def __init__(self) -> None:
        self.leaves: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._waiting: list[_Leaf] = []
        self._waiting_bytes = 0
        self._load = Counter[Any]()
        self._forms: dict[Form, tuple[bool, int]] = {}  # whether its leaves are transferred, and their bytes
        self._under_way: deque[tuple[list[Any], list[np.ndarray]]] = deque()  # arrays, and the blocks they come from
        self._landing = Landing()
        self._small: _ByForm = {}
        self._small_count = 0

    def block(self, target: Target, box: Box, dtype: np.dtype) -> np.ndarray:
        """Memory for a box of a leaf that will be added."""
        sharding = target.form.sharding
        if sharding is not None and target.form.boxes and (device := _copying_device(sharding)) is not None:
            return self._landing.take(box.shape, dtype, device, self._reclaim)
        return empty_block(box.shape, dtype)

    def add(self, target: Target, blocks: Mapping[Box, np.ndarray]) -> None:
        """Places a leaf now, or with others. Memory from `block` is used again once it is transferred."""
        form = target.form
        if (known := self._forms.get(form)) is None:
            self._forms[form] = known = (is_transferred(form), sum(block.nbytes for block in blocks.values()))
        transferred, nbytes = known
        if transferred:
            with self._lock:
                self._waiting.append((target, blocks))
                self._waiting_bytes += nbytes
                if self._waiting_bytes >= BATCH_BYTES or len(self._waiting) >= _SMALL_BATCH:
                    self._dispatch()
        elif nbytes >= SMALL_BYTES:
            self.leaves.update(_placed({form: ([target.key], [blocks])}))
        else:
            with self._lock:
                _add(self._small, target, blocks)
                self._small_count += 1
                if self._small_count < _SMALL_BATCH:
                    return
                together, self._small, self._small_count = self._small, {}, 0
            self.leaves.update(_placed(together))

    def finish(self) -> None:
        """Dispatches what waits. Waits for no transfer."""
        with self._lock:
            self._dispatch()
            self._under_way.clear()
            self.leaves.update(_placed(self._small))
            self._small, self._small_count = {}, 0

    def _reclaim(self) -> bool:
        """Waits for the oldest transfers, and gives their blocks back; False where none are under way."""
        with self._lock:
            return self._wait_for_oldest()

    def _wait_for_oldest(self) -> bool:
        if not self._under_way:
            return False
        arrays, blocks = self._under_way.popleft()
        jax.block_until_ready(arrays)
        self._landing.give_back(blocks)
        return True

    def _dispatch(self) -> None:
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not batch:
            return
        if len(self._under_way) > 1:
            self._wait_for_oldest()
        arrays = _made(batch, self._load)
        read = [block for _, blocks in batch for block in blocks.values()]
        self._under_way.append((list(arrays.values()), read))
        self.leaves |= arrays


def _made(batch: Sequence[_Leaf], load: Counter[Any]) -> dict[Key, Any]:
    """The leaves of a batch, on their devices. For small blocks that several accelerators want, the number of calls
    decides the cost, so one call sends such a block to all of them. With 8 devices this takes 30 microseconds a leaf,
    and 380 through one of them."""
    direct: _ByForm = {}
    relayed: list[_Leaf] = []
    for target, blocks in batch:
        is_large = max((block.nbytes for block in blocks.values()), default=0) >= SMALL_BYTES
        if is_large and is_transferred(target.form) and _is_shared(target.form):
            relayed.append((target, blocks))
        else:
            _add(direct, target, blocks)
    return {**dict(_placed(direct)), **(_relayed(relayed, load) if relayed else {})}


def _is_shared(form: Form) -> bool:
    """Whether several devices of this process want a box."""
    assert form.sharding is not None
    return len(form.boxes) < _local_devices(form.sharding)[0]


def _relayed(batch: Sequence[_Leaf], load: Counter[Any]) -> dict[Key, Any]:
    """Leaves on accelerators by two calls: each block to one of the devices that want it, the one with the least `load`
    in bytes so far, and from there to the others."""
    sent: list[tuple[np.ndarray, Any]] = []
    relayed: list[tuple[int, Any]] = []
    placed: list[list[tuple[Any, int, bool]]] = []  # of each leaf: device, index, and whether that is of `relayed`
    for target, blocks in batch:
        assert target.form.sharding is not None
        kind, shards = target.form.sharding.memory_kind, []
        for box, devices in local_devices_by_box(target.form.sharding, target.form.shape).items():
            first = min(devices, key=lambda device: load[device])
            load[first] += blocks[box].nbytes
            shards.append((first, len(sent), False))
            for device in devices:
                if device != first:
                    shards.append((device, len(relayed), True))
                    relayed.append((len(sent), SingleDeviceSharding(device, memory_kind=kind)))
            sent.append((blocks[box], SingleDeviceSharding(first, memory_kind=kind)))
        placed.append(shards)
    with jax.transfer_guard("allow"):
        firsts = jax.device_put([block for block, _ in sent], [sharding for _, sharding in sent])
        others = jax.device_put([firsts[index] for index, _ in relayed], [sharding for _, sharding in relayed])
    made = {}
    for (target, _), shards in zip(batch, placed, strict=True):
        by_device = {device: (others if is_relayed else firsts)[index] for device, index, is_relayed in shards}
        form = target.form
        assert form.sharding is not None
        ordered = [by_device[device] for device in form.sharding.addressable_devices_indices_map(form.shape)]
        array = jax.make_array_from_single_device_arrays(form.shape, form.sharding, ordered)
        made[target.key] = _wrapped(form, array)
    return made


def _add(by_form: _ByForm, target: Target, blocks: Mapping[Box, np.ndarray]) -> None:
    if (alike := by_form.get(target.form)) is None:
        by_form[target.form] = alike = ([], [])
    alike[0].append(target.key)
    alike[1].append(blocks)


def _placed(by_form: _ByForm) -> Iterable[tuple[Key, Any]]:
    """Leaves of which each device is given its block by the host."""
    with jax.transfer_guard_host_to_device("allow"):  # once for all: it takes 3 microseconds
        return chain.from_iterable(
            [zip(keys, _arrays(form, several), strict=True) for form, (keys, several) in by_form.items()]
        )


def _arrays(form: Form, several: Sequence[Mapping[Box, np.ndarray]]) -> list[Any]:
    """Leaves of one form."""
    sharding, shape = form.sharding, form.shape
    if sharding is None:
        own = form.kind in ("numpy", "jax")
        return [block if own else block.item() for blocks in several for block in blocks.values()]
    if not form.boxes:  # no device of this process holds a shard
        return [
            _wrapped(form, jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=np.dtype(form.dtype)))
            for _ in several
        ]
    if _is_shared(form) and not is_transferred(form):  # each device needs memory of its own
        several = list(_unaligned(several))
    if sharding.num_devices == 1 and math.prod(shape) * np.dtype(form.dtype).itemsize >= DEVICE_BUFFER_BYTES:
        made = [_taken_over(shape, sharding, blocks) for blocks in several]
    else:
        made = _alike(form, sharding, several)
    return [_wrapped(form, array) for array in made] if form.key_impl else made


def _taken_over(shape: tuple[int, ...], sharding: jax.sharding.Sharding, blocks: Mapping[Box, np.ndarray]) -> jax.Array:
    """The array whose memory the block is, if it is that of one."""
    (only,) = blocks.values()
    if isinstance(only, DeviceBuffer) and only.array is not None:
        return only.array
    return _by_callback(shape, sharding, blocks)


def _alike(form: Form, sharding: jax.sharding.Sharding, several: Sequence[Mapping[Box, np.ndarray]]) -> list[Any]:
    """Arrays of one form. JAX's public function makes the first one. The function of jaxlib that it ends in makes the
    others, if jaxlib has it: that saves 8 microseconds each."""
    first, *others = several
    array = _by_callback(form.shape, sharding, first)
    if (put := batched_device_put) is None or array.dtype != next(iter(first.values())).dtype:
        return [array, *[_by_callback(form.shape, sharding, blocks) for blocks in others]]
    aval, places = array.aval, array.sharding.addressable_devices_indices_map(form.shape)
    devices, boxes = list(places), [Box.of_index(index or (), form.shape) for index in places.values()]
    if len(boxes) == 1:
        return [array, *[put(aval, sharding, list(blocks.values()), devices) for blocks in others]]
    return [array, *[put(aval, sharding, [blocks[box] for box in boxes], devices) for blocks in others]]


def _by_callback(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, blocks: Mapping[Box, np.ndarray]
) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda index: blocks[Box.of_index(index or (), shape)])


def _unaligned(several: Sequence[Mapping[Box, np.ndarray]]) -> Iterator[Mapping[Box, np.ndarray]]:
    """Copies of the blocks that no CPU device takes as they are: XLA copies memory that is not aligned to 64 bytes. So
    each device gets memory of its own, which it may donate."""
    sizes = [-(-block.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for blocks in several for block in blocks.values()]
    memory = empty_block((sum(sizes) + ALIGNMENT_BYTES,), np.dtype(np.uint8))
    at, ends = ALIGNMENT_BYTES // 8, iter(sizes)
    for blocks in several:
        copies = {}
        for box, block in blocks.items():
            copies[box] = copy = np.ndarray(block.shape, block.dtype, memory, at)
            copy[...] = block
            at += next(ends)
        yield copies


def _wrapped(form: Form, array: jax.Array) -> jax.Array:
    """Keys with their type: JAX adds it without a program."""
    return jax.random.wrap_key_data(array, impl=form.key_impl) if form.key_impl else array

"""How a save keeps the state alive while the next step donates it: what the step loop pays now, and what is done later.

| strategy | on the step loop | later, in the writer thread | the next donating step |
|---|---|---|---|
| slot_copy | the copy into the slot | nothing | at once |
| block | the same, through a transfer from the device | nothing | at once |
| device_copy | dispatch of a copy on the device | transfer of the copy | at once |
| pinned_host | dispatch of a transfer to pinned host memory | the copy into the slot | after the transfer |

Host arrays are copied on the step loop by every strategy: their owner may change them. No strategy launches a program,
so none depends on the mesh in context and none compiles.

With `auto` an accelerator's state is staged in groups, in the order of the leaves. As many as have room on the device
(`ckptkit.snapshot.device_room`) are staged by `device_copy`, the rest, and arrays that are in host memory already, by
`block`. If the backend has no room after all (RESOURCE_EXHAUSTED), all of them are staged by `block`. `pinned_host` is
taken only where it is asked for: JAX has to make pinned memory for the whole state first, and no step runs meanwhile
(0.7 s for each GB, bench/LOG.md). `block` needs a window of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from ckptkit.model.policies import StagingChoice, Strategy
from ckptkit.slots.host_memory import HostMemory
from ckptkit.snapshot.copying import Copied, copy_shards, transfer_bytes
from ckptkit.snapshot.describe import Description, Digests
from ckptkit.snapshot.device_room import DeviceMemory, DeviceRoom
from ckptkit.snapshot.shards import PINNED, Held, Shard, has_pinned, held_arrays, unless_full
from ckptkit.util import clock

GROUP_BYTES = 256 << 20  # are staged alike
_Group = Sequence[Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A state that is being copied into a slot. `finish` copies the rest, once, releases the arrays, and returns the
    digests of every box by its number. `computing_s`: seconds until the arrays were computed, which are the step's own.
    """

    strategy: Strategy  # of most of the bytes
    reason: str
    finish: Callable[[], dict[int, Digests]]
    computing_s: float = 0.0


@final
class Stager:
    """Stages the saves of one process. `begin` is called by one thread, what it returns is finished by any.

    `host`: where copies in pinned memory and windows are counted. `device_bytes_max`: see
    `SaveOptions.device_copy_bytes_max`. `devices`: for tests.
    """

    def __init__(
        self,
        host: HostMemory | None = None,
        devices: DeviceMemory | None = None,
        *,
        device_bytes_max: int | None = None,
    ):
        self._host = host or HostMemory()
        self._devices = devices or DeviceMemory()
        self._room = DeviceRoom(self._devices, device_bytes_max)
        self._host_bytes = 0  # of copies that are not dropped yet, and of windows in use
        self._host.add_taker(lambda: self._host_bytes)
        self._counting = threading.RLock()

    def begin(
        self,
        choice: StagingChoice,
        description: Description,
        trees: Mapping[str, Any],
        memory: np.ndarray,
        copied: Copied | None = None,
        compared: Sequence[Held] = (),
    ) -> Staging:
        """Stages the state of one save by `choice`; returns once the caller may donate the state.

        `copied` is told, on any thread, which bytes of `memory` are final. `compared` are arrays of the
        same state that are only digested (`ckptkit.snapshot.replicas`), at the same moment as the others.
        """
        with jax.transfer_guard("allow"):  # a guard is for the caller's transfers
            copy = partial(self._copy, memory=memory, copied=copied or (lambda start, stop, digest: None))
            held = [*held_arrays(description, trees), *compared]
            digests = copy([shard for each in held if not each.devices for shard in each.shards()])
            device = [each for each in held if each.devices]
            if choice == "auto" and not any(each.is_transferred for each in device):
                strategy, reason = "slot_copy", "on the CPU backend one copy straight into the slot is the floor"
            elif choice in ("auto", "device_copy", "pinned_host"):
                return self._begin_groups(choice, device, self._rooms(choice, device, trees), copy, digests)
            else:
                strategy, reason = choice, "asked for"
            computing_s = _until_computed(device)
            digests |= copy(_shards(device))
        return Staging(strategy=strategy, reason=reason, finish=lambda: digests, computing_s=computing_s)

    def _begin_groups(
        self,
        choice: StagingChoice,
        device: Sequence[Held],
        rooms: tuple[dict[Any, int] | None, str],
        copy: Callable[[list[Shard]], dict[int, Digests]],
        digests: dict[int, Digests],
    ) -> Staging:
        """Dispatches copies of all groups that have room for them, then waits for the rest."""
        groups = _Groups(self._devices, *rooms)
        waited = groups.dispatch(choice, _grouped(device))
        self._room.take(groups.on_device)
        self._count(groups.pinned_bytes)
        copies = groups.copies

        def drop() -> None:
            copies.clear()
            self._room.give_back(groups.on_device)
            self._count(-groups.pinned_bytes)

        def finish() -> dict[int, Digests]:
            try:
                shards = [shard for held, array in copies for shard in held.shards(array)]
                copies.clear()  # each is dropped with its shards
                with jax.transfer_guard("allow"):
                    digests.update(copy(shards))
            finally:
                drop()  # held copies keep device memory in use
            return digests

        try:
            computing_s = _until_computed([held for group in waited for held in group])
            digests |= copy(_shards([held for group in waited for held in group]))
        except BaseException:
            drop()
            raise
        strategy, reason = groups.summary(choice, sum(map(_nbytes, (held for group in waited for held in group))))
        return Staging(strategy=strategy, reason=reason, finish=finish, computing_s=computing_s)

    def _copy(self, shards: list[Shard], memory: np.ndarray, copied: Copied) -> dict[int, Digests]:
        windows_bytes = transfer_bytes(extent for _, extent in shards)
        self._count(windows_bytes)
        try:
            return copy_shards(shards, memory, copied)
        finally:
            self._count(-windows_bytes)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._host_bytes += nbytes

    def _rooms(
        self, choice: StagingChoice, device: Sequence[Held], trees: Mapping[str, Any]
    ) -> tuple[dict[Any, int] | None, str]:
        """The bytes for copies on each device, None for no limit, and why."""
        if choice == "pinned_host":
            return None, "asked for"
        devices = list(dict.fromkeys(each for held in device for each in held.devices))
        if choice == "device_copy":
            return self._room.free_now(devices), "asked for"
        leaves = [leaf for leaf in jax.tree.leaves(dict(trees)) if isinstance(leaf, jax.Array)]
        return self._room.look(leaves, devices)


@final
class _Groups:
    """The dispatched part of one save, and the remaining room."""

    def __init__(self, devices: DeviceMemory, budget: Mapping[Any, int] | None, why: str):
        self.copies: list[tuple[Held, Any]] = []
        self.on_device = Counter[Any]()
        self.pinned_bytes = 0
        self._devices = devices
        self._budget, self._why = budget, why
        self._staged = Counter[Strategy]()

    def dispatch(self, choice: StagingChoice, groups: Sequence[_Group]) -> list[_Group]:
        """Begins copies of the groups' arrays; returns those for which nothing has room."""
        fits = self._is_pinned if choice == "pinned_host" else self._has_room
        taken = Counter[Any]()
        copied, waited = list[_Group](), list[_Group]()
        for group in groups:
            (copied if fits(group, taken) else waited).append(group)
        if not copied or not self._put(choice, [held for group in copied for held in group]):
            return [*groups]
        strategy: Strategy = "pinned_host" if choice == "pinned_host" else "device_copy"
        self._staged[strategy] += taken.total()
        if strategy == "pinned_host":
            self.pinned_bytes = taken.total()
        else:
            self.on_device = taken
        return waited

    def _has_room(self, group: _Group, taken: Counter[Any]) -> bool:
        """Whether copies of a group fit on its devices next to those that are `taken`, which then has them, too."""
        if group[0].kind is not None:
            return False
        wanted = _bytes_by_device(group)
        fits = self._budget is None or all(
            taken[device] + count <= self._budget[device] for device, count in wanted.items()
        )
        if fits:
            taken.update(wanted)
        return fits

    def _is_pinned(self, group: _Group, taken: Counter[Any]) -> bool:
        """Whether a group can be copied to pinned memory, or is in host memory already."""
        if done := group[0].kind is not None or has_pinned(group[0].devices[0]):
            taken.update(_bytes_by_device(group))
        return done

    def summary(self, choice: StagingChoice, waited_bytes: int) -> tuple[Strategy, str]:
        """The strategy of most of the bytes, and how much each has taken where there are several."""
        staged = Counter[Strategy](self._staged)
        if waited_bytes:
            staged["block"] += waited_bytes
        if not staged:
            return choice if choice != "auto" else "block", self._why
        (strategy, _), *more = staged.most_common()
        if not more:
            return strategy, self._why
        each = ", ".join(f"{name} {nbytes / 1e9:.3g} GB" for name, nbytes in staged.most_common())
        return strategy, f"{self._why}; {each}"

    def _put(self, choice: StagingChoice, several: Sequence[Held]) -> bool:
        """One call for all: 50 microseconds an array, and 200 more for each call (bench/LOG.md). False without room:
        nothing else is tried then: XLA may wait for seconds before it reports that."""
        kinds = [held.kind or PINNED if choice == "pinned_host" else None for held in several]
        shardings = [held.sharding(kind) for held, kind in zip(several, kinds, strict=True)]
        copied = unless_full(lambda: self._devices.put([held.array for held in several], shardings))
        if copied is None:
            return False
        # Not the arrays themselves: the caller's device memory would be kept in use.
        self.copies += [(_copied(held, kind), copy) for held, kind, copy in zip(several, kinds, copied, strict=True)]
        return True


def _bytes_by_device(group: _Group) -> Counter[Any]:
    """The bytes of a copy on each device."""
    taken = Counter[Any]()
    for held in group:
        for device, extent in zip(held.devices, held.extents, strict=True):
            taken[device] += extent.stop - extent.offset
    return taken


def _copied(held: Held, kind: str | None) -> Held:
    """The place of a copy in memory of `kind`: what is in host memory is not transferred again."""
    if kind is None:
        return replace(held, array=None)
    return replace(held, array=None, kind=kind, extents=tuple(replace(each, device=None) for each in held.extents))


def _until_computed(several: Sequence[Held]) -> float:
    """Waits, as the copy would, until the arrays are computed; returns for how many seconds."""
    begun_s = clock.monotonic_s()
    jax.block_until_ready([held.array for held in several])
    return clock.monotonic_s() - begun_s


def _grouped(device: Sequence[Held]) -> list[_Group]:
    """Groups of at most `GROUP_BYTES`, or of one array, each of arrays that are in the same kind of memory."""
    groups: list[_Group] = []
    open_groups: dict[str | None, tuple[list[Held], int]] = {}
    for held in device:
        kind, nbytes = held.kind, _nbytes(held)
        group, size = open_groups.get(kind, (list[Held](), 0))
        if not group or size + nbytes > GROUP_BYTES:
            group, size = list[Held](), 0
            groups.append(group)
        group.append(held)
        open_groups[kind] = group, size + nbytes
    return groups


def _shards(several: Sequence[Held]) -> list[Shard]:
    """Their boxes, for a copy that is over before the caller may donate them."""
    return [shard for held in several for shard in held.shards(in_place=True)]


def _nbytes(held: Held) -> int:
    return sum(extent.stop - extent.offset for extent in held.extents)

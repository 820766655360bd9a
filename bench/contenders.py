"""Who is compared: ckptkit, stock Orbax in four ways, and torch.distributed.checkpoint where torch is installed."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint.experimental import v1 as ocp_v1

import ckptkit
from bench.measure import allocated_bytes, now_s

_WAIT_S = 600.0
_ITEM = "state"  # of the manager that is given a handler


class Contender(Protocol):
    """One way to save and to restore. One save at a time; steps grow."""

    @property
    def name(self) -> str:
        """As the JSON calls it."""
        ...

    def save(self, step: int, state: Any) -> None:
        """Returns once the caller may donate `state`."""
        ...

    def committed_s(self) -> float:
        """Waits for the last save to be committed, and returns when it was (`bench.measure.now_s`)."""
        ...

    def settled(self) -> None:
        """Waits until nothing of the last save runs any more."""
        ...

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a committed step, ready on its devices."""
        ...

    def forget(self, step: int) -> None:
        """Deletes a step, so that the ramdisk does not fill; never timed."""
        ...

    def close(self) -> None:
        """Ends everything and deletes what is left."""
        ...


def make_durable_contenders(
    names: tuple[str, ...], root: str, ramdisk: Path, environ: Mapping[str, str]
) -> list[Contender]:
    """Those of `names` that have a durable tier, each below `root`, a directory or a `gs://` prefix.

    `environ` is where the clients of a bucket find it.
    """
    os.environ.update(environ)  # this process measures one case and then ends
    makers: Mapping[str, Any] = {
        "ckptkit": lambda at: CkptKitDurable("ckptkit", at, ramdisk / "ckptkit"),
        "orbax_async": lambda at: OrbaxManager("orbax_async", at, background=True, compressed=True),
        "orbax_tuned": lambda at: OrbaxManager("orbax_tuned", at, background=True, compressed=False),
    }
    return [makers[name](f"{root}/{name}") for name in names if name in makers]


def make_contenders(names: tuple[str, ...], ramdisk: Path) -> list[Contender]:
    """Those of `names` that save (`limit` does not), each with a directory of its own below `ramdisk`."""
    makers: Mapping[str, Any] = {
        "ckptkit": lambda root: CkptKit(root),
        "orbax_async": lambda root: OrbaxManager("orbax_async", root, background=True, compressed=True),
        "orbax_tuned": lambda root: OrbaxManager("orbax_tuned", root, background=True, compressed=False),
        "orbax_v1": OrbaxV1,
        "orbax_sync": lambda root: OrbaxManager("orbax_sync", root, background=False, compressed=True),
        "torch_dcp": TorchDcp,
    }
    return [makers[name](ramdisk / name) for name in names if name in makers]


@final
class CkptKit:
    """A ramdisk tier that takes every step, and a durable one that is never due; with `disk`, an SSD tier as well."""

    def __init__(self, root: Path, *, disk: Path | None = None):
        self.name = "ckptkit"
        self._tier = "ssd" if disk is not None else "ram"
        self._roots = [root] if disk is None else [root, disk]
        self._changed = threading.Condition()
        self._committed: dict[int, float] = {}
        self._failed: list[str] = []
        self._step = -1
        self.strategy = ""  # by which the last save was staged
        events = ckptkit.EventLog()
        events.observe(self._hear)
        tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(1))]
        if disk is not None:
            tiers.append(ckptkit.Tier.ssd(str(disk), save=ckptkit.EverySteps(1)))
        # No step is durable, not even the first, which the default policy would take.
        options = ocp.CheckpointManagerOptions(save_decision_policy=policies.SpecificStepsPolicy(()))
        self._manager = ckptkit.CheckpointManager(root / "durable", options=options, tiers=tiers, events=events)

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        self._step = step
        if not self._manager.save(step, args=ocp.args.StandardSave(state)):  # pyright: ignore[reportCallIssue]
            raise RuntimeError(f"ckptkit did not take step {step}")

    def committed_s(self) -> float:
        """The COMMITTED event of the tier that is measured."""
        with self._changed:
            told = self._changed.wait_for(lambda: self._failed or self._step in self._committed, _WAIT_S)
            if not told or self._failed:
                raise RuntimeError(f"ckptkit did not commit step {self._step}: {self._failed or 'no event'}")
            return self._committed.pop(self._step)

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`; every digest is verified."""
        return jax.block_until_ready(self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))  # pyright: ignore[reportCallIssue]

    def forget(self, step: int) -> None:
        """Slots are reused: nothing to delete."""

    def close(self) -> None:
        """See `Contender.close`."""
        self._manager.close(remove_arenas=True)
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)

    @property
    def arena_bytes(self) -> int:
        """What the slots of the ramdisk take, reported apart from anonymous memory."""
        return allocated_bytes(self._roots[0] / "ram")

    def stage_by(self, staging: str) -> None:
        """How later saves are staged. A manager per strategy would take an arena each, three times the state.

        That it is obeyed is seen in the events: `StagedBy` compares.
        """
        self._manager._pipeline._choice = staging  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    def _hear(self, event: ckptkit.Event) -> None:
        heard_s = now_s()
        with self._changed:
            if event.kind == ckptkit.Kind.COMMITTED and event.tier == self._tier and event.step is not None:
                self._committed[event.step] = heard_s
            elif event.kind in (ckptkit.Kind.FAILED, ckptkit.Kind.SKIPPED, ckptkit.Kind.DEGRADED):
                self._failed.append(event.to_json())
            elif event.kind == ckptkit.Kind.STAGED:
                self.strategy = event.fields["strategy"]
            self._changed.notify_all()


@final
class CkptKitDurable:
    """Every step goes to a ramdisk tier and from there to the durable one, which is what is measured and restored."""

    def __init__(self, name: str, root: str, ramdisk: Path):
        self.name = name
        self._ramdisk = ramdisk
        self._root = root
        self._committed_s: dict[int, float] = {}
        events = ckptkit.EventLog()
        events.observe(self._hear)
        self._manager = ckptkit.CheckpointManager(root, tiers=[ckptkit.Tier.ram(str(ramdisk))], events=events)
        # Without fast tiers: it can read the durable one alone.
        self._reader = ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True))

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        if not self._manager.save(step, args=ocp.args.StandardSave(state), force=True):  # pyright: ignore[reportCallIssue]
            raise RuntimeError(f"{self.name} did not take step {step}")
        self._step = step

    def committed_s(self) -> float:
        """The COMMITTED event of the durable tier; raises where the save failed."""
        self._manager.wait_until_finished()
        return self._committed_s.pop(self._step)

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`; every digest is verified."""
        return jax.block_until_ready(self._reader.restore(step, args=ocp.args.StandardRestore(abstract)))  # pyright: ignore[reportCallIssue]

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        self._manager.delete(step)

    def close(self) -> None:
        """See `Contender.close`."""
        self._reader.close()
        self._manager.close(remove_arenas=True)
        shutil.rmtree(self._ramdisk, ignore_errors=True)
        _remove(self._root)

    def _hear(self, event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.COMMITTED and event.tier == "durable" and event.step is not None:
            self._committed_s[event.step] = now_s()


@final
class StagedBy:
    """ckptkit with a forced staging strategy, over the manager of another contender."""

    def __init__(self, inner: CkptKit, staging: str):
        self.name = f"{inner.name}_{staging}"
        self._inner = inner
        self._staging = staging

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        self._inner.stage_by(self._staging)
        try:
            self._inner.save(step, state)
        finally:
            self._inner.stage_by("auto")

    def committed_s(self) -> float:
        """See `CkptKit.committed_s`. Raises RuntimeError where another strategy was taken than was asked for."""
        committed_s = self._inner.committed_s()
        if self._inner.strategy != self._staging:
            raise RuntimeError(f"{self.name} was staged by {self._inner.strategy}")
        return committed_s

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._inner.settled()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        return self._inner.restore(step, abstract)

    def forget(self, step: int) -> None:
        """Slots are reused: nothing to delete."""

    def close(self) -> None:
        """The manager belongs to the other contender."""


@final
class OrbaxManager:
    """Stock `CheckpointManager`: its defaults, or without compression, or synchronous."""

    def __init__(self, name: str, root: Path | str, *, background: bool, compressed: bool):
        self.name = name
        self._root = root
        self._compressed = compressed
        self._committed_s = 0.0
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=background)
        handlers = {} if compressed else {_ITEM: ocp.PyTreeCheckpointHandler(use_compression=False)}
        self._manager = ocp.CheckpointManager(root, options=options, item_handlers=handlers or None)

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        if self._compressed:
            args: Any = ocp.args.StandardSave(state)  # pyright: ignore[reportCallIssue]
        else:
            args = ocp.args.Composite(**{_ITEM: ocp.args.PyTreeSave(state)})  # pyright: ignore[reportCallIssue]
        if not self._manager.save(step, args=args):
            raise RuntimeError(f"{self.name} did not take step {step}")

    def committed_s(self) -> float:
        """When `wait_until_finished` returned."""
        self._manager.wait_until_finished()
        return now_s()

    def settled(self) -> None:
        """Nothing runs after `wait_until_finished`."""

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        if self._compressed:
            return jax.block_until_ready(self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))  # pyright: ignore[reportCallIssue]
        leaf_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        wanted = ocp.args.PyTreeRestore(abstract, restore_args=leaf_args)  # pyright: ignore[reportCallIssue]
        restored = self._manager.restore(step, args=ocp.args.Composite(**{_ITEM: wanted}))
        return jax.block_until_ready(restored[_ITEM])

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        self._manager.delete(step)

    def close(self) -> None:
        """See `Contender.close`."""
        self._manager.close()
        _remove(self._root)


@final
class OrbaxV1:
    """Orbax's newer functions with their defaults: `save_async` and `load`, without a manager around them."""

    def __init__(self, root: Path):
        self.name = "orbax_v1"
        self._root = root
        self._root.mkdir(parents=True)
        self._response: Any = None

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        self._response = ocp_v1.save_async(self._path(step), state)

    def committed_s(self) -> float:
        """When the response was there."""
        self._response.result()
        return now_s()

    def settled(self) -> None:
        """Nothing runs after the response."""

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        return jax.block_until_ready(ocp_v1.load(self._path(step), abstract))

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        shutil.rmtree(self._root / str(step))

    def close(self) -> None:
        """See `Contender.close`."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _path(self, step: int) -> epath.Path:
        return epath.Path(self._root / str(step))


@final
class TorchDcp:
    """`torch.distributed.checkpoint.async_save` of CPU tensors that share the boxes' memory; needs torch.

    Restored into tensors, then placed on devices like everybody's.
    """

    def __init__(self, root: Path):
        self.name = "torch_dcp"
        self._torch: Any = importlib.import_module("torch")
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        self._root = root
        self._root.mkdir(parents=True)
        self._future: Any = None

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`: `async_save` copies the tensors before it returns."""
        boxes = {
            f"{name}{start}": shard.data
            for name, leaf in _named(state)
            for start, shard in {_start(shard.index): shard for shard in leaf.addressable_shards}.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's views are read-only, and torch says so for each
            tensors = {key: self._torch.from_numpy(np.asarray(data)) for key, data in boxes.items()}
            self._future = self._dcp.async_save(tensors, checkpoint_id=str(self._root / str(step)), no_dist=True)

    def committed_s(self) -> float:
        """When the future was there."""
        self._future.result()
        return now_s()

    def settled(self) -> None:
        """Nothing runs after the future."""

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        tensors: dict[str, Any] = {}
        for name, leaf in _named(abstract):
            shape = leaf.sharding.shard_shape(leaf.shape)
            for index in leaf.sharding.devices_indices_map(leaf.shape).values():
                like = np.empty(shape, leaf.dtype)
                tensors.setdefault(f"{name}{_start(index)}", self._torch.from_numpy(like))
        self._dcp.load(tensors, checkpoint_id=str(self._root / str(step)), no_dist=True)

        def place(name: str, leaf: Any) -> jax.Array:
            shards = [
                jax.device_put(tensors[f"{name}{_start(index)}"].numpy(), device)
                for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

        arrays = [place(name, leaf) for name, leaf in _named(abstract)]
        return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(abstract), arrays))

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        shutil.rmtree(self._root / str(step))

    def close(self) -> None:
        """See `Contender.close`."""
        shutil.rmtree(self._root, ignore_errors=True)


def _remove(root: Path | str) -> None:
    """Deletes a directory; a bucket goes with the process that serves it."""
    if "://" not in str(root):
        shutil.rmtree(root, ignore_errors=True)


def _named(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(keypath), leaf) for keypath, leaf in flat]


def _start(index: tuple[slice, ...]) -> str:
    """Where a box begins, as a suffix that names it within its leaf."""
    return "@" + ",".join(str(part.start or 0) for part in index)

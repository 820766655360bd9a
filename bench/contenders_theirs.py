"""The others as a `bench.contenders.Contender`: stock Orbax in four ways, torch.distributed.checkpoint, and
`torch_checkpointing`."""

from __future__ import annotations

import importlib
import shutil
import warnings
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp_v1

from bench.measure import now_s, remove_root

_ITEM = "state"  # of the manager that is given a handler
_START_S = 300  # for a process that imports JAX and torch; 30 by default


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
        remove_root(self._root)


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


class _OfFuture:
    """The common part of torch's: a save is a directory of its step, and over when its future is there."""

    def __init__(self, root: Path):
        self._torch: Any = importlib.import_module("torch")
        self._root = root
        self._root.mkdir(parents=True)
        self._future: Any = None

    def committed_s(self) -> float:
        """When the future was there."""
        self._future.result()
        return now_s()

    def settled(self) -> None:
        """Nothing runs after the future."""

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        shutil.rmtree(self._root / str(step))


@final
class TorchDcp(_OfFuture):
    """`torch.distributed.checkpoint.async_save` of CPU tensors that share the boxes' memory; needs torch.

    It stages into shared memory that is kept from save to save, as a loop with tensors of its own does. This is three
    times as fast as the default. It is also faster than `DefaultStager`, which keeps nothing for new tensors. One
    thread writes: two take longer here. Restored into tensors, then placed on devices like everybody's.
    """

    def __init__(self, root: Path):
        self.name = "torch_dcp"
        super().__init__(root)
        self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        self._stager = staging.BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`: `async_save` copies the tensors before it returns."""
        tensors = _tensors(self._torch, state)
        if self._stager.state_dict_cache is None:  # its own would be pinned memory, which needs CUDA
            shared = {key: self._torch.empty_like(each).share_memory_() for key, each in tensors.items()}
            self._stager.state_dict_cache = shared
        self._future = self._dcp.async_save(
            tensors, checkpoint_id=str(self._root / str(step)), async_stager=self._stager, no_dist=True
        )

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        tensors = _empty_tensors(self._torch, abstract)
        self._dcp.load(tensors, checkpoint_id=str(self._root / str(step)), no_dist=True)
        return _placed(tensors, abstract)

    def close(self) -> None:
        """See `Contender.close`."""
        shutil.rmtree(self._root, ignore_errors=True)


@final
class TorchCheckpointing(_OfFuture):
    """`CheckpointManager` of `torch_checkpointing` with its defaults, except for the time to start; needs the package.

    A thread stages into shared memory, and a process of its own writes. The tensors keep the boxes' memory while they
    are staged, so the next step that donates them allocates afresh.
    """

    def __init__(self, root: Path):
        self.name = "torch_checkpointing"
        super().__init__(root)
        package: Any = importlib.import_module("torch_checkpointing")
        process: Any = importlib.import_module("torch_checkpointing.checkpoint_process")
        started = process.CheckpointProcessConfig(subprocess_init_timeout_secs=_START_S)
        saver: Any = importlib.import_module("torch_checkpointing.config").AsyncCheckpointSaverConfig
        self._manager = package.CheckpointManager(package.CheckpointManager.Config(save=saver(process_config=started)))

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`. All tensors are one item: an item is a file."""
        self._future = self._manager.save(str(self._root / str(step)), {_ITEM: _tensors(self._torch, state)})

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        tensors = _empty_tensors(self._torch, abstract)
        loaded = self._manager.load(str(self._root / str(step)), {_ITEM: tensors})
        return _placed(loaded[_ITEM], abstract)

    def close(self) -> None:
        """See `Contender.close`."""
        self._manager.close()
        shutil.rmtree(self._root, ignore_errors=True)


def _tensors(torch: Any, state: Any) -> dict[str, Any]:
    """Each box once, as a tensor that shares its memory."""
    boxes = {
        f"{name}{start}": shard.data
        for name, leaf in _named(state)
        for start, shard in {_start(shard.index): shard for shard in leaf.addressable_shards}.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's views are read-only, and torch warns for each
        return {key: torch.from_numpy(np.asarray(data)) for key, data in boxes.items()}


def _empty_tensors(torch: Any, abstract: Any) -> dict[str, Any]:
    """The tensors that `_tensors` makes of such a state, without values."""
    tensors: dict[str, Any] = {}
    for name, leaf in _named(abstract):
        shape = leaf.sharding.shard_shape(leaf.shape)
        for index in leaf.sharding.devices_indices_map(leaf.shape).values():
            tensors.setdefault(f"{name}{_start(index)}", torch.from_numpy(np.empty(shape, leaf.dtype)))
    return tensors


def _placed(tensors: dict[str, Any], abstract: Any) -> Any:
    """The state whose boxes these tensors are, ready on its devices."""

    def place(name: str, leaf: Any) -> jax.Array:
        shards = [
            jax.device_put(tensors[f"{name}{_start(index)}"].numpy(), device)
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    arrays = [place(name, leaf) for name, leaf in _named(abstract)]
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(abstract), arrays))


def _named(tree: Any) -> list[tuple[str, Any]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(keypath), leaf) for keypath, leaf in flat]


def _start(index: tuple[slice, ...]) -> str:
    """Where a box begins, as a suffix that names it within its leaf."""
    return "@" + ",".join(str(part.start or 0) for part in index)

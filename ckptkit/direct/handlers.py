"""Orbax's handlers of trees with digests: `PyTreeCheckpointHandler` and `StandardCheckpointHandler`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint import future as orbax_future
from orbax.checkpoint._src import asyncio_utils

from ckptkit.direct.loading import Loader
from ckptkit.direct.staging import LONE, StagingMemory, staged
from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.cells.sharing import Sharing
from ckptkit.durable.cells.writer import merge_processes
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.orbax.manager import StockManager
from ckptkit.durable.write_part import PartWriter
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

_log = logging.getLogger("ckptkit")


class _Proving:
    """Saves with digests and loads against them, with the settings of a stock handler; the rest is Orbax's."""

    def __init__(self, like: Any):
        vars(self).update(vars(like))
        self.stock = like
        self.typestr = type(like).typestr  # in the metadata: stock Orbax finds its own handler
        self._loader = Loader()
        self._memory = StagingMemory()

    async def async_save(self, directory: Any, *legacy: Any, args: Any = None, **named: Any) -> Any:
        """As Orbax's. Returns once the caller may donate the arrays."""
        stock: Any = super()
        if args is None:
            return await stock.async_save(directory, *legacy, **named)
        tree = staged(args, directory.name.partition(paths.TEMPORARY)[0], self._memory)
        if tree is None:
            _log.info("%s: Orbax alone can hold this tree, so it is saved without digests", directory)
            return await stock.async_save(directory, args=args)
        write = asyncio.to_thread(_write_part, root_url(_url(directory)), tree)
        return [orbax_future.CommitFutureAwaitingContractedSignals(write, name="ckptkit_tree")]

    def save(self, directory: Any, *legacy: Any, **named: Any) -> None:
        """As Orbax's: returns once the bytes are written."""

        async def save() -> None:
            for future in await self.async_save(directory, *legacy, **named) or []:
                future.result()

        asyncio_utils.run_sync(save())

    def finalize(self, directory: Any) -> None:
        """As Orbax's, on one process, before the directory is committed."""
        stock: Any = super()
        url, count = root_url(_url(directory)), jax.process_count()
        if open_store(url).stat(f"{paths.SIDECAR_DIR}/{paths.sidecar_name(0)}") is None:
            stock.finalize(directory)
        elif count > 1:
            merge_processes(url, count, _profile(count))

    def close(self) -> None:
        """As Orbax's; frees the host memory that is kept for saves."""
        stock: Any = super()
        stock.close()
        self._memory.close()

    def restore(self, directory: Any, *legacy: Any, args: Any = None, **named: Any) -> Any:
        """As Orbax's, each cell compared with its digest first. A directory without digests loads as in stock Orbax.

        Raises `CorruptCheckpointError` for damage, and `TreeMismatchError` for another tree.
        """
        stock: Any = super()
        if args is None:
            return stock.restore(directory, *legacy, **named)
        tree = self._loader.load(root_url(_url(directory)), args)
        return stock.restore(directory, args=args) if tree is None else tree


class ProvingTreeHandler(_Proving, ocp.PyTreeCheckpointHandler):
    """`PyTreeCheckpointHandler` with digests."""


class ProvingStandardHandler(_Proving, ocp.StandardCheckpointHandler):
    """`StandardCheckpointHandler` with digests."""


@checkpoint_args.register_with_handler(ProvingTreeHandler, for_save=True)
class _TreeSave(ocp.args.PyTreeSave):
    """The arguments of `save(path, tree)` become one of these."""


@checkpoint_args.register_with_handler(ProvingTreeHandler, for_restore=True)
class _TreeRestore(ocp.args.PyTreeRestore):
    """The arguments of `restore(path)` become one of these."""


@checkpoint_args.register_with_handler(ProvingStandardHandler, for_save=True)
class _StandardSave(ocp.args.StandardSave):
    """The arguments of `save(path, tree)` become one of these."""


@checkpoint_args.register_with_handler(ProvingStandardHandler, for_restore=True)
class _StandardRestore(ocp.args.StandardRestore):
    """The arguments of `restore(path)` become one of these."""


_PROVING: dict[type, type[_Proving]] = {
    ocp.PyTreeCheckpointHandler: ProvingTreeHandler,
    ocp.StandardCheckpointHandler: ProvingStandardHandler,
}


def proving(handler: Any, multiprocessing: Any = None) -> Any:
    """A handler with the settings of `handler` that keeps digests.

    Returns `handler` itself for any other kind than Orbax's two handlers of trees, and for one with a layout of its
    own: `use_zarr3`, `use_ocdbt=False`, type handlers. Also for one that not all processes of the job use together, as
    `multiprocessing` and the handler tell: a sidecar of each process proves a tree."""
    kind = _PROVING.get(type(handler))
    if kind is not None and StockManager.is_plain(handler) and _by_whole_job(handler, multiprocessing):
        return kind(handler)
    if not isinstance(handler, _Proving):
        _log.info("%s keeps no digests: what it saves and loads is not verified", type(handler).__name__)
    return handler


def _by_whole_job(handler: Any, multiprocessing: Any) -> bool:
    count = jax.process_count()
    tree = handler._impl if isinstance(handler, ocp.StandardCheckpointHandler) else handler
    active = getattr(multiprocessing, "active_processes", None)
    return count == 1 or (tree._primary_host is not None and (active is None or len(active) == count))


def _profile(count: int) -> DurableProfile:
    return DurableProfile(shared_steps_max=1).for_one_of(count)


def _write_part(url: str, tree: HostTreeSave) -> None:
    """Writes this process's part of a tree into its directory, which exists by now."""
    process, count, profile = jax.process_index(), jax.process_count(), _profile(jax.process_count())
    sharing = Sharing(url, process, count)
    sharing.begin(LONE, lambda: None)
    PartWriter(process, count, sharing, Pace(profile.write_bytes_per_s)).write(url, {"": tree}, profile)


def _url(directory: Any) -> str:
    """The path as it was given: `epath` turns `gs://bucket` into `gs:/bucket` on the way."""
    text = str(directory)
    return text if "://" in text else text.replace(":/", "://", 1) if text.startswith(("gs:/", "s3:/")) else text

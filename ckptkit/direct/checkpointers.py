"""`save`, `load`, and Orbax's checkpointers with digests: the classes that save one tree to one path."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.direct.handlers import proving
from ckptkit.direct.loading import not_a_tree
from ckptkit.durable.cells.tensorstore_wait import require_usable
from ckptkit.errors import store_errors
from ckptkit.job.coordination import refuse_unjoined
from ckptkit.model import paths
from ckptkit.store.backends import properties_of
from ckptkit.store.local import make_durable, sync_directory, sync_tree
from ckptkit.store.roots import root_url
from ckptkit.util import unproven


class _Direct:
    """The common part of the checkpointers whose handlers keep digests."""

    _handler: Any
    _temporary_path_class: Any
    _atomicity_options: Any
    _metadata_store: Any
    _file_options: Any

    @property
    def handler(self) -> Any:
        """Orbax's handler: a manager that is given the checkpointer takes it, and keeps the digests of its steps."""
        return getattr(self._handler, "stock", self._handler)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """As Orbax's. Raises `NotJoinedError` in a worker of `ckptkit run` that has not joined its job, and
        `ProgramChangedError` after a compiled program that was refuted."""
        refuse_unjoined()
        unproven.wait()
        stock: Any = super()
        return stock.save(*args, **kwargs)

    def get_temporary_path(self, directory: Any) -> Any:
        """As Orbax's, with a commit that a power failure on a disk does not undo. On a mount that does not rename a
        directory in one step, a mark that is written last commits, as in a bucket. A choice of the caller stays."""
        stock: Any = super()
        require_usable(root_url(directory))
        properties = properties_of(root_url(directory))
        chosen = self._temporary_path_class is not None or self._atomicity_options is not None
        if properties.file_system and not properties.atomic_rename and not chosen:
            mark = ocp.path.atomicity.CommitFileTemporaryPath
            path: Any = mark.from_final(
                directory, checkpoint_metadata_store=self._metadata_store, file_options=self._file_options
            )
        else:
            path = stock.get_temporary_path(directory)
        return _Synced(path) if properties.file_system else path


class _Synced:
    """A temporary path of Orbax, which syncs only data files: neither metadata, nor sidecars, nor any name."""

    def __init__(self, path: Any):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    async def create(self) -> Any:
        """As Orbax's. The directories above are durable."""
        await asyncio.to_thread(make_durable, self._path.get_final().parent)
        return await self._path.create()

    async def finalize(self) -> None:
        """As Orbax's: the rename that commits. All files are durable before it, and the new name after it."""
        await asyncio.to_thread(sync_tree, self._path.get())
        await self._path.finalize()
        await asyncio.to_thread(_sync_last, os.fspath(self._path.get_final()))


def _sync_last(directory: str) -> None:
    for name in (paths.STEP_METADATA, paths.COMMIT_MARK):  # Orbax writes them right before the rename
        sync_tree(f"{directory}/{name}")
    sync_directory(directory)
    sync_directory(os.path.dirname(directory))


class Checkpointer(_Direct, ocp.Checkpointer):
    """A drop-in for `ocp.Checkpointer`: a tree is saved with digests, and a load compares every cell with its digest.

    The directory is a plain one of Orbax, which stock Orbax restores. A handler that is not `PyTreeCheckpointHandler`
    or `StandardCheckpointHandler` works as in Orbax, without digests, and a log line reports that. The arguments are
    Orbax's. Cost in addition to Orbax's: a copy of this process's part of the tree in host memory, kept for the next
    save until `close`.

    `restore` raises `CorruptCheckpointError` for damage on every process, `TreeMismatchError` with all differences,
    `StoreError` for what cannot be reached. A directory without digests loads as in stock Orbax, with a log line.
    """

    def __init__(self, handler: Any, **options: Any):
        super().__init__(proving(handler, options.get("multiprocessing_options")), **options)


class AsyncCheckpointer(_Direct, ocp.AsyncCheckpointer):
    """A drop-in for `ocp.AsyncCheckpointer`, with digests as in `Checkpointer`.

    `save` returns after one copy of this process's part to host memory: the caller may donate the tree.
    """

    def __init__(self, handler: Any, *timeout: Any, **options: Any):
        super().__init__(proving(handler, options.get("multiprocessing_options")), *timeout, **options)


class StandardCheckpointer(_Direct, ocp.StandardCheckpointer):
    """A drop-in for `ocp.StandardCheckpointer`, with digests as in `AsyncCheckpointer`."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._handler = proving(self._handler, options.get("multiprocessing_options"))


class PyTreeCheckpointer(_Direct, ocp.PyTreeCheckpointer):
    """A drop-in for `ocp.PyTreeCheckpointer`, with digests as in `Checkpointer`."""

    def __init__(self, *settings: Any, **options: Any):
        super().__init__(*settings, **options)
        self._handler = proving(self._handler)


# Each of Orbax's is a `Checkpointer`, and that for `StandardSave` is asynchronous: a caller asks `isinstance`.
for _one in (AsyncCheckpointer, StandardCheckpointer, PyTreeCheckpointer):
    Checkpointer.register(_one)
AsyncCheckpointer.register(StandardCheckpointer)


def save(
    path: str | os.PathLike[str], tree: Any, *, force: bool = False, custom_metadata: dict[str, Any] | None = None
) -> None:
    """Saves a tree of arrays, numbers and text to a new directory.

    When it returns, the tree is committed there on every process, and a power failure does not undo it. The directory
    is a plain one of Orbax with a digest of every cell; stock Orbax restores it. All processes of the job call it
    together, with a path that all of them reach (a shared directory, `gs://`). A tree with leaves of another kind is
    saved without digests. Cost: one copy of this process's part in host memory, and one write.

    `force` replaces what is at `path`. Raises ValueError where something is there already, or for a tree that cannot
    be saved, `StoreFullError` for a full disk, `StoreError` where it cannot be written.
    """
    with store_errors(path), Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args: Any = ocp.args
        checkpointer.save(root_url(path), args=args.PyTreeSave(tree), force=force, custom_metadata=custom_metadata)


def load(path: str | os.PathLike[str], abstract: Any = None) -> Any:
    """The tree at `path`, every cell compared with its digest before it is on a device.

    `abstract` has the leaves that are wanted (arrays, `jax.ShapeDtypeStruct` with shardings, numbers), None the tree as
    it was saved, with nested dicts and lists for its nodes. `path` may also be an item of a manager's step. A
    directory that was saved without digests loads as in stock Orbax; a log line reports that it is not verified.
    All processes of the job call it together.

    Raises `CorruptCheckpointError` for damage, `TreeMismatchError` with all differences, FileNotFoundError where
    nothing is there, or a manager's step or root (its message has the items), `StoreError` for what cannot be reached.
    """
    with store_errors(path), Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        args: Any = ocp.args
        try:
            return checkpointer.restore(root_url(path), args=args.StandardRestore(abstract))
        except FileNotFoundError as error:
            if (instead := not_a_tree(root_url(path))) is not None:
                raise FileNotFoundError(instead) from error
            raise

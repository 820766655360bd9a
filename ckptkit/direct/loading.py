"""Reads a tree from a directory of its own, every cell compared with its digest before it is on a device."""

from __future__ import annotations

import itertools
import logging
from typing import Any, final

from ckptkit.durable.lifecycle.classify import content_of, is_committed, kind_of_item
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError
from ckptkit.events import EventLog
from ckptkit.job.coordination import ScopedCoordinator, make_coordinator
from ckptkit.job.vote import RejectedError, voted
from ckptkit.model import paths
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.execute import LocalRead
from ckptkit.restore.local_tiers import Holdings
from ckptkit.restore.plan import Source
from ckptkit.restore.prepare import Prepared, Preparer
from ckptkit.restore.request import RestoreRequest
from ckptkit.store import open_store
from ckptkit.util.words import command_line

_log = logging.getLogger("ckptkit")


def not_a_tree(url: str) -> str | None:
    """The message of the error if `url` is a manager's step or root: which path to load instead. None if it is neither.

    Cost: a listing, and one or two of each directory in it.
    """
    store = open_store(url)
    names = store.list("")
    match content_of(names, store.list):
        case "step":
            items = [name.rstrip("/") for name in names if name.endswith("/")]
            arrays = [name for name in items if kind_of_item(store.list(name)) == "arrays"]
            what = ", ".join(f"{url}/{name}" for name in arrays) or "none has arrays"
            return f"{url} is a step of a manager, and not a tree: give the directory of one of its items ({what})"
        case "root":
            return (
                f"{url} has the steps of a manager, and is not a tree: give the directory of an item, {url}/STEP/ITEM "
                f"(`{command_line('steps', url)}` lists the steps), or restore it with ckptkit.CheckpointManager"
            )
        case _:
            return None


def _refuse_unfinished(url: str) -> None:
    """Raises `CorruptCheckpointError` for a directory that a save to a mounted bucket left without its mark: it has a
    part of the tree, and may have no digests yet."""
    store = open_store(url)
    if store.properties.atomic_rename or not store.properties.file_system:
        return
    names = [name for name in (paths.STEP_METADATA, paths.COMMIT_MARK) if store.stat(name) is not None]
    if names and not is_committed(url.rpartition("/")[2], names, store.properties, store.get):
        raise CorruptCheckpointError(f"{url} was not committed: its save was interrupted; save it again", path=url)


@final
class Loader:
    """Loads trees. All processes of the job call `load` together."""

    def __init__(self) -> None:
        self._coordinator: ScopedCoordinator | None = None
        self._calls = itertools.count()

    def load(self, url: str, args: Any) -> Any:
        """The tree at `url` as `args` (Orbax's) ask for it, every cell compared with its digest.

        None where only Orbax can return it: the tree was saved without digests, which a log line reports, or it is
        verified, and asked for in another form.

        Raises `CorruptCheckpointError` on every process where one finds damage, `TreeMismatchError` with all
        differences, `StoreError` for what cannot be reached.
        """
        coordinator = self._joined()
        coordinator.begin(f"direct.{next(self._calls)}")
        parent, _, item = url.rpartition("/")
        reading = LocalRead(None, EventLog())
        prepared, verified = None, None
        try:
            with voted(coordinator, "plan"):
                prepared = _planned(parent, item, Preparer(url, coordinator), args)
            with voted(coordinator, "read"):
                verified = None if prepared is None else reading.read(prepared)
        except RejectedError as rejected:
            raise CorruptCheckpointError(
                f"{url} cannot be loaded: {rejected}. Restore it from a copy, or load another checkpoint", path=url
            ) from None
        if prepared is None or verified is None:
            _log.info("%s was saved without digests: it is loaded by Orbax, and its bytes are not verified", url)
            return None
        return None if prepared.asked.orbax else reading.assemble(verified, prepared.plan.save_id)[item]

    def _joined(self) -> ScopedCoordinator:
        """Made at the first load, which all processes call together: a checkpointer may be made on some of them."""
        if self._coordinator is None:
            self._coordinator = ScopedCoordinator(make_coordinator())
        return self._coordinator


def _planned(parent: str, item: str, preparer: Preparer, args: Any) -> Prepared | None:
    """How to load one tree; None where it was saved without digests."""
    reader = DurableReader(parent, step=None, item=item)
    manifests = tuple(reader.manifests(to_read=True))
    if not manifests:
        _refuse_unfinished(f"{parent}/{item}")
        return None
    holdings = Holdings(
        sources=(Source(tier=DURABLE, manifests=manifests, remote=reader.round_trips),),
        readers=(reader.read,),
        expect=reader.expect,
    )
    wanted = RestoreRequest(args={item: args}, default_item=None)
    return preparer.prepared(manifests[0].save_id, holdings, wanted, is_durable=True)

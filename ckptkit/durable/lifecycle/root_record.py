"""`_ckptkit/root.json`: the random id of a durable root, drawn once, by the first run that opens it to save.

A root that is copied, moved or restored from a backup keeps its id. One that was removed and made again has another:
slots of the removed one are in directories of another name (`paths.job_name`).

`shield_records` keeps stock Orbax from deleting `_ckptkit`, where this record, pins, epochs and leases are. Where a
mark commits a step, Orbax takes every directory of a root without one for a save that was cut off, and
`cleanup_tmp_directories=True` deletes it.

Certificates show which saves of the root a replay came to: empty files, the name of each names one save. A save that
replaces a certified one under the same step has another name, and is not certified by it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import final

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import SaveId, check_names, new_id
from ckptkit.store import Store

SHIELD_KEY = f"{paths.SIDECAR_DIR}/{paths.COMMIT_MARK}"
_SHIELD = b"Not a step: the records of ckptkit. This file keeps cleanup_tmp_directories of Orbax from deleting them."


@final
@dataclass(frozen=True, slots=True)
class RootRecord:
    """The id of a root. `earlier`: runs of an earlier format had saved here, whose slots name no root."""

    id: str = ""
    earlier: bool = True

    def job_names(self, url: str, name: str = "job") -> tuple[str, ...]:
        """The directories of a job below a tier that may hold saves of this root: today's, and that of earlier
        formats."""
        names = [paths.job_name(url, name, root=self.id)] if self.id else []
        return tuple(names + [paths.job_name(url, name)] * self.earlier)


def read_root_record(store: Store) -> RootRecord:
    """The record of a root; one without an id where there is none. Cost: a small read.

    Raises `CorruptCheckpointError` for a damaged record.
    """
    try:
        data = store.get(paths.ROOT_KEY)
    except FileNotFoundError:
        return RootRecord()
    path = f"{store.url}/{paths.ROOT_KEY}"
    try:
        found = json.loads(data)
        record = RootRecord(str(found["id"]), found["earlier"] is True)
        check_names(SaveId(0, 0, 0, root=record.id))
        if data != _sealed(record) or not record.id:
            raise ValueError("it does not match its own digest")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"root record {path} cannot be read: {error}", path=path) from error
    return record


def make_root_record(store: Store, *, earlier: bool, known: str = "") -> RootRecord:
    """Gives a root its id: `known` if its epoch records name it, else a new one. Another run that does the same at the
    same time may be first: its id holds. Cost: a small write. Raises `StoreError`."""
    record = RootRecord(known or new_id(), earlier)
    try:
        store.put(paths.ROOT_KEY, _sealed(record), mode="create")
    except FileExistsError:
        return read_root_record(store)
    return record


def shield_records(store: Store, *, marked: bool = False) -> None:
    """Puts the mark below a root's `_ckptkit` where it is absent: in a bucket, and on a disk whose steps are `marked`.

    Cost: a look, and one put in the life of a root. Raises `StoreError`.
    """
    if (marked or not store.properties.atomic_rename) and store.stat(SHIELD_KEY) is None:
        store.put(SHIELD_KEY, _SHIELD)


def _sealed(record: RootRecord) -> bytes:
    fields = asdict(record)
    return json.dumps({**fields, "digest": digest_of(json.dumps(fields).encode())}).encode()


def certificate_key(save: SaveId) -> str:
    """The empty object that records that a replay came to a save."""
    return f"{paths.CERTIFIED_DIR}/{paths.certificate_name(save.epoch, save.step, save.number, save.run)}"


def certified_saves(store: Store) -> frozenset[SaveId]:
    """The certified saves of a durable root. Cost: a listing. Raises `StoreError`."""
    found = (paths.save_of_certificate(name) for name in store.list(paths.CERTIFIED_DIR))
    return frozenset(SaveId(*named) for named in filter(None, found))

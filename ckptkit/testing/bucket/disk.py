"""One bucket's directory: `bucket.json`, `records/` by hash of the name, `data/` and `spool/` by id.

An object exists from the rename of its record until the removal of it; its bytes are linked into `data/` before
the one and unlinked after the other. So a kill at any point leaves it whole or absent, and `recover` only removes
files that no record names. Nothing is fsynced: this outlives a killed server, not a machine without power.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import final

from ckptkit.testing.bucket.content import Spool
from ckptkit.testing.bucket.records import BucketRecord, JsonObject, ObjectRecord, file_name


@final
class BucketDirectory:
    """The files of one bucket; the caller holds the lock of the store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._records = root / "records"
        self._data = root / "data"
        self._spool = root / "spool"
        self._bucket_file = root / "bucket.json"

    @classmethod
    def find(cls, buckets: Path) -> "Iterator[tuple[BucketDirectory, BucketRecord]]":
        """Every bucket below `buckets`; the remains of one that was half made or half deleted are removed."""
        for root in sorted(buckets.iterdir()):
            directory = cls(root)
            if directory._bucket_file.exists():
                yield directory, BucketRecord(**json.loads(directory._bucket_file.read_text("utf-8")))
            else:
                shutil.rmtree(root)

    def create(self, record: BucketRecord) -> None:
        """Make the directories, then the record: the bucket exists from the last rename."""
        for path in (self._records, self._data, self._spool):
            path.mkdir(parents=True, exist_ok=True)
        self.write_bucket(record)

    def write_bucket(self, record: BucketRecord) -> None:
        """Replace the bucket's own record."""
        write_json(self._bucket_file, asdict(record))

    def remove(self) -> None:
        """Remove the record first, then the rest."""
        self._bucket_file.unlink()
        shutil.rmtree(self._root)

    def recover(self) -> list[ObjectRecord]:
        """Read every record, and remove what an interrupted commit or delete left behind."""
        records = [ObjectRecord.from_json(json.loads(path.read_text("utf-8"))) for path in _committed(self._records)]
        live = {record.content.id for record in records}
        for path in self._data.iterdir():
            if path.name not in live:
                path.unlink()
        for record in records:
            found = self._data.joinpath(record.content.id).stat().st_size
            if found != record.content.size_bytes:
                raise RuntimeError(
                    f"{self._root}: object {record.name!r} has {found} bytes, expected {record.content.size_bytes}; "
                    "the directory was changed from outside, remove it"
                )
        return records

    def new_spool(self) -> Spool:
        """A place for bytes that arrive."""
        return Spool(self._spool / f"{uuid.uuid4().hex}.part")

    def sessions(self) -> dict[str, JsonObject]:
        """The resumable sessions on disk; spools that belong to none are removed."""
        found = {path.stem: json.loads(path.read_text("utf-8")) for path in _committed(self._spool)}
        for path in self._spool.glob("*.part"):
            if path.stem not in found:
                path.unlink()
        return found

    def open_session(self, session: str) -> Spool:
        """The bytes that a session has received."""
        return Spool(self._spool / f"{session}.part")

    def write_session(self, session: str, state: JsonObject) -> None:
        """Remember a session over a restart."""
        write_json(self._spool / f"{session}.json", state)

    def forget_session(self, session: str) -> None:
        """Remove a session's state."""
        (self._spool / f"{session}.json").unlink(missing_ok=True)

    def put(self, record: ObjectRecord, source: Path) -> None:
        """Link the bytes of `source`, then rename the record into place, which is the commit."""
        os.link(source, self._data / record.content.id)
        self.write_record(record)

    def write_record(self, record: ObjectRecord) -> None:
        """Replace the record of an object whose bytes stay."""
        write_json(self._record_path(record.name), asdict(record))

    def erase_record(self, name: str) -> None:
        """The moment of deletion."""
        self._record_path(name).unlink()

    def data_path(self, record: ObjectRecord) -> Path:
        """The file of an object's bytes, to be opened or linked from under the lock."""
        return self._data / record.content.id

    def _record_path(self, name: str) -> Path:
        return self._records / f"{file_name(name)}.json"


def write_json(path: Path, value: JsonObject) -> None:
    """Write a temporary file next to `path`, then rename it: a reader or a restart sees the old or the new one."""
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    scratch.write_text(json.dumps(value), "utf-8")
    os.replace(scratch, path)


def _committed(directory: Path) -> Iterable[Path]:
    for scratch in directory.glob("*.tmp"):
        scratch.unlink()
    return directory.glob("*.json")

"""The object store: an index in memory, the bytes and records on disk, one lock for every commit."""

import bisect
import fcntl
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.conditions import Preconditions
from ckptkit.testing.bucket.content import Content, Spool
from ckptkit.testing.bucket.disk import BucketDirectory
from ckptkit.testing.bucket.listing import ListQuery, Page, page
from ckptkit.testing.bucket.records import (
    BucketRecord,
    JsonObject,
    ObjectRecord,
    check_bucket,
    check_object,
    file_name,
    now_us,
)
from ckptkit.testing.bucket.resources import STORAGE_CLASS, storage_class_of


@dataclass(slots=True, kw_only=True)
class _Bucket:
    record: BucketRecord
    directory: BucketDirectory
    objects: dict[str, ObjectRecord] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # sorted, which is also the order of the UTF-8 bytes


@final
class ObjectStore:
    """Strongly consistent: preconditions are checked and the change is made under one lock.

    Every change is on disk before the call returns. Costs memory for records only, about a kilobyte for each.
    One process at a time may open a directory; another gets `BlockingIOError`.
    """

    def __init__(self, root: Path) -> None:
        buckets = root / "buckets"
        buckets.mkdir(parents=True, exist_ok=True)
        self._root = buckets
        self._lock = threading.Lock()
        self._lock_file = (root / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._buckets = {record.name: _recover(each, record) for each, record in BucketDirectory.find(buckets)}
        except BaseException:
            self._lock_file.close()
            raise
        generations = (record.generation for each in self._buckets.values() for record in each.objects.values())
        self._last_generation = max(generations, default=0)

    def close(self) -> None:
        """Let another process open the directory."""
        self._lock_file.close()

    def buckets(self) -> list[BucketRecord]:
        """All buckets, sorted."""
        with self._lock:
            return [self._buckets[name].record for name in sorted(self._buckets)]

    def bucket(self, name: str, conditions: Preconditions) -> BucketRecord:
        """One bucket, or 404."""
        with self._lock:
            record = self._find(name).record
            conditions.check(record)
            return record

    def create_bucket(self, name: str, fields: JsonObject) -> BucketRecord:
        """Make a bucket; 409 when it exists."""
        check_bucket(name)
        with self._lock:
            if name in self._buckets:
                raise errors.conflict(
                    "Your previous request to create the named bucket succeeded and you already own it."
                )
            now = now_us()
            record = BucketRecord(name=name, created_us=now, updated_us=now, fields=fields)
            directory = BucketDirectory(self._root / file_name(name))
            directory.create(record)
            self._buckets[name] = _Bucket(record=record, directory=directory)
            return record

    def patch_bucket(self, name: str, fields: JsonObject, conditions: Preconditions) -> BucketRecord:
        """Replace a bucket's fields."""
        with self._lock:
            bucket = self._find(name)
            conditions.check(bucket.record)
            bucket.record = bucket.record.patched(fields)
            bucket.directory.write_bucket(bucket.record)
            return bucket.record

    def delete_bucket(self, name: str, conditions: Preconditions) -> None:
        """Remove an empty bucket; 409 when it holds objects."""
        with self._lock:
            bucket = self._find(name)
            conditions.check(bucket.record)
            if bucket.objects:
                raise errors.conflict("The bucket you tried to delete is not empty.")
            del self._buckets[name]
            bucket.directory.remove()

    def directory(self, bucket: str) -> BucketDirectory:
        """Where spools and sessions of a bucket live, or 404."""
        with self._lock:
            return self._find(bucket).directory

    def stat(self, bucket: str, name: str, conditions: Preconditions, *, generation: int | None = None) -> ObjectRecord:
        """The live record, or 404; only the live generation can be asked for."""
        with self._lock:
            return self._read(bucket, name, conditions.check, generation)

    def open(
        self, bucket: str, name: str, conditions: Preconditions, *, generation: int | None = None
    ) -> tuple[ObjectRecord, BinaryIO]:
        """The live record and its bytes, which stay readable when the object is overwritten or deleted."""
        with self._lock:
            record = self._read(bucket, name, conditions.check, generation)
            return record, self._buckets[bucket].directory.data_path(record).open("rb", buffering=0)

    def source(
        self, bucket: str, name: str, conditions: Preconditions, *, generation: int | None = None
    ) -> ObjectRecord:
        """The live record of what is to be copied, or 404, or 412."""
        with self._lock:
            return self._read(bucket, name, conditions.check_source, generation)

    def list(self, bucket: str, query: ListQuery) -> tuple[list[ObjectRecord], Page]:
        """One page at one moment."""
        with self._lock:
            found = self._find(bucket)
            result = page(found.names, query)
            return [found.objects[name] for name in result.names], result

    def committed_as(self, bucket: str, content_id: str) -> ObjectRecord | None:
        """The live object with these bytes, if an upload got so far before the server was killed."""
        with self._lock:
            records = self._find(bucket).objects.values()
            return next((record for record in records if record.content.id == content_id), None)

    def commit(
        self, bucket: str, name: str, spool: Spool, content: Content, fields: JsonObject, conditions: Preconditions
    ) -> ObjectRecord:
        """Make sealed bytes the live generation of `name`, or raise 412 and change nothing."""
        check_object(name)
        with self._lock:
            found = self._find(bucket)
            conditions.check(found.objects.get(name))
            record = self._new_record(name, content, _with_class(found, fields))
            self._put(found, record, spool.path)
            return record

    def patch(
        self, bucket: str, name: str, change: Callable[[JsonObject], JsonObject], conditions: Preconditions
    ) -> ObjectRecord:
        """Replace the fields by `change(fields)`: a new metageneration of the same generation."""
        with self._lock:
            found = self._find(bucket)
            current = self._read(bucket, name, conditions.check, None)
            record = current.patched(change(current.fields))
            found.directory.write_record(record)
            found.objects[name] = record
            return record

    def delete(self, bucket: str, name: str, conditions: Preconditions, *, generation: int | None = None) -> None:
        """Remove the live object, or raise 404 or 412 and change nothing."""
        with self._lock:
            current = self._read(bucket, name, conditions.check, generation)
            self._remove(self._find(bucket), current)

    def copy(
        self,
        source: tuple[str, str],
        target: tuple[str, str],
        source_conditions: Preconditions,
        conditions: Preconditions,
        *,
        generation: int | None = None,
        fields: JsonObject | None = None,
    ) -> ObjectRecord:
        """Make `target` a new object with the bytes of `source`, and its fields unless given; moves no bytes. Its
        storage class is its bucket's unless `fields` has one.
        """
        check_object(target[1])
        with self._lock:
            original = self._read(*source, source_conditions.check_source, generation)
            found = self._find(target[0])
            conditions.check(found.objects.get(target[1]))
            if fields is None:
                fields = {name: value for name, value in original.fields.items() if name != "storageClass"}
            return self._link(found, target[1], source[0], original, _with_class(found, fields))

    def move(
        self, bucket: str, source: str, target: str, source_conditions: Preconditions, conditions: Preconditions
    ) -> ObjectRecord:
        """Rename within a bucket, at once for every reader; a kill in between leaves both names, never neither."""
        check_object(target)
        if source == target:
            raise errors.invalid("The source and the destination of a move must differ.")
        with self._lock:
            original = self._read(bucket, source, source_conditions.check_source, None)
            found = self._find(bucket)
            conditions.check(found.objects.get(target))
            record = self._link(found, target, bucket, original, original.fields)
            self._remove(found, original)
            return record

    def _find(self, name: str) -> _Bucket:
        bucket = self._buckets.get(check_bucket(name))
        if bucket is None:
            raise errors.GoogleError(404, "notFound", "The specified bucket does not exist.")
        return bucket

    def _read(
        self, bucket: str, name: str, check: Callable[[ObjectRecord], None], generation: int | None
    ) -> ObjectRecord:
        record = self._find(bucket).objects.get(check_object(name))
        if record is None or generation not in {None, record.generation}:
            raise errors.no_such_object(bucket, name)
        check(record)
        return record

    def _new_record(self, name: str, content: Content, fields: JsonObject) -> ObjectRecord:
        now = now_us()
        self._last_generation = max(now, self._last_generation + 1)
        return ObjectRecord(
            name=name,
            generation=self._last_generation,
            created_us=now,
            updated_us=now,
            content=content,
            fields=fields,
        )

    def _link(
        self, bucket: _Bucket, name: str, origin: str, original: ObjectRecord, fields: JsonObject
    ) -> ObjectRecord:
        content = replace(original.content, id=uuid.uuid4().hex)
        record = self._new_record(name, content, fields)
        self._put(bucket, record, self._buckets[origin].directory.data_path(original))
        return record

    def _put(self, bucket: _Bucket, record: ObjectRecord, source: Path) -> None:
        bucket.directory.put(record, source)
        replaced = bucket.objects.get(record.name)
        if replaced is None:
            bisect.insort(bucket.names, record.name)
        bucket.objects[record.name] = record
        if replaced is not None:  # who has its bytes open still reads them
            bucket.directory.data_path(replaced).unlink()

    def _remove(self, bucket: _Bucket, record: ObjectRecord) -> None:
        bucket.directory.erase_record(record.name)
        del bucket.objects[record.name]
        del bucket.names[bisect.bisect_left(bucket.names, record.name)]
        bucket.directory.data_path(record).unlink()


def _recover(directory: BucketDirectory, record: BucketRecord) -> _Bucket:
    objects = {each.name: each for each in directory.recover()}
    return _Bucket(record=record, directory=directory, objects=objects, names=sorted(objects))


def _with_class(bucket: _Bucket, fields: JsonObject) -> JsonObject:
    """The fields of a new object: without a storage class of its own it has its bucket's."""
    of_bucket = storage_class_of(bucket.record)
    return fields if of_bucket == STORAGE_CLASS else {"storageClass": of_bucket, **fields}

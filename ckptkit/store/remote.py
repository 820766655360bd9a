"""A prefix of a bucket, through fsspec (gcsfs for `gs://`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import fsspec
from fsspec.asyn import AsyncFileSystem

from ckptkit.errors import StoreError, TransientStoreError
from ckptkit.store.base import PutMode, Stat, checked_key
from ckptkit.store.refused import Needed, is_refusal, refused

_OPERATION_TIMEOUT_S = 20.0  # of a small object; a server that accepts and never answers would hang a restart
_NO_CREDENTIALS = ("GoogleAuthError", "DefaultCredentialsError", "RefreshError", "NoCredentialsError")
_PLAIN_KEY = re.compile(r"[\w./=+,~ -]+")  # of any other gcsfs takes a part for a generation, `rm` for a pattern
_PART_BYTES = 8 << 20  # of an upload: services want 5 MiB at least
_TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}
_UNANSWERED = {"botocore ConnectionError", "botocore HTTPClientError", "google TransportError"}
_VERSIONS = ("generation", "ETag", "etag", "LastModified", "mtime", "created")  # file systems' words, the surest first
_S3_BATCH = 1000  # keys of one deletion
# What S3 says of single objects of a batch, in an answer that is a success as a whole.
_S3_TRANSIENT = {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
_S3_ABSENT = {"NoSuchKey", "NoSuchVersion"}


@final
class RemoteStore:
    """Objects in a bucket; a put is one upload, which the bucket makes whole or absent.

    Listings are never cached: another process may have written since.
    """

    def __init__(self, url: str, *, timeout_s: float | None = None):
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s or _OPERATION_TIMEOUT_S
        self._fs, self._root = _open_filesystem(self._url)

    @property
    def url(self) -> str:
        """The prefix, with its scheme."""
        return self._url

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """Stores `data` whole; `create` is a precondition that the bucket itself checks."""
        path = self._path(key)
        with self._asking(key, "create"):
            self._ask("pipe_file", path, data, mode="create" if mode == "create" else "overwrite")

    def put_file(self, key: str, path: str) -> None:
        """Uploads a local file of any size, in portions; the object is whole or absent. No limit of time applies."""
        with _translated(f"{self._url}/{key}", "create"):
            self._fs.put_file(path, self._path(key))

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """See `Store.copy`; on GCS the bucket checks that source and target are what they have to be.

        On S3 it checks the same, but for `replaces`: with Amazon's conditional copies, which other services may not
        have. There, and elsewhere, `create` looks first and copies then.
        """
        paths = self._path(source), self._path(target)
        with _translated(f"{self._url}/{target}, from {source}", "create", self._timeout_s):
            if self._is_on("gs", "gcs"):
                generation = 0 if mode == "create" else replaces
                self._rewrite(*paths, **({} if generation is None else {"ifGenerationMatch": generation}))
                return
            conditions = {}
            if mode == "create":
                if isinstance(self._fs, AsyncFileSystem):  # what it remembers of listings may be out of date
                    self._fs.invalidate_cache()
                if self._ask("exists", paths[1]):
                    raise FileExistsError(paths[1])
                if self._is_on("s3", "s3a"):
                    conditions = {"IfNoneMatch": "*"}
            self._ask("cp_file", *paths, **conditions)

    def _is_on(self, *protocols: str) -> bool:
        return self._url.partition("://")[0] in protocols

    def _rewrite(self, source: str, target: str, **conditions: int) -> None:
        names = [part for path in (source, target) for part in path.split("/", 1)]
        answer: dict[str, Any] = {"done": False}
        token: dict[str, str] = {}
        while not answer["done"]:  # a large object between storage classes takes several requests
            headers = {"Content-Type": "application/json"}
            path = "b/{}/o/{}/rewriteTo/b/{}/o/{}"
            answer = self._ask("call", "POST", path, *names, headers=headers, json_out=True, **token, **conditions)
            token = {"rewriteToken": answer.get("rewriteToken", "")}

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        path = self._path(key)
        with self._asking(key, "get"):
            self._fs.invalidate_cache(path)  # s3fs would say that what was put after a listing is not there
            return self._ask("cat_file", path)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of an object; raises `FileNotFoundError` where there is none."""
        path = self._path(key)
        with self._asking(key, "get"):
            return self._ask("cat_file", path, start=start, end=stop)

    def put_parts(self, key: str, parts: Iterable[bytes]) -> None:
        """Stores what the parts are together, holding a few MiB of them; the object is whole or absent.

        Each request has the file system's own limit of time. What the parts raise leaves no object.
        """
        path = self._path(key)
        with self._asking(key, "create"):
            file = self._fs.open(path, "wb", block_size=_PART_BYTES)
        try:
            for part in parts:
                with self._asking(key, "create"):
                    file.write(part)
            with self._asking(key, "create"):
                file.close()
        except BaseException:
            file.closed = True  # else closing it, when it is forgotten, would finish the object
            with suppress(Exception):
                file.discard()
            raise

    def stat(self, key: str) -> Stat | None:
        """Facts about an object; None where there is none."""
        path = self._path(key)
        with suppress(FileNotFoundError), self._asking(key, "get"):
            self._fs.invalidate_cache()  # what a listing has shown may be gone
            info: dict[str, Any] = self._ask("info", path)
            return _stat(info) if info["type"] == "file" else None
        return None

    def list(self, prefix: str) -> list[str]:
        """The names right below `prefix`, sorted; directories end in `/`. One paged delimiter listing."""
        path = self._path(prefix) if prefix else self._root
        with suppress(FileNotFoundError), self._asking(prefix, "list"):
            self._fs.invalidate_cache()
            entries: list[dict[str, Any]] = self._ask("ls", path, detail=True)
            names = {
                entry["name"].rstrip("/").rpartition("/")[2] + "/" * (entry["type"] == "directory")
                for entry in entries
                if entry["name"].rstrip("/") != path
            }
            return sorted(names)
        return []

    def delete(self, key: str) -> None:
        """Removes an object; one that is absent is no error."""
        path = self._path(key)
        with suppress(FileNotFoundError), self._asking(key, "delete"):
            self._ask("rm_file", path)

    def list_all(self, prefix: str) -> list[str]:
        """The keys below `prefix`, sorted: one paged listing (a second one where gcsfs finds nothing)."""
        path = self._path(prefix) if prefix else self._root
        with suppress(FileNotFoundError), self._asking(prefix, "list"):
            self._fs.invalidate_cache()
            found = self._ask("find", path)
            return sorted(name[len(self._root) + 1 :] for name in found if name.startswith(f"{path}/"))
        return []

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects in batches, where the service has them."""
        if self._is_on("s3", "s3a"):
            self._delete_on_s3([self._path(key) for key in keys])
            return
        plain = [key for key in keys if _PLAIN_KEY.fullmatch(key)]
        paths = [self._path(key) for key in plain]
        for key in sorted(set(keys).difference(plain)):
            self.delete(key)
        try:
            with self._asking("", "delete"):
                self._ask("rm", paths)
        except FileNotFoundError:  # some file systems stop at the first that is absent
            for key in plain:
                self.delete(key)

    def _delete_on_s3(self, paths: Sequence[str]) -> None:
        """What the service did not delete is said in an answer that is a success: s3fs's own `rm` passes over it, and a
        step would lose its bytes and keep its mark."""
        names = [self._fs.split_path(path)[:2] for path in paths]
        for start in range(0, len(names), _S3_BATCH):
            batch = names[start : start + _S3_BATCH]
            keys = {"Objects": [{"Key": key} for _, key in batch], "Quiet": True}
            with self._asking("", "delete"):
                answer = self._ask("call_s3", "delete_objects", Bucket=batch[0][0], Delete=keys)
            _raise_undeleted(self._url, answer.get("Errors", []))

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """See `Store.stat_all`."""
        path = self._path(prefix) if prefix else self._root
        with suppress(FileNotFoundError), self._asking(prefix, "list"):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._ask("find", path, detail=True)
            below = {name: info for name, info in sorted(found.items()) if name.startswith(f"{path}/")}
            return {name[len(self._root) + 1 :]: _stat(info) for name, info in below.items()}
        return {}

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """See `Store.delete_unchanged`. A generation that is named is gone for good, in a bucket with versions too."""
        if not self._is_on("gs", "gcs") or any(stat.generation is None for stat in found.values()):
            self.delete_many(list(found))
            return
        plain = [key for key in found if _PLAIN_KEY.fullmatch(key)]
        for key in sorted(found.keys() - set(plain)):
            names = self._path(key).split("/", 1)
            with suppress(FileNotFoundError), self._asking(key, "delete"):
                self._ask("call", "DELETE", "b/{}/o/{}", *names, generation=found[key].generation)
        if plain:
            by_generation, _ = _open_filesystem(self._url, version_aware=True)
            paths = [f"{self._path(key)}#{found[key].generation}" for key in plain]
            with suppress(FileNotFoundError), self._asking("", "delete"):
                by_generation.rm(paths, timeout=self._timeout_s)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One operation. An asynchronous file system's own tries end at the limit, however many they would be."""
        if isinstance(self._fs, AsyncFileSystem):
            kwargs["timeout"] = self._timeout_s
        return getattr(self._fs, method)(*args, **kwargs)

    def _asking(self, key: str, needs: Needed) -> AbstractContextManager[None]:
        where = f"{self._url}/{key}" if key else self._url
        return _translated(where, needs, self._timeout_s)

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"


def _open_filesystem(url: str, **options: Any) -> tuple[Any, str]:
    with _translated(url):
        return fsspec.core.url_to_fs(url, **options)


def _stat(info: Mapping[str, Any]) -> Stat:
    generation = info.get("generation")
    version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
    return Stat(int(info["size"]), None if generation is None else int(generation), version)


@contextmanager
def _translated(where: str, needs: Needed = "list", timeout_s: float | None = None) -> Iterator[None]:
    """Library errors become ours once, here. Statuses are found by attribute: gcsfs and aiohttp differ in type.

    `needs` is what the operation has to be permitted.
    """
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except FileExistsError as error:
        raise FileExistsError(f"{where} exists: {error}") from error
    except Exception as error:
        status = _status(error)
        message = f"{where}: {type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            limit_s = timeout_s or _OPERATION_TIMEOUT_S
            message = f"{where}: no answer within {limit_s:g} s; look at the network and at the service"
        if status == 412:
            raise FileExistsError(message) from error
        # gcsfs makes an OSError of a 403 and keeps no status.
        if (
            status in (401, 403)
            or isinstance(error, PermissionError)
            or is_refusal(str(error))
            or type(error).__name__ in _NO_CREDENTIALS
        ):
            raise refused(where, f"{type(error).__name__}: {error}", needs=needs) from error
        if status in _TRANSIENT_STATUS or _is_unanswered(error):
            raise TransientStoreError(message, path=where) from error
        raise StoreError(message, path=where) from error


def _is_unanswered(error: Exception) -> bool:
    """Whether a client had no answer, or a part of one: a network that blinks.

    The libraries below have types of their own for it, which are no `ConnectionError` of Python's.
    """
    kinds = {f"{kind.__module__.partition('.')[0]} {kind.__name__}" for kind in type(error).__mro__}
    library = type(error).__module__.partition(".")[0]
    return (
        isinstance(error, (ConnectionError, TimeoutError))
        or library in ("aiohttp", "requests")  # gcsfs makes a ProxyError of a 502
        or not kinds.isdisjoint(_UNANSWERED)
    )


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error. s3fs makes an OSError of most of them, caused by the one that knows it."""
    told = getattr(error, "code", None) or getattr(error, "status", None)
    answer = getattr(error.__cause__, "response", None)
    if told is None and isinstance(answer, dict):
        told = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    with suppress(TypeError, ValueError):
        return int(told)  # pyright: ignore[reportArgumentType]
    return None


def forget_listings(url: str) -> None:
    """Drops what this process's file systems remember of a bucket's listings: Orbax asks through others than ours.

    Nothing for a directory.
    """
    protocol, found, _ = url.partition("://")
    if found:
        for each in tuple(fsspec.get_filesystem_class(protocol)._cache.values()):
            each.invalidate_cache()


def _raise_undeleted(where: str, errors: Sequence[Mapping[str, str]]) -> None:
    """Raises for objects that S3 has left where they are: a refusal, which no retry mends, before all else."""
    left = sorted((each for each in errors if each.get("Code") not in _S3_ABSENT), key=_may_pass)
    if not left:
        return
    first = left[0]
    said = f"{first.get('Key')}: {first.get('Code')}: {first.get('Message')} ({len(left)} objects are not deleted)"
    if first.get("Code") == "AccessDenied":
        raise refused(where, said, needs="delete")
    kind = TransientStoreError if _may_pass(first) else StoreError
    raise kind(f"{where}: {said}", path=where)


def _may_pass(error: Mapping[str, str]) -> bool:
    return error.get("Code") in _S3_TRANSIENT

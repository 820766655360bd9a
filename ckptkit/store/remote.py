"""A prefix of a bucket, through fsspec (gcsfs for `gs://`). `backends` has the properties of each service."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import fsspec

from ckptkit.errors import StoreError, TransientStoreError
from ckptkit.store.backends import BACKENDS, PLAIN_PATH, Needed, backend_of, endpoint_of, is_refusal, refused
from ckptkit.store.base import Properties, PutMode, Stat, checked_key, is_key
from ckptkit.store.reaching import network_problem
from ckptkit.store.retry import within_deadline
from ckptkit.util.package import install_command

OPERATION_TIMEOUT_S = 20.0  # of a small object; a server that accepts and never answers would hang a restart
_FIRST_S_MIN = 0.5  # of the first operation, where finding credentials took almost all of the time
_reachable: set[str] = set()  # schemes whose client has been made in this process
_PART_BYTES = 8 << 20  # of an upload: services want 5 MiB at least
_TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}
_READERS_OF_ERRORS = {"gcsfs.retry"}
_VERSIONS = ("generation", "ETag", "etag", "LastModified", "mtime", "created")  # file systems' words, the surest first


@final
class RemoteStore:
    """Objects in a bucket; a put is one upload, which the bucket makes whole or absent.

    Listings are never cached: another process may have written since. They leave out the objects whose names are not
    keys (`200/../x`, `200//x`), which any writer to the bucket can make and no file system has.
    """

    def __init__(self, url: str, *, timeout_s: float | None = None):
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s or OPERATION_TIMEOUT_S
        self._backend = backend_of(self._url)
        began_s = time.monotonic()
        with _translated(self._url, timeout_s=self._timeout_s):
            self._fs, self._root = _connected(self._url, self._timeout_s)
        self._first_s: float | None = self._timeout_s - (time.monotonic() - began_s)  # what the first operation has

    @property
    def url(self) -> str:
        """The prefix, with its scheme."""
        return self._url

    @property
    def properties(self) -> Properties:
        """Those of its scheme (`backends`)."""
        return self._backend.properties

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
        """See `Store.copy`; with generations the bucket checks that source and target are what they have to be.

        Elsewhere `create` looks first and copies then, and `replaces` is not asked. On S3 the bucket checks `create`
        once more.
        """
        paths = self._path(source), self._path(target)
        with _translated(f"{self._url}/{target}, from {source}", "create", self._timeout_s):
            if self._backend.copy is not None:
                self._backend.copy(self._ask, *paths, 0 if mode == "create" else replaces)
                return
            if mode == "create":
                self._fs.invalidate_cache()  # what it remembers of listings may be out of date
                if self._ask("exists", paths[1]):
                    raise FileExistsError(paths[1])
            self._ask("cp_file", *paths, **(self._backend.create_copies if mode == "create" else {}))

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        path = self._path(key)
        with self._asking(key, "get"):
            self._fs.invalidate_cache(path)  # s3fs would not find an object that was put after a listing
            return self._ask("cat_file", path)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of an object; raises `FileNotFoundError` where there is none."""
        path = self._path(key)
        with self._asking(key, "get"):
            return self._ask("cat_file", path, start=start, end=stop)

    def put_parts(self, key: str, parts: Iterable[bytes]) -> None:
        """Stores what the parts are together, holding a few MiB of them; the object is whole or absent.

        Each request has the file system's own time limit. If a part raises, no object is left.
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
            return sorted(name for name in names if is_key(name.removesuffix("/")))
        return []

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is not an error."""
        path = self._path(key)
        with suppress(FileNotFoundError), self._asking(key, "delete"):
            self._ask("rm_file", path)

    def list_all(self, prefix: str) -> list[str]:
        """The keys below `prefix`, sorted: one paged listing (a second one where gcsfs finds nothing)."""
        path = self._path(prefix) if prefix else self._root
        with suppress(FileNotFoundError), self._asking(prefix, "list"):
            self._fs.invalidate_cache()
            found = self._ask("find", path)
            keys = sorted(name[len(self._root) + 1 :] for name in found if name.startswith(f"{path}/"))
            return list(filter(is_key, keys))
        return []

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects in batches, where the service has them."""
        if self._backend.delete_many is not None:
            paths = [self._path(key) for key in keys]
            with self._asking("", "delete"):
                self._backend.delete_many(self._fs, self._ask, paths)
            return
        plain = [key for key in keys if PLAIN_PATH.fullmatch(self._path(key))]
        paths = [self._path(key) for key in plain]
        for key in sorted(set(keys).difference(plain)):
            self.delete(key)
        try:
            with self._asking("", "delete"):
                self._ask("rm", paths)
        except FileNotFoundError:  # some file systems stop at the first that is absent
            for key in plain:
                self.delete(key)

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """See `Store.stat_all`."""
        path = self._path(prefix) if prefix else self._root
        with suppress(FileNotFoundError), self._asking(prefix, "list"):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._ask("find", path, detail=True)
            below = {name[len(self._root) + 1 :]: info for name, info in found.items() if name.startswith(f"{path}/")}
            return {key: _stat(below[key]) for key in sorted(filter(is_key, below))}
        return {}

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """See `Store.delete_unchanged`."""
        generations = {self._path(key): stat.generation for key, stat in found.items() if stat.generation is not None}
        if self._backend.delete_generations is None or len(generations) < len(found):
            self.delete_many(list(found))
            return
        with self._asking("", "delete"):
            self._backend.delete_generations(self._ask, generations, self._timeout_s)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One operation. A method that fsspec has made of a coroutine takes a limit of time, however often it tries.

        The type of the file system does not show this: `dir::` is asynchronous, and hands the limit on to what is not.
        """
        operation = getattr(self._fs, method)
        if inspect.iscoroutinefunction(getattr(operation, "__wrapped__", None)):
            limit_s = self._timeout_s if self._first_s is None else max(_FIRST_S_MIN, self._first_s)
            kwargs["timeout"] = within_deadline(limit_s)
        self._first_s = None
        return operation(*args, **kwargs)

    def _asking(self, key: str, needs: Needed) -> AbstractContextManager[None]:
        where = f"{self._url}/{key}" if key else self._url
        return _translated(where, needs, self._timeout_s)

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"


def _connected(url: str, timeout_s: float) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    A new client looks for credentials, and queries the cloud's metadata service without a time limit. So the first
    client of a process is made in a thread, which is abandoned after the time limit.
    """
    scheme = url.partition("://")[0]
    if "STORAGE_EMULATOR_HOST" in os.environ:  # else gcsfs asks Google for the type of the emulator's bucket
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if scheme not in _reachable:
        made: list[BaseException | None] = []

        def connect() -> None:
            try:
                fsspec.core.url_to_fs(url)
                made.append(None)
            except BaseException as error:  # noqa: BLE001  raised below, in the caller's thread
                made.append(error)

        thread = threading.Thread(target=connect, name="ckptkit-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not made:
            raise TimeoutError(f"no credentials within {timeout_s:g} s")
        if made[0] is not None:
            raise made[0]
        _reachable.add(scheme)
    if scheme not in BACKENDS:  # a host, a port or a chain may be in the URL
        return fsspec.core.url_to_fs(url)
    fs = fsspec.filesystem(scheme)  # not by the URL: `::`, `#2` and `?generation=2` in it would be no part of a name
    return fs, fs._strip_protocol(url)


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
    except ImportError as error:
        extra = backend_of(where).access.extra
        how = install_command(extra) if extra else "install the package that it names"
        raise StoreError(f"{where} needs {_package(error)}: {how}", path=where) from error
    except Exception as error:
        status, access = _status(error), backend_of(where).access
        message = f"{where}: {type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            limit_s = timeout_s or OPERATION_TIMEOUT_S
            message = f"{where}: no answer within {limit_s:g} s{_why_silent(where)}"
        if status == 412:
            raise FileExistsError(message) from error
        # gcsfs makes an OSError of a 403 and keeps no status.
        refuses = status in (401, 403) or isinstance(error, PermissionError) or is_refusal(str(error))
        if not refuses and (status in _TRANSIENT_STATUS or _is_unanswered(error, access.unanswered)):
            raise TransientStoreError(message, path=where) from error
        if refuses or not access.signed_out.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise refused(where, f"{type(error).__name__}: {error}", needs=needs) from error
        raise StoreError(message, path=where) from error


def _why_silent(where: str) -> str:
    """The rest of a message about a timeout: the cause, which the client does not report."""
    scheme = where.partition("://")[0]
    if scheme in BACKENDS and scheme in _reachable:
        with suppress(Exception):  # a message is made: nothing here may hide what it is about
            endpoint = endpoint_of(fsspec.filesystem(scheme))
            if endpoint is not None and (problem := network_problem(endpoint)) is not None:
                return f": {problem}"
    return ", or only answers to try again later (429, 5xx); look at the network and at the service"


def _package(error: ImportError) -> str:
    """fsspec raises "Install s3fs to access S3" again each time."""
    found = re.search(r"[Ii]nstall (\w+)", str(error))
    return error.name or (found[1] if found else str(error))


def _is_unanswered(error: Exception, kinds_of_service: frozenset[str]) -> bool:
    """Whether a client had no answer, or a part of one: a network that blinks.

    The libraries below have their own types for it, which are not Python's `ConnectionError`.
    """
    kinds = {f"{kind.__module__.partition('.')[0]} {kind.__name__}" for kind in type(error).__mro__}
    library = type(error).__module__.partition(".")[0]
    return (
        isinstance(error, (ConnectionError, TimeoutError))
        or library in ("aiohttp", "requests")  # gcsfs makes a ProxyError of a 502
        or not kinds.isdisjoint(kinds_of_service)
    )


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error. s3fs makes an OSError of most of them, caused by the one that knows it."""
    told = getattr(error, "code", None) or getattr(error, "status", None) or _misread_status(error)
    answer = getattr(error.__cause__, "response", None)
    if told is None and isinstance(answer, dict):
        told = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    with suppress(TypeError, ValueError):
        return int(told)  # pyright: ignore[reportArgumentType]
    return None


def _misread_status(error: Exception) -> Any:
    """The status of an error answer at whose text the client failed: gcsfs appends the status to a message that is an
    object, which raises TypeError."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__") not in _READERS_OF_ERRORS:
        return None
    return getattr(trace.tb_frame.f_locals.get("self"), "code", None)


def forget_listings(url: str) -> None:
    """Drops what this process's file systems remember of a bucket's listings: Orbax asks through others than ours.

    Nothing for a directory.
    """
    protocol, found, _ = url.partition("://")
    if found:
        for each in tuple(fsspec.get_filesystem_class(protocol)._cache.values()):
            each.invalidate_cache()
        backend = getattr(sys.modules.get("etils.epath.backend"), "fsspec_backend", None)
        made = getattr(backend, "_get_filesystem", None)  # Orbax's: it may be older than what fsspec still knows
        if backend is not None and made is not None and made.cache_info().currsize:
            backend.fs(url).invalidate_cache()

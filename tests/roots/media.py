"""The place of a tree while a command works on it: a directory of this machine, or a prefix of the shipped bucket."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, Protocol, final

from ckptkit.testing.bucket import BucketServer
from tests.mount import MountedBucket

Listing = Mapping[str, str]  # path below a place -> what is there: a digest, or the text of a link, or "directory"
_BUCKET: Final = "roots"


class Medium(Protocol):
    """Holds copies of trees, each at a place of its own that is never used again."""

    name: str

    def place(self, source: Path) -> str:
        """Copies a tree and returns the URL of the copy."""
        ...

    def listing(self, place: str) -> Listing:
        """Everything below a place, as plain requests show it."""
        ...

    def remove(self, place: str) -> None:
        """Deletes a place."""
        ...


@final
class LinkedCopies:
    """Copies of trees in which files with several names stay so, also across trees that are copied one by one."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, int], str] = {}

    def tree(self, source: Path, target: Path) -> None:
        """Copies a tree with its links into a directory, which may exist."""
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=self._copy)

    def _copy(self, source: str, target: str) -> None:
        at = os.lstat(source)
        known = self._copies.setdefault((at.st_dev, at.st_ino), target) if at.st_nlink > 1 else target
        if known != target:
            os.link(known, target)
            return
        shutil.copy2(source, target, follow_symlinks=False)


@final
class Disk:
    """Trees as directories below `home`."""

    name = "disk"

    def __init__(self, home: Path):
        self._home = home
        self._count = 0

    def place(self, source: Path) -> str:
        """Copies a tree with its links and returns the path of the copy."""
        self._count += 1
        target = self._home / f"place {self._count}"  # a command that an error advises has to quote it
        LinkedCopies().tree(source, target)
        return str(target)

    def listing(self, place: str) -> Listing:
        """Every file by its digest, every link by its text, every directory. Links are not followed."""
        return dict(_on_disk(os.fsencode(place)))

    def remove(self, place: str) -> None:
        """Deletes a place."""
        shutil.rmtree(place, ignore_errors=True)


def _on_disk(place: bytes) -> Iterator[tuple[str, str]]:
    for directory, names, files in os.walk(place):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            below = os.fsdecode(os.path.relpath(path, place))
            if os.path.islink(path):
                yield below, f"link to {os.fsdecode(os.readlink(path))}"
            elif os.path.isdir(path):
                if not _is_own_directory(below):
                    yield below, "directory"
            else:
                with open(path, "rb") as file:
                    yield below, hashlib.sha256(file.read()).hexdigest()


def _is_own_directory(below: str) -> bool:
    """Which directories ckptkit keeps for itself is its own affair."""
    return "_ckptkit" in below.split("/")


@final
class Mount:
    """Trees as directories at the top of a mounted bucket, put there and looked at by another client of the bucket."""

    name = "mount"

    def __init__(self, mounted: MountedBucket):
        self._mounted = mounted
        self._count = 0

    def place(self, source: Path) -> str:
        """Copies a tree and returns the path of the copy."""
        self._count += 1
        name = f"place-{self._count}"
        self._mounted.put(name, source)
        return str(self._mounted.path / name)

    def listing(self, place: str) -> Listing:
        """Every file by its digest, every directory."""
        found = self._mounted.listing(Path(place).name)
        return {below: what for below, what in found.items() if what != "directory" or not _is_own_directory(below)}

    def remove(self, place: str) -> None:
        """Deletes a place."""
        self._mounted.delete(Path(place).name)


@final
class Bucket:
    """Trees as prefixes of a bucket of `BucketServer`, which is reached by plain HTTP. Use `bucket`."""

    name = "bucket"

    def __init__(self, server: BucketServer):
        self._host = server.url.removeprefix("http://")
        self._connection = HTTPConnection(self._host)
        self._count = 0

    def place(self, source: Path) -> str:
        """Uploads every file of a tree and returns the URL of the copy."""
        self._count += 1
        prefix = f"place-{self._count}"
        for file in sorted(source.rglob("*")):
            if file.is_file():
                name = urllib.parse.quote(f"{prefix}/{file.relative_to(source)}", safe="")
                self._asked("POST", f"/upload/storage/v1/b/{_BUCKET}/o?uploadType=media&name={name}", file.read_bytes())
        return f"gs://{_BUCKET}/{prefix}"

    def listing(self, place: str) -> Listing:
        """Every object by its checksum."""
        prefix = place.removeprefix(f"gs://{_BUCKET}/") + "/"
        found, token = {}, ""
        while True:
            query = urllib.parse.urlencode({"prefix": prefix, "pageToken": token})
            page = json.loads(self._asked("GET", f"/storage/v1/b/{_BUCKET}/o?{query}"))
            found |= {each["name"].removeprefix(prefix): each["md5Hash"] for each in page.get("items", [])}
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def remove(self, place: str) -> None:
        """Deletes a place."""
        prefix = place.removeprefix(f"gs://{_BUCKET}/")
        for name in self.listing(place):
            self._asked("DELETE", f"/storage/v1/b/{_BUCKET}/o/{urllib.parse.quote(f'{prefix}/{name}', safe='')}")

    def _asked(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._connection.request(method, path, body)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise OSError(f"{method} {path}: status {answer.status}: {content[:200]!r}")
        return content


@contextmanager
def bucket(home: Path) -> Iterator[Bucket]:
    """A bucket that the clients in this process find for as long as the context is open."""
    with BucketServer(dir=home, buckets=[_BUCKET]) as server:
        kept: dict[str, Any] = {name: os.environ.get(name) for name in server.env()}
        os.environ.update(server.env())
        try:
            yield Bucket(server)
        finally:
            for name, value in kept.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

"""The small files of a signed directory, exactly as they were signed, for a restore that trusts nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptkit.durable.cells.tensorstore_wait import small_objects
from ckptkit.durable.signatures import TrustedKey, claimed
from ckptkit.errors import UntrustedStepError
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.store import Store

_LARGE_BYTES = 16 << 20  # a file of a handler: its cells have digests of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFiles:
    """The names of all files that a signature covers, and the content of the small ones, all proven."""

    names: frozenset[str]
    content: Mapping[str, bytes]

    @property
    def items(self) -> set[str]:
        """The directories right below the signed one."""
        return {name.partition("/")[0] for name in self.names if "/" in name}

    def records(self) -> dict[tuple[str, int], bytes]:
        """The records with strong digests: by the item whose they are (`""`: the directory is the item) and process."""
        found = {}
        for key, data in self.content.items():
            directory, _, name = key.rpartition("/")
            item, _, last = directory.rpartition("/")
            process = paths.process_of_signed_record(name)
            if last == paths.SIDECAR_DIR and "/" not in item and process is not None:
                found[item, process] = data
        return found


def signed_files(url: str, key: TrustedKey, profile: DurableProfile) -> SignedFiles:
    """The files of the directory at `url`, if they are what the owner of `key` has signed.

    Every file is listed; all but data files are read and compared with their signed digests. Data files are not read:
    the records that are returned have a digest of every cell in them, to compare with the bytes that a restore reads.
    Cost: a listing and a read of each small file, several at a time.

    Raises `UntrustedStepError` where the directory is not signed, is signed by another key, or has other files.
    """
    store = small_objects(url, profile)
    signature = read_signature(store)
    sizes = {name: stat.size_bytes for name, stat in store.stat_all("").items() if is_covered(name)}
    signed = claimed(url, signature)
    with ThreadPoolExecutor(profile.read_concurrency, thread_name_prefix="ckptkit-trust") as pool:
        small = [name for name, size in sizes.items() if _is_small(name, size)]
        content = dict(zip(small, pool.map(lambda name: _read(store, name), small), strict=True))
    found = {name: _digest(content[name]) if name in content else signed.get(name, "") for name in sizes}
    key.require(url, signature, found)
    return SignedFiles(names=frozenset(sizes), content=content)


def read_signature(store: Store) -> bytes:
    """The signature of the directory that `store` is of. Raises `UntrustedStepError` where it has none."""
    try:
        return store.get(paths.SIGNATURE)
    except FileNotFoundError as error:
        raise UntrustedStepError(f"{store.url} is not signed: it has no {paths.SIGNATURE}", path=store.url) from error


def is_covered(name: str) -> bool:
    """Whether a signature covers a file of its directory. It leaves out itself, and the marks of items, which a copy
    into a bucket adds and no restore reads."""
    return name != paths.SIGNATURE and not ("/" in name and name.rpartition("/")[2] == paths.COMMIT_MARK)


def left_out(names: Iterable[str]) -> list[str]:
    """The files that a signature does not cover, as it names them."""
    return sorted({paths.SIGNATURE, *(name for name in names if not is_covered(name))})


def _is_small(name: str, size_bytes: int) -> bool:
    return paths.is_of_signature(name) or ("d" not in name.split("/")[:-1] and size_bytes < _LARGE_BYTES)


def _read(store: Store, name: str) -> bytes:
    try:
        return store.get(name)
    except FileNotFoundError as error:
        raise UntrustedStepError(f"{store.url}/{name} went while it was read", path=store.url) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

"""`sign`: a signature over every file of a step, and the check of one. See decision 11.

The digests of a save (xxh3-128) show damage. A person who can write into a step can make other bytes with the same
ones. So a signature is over the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptkit.durable.lifecycle.places import Place, is_committed, item_kind, nothing_at
from ckptkit.durable.lifecycle.step_records import sidecar_processes
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CheckpointError, CorruptCheckpointError, UntrustedStepError
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.sizes import sizes_below
from ckptkit.model import paths
from ckptkit.model.cells import digested_cells
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.store import Store, open_store
from ckptkit.store.roots import root_url
from ckptkit.upkeep.copying import digest_of_object
from ckptkit.upkeep.signatures import SigningKey, TrustedKey
from ckptkit.verification.pool import MEMORY_BYTES_MAX
from ckptkit.verification.records import Finding, StepProof, Verification, VerifyProgress
from ckptkit.verification.verify import verify

_SHOWN_MAX = 4  # findings in one message
_THREADS = 8  # that read files: a disk or a bucket answers several reads at once
Progress = Callable[[VerifyProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """A step, or a tree that was saved by itself (`step` None), and what its signature covers."""

    path: str
    step: int | None
    save_id: SaveId
    cells: tuple[int, int]  # count, bytes
    files: tuple[int, int]
    key: str
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        names = {"path": self.path, "step": self.step, "save_id": asdict(self.save_id), "key": self.key}
        counts = {"cells": self.cells[0], "bytes": self.cells[1], "files": self.files[0], "file_bytes": self.files[1]}
        return {"format": FORMAT, **names, **counts, "done": self.done}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The directory to sign: a step, or a tree by itself, which is its own only item."""

    place: Place
    step: int | None

    @property
    def url(self) -> str:
        return self.place.url

    def manifests(self) -> list[Manifest]:
        if self.step is not None:
            return DurableReader(self.url, step=self.step).manifests()
        parent, _, name = self.url.rpartition("/")
        return DurableReader(parent, step=None, item=name).manifests()


def sign(
    path: str, key: str, *, dry_run: bool = False, timeout_s: float = 20.0, progress: Progress | None = None
) -> Signing:
    """Signs the committed step, or the tree that was saved by itself, at `path`, by the private key in the file `key`.

    The step is verified first, so that no damage is signed. Then its signature is added as a file of its own. The other
    files are not touched. With `dry_run` nothing is read but metadata, and nothing is written. Cost: every byte is read
    twice, the cells and the files.

    Raises `SigningKeyError` for a key that cannot sign, before anything is read. Raises `StepNotFoundError` where no
    step is, `CheckpointError` for a step without digests, `CorruptCheckpointError` for damage, `StoreError`.
    """
    signing_key = SigningKey(key)
    target = _target(path, timeout_s)
    manifests = target.manifests()
    if not manifests:
        why = "has no digests of its cells: ckptkit did not save its arrays. `model_signing` signs its files"
        raise CheckpointError(f"{target.url} {why}", path=target.url)
    sizes = [stop - start for each in manifests for *_, start, stop, _ in digested_cells(each)]
    found = Signing(
        path=target.url,
        step=target.step,
        save_id=manifests[0].save_id,
        cells=(len(sizes), sum(sizes)),
        files=_sizes(target.place),
        key=key,
    )
    if dry_run:
        return found
    memory_bytes_max = max(MEMORY_BYTES_MAX, 2 * max(sizes, default=0))  # so that no cell is left out
    proof = verify(target.url, memory_bytes_max=memory_bytes_max, timeout_s=timeout_s, progress=progress)
    if proof.corrupt or not proof.steps:  # without steps: the notes report that it was replaced while it was read
        findings = [str(each) for step in proof.steps for each in step.findings] or proof.notes
        why = f"{target.url} is not intact and is not signed: {'; '.join(findings[:_SHOWN_MAX])}"
        raise CorruptCheckpointError(why, step=target.step, path=target.url)
    store = open_store(target.url, deadline_s=timeout_s)
    names = store.list_all("")
    digests = _file_digests(target.url, names)
    store.put(paths.SIGNATURE, signing_key.sign(target.url, digests, _left_out(names)))
    return replace(found, files=_sizes(target.place.again()), done=True)


def with_signatures(found: Verification, key: TrustedKey, *, timeout_s: float = 20.0) -> Verification:
    """The verification, with every save marked corrupt that the owner of `key` has not signed as it is now.

    A save that was never committed stays incomplete. Cost: that of `check_signature` for each step. Raises
    `StoreError`.
    """
    return replace(found, steps=tuple(_with_signature(proof, key, timeout_s) for proof in found.steps))


def _with_signature(proof: StepProof, key: TrustedKey, timeout_s: float) -> StepProof:
    if proof.kind == "durable" and proof.state == "incomplete":
        return proof
    try:
        if proof.kind == "slot":
            raise UntrustedStepError(f"{proof.path} is in a fast tier, and only durable steps are signed")
        check_signature(proof.path, key, timeout_s=timeout_s)
        return proof
    except CorruptCheckpointError as error:
        finding = Finding(path=proof.path, problem=str(error))
        reason = "not what was signed" if proof.state != "corrupt" else proof.reason
        return replace(proof, state="corrupt", reason=reason, findings=(*proof.findings, finding))


def check_signature(path: str, key: TrustedKey, *, timeout_s: float = 20.0) -> None:
    """Raises `UntrustedStepError` unless the step at `path`, or the tree that was saved by itself, is exactly what the
    owner of the key has signed. Raises `CorruptCheckpointError` for a step under another number.

    Cost: every file is read once. An item of a step is checked with its step. Raises `StoreError`.
    """
    target = _target(path, timeout_s, of_item=True)
    store = open_store(target.url, deadline_s=timeout_s)
    signature = _signature(store)
    key.require(target.url, signature, _file_digests(target.url, store.list_all("")))
    if not target.manifests():  # they record the number of the step; the directory's name alone is not evidence
        why = "has no digests of its cells, so that `ckptkit sign` did not sign it"
        raise UntrustedStepError(f"{target.url} {why}", path=target.url)


def _signature(store: Store) -> bytes:
    try:
        return store.get(paths.SIGNATURE)
    except FileNotFoundError as error:
        raise UntrustedStepError(f"{store.url} is not signed: it has no {paths.SIGNATURE}", path=store.url) from error


def _is_covered(name: str) -> bool:
    """Whether a signature covers a file of its directory. It leaves out itself, and the marks of items, which a copy
    into a bucket adds and no restore reads."""
    return name != paths.SIGNATURE and not ("/" in name and name.rpartition("/")[2] == paths.COMMIT_MARK)


def _left_out(names: Iterable[str]) -> list[str]:
    """The files that a signature does not cover, as it names them."""
    return sorted({paths.SIGNATURE, *(name for name in names if not _is_covered(name))})


def _target(path: str, timeout_s: float, *, of_item: bool = False) -> _Target:
    url = root_url(path)
    place = Place.open(url, timeout_s=timeout_s)
    names = place.names()
    if not names:
        raise nothing_at(url, "there is nothing; check the path")
    if item_kind(place) is not None:
        above = Place.open(url.rpartition("/")[0], timeout_s=timeout_s)
        in_step = paths.STEP_METADATA in above.names() or paths.COMMIT_MARK in above.names()
        if in_step and not of_item:
            raise nothing_at(url, f"an item of a step is signed with its step: {above.url}")
        if in_step:
            return _Target(place=above, step=paths.step_of_name(above.name))
        if not sidecar_processes(place) and not of_item:
            raise CheckpointError(f"{url} has no digests of its cells: ckptkit did not save it", path=url)
        return _Target(place=place, step=None)
    step = paths.step_of_name(place.name)
    if step is None or not (paths.STEP_METADATA in names or paths.COMMIT_MARK in names):
        raise nothing_at(url, "neither a step nor a tree that was saved by itself; name one step of a root")
    if not is_committed(place):
        raise nothing_at(url, "this step was never committed")
    return _Target(place=place, step=step)


def _sizes(place: Place) -> tuple[int, int]:
    sizes = [size for name, size in sizes_below(place).items() if _is_covered(name)]
    return len(sizes), sum(sizes)


def _file_digests(url: str, names: Sequence[str]) -> dict[str, str]:
    covered = [name for name in names if _is_covered(name)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-sign") as pool:
        found = pool.map(lambda name: digest_of_object(f"{url}/{name}", hashlib.sha256)[1], covered)
        return dict(zip(covered, found, strict=True))

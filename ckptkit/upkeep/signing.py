"""`sign`: a signature over all that a restore of a step believes, and the check of one. See decision 11.

The digests of a save (xxh3-128) show damage. A person who can write into a step can make other bytes with the same
ones. So a signature is over SHA-256: of every file, and of every cell, in records next to the sidecars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.signatures import SigningKey, TrustedKey
from ckptkit.durable.signed_files import is_covered, left_out, read_signature
from ckptkit.errors import CheckpointError, CorruptCheckpointError, UntrustedStepError
from ckptkit.inspection.places import Place, is_committed, item_kind, nothing_at
from ckptkit.inspection.records import FORMAT
from ckptkit.inspection.shares import sidecar_processes
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.cells import cell_ranges, digested_cells
from ckptkit.model.digests import strong_digest_of
from ckptkit.model.handler_files import is_file, with_file_digests
from ckptkit.model.manifest import LeafRecord, Manifest, SaveId, described_items
from ckptkit.store import open_store
from ckptkit.store.roots import root_url
from ckptkit.upkeep.copying import digest_of_object
from ckptkit.verification.durable import cell_check
from ckptkit.verification.pool import MEMORY_BYTES_MAX, CellCheck, Limits, check_cells
from ckptkit.verification.records import Finding, StepProof, Verification, VerifyProgress

_THREADS = 8  # that read files: a disk or a bucket answers several reads at once
_Cell = tuple[int, str, tuple[str, ...], Box]  # manifest, item, leaf, cell
Progress = Callable[[VerifyProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """A step, or a tree that was saved by itself (`step` None), and what its signature covers. `unread` are the items
    of which a trusted restore gives nothing back, as only their handlers read them."""

    path: str
    step: int | None
    save_id: SaveId
    cells: tuple[int, int]  # count, bytes
    files: tuple[int, int]
    key: str
    unread: tuple[str, ...] = ()
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        names = {"path": self.path, "step": self.step, "save_id": asdict(self.save_id), "key": self.key}
        counts = {"cells": self.cells[0], "bytes": self.cells[1], "files": self.files[0], "file_bytes": self.files[1]}
        return {"format": FORMAT, **names, **counts, "unread": self.unread, "done": self.done}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The directory to sign: a step, or a tree by itself, which is its own only item."""

    place: Place
    step: int | None

    @property
    def url(self) -> str:
        return self.place.url

    def reader(self, trusted: TrustedKey | None = None) -> DurableReader:
        if self.step is not None:
            return DurableReader(self.url, step=self.step, trusted=trusted)
        parent, _, name = self.url.rpartition("/")
        return DurableReader(parent, step=None, item=name, trusted=trusted)

    def record_key(self, item: str, process: int) -> str:
        """Where the record with the strong digests of a sidecar goes."""
        above = "" if self.step is None else f"{item}/"
        return f"{above}{paths.SIDECAR_DIR}/{paths.signed_record_name(process)}"


def sign(
    path: str, key: str, *, dry_run: bool = False, timeout_s: float = 20.0, progress: Progress | None = None
) -> Signing:
    """Signs the committed step, or the tree that was saved by itself, at `path`, by the private key in the file `key`.

    Every cell is compared with the digest of the save, so that no damage is signed. Then a record with the SHA-256 of
    the cells is put next to each sidecar, and the signature last: until then the step is not signed. The data is not
    touched. With `dry_run` nothing is read but metadata, and nothing is written. Cost: every byte is read twice, the
    cells and the files.

    Raises `SigningKeyError` for a key that cannot sign, before anything is read. Raises `StepNotFoundError` where no
    step is, `CheckpointError` for a step without digests, `CorruptCheckpointError` for damage, `StoreError`.
    """
    signing_key = SigningKey(key)
    target = _target(path, timeout_s)
    reader = target.reader()
    manifests = reader.manifests(joined=False)  # no damaged one is signed
    if not manifests:
        why = "has no digests of its cells: ckptkit did not save its arrays. `model_signing` signs its files"
        raise CheckpointError(f"{target.url} {why}", path=target.url)
    described = described_items(manifests)
    wanted = list(_cells(manifests))
    found = Signing(
        path=target.url,
        step=target.step,
        save_id=manifests[0].save_id,
        cells=(len(wanted), sum(size for *_, size, _ in wanted)),
        files=_sizes(target.place),
        key=key,
        unread=tuple(name for name in reader.without_sidecars if name not in described),
    )
    if dry_run:
        return found
    store = open_store(target.url, deadline_s=timeout_s)
    for item, record in _records(reader, manifests, target, found, progress):
        store.put(target.record_key(item, record.writer.process), record.to_bytes())
    names = store.list_all("")
    digests = _file_digests(target.url, names)
    store.put(paths.SIGNATURE, signing_key.sign(target.url, digests, left_out(names)))
    return replace(found, files=_sizes(target.place.again()), done=True)


def with_signatures(found: Verification, key: TrustedKey, *, timeout_s: float = 20.0) -> Verification:
    """A verification in which a save that the owner of `key` has not signed as it is now is corrupt, also a proven one.

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


def check_signature(path: str, trusted: TrustedKey, *, timeout_s: float = 20.0) -> None:
    """Raises `UntrustedStepError` unless the step at `path`, or the tree that was saved by itself, is exactly what the
    owner of the key has signed.

    Cost: every file is read once. An item of a step is checked with its step. Raises `StoreError`.
    """
    target = _target(path, timeout_s, of_item=True)
    store = open_store(target.url, deadline_s=timeout_s)
    signature = read_signature(store)
    trusted.require(target.url, signature, _file_digests(target.url, store.list_all("")))
    target.reader(trusted).manifests()  # the number of the step, and that no record is missing


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
    sizes = [size for name, size in place.sizes().items() if is_covered(name)]
    return len(sizes), sum(sizes)


def _cells(manifests: Sequence[Manifest]) -> Iterator[tuple[_Cell, LeafRecord, int, str]]:
    """Every cell: its name, its leaf, its bytes, and the digest of the save."""
    for number, manifest in enumerate(manifests):
        for item, leaf, _, cell, start, stop, digest in digested_cells(manifest):
            yield (number, item, leaf.path, cell), leaf, stop - start, digest


def _records(
    reader: DurableReader, manifests: Sequence[Manifest], target: _Target, found: Signing, progress: Progress | None
) -> Iterator[tuple[str, Manifest]]:
    """The records to be signed, by item: the sidecars, with SHA-256 instead of the digests of the save."""
    strong: dict[_Cell, str] = {}

    def check(name: _Cell, leaf: LeafRecord, size_bytes: int, digest: str) -> CellCheck:
        _, item, _, cell = name

        def keep(data: Any) -> None:
            strong[name] = strong_digest_of(data)

        return cell_check(reader, target.url, item, leaf, cell, size_bytes, digest, keep)

    largest = max((size for _, _, size, _ in _cells(manifests)), default=0)
    limits = Limits(memory_bytes_max=max(MEMORY_BYTES_MAX, 2 * largest), progress=progress)
    checks = (check(*each) for each in _cells(manifests))
    _, damaged = check_cells(checks, found.cells[1], limits, path=target.url, step=found.save_id.step)
    if damaged:
        why = f"{target.url} is damaged and is not signed: {'; '.join(str(each) for each in damaged[:4])}"
        raise CorruptCheckpointError(why, step=target.step, path=target.url)
    renewed = [_renewed(number, manifest, strong) for number, manifest in enumerate(manifests)]
    files = {each.writer.process: with_file_digests(each).inline for each in renewed if _is_of_files(each)}
    for each in renewed:
        if not _is_of_files(each):
            (item,) = each.arrays  # a sidecar is of the item that it lies in
            yield item, replace(each, inline=files.get(each.writer.process, each.inline))


def _renewed(number: int, manifest: Manifest, strong: dict[_Cell, str]) -> Manifest:
    arrays = {
        item: tuple(
            replace(
                leaf,
                boxes=tuple(
                    replace(
                        record,
                        digests=tuple(
                            strong[number, item, leaf.path, cell] for cell, _, _ in cell_ranges(record, leaf)
                        ),
                    )
                    for record in leaf.boxes
                ),
            )
            for leaf in leaves
        )
        for item, leaves in manifest.arrays.items()
    }
    return replace(manifest, arrays=arrays)


def _is_of_files(manifest: Manifest) -> bool:
    """Whether it is one of those that `manifests` adds for the large files of handlers."""
    return any(is_file(leaf) for leaves in manifest.arrays.values() for leaf in leaves)


def _file_digests(url: str, names: Sequence[str]) -> dict[str, str]:
    covered = [name for name in names if is_covered(name)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckptkit-sign") as pool:
        found = pool.map(lambda name: digest_of_object(f"{url}/{name}", hashlib.sha256)[1], covered)
        return dict(zip(covered, found, strict=True))

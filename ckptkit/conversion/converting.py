"""`convert`: the tensors of any checkpoint into another format, within a memory budget, and whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptkit.conversion.flat_files import FlatFile, FlatFormat, plan_file, write_frame, write_tensor
from ckptkit.conversion.mapping import MapRule, Tensors, cast, mapped, tensors_bytes
from ckptkit.conversion.orbax_step import write_step
from ckptkit.errors import CheckpointError, StoreFullError
from ckptkit.formats.safetensors import INDEX, SUFFIX
from ckptkit.formats.tensors import MEMORY_BYTES, Checkpoint
from ckptkit.store.local import sync_directory
from ckptkit.store.roots import is_remote

Target = Literal["orbax", "safetensors", "hf", "npz", "torch"]

SHARD_BYTES = 5 << 30  # Hugging Face's own default
_PROGRESS_BYTES = 512 << 20  # written between two records of how far it is; what is lost by a crash at most
_RECORD = "progress.json"

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertPlan:
    """What will be written, in order: the same for a dry run."""

    source: str
    target: str
    to: Target
    tensors: Tensors
    files: tuple[FlatFile, ...]  # none for Orbax
    notes: tuple[str, ...]
    written_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "format": 1,
            "source": self.source,
            "target": self.target,
            "to": self.to,
            "bytes": self.written_bytes,
            "files": [{"name": file.name, "bytes": file.size} for file in self.files],
            "tensors": [
                {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
                for name, tensor in self.tensors.items()
            ],
            "notes": list(self.notes),
        }


def plan_convert(
    source: Checkpoint,
    target: str,
    to: Target,
    *,
    rules: Sequence[MapRule] = (),
    casts: Iterable[tuple[str, str]] = (),
    shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = MEMORY_BYTES,
) -> ConvertPlan:
    """What `convert` would write; nothing is.

    Raises `CheckpointError` for rules, names or chunks that cannot be, and for a target that is there already or
    is not local.
    """
    if is_remote(target):
        raise CheckpointError(f"{target} is no local path; convert to a disk first", path=target)
    target = os.path.abspath(target.removeprefix("file://"))
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; name another target, or move it away", path=target)
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{os.path.dirname(target)} is no directory; make it first", path=target)
    tensors = cast(mapped(source.by_name(), rules), casts)
    if not tensors:
        raise CheckpointError(f"{source.path} has no tensor that could be converted", path=source.path)
    for tensor in tensors.values():
        tensor.block_shape(memory_bytes)  # raises for a chunk that the budget does not allow
    files: tuple[FlatFile, ...] = ()
    if to == "hf":
        shards = _shards(tensors, shard_bytes)
        names = [f"model-{at + 1:05d}-of-{len(shards):05d}{SUFFIX}" for at in range(len(shards))]
        files = tuple(plan_file(name, "safetensors", shard) for name, shard in zip(names, shards, strict=True))
    elif to != "orbax":
        flat: FlatFormat = to
        files = (plan_file(os.path.basename(target), flat, tensors),)
    return ConvertPlan(
        source=source.path,
        target=target,
        to=to,
        tensors=tensors,
        files=files,
        notes=tuple(_notes(source, tensors, to)),
        written_bytes=sum(file.size for file in files) or tensors_bytes(tensors),
    )


def convert(
    source: Checkpoint,
    plan: ConvertPlan,
    *,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes what the plan says. The target is not there until all of it is written and synced: then one rename.

    Bits are those of the source, except where a cast was asked for. An interrupted run leaves a directory
    `.<target>.ckptkit-part` beside the target, which `resume` continues and another run deletes; one to Orbax is begun
    anew. Cost: the source is read once, unless its chunks lie across the target's; at most `memory_bytes` of array data
    are held.

    Raises `StoreFullError` before anything is written, `CheckpointError` where `resume` finds another plan's work, and
    what reading raises.
    """
    target = Path(plan.target)
    part = target.with_name(f".{target.name}.ckptkit-part")
    done = _begun(part, _fingerprint(plan, source), resume)
    free = shutil.disk_usage(target.parent).free
    there = sum(file.stat().st_blocks * 512 for file in part.rglob("*") if file.is_file())
    if plan.written_bytes > free + there:
        raise StoreFullError(
            f"{target.parent} has {free} bytes free, and {plan.written_bytes} are needed; nothing was written",
            path=str(target),
        )
    if plan.to == "orbax":
        shutil.rmtree(part / target.name, ignore_errors=True)
        made = write_step(plan.tensors, part / target.name, memory_bytes=memory_bytes, progress=progress)
    else:
        made = _write_files(plan, part, done, memory_bytes, progress)
    _commit(made, target, part)


def _write_files(plan: ConvertPlan, part: Path, done: list[str], memory_bytes: int, progress: Progress | None) -> Path:
    written, recorded, finished = 0, 0, set(done)
    for file in plan.files:
        fd = os.open(part / file.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, max(file.size, os.fstat(fd).st_size))
            for member in file.members:
                if member.tensor is None:
                    continue
                if member.tensor not in finished:
                    write_tensor(fd, member, plan.tensors[member.tensor], memory_bytes)
                    done.append(member.tensor)
                written += member.size
                if progress is not None:
                    progress(written, plan.written_bytes)
                if written - recorded >= _PROGRESS_BYTES:
                    os.fdatasync(fd)
                    _record(part, done)
                    recorded = written
            write_frame(fd, file)
            os.fsync(fd)
        finally:
            os.close(fd)
        _record(part, done)
    if plan.to != "hf":
        return part / plan.files[0].name
    mapping = {member.tensor: file.name for file in plan.files for member in file.members if member.tensor}
    size = sum(tensor.nbytes for tensor in plan.tensors.values())
    _write_synced(part / f"model{INDEX}", {"metadata": {"total_size": size}, "weight_map": mapping})
    (part / _RECORD).unlink()
    return part


def _commit(made: Path, target: Path, part: Path) -> None:
    sync_directory(made.parent)
    if made.is_dir():
        sync_directory(made)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} was made meanwhile; what was written stands in {part}", path=str(target))
    os.rename(made, target)
    sync_directory(target.parent)
    shutil.rmtree(part, ignore_errors=True)


def _begun(part: Path, fingerprint: str, resume: bool) -> list[str]:
    """The names of the tensors that an earlier run of the same plan has written."""
    if resume and part.is_dir():
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads((part / _RECORD).read_text())
            if known["plan"] != fingerprint:
                raise CheckpointError(
                    f"{part} is the work of another conversion; leave --resume out to begin anew", path=str(part)
                )
            return [str(name) for name in known["done"]]
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    _write_synced(part / _RECORD, {"plan": fingerprint, "done": []})
    return []


def _record(part: Path, done: list[str]) -> None:
    known = json.loads((part / _RECORD).read_text())
    _write_synced(part / _RECORD, {**known, "done": done})


def _write_synced(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _fingerprint(plan: ConvertPlan, source: Checkpoint) -> str:
    """Of the plan and of the files that it reads: where one changed, what was written before is of no use."""
    described = plan.to_json()
    stamps = []
    if not is_remote(source.path):
        root = Path(source.path)
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps([described, stamps]).encode()).hexdigest()


def _shards(tensors: Tensors, shard_bytes: int) -> list[dict[str, Any]]:
    """In order, as many to a file as fit; one that is larger has a file of its own."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _notes(source: Checkpoint, tensors: Tensors, to: Target) -> list[str]:
    """What does not come along, or comes along in other words."""
    notes = [f"left out: {item} ({leaf.kind} {leaf.name})" for item, leaf in source.others if to != "orbax"]
    notes += [f"left out: item {name}, which is no array" for name in source.facts.values if to != "orbax"]
    keys = [name for name, tensor in tensors.items() if tensor.leaf.key_impl]
    if keys and to != "orbax":
        notes.append(f"PRNG keys are stored as their key data, with a note of their kind: {', '.join(keys[:5])}")
    if to == "hf" and any(re.search(r"\s", name) for name in tensors):
        notes.append("a name has a space in it, which Hugging Face's models have not")
    return notes

"""`convert`: the tensors of any checkpoint into another format, within a memory budget, and whole or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

from ckptkit.conversion.casting import Cast, notes_of
from ckptkit.conversion.destination import (
    Destination,
    begin,
    require_orbax_target,
    require_outside,
    require_unchanged,
    target_url,
)
from ckptkit.conversion.flat_files import FlatFile, FlatFormat, plan_file, require_readable, write_frame, write_tensor
from ckptkit.conversion.item_writer import require_tree, write_step
from ckptkit.conversion.journal import Journal, fingerprint
from ckptkit.conversion.mapping import MapRule, Tensors, cast, mapped
from ckptkit.conversion.passes import BytesProgress, counted
from ckptkit.conversion.quantized_values import DTYPES, LeafError
from ckptkit.conversion.quantizing import (
    Quantization,
    QuantizedWeights,
    dequantized,
    optimizer_leaves,
    quantization_config,
    quantized,
)
from ckptkit.conversion.roots import require_fitting
from ckptkit.conversion.scales import CONFIG, config_blocks, config_directory, model_config, plain_advice
from ckptkit.durable.sidecars import marker_text
from ckptkit.errors import CheckpointError
from ckptkit.formats.safetensors import INDEX, SUFFIX
from ckptkit.formats.tensors import MEMORY_BYTES, Checkpoint, block_bytes
from ckptkit.inspection.roots import require_free_name
from ckptkit.model.paths import is_utf8
from ckptkit.store.backends import properties_of
from ckptkit.util.disk_file import FileWrites
from ckptkit.util.words import first_of

TargetFormat = Literal["orbax", "safetensors", "hf", "npz", "torch"]

SHARD_BYTES = 5 << 30  # Hugging Face's own default
_NAMED = 5  # leaves in a note
_PROGRESS_BYTES = 128 << 20  # written between two records of the progress; a crash loses at most this much


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Counts of the changed values, complete once they are written: weights of `--quantize`, leaves of casts."""

    quantization: QuantizedWeights | None = None
    casts: Mapping[str, Cast] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """The values that casts have lost so far."""
        return notes_of(self.casts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertPlan:
    """The tensors that will be written, in order. A dry run makes the same plan.

    `made_by` names the inputs that names and shapes do not show: rules, casts, the layout of cells. Resumed work must
    have the same. `measured` counts while the tensors are read.
    """

    source: str
    target: str
    to: TargetFormat
    tensors: Tensors
    files: tuple[FlatFile, ...]  # none for Orbax
    notes: tuple[str, ...]
    made_by: str = ""
    measured: Measured = field(default_factory=Measured)

    @property
    def written_bytes(self) -> int:
        """Bytes of the files, or of the tensors if the target is Orbax's."""
        return sum(file.size for file in self.files) or sum(each.nbytes for each in self.tensors.values())

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
    to: TargetFormat,
    *,
    rules: Sequence[MapRule] = (),
    casts: Iterable[tuple[str, str]] = (),
    quantize: Quantization | None = None,
    shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    timeout_s: float = 20.0,
) -> ConvertPlan:
    """The plan of `convert`; writes nothing.

    Raises `CheckpointError` for impossible rules, names or chunks, for an existing local target or one inside the
    source, and for an Orbax target in the root of a run. Requests to a bucket are retried for `timeout_s`. Raises
    `StepNotFoundError` for a rule or cast that matches no leaf.
    """
    target, casts = target_url(target), tuple(casts)
    require_outside(target, source.sources, timeout_s=timeout_s)
    if to == "orbax":
        require_orbax_target(target)
        require_fitting(target, timeout_s=timeout_s)
    else:
        require_free_name(target, timeout_s=timeout_s)
    tensors, quantization, blocks = source.by_name(), None, None
    if quantize is not None and quantize.to == "none":
        blocks = config_blocks(model_config(source, timeout_s))
        tensors = dequantized(tensors, blocks, config_directory(source))
    tensors = cast(mapped(tensors, rules), casts, advice=plain_advice([source]))
    casts_made = {name: tensor.fetch for name, tensor in tensors.items() if isinstance(tensor.fetch, Cast)}
    left_out: list[str] = []
    if quantize is not None:
        config = _model_config(source, timeout_s) if to == "hf" else None
        left_out = optimizer_leaves(tensors, quantize)
        tensors, quantization = _quantized(tensors, quantize, config, memory_bytes)
    if not tensors:
        raise CheckpointError(f"{source.path} has no tensor that could be converted", path=source.path)
    for name, tensor in tensors.items():
        if not is_utf8(name):
            raise CheckpointError(f"{name!r:.60} is not a name in UTF-8; rename it with --map")
        tensor.block_shape(memory_bytes)  # raises for a chunk that the budget does not allow
        if tensor.dtype.itemsize > (16 if tensor.dtype.kind == "c" else 8):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which is another one on every machine, and which no format can give back; "
                "give --dtype, or leave it out with --map"
            )
    if to == "orbax":
        require_tree(tensors)
    files: tuple[FlatFile, ...] = ()
    if to == "hf":
        shards = _shards(tensors, shard_bytes)
        names = [f"model-{at + 1:05d}-of-{len(shards):05d}{SUFFIX}" for at in range(len(shards))]
        files = tuple(plan_file(name, "safetensors", shard) for name, shard in zip(names, shards, strict=True))
        require_readable(f"model{INDEX}", len(_index(files, tensors)))
    elif to != "orbax":
        flat: FlatFormat = to
        files = (plan_file(os.path.basename(target), flat, tensors),)
    return ConvertPlan(
        source=source.path,
        target=target,
        to=to,
        tensors=tensors,
        files=files,
        notes=(*_notes(source, tensors, to, quantization), *_not_quantised(left_out)),
        # Orbax's cells are as large as a block may be; of a flat file whole tensors are noted as done.
        made_by=repr((list(rules), casts, str(quantize), block_bytes(memory_bytes) if to == "orbax" else None, blocks)),
        measured=Measured(quantization=quantization, casts=casts_made),
    )


def convert(
    source: Checkpoint,
    plan: ConvertPlan,
    *,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    progress: BytesProgress | None = None,
    timeout_s: float = 60.0,
    beside: Mapping[str, bytes] | None = None,
) -> Mapping[str, LeafError | None]:
    """Writes what the plan lists. The target appears by one rename, after all of it is written and synced.

    Returns the error of each quantised leaf. Other bits are those of the source, except where a cast was asked for. A
    directory of `hf` also has the small files `beside`, such as config.json. An interrupted run leaves a directory
    `.<target>.ckptkit-part` next to the target, which `resume` continues and another run deletes; the error has a note
    about it. If a local source is damaged, or changes while it is read, nothing is kept. In a bucket, Orbax's items are
    written in place, and become checkpoints with the marker. Files are made on a local disk, one at a time, and
    uploaded.

    Cost: the source is read once, or more often if its chunks overlap several of the target's. Weights that are
    quantised are read twice. At most `memory_bytes` of array data are held. Requests to a bucket that does not answer
    are retried for `timeout_s`.

    Raises `StoreFullError` before anything is written, `CheckpointError` where `resume` finds another plan's work or
    another process makes the same target, and what reading raises.
    """
    target = Destination(plan.target, timeout_s=timeout_s)
    target.require_room(plan.written_bytes, max((file.size for file in plan.files), default=0))
    now = partial(fingerprint, {**plan.to_json(), "made_by": plan.made_by}, source.sources)
    known_by = now()
    with target.alone():
        begin(target, known_by, resume=resume)
        with target.kept(after_damage=properties_of(source.path).round_trips):
            if plan.to == "orbax":
                write_step(plan.tensors, target, memory_bytes=memory_bytes, progress=progress)
            else:
                _write_files(plan, target, memory_bytes, progress, beside or {})
            if not source.proven:
                require_unchanged(known_by, now, source.path)
            target.commit(marker_text(plan.target) if plan.to == "orbax" else None)
    quantization = plan.measured.quantization
    return quantization.errors if quantization is not None else {}


def _write_files(
    plan: ConvertPlan,
    target: Destination,
    memory_bytes: int,
    progress: BytesProgress | None,
    beside: Mapping[str, bytes],
) -> None:
    journal = target.journal
    finished = {name for entry in journal.entries() for name in entry}
    count = counted(plan.written_bytes, progress)
    uploads = not target.properties.file_system
    for file in plan.files:
        named = [member for member in file.members if member.tensor is not None]
        if uploads and all(member.tensor in finished for member in named):
            count(sum(member.size for member in named))  # a file that was uploaded
            continue
        with target.file(file.name if plan.to == "hf" else None) as made:
            os.ftruncate(made.fileno(), max(file.size, os.fstat(made.fileno()).st_size))
            notes = _Notes(journal, made.fileno(), synced=not uploads)
            known = set() if uploads else finished
            # The upload reads the file again at once, from the page cache.
            writes = FileWrites(made.fileno(), None if uploads else made.name)
            try:
                sums = _write_tensors(plan, file, writes, known, notes, memory_bytes, count)
            finally:
                writes.close()
                notes.close()
            write_frame(made.fileno(), file, sums)
            os.fsync(made.fileno())
        journal.add([member.tensor for member in named])
    if plan.to == "hf":
        files = dict(beside)
        quantization = plan.measured.quantization
        if quantization is not None and quantization.config is not None:
            config = {**json.loads(files.get(CONFIG, b"{}")), **quantization.config}
            files[CONFIG] = json.dumps(config, indent=1).encode()
        target.put([*files.items(), (f"model{INDEX}", _index(plan.files, plan.tensors))])


def _index(files: Sequence[FlatFile], tensors: Tensors) -> bytes:
    """The index of a model in several files."""
    mapping = {member.tensor: file.name for file in files for member in file.members if member.tensor is not None}
    size = sum(tensor.nbytes for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": size}, "weight_map": mapping}, indent=1).encode()


def _write_tensors(
    plan: ConvertPlan,
    file: FlatFile,
    writes: FileWrites,
    finished: set[str],
    notes: _Notes,
    memory_bytes: int,
    count: Callable[[int], None],
) -> dict[str, int]:
    """Writes the tensors of a file that are not `finished`; returns the checksums that `write_tensor` gives."""
    sums: dict[str, int] = {}
    for member in file.members:
        if member.tensor is None:
            continue
        if member.tensor not in finished:
            found = write_tensor(writes, file, member, plan.tensors[member.tensor], memory_bytes)
            sums.update({} if found is None else {member.tensor: found})
            notes.add(member.tensor, member.size)
        count(member.size)
    return sums


@final
class _Notes:
    """Syncs a file now and then, in the background, and then notes which tensors are in it.

    The next portion is made while the disk is busy with the last one: a single sync at the end would wait for all.
    """

    def __init__(self, journal: Journal, fd: int, *, synced: bool):
        self._journal = journal
        self._fd = fd
        self._synced = synced
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-sync")
        self._under_way: list[Future[None]] = []
        self._fresh: list[str] = []
        self._fresh_bytes = 0

    def add(self, name: str, size: int) -> None:
        """A tensor is written."""
        self._fresh.append(name)
        self._fresh_bytes += size
        if self._synced and self._fresh_bytes >= _PROGRESS_BYTES:
            self._under_way.append(self._syncing.submit(self._safe, self._fresh))
            self._fresh, self._fresh_bytes = [], 0

    def close(self) -> None:
        """Waits; raises what a sync has raised."""
        self._syncing.shutdown()
        for each in self._under_way:
            each.result()

    def _safe(self, names: list[str]) -> None:
        os.fdatasync(self._fd)
        self._journal.add(names)


def _quantized(
    tensors: Tensors, wanted: Quantization, config: Mapping[str, Any] | None, memory_bytes: int
) -> tuple[Tensors, QuantizedWeights]:
    """The tensors with the wanted weights quantised; `config` is that of the model for Hugging Face's tools, without
    its old quantisation."""
    if wanted.to == "none":
        return tensors, QuantizedWeights(by_name={}, config=config or None)
    made, weights = quantized(tensors, wanted, DTYPES[wanted.to], memory_bytes, for_hf=config is not None)
    if config is not None:
        config = {**config, "quantization_config": quantization_config(tensors, weights, wanted)}
    return made, QuantizedWeights(by_name=weights, config=config)


def _model_config(source: Checkpoint, timeout_s: float) -> dict[str, Any]:
    """The `config.json` of a source of Hugging Face's, without its quantisation; empty where it has none."""
    if source.facts.kind != "directory":
        return {}
    found = model_config(source, timeout_s)
    return {key: value for key, value in found.items() if key != "quantization_config"}


def _shards(tensors: Tensors, shard_bytes: int) -> list[dict[str, Any]]:
    """The tensors of each file, in order: as many as fit. A larger tensor has a file of its own."""
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def no_arrays(source: Checkpoint) -> list[str]:
    """Descriptions of what a checkpoint holds besides tensors: leaves (text, None, empty containers), small items."""
    names = [f"{leaf.name} ({leaf.kind})" for _, leaf in source.others]
    are = "are not arrays" if len(names) > 1 else "is not an array"
    leaves = f"{first_of(names, _NAMED)}, which {are}"
    small = [f"item {name}, which is not an array" for name in source.facts.values if name not in source.facts.unread]
    return [*[leaves] * bool(names), *small, *map(_unread, source.facts.unread)]


def not_read(sources: Iterable[Checkpoint]) -> list[str]:
    """The items of checkpoints that only their own handlers read: they may have arrays."""
    return [f"{source.path}: {_unread(name)}" for source in sources for name in source.facts.unread]


def _unread(name: str) -> str:
    return f"item {name}, which only its own handler reads"


def _notes(source: Checkpoint, tensors: Tensors, to: TargetFormat, quantization: QuantizedWeights | None) -> list[str]:
    """The parts that are left out, or written in another form."""
    notes = [f"left out: {each}" for each in no_arrays(source)]
    notes += source.facts.notes if source.format in ("safetensors", "npz") else ()
    keys = [name for name, tensor in tensors.items() if tensor.leaf.key_impl]
    if keys and to != "orbax":
        notes.append(f"PRNG keys are stored as their key data, with a note of their kind: {', '.join(keys[:5])}")
    if to == "hf" and any(re.search(r"\s", name) for name in tensors):
        notes.append("a name has a space in it, which Hugging Face's models have not")
    if quantization is not None and quantization.config is not None and "architectures" not in quantization.config:
        notes.append(f"{CONFIG} has quantization_config alone: add the model's own keys")
    return notes


def _not_quantised(leaves: Sequence[str]) -> list[str]:
    why = "an optimizer's state, which only a pattern of --quantize changes"
    return [f"left as floats: {first_of(leaves, _NAMED)} ({why})"] * bool(leaves)

"""`reshard`: an Orbax checkpoint in other chunks, by one process or by all of a job together; whole or not at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ckptkit.conversion.destination import (
    Destination,
    begin,
    require_orbax_target,
    require_outside,
    require_unchanged,
    target_url,
)
from ckptkit.conversion.item_writer import ItemWriter, Work, works_of
from ckptkit.conversion.journal import data_prefix, fingerprint
from ckptkit.conversion.passes import BytesProgress, counted
from ckptkit.conversion.resharding.meshes import Mesh, Spec
from ckptkit.conversion.resharding.planning import LeafPlan, ReshardPlan, SpecRule, make_plan, plan_leaves
from ckptkit.conversion.resharding.source import ReshardSource, SourceItem
from ckptkit.conversion.roots import require_fitting
from ckptkit.durable.cells.writer import can_hold, merge_processes, process_directory
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.orbax.files import process_files, shardings_text
from ckptkit.durable.orbax.host_shards import HostShards
from ckptkit.durable.sidecars import marker_text
from ckptkit.durable.write_part import item_mark
from ckptkit.errors import CheckpointError
from ckptkit.formats.tensors import MEMORY_BYTES
from ckptkit.job.coordination import Coordinator, LocalCoordinator
from ckptkit.job.vote import voted
from ckptkit.model import paths
from ckptkit.model.boxes import CELL_BYTES, Box
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.model.paths import OCDBT_MANIFEST, SHARDINGS, TREE_METADATA
from ckptkit.store.backends import properties_of

_REPLACED = frozenset({TREE_METADATA, OCDBT_MANIFEST, SHARDINGS, paths.COMMIT_MARK})


def plan_reshard(
    source: ReshardSource,
    target: str,
    meshes: Sequence[Mesh],
    *,
    rules: Sequence[SpecRule] = (),
    like: Mapping[str, Spec] | None = None,
    chunk_bytes: int = CELL_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    timeout_s: float = 20.0,
) -> ReshardPlan:
    """The plan of `reshard`. Raises `CheckpointError` for a mesh or spec that does not fit, for an existing local
    target or one inside the source, and for a target in the root of a run. Requests to a bucket are retried for
    `timeout_s`."""
    url = target_url(target)
    require_outside(url, source.opened.sources, timeout_s=timeout_s)
    require_orbax_target(url)
    is_step = source.opened.facts.kind == "step"
    require_fitting(url, source.save_id if is_step else None, timeout_s=timeout_s)
    records = {item.name: item.records for item in source.items}
    for record in (record for leaves in records.values() for record in leaves):
        if not can_hold(record.dtype):
            raise CheckpointError(f"{record.name} is {record.dtype}, which TensorStore's zarr 2 cannot hold")
    leaves = plan_leaves(records, meshes, rules=rules, like=like, chunk_bytes=chunk_bytes, memory_bytes=memory_bytes)
    notes = [
        f"item {item.name} has text or other leaves that a record of ours has no place for: it gets no digests"
        for item in source.items
        if not item.provable
    ]
    notes += [
        f"item {name} is the state of a data iterator of {len(source.small)} processes: its files come along, and "
        f"ckptkit's manager takes it only of a reshard by {len(source.small)} processes"
        for name in source.iterators
        if len(source.small) > 1
    ]
    return make_plan(source.opened.path, url, meshes, leaves, notes)


def reshard(
    source: ReshardSource,
    plan: ReshardPlan,
    *,
    memory_bytes: int = MEMORY_BYTES,
    resume: bool = False,
    coordinator: Coordinator | None = None,
    progress: BytesProgress | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Writes what the plan lists. Returns on every process of `coordinator`'s job, once the target is committed.

    Bits are those of the source; for a step of ckptkit every cell is verified when read. Every written cell gets a
    digest. The processes divide the blocks evenly by bytes, each writes its own database, and process 0 joins them and
    commits: on a disk by a rename, in a bucket by the marker. `resume` continues an interrupted run with the same
    number of processes; a run without it deletes those files. Cost: `plan.read_bytes` are read and `plan.written_bytes`
    written, over all processes; each holds at most `memory_bytes` of array data. Requests to a bucket that does not
    answer are retried for `timeout_s`.

    Raises `CheckpointError` where processes have different plans, or another job makes the same target,
    `TransientStoreError` or `CoordinationError` where another process failed, and what reading and writing raise.
    """
    coordinator = coordinator or LocalCoordinator()
    target = Destination(plan.target, coordinator.process, timeout_s=timeout_s)
    now = partial(fingerprint, {**plan.to_json(), "processes": coordinator.count}, [plan.source])
    known_by = now()

    def start(seen: list[str]) -> str:
        if len(set(seen)) > 1:
            raise CheckpointError(f"the processes see {plan.source} in different ways; is it on a shared file system?")
        target.require_room(plan.written_bytes)
        held.enter_context(target.alone())
        return begin(target, known_by, resume=resume)

    with ExitStack() as held:
        target.journal.work = coordinator.agree("reshard-begun", known_by, start)
        with target.kept(after_damage=coordinator.count > 1 or properties_of(plan.source).round_trips):
            unchanged = partial(require_unchanged, known_by, now, plan.source)
            with voted(coordinator, "reshard-written", rejecting=()):
                _write_part(source, plan, target, memory_bytes, coordinator, progress)
            finish = partial(_finish, source, plan, target, coordinator.count, unchanged)
            coordinator.agree("reshard-finished", None, lambda _: finish())


def share_of(sizes: Sequence[int], process: int, count: int) -> range:
    """Which of the blocks a process writes: a run of them, so that all have about as many bytes. Pure."""
    total, before = sum(sizes), 0
    mine = []
    for at, size in enumerate(sizes):
        middle = before + size / 2
        if min(count - 1, int(middle * count / total) if total else 0) == process:
            mine.append(at)
        before += size
    return range(mine[0], mine[-1] + 1) if mine else range(0)


def _write_part(
    source: ReshardSource,
    plan: ReshardPlan,
    target: Destination,
    memory_bytes: int,
    coordinator: Coordinator,
    progress: BytesProgress | None,
) -> None:
    """Everything that this process writes: its blocks of every item, and its records."""
    noted = list(target.journal.entries())
    works = _works(source, plan, memory_bytes)
    chosen = share_of(
        [work.block.size * work.record.itemsize for _, work in works], coordinator.process, coordinator.count
    )
    mine = [works[at] for at in chosen]
    count = counted(sum(work.block.size * work.record.itemsize for _, work in mine), progress)
    for item in source.items:
        above = _key(source, item)
        own_part = process_directory(above.rstrip("/"), coordinator.process).lstrip("/")
        prefix = above if coordinator.count == 1 else f"{own_part}/"
        writer = ItemWriter(target, prefix, item.name, noted, memory_bytes, describes=coordinator.process == 0)
        leaves = [leaf for leaf in plan.leaves if leaf.item == item.name]
        records = [leaf.target(plan.meshes[0]) for leaf in leaves]
        own = [work for name, work in mine if name == item.name]
        writer.write(records, own, count)
        blocks: dict[str, list[Box]] = {}
        for work in own:
            blocks.setdefault(work.record.name, []).append(work.block)
        proven = [writer.written(record, blocks.get(record.name, ())) for record in records]
        is_step = source.opened.facts.kind == "step"
        name = item.name if is_step else plan.target.rpartition("/")[2]  # of its directory
        small = source.small_of(coordinator.process, coordinator.count)
        sidecar = Manifest(
            save_id=_identity(source, plan),
            writer=Writer(process=coordinator.process, count=coordinator.count, host=socket.gethostname()),
            slot="",
            arrays={name: tuple(proven)},
            inline=small if item.structure is None else {**small, name: item.structure},
        )
        shards = [HostShards(record=record, blocks=[]) for record in proven if record.kind == "jax"]
        files = process_files(shards, coordinator.process, sidecar.to_bytes() if item.provable else None)
        if coordinator.process == 0 and (shardings := shardings_text(shards)) is not None:
            files[SHARDINGS] = shardings.encode()
        target.put((f"{above}{file}", data) for file, data in files.items())


def _works(source: ReshardSource, plan: ReshardPlan, memory_bytes: int) -> list[tuple[str, Work]]:
    """The blocks of all leaves in the plan's order, the same on every process."""
    tensors = {(item.name, tensor.leaf.path): tensor for item in source.items for tensor in item.tensors}
    return [
        (leaf.item, work)
        for leaf in plan.leaves
        for work in works_of(
            tensors[leaf.item, leaf.record.path],
            leaf.target(plan.meshes[0]),
            memory_bytes=memory_bytes,
            block=leaf.block,
        )
    ]


def _finish(
    source: ReshardSource, plan: ReshardPlan, target: Destination, count: int, unchanged: Callable[[], None]
) -> None:
    """Joins the parts, copies the items that are not arrays, and commits, if the source is unchanged."""
    store = target.store()
    provable = all(item.provable for item in source.items)
    for item in source.items:
        above = _key(source, item)
        directory = f"{target.url}/{above}".rstrip("/")
        if count > 1:
            if not target.properties.atomic_rename:  # joined by a run that was interrupted before the marker
                store.delete(f"{above}{OCDBT_MANIFEST}")
            merge_processes(directory, count, DurableProfile(), data_prefix=data_prefix(target.journal.work))
        leaves = [leaf for leaf in plan.leaves if leaf.item == item.name]
        text = json.dumps(_described(item.described, leaves))
        target.put([(f"{above}{TREE_METADATA}", text.encode())])
        target.put(_copies(item.place, above, _small_files(item.place)))
        if above:  # what Orbax leaves in each item that it has finished
            target.put([item_mark(item.name, plan.target)])
    if source.opened.facts.kind == "item":
        unchanged()
        target.commit(marker_text(plan.target))
        return
    for other in source.others:
        keys = [key.removeprefix(f"{other.name}/") for key in source.place.store.list_all(other.name)]
        target.put(_copies(other, f"{other.name}/", keys))
    target.put(_copies(source.place, "", _small_files(source.place)))
    unchanged()
    target.commit(marker_text(plan.target, _identity(source, plan) if provable else None))


def _identity(source: ReshardSource, plan: ReshardPlan) -> SaveId:
    """The save that the source is, under the number that the target's name has: readers compare the two."""
    return replace(source.save_id, step=paths.step_of_name(plan.target.rpartition("/")[2]) or 0)


def _described(described: Any, leaves: Iterable[LeafPlan]) -> Any:
    """Orbax's `_METADATA` with the new chunks: the tree stays as it was."""
    cells = {leaf.record.path: leaf.cell for leaf in leaves}
    nodes = {}
    for key, node in described["tree_metadata"].items():
        path = tuple(str(part["key"]) for part in node["key_metadata"])
        value = dict(node["value_metadata"])
        if path in cells and value.get("write_shape") is not None:
            value["write_shape"] = list(cells[path])
        nodes[key] = {**node, "value_metadata": value}
    stored = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return {**described, "tree_metadata": nodes, **stored}


def _small_files(place: Place) -> list[str]:
    """The files right in a directory that are not written anew: texts of a tree, records of other tools."""
    return [name for name in place.names() if not name.endswith("/") and name not in _REPLACED]


def _copies(place: Place, above: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        data = place.read(name)
        if data is not None:
            yield f"{above}{name}", data


def _key(source: ReshardSource, item: SourceItem) -> str:
    """The prefix of the names of an item's files in the target."""
    return f"{item.name}/" if source.opened.facts.kind == "step" else ""

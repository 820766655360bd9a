"""The end of a run that restored its last step from fast tiers: the slots bring the step to the durable tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.orbax.manager import DEFAULT_ITEM, METRICS_ITEM
from ckptkit.durable.orbax.shardings import sharding_of_text
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.inspection.shares import read_share
from ckptkit.manager.build import Components
from ckptkit.manager.run_account import is_unwinding
from ckptkit.manager.save import refuse_empty_arrays
from ckptkit.model.boxes import Box, boxes_by_process
from ckptkit.model.manifest import LeafRecord, Manifest, ManifestText, SaveId, custom_digest
from ckptkit.model.tiers import DURABLE
from ckptkit.restore.request import stored_tree
from ckptkit.save.outcomes import describe
from ckptkit.save.records import Save, SealedSave, Ticket
from ckptkit.slots.arena import Slot
from ckptkit.slots.reader import manifest_name_of
from ckptkit.snapshot.describe import Description, LeafSource, SlotExtent, leaves_by_path
from ckptkit.snapshot.items import SaveItems
from ckptkit.snapshot.small_items import captured_again
from ckptkit.util import clock
from ckptkit.verification.pool import Limits
from ckptkit.verification.slots import prove_share

_log = logging.getLogger("ckptkit")
_CHANNEL = "close-durable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """This process's share of the step, as the thread of the durable tier takes it."""

    save: Save
    slot: Slot  # a view of its own: the arena's slot is leased meanwhile
    sealed: SealedSave


class LastStep:
    """Belongs to the caller's thread; called by all processes together, when no save is in flight."""

    def __init__(self, components: Components):
        self._components = components
        self._coordinator = components.job.coordinator
        self._history, self._pipeline = components.history, components.pipeline

    def make_durable(self, stall_s: float) -> bool:
        """Flushes the restored step from the slots to the durable tier, if the run saved nothing after it and the tier
        lacks a step that was due there. Process 0 logs a WARNING if the step is still missing then. Raises nothing.

        Every process must hold its own share, intact, of a save by as many processes with the same shardings and
        without custom metadata. Waits for the other processes for `timeout_s` at most, and for the durable tier until
        nothing advanced for `stall_s`: returns False if it hangs.
        """
        base, advances = self._history.branch.base, True
        if base is None or not self._history.decider.owes_durable:
            return True
        under_way = self._pipeline.under_way
        with ExitStack() as leases:
            under_way.begin(base.step, frozenset({DURABLE}))
            share, reason = self._agree(base, leases)
            if share is not None:
                advances = self._flush(share, stall_s)
                reason = None if advances else f"the durable tier did not advance for {stall_s:g} s"
            else:
                under_way.end(base.step)
        self._warn_if_missing(base, reason)
        return advances

    def _missing_from(self, base: SaveId) -> list[str]:
        """The fast tiers that hold the step; none where the durable tier has it, or a newer step."""
        every = self._history.ledger.every()
        if any(DURABLE in record.tiers and (record.save_id == base or record.save_id > base) for record in every):
            return []
        return [tier for record in every if record.save_id == base for tier in record.tiers]

    def _agree(self, base: SaveId, leases: ExitStack) -> tuple[_Share | None, str | None]:
        """This process's share, if the step is missing and all processes have theirs. Otherwise None, and the reason
        where there is one. A process that ends early does not keep the others waiting."""
        share, refusal = None, None
        unwinding = is_unwinding()
        try:
            if unwinding:
                raise CheckpointError("the run ends with an error")
            if self._missing_from(base):
                share = self._held(base, leases)
        except (CheckpointError, OSError, ValueError, KeyError, ImportError) as error:
            refusal = describe(error)

        def decide(values: list[list[Any] | None]) -> str | None:
            refused = [f"process {each}: {value[1]}" for each, value in enumerate(values) if value and _refuses(value)]
            if refused or not all(value and value[0] for value in values):
                return refused[0] if refused else ""
            self._pipeline.flusher.inherit(base)
            return None

        ballot, about = [share is not None, refusal], str(base)
        try:
            if unwinding:
                self._coordinator.veto(_CHANNEL, ballot, decide, about=about)
                return None, refusal
            reason = self._coordinator.agree(_CHANNEL, ballot, decide, about=about, is_veto=_refuses)
        except (CheckpointError, OSError) as error:
            return None, describe(error)
        return (share, None) if reason is None else (None, reason or None)

    def _flush(self, share: _Share, stall_s: float) -> bool:
        if self._coordinator.process == 0:
            _log.info("close: step %d is flushed from its slots to the durable tier", share.save.save_id.step)
        self._pipeline.flusher.flush_held(share.save, share.slot, share.sealed)
        return self._pipeline.run(self._pipeline.wait_or_stall(stall_s))

    def _warn_if_missing(self, base: SaveId, reason: str | None) -> None:
        tiers = self._missing_from(base)
        if not tiers or self._coordinator.process != 0:
            return
        durable = [record.step for record in self._history.ledger.every() if DURABLE in record.tiers]
        _log.warning(
            "step %d is only in tier %s: the durable tier has %s. This run restored step %d and saved nothing after "
            "it, so the loss of these tiers loses the step%s. Start the run again, and call save(%d, ..., force=True) "
            "with the restored state before close()",
            *(base.step, " and ".join(tiers), f"step {max(durable)}" if durable else "no step", base.step),
            *(f". It was not flushed from its slots: {reason}" if reason else "", base.step),
        )

    def _held(self, base: SaveId, leases: ExitStack) -> _Share:
        """This process's share in a slot that is leased; raises `CheckpointError` if it cannot be flushed as it was
        saved. Cost: a read of the slot."""
        storage = self._components.storage
        for arena in (storage.arenas[tier.name] for tier in storage.tiers if tier.name in storage.arenas):
            if arena.directory is None or (slot := arena.hold(base)) is None:
                continue
            leases.callback(arena.release, slot)
            share = read_share(arena.directory / manifest_name_of(base))
            if findings := prove_share(share, Limits()).findings:
                raise CorruptCheckpointError(findings[0].problem, path=findings[0].path)
            self._refuse_changed(share.manifest)
            memory = np.memmap(arena.directory / slot.name, np.uint8, "r").view(np.ndarray)  # Orbax asks for the class
            return _share_of(share.manifest, Slot(slot.name, memory), standard=self._standard_trees(share.manifest))
        raise CheckpointError(f"its slots do not hold save {base}")

    def _refuse_changed(self, manifest: Manifest) -> None:
        """Raises `CheckpointError` for a save of other processes, or with metadata that slots do not hold."""
        here, writer = (self._coordinator.process, self._coordinator.count), manifest.writer
        if (writer.process, writer.count) != here:
            raise CheckpointError(f"process {writer.process} of {writer.count} has saved what its slot holds")
        if manifest.custom != custom_digest(None) or any("custom" in each for each in manifest.inline.values()):
            raise CheckpointError("it was saved with custom metadata, which slots do not hold")
        if here[1] > 1 and any(each["kind"] in ("array", "jax_key") for each in manifest.inline.values()):
            raise CheckpointError("it has an item of a single array, which several processes would have to place")

    def _standard_trees(self, manifest: Manifest) -> set[str]:
        """The trees that go by the handler of `StandardSave`, as the manager knows it from the restore. Raises
        `CheckpointError` for a handler that writes in its own way."""
        stock, known = self._components.storage.durable.stock, dict[str, Any]()
        for name in manifest.trees:
            with suppress(ValueError):  # restored as it was saved
                known[name] = stock.handler(name, None)
        foreign = [name for name, handler in known.items() if not stock.is_plain(handler)]
        if foreign:
            raise CheckpointError(f"item {foreign[0]!r} has a handler that writes in its own way")
        return {n for n in manifest.trees if isinstance(known.get(n), ocp.StandardCheckpointHandler | None)}


def _refuses(ballot: list[Any]) -> bool:
    return ballot[1] is not None


def _share_of(manifest: Manifest, slot: Slot, *, standard: set[str]) -> _Share:
    """The records that a save of this content would have handed on, from its manifest alone."""
    description = _description_of(manifest)
    small = {name: each for name, each in manifest.inline.items() if name not in manifest.arrays}
    metrics = small.pop(METRICS_ITEM)["value"] if small.get(METRICS_ITEM, {}).get("kind") == "metrics" else None
    items = SaveItems(
        trees={},
        inline=manifest.inline,
        durable={name: captured_again(each) for name, each in small.items()},
        default_item={*manifest.arrays, *small} == {DEFAULT_ITEM},
        tree_words={name: {"standard": name in standard} for name in manifest.trees},
        files={name: manifest.inline[name]["handler"] for name in manifest.arrays.keys() - manifest.trees.keys()},
    )
    refuse_empty_arrays(description, items)
    save = Save(
        ticket=Ticket(name=f"close.{manifest.save_id}", save_id=manifest.save_id),
        items=items,
        description=description,
        due=frozenset({DURABLE}),
        forced=False,
        metrics=metrics,
        snapshot=None,
        staged_s=clock.monotonic_s(),
    )
    boxes = (box for sources in description.items.values() for source in sources for box in source.record.boxes)
    sealed = SealedSave(
        save_id=manifest.save_id,
        writer=manifest.writer,
        description=description,
        digests={number: box.digests for number, box in enumerate(boxes)},
        inline=manifest.inline,
        custom=manifest.custom,
    )
    return _Share(save=save, slot=slot, sealed=sealed)


def _description_of(manifest: Manifest) -> Description:
    """The result of `describe_items` for the arrays of a manifest, on the devices of this job. Raises `CheckpointError`
    where these hold other boxes."""
    items: dict[str, tuple[LeafSource, ...]] = {}
    treedefs: dict[str, Any] = {}
    for item, leaves in sorted(manifest.arrays.items()):
        by_path = {leaf.path: leaf for leaf in leaves}
        if item in manifest.trees:
            tree = stored_tree([manifest], item, leaves)
            treedefs[item] = jax.tree.structure(tree)
            by_path = {path: by_path[path] for path, _ in leaves_by_path(tree)}  # in the order of that tree
        items[item] = tuple(
            LeafSource(sharding=None, record=leaf, holders=_holders(leaf, manifest.writer.process), devices=())
            for leaf in by_path.values()
        )
    arrays = {item: tuple(source.record for source in sources) for item, sources in items.items()}
    spans = [
        (b.offset, b.offset + b.box.size * leaf.itemsize)
        for each in arrays.values()
        for leaf in each
        for b in leaf.boxes
    ]
    return Description(
        items=items,
        treedefs=treedefs,
        extents=tuple(SlotExtent(at, start, stop, (), None) for at, (start, stop) in enumerate(spans)),
        slot_bytes=max((stop for _, stop in spans), default=0),
        share_bytes=0,
        text=ManifestText(arrays),
    )


def _holders(leaf: LeafRecord, process: int) -> Mapping[Box, tuple[int, ...]]:
    """The processes that hold each box of a leaf."""
    if leaf.kind != "jax":
        return {record.box: (0,) for record in leaf.boxes}
    sharding = sharding_of_text(leaf.extra.get("sharding", "{}"))
    holders = {} if sharding is None else boxes_by_process(sharding, leaf.shape)
    if {box for box, who in holders.items() if process in who} != {record.box for record in leaf.boxes}:
        raise CheckpointError(f"leaf {leaf.name} was saved with a sharding that these devices do not have")
    return holders

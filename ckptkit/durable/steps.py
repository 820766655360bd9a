"""The books of the durable tier: Orbax's own `CheckpointManager`, fed from host memory on a background thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from ckptkit.coordination import Coordinator
from ckptkit.durable.epochs import Ancestry
from ckptkit.durable.host_shards import HostShards, HostShardsHandler
from ckptkit.durable.leases import PruneGuard
from ckptkit.durable.preservation import BranchPreservation, prunes, replaced_options
from ckptkit.durable.reader import DurableReader, identity_metadata
from ckptkit.errors import CorruptCheckpointError
from ckptkit.manifest import LeafRecord, Manifest, SaveId
from ckptkit.sharding import Box, choose_writers
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

_LEASE_DEADLINE_S = 20.0  # for small objects: a save that waits longer prunes nothing
DEFAULT_ITEM = "default"  # Orbax's name for the item of a step that was saved without Composite


class FrozenIterator:
    """A data iterator's state as it was when the step was saved, in the form that Grain's Orbax handler writes."""

    def __init__(self, state: bytes):
        self._state = state

    def get_state(self) -> bytes:
        """The state, encoded."""
        return self._state


class DurableSteps:
    """Step directories under one root. Methods that save or restore are called by all processes together.

    Every barrier is one of the coordination service; nothing here launches a device collective while saving.
    """

    def __init__(
        self,
        directory: str,
        options: ocp.CheckpointManagerOptions,
        coordinator: Coordinator,
        *,
        timeout_s: float,
    ):
        self.url = root_url(directory)
        self._coordinator = coordinator
        self._identities: dict[int, SaveId | None] = {}  # of steps that this process has read or written
        self._timeout_s = timeout_s
        multiprocessing = ocp.options.MultiprocessingOptions()
        if coordinator.count > 1:
            # With these two, all of Orbax's barriers use the coordination service (FACTS 4).
            multiprocessing = ocp.options.MultiprocessingOptions(
                active_processes=set(range(coordinator.count)), barrier_sync_key_prefix="ckptkit"
            )
        if coordinator.process == 0 and options.create:
            ocp.path.step.epath.Path(self.url).mkdir(parents=True, exist_ok=True)
        coordinator.agree("durable-root", None, lambda _: None, timeout_s=timeout_s)
        self._name_format = options.step_name_format or ocp.path.step.standard_name_format(
            step_prefix=options.step_prefix, step_format_fixed_length=options.step_format_fixed_length
        )
        self._deletes_later = options.enable_background_delete
        self._guard = PruneGuard(open_store(self.url, deadline_s=_LEASE_DEADLINE_S))
        self._preservation = BranchPreservation(options, self._spared)
        inner_options = dataclasses.replace(
            options,
            **(replaced_options(self._preservation) if prunes(options) else {}),
            create=False,
            enable_async_checkpointing=False,
            async_options=ocp.AsyncOptions(timeout_secs=int(timeout_s)),
            multiprocessing_options=multiprocessing,
        )
        self._inner = ocp.CheckpointManager(
            self.url, options=inner_options, handler_registry=_handlers(multiprocessing)
        )

    @property
    def orbax(self) -> ocp.CheckpointManager:
        """Orbax's manager: the truth about names, policies and what is kept."""
        return self._inner

    def reader(self, step: int) -> DurableReader:
        """A reader of one step."""
        return DurableReader(f"{self.url}/{self._name_format.build_name(step)}", step=step)

    def save_id(self, step: int) -> SaveId | None:
        """Which save a committed step is; None for one that stock Orbax wrote. Cost: a listing and a small read."""
        return self.reader(step).save_id()

    def save(
        self,
        save_id: SaveId,
        items: Mapping[str, Any],
        *,
        metrics: Any,
        default_item: bool,
        ancestry: Ancestry,
    ) -> None:
        """Writes and commits one step; returns once it is committed. Runs on a background thread.

        `items` are Orbax save arguments whose arrays are `HostShards` (see `host_tree`). The memory that they
        view must not change until this returns. A step of the same number is replaced only where `ancestry`
        says that it belongs to an abandoned branch. Raises what Orbax raises; the books are then read afresh.
        """
        args = items[DEFAULT_ITEM] if default_item else ocp.args.Composite(**items)
        try:
            self._settle()
            self._meet_abandoned(save_id.step, ancestry)
            has_sidecar = any(isinstance(item, ocp.args.PyTreeSave) for item in items.values())
            self._inner.save(
                save_id.step,
                args=args,
                metrics=metrics,
                force=True,
                custom_metadata=None if has_sidecar else identity_metadata(save_id),
            )
            self._identities[save_id.step] = save_id
            if not self._deletes_later:
                self._settle()
        except BaseException:
            # After a failed commit Orbax has forgotten older good steps (FACTS 5): look at the disk again.
            self._inner.reload()
            raise

    def steps(self) -> list[int]:
        """The committed steps, ascending, as the storage has them now."""
        self._inner.reload()
        return sorted(self._inner.all_steps())

    def _meet_abandoned(self, step: int, ancestry: Ancestry) -> None:
        """All processes hear from process 0 which steps are abandoned; one of the number to be saved goes first."""

        def abandoned(_: list[Any]) -> list[int]:
            return [each for each in self.steps() if self._is_abandoned(each, ancestry, replaced=each == step)]

        steps = self._coordinator.agree("abandoned", None, abandoned, timeout_s=self._timeout_s)
        self._preservation.abandoned = frozenset(steps)
        if step in steps:
            self._inner.delete(step)

    def _spared(self, doomed: list[int]) -> frozenset[int]:
        """Which steps that are to be deleted are read by somebody; all processes hear it from process 0."""
        if not doomed:
            return frozenset()

        def spared(_: list[Any]) -> list[int]:
            return sorted(self._guard.spare(doomed))

        return frozenset(self._coordinator.agree("leases", None, spared, timeout_s=self._timeout_s))

    def _settle(self) -> None:
        if self._coordinator.process == 0:
            self._guard.settle()

    def _is_abandoned(self, step: int, ancestry: Ancestry, *, replaced: bool) -> bool:
        """A step whose sidecar is damaged may be of this branch: it goes only where a new save takes its number."""
        try:
            if step not in self._identities:
                self._identities[step] = self.save_id(step)
            return ancestry.superseded(self._identities[step] or ancestry.of_stock(step))
        except CorruptCheckpointError:
            return replaced and ancestry.superseded(SaveId(0, step, 0))

    def close(self) -> None:
        """Ends Orbax's manager."""
        self._inner.close()


def host_tree(
    leaves: Sequence[tuple[LeafRecord, Mapping[Box, tuple[int, ...]], Mapping[Box, np.ndarray]]],
    treedef: Any,
    manifest: Manifest,
    item: str,
    on_written: Callable[[], None],
) -> ocp.args.PyTreeSave:
    """The save arguments of one array item: the boxes that this process is to write, and its sidecar.

    `leaves` has for each leaf its record with digests, who holds each box, and this process's blocks.
    """
    process = jax.process_index()
    writers = choose_writers([holders for _, holders, _ in leaves], [leaf.itemsize for leaf, _, _ in leaves])
    written = [
        dataclasses.replace(
            leaf,
            boxes=tuple(dataclasses.replace(box, offset=-1) for box in leaf.boxes if chosen.get(box.box) == process),
        )
        for (leaf, _, _), chosen in zip(leaves, writers, strict=True)
    ]
    sidecar = dataclasses.replace(manifest, slot="", arrays={item: tuple(written)}).to_bytes()
    values = [
        HostShards(
            record=leaf,
            blocks=[(box.box, blocks[box.box]) for box in leaf.boxes if box.box.size],
            sidecar=sidecar,
            on_written=on_written,
        )
        if leaf.kind == "jax"
        else _plain_value(leaf, next(iter(blocks.values())))
        for leaf, (_, _, blocks) in zip(written, leaves, strict=True)
    ]
    return ocp.args.PyTreeSave(jax.tree_util.tree_unflatten(treedef, values))


def _plain_value(leaf: LeafRecord, block: np.ndarray) -> Any:
    return block if leaf.kind == "numpy" else block.item()


def _handlers(multiprocessing: Any) -> Any:
    types = type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (float, type_handlers.ScalarHandler()),
        (str, type_handlers.StringHandler()),
        (np.number, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
        (HostShards, HostShardsHandler()),
        (jax.Array, type_handlers.get_type_handler(jax.Array)),  # last: restores, and write shapes in the metadata
    )
    tree = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=multiprocessing, type_handler_registry=types, use_compression=False
    )
    standard = ocp.StandardCheckpointHandler(multiprocessing_options=multiprocessing)
    json_handler = ocp.JsonCheckpointHandler(multiprocessing_options=multiprocessing)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, tree)
    registry.add(None, ocp.args.PyTreeRestore, tree)
    registry.add(None, ocp.args.StandardRestore, standard)
    registry.add(None, ocp.args.JsonSave, json_handler)
    registry.add(None, ocp.args.JsonRestore, json_handler)
    return registry

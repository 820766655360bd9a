"""ckptkit as a `bench.contenders.Contender`: by its ramdisk or SSD tier, by its durable tier, by a forced strategy."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

import ckptkit
from bench.measure import allocated_bytes, now_s, remove_root

_WAIT_S = 600.0


@final
class CkptKit:
    """A ramdisk tier that takes every step, and a durable one that is never due; with `disk`, an SSD tier as well."""

    def __init__(self, root: Path, *, disk: Path | None = None):
        self.name = "ckptkit"
        self._tier = "ssd" if disk is not None else "ram"
        self._roots = [root] if disk is None else [root, disk]
        self._changed = threading.Condition()
        self._committed: dict[int, float] = {}
        self._failed: list[str] = []
        self._step = -1
        self.strategy = ""  # by which the last save was staged
        events = ckptkit.EventLog()
        events.observe(self._hear)
        tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(1))]
        if disk is not None:
            tiers.append(ckptkit.Tier.ssd(str(disk), save=ckptkit.EverySteps(1)))
        # No step is durable, not even the first, which the default policy would take.
        options = ocp.CheckpointManagerOptions(save_decision_policy=policies.SpecificStepsPolicy(()))
        self._manager = ckptkit.CheckpointManager(root / "durable", options=options, tiers=tiers, events=events)

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        self._step = step
        if not self._manager.save(step, args=ocp.args.StandardSave(state)):  # pyright: ignore[reportCallIssue]
            raise RuntimeError(f"ckptkit did not take step {step}")

    def committed_s(self) -> float:
        """The COMMITTED event of the tier that is measured."""
        with self._changed:
            told = self._changed.wait_for(lambda: self._failed or self._step in self._committed, _WAIT_S)
            if not told or self._failed:
                raise RuntimeError(f"ckptkit did not commit step {self._step}: {self._failed or 'no event'}")
            return self._committed.pop(self._step)

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`; every digest is verified."""
        return jax.block_until_ready(self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))  # pyright: ignore[reportCallIssue]

    def forget(self, step: int) -> None:
        """Slots are reused: nothing to delete."""

    def close(self) -> None:
        """See `Contender.close`."""
        self._manager.close(remove_arenas=True)
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)

    @property
    def arena_bytes(self) -> int:
        """The memory of the ramdisk's slots, reported apart from anonymous memory."""
        return allocated_bytes(self._roots[0] / "ram")

    def prepare(self, abstract: Any) -> None:
        """Begins to make the slots that a save of such a state needs."""
        self._manager.prepare(ocp.args.StandardSave(abstract))  # pyright: ignore[reportCallIssue]

    def stage_by(self, staging: str) -> None:
        """How later saves are staged. A manager per strategy would take an arena each, three times the state.

        That it is obeyed is seen in the events: `StagedBy` compares.
        """
        first = self._manager._pipeline.flow._slots  # pyright: ignore[reportPrivateUsage]
        first._options = replace(first._options, staging=staging)  # pyright: ignore[reportPrivateUsage, reportArgumentType]

    def _hear(self, event: ckptkit.Event) -> None:
        heard_s = now_s()
        with self._changed:
            if event.kind == ckptkit.Kind.COMMITTED and event.tier == self._tier and event.step is not None:
                self._committed[event.step] = heard_s
            elif event.kind in (ckptkit.Kind.FAILED, ckptkit.Kind.SKIPPED, ckptkit.Kind.DEGRADED):
                self._failed.append(event.to_json())
            elif event.kind == ckptkit.Kind.STAGED:
                self.strategy = event.fields["strategy"]
            self._changed.notify_all()


@final
class CkptKitDurable:
    """Every step goes to a ramdisk tier (None: there is none) and from there to the durable one, which is what is
    measured and restored."""

    def __init__(self, name: str, root: str, ramdisk: Path | None):
        self.name = name
        self._ramdisk = ramdisk
        self._root = root
        self._committed_s: dict[int, float] = {}
        events = ckptkit.EventLog()
        events.observe(self._hear)
        tiers = [] if ramdisk is None else [ckptkit.Tier.ram(str(ramdisk))]
        self._manager = ckptkit.CheckpointManager(root, tiers=tiers, events=events)
        # Without fast tiers: it can read the durable one alone.
        self._reader = ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True))

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        if not self._manager.save(step, args=ocp.args.StandardSave(state), force=True):  # pyright: ignore[reportCallIssue]
            raise RuntimeError(f"{self.name} did not take step {step}")
        self._step = step

    def committed_s(self) -> float:
        """The COMMITTED event of the durable tier; raises where the save failed."""
        self._manager.wait_until_finished()
        return self._committed_s.pop(self._step)

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`; every digest is verified."""
        return jax.block_until_ready(self._reader.restore(step, args=ocp.args.StandardRestore(abstract)))  # pyright: ignore[reportCallIssue]

    def forget(self, step: int) -> None:
        """See `Contender.forget`."""
        self._manager.delete(step)

    def close(self) -> None:
        """See `Contender.close`."""
        self._reader.close()
        self._manager.close(remove_arenas=True)
        if self._ramdisk is not None:
            shutil.rmtree(self._ramdisk, ignore_errors=True)
        remove_root(self._root)

    def _hear(self, event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.COMMITTED and event.tier == "durable" and event.step is not None:
            self._committed_s[event.step] = now_s()


@final
class StagedBy:
    """ckptkit with a forced staging strategy, over the manager of another contender."""

    def __init__(self, inner: CkptKit, staging: str):
        self.name = f"{inner.name}_{staging}"
        self._inner = inner
        self._staging = staging

    def save(self, step: int, state: Any) -> None:
        """See `Contender.save`."""
        self._inner.stage_by(self._staging)
        try:
            self._inner.save(step, state)
        finally:
            self._inner.stage_by("auto")

    def committed_s(self) -> float:
        """See `CkptKit.committed_s`. Raises RuntimeError where another strategy was taken than was asked for."""
        committed_s = self._inner.committed_s()
        if self._inner.strategy != self._staging:
            raise RuntimeError(f"{self.name} was staged by {self._inner.strategy}")
        return committed_s

    @property
    def strategy(self) -> str:
        """By which the last save was staged."""
        return self._inner.strategy

    def settled(self) -> None:
        """See `Contender.settled`."""
        self._inner.settled()

    def restore(self, step: int, abstract: Any) -> Any:
        """See `Contender.restore`."""
        return self._inner.restore(step, abstract)

    def forget(self, step: int) -> None:
        """Slots are reused: nothing to delete."""

    def close(self) -> None:
        """The manager belongs to the other contender."""

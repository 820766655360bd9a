"""Prepares one process's part of a restore: compares the tree, and finds a source for every wanted box."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import numpy as np
from jax.dtypes import canonicalize_dtype

from ckptkit.errors import UnsuitedSaveError
from ckptkit.job.coordination import Coordinator
from ckptkit.job.data_position import joined
from ckptkit.model.boxes import boxes_by_process
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.restore.handler_files import StoredFiles, is_of_files, stored_files
from ckptkit.restore.local_tiers import Holdings
from ckptkit.restore.plan import RestorePlan, plan_restore
from ckptkit.restore.request import RestoreRequest, SortedRequest, TreeAnswer, plain_answer, sorted_request, tree_answer
from ckptkit.restore.tree import Target, targets_of
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.words import count_text

_log = logging.getLogger("ckptkit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One process's part of a save, and its sources: the tree is compared, every box has a source."""

    asked: SortedRequest
    answers: Mapping[str, TreeAnswer]
    targets: Sequence[Target]
    inline: Mapping[str, Any]
    files: Mapping[str, StoredFiles]
    plan: RestorePlan
    holdings: Holdings

    @property
    def kept(self) -> frozenset[str]:
        """The items whose leaves are kept after the read; leaves of others, which Orbax restores, are only verified."""
        return frozenset((*self.asked.trees, *self.files))

    @property
    def is_proven(self) -> bool:
        """Whether a digest covers all that is given back."""
        return not set(self.holdings.unproven).intersection(self.asked.orbax)


@final
class Preparer:
    """Compares and plans, for one process; reads nothing."""

    def __init__(self, where: str, coordinator: Coordinator):
        self._where = where
        self._coordinator = coordinator

    def prepared(self, save_id: SaveId, holdings: Holdings, wanted: RestoreRequest, *, is_durable: bool) -> Prepared:
        """How to restore a save from `holdings`; with `is_durable` Orbax can give back what only it knows.

        Raises `CorruptCheckpointError` where they do not cover it or cannot give what is asked
        (`UnsuitedSaveError`), `TreeMismatchError` where it is another tree.
        """
        asked = sorted_request(wanted, holdings.manifests, where=self._where, unproven=holdings.unproven)
        if asked.orbax and not is_durable:
            raise UnsuitedSaveError(
                f"only Orbax restores {sorted(asked.orbax)} in this form, and only from a durable step",
                step=save_id.step,
            )
        with collection_paused():
            files = {
                item: stored_files(holdings.manifests, item)
                for item in asked.inline
                if is_of_files(holdings.manifests, item)
            }
            answers = self._answers(save_id, holdings.manifests, asked, files)
            targets = self._targets(save_id, answers)
            _warn_of_narrowing(save_id, targets)
            small = {item: arg for item, arg in asked.inline.items() if item not in files}
            inline = self._inline(holdings.manifests, small)
            plan = plan_restore(save_id, {target.key: target.form.boxes for target in targets}, holdings.sources)
        return Prepared(
            asked=asked, answers=answers, targets=targets, inline=inline, files=files, plan=plan, holdings=holdings
        )

    def alike(self, save_id: SaveId, manifests: Sequence[Manifest], wanted: RestoreRequest) -> list[int]:
        """The processes that want boxes which this one wants too, those that want most of them first."""
        shared: Counter[int] = Counter()
        asked = sorted_request(wanted, manifests, where=self._where)
        for target in self._targets(save_id, self._answers(save_id, manifests, asked)):
            if target.form.sharding is not None:
                for processes in boxes_by_process(target.form.sharding, target.form.shape).values():
                    shared.update(processes if self._coordinator.process in processes else ())
        return [process for process, _ in shared.most_common()]

    def _answers(
        self,
        save_id: SaveId,
        manifests: Sequence[Manifest],
        asked: SortedRequest,
        files: Mapping[str, StoredFiles] = MappingProxyType({}),
    ) -> dict[str, TreeAnswer]:
        """How each tree is given back. A tree that Orbax will give back is read and verified as it was saved."""
        proven_only = dict.fromkeys(name for name in asked.orbax if any(name in m.arrays for m in manifests))
        answers = {
            item: tree_answer(arg, manifests, item, step=save_id.step, where=self._where)
            for item, arg in {**asked.trees, **proven_only}.items()
        }
        return answers | {
            item: plain_answer(list(found.large.values())) for item, found in files.items() if found.large
        }

    def _targets(self, save_id: SaveId, answers: Mapping[str, TreeAnswer]) -> list[Target]:
        where = self._where
        return [
            target
            for item, answer in answers.items()
            for target in targets_of(item, answer.wanted, answer.leaves, step=save_id.step, where=where)
        ]

    def _inline(self, manifests: Sequence[Manifest], wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The small items, by name: those of the lowest process."""
        inline = {}
        for name, arg in wanted.items():
            holders = [manifest for manifest in manifests if name in manifest.inline]
            holders.sort(key=lambda each: each.writer.process)
            inline[name] = holders[0].inline[name]
            if inline[name]["kind"] == "grain":
                inline[name] = self._iterator(name, holders, arg)
        return inline

    def _iterator(self, name: str, holders: Sequence[Manifest], arg: Any) -> Mapping[str, Any]:
        """The state of a data iterator: the job's, or that of one process out of as many as there were.

        Raises `UnsuitedSaveError` if no reachable process holds it.
        """
        needed = getattr(getattr(arg, "item", None), "streams", ())
        try:
            state = joined([manifest.inline[name]["value"] for manifest in holders], needed)
        except ValueError as error:
            raise UnsuitedSaveError(f"item {name!r}: {error}; keep copies on other hosts (Tier.peer)") from error
        if state is not None:
            return {**holders[0].inline[name], "value": state}
        mine = [m.inline[name] for m in holders if m.writer.process == self._coordinator.process]
        count = holders[0].writer.count
        if count != self._coordinator.count:
            raise UnsuitedSaveError(
                f"item {name!r} is a data iterator saved by {count_text(count, 'process', 'processes')}, "
                f"and this job has {self._coordinator.count}: restore on {count}, or read the data with "
                "ckptkit.resume.ElasticBatches, whose position is that of any number of processes"
            )
        if not mine:
            raise UnsuitedSaveError(
                f"item {name!r} is a data iterator, and no reachable process holds the state that process "
                f"{self._coordinator.process} of {count} saved; keep copies on other hosts (Tier.peer), or read the "
                "data with ckptkit.resume.ElasticBatches"
            )
        return mine[0]


def _warn_of_narrowing(save_id: SaveId, targets: Sequence[Target]) -> None:
    """Logs one warning if JAX makes 32-bit arrays of saved 64-bit ones. Stock Orbax allows this too."""
    forms = {form.dtype: form for _, form in targets if form.sharding is not None}
    narrowed = [dtype for dtype in forms if canonicalize_dtype(dtype) != np.dtype(dtype)]
    if narrowed:
        (item, path), _ = next(target for target in targets if target.form is forms[narrowed[0]])
        _log.warning(
            "step %d: leaf %s of item %r is %s in the save, and %s in this process: JAX cuts 64-bit values while "
            "jax_enable_x64 is off. Set JAX_ENABLE_X64=1, as in the process that saved, to get them whole",
            *(save_id.step, ".".join(path), item, narrowed[0], canonicalize_dtype(narrowed[0])),
        )

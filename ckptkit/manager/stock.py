"""Which saves there are, in all tiers of all processes, agreed by all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial as partial_of
from typing import Any

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.errors import CorruptCheckpointError, NewerFormatError
from ckptkit.job.coordination import Coordinator
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.peers.client import PeerClient
from ckptkit.restore.candidates import Inventory
from ckptkit.restore.inventory import Held, distinct_shares, hole_in, is_whole
from ckptkit.restore.local_tiers import LocalSave

_LOOKED_INTO_MAX = 256  # manifests of one save, when all is looked at on one process
_LOOKS = 16  # durable steps that are looked into at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Every save that can be had, with the tiers that hold it; the highest epoch seen; and the saves of runs whose
    record the root has lost."""

    held: Mapping[SaveId, list[str]]
    epoch: int
    unrecorded: tuple[SaveId, ...]


def take_stock(inventory: Inventory, ancestry: Ancestry, coordinator: Coordinator) -> Stock:
    """Looks at what there is, agreed by all processes. Raises `NewerFormatError` for slots of a newer version.

    If processes read each other's tiers, a save is available when their fast tiers hold it together; otherwise when
    each process holds its own part. Cost: a listing and a small read per durable step, on process 0, and a few KiB from
    each process. For a save newer than the newest complete one, also a manifest of each different set of boxes, if they
    are few.
    """

    def stock(said: list[dict[str, Any]]) -> dict[str, Any]:
        for process, newer in enumerate(each["newer"] for each in said):
            if newer is not None:
                raise NewerFormatError(f"process {process}: {newer}")
        reports = [[Held.from_json(values) for values in each["held"]] for each in said]
        with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-look") as pool:  # a round trip each, in a bucket
            listed = list(pool.map(lambda step: inventory.identity(step, ancestry), inventory.durable.steps()))
        listed = [save for save in listed if save.step not in inventory.durable.struck]
        found = sorted({held.save_id for report in reports for held in report})
        seen = [save for save in found if save in listed or not ancestry.disowned(save)]
        if inventory.client is None and coordinator.count > 1:
            common = [save for save in seen if _each_has_its_own(reports, save)]
        else:
            common = [save for save in seen if is_whole(reports, save)]
            newest = max([*common, *listed], default=None)
            partial = [save for save in seen if save not in common and (newest is None or save > newest)]
            of_branch = [save for save in partial if not ancestry.superseded(save)]
            if of_branch and inventory.client is not None:
                common += _covered(partial_of(_shares_of_all, inventory.client, reports), of_branch)
            elif of_branch:
                common += _covered(partial_of(_shares_here, inventory.local.saves()), of_branch)
        tiers = {
            save: sorted({tier for report in reports for held in report if held.save_id == save for tier in held.tiers})
            for save in common
        }
        return {
            "fast": [[save.to_list(), tiers[save]] for save in sorted(common)],
            "struck": inventory.durable.struck,
            "durable": [save.to_list() for save in listed],
            "epoch": max([ancestry.epoch, *(save.epoch for save in (*found, *listed, *ancestry.deleted))]),
            "unrecorded": [each.to_list() for each in found if each not in seen and ancestry.is_unrecorded(each)],
        }

    said = {"held": inventory.reports(), "newer": inventory.local.newer}
    agreed = coordinator.agree("stock", said, stock)
    inventory.durable.strike(agreed["struck"])
    held: dict[SaveId, list[str]] = {}
    for save, names in agreed["fast"]:
        held.setdefault(SaveId.from_list(save), []).extend(names)
    for save in agreed["durable"]:
        held.setdefault(SaveId.from_list(save), []).append(DURABLE)
    unrecorded = tuple(map(SaveId.from_list, agreed["unrecorded"]))
    return Stock(held=held, epoch=agreed["epoch"], unrecorded=unrecorded)


def _each_has_its_own(reports: Sequence[Sequence[Held]], save: SaveId) -> bool:
    """Whether as many processes as wrote a save each hold their own share."""
    own = [{held.save_id: held for held in report}.get(save) for report in reports]
    return all(
        held is not None and held.count == len(reports) and process in [writer for writer, _ in held.shares]
        for process, held in enumerate(own)
    )


def _covered(shares_of: Callable[[SaveId], Sequence[Manifest]], saves: Sequence[SaveId]) -> list[SaveId]:
    """The newest of the saves whose shares, though some are lost, hold every leaf: data replicas do. Or none."""
    for save in reversed(saves):
        with suppress(CorruptCheckpointError):
            shares = shares_of(save)
            if shares and hole_in(shares) is None:
                return [save]
    return []


def _shares_of_all(client: PeerClient, reports: Sequence[Sequence[Held]], save: SaveId) -> Sequence[Manifest]:
    """One share for each different set of boxes that a process serves, if these are few.

    Raises `PeerUnreachableError` if a process that serves such a share does not answer: unreachable is not absent.
    """
    served = [report if client.serves(process) else () for process, report in enumerate(reports)]
    distinct = distinct_shares(served, save)
    few = distinct if len(distinct) <= _LOOKED_INTO_MAX else []
    return [client.manifest(holder, save, share)[0] for holder, share in few]


def _shares_here(local: Mapping[SaveId, LocalSave], save: SaveId) -> Sequence[Manifest]:
    """The shares on this host: a job of one process has no other."""
    return local[save].manifests if save in local else ()

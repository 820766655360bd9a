"""A save of another run that is put into a root: refused, or stamped anew so that the root's own steps stay safe.

Saves are ordered by epoch first. A step of a run with more epochs would be newer than every step of the root. The next
restart would take it, and the first save after that would supersede the root's own steps. So a foreign save gets a new
identity: that of the newest save of the root, or that of the oldest.

To put a step into a root: call `plan_adoption`, then `EpochRecords.advance`, write the step without a marker, call
`restamp_sidecars`, and at last write the marker (`durable.sidecars.marker_text`) with the new identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal, final

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.sidecars import join_sidecars, sidecars_among
from ckptkit.errors import CheckpointError
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId, new_id
from ckptkit.store import Store

AdoptedAs = Literal["newest", "history"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The identity of a foreign save in a root. `before`: the root's records that it holds for; `after`: the record
    that is claimed first, None where none is."""

    save_id: SaveId
    before: Ancestry
    after: Ancestry | None


def plan_adoption(
    root: str, ancestry: Ancestry, saves: Collection[SaveId], stock_steps: Iterable[int], step: int, adopted: AdoptedAs
) -> Adoption:
    """The identity that a foreign save gets as step `step` of `root`. Pure.

    `saves` are the identities of all steps of the root, `stock_steps` the numbers of those of stock Orbax. As `newest`
    the next restart takes it: its number has to be above all others, so that what the run saves from there supersedes
    none of them. As `history` no restart takes it unasked: its number has to be below all others, so that no rollback
    supersedes it.

    Raises `CheckpointError` for a number that does not fit, with the numbers that do.
    """
    steps = [save.step for save in saves]
    if adopted == "newest":
        least = max(steps, default=-1) + 1
        if step < least:
            raise CheckpointError(
                f"step {step} cannot be the newest step of {root}: it has steps up to {least - 1}, which the next save "
                f"after step {step} would supersede; give --as-step {least} or more",
                step=step,
                path=root,
            )
        epoch = max([ancestry.epoch, *(save.epoch for save in saves)]) + 1
        save_id = SaveId(epoch, step, 0, new_id(), ancestry.root or new_id())
        after = replace(ancestry, root=save_id.root).begin(epoch, None, save_id.run, stock_steps)
        return Adoption(save_id=save_id, before=ancestry, after=after)
    most = min([*(each - 1 for each in steps), *(each.step for each in ancestry.rollbacks)], default=step)
    if step > most:
        hint = f"give --as-step {most} or less" if most >= 0 else "its oldest step is 0; no room is left below it"
        raise CheckpointError(
            f"step {step} cannot be the oldest step of {root}: its own steps begin at {most + 1}, and a rollback below "
            f"step {step} would supersede it; {hint}",
            step=step,
            path=root,
        )
    return Adoption(save_id=SaveId(0, step, 0), before=ancestry, after=None)


def restamp_sidecars(store: Store, items: Iterable[str], save_id: SaveId) -> None:
    """Gives the sidecars of a step that is not committed yet the identity `save_id`; digests of cells stay.

    `store` is of the step's directory, and `items` are its items. Cost: each sidecar is read and written once. Raises
    `CorruptCheckpointError` for a damaged sidecar.
    """
    for item in items:
        texts = list[bytes]()
        for process in sidecars_among(store.list(f"{item}/{paths.SIDECAR_DIR}")):
            key = f"{item}/{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}"
            manifest = Manifest.from_bytes(store.get(key), path=f"{store.url}/{key}")
            texts.append(replace(manifest, save_id=save_id).to_bytes())
            store.put(key, texts[-1])
        joined = join_sidecars(texts) if len(texts) > 1 else None
        if joined is not None:
            store.put(f"{item}/{paths.JOINED_SIDECARS}", joined)

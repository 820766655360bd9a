"""Roots of runs around a conversion: what is read there is leased, and nothing is written into one that would outrank
the run's own saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckptkit.durable.lifecycle.leases import Lease
from ckptkit.durable.lifecycle.listing import DurableStep, read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import CheckpointError, StepNotFoundError, StoreError
from ckptkit.inspection.roots import read_ancestry
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

_LEASE_S = 60.0


@contextmanager
def leased(sources: Iterable[str], *, timeout_s: float = 20.0) -> Iterator[list[str]]:
    """Keeps the steps that are read from being pruned by a running job; yields what could not be leased, in words.

    Sources that are not steps of a root of ckptkit get no lease. Cost: three listings for each source, and one small
    object that is renewed. Raises `CheckpointError` for a step that its job is deleting, `StepNotFoundError` for one
    that was deleted since it was opened.
    """
    notes: list[str] = []
    with ExitStack() as held:
        for root, step, name in sorted({found for source in sources if (found := _step_of(source, timeout_s))}):
            try:
                lease = held.enter_context(Lease(open_store(root, deadline_s=timeout_s), step, lease_s=_LEASE_S))
            except StoreError as error:
                notes.append(f"step {step} of {root} is not leased, a running job may delete it meanwhile: {error}")
                continue
            if not lease.granted():
                raise CheckpointError(f"{root}: step {step} is being deleted by its job; name a newer one", path=root)
            if not Place.open(f"{root}/{name}", timeout_s=timeout_s).names():  # a deletion ended before the lease
                raise StepNotFoundError(f"{root}: step {step} was deleted meanwhile; name another one", path=root)
        yield notes


def require_fitting(target: str, save_id: SaveId | None = None, *, timeout_s: float = 20.0) -> None:
    """Raises `CheckpointError` for an Orbax target in the root of a run that would take it for something else.

    In a root where a job of ckptkit has begun, nothing may be added. In other roots, a complete step with a `save_id`
    is allowed among steps in the order of their saves, but not as a plain number if theirs are not. An item (None) is
    allowed only under a name that no step has.

    Cost: a listing of the directory above, and of the steps in it.
    """
    root, _, name = target.rpartition("/")
    step = paths.step_of_name(name)
    place = Place.open(root, timeout_s=timeout_s)
    began = f"{paths.SIDECAR_DIR}/" in place.names() and bool(place.below(paths.EPOCHS_DIR).names())
    found = read_root(place, read_ancestry(place)[0])
    steps = [each for each in found.steps if _is_step(each.place)]
    fits = step is None or (save_id is not None and _is_in_order(steps, replace(save_id, step=step)))
    if began or (steps and not fits):
        up_to = f" with steps up to {max(each.step for each in steps)}" if steps else ""
        raise CheckpointError(
            f"{target} is in {root}, the root of a run{up_to}: its next restart could take this for its own "
            "newest save and delete others. Name a place outside; `ckptkit copy` can add a step to a root",
            path=target,
        )
    if steps and step is not None and name.isdecimal() and found.names.step_of(name) is None:
        raise CheckpointError(
            f"{target}: the steps of {root} are named {found.names}, for example {steps[-1].place.name}; give the new "
            f"one such a name ({found.names.name_of(step)}), or a place outside",
            path=target,
        )


def _is_step(place: Place) -> bool:
    return paths.STEP_METADATA in place.names()


def _is_in_order(steps: Iterable[DurableStep], save_id: SaveId) -> bool:
    others = [each for each in steps if each.step != save_id.step]  # that one is there already, which is another error
    return all((each.step < save_id.step) == (each.identity < save_id) for each in others)


def _step_of(source: str, timeout_s: float) -> tuple[str, int, str] | None:
    """The root, the number and the name of the step that a source is, or is an item of; None where no root of ours has
    it."""
    url = root_url(source)
    for _ in range(2):
        url, _, name = url.rpartition("/")
        step = paths.step_of_name(name)
        if url and step is not None and f"{paths.SIDECAR_DIR}/" in Place.open(url, timeout_s=timeout_s).names():
            below = Place.open(f"{url}/{paths.SIDECAR_DIR}", timeout_s=timeout_s).names()
            if any(each.rstrip("/") in ("epochs", "leases") for each in below):
                return url, step, name
    return None

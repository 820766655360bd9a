"""`replay_new`: the saves of a running job are replayed on spare devices as they land."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CorruptCheckpointError, StepNotFoundError
from ckptkit.guard.replaying import Certificate, ReplayPlan, compared, record_certified, steps_taken
from ckptkit.job.coordination import make_coordinator
from ckptkit.manager.follow import FollowedStep, follow
from ckptkit.model.manifest import SaveId
from ckptkit.snapshot.state_digest import box_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSave:
    """A save that has landed. `certificate` is the result of the replay to it; where it is None, `reason` is why the
    save was not replayed, and the next replay begins at it."""

    step: int
    certificate: Certificate | None = None
    reason: str = ""


@dataclass(slots=True)
class _Run:
    """The replay of the run, which has come to `save`: its state, and the batches that follow."""

    save: SaveId
    state: Any
    batches: Iterator[Any]


def replay_new(
    root: str | os.PathLike[str],
    plan: ReplayPlan,
    *,
    steps_max: int,
    record: bool = True,
    poll_s: float = 5.0,
    idle_timeout_s: float | None = None,
) -> Iterator[NewSave]:
    """Follows the durable root of a running job, and replays the steps to each new save. Certifies those it comes to.

    It begins at the first save. It then continues from its own state, which has the bits of the last save. So a job may
    delete a save as soon as a newer one has landed. If several landed meanwhile, it takes the newest. A save that is
    more than `steps_max` steps after the last one is not replayed: it begins again there. So devices that are slower
    than the job cover a part of the steps. It also begins again at a save of another epoch: the job was restarted or
    went back, and may have left batches out. Ends after the first difference.

    Cost: `steps_max` steps at most and one restore for each save; one more state in memory than a step. All processes
    call it together.

    Args:
      root: the durable root; it need not exist yet.
      plan: of the training program.
      steps_max: the most steps that are replayed for one save.
      record: certify the saves in the root.
      poll_s, idle_timeout_s: as of `ckptkit.follow`.

    Raises ValueError for steps of stock Orbax to record, and batches that end. Raises what `follow` and `restore`
    raise, except for a save that is damaged or deleted: it is left out.
    """
    coordinator, take_step = make_coordinator(), plan.make_step()
    run: _Run | None = None
    for found in follow(root, newest_only=True, prove=False, poll_s=poll_s, idle_timeout_s=idle_timeout_s):
        if record and not found.save_id.ours:
            raise ValueError(f"replay: step {found.step} was written by stock Orbax, and has no identity to certify")
        try:
            restored = found.restore(plan.args)
        except (CorruptCheckpointError, StepNotFoundError) as error:
            yield NewSave(step=found.step, reason=str(error))
            continue
        reason = _why_not(run, found, steps_max)
        if run is None or reason:
            batches = iter(plan.make_batches(found.step, restored))
            run = _Run(found.save_id, plan.state_of(restored), batches)
            del restored
            yield NewSave(step=found.step, reason=reason)
            continue
        expected, before = box_digests(plan.state_of(restored)), run.save.step
        del restored
        run.state = steps_taken(take_step, run.state, run.batches, before, found.step)
        run.save = found.save_id
        difference = compared(coordinator, box_digests(run.state), expected, before, found.step)
        if record and difference is None:
            record_certified(found.manager, coordinator, [found.save_id])
        steps = (before, found.step)
        certificate = Certificate(steps=steps, steps_replayed=found.step - before, difference=difference)
        yield NewSave(step=found.step, certificate=certificate)
        if difference is not None:
            return


def _why_not(run: _Run | None, found: FollowedStep, steps_max: int) -> str:
    """Why a save is where the replay begins anew; empty if it is replayed."""
    if run is None:
        return "the first save"
    if found.save_id.epoch != run.save.epoch or found.step <= run.save.step:
        return "the job was restarted or went back"
    if found.step - run.save.step > steps_max:
        return f"{found.step - run.save.step} steps after save {run.save.step}, and {steps_max} are the most"
    return ""

"""When the step loop waits for earlier saves before it takes another one, and for how long."""

from __future__ import annotations

from ckptkit.model.policies import DurableBusy
from ckptkit.model.tiers import DURABLE
from ckptkit.save.flusher import Flusher
from ckptkit.save.records import Admission
from ckptkit.save.worker import Worker
from ckptkit.util import clock
from ckptkit.util.clock import Deadline


def await_admission(
    writer: Worker,
    flusher: Flusher,
    due: frozenset[str],
    busy: DurableBusy,
    timeout_s: float,
    *,
    must_wait: bool,
    last: Deadline | None,
) -> Admission:
    """Waits for the saves before one that is due in the durable tier, on the step loop's thread.

    At most `timeout_s`; not at all for a save that is due in fast tiers alone or, unless it is a `must_wait`, where one
    that comes too early is skipped, or the durable tier fails. One that no other follows has until `last`; it waits for
    the writer, a little for peers and disk, and queues behind a durable save: none may cost the faster tiers.
    """
    forced = last is not None or must_wait
    patient = busy == "wait" and not flusher.durable_failing
    waits = last is not None or (DURABLE in due and (must_wait or patient))
    was_busy, waiting_s = waits and not (writer.idle and flusher.idle), clock.monotonic_s()
    deadline = last or Deadline(timeout_s if waits else 0.0)
    in_time = not waits or writer.wait_idle(deadline.left_s)
    if last is not None:
        soon = Deadline(last.left_s / 4)
        flusher.wait_copies(soon)
        flusher.wait_disk(soon)
    elif waits:
        in_time = in_time and flusher.wait_durable(deadline, patient=must_wait)
        if not in_time and not must_wait and flusher.durable_failing:
            waits, in_time, deadline = False, True, Deadline(0.0)
    waited_s = clock.monotonic_s() - waiting_s
    return Admission(
        waits=waits, forced=forced, was_busy=was_busy, in_time=in_time, waited_s=waited_s, deadline=deadline
    )

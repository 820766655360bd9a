"""Reports saves and restores to `jax.monitoring`: by Orbax's names, and by names of ours below `/ckptkit/`."""

from __future__ import annotations

from typing import final

from jax import monitoring

from ckptkit.durable.orbax.monitoring import OrbaxMonitoring
from ckptkit.events import Event, EventLog, Kind
from ckptkit.model.tiers import DURABLE

_WAITING_MAX = 16  # durable saves under way, and lost ones
_BY_ORBAX = "durable (orbax)"  # the source of a restore that Orbax did, and reported
_UNTOLD = frozenset({Kind.CALLED, Kind.PHASE})  # often, and without a length


def monitor_events(events: EventLog, process: int, orbax: OrbaxMonitoring) -> None:
    """Reports to `jax.monitoring` every event from now on.

    An event is `/ckptkit/<kind>`, with its tier; a length of time in it `/ckptkit/<kind>/<field>_secs`, its bytes
    `/ckptkit/<kind>/bytes`; a span `/ckptkit/span/<name>/duration_secs`. Orbax's names: process 0 alone, as in Orbax.
    """
    events.observe(_tell_ours, once="jax.monitoring")
    if process == 0:
        events.observe(_OrbaxNames(orbax), once="orbax's names")


def _tell_ours(event: Event) -> None:
    if event.kind in _UNTOLD:
        return
    name = f"/ckptkit/{event.kind}"
    if event.kind == Kind.SPAN:
        name += f"/{event.fields['span']}"
    labels = {} if event.tier is None else {"tier": event.tier}
    monitoring.record_event(name, **labels)
    for field, value in event.fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if field.endswith("_s"):
            monitoring.record_event_duration_secs(f"{name}/{field.removesuffix('_s')}_secs", float(value), **labels)
        elif field == "bytes":
            monitoring.record_scalar(f"{name}/bytes", value, **labels)


@final
class _OrbaxNames:
    """Reports by Orbax's names. Steps that Orbax wrote or read itself are left out: it reports them."""

    def __init__(self, orbax: OrbaxMonitoring):
        self._orbax = orbax
        self._staged: dict[int | None, tuple[float, int]] = {}  # by step: held the loop for, bytes
        self._began_s: float | None = None
        self._restoring = False

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.kind == Kind.STAGED and DURABLE in fields.get("tiers", ()):
            blocking_s, tree_bytes = fields["stall_s"] + fields["computing_s"], fields["tree_bytes"]
            self._staged[event.step] = blocking_s, tree_bytes
            while len(self._staged) > _WAITING_MAX:
                self._staged.pop(next(iter(self._staged)))
            began_s = event.at_s - blocking_s
            if self._began_s is not None:
                self._orbax.saves_apart(max(0.0, began_s - self._began_s))
            self._began_s = began_s
            self._orbax.save_staged(blocking_s, fields["waited_s"], tree_bytes)
        elif event.kind == Kind.COMMITTED and event.tier == DURABLE and event.step in self._staged:
            blocking_s, tree_bytes = self._staged.pop(event.step)
            self._orbax.save_committed(fields["duration_s"], blocking_s, tree_bytes)
        elif event.kind == Kind.PLANNED and not self._restoring:
            self._restoring = True
            self._orbax.restore_began()
        elif event.kind == Kind.RESTORED:
            self._restoring = False
            if _BY_ORBAX not in fields["sources"]:
                self._orbax.restored(fields["duration_s"], fields["tree_bytes"])

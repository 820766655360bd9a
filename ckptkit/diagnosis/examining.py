"""`diagnose`: gathers the facts of a run, and asks every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ckptkit.diagnosis.mounts import misplaced
from ckptkit.diagnosis.records import Advice, Facts
from ckptkit.diagnosis.rules import RULES
from ckptkit.errors import CorruptCheckpointError
from ckptkit.events import Event
from ckptkit.goodput import goodput_report, load_run
from ckptkit.inspection import list_steps
from ckptkit.inspection.records import FORMAT
from ckptkit.upkeep import usage
from ckptkit.util.plain import plain_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings of the rules for a run, the most urgent first. `events`: where its logs are; None: none were given.

    `facts`: the inputs of the rules.
    """

    root: str
    events: str | None
    rules: int
    advice: tuple[Advice, ...]
    facts: Facts
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = plain_fields(self, without=("facts",))
        return {"format": FORMAT, **found, "stored_bytes": self.facts.usage.stored_bytes}


def diagnose(
    root: str,
    *,
    events: str | None = None,
    tiers: Sequence[str] = (),
    host_id: str,
    timeout_s: float = 20.0,
    measure: bool = False,
) -> Diagnosis:
    """Looks at a durable root, this host's fast tiers, their mounts, and the event logs of its run (a directory, as for
    `goodput`). Reports what is slow, at risk or wasteful. Reads no array. Writes nothing, except with `measure`: up to
    32 MiB, which it then removes, into each fast tier that is on the wrong mount, for its rate.

    Without `events`, the rules that need them report nothing. Cost: that of `list_steps`, `usage` and reading the logs.
    Raises `StepNotFoundError` without a root, FileNotFoundError without logs, `CorruptCheckpointError` for logs that
    cannot be read, `StoreError`.
    """
    listing = list_steps(root, tiers=tiers, host_id=host_id, timeout_s=timeout_s)
    used = usage(root, tiers=tiers, host_id=host_id, timeout_s=timeout_s)
    report, told = None, list[Event]()
    if events is not None:
        try:
            logs = load_run(events)
            told = sorted(chain.from_iterable(logs), key=lambda event: event.at_s)
            report = goodput_report(logs)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{events}: {error}", path=events) from error
    wrong = misplaced(listing.root, tiers, told, measure=measure)
    facts = Facts(usage=used, steps=listing.steps, report=report, events=told, misplaced=wrong)
    advice = chain.from_iterable(rule(facts) for rule in RULES)
    return Diagnosis(
        root=listing.root,
        events=events,
        rules=len(RULES),
        advice=tuple(advice),
        facts=facts,
        notes=listing.notes,
        problems=listing.problems,
    )

"""The exchange of processes about their replicas at each save: few bytes, and enough to name what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

import pytest

from ckptkit.errors import CoordinationError
from ckptkit.events import Event, EventLog, Kind
from ckptkit.job.coordination import Decide, Job
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import BoxRecord, LeafRecord, ManifestText, SaveId
from ckptkit.model.policies import ReplicaPolicy
from ckptkit.save.agreement.protocol import drive
from ckptkit.save.agreement.replica_check import ReplicaComparison, first_look
from ckptkit.snapshot.describe import Description, LeafSource, SlotExtent

COUNT = 10_000
SAVE = SaveId(1, 5, 2)
NAME = "0.5.0"


@final
class Alike:
    """Process 0 of many that hold the same, except the last one if it is `differing`."""

    process = 0
    count = COUNT
    timeout_s = 5.0

    def __init__(self, *, differing: bool = False, detailed: bool = True):
        self.said: list[str] = []
        self.heard: list[str] = []
        self.about: set[str] = set()
        self._differing, self._detailed = differing, detailed

    def agree(
        self,
        channel: str,
        value: Any,
        decide: Decide,
        *,
        timeout_s: float | None = None,
        about: str = "",
        is_veto: Callable[[Any], bool] | None = None,
        order: Any = None,
    ) -> Any:
        """The decision of process 0."""
        del timeout_s, is_veto, order
        if channel == "replica-details" and not self._detailed:
            raise CoordinationError("replica-details: process 7 did not join")
        self.about.add(about)
        self.said.append(json.dumps(value))
        other = self.said[-1].replace("aaaa", "bbbb").replace(self.hash_of(value), "0" * 32)
        last = json.loads(other if self._differing else self.said[-1])
        self.heard.append(json.dumps(decide([json.loads(self.said[-1])] * (COUNT - 1) + [last])))
        return json.loads(self.heard[-1])

    def hash_of(self, value: Any) -> str:
        """That of the only box."""
        (found,) = value["sets"].values() if "sets" in value else value["hashes"]["0"]
        return found

    def ask_process_0(self, channel: str, decide: Callable[[], Any], **words: Any) -> Any:
        """Not asked here."""
        raise AssertionError((channel, decide, words))

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        """Nothing is missed here."""
        raise AssertionError((channel, about))

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        """Nothing raises here."""
        raise AssertionError((channel, value, decide, about))


def compared(coordinator: Alike) -> list[Event]:
    """The events of a save of one scalar that all processes hold."""
    scalar = Box((), ())
    record = LeafRecord(
        path=("count",), keys="d", kind="jax", shape=(), dtype="int32", cell=(),
        boxes=(BoxRecord(box=scalar, offset=0, digests=()),),
    )  # fmt: skip
    sharding: Any = SimpleNamespace(num_devices=COUNT)
    source = LeafSource(sharding=sharding, record=record, holders={scalar: tuple(range(COUNT))}, devices=(None,))
    extents = (SlotExtent(0, 0, 4, ((0, 4),), False),)
    description = Description(
        items={"state": (source,)},
        treedefs={},
        extents=extents,
        slot_bytes=4096,
        share_bytes=4096,
        text=ManifestText({}),
    )
    events, found = EventLog(), list[Event]()
    events.observe(found.append)
    outcomes: Any = SimpleNamespace()
    job = Job(coordinator=coordinator, events=events)
    comparison = ReplicaComparison(ReplicaPolicy(), job, outcomes, "host")
    digests = {0: ("aaaa" * 8,)}
    verdict = coordinator.agree(
        "commit",
        comparison.ballot(description, (), digests),
        first_look,
        about=NAME,
    )
    why = drive(comparison.follow_up(SAVE, NAME, description, verdict, digests), coordinator)
    assert why is None, "it is reported, and refuses no save"
    return [event for event in found if event.kind == Kind.REPLICAS_DIFFER]


def test_report_of_a_shared_scalar_is_small_per_process() -> None:
    """Process 0 would receive half a gigabyte at every save: each process would name all of them."""
    job = Alike()
    assert compared(job) == []
    assert [len(said) < 200 for said in job.said] == [True]


@pytest.mark.parametrize("detailed", [True, False])
def test_mismatch_names_its_processes_if_details_are_missing(detailed: bool) -> None:
    """A broken device would be looked for on ten thousand hosts."""
    job = Alike(differing=True, detailed=detailed)
    (event,) = compared(job)
    assert all(len(said) < 300 for said in job.said)
    assert all(len(heard) < 2000 for heard in job.heard)
    assert job.about == {NAME}, "a process that missed these of one save is there at the next"
    if detailed:
        assert (event.fields["leaf"], event.fields["holders"][0]["process"]) == ("count", COUNT - 1)
    else:
        assert event.fields["leaf"] is None
        assert [each["process"] for each in event.fields["holders"]] == list(range(16))

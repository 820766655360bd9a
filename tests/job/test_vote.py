"""Reports of processes about their part: enough to know the reason, and small enough for thousands of them."""

from __future__ import annotations

import json
from typing import Any, final

import pytest

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.job.coordination import Decide
from ckptkit.job.vote import REJECTING, RejectedError, voted

COUNT = 10_000


@final
class Alike:
    """Process 0 of many that all report the same."""

    process = 0
    count = COUNT
    timeout_s = 5.0

    def __init__(self) -> None:
        self.said = ""
        self.heard = ""
        self.others: Any = None  # what those after process 0 vote, where it is not the same

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """The decision of process 0."""
        del channel, timeout_s, about
        self.said = json.dumps(value)
        own = json.loads(self.said)
        self.heard = json.dumps(decide([own, *[self.others or own] * (COUNT - 1)]))
        return json.loads(self.heard)

    def ask_process_0(self, channel: str, decide: Any, *, timeout_s: float | None = None, about: str = "") -> Any:
        """Not asked here."""
        raise AssertionError((channel, decide, timeout_s, about))


def test_rejections_of_ten_thousand_processes_are_summarised() -> None:
    """Each of them would receive all reports: of a damaged step 100 million reasons, through one process."""
    job: Any = Alike()
    error = CorruptCheckpointError("leaf params.h0.w is damaged; " * 1000)
    with pytest.raises(RejectedError) as rejected, voted(job, "restore", timeout_s=5):
        raise error
    text = rejected.value.reason.text
    assert text.startswith("process 0: CorruptCheckpointError: leaf params.h0.w is damaged; ")
    assert text.endswith("; and 9996 more processes")
    assert len(job.said) < 4096
    assert len(job.heard) < 16384


def test_fatal_error_is_raised_in_full() -> None:
    """The list of differences between two models would be cut off where it is read."""
    error = PeerUnreachableError("x" * 100_000)
    job: Any = Alike()
    with pytest.raises(PeerUnreachableError) as raised, voted(job, "restore", timeout_s=5):
        raise error
    assert raised.value is error
    assert len(job.said) < 4096
    with pytest.raises(RejectedError), voted(job, "x", timeout_s=5, rejecting=(*REJECTING, PeerUnreachableError)):
        raise error


@pytest.mark.parametrize("own", [None, CorruptCheckpointError("w is damaged")])
@pytest.mark.parametrize("fatal", [False, True])
def test_verdict_of_the_others_is_raised_here_too(own: Exception | None, fatal: bool) -> None:
    """A process whose part went well would go on with a save that the others have rejected."""
    job: Any = Alike()
    name, causes = ("PeerUnreachableError", []) if fatal else ("CorruptCheckpointError", ["damaged"])
    job.others = [fatal, name, "of the others", causes]

    def part() -> None:
        with voted(job, "restore", timeout_s=5):
            if own is not None:
                raise own

    with pytest.raises(PeerUnreachableError if fatal else RejectedError, match=r"process 1: .*of the others"):
        part()

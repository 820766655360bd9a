"""Reports of processes about their part: enough to know the reason, and small enough for thousands of them."""

from __future__ import annotations

import json
from typing import Any, final

import pytest

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.job.coordination import Decide
from ckptkit.job.vote import REJECTING, act_together

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

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """The decision of process 0."""
        del channel, timeout_s, about
        self.said = json.dumps(value)
        self.heard = json.dumps(decide([json.loads(self.said)] * COUNT))
        return json.loads(self.heard)

    def ask_process_0(self, channel: str, decide: Any, *, timeout_s: float | None = None, about: str = "") -> Any:
        """Not asked here."""
        raise AssertionError((channel, decide, timeout_s, about))


def refuse(error: Exception) -> Any:
    def act() -> None:
        raise error

    return act


def test_rejections_of_ten_thousand_processes_are_summarised() -> None:
    """Each of them would receive all reports: of a damaged step 100 million reasons, through one process."""
    job: Any = Alike()
    error = CorruptCheckpointError("leaf params.h0.w is damaged; " * 1000)
    rejection, done = act_together(job, "restore", refuse(error), timeout_s=5)
    assert done is None
    assert rejection is not None
    assert rejection.text.startswith("process 0: CorruptCheckpointError: leaf params.h0.w is damaged; ")
    assert rejection.text.endswith("; and 9996 more processes")
    assert len(job.said) < 4096
    assert len(job.heard) < 16384


def test_fatal_error_is_raised_in_full() -> None:
    """The list of differences between two models would be cut off where it is read."""
    error = PeerUnreachableError("x" * 100_000)
    job: Any = Alike()
    with pytest.raises(PeerUnreachableError) as raised:
        act_together(job, "restore", refuse(error), timeout_s=5)
    assert raised.value is error
    assert len(job.said) < 4096
    assert act_together(job, "x", refuse(error), timeout_s=5, rejecting=(*REJECTING, PeerUnreachableError))[0]

"""What JAX is told of the other processes."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from trainer.__main__ import main as command
from trainer.__main__ import read_flags
from trainer.cluster import join


def test_the_timeouts_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a lost host is noticed after JAX's own 100 s, whatever the flag says."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", told.update)
    flags = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--process", "1"]
    flags += ["--heartbeat-s", "7", "--start-timeout-s", "11"]
    join(read_flags(command.make_context("trainer", flags).params).cluster, None)
    assert told == {
        "coordinator_address": "127.0.0.1:1",
        "num_processes": 2,
        "process_id": 1,
        "initialization_timeout": 11,
        "heartbeat_timeout_seconds": 7,
        "shutdown_timeout_seconds": 21,
    }

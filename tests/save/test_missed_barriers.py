"""A durable save with a barrier that one process missed: the next save is unaffected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CoordinationError, TransientStoreError
from ckptkit.model.manifest import SaveId
from tests.job.fake_service import FakeJob


def test_failed_listing_on_one_process_fails_only_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later save of the job would be committed durably: each time the others would wait in vain for a process that
    gets the previous verdict."""
    with monkeypatch.context() as patched:
        job = FakeJob(patched, 2)
    assert jax.process_count() == 1
    options = ocp.CheckpointManagerOptions()
    durables = {}

    def make(coordinator: Any) -> None:
        durables[coordinator.process] = DurableSteps(str(tmp_path), options, coordinator)

    def save(coordinator: Any, step: int) -> None:
        items: Any = {"state": HostTreeSave({"w": np.arange(8.0)})}
        durables[coordinator.process].save(SaveId(1, step, step), items, metrics=None, ancestry=Ancestry())

    assert job.all(make) == [None, None]

    def away(*_: Any) -> None:
        raise TransientStoreError("the bucket cannot be listed")

    get = job.service.blocking_key_value_get

    def in_vain(key: str, timeout_ms: int) -> str:
        if "step-begun" in key:  # nobody comes: not waited for here
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return get(key, timeout_ms)

    with monkeypatch.context() as patched:
        patched.setattr(durables[1].stock, "known", away)
        patched.setattr(job.service, "blocking_key_value_get", in_vain)
        first = job.all(lambda c: save(c, 1))
    assert [type(error) for error in first] == [CoordinationError, TransientStoreError]
    assert [job.all(lambda c, step=step: save(c, step)) for step in (2, 3)] == [[None, None]] * 2
    assert durables[0].steps() == [2, 3]
    for durable in durables.values():
        durable.close()

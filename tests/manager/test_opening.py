"""Which saves a job that begins has, where some shares are lost and others cannot be reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import orbax.checkpoint as ocp
import pytest

from ckptkit.errors import CheckpointError, CorruptCheckpointError, PeerUnreachableError
from ckptkit.events import EventLog
from ckptkit.manager.root import epoch_records, first_look
from ckptkit.manager.stock import _covered, _shares_of_all
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.restore.inventory import Held
from tests.restore.test_plan import manifest, rows

OLD, NEW = SaveId(2, 6, 3), SaveId(2, 7, 4)


class Peers:
    """Every process holds the whole of every save; what they answer is told by process."""

    def __init__(self, answers: dict[int, Exception | None]):
        self._answers = answers

    def serves(self, process: int) -> bool:
        return process in self._answers

    def manifest(self, process: int, save_id: SaveId, share: int) -> tuple[Manifest, str]:
        if (error := self._answers[process]) is not None:
            raise error
        return manifest(rows((0, 8)), save=save_id, process=share), "tag"


def covered(answers: dict[int, Exception | None]) -> list[SaveId]:
    """Of two saves of three processes of which each has lost a share."""
    reports = [[Held(save_id=save, count=3, shares=((process, "a"),)) for save in (OLD, NEW)] for process in (1, 2)]
    client: Any = Peers(answers)
    return _covered(partial(_shares_of_all, client, [[], *reports]), [OLD, NEW])


def test_replicas_cover_lost_shares() -> None:
    """A job whose replicas hold everything would go back to the durable step."""
    assert covered({1: None, 2: None}) == [NEW]
    assert covered({2: None}) == [NEW], "who serves nothing is not asked"
    assert covered({}) == []
    assert covered({1: CorruptCheckpointError("no longer there")}) == []


def test_unreachable_process_does_not_count_as_missing() -> None:
    """`latest_step` would be an older one because of a moment on the network, and what came after be trained anew."""
    with pytest.raises(PeerUnreachableError, match="process 1"):
        covered({1: PeerUnreachableError("process 1 did not answer"), 2: None})


def test_processes_with_different_roots_are_refused(tmp_path: Path) -> None:
    """Each step would be written to the root of process 0, and found by no other process after a restart."""

    class Job:
        def agree(self, channel: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
            return decide([value, f"{tmp_path}/of-process-1"])

    url, job = f"{tmp_path}/of-process-0", Job()
    with pytest.raises(CheckpointError, match=r"process 0 has .*of-process-0, process 1 has .*of-process-1"):
        first_look(epoch_records(url, EventLog()), url, ocp.CheckpointManagerOptions(), cast(Any, job))
    assert list(tmp_path.iterdir()) == []

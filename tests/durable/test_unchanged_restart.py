"""A new process takes over the data files of the last committed step, whatever became of that step meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import DurableProfile
from ckptkit.durable.cells.sharing import found_again
from ckptkit.model import paths
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from tests.cases import long_except
from tests.durable.test_unchanged import _own_bytes, _save, _shared, _state
from tests.durable.test_unchanged_bucket import _received_bytes
from tests.states import abstract, assert_same

_CHANGED_BYTES = 200_000  # at most, where only the adapter is written, of 2,400,000 that are frozen
_PLAIN = DurableProfile()


def _run(root: str, steps: Iterable[int], profile: DurableProfile = _PLAIN, **options: Any) -> None:
    """One attempt of a job: a manager of its own, which knows nothing of the one before."""
    with ckptkit.CheckpointManager(root, durable=profile, **options) as manager:
        for step in steps:
            _save(manager, step, _state(step))


def _assert_restored(root: str, step: int) -> None:
    with ckptkit.CheckpointManager(root) as reader:
        args = ocp.args.StandardRestore(abstract(_state(step)))  # pyright: ignore[reportCallIssue]
        assert_same(reader.restore(step, args=args), _state(step))


@pytest.mark.long
@pytest.mark.parametrize("attempts", [[[0, 1], [2]], [[0], [1], [2]]])
def test_one_save_of_a_new_process_writes_what_changed(tmp_path: Path, attempts: list[list[int]]) -> None:
    """A preemptible job that saves once or twice in each attempt would write its frozen base with every step."""
    root = tmp_path / "root"
    for steps in attempts:
        words = [sys.executable, "-m", __name__, str(root), *map(str, steps)]
        subprocess.run(words, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=300)
    assert _own_bytes(root / "2") < _CHANGED_BYTES
    assert _shared(root / "2") == _shared(root / "1")
    shutil.rmtree(root / "0")
    shutil.rmtree(root / "1")
    _assert_restored(str(root), 2)


def test_one_save_of_a_new_process_sends_what_changed(server: BucketServer) -> None:
    """The same in a bucket: the base would be uploaded twice more after each start."""
    _run("gs://runs/run", [0, 1])
    server.log.clear()
    _run("gs://runs/run", [2])
    assert _received_bytes(server) < _CHANGED_BYTES
    store = open_store("gs://runs/run")
    store.delete_many([key for step in (0, 1) for key in store.list_all(str(step))])
    _assert_restored("gs://runs/run", 2)


def test_bucket_object_that_is_cut_off_is_not_copied(server: BucketServer) -> None:
    """The copies of a cut-off object would be damage of every later step, and a restart would no longer end that."""
    _run("gs://runs/run", [0, 1])
    store = open_store("gs://runs/run")
    (file,) = [key for key in store.list_all("1/default/d") if "/unchanged." in key]
    store.put(file, store.get(file)[:-1])
    _run("gs://runs/run", [2])
    assert not [key for key in store.list_all("2/default/d") if key.endswith(file.rpartition("/")[2])]
    _assert_restored("gs://runs/run", 2)
    del server


def test_steps_that_share_a_file_are_counted_across_restarts(tmp_path: Path) -> None:
    """A run that is restarted often would share one file, and its bit rot, among all of its steps."""
    for step in range(7):
        _run(str(tmp_path), [step], DurableProfile(shared_steps_max=3))
    links = [max(p.stat().st_nlink for p in (tmp_path / str(s) / "default/d").iterdir()) for s in range(7)]
    assert links == [1, 3, 3, 3, 3, 3, 3]


def _record(root: Path) -> Path:
    return root / "1/default/_ckptkit/unchanged-0.json"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _point_elsewhere(root: Path) -> None:
    """A record that is consistent, of another save of that number."""
    record = json.loads(_record(root).read_bytes())
    record["save_id"][2] += 1
    _record(root).write_text(json.dumps(record))


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "the step is missing": lambda root: shutil.rmtree(root / "1"),
    "a data file is missing": lambda root: (root / "1/default/d" / next(iter(_unchanged(root)))).unlink(),
    "a data file is cut off": lambda root: os.truncate(root / "1/default/d" / next(iter(_unchanged(root))), 1000),
    "the record is missing": lambda root: _record(root).unlink(),
    "the record is damaged": lambda root: _flip(_record(root)),
    "the record is empty": lambda root: _record(root).write_bytes(b""),
    "the record is of another save": _point_elsewhere,
    "the sidecar is damaged": lambda root: _flip(root / "1/default/_ckptkit/process-0.json"),
    "the mark is missing": lambda root: (root / "1" / paths.COMMIT_MARK).unlink(),
}


def _unchanged(root: Path) -> list[str]:
    return [path.name for path in (root / "1/default/d").iterdir() if path.name.startswith("unchanged.")]


@pytest.mark.parametrize("damage", long_except(["the mark is missing", "the sidecar is damaged"], _DAMAGES))
def test_step_that_cannot_be_shared_is_written_whole(tmp_path: Path, damage: str) -> None:
    """A save would fail, or take over bytes that are not those of the state."""
    _run(str(tmp_path), [0, 1])
    names = set(_unchanged(tmp_path))
    _DAMAGES[damage](tmp_path)
    _run(str(tmp_path), [2])
    assert not names & {path.name for path in (tmp_path / "2/default/d").iterdir()}
    assert _own_bytes(tmp_path / "2") > 2_000_000
    _run(str(tmp_path), [3, 4])
    for step in (2, 3, 4):
        _assert_restored(str(tmp_path), step)
    assert _own_bytes(tmp_path / "4") < _CHANGED_BYTES
    assert {proof.state for proof in ckptkit.verify(str(tmp_path)).steps if proof.step > 1} == {"proven"}


def test_step_deleted_between_start_and_first_save_is_not_needed(tmp_path: Path) -> None:
    """The manager knows the step from its start, and its save would fail."""
    _run(str(tmp_path), [0, 1])
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1
        shutil.rmtree(tmp_path / "1")
        _save(manager, 2, _state(2))
    _assert_restored(str(tmp_path), 2)


def test_save_after_a_rollback_shares_with_what_is_left(tmp_path: Path) -> None:
    """The bytes of an abandoned step would be taken for those of the branch that goes on."""
    _run(str(tmp_path), [0, 1, 2])
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.restore(1)
        _save(manager, 2, _state(2, changed=2))
        _save(manager, 3, _state(3))
    for step, changed in ((2, 2), (3, 0)):
        with ckptkit.CheckpointManager(tmp_path) as reader:
            args = ocp.args.StandardRestore(abstract(_state(step)))  # pyright: ignore[reportCallIssue]
            assert_same(reader.restore(step, args=args), _state(step, changed=changed))
    assert {proof.state for proof in ckptkit.verify(str(tmp_path)).steps} == {"proven"}


def test_save_after_a_repair_writes_its_own_files(tmp_path: Path) -> None:
    """A repaired step has other data files than its record names."""
    root, ssd = tmp_path / "root", tmp_path / "ssd"
    options = {"tiers": [ckptkit.Tier.ssd(str(ssd), save=ckptkit.EverySteps(1))], "host_id": "h0"}
    _run(str(root), [0, 1], **options)
    damaged = root / "1/default/d" / next(iter(_unchanged(root)))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    found = ckptkit.scrub(str(root), [str(ssd)], repair=True, host_id="h0")
    assert [each.done for each in found.treatments] == [True]
    _run(str(root), [2, 3], **options)
    assert damaged.name not in {path.name for path in (root / "2/default/d").iterdir()}
    assert {proof.state for proof in ckptkit.verify(str(root)).steps} == {"proven"}
    assert _own_bytes(root / "3") < _CHANGED_BYTES


def test_record_counts_only_for_processes_of_its_own_layout(tmp_path: Path) -> None:
    """Each process of a job of another size would take the files of a part that it does not write."""
    _run(str(tmp_path), [0, 1])
    url = f"{tmp_path}/1"

    def found(process: int, count: int, profile: DurableProfile = _PLAIN) -> Any:
        return found_again(url, "default", "/default", process, count, profile)

    assert found(0, 1).directory == f"{url}/default"
    assert found(0, 2) is found(1, 1) is found(1, 2) is None
    own = found(0, 1)
    frozen = {name for group in own._groups for name in group.live}
    assert frozen == {f"base{n}" for n in range(6)}
    encoded = found(0, 1, DurableProfile(compression="zstd"))
    assert {name for name in frozen if encoded._signatures[name] == own._signatures[name]} == frozen


def test_other_compression_after_a_restart_writes_everything(tmp_path: Path) -> None:
    """Plain cells under the metadata of compressed ones cannot be decoded."""
    _run(str(tmp_path), [0, 1])
    _run(str(tmp_path), [2, 3, 4], DurableProfile(compression="zstd", copied_bytes=1 << 10))
    assert not _shared(tmp_path / "1") - _shared(tmp_path / "0")
    for step in (1, 2, 3, 4):
        _assert_restored(str(tmp_path), step)
    assert _own_bytes(tmp_path / "4") < _CHANGED_BYTES


if __name__ == "__main__":
    _run(sys.argv[1], map(int, sys.argv[2:]))

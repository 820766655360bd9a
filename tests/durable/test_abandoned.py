"""The leftovers of a writer that died, or only stopped: removed by the next run that saves, and never committed by the
writer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable import commit
from ckptkit.durable.abandoned import clean_left, left_behind
from ckptkit.durable.commit import MarkAttempt
from ckptkit.durable.lifecycle.delete import move_away
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.read_step import identity_metadata
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import CheckpointError
from ckptkit.inspection import list_steps
from ckptkit.job.coordination import make_coordinator
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.store import MemoryStore, open_store, properties_of
from ckptkit.testing import FaultyStore, StoreCrash, StoreFault
from ckptkit.testing.bucket import BucketServer


@pytest.fixture(params=["disk", "bucket", "mount"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "durable")
    if request.param == "mount":
        return str(request.getfixturevalue("mounted_bucket").path / "durable")
    request.getfixturevalue("server")
    return "gs://runs/run"


def make_manager(root: str, events: list[ckptkit.Event] | None = None) -> ckptkit.CheckpointManager:
    log = ckptkit.EventLog()
    log.observe((events if events is not None else []).append)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    return ckptkit.CheckpointManager(root, options=options, events=log, processes=ckptkit.ProcessOptions(timeout_s=60))


def save(manager: ckptkit.CheckpointManager, step: int, value: float) -> None:
    assert manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3000, value)}))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: ckptkit.CheckpointManager, step: int | None = None) -> tuple[int, float]:
    found = manager.restore(step, args=ocp.args.StandardRestore({"w": jnp.zeros(3000)}))["w"]  # pyright: ignore[reportCallIssue]
    assert (found == found[0]).all()
    return int(manager.latest_step() or 0), float(found[0])


class Stopped:
    """A writer of `epoch` that stops at one point of a save of `step` for as long as the test likes."""

    def __init__(self, root: str, epoch: int, step: int, point: str, monkeypatch: pytest.MonkeyPatch):
        self._reached, self._goes_on = threading.Event(), threading.Event()
        self.raised: BaseException | None = None
        items = {"default": HostTreeSave({"w": np.full(3000, -1.0, np.float32)})}
        writer = StepWriter(root, make_coordinator(), DurableProfile())
        original = getattr(StepWriter, point)

        def stops(self_: Any, *args: Any) -> None:
            if self_ is writer:
                self._reached.set()
                assert self._goes_on.wait(120)
            original(self_, *args)

        monkeypatch.setattr(StepWriter, point, stops)

        def run() -> None:
            try:
                save_id = SaveId(epoch, step, 0)
                writer.write(str(step), save_id, items, identity_metadata(save_id))
            except BaseException as error:  # noqa: BLE001  looked at by the test
                self.raised = error

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._reached.wait(120)

    def go_on(self) -> BaseException | None:
        """Its end."""
        self._goes_on.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.raised


def test_recreated_directory_is_not_committed(tmp_path: Path) -> None:
    """A disk gives its number to the next directory: half a step of a run that was fenced off would be committed."""
    for step in range(20):
        attempt = commit.make_attempt(str(tmp_path), str(step), SaveId(1, step, 0), 0o777)
        attempt.begin()
        shutil.rmtree(attempt.place)
        os.makedirs(attempt.place)
        with pytest.raises(CheckpointError, match="a later run than epoch 1"):
            attempt.commit()
        attempt.give_up()
        assert not os.path.exists(tmp_path / str(step))
    assert not [name for name in os.listdir("/proc/self/fd") if str(tmp_path) in _target_of(name)], "nothing stays open"


def _target_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("point", ["_write_at", "_finish"], ids=["before its data", "before its mark"])
@pytest.mark.parametrize(
    "step",
    [5, pytest.param(3, marks=pytest.mark.long)],
    ids=["a number of its own", "the number of a later run's step"],
)
def test_stopped_writer_cannot_commit_a_cleaned_attempt(
    root: str, step: int, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would commit half a step, or bytes of two runs under one name, or take a committed step with it."""
    with make_manager(root) as manager:
        save(manager, 1, 1.0)
    stopped = Stopped(root, 1, step, point, monkeypatch)
    events: list[ckptkit.Event] = []
    with make_manager(root, events) as manager:
        assert restored(manager) == (1, 1.0)
        save(manager, 3, 3.0)
        (cleaned,) = [event for event in events if event.kind == ckptkit.Kind.CLEANED]
        assert [name.partition(paths.TEMPORARY)[0] for name in cleaned.fields["names"]] == [str(step)]
        error = stopped.go_on()
        assert isinstance(error, CheckpointError | OSError | ValueError), error
        manager.reload()
        assert list(manager.all_steps()) == [1, 3]
        assert restored(manager) == (3, 3.0)
        save(manager, 5, 5.0)
    with make_manager(root) as manager:
        assert restored(manager) == (5, 5.0)
        assert restored(manager, 3)[1] == 3.0
        save(manager, 6, 6.0)
    if properties_of(
        root
    ).atomic_rename:  # in a bucket its late objects may be below 5, which is not a step without a mark
        assert left_behind(open_store(root), [1, 3, 5, 6]) == []


def test_cleanup_skips_a_save_in_progress(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaning that takes a live save of the same or a later epoch would fail it for nothing."""
    with make_manager(root) as manager:
        save(manager, 1, 1.0)
    stopped = Stopped(root, 2, 3, "_finish", monkeypatch)
    assert clean_left(open_store(root), 2, lambda place: pytest.fail(place)) == []
    assert clean_left(open_store(root), 1, lambda place: pytest.fail(place)) == []
    assert stopped.go_on() is None
    with make_manager(root) as manager:
        assert restored(manager) == (3, -1.0)


def test_older_run_cannot_replace_an_attempt_of_a_later_run(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs would write one step in a bucket; on a disk each has a place of its own, and the first commits."""
    stopped = Stopped(root, 2, 3, "_finish", monkeypatch)
    items = {"default": HostTreeSave({"w": np.zeros(3000, np.float32)})}
    older = StepWriter(root, make_coordinator(), DurableProfile())
    if not properties_of(root).atomic_rename:
        with pytest.raises(CheckpointError, match="a later run than epoch 1"):
            older.write("3", SaveId(1, 3, 0), items, {})
        assert stopped.go_on() is None
    else:
        older.write("3", SaveId(1, 3, 0), items, {})
        assert isinstance(stopped.go_on(), ckptkit.StepAlreadyExistsError)
        assert left_behind(open_store(root), [3]) == []


def test_superseded_run_does_not_commit(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the older branch would appear next to the newer run's, and push one of its steps out."""
    with make_manager(root) as older:
        save(older, 1, 1.0)
        finish = StepWriter._finish

        def superseded(self: StepWriter, *args: Any) -> None:
            with make_manager(root) as newer:
                monkeypatch.setattr(StepWriter, "_finish", finish)
                assert restored(newer) == (1, 1.0)
                save(newer, 4, 4.0)
            finish(self, *args)

        monkeypatch.setattr(StepWriter, "_finish", superseded)
        with pytest.raises(ckptkit.SaveFailedError, match="a later run"):
            save(older, 2, 2.0)
    with make_manager(root) as manager:
        assert restored(manager) == (4, 4.0)
        assert list(manager.all_steps()) == [1, 4]


def make_left() -> MemoryStore:
    """A bucket with a committed step, one that epoch 1 has begun, one that epoch 3 writes, and one of Orbax's."""
    store = MemoryStore("gs://runs/run")
    for key in ("4/d/x", f"4/{paths.COMMIT_MARK}", "5/d/x", "5/d/y", "5/_METADATA", "6/d/x", "7/d/x"):
        store.put(key, b"1")
    for step, epoch in (("4", 1), ("5", 1), ("6", 1), ("6", 3)):
        store.put(f"{paths.INTENTS_DIR}/{paths.intent_name(step, epoch, f'{epoch:032x}')}", b"mark")
    return store


def without_intents(store: Any) -> list[str]:
    return [key for key in store.list_all("") if not key.startswith(paths.INTENTS_DIR)]


def test_crashed_bucket_cleanup_is_completed_by_the_next() -> None:
    """The steps that it had begun to remove would have no owner, or could still be committed."""
    whole = [f"4/{paths.COMMIT_MARK}", "4/d/x", "6/d/x", "7/d/x"]
    count = FaultyStore(make_left())
    assert clean_left(count, 2, lambda place: None) == ["5"]
    for died_after in range(count.operations):
        store = make_left()
        dying = FaultyStore(store, [StoreFault(effect="crash", skip=died_after)])
        with pytest.raises(StoreCrash):
            clean_left(dying, 2, lambda place: None)
        of_one = [name for name in store.list(paths.INTENTS_DIR) if name.startswith("e00000001") and "-5" in name]
        assert of_one or died_after > 1, "nothing is taken before it can be found again"
        if len(without_intents(store)) < len(without_intents(make_left())):
            assert not of_one, "an object went while its writer could still commit"
        clean_left(store, 4, lambda place: None)  # the next run
        assert set(without_intents(store)) >= {*whole[:2], "7/d/x"}
        assert not [key for key in without_intents(store) if key.startswith("5/")]
        assert store.list(paths.INTENTS_DIR) == []


def test_objects_left_by_an_attempt_are_removed_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the intents of those before it first: without its own the objects would be nobody's, and stay."""
    store = make_left()
    refuses = FaultyStore(store, [StoreFault(effect="io error", operations=("delete",), keys="5/*")])
    monkeypatch.setattr(commit, "open_store", lambda url: refuses)
    attempt = MarkAttempt("gs://runs/run", "5", SaveId(2, 5, 0))
    with pytest.raises(ckptkit.StoreError):
        attempt.begin()
    attempt.give_up()
    assert store.list_all("5") == ["5/_METADATA", "5/d/x", "5/d/y"]
    assert sorted(clean_left(store, 4, lambda place: None)) == ["5", "6"]
    assert store.list_all("5") == []
    assert store.list(paths.INTENTS_DIR) == []


def test_attempt_on_an_existing_step_leaves_no_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later run would look into a step that is whole."""
    store = make_left()
    monkeypatch.setattr(commit, "open_store", lambda url: store)
    with pytest.raises(ckptkit.StepAlreadyExistsError):
        MarkAttempt("gs://runs/run", "4", SaveId(2, 4, 0)).begin()
    with pytest.raises(CheckpointError, match="a later run than epoch 2"):
        MarkAttempt("gs://runs/run", "6", SaveId(2, 6, 0)).begin()
    assert not [name for name in store.list(paths.INTENTS_DIR) if name.startswith("e00000002")]


class SaysItsOwnIsThere:
    """A store whose client repeats a put that was answered, and the answer lost: it finds its own object there."""

    def __init__(self, inner: MemoryStore):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: bytes, *, mode: Any = "replace") -> None:
        self._inner.put(key, data, mode=mode)
        if mode == "create":
            raise FileExistsError(key)


def test_cleanup_recognises_its_own_intent() -> None:
    """One lost answer, and nothing of what earlier runs have left would be removed in this one."""
    store: Any = SaysItsOwnIsThere(make_left())
    assert clean_left(store, 2, lambda place: None) == ["5"]


def test_late_record_of_a_fenced_run_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that wakes up puts its last record, under a name that the newer run with fewer processes has not
    taken. It would damage a committed step."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        with make_manager("gs://runs/run") as manager:
            save(manager, 1, 1.0)
            save(manager, 2, 2.0)
        store, directory = open_store("gs://runs/run"), f"2/default/{paths.SIDECAR_DIR}"
        found = Manifest.from_bytes(store.get(f"{directory}/{paths.sidecar_name(0)}"), path="2")
        writer = dataclasses.replace(found.writer, process=1, count=2)
        late = dataclasses.replace(found, save_id=SaveId(0, 2, 0), writer=writer)
        store.put(f"{directory}/{paths.sidecar_name(1)}", late.to_bytes())
        with make_manager("gs://runs/run") as manager:
            assert restored(manager) == (2, 2.0)
        assert [proof.state for proof in ckptkit.verify("gs://runs/run").steps] == ["proven", "proven"]
        assert ckptkit.inspect("gs://runs/run/2").origin.proven
        assert ckptkit.inspect("gs://runs/run/2/default").origin.proven
        assert [step.state for step in list_steps("gs://runs/run", host_id="h").steps] == ["committed", "committed"]
        # Without a marker it is unknown which of them is the step's.
        store.put(f"2/{paths.COMMIT_MARK}", b"Checkpoint commit was successful")
        with make_manager("gs://runs/run") as manager:
            assert restored(manager)[1] == 1.0
        assert [proof.state for proof in ckptkit.verify("gs://runs/run").steps] == ["proven", "corrupt"]
        assert not ckptkit.inspect("gs://runs/run/2").origin.proven
        assert [step.state for step in list_steps("gs://runs/run", host_id="h").steps] == ["committed", "damaged"]


def test_crashed_disk_cleanup_is_completed_by_the_next(tmp_path: Path) -> None:
    """The same on a disk: a directory that was moved away would never be removed."""
    removed: list[str] = []

    class Died(BaseException):
        """Here."""

    def dies(place: str) -> None:
        raise Died(place)

    mine, orbax = paths.temporary_name("5", 1, "a" * 32), "6.orbax-checkpoint-tmp"
    for name in (mine, orbax, "4"):
        (tmp_path / name).mkdir()
    store = open_store(tmp_path)
    with pytest.raises(Died):
        clean_left(store, 2, dies)
    assert [name.partition("-")[0] for name in left_behind(store, [4])] == ["6.orbax", "_ckptkit/leaving/5.orbax"]
    assert clean_left(store, 2, removed.append) == []
    assert [Path(place).name.startswith(mine) for place in removed] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", orbax, "_ckptkit"]


def test_attempt_with_a_moved_directory_is_not_committed(tmp_path: Path) -> None:
    """A writer makes the directories that it needs: an empty step would be committed."""
    attempt = commit.make_attempt(str(tmp_path), "5", SaveId(1, 5, 0), 0o777)
    attempt.begin()
    move_away(attempt.place)
    with pytest.raises(CheckpointError, match="a later run than epoch 1 has taken its place away"):
        attempt.commit()
    assert not (tmp_path / "5").exists()

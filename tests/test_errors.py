"""Every error class has a real cause; what a person sees of it is one cause and one remedy."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import direct, errors
from ckptkit.cli import main
from ckptkit.errors import StoreError, StoreFullError, TierUnusableError, TransientStoreError
from ckptkit.store import RemoteStore, reaching
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, PermissionWithdrawn, QuotaFull, Status
from tests.mounts import Mounts, fill

args: Any = ocp.args
HERE = Path(__file__).parent
NOBODY = 65534
LINES_MAX = 3
TRACEBACK_LINES_MAX = 20  # with five frames of this file

# The real cause of each class: the file of tests that causes it, with its words where that is not its name.
CAUSES: dict[str, str | tuple[str, str]] = {
    "StepNotFoundError": "verification/test_verify.py",
    "ItemNotFoundError": "manager/test_resume.py",
    "NoRestorableStepError": "manager/test_restarts.py",
    "CorruptCheckpointError": "model/test_hostile_manifests.py",
    "ProgramChangedError": "resume/test_programs.py",
    "MemoryBudgetError": ("conversion/resharding/test_reshard.py", "give --memory at least"),
    "BeyondLimitError": "durable/test_foreign_files.py",
    "UnsuitedSaveError": "manager/test_counted_items.py",
    "UntrustedStepError": "upkeep/test_signing.py",
    "SigningKeyError": "upkeep/test_signing.py",
    "TreeMismatchError": "dropin/test_templates.py",
    "SurgeryError": "surgery/test_plan.py",
    "MergeError": "conversion/test_assembling.py",
    "SaveFailedError": "save/test_storage_errors.py",
    "ReplicaMismatchError": "save/test_replicas.py",
    "GuardStopError": "guard/test_guard.py",
    "NotJoinedError": ("launch/test_joined.py", "test_worker_that_has_not_joined"),
    "CoordinationError": "save/test_missed_barriers.py",
    "NewerFormatError": "verification/test_newer_format.py",
    "OutsideRootError": ("inspection/test_hostile.py", "leads out of"),
    "PeerUnreachableError": "peers/test_receiver.py",
    "StoreError": "test_errors.py",
    "TransientStoreError": "test_errors.py",
    "StoreFullError": "test_errors.py",
    "TierUnusableError": "test_errors.py",
}


def test_every_class_of_errors_has_a_test_with_its_cause() -> None:
    """A class that nothing raises, or that no test has seen raised."""
    found = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert found - {"CheckpointError"} == set(CAUSES)
    shown = {name: each if isinstance(each, tuple) else (each, name) for name, each in CAUSES.items()}
    assert [name for name, (file, words) in shown.items() if words not in (HERE / file).read_text()] == []


# A disk: full, over its quota, read only, forbidden.


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(50_000) + step}


class Home:
    """`place` gets the fault; `good` is a root to read, `scratch` may be written by every user."""

    def __init__(self, home: Path, mounts: Mounts):
        self.place = mounts.small(home / "place", "2m")
        self.good, self.scratch, self._names = home / "good", home / "scratch", count()
        self.place.chmod(0o755)
        self.scratch.mkdir()
        os.chmod(self.scratch, 0o777)
        for root in (self.good, self.place / "run"):
            save(root, 1)

    def new(self) -> Path:
        return self.scratch / str(next(self._names))


def save(root: Path, step: int, *tiers: ckptkit.Tier) -> None:
    saving = ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=0))
    with ckptkit.CheckpointManager(root, tiers=tiers, host_id="host", saving=saving) as manager:
        manager.save(step, args=args.StandardSave(state(step)))


WAYS: dict[str, Callable[[Home], Any]] = {
    "new root": lambda home: save(home.place / "new", 1),
    "root": lambda home: save(home.place / "run", 2),
    "ram": lambda home: save(home.new(), 1, ckptkit.Tier.ram(str(home.place / "ram"))),
    "ssd": lambda home: save(home.new(), 1, ckptkit.Tier.ssd(str(home.place / "ssd"))),
    "direct": lambda home: direct.save(home.place / "direct", state(1)),
    "pin": lambda home: ["pin", home.place / "run", "1"],
    "rollback": lambda home: ["rollback", home.place / "run", "--to", "1"],
    "copy": lambda home: ["copy", home.good, home.place / "copy"],
    "convert": lambda home: ["convert", home.good / "1", home.place / "m.npz"],
    "convert to Orbax": lambda home: ["convert", home.good / "1", home.place / "o", "--to", "orbax"],
    "extract": lambda home: ["extract", home.good / "1", home.place / "m.safetensors", "--only", "w"],
}


@contextmanager
def full(home: Home, mounts: Mounts) -> Iterator[None]:
    fill(home.place / "filler")
    yield


@contextmanager
def over_quota(home: Home, mounts: Mounts) -> Iterator[None]:
    """By the calls of Python that make a file or a name: this kernel may have no quotas."""

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *rest: Any, **named: Any) -> Any:
            makes = call.__name__ != "open" or (bool(rest) and isinstance(rest[0], int) and rest[0] & os.O_CREAT)
            if makes and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(home.place)):
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), os.fspath(path))
            return call(path, *rest, **named)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "mkdir", "link", "rename", "replace"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        yield


@contextmanager
def read_only(home: Home, mounts: Mounts) -> Iterator[None]:
    mounts.read_only(home.place)
    yield


@contextmanager
def forbidden(home: Home, mounts: Mounts) -> Iterator[None]:
    """This process goes on as a user who may read everything here."""
    if os.geteuid() != 0:
        pytest.skip("another user needs root")
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


ROOM = (StoreFullError, r"free some space|give fewer slots", full, None)
DISK: dict[str, tuple[Any, str, Callable[[Home, Mounts], AbstractContextManager[None]], set[str] | None]] = {
    "ENOSPC": ROOM,
    # Writes of TensorStore and NumPy are not refused by a call of Python.
    "EDQUOT": (StoreFullError, ROOM[1], over_quota, {"new root", "root", "direct", "pin", "rollback", "copy"}),
    "EROFS": ((StoreError, TierUnusableError), r"writable|this user may write", read_only, None),
    "EACCES": ((StoreError, TierUnusableError), r"this user", forbidden, None),
}


@pytest.fixture
def home(mounts: Mounts) -> Iterator[Home]:
    """Outside of pytest's directories, which other users may not read."""
    path = Path(tempfile.mkdtemp(prefix="ckptkit-errors-", dir="/dev/shm"))
    os.chmod(path, 0o755)
    yield Home(path, mounts)
    mounts.close()
    mounts._mounted.clear()
    shutil.rmtree(path)


@pytest.mark.parametrize("cause", DISK)
def test_disk_error_has_its_class_and_a_remedy(
    home: Home, mounts: Mounts, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk was an epoch that could not be recorded; a read-only place had no remedy in most commands."""
    kinds, remedy, broken, ways = DISK[cause]
    if cause == "EACCES":  # everything is imported before: the files of Python may not be readable to other users
        warm_up(home)
    wrong: list[str] = []
    with broken(home, mounts):
        for name in WAYS if ways is None else sorted(ways):
            wrong += [f"{name}: {each}" for each in problems(home, WAYS[name], kinds, remedy, capsys)]
    assert wrong == []


def warm_up(home: Home) -> None:
    other = Path(tempfile.mkdtemp(dir=home.scratch))
    for words in (["pin", home.good, "1"], ["unpin", home.good, "1"], ["rollback", home.good, "--to", "1"]):
        main([str(each) for each in words])
    main(["copy", str(home.good), str(other / "copy")])
    for name in ("m.npz", "m.safetensors"):
        main(["convert", str(home.good / "1"), str(other / name)])
    main(["convert", str(home.good / "1"), str(other / "o"), "--to", "orbax"])
    main(["extract", str(home.good / "1"), str(other / "e.safetensors"), "--only", "w"])
    direct.save(other / "direct", state(1))
    save(other / "root", 1, ckptkit.Tier.ram(str(other / "ram")), ckptkit.Tier.ssd(str(other / "ssd")))


def problems(
    home: Home, way: Callable[[Home], Any], kinds: Any, remedy: str, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The defects of the error of one way to write."""
    capsys.readouterr()
    try:
        words = way(home)
        if words is None:
            return ["it raised nothing"]
        code, said = main([str(each) for each in words]), capsys.readouterr().err
    except ckptkit.CheckpointError as error:
        cause = error.__cause__ if isinstance(error, ckptkit.SaveFailedError) else error
        shown = "".join(traceback.format_exception(error)).splitlines()
        found = [] if isinstance(cause, kinds) else [f"it is a {type(cause).__name__}: {cause}"]
        code, said = 1, str(error)
        if way is not WAYS["direct"] and len(shown) > TRACEBACK_LINES_MAX:
            found.append(f"the traceback has {len(shown)} lines: {shown}")
    else:
        found = []
    if code != 1:
        found.append(f"it ended with {code}")
    if not re.search(remedy, said):
        found.append(f"no remedy: {said}")
    if "internal error" in said or len(said.splitlines()) > LINES_MAX:
        found.append(f"not one cause and one remedy: {said}")
    return found


def test_whole_chain_is_logged_at_debug(tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture) -> None:
    """A report of a bug would have no frames of ckptkit."""
    save(tmp_path / "run", 1)
    mounts.read_only(tmp_path / "run")
    with pytest.raises(StoreError) as short:
        save(tmp_path / "run", 2)
    assert short.value.__cause__ is None
    with caplog.at_level(logging.DEBUG, "ckptkit"), pytest.raises(StoreError) as long:
        save(tmp_path / "run", 2)
    assert isinstance(long.value.__cause__, StoreError)
    (record,) = [each for each in caplog.records if "raises" in each.getMessage()]
    assert record.exc_info is not None
    assert "Read-only file system" in "".join(traceback.format_exception(record.exc_info[1]))


# A bucket: refused, absent, there already, busy, broken, and not reached.


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Its clients are made anew in each test: they remember where it is."""
    gcs: Any = fsspec.get_filesystem_class("gs")
    monkeypatch.setattr(reaching, "_found", {})
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        gcs.clear_instance_cache()
        yield server
    gcs.clear_instance_cache()


BUSY = (TransientStoreError, r"no answer within 0.3 s, or only answers to try again later \(429, 5xx\); look at the")
STATUSES: dict[str, tuple[Any, type[Exception], str]] = {
    "401": (
        Status(code=401),
        StoreError,
        r"refuses .*; missing is storage\.\S+\n.*grant storage\.objects\.get.*sign in",
    ),
    "403": (PermissionWithdrawn(), StoreError, r"refuses .*; missing is storage\.\S+\n.*grant storage\.objects\.get"),
    "quota": (QuotaFull(), StoreError, r"a quota is reached\nRaise it, or delete what is not needed\."),
    "404": (Status(code=404), FileNotFoundError, "gs://runs/run/key"),
    "429": (Status(code=429), *BUSY),
    "500": (Status(code=500), *BUSY),
    "503": (Status(code=503), *BUSY),
}


@pytest.mark.parametrize("name", STATUSES)
def test_status_of_a_bucket_has_its_class_and_a_remedy(
    server: BucketServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three sentences came as one line, with `\\n` in it."""
    effect, kind, words = STATUSES[name]
    store = RemoteStore("gs://runs/run", timeout_s=0.3)
    server.faults = FaultPlan(faults=(Fault(effect=effect),))
    acts: tuple[Callable[[], Any], ...] = (lambda: store.put("key", b"x"), lambda: store.get("key"))
    for act in acts:
        with pytest.raises(kind, match=words) as caught:
            act()
        assert type(caught.value) is kind
        assert len(str(caught.value).splitlines()) <= LINES_MAX
    code = main(["steps", "gs://runs/run", "--timeout", "0.3"])
    said = capsys.readouterr().err
    assert code == (10 if name == "404" else 1), said
    assert name == "404" or re.search(words, said), said
    assert len(said.splitlines()) <= LINES_MAX, said
    assert "\\n" not in said


def test_object_that_is_there_already_is_not_an_error_of_the_store(server: BucketServer) -> None:
    """412: who creates a record decides by it."""
    store = RemoteStore("gs://runs/run")
    store.put("key", b"1", mode="create")
    with pytest.raises(FileExistsError, match="gs://runs/run/key exists"):
        store.put("key", b"2", mode="create")


def test_bucket_that_does_not_exist_is_named(server: BucketServer) -> None:
    """The error had the address of an upload of a probe."""
    with pytest.raises(StoreError, match=r"^gs://none/run cannot be written: there is no such bucket; create it, or"):
        ckptkit.CheckpointManager("gs://none/run")


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://no-such-host.invalid:80", r"the name no-such-host\.invalid is not found .*; check it, and the name"),
        ("http://127.0.0.1:1", r"127\.0\.0\.1:1 refuses the connection; check its address, and that the service runs"),
        ("https", r"TLS with 127\.0\.0\.1:\d+ fails \(.*\); check its address, and the certificates of this host"),
    ],
    ids=["DNS", "refused", "TLS"],
)
def test_bucket_that_is_not_reached_says_why(
    server: BucketServer,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong name, a service that does not run and a wrong certificate were all 'no answer'."""
    own = os.environ["STORAGE_EMULATOR_HOST"]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", own.replace("http://", "https://") if endpoint == "https" else endpoint)
    store = RemoteStore("gs://runs/run", timeout_s=0.3)
    with pytest.raises(TransientStoreError, match=rf"^gs://runs/run/key: no answer within 0\.3 s: {words}"):
        store.get("key")
    assert main(["steps", "gs://runs/run", "--timeout", "0.3"]) == 1
    said = capsys.readouterr().err
    assert re.search(words, said), said
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize("end", [KeyError("mine"), SystemExit(0)], ids=lambda end: type(end).__name__)
def test_block_that_ends_by_an_error_hides_no_failed_save(tmp_path: Path, mounts: Mounts, end: BaseException) -> None:
    """The person would see the failure of `close`, and not what ended the job; or a job that lost its last save would
    end with code 0."""
    place = mounts.small(tmp_path / "small", "2m")
    state = {"w": np.ones(100_000, np.float32)}

    def job() -> None:
        with ckptkit.CheckpointManager(place / "run") as manager:
            manager.save(1, args=args.StandardSave(state))
            manager.wait_until_finished()
            fill(place / "rest")
            manager.save(2, args=args.StandardSave(state))
            raise end

    with pytest.raises((KeyError, ckptkit.SaveFailedError)) as raised:
        job()
    failure = "step 2 was not committed"
    if isinstance(end, KeyError):
        (note,) = end.__notes__
        assert raised.value is end
        assert f"SaveFailedError: {failure}" in note
    else:
        assert failure in str(raised.value)

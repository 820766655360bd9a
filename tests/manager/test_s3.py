"""`s3://` as a durable root: saves, restores, listings, prunes and proofs, against moto's server."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.conversion import convert, plan_convert
from ckptkit.diagnosis import explain
from ckptkit.formats import open_checkpoint
from ckptkit.store import RemoteStore, Store, open_store, put_new
from ckptkit.store.backends import refused
from ckptkit.testing.store_contract import StoreContract
from tests.formats.writers import by_numpy
from tests.states import abstract, assert_same, make_state

pytest.importorskip("s3fs")
servers = pytest.importorskip("moto.server")
s3_responses = pytest.importorskip("moto.s3.responses")
s3_exceptions = pytest.importorskip("moto.s3.exceptions")
boto3 = pytest.importorskip("boto3")

BUCKET = "runs"
# Of botocore and of moto, which nothing here can mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """One for all tests: clients of this process remember where it is."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            patch.setenv(name, "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield url
    server.stop()


@pytest.fixture
def root(service: str, request: pytest.FixtureRequest) -> str:
    del service
    return f"s3://{BUCKET}/{zlib.crc32(request.node.name.encode())}"  # digits, as a root that is named by its day


class TestContract(StoreContract):
    """S3 keeps what every store promises."""

    @pytest.fixture
    def store(self, root: str) -> Store:
        return RemoteStore(root)


def save(manager: ckptkit.CheckpointManager, step: int) -> None:
    assert manager.save(step, args=ocp.args.StandardSave(make_state(step)), force=True)  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: ckptkit.CheckpointManager, step: int | None) -> Any:
    return manager.restore(step, args=ocp.args.StandardRestore(abstract(make_state())))  # pyright: ignore[reportCallIssue]


def test_steps_are_saved_restored_pruned_and_verified(root: str) -> None:
    """A job on Amazon's machines would have no durable tier."""
    with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in range(4):
            save(manager, step)
        assert manager.all_steps() == [2, 3]
        assert_same(restored(manager, None), make_state(3))
    assert {name.partition("/")[0] for name in open_store(root).list_all("")} - {"_ckptkit"} == {"2", "3"}
    assert ckptkit.latest_step(root) == 3
    proof = ckptkit.verify(root)
    assert [step.state for step in proof.steps] == ["proven", "proven"], proof
    assert [leaf.name for leaf in ckptkit.inspect(f"{root}/3").items[0].leaves]
    with ckptkit.CheckpointManager(root) as manager:
        assert_same(restored(manager, 2), make_state(2))


def test_step_in_several_pieces_is_restored(root: str) -> None:
    """The pieces are databases that are joined: here too what joins them has to refer to their objects."""
    profile = ckptkit.DurableProfile(data_file_bytes=1 << 13, in_flight_bytes=1 << 15)
    args: Any = ocp.args.StandardSave({f"leaf{index}": jnp.arange(900) + index for index in range(12)})  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(root, durable=profile) as manager:
        manager.save(1, args=args)
    keys = list(open_store(root).list_all("1"))
    assert not [key for key in keys if "/n/" in key]
    said = explain(root, args, durable=profile)
    assert len([key for key in keys if "/d/" in key]) == said.data_files > 3
    assert [step.state for step in ckptkit.verify(root).steps] == ["proven"]
    with ckptkit.CheckpointManager(root) as manager:
        found: Any = manager.restore(1, args=ocp.args.StandardRestore(abstract(args.item)))  # pyright: ignore[reportCallIssue]
    assert_same(found, args.item)


def test_uncommitted_step_is_not_a_step(root: str) -> None:
    """Orbax knows no marks on s3://: it would restore half of a step, or refuse to save its number again."""
    with ckptkit.CheckpointManager(root) as manager:
        save(manager, 1)
    store = open_store(root)
    for name in store.list_all("1"):
        if name != "1/commit_success.txt":
            store.put(name.replace("1/", "2/", 1), store.get(name))
    with ckptkit.CheckpointManager(root) as manager:
        assert manager.all_steps() == [1] == [ckptkit.latest_step(root)]
        assert_same(restored(manager, None), make_state(1))
        save(manager, 2)
        assert manager.latest_step() == 2
        assert_same(restored(manager, 2), make_state(2))


def test_damage_is_detected(root: str) -> None:
    """A proof that reads nothing proves everything."""
    with ckptkit.CheckpointManager(root) as manager:
        save(manager, 1)
    store = open_store(root)
    name = next(name for name in store.list_all("1") if "/d/" in name)
    data = bytearray(store.get(name))
    data[len(data) // 3] ^= 1
    store.put(name, bytes(data))
    assert [step.state for step in ckptkit.verify(root).steps] == ["corrupt"]


def test_missing_bucket_is_named(root: str) -> None:
    """A typing error in the URL would be found at the first save."""
    with pytest.raises(
        ckptkit.StoreError, match=r"s3://no-such-bucket/run cannot be written: .*no such bucket; create it"
    ):
        ckptkit.CheckpointManager("s3://no-such-bucket/run")


def test_claim_succeeds_for_one_writer_only(root: str) -> None:
    """Two runs would have the same epoch: the second put of a name has to be refused by the service."""
    store = open_store(root)
    store.put("claim", b"first", mode="create")
    with pytest.raises(FileExistsError):
        store.put("claim", b"second", mode="create")
    assert store.get("claim") == b"first"


def test_service_that_ignores_conditions_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs would claim one epoch, and one would overwrite the other's steps, without an error."""
    put_object = s3_responses.S3Response.put_object

    def ignores(self: Any) -> Any:
        self.headers = {name: value for name, value in self.headers.items() if name.lower() != "if-none-match"}
        return put_object(self)

    monkeypatch.setattr(s3_responses.S3Response, "put_object", ignores)
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(make_state(1)))
        with pytest.raises(ckptkit.SaveFailedError, match=r"00000001\.json twice, .* service that obeys"):
            manager.wait_until_finished()


def test_object_put_after_a_listing_is_seen(root: str) -> None:
    """s3fs trusts its cached listing: of two runs that claim one epoch, the second would be told that the record is
    missing, instead of the other run."""
    store = open_store(root)
    store.put("epochs/1", b"1")
    assert store.list("epochs") == ["1"]
    key = f"{root.removeprefix(f's3://{BUCKET}/')}/epochs/2"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"theirs")
    with pytest.raises(FileExistsError):
        put_new(store, "epochs/2", b"mine")
    assert store.list("epochs") == ["1", "2"]
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"theirs, longer")
    assert store.get("epochs/2") == b"theirs, longer"


@pytest.fixture
def conditional_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """moto takes `If-None-Match` with a put alone; Amazon with a copy too."""
    copy_object = s3_responses.S3Response.copy_object

    def copies(self: Any) -> Any:
        there = self.backend.head_object(self.bucket_name, self.parse_key_name())
        if self.headers.get("If-None-Match") == "*" and there is not None:
            raise s3_exceptions.PreconditionFailed("If-None-Match")
        return copy_object(self)

    monkeypatch.setattr(s3_responses.S3Response, "copy_object", copies)


@pytest.mark.usefixtures("conditional_copies")
def test_one_of_two_concurrent_commits_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs would commit one step: the second looked before the first had copied."""
    store = open_store(root)
    store.put("intents/a", b"first")
    store.put("intents/b", b"second")
    asked = RemoteStore._ask

    def too_late(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = asked(self, method, *args, **kwargs)
        if method == "exists":
            monkeypatch.setattr(RemoteStore, "_ask", asked)
            store.copy("intents/a", "mark", mode="create")
        return answer

    monkeypatch.setattr(RemoteStore, "_ask", too_late)
    with pytest.raises(FileExistsError, match="mark"):
        store.copy("intents/b", "mark", mode="create")
    assert store.get("mark") == b"first"
    with pytest.raises(FileExistsError, match="mark"):
        store.copy("intents/b", "mark", mode="create")
    store.delete("intents/b")
    with pytest.raises(FileNotFoundError):
        store.copy("intents/b", "other", mode="create")
    assert store.list_all("") == ["intents/a", "mark"]


@pytest.fixture
def kept_marks(root: str) -> Iterator[None]:
    """The service refuses to delete the mark of step 1; every answer to a batch is a success all the same."""
    client, resource = boto3.client("s3"), f"arn:aws:s3:::{root.removeprefix('s3://')}/1/commit_success.txt"
    refused_here = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": resource}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [refused_here]}))
    yield
    client.delete_bucket_policy(Bucket=BUCKET)


def test_step_is_kept_when_its_mark_cannot_be_deleted(root: str, kept_marks: None) -> None:
    """s3fs ignores refused deletions: the bytes would be deleted, and the step would stay in listings, without a
    message."""
    reasons: list[str] = []
    log = ckptkit.EventLog()
    log.observe(lambda event: reasons.append(event.fields["reason"]) if event.kind == ckptkit.Kind.DEGRADED else None)
    with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=1), events=log) as manager:
        save(manager, 1)
        whole = open_store(root).list_all("1")
        save(manager, 2)
        assert len(reasons) == 1
        said = r"step 1 is to be deleted, and is not yet: StoreError: .* missing is s3:DeleteObject"
        assert re.match(said, reasons[0])
        assert open_store(root).list_all("1") == whole
        with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as reader:
            assert_same(restored(reader, 1), make_state(1))


def test_object_left_by_a_batch_delete_is_deleted_by_the_next(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error of the service, which it asks to try again, would leave objects that somebody pays for."""
    store, asked = open_store(root), RemoteStore._ask
    failed: list[str] = []

    def fails_once(self: RemoteStore, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "call_s3" and not failed:
            failed.extend(each["Key"] for each in kwargs["Delete"]["Objects"])
            return {"Errors": [{"Key": failed[0], "Code": "InternalError", "Message": "Please try again."}]}
        return asked(self, method, *args, **kwargs)

    for key in ("a/b", "a/c"):
        store.put(key, b"1")
    monkeypatch.setattr(RemoteStore, "_ask", fails_once)
    store.delete_many(["a/b", "a/c", "a/gone"])
    assert len(failed) == 3
    assert store.list_all("a") == []


def test_a_refusal_names_bucket_key_and_permission(root: str) -> None:
    """A person would look for the bug in the trainer."""
    said = str(refused(f"{root}/x", "ClientError: Access Denied", needs="create"))
    assert "the bucket s3://runs refuses the access key test...ng" in said
    assert "missing is s3:PutObject" in said
    assert "grant s3:GetObject, s3:ListBucket, s3:PutObject and s3:DeleteObject on the bucket" in said


def test_commands_read_and_write_s3(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints on Amazon could be inspected and moved only after a download by other means."""
    with ckptkit.CheckpointManager(f"{root}/run") as manager:
        save(manager, 3)
    expected = arrays_of(f"{root}/run/3")
    assert main(["inspect", f"{root}/run"]) == 0
    assert f"{root}/run/3: step 3" in capsys.readouterr().out
    for to, name in (("safetensors", "a.safetensors"), ("npz", "a.npz"), ("hf", "hf"), ("orbax", "7")):
        assert main(["convert", f"{root}/run/3", f"{root}/{name}", "--to", to]) == 0, capsys.readouterr()
        assert main(["inspect", f"{root}/{name}"]) == 0, capsys.readouterr()
        assert_same(arrays_of(f"{root}/{name}"), expected)
    assert main(["convert", f"{root}/a.safetensors", str(tmp_path / "b.npz"), "--to", "npz"]) == 0
    assert_same(arrays_of(str(tmp_path / "b.npz")), expected)
    for source, target in ((f"{root}/run", str(tmp_path / "here")), (str(tmp_path / "here"), f"{root}/there")):
        assert main(["copy", source, target]) == 0, capsys.readouterr()
        assert main(["verify", target]) == 0, capsys.readouterr()
        assert_same(arrays_of(f"{target}/3"), expected)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_interrupted_conversion_is_resumed(
    root: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a checkpoint would be taken for one, or hours of uploads be done again."""
    leaves = {f"w{at}": np.arange(4096, dtype=np.float32).reshape(64, 64) + at for at in range(8)}
    source, target = str(by_numpy(tmp_path / "a.npz", leaves)), f"{root}/7"

    def interrupt(written: int, total: int) -> None:
        if 2 * written > total:
            raise KeyboardInterrupt

    with open_checkpoint(source) as opened:
        plan = plan_convert(opened, target, to, shard_bytes=20_000, memory_bytes=1 << 16)  # pyright: ignore[reportArgumentType]
        with pytest.raises(KeyboardInterrupt) as stopped:
            convert(opened, plan, memory_bytes=1 << 16, progress=interrupt)
    assert f"{root}/.7.ckptkit-part and the target" in stopped.value.__notes__[0]
    store = open_store(root)
    assert not {"7/commit_success.txt", "7/model.safetensors.index.json"} & set(store.list_all("7"))
    before = {name: store.stat(name) for name in store.list_all("7") if name.endswith(".safetensors") or "/d/" in name}
    assert before
    words = ["convert", source, target, "--to", to, "--shard-size", "20000", "--memory", "64KiB", "--resume"]
    assert main(words) == 0, capsys.readouterr()
    assert_same(arrays_of(target), leaves)
    assert before == {name: store.stat(name) for name in before}, "what was uploaded is not uploaded again"
    assert not [name for name in store.list_all("") if "ckptkit-part" in name]
    if to == "orbax":
        assert main(["verify", target]) == 0, capsys.readouterr()


def test_step_is_resharded_into_s3(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layout for Amazon's machines could be written only elsewhere."""
    with ckptkit.CheckpointManager(str(tmp_path / "run")) as manager:
        save(manager, 3)
    source, target = str(tmp_path / "run/3"), f"{root}/run/3"
    assert main(["reshard", source, target, "--mesh", "x=4"]) == 0, capsys.readouterr()
    assert main(["verify", target]) == 0, capsys.readouterr()
    assert_same(arrays_of(target), arrays_of(source))
    with ckptkit.CheckpointManager(f"{root}/run") as manager:
        assert_same(restored(manager, 3), make_state(3))
    assert main(["reshard", source, target, "--mesh", "x=4"]) == 1
    assert "exists already" in capsys.readouterr().err


def arrays_of(path: str) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as opened:
        return {name: tensor.read() for name, tensor in opened.by_name().items()}

"""If this fails, two hosts that commit to one OCDBT store can lose a write of each other."""

import os
from pathlib import Path

import pytest
import tensorstore as ts
from bucket_http import BUCKET

from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Reset, Status

COMMITTERS = 8


def committer(base: str) -> ts.KvStore:
    """A store with a context, and so a cache and a connection pool, of its own: as in another process."""
    context = ts.Context({"gcs_request_retries": {"max_retries": 20, "initial_delay": "10ms", "max_delay": "100ms"}})
    return ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()


def commit_rounds(server: BucketServer, rounds: int, writes: int = 2) -> None:
    for number in range(rounds):
        base = f"gs://{BUCKET}/round-{number}/"
        stores = [committer(base) for _ in range(COMMITTERS)]
        expected: dict[bytes, bytes] = {}
        for write in range(writes):
            futures = []
            for at, store in enumerate(stores):
                key, value = f"{write}/{at}".encode(), os.urandom(2000)  # too large to be inlined in the manifest
                expected[key] = value
                futures.append(store.write(key, value))
            for future in futures:
                future.result(timeout=60)
        reader = committer(base)
        found = {key: reader.read(key).result().value for key in reader.list().result()}
        assert found.keys() == expected.keys(), f"round {number} lost {sorted(expected.keys() - found.keys())}"
        assert found == expected
    refused = [entry for entry in server.log.entries(Kind.WRITE) if entry.status == 412]
    assert len(refused) > rounds, "the committers have to have met"


@pytest.mark.parametrize("rounds", [4, pytest.param(10, marks=pytest.mark.long)])
def test_concurrent_committers_lose_no_write(bucket_env: BucketServer, rounds: int) -> None:
    commit_rounds(bucket_env, rounds)


@pytest.mark.slow
def test_100_rounds_of_concurrent_committers_lose_no_write(bucket_env: BucketServer) -> None:
    commit_rounds(bucket_env, rounds=100)


LOST_ANSWERS = FaultPlan(
    seed=11,
    faults=(
        Fault(effect=Reset(stage="after"), kinds=(Kind.WRITE,), objects="*/manifest.ocdbt", probability=0.05),
        Fault(effect=Status(code=503, stage="after"), kinds=(Kind.WRITE,), objects="*/d/*", probability=0.05),
        Fault(effect=Status(code=429), kinds=(Kind.READ,), probability=0.05),
    ),
)


def test_committers_lose_no_write_when_responses_are_lost(bucket_env: BucketServer) -> None:
    bucket_env.faults = LOST_ANSWERS
    commit_rounds(bucket_env, rounds=3)
    assert all(bucket_env.fired())


@pytest.mark.slow
def test_30_rounds_lose_no_write_when_responses_are_lost(bucket_env: BucketServer) -> None:
    bucket_env.faults = LOST_ANSWERS
    commit_rounds(bucket_env, rounds=30)
    assert all(bucket_env.fired())


def test_store_survives_a_restart_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, b"committed"):
        with BucketServer(dir=tmp_path, buckets=[BUCKET]) as server:
            for name, text in server.env().items():
                monkeypatch.setenv(name, text)
            store = committer(f"gs://{BUCKET}/db/")
            assert store.read("key").result().value == (value or b"")
            store.write("key", b"committed").result()

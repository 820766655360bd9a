"""Manifests and records that somebody made to do harm are refused, and nothing is allocated for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords, Rollback
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.manifest import Manifest
from ckptkit.store import MemoryStore
from tests.model.hostile import ANYTHING, HOSTILE, body, bounded, changed, places, refused, sealed


def test_hostile_value_anywhere_in_a_manifest_is_refused() -> None:
    """A process would die of a manifest, or allocate for one, instead of passing it over."""
    whole = body()
    assert Manifest.from_bytes(sealed(whole), path="p").save_id.step == 5
    with bounded():
        for at in places(whole):
            for value in HOSTILE:
                refused(lambda at=at, value=value: Manifest.from_bytes(sealed(changed(whole, at, value)), path="p"))


@given(data=st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_arbitrary_values_in_a_manifest_are_refused(data: st.DataObject) -> None:
    """The same, for what nobody has thought of."""
    record = body()
    for _ in range(data.draw(st.integers(1, 3))):
        record = changed(record, data.draw(st.sampled_from(list(places(record)))), data.draw(ANYTHING))
        if not list(places(record)):
            break
    refused(lambda: Manifest.from_bytes(sealed(record), path="p"))


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_arbitrary_values_in_an_epoch_record_are_refused(data: st.DataObject) -> None:
    """A restart would die of a record, or take nonsense for a branch."""
    record: Any = {
        **Ancestry(3, (Rollback(2, 10), Rollback(3, 40)), ((5, 1),), ((3, "a" * 16),), "b" * 16).to_json(),
        "run": "r",
    }
    for _ in range(data.draw(st.integers(1, 2))):
        record = changed(record, data.draw(st.sampled_from(list(places(record)))), data.draw(ANYTHING))
    store = MemoryStore()
    store.put("_ckptkit/epochs/00000003.json", json.dumps(record).encode())
    try:
        ancestry = EpochRecords(store).read()
    except CorruptCheckpointError:
        return
    assert ancestry.epoch == 3


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [
        (("arrays", "../../canary"), [], "cannot be a directory"),
        (("inline", ".."), {"kind": "json", "value": 1}, "cannot be a directory"),
        (("arrays", "state", 0, "boxes", 1, 2), 0, "two boxes lie at byte 0"),
        (("arrays", "state", 0, "boxes", 0, 2), -5, "offset -5"),
        (("arrays", "state", 0, "boxes", 1, 0), [1, 0], "boxes that do not tile it"),
        (("arrays", "state", 0, "boxes", 1, 3), [], "0 digests for 1 cells"),
        (("arrays", "state", 0, "boxes", 1, 1), [9, 4], "outside its shape"),
        (("arrays", "state", 0, "shape"), [2**40, 2**40], "has shape"),
        (("arrays", "state", 0, "dtype"), "object", "jax of object"),
        (("save_id", "step"), 10**30, "save"),
        (("writer", "count"), 0, "by process 0 of 0"),
    ],
)
def test_hostile_manifest_error_names_the_fault(at: tuple[Any, ...], value: Any, word: str) -> None:
    """Nobody would know what is wrong with the file."""
    with pytest.raises(CorruptCheckpointError, match=f"manifest p cannot be read: .*{word}"):
        Manifest.from_bytes(sealed(changed(body(), at, value)), path="p")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"digest":"' + b"x" * 100 + b'","manifest":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        sealed(body()).replace(b'"format":1', b'"format":1,"format":2'),
        sealed(body()).decode().encode("utf-16"),
        b"\xff\xfe" + sealed(body()),
        b'{"digest":"a","manifest":' + b"9" * 100_000 + b"}",
        b"\0" * 100_000,
    ],
)
def test_malformed_json_text_is_refused(data: bytes) -> None:
    """Deep nesting, two keys of one name, other encodings, endless numbers."""
    with bounded():
        assert refused(lambda: Manifest.from_bytes(data, path="p"))

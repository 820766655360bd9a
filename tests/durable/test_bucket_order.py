"""The order of a save's requests in a bucket: which come after which, and what a crash leaves between any two of them.

Independent requests are sent in parallel, so their order varies. `AFTER` lists the requests that must be over before
each one begins. Real saves are held to it, and a crash may leave every state that it allows.
"""

from __future__ import annotations

import time
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.abandoned import clean_left
from ckptkit.durable.commit import intents
from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.lifecycle.listing import read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.model import paths
from ckptkit.store import MemoryStore, RemoteStore
from ckptkit.testing.bucket import BucketServer, Delay, Fault, FaultPlan, Kind, Uniform

ITEM = "3/default"
SMALL = [
    f"{ITEM}/{name}" for name in ("_METADATA", "_sharding", "array_metadatas/process_0", "_ckptkit/process-0.json")
]
DATA, DATABASE, INTENT, MARK = f"{ITEM}/d/*", f"{ITEM}/manifest.ocdbt", "intent", f"3/{paths.COMMIT_MARK}"
ITEM_MARK, STEP_FILE = f"{ITEM}/{paths.COMMIT_MARK}", "3/_CHECKPOINT_METADATA"
LOOKS = ["list 3", f"list {paths.INTENTS_DIR}"]
EPOCH = f"list {paths.EPOCHS_DIR}"  # the second: the first is before all
BEGUN = {INTENT, *LOOKS}
WHOLE = {*BEGUN, *SMALL, DATA, DATABASE}
AFTER: dict[str, set[str]] = {
    INTENT: set(),
    LOOKS[0]: set(),
    LOOKS[1]: {INTENT},
    **dict.fromkeys((*SMALL, DATA), BEGUN),
    DATABASE: {*BEGUN, DATA},
    **dict.fromkeys((ITEM_MARK, STEP_FILE, EPOCH), WHOLE),
    MARK: {*WHOLE, ITEM_MARK, STEP_FILE, EPOCH},
    "delete intent": {MARK},
}


def name_of(kind: Kind, name: str) -> str:
    name = name.removeprefix("run/")
    if paths.INTENTS_DIR in name:
        return MARK if kind is Kind.COPY else "delete intent" if kind is Kind.DELETE else INTENT
    return DATA if "/d/" in name else name


@pytest.mark.parametrize("seed", range(4))
def test_dependent_requests_start_after_their_dependency(
    server: BucketServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark before the bytes, or bytes before the intent that names their owner: only some timings would show it."""
    spans: dict[str, list[tuple[float, float]]] = {}

    def timed(method: str) -> None:
        original = getattr(RemoteStore, method)

        def ask(self: RemoteStore, prefix: str) -> Any:
            began_s = time.monotonic()
            try:
                return original(self, prefix)
            finally:
                spans.setdefault(f"list {prefix}", []).append((began_s, time.monotonic()))

        monkeypatch.setattr(RemoteStore, method, ask)

    with ckptkit.CheckpointManager("gs://runs/run") as manager:

        def save(step: int) -> None:
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3000, step)}), force=True)  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()

        save(1)
        timed("list")
        timed("stat_all")
        server.faults = FaultPlan(seed=seed, faults=(Fault(effect=Delay(latency=Uniform(low_s=0.0, high_s=0.1))),))
        server.log.clear()
        save(3)
    for entry in server.log.entries():
        if entry.kind is not Kind.LIST and not entry.name.endswith("-1"):  # the end of the first save's
            began_s = entry.exchange.started_s
            spans.setdefault(name_of(entry.kind, entry.name), []).append((began_s, began_s + entry.exchange.elapsed_s))
    first_look = spans[EPOCH].pop(0)
    assert first_look[1] <= spans[INTENT][0][0], "an older run begins"
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(AFTER, 1)
    for name, before in AFTER.items():
        for earlier in before:
            assert spans[earlier][0][1] <= spans[name][0][0], f"{name} began before {earlier} was over"


def states() -> list[frozenset[str]]:
    """Every set of requests that may be over when a run dies."""
    found, growing = {frozenset[str]()}, [frozenset[str]()]
    while growing:
        done = growing.pop()
        for name, before in AFTER.items():
            if name not in done and before <= done and (more := done | {name}) not in found:
                found.add(more)
                growing.append(more)
    return sorted(found, key=lambda done: (len(done), sorted(done)))


def test_crashed_save_is_never_a_step_and_is_removed() -> None:
    """Half a step would be restored, or never leave the bucket."""
    enumerated = states()
    assert len(enumerated) > 30
    assert enumerated[-1] == frozenset(AFTER), "some requests wait for each other"
    for done in enumerated:
        store = MemoryStore("gs://runs/run")
        store.put(f"1/{paths.COMMIT_MARK}", b"mark")
        intent = f"{paths.INTENTS_DIR}/{paths.intent_name('3', 1, 'a' * 32)}"
        for name in done:
            if name == INTENT and "delete intent" not in done:
                store.put(intent, b"mark")
            elif "/" in name and not name.startswith("list"):
                store.put(name.replace("*", "x"), b"mark")
        committed = MARK in done
        found = {each.place.name: each.state for each in read_root(Place(store), Ancestry()).steps}
        assert set(found) == {"1"} | ({"3"} if store.list("3") else set())
        assert (found.get("3", "unfinished") != "unfinished") == committed, done
        before = store.list_all("3")
        cleaned = clean_left(store, 2, lambda place: None)  # the next run's
        assert store.list_all("3") == (before if committed else []), done
        assert cleaned == (["3"] if INTENT in done and not committed else []), done
        assert intents(store) == []

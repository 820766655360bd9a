"""Two runs at one step in a bucket: in each order of their requests no step is committed by both, or has holes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import ckptkit
from ckptkit.durable import commit
from ckptkit.durable.abandoned import clean_left
from ckptkit.durable.commit import MarkAttempt
from ckptkit.errors import CheckpointError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import MemoryStore

ORDERS = ["the step first", "the step between", "the step last"]


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt begins with two parallel parts: a look at the step, and a put of the intent with a look at the others'
    after it. Here they run one after the other, in each possible order."""

    def in_order(acts: Any) -> list[Any]:
        look, announce = acts
        found: list[Any] = []
        attempt, meet = announce.__self__, announce.__self__._meet_others

        def meet_others() -> None:
            if not found and request.param == "the step between":
                found.append(look())
            meet()

        attempt._meet_others = meet_others
        if request.param == "the step first":
            found.append(look())
        announce()
        return [found[0] if found else look(), None]

    monkeypatch.setattr(commit, "side_by_side", in_order)


class Overtaken:
    """A store in whose operation `number` a later run begins the same step, right before it is done; and goes on."""

    def __init__(
        self,
        store: MemoryStore,
        number: int,
        monkeypatch: pytest.MonkeyPatch,
        goes_on: Callable[[MarkAttempt], None] = lambda later: None,
    ):
        self.later: MarkAttempt | None = None
        self.url, self.properties = store.url, store.properties
        self._store, self._left, self._patch, self._goes_on = store, number, monkeypatch, goes_on

    def __getattr__(self, name: str) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._patch.setattr(commit, "open_store", lambda url: self._store)
                with suppress(ckptkit.StepAlreadyExistsError):
                    later = MarkAttempt("gs://runs/run", "5", SaveId(2, 5, 0))
                    later.begin()
                    self.later = later
                    self._goes_on(later)
            return getattr(self._store, name)(*args, **kwargs)

        return operation


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("number", range(1, 7))
def test_concurrent_runs_never_both_commit_one_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order of their first operations: the older one fails, unless it had committed before the other looked."""
    store = MemoryStore("gs://runs/run")
    overtaken = Overtaken(store, number, monkeypatch)
    monkeypatch.setattr(commit, "open_store", lambda url: overtaken)
    ended, error = list[str](), None
    try:
        older = MarkAttempt("gs://runs/run", "5", SaveId(1, 5, 0))
        older.begin()
        store.put("5/item/d/of-the-older", b"1")
        older.commit()
        ended.append("older")
        older.tidy()
    except CheckpointError as caught:
        error = str(caught)
    if overtaken.later is not None:
        overtaken.later.commit()
        ended.append("later")
    assert ended == (["later"] if number <= 5 else ["older"]), (ended, error)
    assert error is None or "a later run than epoch 1" in error
    assert store.stat(f"5/{paths.COMMIT_MARK}") is not None


@pytest.mark.parametrize("commits", [True, False], ids=["and commits", "and has not committed"])
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("cleans", [True, False], ids=["while cleaning", "while saving"])
@pytest.mark.usefixtures("order")
def test_paused_run_deletes_nothing_of_a_later_run(
    cleans: bool, number: int, commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between two requests, it continues after a later run has saved the step. Its deletions use its earlier
    listing, so the later run's step would be committed with holes."""
    store = MemoryStore("gs://runs/run")
    store.put("5/d/x", b"left")
    store.put(f"{paths.INTENTS_DIR}/{paths.intent_name('5', 0, 'a' * 32)}", b"left")

    def goes_on(later: MarkAttempt) -> None:
        for key in ("5/d/x", "5/d/y"):
            store.put(key, b"later", mode="create")
        if commits:
            later.commit()

    overtaken = Overtaken(store, number, monkeypatch, goes_on)
    monkeypatch.setattr(commit, "open_store", lambda url: overtaken)
    with suppress(CheckpointError, ckptkit.StepAlreadyExistsError):
        if cleans:
            clean_left(overtaken, 1, lambda place: None)  # pyright: ignore[reportArgumentType]
        else:
            MarkAttempt("gs://runs/run", "5", SaveId(1, 5, 0)).begin()
    if overtaken.later is None:
        assert number > 5, "it is done before that"
        return
    if not commits:
        overtaken.later.commit()
    assert store.get("5/d/x") == store.get("5/d/y") == b"later"
    assert store.stat(f"5/{paths.COMMIT_MARK}") is not None

"""An exception from outside (Ctrl-C, a signal's handler) in the middle of `save`: committed whole or dropped."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.orbax.reports import Spans
from ckptkit.save.agreement.protocol import SaveProtocol
from ckptkit.save.flow import SaveFlow
from ckptkit.save.records import Loan
from ckptkit.slots.reader import SlotReader, read_manifests
from ckptkit.snapshot.items import as_it_is
from ckptkit.snapshot.staging import Stager
from ckptkit.util.notice import Promise

CHANGED = -1
PACKAGE = str(Path(ckptkit.__file__).parent)


class Interrupted(BaseException):
    """Raised in the caller, as by a handler of signals."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ckptkit.CheckpointManager]:
    """A manager that saves each step to a ramdisk tier."""
    with ckptkit.CheckpointManager(
        tmp_path / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=10**6),
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3, save=ckptkit.EverySteps(1))],
        host_id="host",
        saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(skipped_max=None, raise_in_save="never")),
    ) as manager:
        yield manager


def committed(root: Path) -> dict[int, set[int]]:
    """The values of the leaf in each committed save of the ramdisk, by step."""
    found: dict[int, set[int]] = {}
    for directory, manifest in read_manifests((root / "ram").glob("*/host/0"))[0]:
        leaf = next(leaf for leaf in manifest.arrays["default"] if leaf.path == ("numpy",))
        into = np.empty(leaf.shape, np.int64)
        SlotReader(directory, manifest).read(leaf, leaf.boxes[0], leaf.boxes[0].box, into)
        found[manifest.save_id.step] = set(np.unique(into).tolist())
    return found


def save_and_change(manager: ckptkit.CheckpointManager, step: int, size: int) -> bool:
    """Saves a NumPy leaf and changes it as soon as `save` returns or raises; whether it raised."""
    leaf = np.full(size, step, np.int64)
    state = {"numpy": leaf, "jax": jnp.full(8, step)}
    try:
        manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    except Interrupted:
        return True
    finally:
        leaf[:] = CHANGED
    return False


def is_with(frame: FrameType) -> bool:
    """Whether the line that runs next begins, or ends, a `with`."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def raise_at(line: int, count: list[int]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises at the `line`-th line that this thread runs in the package, once.

    Not at the line of a `with`: a trace would raise there between the block and its `__exit__`, where no signal does.
    """

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not is_with(frame):
            count[0] += 1
            if count[0] == line:
                sys.settrace(None)
                raise Interrupted
        return trace

    return trace


def traced(manager: ckptkit.CheckpointManager, step: int, line: int) -> tuple[bool, int]:
    """Saves, and raises at a line; whether `save` raised, and how many lines ran."""
    count = [0]
    before = sys.gettrace()
    sys.settrace(raise_at(line, count))
    try:
        return save_and_change(manager, step, 1 << 16), count[0]
    finally:
        sys.settrace(before)


def test_save_interrupted_at_any_line_is_committed_whole_or_dropped(
    manager: ckptkit.CheckpointManager, tmp_path: Path
) -> None:
    save_and_change(manager, 0, 1 << 16)
    manager.wait_until_finished()
    raised, lines = traced(manager, 1, 1 << 60)
    assert not raised
    step, interrupted = 1, 0
    for line in range(1, lines + 1, max(1, lines // 400)):
        step += 1
        interrupted += traced(manager, step, line)[0]
        manager.wait_until_finished()
        assert all(values == {found} for found, values in committed(tmp_path).items())
    assert interrupted > 200
    assert not save_and_change(manager, step + 1, 1 << 16)
    manager.wait_until_finished()
    assert committed(tmp_path)[step + 1] == {step + 1}


def test_any_end_of_the_copy_ends_the_call(manager: ckptkit.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop would wait without an end."""

    def ended(*_: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(manager._pipeline.flow._slots, "_begin_staging", ended)
        assert save_and_change(manager, 1, 8)
    assert not save_and_change(manager, 2, 8)


def test_values_are_not_read_after_a_signal_has_ended_save(
    manager: ckptkit.CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, handled, ended, torn = Stager.begin, threading.Event(), threading.Event(), list[bool]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            handled.set()
            raise Interrupted

    def interrupted_copy(self: Stager, *args: Any) -> Any:
        if not ended.is_set():
            while not handled.wait(0.01):  # the caller waits for this copy; a signal just before it sleeps wakes nobody
                os.kill(os.getpid(), signal.SIGUSR1)
            torn.append(ended.wait(0.5))  # and would change its leaf now
        return begin(self, *args)

    monkeypatch.setattr(Stager, "begin", interrupted_copy)
    manager.close()
    with ckptkit.CheckpointManager(
        tmp_path / "other",
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"), slots=3, save=ckptkit.EverySteps(1))],
        host_id="host",
    ) as again:
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            assert save_and_change(again, 1, 1 << 20)
            ended.set()
            again.wait_until_finished()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert torn == [False]
        assert committed(tmp_path) == {}
        assert not save_and_change(again, 2, 1 << 10)
        again.wait_until_finished()
    assert committed(tmp_path) == {2: {2}}


@pytest.mark.parametrize("where", ["the copy", "the end of the call"])
def test_save_that_is_voted_on_is_not_vetoed(
    manager: ckptkit.CheckpointManager, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The other processes would drop it, and this one would wait for their answers for `timeout_s`."""
    vetoed = list[str]()

    def veto(self: SaveFlow, name: str, error: BaseException) -> SaveProtocol:
        del self, error
        vetoed.append(name)
        return
        yield

    def interrupted(*_: Any) -> Any:
        raise Interrupted

    monkeypatch.setattr(SaveFlow, "veto", veto)
    with monkeypatch.context() as patched:
        if where == "the copy":  # two signals: the second one while the caller waits for a copy that has begun
            patched.setattr(Promise, "wait", interrupted)
            patched.setattr(Loan, "withdraw", interrupted)
        else:
            patched.setattr(Spans, "ended", lambda self, name, _: name == "wait_for_prev" or interrupted())
        assert save_and_change(manager, 1, 8)
    manager.wait_until_finished()
    assert vetoed == []
    assert not save_and_change(manager, 2, 8)


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda value: defaultdict(float, value)])
def test_metrics_and_metadata_of_any_dict_are_those_at_the_save(tmp_path: Path, kind: Any) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["inner"]["loss"])
    given = kind({"inner": kind({"loss": 1.0, "list": [1]})})
    with ckptkit.CheckpointManager(tmp_path / "root", options=options, host_id="host") as manager:
        state = ocp.args.StandardSave({"w": np.zeros(1 << 20)})  # pyright: ignore[reportCallIssue]
        manager.save(1, args=state, metrics=given, custom_metadata=given)
        given["inner"]["loss"] = given["late"] = 2.0
        given["inner"]["list"].append(2)
    with ckptkit.CheckpointManager(tmp_path / "root", options=options, host_id="host") as manager:
        assert manager.metrics(1) == {"inner": {"loss": 1.0, "list": [1]}}
        assert manager.metadata(1).custom_metadata == {"inner": {"loss": 1.0, "list": [1]}}


def test_metrics_of_a_save_that_is_committed_although_its_call_raised_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`best_step` would be an older step until the tiers are read again."""

    def interrupted(self: Spans, name: str, start_s: float) -> None:
        del self, start_s
        if name == "checkpointer_blocking":
            raise Interrupted

    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    state = ocp.args.StandardSave({"w": np.zeros(8)})  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(tmp_path / "root", options=options, host_id="host") as manager:
        with monkeypatch.context() as patched:
            patched.setattr(Spans, "ended", interrupted)
            with pytest.raises(Interrupted):
                manager.save(1, args=state, metrics={"loss": 1.0})
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.best_step()) == ([1], 1)


def test_own_containers_keep_their_types() -> None:
    given = {"a": OrderedDict(b=[1]), "c": defaultdict(list, d=(2, [3]))}
    own = as_it_is(given)
    given["a"]["b"].append(4)
    assert own == {"a": {"b": [1]}, "c": {"d": (2, [3])}}
    assert type(own["a"]) is OrderedDict
    assert own["c"]["missing"] == []

"""Agreement: one verdict for all, or one error that names the missing processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from ckptkit.errors import (
    CheckpointError,
    CoordinationError,
    CorruptCheckpointError,
    StoreError,
    TransientStoreError,
)
from ckptkit.job import coordination, meeting
from ckptkit.job.coordination import JaxCoordinator, LocalCoordinator, ScopedCoordinator, gather, make_coordinator
from ckptkit.job.vote import voted
from tests.job.fake_service import FakeJob, FakeService

MOVED = (
    "JAX {version} has moved or changed its coordination client: ckptkit/job/coordination.py uses "
    "jax._src.distributed.global_state.client with key_value_set, blocking_key_value_get, key_value_dir_get and "
    "key_value_delete ({what}). Look where jax.experimental.multihost_utils gets its client from in this version, "
    "follow it there, and raise the lower bound of jax in pyproject.toml if old and new cannot both be served."
)


def test_private_jax_client_is_where_expected() -> None:
    """If it failed, a new JAX has moved its private coordination client: follow it (the message describes how)."""

    def moved(what: str) -> str:
        return MOVED.format(version=jax.__version__, what=what)

    state = getattr(coordination.distributed, "global_state", None)
    assert state is not None, moved("no global_state")
    assert hasattr(state, "client"), moved("no client in global_state")
    assert state.client is None, moved("a client without jax.distributed.initialize()")
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    client = getattr(_jax, "DistributedRuntimeClient", None)
    assert client is not None, moved("no DistributedRuntimeClient")
    for method in ("key_value_set", "blocking_key_value_get", "key_value_dir_get", "key_value_delete"):
        assert hasattr(client, method), moved(f"no {method}")
    assert issubclass(jax.errors.JaxRuntimeError, RuntimeError), moved("errors")


@pytest.fixture(params=[512, 3], ids=["one listing", "several listings"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    """Four processes, gathered like four, or like thousands."""
    monkeypatch.setattr(meeting, "_LISTED", request.param)
    yield FakeJob(monkeypatch, 4)
    monkeypatch.undo()


def test_single_process_result_passes_through_json() -> None:
    """If it failed, one process would see Python objects where several see JSON, and only several would fail."""
    local = make_coordinator()
    assert isinstance(local, LocalCoordinator)
    assert (local.process, local.count) == (0, 1)
    assert local.agree("x", 3, lambda values: {"sum": sum(values), 1: (1, 2)}, timeout_s=1) == {"sum": 3, "1": [1, 2]}
    assert gather(local, "x", "mine", timeout_s=1) == ["mine"]
    with pytest.raises(TypeError):
        local.agree("x", 1, lambda _: object(), timeout_s=1)
    with pytest.raises(KeyError):
        local.agree("x", 1, lambda _: {}["missing"], timeout_s=1)


def test_missing_coordination_service_error_gives_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a forgotten jax.distributed.initialize() would end in an AttributeError."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"no coordination service: call jax\.distributed\.initialize\(\) before"):
        make_coordinator()


def test_every_process_receives_the_decision_of_process_0(job: FakeJob) -> None:
    """If it failed, processes would take different steps or restore different saves."""
    answers = job.all(lambda c: c.agree("vote", c.process * 10, lambda values: [max(values), values], timeout_s=5))
    assert answers == [[30, [0, 10, 20, 30]]] * 4
    assert job.all(lambda c: gather(c, "who", f"p{c.process}", timeout_s=5)) == [["p0", "p1", "p2", "p3"]] * 4


def test_only_process_0_decides(job: FakeJob) -> None:
    """If it failed, a decision that reads the bucket would be made by every host, each from its own listing."""
    deciders = []
    job.all(lambda c: c.agree("vote", None, lambda _: deciders.append(c.process), timeout_s=5))
    assert deciders == [0]


@pytest.mark.parametrize("absent", [(2,), (1, 3)])
def test_missing_process_is_named_on_every_process(job: FakeJob, absent: tuple[int, ...]) -> None:
    """If it failed, a thousand hosts would time out without naming the cause."""
    answers = job.all(lambda c: c.agree("commit", 1, sum, timeout_s=3), absent=absent)
    who = ", ".join(map(str, absent))
    assert len(answers) == 4 - len(absent)
    for answer in answers:
        assert isinstance(answer, CoordinationError)
        assert isinstance(answer, TimeoutError)
        assert str(answer) == f"commit: process {who} did not join within 3 s; find out why it stopped"


def test_thousand_processes_are_gathered_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, process 0 of a large job would ask for each other's word, five times at every start."""
    job = FakeJob(monkeypatch, 1000)
    for process in [*range(1, 700), *range(701, 1000)]:
        job.service.key_value_set(meeting._place_of("ckptkit/0/x/0", process), str(process))
    last, asked = meeting._place_of("ckptkit/0/x/0", 700), job.service.blocking_key_value_get

    def comes_when_waited_for(key: str, timeout_ms: int) -> str:
        if key == last and job.service.listings == 2:
            job.service.key_value_set(last, "700")
        return asked(key, timeout_ms)

    monkeypatch.setattr(job.service, "blocking_key_value_get", comes_when_waited_for)
    assert gather(job.processes[0], "x", 0, timeout_s=30) == list(range(1000))
    assert job.service.listings == 3
    job.service.gone = set(range(400, 1000))
    for process in range(1, 400):
        job.service.key_value_set(meeting._place_of("ckptkit/0/x/1", process), "0")
    with pytest.raises(CoordinationError, match=r"process 400, 401, .*, 419 and 580 more did not join"):
        gather(job.processes[0], "x", 0, timeout_s=30)


def test_timed_out_process_0_is_named(job: FakeJob) -> None:
    """If it failed, all would wait without an end for a lost host."""
    with job.service.changed:
        job.service.gone = {0}
    original = job.service.blocking_key_value_get

    def silent(key: str, timeout_ms: int) -> str:
        assert timeout_ms > 3000  # longer than process 0 waits for the others, so that its verdict can arrive
        return original("nobody/0", timeout_ms)

    job.service.blocking_key_value_get = silent  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CoordinationError, match=r"^commit: process 0 did not answer within 3 s$"):
        job.processes[1].agree("commit", 1, sum, timeout_s=3)


def test_call_without_timeout_uses_that_of_its_coordinator(job: FakeJob) -> None:
    """If it failed, the longest wait that a job gives would not hold for its saves and restores."""
    job.service.gone = {"out"}  # pyright: ignore[reportAttributeAccessIssue]  process 0 is held up
    process = job.processes[1]
    process.timeout_s = 7.0
    for number, coordinator in enumerate((process, ScopedCoordinator(process))):
        assert coordinator.timeout_s == 7.0
        with pytest.raises(CoordinationError, match="process 0 did not answer within 7 s"):
            coordinator.agree(f"commit-{number}", 1, sum)
        with pytest.raises(CoordinationError, match="process 0 did not answer within 2 s"):
            coordinator.agree(f"other-{number}", 1, sum, timeout_s=2)
        with (
            pytest.raises(CoordinationError, match="process 0 did not answer within 7 s"),
            voted(coordinator, f"vote-{number}"),
        ):
            pass


def test_many_missing_processes_fit_one_line() -> None:
    """If it failed, the error of a large job would be pages of numbers."""
    text = str(meeting._missing("vote", list(range(1000)), 5))
    assert text.startswith("vote: process 0, 1, 2, ")
    assert text.endswith("19 and 980 more did not join within 5 s; find out why it stopped")


def test_failed_decision_raises_on_every_process(job: FakeJob) -> None:
    """If it failed, process 0 would raise and the others would wait until the timeout for a verdict."""

    def fails(_: list[Any]) -> Any:
        raise ValueError("no such bucket")

    first, *others = job.all(lambda c: c.agree("stock", 1, fails, timeout_s=5))
    assert isinstance(first, ValueError)
    assert [str(error) for error in others] == ["process 0: no such bucket"] * 3
    assert {type(error) for error in others} == {CheckpointError}
    assert job.all(lambda c: c.agree("stock", 1, sum, timeout_s=5)) == [4] * 4  # and the channel goes on


@pytest.mark.parametrize("kind", [StoreError, TransientStoreError, CorruptCheckpointError])
def test_store_error_on_process_0_has_the_same_type_on_all(job: FakeJob, kind: type[CheckpointError]) -> None:
    """If it failed, one process would end with exit code 2 and a message, the others with a traceback."""

    def fails(_: list[Any]) -> Any:
        raise kind("gs://b: 403")

    first, *others = job.all(lambda c: c.agree("stock", 1, fails, timeout_s=5))
    assert (type(first), str(first)) == (kind, "gs://b: 403")
    assert [(type(error), str(error)) for error in others] == [(kind, "process 0: gs://b: 403")] * 3


def test_verdict_that_is_not_json_raises_on_every_process(job: FakeJob) -> None:
    """If it failed, a programming error on process 0 would be a time-out on all others."""
    first, *others = job.all(lambda c: c.agree("stock", 1, lambda _: object(), timeout_s=5))
    assert isinstance(first, TypeError)
    assert [str(error) for error in others] == ["process 0: Object of type object is not JSON serializable"] * 3


def test_missed_barrier_does_not_shift_the_next_one(job: FakeJob) -> None:
    """If it failed, one late process would get answers to the previous exchange, for the rest of the run."""
    job.all(lambda c: c.agree("vote", 1, sum, timeout_s=3), absent=(3,))
    job.service.gone = set()
    late = job.processes[3]
    with pytest.raises(CoordinationError, match=r"^vote: process 3 did not join within 3 s"):
        late.agree("vote", 1, sum, timeout_s=3)
    assert job.all(lambda c: c.agree("vote", c.process, sum, timeout_s=5)) == [6] * 4


def test_late_process_does_not_mix_up_two_barriers(job: FakeJob) -> None:
    """If it failed, a process that once timed out would vote on other saves than the others, for the rest of the run:
    incomplete steps would count as committed."""
    first, *others = job.processes
    job.service.gone = {"out"}  # pyright: ignore[reportAttributeAccessIssue]  process 0 is held up
    for other in others:
        with pytest.raises(CoordinationError, match="process 0 did not answer"):
            other.agree("commit", 1, sum, timeout_s=3, about="save 1")
    job.service.gone = set()
    assert first.agree("commit", 1, sum, timeout_s=3, about="save 1") == 4, "it finds their words"

    def go_on(c: Any) -> Any:
        if c.process == 0:  # flushes save 1, which the others have dropped
            with job.service.changed:
                assert job.service.changed.wait_for(lambda: str(job.service.values).count("save 2") == 3, 30)
            job.service.gone = {1, 2, 3}
            with pytest.raises(CoordinationError, match="process 1, 2, 3 did not join"):
                c.agree("disk", "save 1", lambda said: said, timeout_s=3, about="save 1")
            job.service.gone = set()
        return c.agree("disk", f"{c.process}", lambda said: said, timeout_s=5, about="save 2")

    assert job.all(go_on) == [["0", "1", "2", "3"]] * 4
    answers = job.all(lambda c: [c.agree("disk", n, sum, timeout_s=5, about="save 2") for n in range(3)])
    assert answers == [[0, 4, 8]] * 4, "several exchanges with one key"


def test_late_process_rejoins_at_the_next_operation(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, no later restore or durable save of a job would succeed after one in which a process missed
    an exchange."""
    monkeypatch.setattr(meeting, "_MEETINGS_KEPT", 1)
    first, *others = occasions = [ScopedCoordinator(c) for c in job.processes]
    for each in occasions:
        each.begin("save 1")
    job.service.gone = {"out"}  # pyright: ignore[reportAttributeAccessIssue]  process 0 is held up
    for other in others:
        with pytest.raises(CoordinationError, match="process 0 did not answer"):
            other.agree("begun", 1, sum, timeout_s=3)
    job.service.gone = {1, 2, 3}
    assert first.agree("begun", 1, len, timeout_s=3) == 4, "it finds their words, and goes on"
    assert first.ask_process_0("place", lambda: "one", timeout_s=3) == "one"
    with pytest.raises(CoordinationError, match="process 1, 2, 3 did not join"):
        first.agree("written", 1, sum, timeout_s=3)
    job.service.gone = set()
    for number in (2, 3):
        for each in occasions:
            each.begin(f"save {number}")
        said = job.all(
            lambda c, number=number: [
                occasions[c.process].agree("begun", 1, sum, timeout_s=5),
                occasions[c.process].ask_process_0("place", lambda: f"place {number}", timeout_s=5),
                occasions[c.process].agree("written", c.process, sorted, timeout_s=5),
            ]
        )
        assert said == [[4, f"place {number}", [0, 1, 2, 3]]] * 4
    kept = [key for key in job.service.values if "save 1" in key or "save 2" in key]
    assert all("/told/" in key for key in kept), "nothing of the exchanges is kept"


def test_channels_are_isolated(job: FakeJob) -> None:
    """If it failed, a vote of the disk thread would answer a question of the writer thread."""
    answers = job.all(
        lambda c: [
            c.agree(channel, c.process, lambda v, channel=channel: [channel, v], timeout_s=5) for channel in "ab"
        ]
    )
    assert answers == [[["a", [0, 1, 2, 3]], ["b", [0, 1, 2, 3]]]] * 4


def test_thousand_barriers_leave_no_more_keys_than_one(job: FakeJob) -> None:
    """If it failed, the coordination service of a long run would run out of memory."""

    def meet(c: Any) -> int:
        return [c.agree("vote", n, sum, timeout_s=30) for n in range(1000)][-1]

    assert job.all(meet) == [4 * 999] * 4
    kept = meeting._MEETINGS_KEPT
    assert len(job.service.values) == 3 + kept  # the values of the last exchange, and the verdicts of the last ones
    assert job.service.most <= 2 * 5 + kept


def test_service_failures_are_translated(job: FakeJob) -> None:
    """If it failed, JAX's own error would escape from a background thread, and its slot stay leased."""

    def broken(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    for method in ("blocking_key_value_get", "key_value_set"):
        original = getattr(job.service, method)
        setattr(job.service, method, broken)
        with pytest.raises(CoordinationError, match="the coordination service failed: UNAVAILABLE: connection refused"):
            job.processes[1].agree(method, 1, sum, timeout_s=-5.0)
        setattr(job.service, method, original)


def test_put_is_repeated_until_the_service_is_back(job: FakeJob) -> None:
    """If it failed, a host that loses its network for a moment would drop every save of that moment."""
    put, failures = job.service.key_value_set, iter(range(3))

    def flaky(key: str, value: str, allow_overwrite: bool = False) -> None:
        put(key, value, allow_overwrite)
        if next(failures, None) is not None:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: the answer was lost")

    job.service.key_value_set = flaky  # pyright: ignore[reportAttributeAccessIssue]
    assert job.all(lambda c: c.agree("vote", c.process, sum, timeout_s=30)) == [6] * 4


def test_decision_holds_where_it_cannot_be_published(job: FakeJob) -> None:
    """If it failed, process 0 would drop a save that every other process keeps until it learns the decision."""

    def late(key: str, value: str, allow_overwrite: bool) -> None:
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} was not put in time")

    for process in (1, 2, 3):
        job.service.key_value_set(meeting._place_of("ckptkit/0/commit/0", process), "1")
    job.service.key_value_set = late  # pyright: ignore[reportAttributeAccessIssue]
    assert job.processes[0].ask_process_0("decision", lambda: True, timeout_s=0) is True
    assert job.processes[0].agree("commit", 1, sum, timeout_s=0) == 4


def test_veto_ends_a_meeting_at_once(job: FakeJob) -> None:
    """If it failed, a process that raises in `save` would stop the step loops of all others for the whole timeout."""

    def vote(c: Any) -> Any:
        return c.agree(
            "commit", None, lambda said: said, timeout_s=60, about="7", is_veto=lambda said: said is not None
        )

    for vetoing in (2, 0):
        about = job.processes[vetoing]
        answers = job.all(
            lambda c, about=about: c.veto("commit", "no", lambda said: said, about="7") if c is about else vote(c),
            absent=(3,),
        )
        expected = [None if process == vetoing else "no" for process in range(4)]
        assert [a if a is None else next(filter(None, a)) for a in answers] == expected[:3]
        about = f"next-{vetoing}"
        job.all(lambda c, about=about: c.agree("commit", 1, sum, timeout_s=30, about=about))


def test_late_process_reads_the_verdict_that_it_missed(job: FakeJob) -> None:
    """If it failed, a process that missed a verdict would never know whether the save was committed."""
    for process in (1, 2, 3):
        job.service.key_value_set(meeting._place_of("ckptkit/0/commit/save 1/0", process), "1")
    assert job.processes[0].agree("commit", 1, sum, timeout_s=5, about="save 1") == 4
    assert job.processes[3].recall("commit", "save 1") == (True, 4)
    job.service.gone = {"out"}  # pyright: ignore[reportAttributeAccessIssue]
    assert job.processes[3].recall("commit", "save 2") == (False, None)


def test_two_managers_of_one_process_do_not_share_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a second manager would receive the votes of the first."""
    jax.devices()  # a backend that is made later would take the fake client for its collectives
    monkeypatch.setattr(coordination.distributed.global_state, "client", FakeService())
    first, second = JaxCoordinator(), JaxCoordinator()
    assert first.agree("vote", 1, sum, timeout_s=1) == 1
    assert second.agree("vote", 2, sum, timeout_s=1) == 2  # the service refuses a key that is there already


def test_process_0_publishes_without_a_barrier(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with a clock would stop every step until the slowest host has come, or fill the service."""
    monkeypatch.setattr(meeting, "_TOLD_KEPT", 3)
    first, *others = job.processes
    told = [first.ask_process_0("decision", lambda number=number: {"save": number}, timeout_s=5) for number in range(3)]
    assert told == [{"save": number} for number in range(3)]
    for other in others:
        assert [other.ask_process_0("decision", lambda: pytest.fail("asked"), timeout_s=5) for _ in range(3)] == told
    for number in range(3, 9):
        first.ask_process_0("decision", lambda number=number: number, timeout_s=5)
    assert len(job.service.values) == 3
    with pytest.raises(ZeroDivisionError):
        first.ask_process_0("broken", lambda: 1 // 0, timeout_s=5)
    with pytest.raises(CheckpointError, match="process 0: "):
        others[0].ask_process_0("broken", lambda: 0, timeout_s=5)
    job.service.gone = {0}
    with pytest.raises(CoordinationError, match=r"^silent: process 0 did not answer within 5 s$"):
        others[0].ask_process_0("silent", lambda: 0, timeout_s=5)


@pytest.mark.parametrize("left_s", [0.1, 0.8, 1.8, 3.8, 5.0])
def test_short_wait_ends_soon_after_process_0_has_left(left_s: float) -> None:
    """The writer of one process would wait in a dead exchange, and lose the saves that the others make meanwhile."""
    exchange = meeting.Meetings("job", 1, 2).agree("commit", 1, lambda _: None, timeout_s=3.0, about="2", order=float)
    now_s = 0.0

    def answer(request: meeting.Request) -> Any:
        nonlocal now_s
        match request:
            case meeting.Now():
                return now_s
            case meeting.Get(key=key) if key.endswith("/head"):
                return "5" if now_s >= left_s else None
            case meeting.Get(timeout_s=timeout_s):
                now_s += timeout_s
        return None

    def drive() -> None:
        answered = None
        while True:
            answered = answer(exchange.send(answered))

    with pytest.raises(CoordinationError, match="process 0 has left this exchange"):
        drive()
    assert now_s - left_s <= (3.0 + meeting._VERDICT_SPARE_S) / 4 + 0.1

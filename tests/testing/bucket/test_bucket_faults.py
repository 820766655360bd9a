"""If this fails, a test of resilience tests nothing: the fault that it scripted did not happen, or another did."""

import json
import statistics
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, IncompleteRead
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from bucket_http import BUCKET, Answer, Http, object_path
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.testing.bucket import (
    BucketServer,
    Delay,
    Effect,
    Fault,
    FaultPlan,
    Fixed,
    Hang,
    Kind,
    Lognormal,
    PermissionWithdrawn,
    QuotaFull,
    Reset,
    SlowBody,
    Status,
    Truncate,
    Uniform,
)
from ckptkit.testing.bucket.injector import Injector

UPLOAD = f"/upload/storage/v1/b/{BUCKET}/o"
MEGABYTE = bytes(1_000_000)


def once(effect: Effect, *kinds: Kind) -> FaultPlan:
    return FaultPlan(faults=(Fault(effect=effect, kinds=kinds, count=1),))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (401, "required"),
        (403, "forbidden"),
        (404, "notFound"),
        (408, "requestTimeout"),
        (429, "rateLimitExceeded"),
        (500, "internalError"),
        (502, "backendError"),
        (503, "backendError"),
        (504, "backendError"),
    ],
)
def test_error_status_is_sent_before_or_after_the_work(
    server: BucketServer, http: Http, code: int, reason: str
) -> None:
    server.faults = once(Status(code=code), Kind.WRITE)
    answer = http.insert("before", b"x")
    assert (answer.status, answer.reason()) == (code, reason)
    server.faults = once(Status(code=code, stage="after"), Kind.WRITE)
    assert http.insert("after", b"x").status == code
    assert http.names() == ["after"]


def test_permission_and_quota_errors_match_gcs(server: BucketServer, http: Http) -> None:
    server.faults = FaultPlan(
        faults=(
            Fault(effect=QuotaFull(), kinds=(Kind.WRITE, Kind.RESUME, Kind.CHUNK)),
            Fault(effect=PermissionWithdrawn(), kinds=(Kind.LIST,)),
        )
    )
    full = http.insert("name", b"x")
    assert (full.status, full.reason()) == (403, "quotaExceeded")
    assert full.json()["error"]["errors"][0]["domain"] == "usageLimits"
    withdrawn = http("GET", f"/storage/v1/b/{BUCKET}/o")
    assert (withdrawn.status, withdrawn.reason()) == (403, "forbidden")
    assert http.read("name").status == 404
    server.faults = FaultPlan()
    assert http.insert("name", b"x").status == 200


def test_fault_selects_by_kind_and_name_and_is_counted(server: BucketServer, http: Http) -> None:
    server.faults = FaultPlan(
        faults=(Fault(effect=Status(code=503), kinds=(Kind.WRITE,), objects="run/*/w", skip=1, count=2),)
    )
    statuses = [http.insert(name, b"x").status for name in ["run/1/w", "run/a/b/w", "run/2/x", "run/3/w", "run/4/w"]]
    assert statuses == [200, 503, 200, 503, 200]
    assert http.read("run/1/w").status == 200
    assert server.fired() == [2]


def test_fault_selects_a_listing_by_its_prefix(server: BucketServer, http: Http) -> None:
    """If it failed, a plan for the objects of one run would never hit its listings, and its test could not fail."""
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=503), kinds=(Kind.LIST,), objects="run/*"),))
    path = f"/storage/v1/b/{BUCKET}/o"
    statuses = [http("GET", path, query={"prefix": prefix}).status for prefix in ("run/", "run/1/", "other/", "")]
    assert statuses == [503, 503, 200, 200]


def test_fault_matches_a_name_inside_the_body(server: BucketServer, http: Http) -> None:
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=503), objects="hit"),))
    body = b'--c\r\n\r\n{"name": "%s"}\r\n--c\r\n\r\nx\r\n--c--'
    for name, status in ((b"hit", 503), (b"miss", 200)):
        headers = {"Content-Type": "multipart/related; boundary=c"}
        query = {"uploadType": "multipart"}
        assert http("POST", UPLOAD, query=query, body=body % name, headers=headers).status == status
        started = http("POST", UPLOAD, query={"uploadType": "resumable"}, body={"name": name.decode()})
        assert started.status == status


def test_fault_can_hit_one_part_of_a_batch(server: BucketServer, http: Http) -> None:
    http.put("one")
    http.put("two")
    server.faults = FaultPlan(faults=(Fault(effect=Status(code=503), kinds=(Kind.DELETE,), objects="two"),))
    body = "".join(f"--c\r\n\r\nDELETE {object_path(name)} HTTP/1.1\r\n\r\n\r\n" for name in ("one", "two"))
    headers = {"Content-Type": "multipart/mixed; boundary=c"}
    answer = http("POST", "/batch/storage/v1", body=body + "--c--", headers=headers)
    assert b"HTTP/1.1 204" in answer.body
    assert b"HTTP/1.1 503" in answer.body
    assert http.names() == ["two"]
    assert server.log.totals(Kind.DELETE).count == 2


@pytest.mark.parametrize("stage", ["before", "upload", "after"])
def test_reset_loses_the_request_or_only_the_response(server: BucketServer, http: Http, stage: str) -> None:
    server.faults = once(Reset(stage=stage, after_bytes=300_000), Kind.WRITE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConnectionError):
        http.insert("name", MEGABYTE)
    entry = server.log.entries(Kind.WRITE)[-1]
    assert (entry.status, entry.fault) == (0, "reset")
    assert entry.exchange.received_bytes == {"before": 0, "upload": 300_000, "after": 1_000_000}[stage]
    assert http.names() == (["name"] if stage == "after" else [])


@pytest.mark.parametrize("after_bytes", [0, 1, 70_000, 999_999, 5_000_000])
def test_a_body_breaks_off_by_reset_or_by_an_early_end(server: BucketServer, http: Http, after_bytes: int) -> None:
    http.put("name", MEGABYTE)
    server.faults = once(Truncate(after_bytes=after_bytes), Kind.READ)
    with pytest.raises(IncompleteRead) as caught:
        http.read("name")
    expected = min(after_bytes, 999_999)
    assert len(caught.value.partial) == expected
    assert server.log.entries(Kind.READ)[-1].exchange.sent_bytes == expected
    server.faults = once(Reset(stage="download", after_bytes=after_bytes), Kind.READ)
    with pytest.raises((ConnectionResetError, IncompleteRead)):
        http.read("name")
    assert http.read("name").body == MEGABYTE


def test_response_without_a_body_can_break_off(server: BucketServer, http: Http) -> None:
    http.put("name")
    server.faults = once(Truncate(), Kind.DELETE)
    with pytest.raises((ConnectionError, HTTPException)):
        http("DELETE", object_path("name"))
    assert http.names() == []


def test_slow_first_byte_and_slow_body_delay_the_response(server: BucketServer, http: Http) -> None:
    http.put("name", MEGABYTE)
    server.faults = once(Delay(latency=Fixed(seconds=0.3)))
    assert timed(lambda: http.read("name")) >= 0.3
    server.faults = once(SlowBody(bytes_per_s=1e6))
    assert timed(lambda: http.read("name")) >= 0.99
    assert timed(lambda: http.read("name")) < 0.99


@pytest.mark.parametrize("stage", ["before", "after"])
def test_a_hang_ends_when_the_client_or_the_server_does(server: BucketServer, http: Http, stage: str) -> None:
    server.faults = FaultPlan(faults=(Fault(effect=Hang(stage=stage), kinds=(Kind.WRITE,)),))  # pyright: ignore[reportArgumentType]
    connection = http_connection(http, timeout_s=0.3)
    connection.request("POST", f"{UPLOAD}?uploadType=media&name=name", body=b"x")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    assert http.names() == (["name"] if stage == "after" else [])
    connection.close()
    wait_until(lambda: server.log.totals(Kind.WRITE).failed == 1)
    waiting = http_connection(http, timeout_s=20)
    waiting.request("POST", f"{UPLOAD}?uploadType=media&name=other", body=b"x")
    wait_until(lambda: server.fired() == [2])
    assert timed(server.close) < 5.0
    waiting.close()


def test_two_readers_share_the_bandwidth(server: BucketServer, http: Http) -> None:
    http.put("name", MEGABYTE)
    server.faults = FaultPlan(download_bytes_per_s=4e6)
    alone_s = timed(lambda: http.read("name"))
    seconds: list[float] = []
    readers = [
        threading.Thread(target=lambda: seconds.append(timed(lambda: Http(server.url).read("name")))) for _ in range(2)
    ]
    together_s = timed(lambda: run_all(readers))
    # 1 MB at 4 MB/s; two readers take twice as long, and neither waits for the other to end.
    assert alone_s >= 0.24
    assert together_s >= 0.49
    assert min(seconds) > 0.75 * max(seconds)


def test_two_writers_share_the_bandwidth(server: BucketServer, http: Http) -> None:
    server.faults = FaultPlan(upload_bytes_per_s=4e6)
    assert timed(lambda: http.insert("name", MEGABYTE)) >= 0.24
    writers = [threading.Thread(target=lambda: Http(server.url).insert("name", MEGABYTE)) for _ in range(2)]
    assert timed(lambda: run_all(writers)) >= 0.49
    server.faults = FaultPlan(upload_bytes_per_s=0.2e6)
    assert timed(lambda: http.read("name")) < 4.0  # the other direction has a bucket of its own: not 5 s


def test_seed_selects_the_same_requests_in_any_order() -> None:
    def hits(seed: int, names: list[str]) -> dict[str, list[bool]]:
        injector = Injector(FaultPlan(seed=seed, faults=(Fault(effect=Status(code=503), probability=0.3),)))
        found: dict[str, list[bool]] = {}
        for name in names:
            found.setdefault(name, []).append(injector.decide(Kind.READ, name)[1] is not None)
        return found

    names = [f"object-{number % 50}" for number in range(1000)]
    assert hits(1, names) == hits(1, names[::-1])
    assert hits(1, names) != hits(2, names)
    share = statistics.mean(hit for each in hits(1, names).values() for hit in each)
    assert 0.25 < share < 0.35


def test_latencies_follow_their_distribution() -> None:
    def draws(latency: Fixed | Uniform | Lognormal) -> list[float]:
        injector = Injector(FaultPlan(seed=5, faults=(Fault(effect=Delay(latency=latency)),)))
        return [injector.decide(Kind.READ, "name")[0] for _ in range(2000)]

    assert set(draws(Fixed(seconds=0.5))) == {0.5}
    uniform = draws(Uniform(low_s=0.1, high_s=0.3))
    assert 0.1 <= min(uniform) < max(uniform) <= 0.3
    assert statistics.mean(uniform) == pytest.approx(0.2, abs=0.01)
    lognormal = draws(Lognormal(median_s=0.02, sigma=1.0))
    assert statistics.median(lognormal) == pytest.approx(0.02, rel=0.1)
    assert max(lognormal) > 0.2
    assert max(draws(Lognormal(median_s=50.0, sigma=2.0))) == 60.0


def test_delays_add_up_and_later_faults_still_apply() -> None:
    delay = Fault(effect=Delay(latency=Fixed(seconds=0.5)))
    injector = Injector(FaultPlan(faults=(delay, delay, Fault(effect=Hang()), Fault(effect=Status(code=500)))))
    ordeal = injector.decide(Kind.READ, "name")
    assert ordeal == (1.0, Hang())


EFFECTS = st.one_of(
    st.builds(Status, code=st.sampled_from([401, 429, 503]), stage=st.sampled_from(["before", "after"])),
    st.just(PermissionWithdrawn()),
    st.just(QuotaFull()),
    st.builds(Reset, stage=st.sampled_from(["before", "upload", "after", "download"]), after_bytes=st.integers(0, 9)),
    st.builds(Truncate, after_bytes=st.integers(0, 9)),
    st.builds(SlowBody, bytes_per_s=st.floats(1, 1e9)),
    st.builds(Hang, stage=st.sampled_from(["before", "after"])),
    st.builds(
        Delay,
        latency=st.builds(Fixed, seconds=st.floats(0, 1))
        | st.builds(Uniform, low_s=st.floats(0, 1), high_s=st.floats(1, 2))
        | st.builds(Lognormal, median_s=st.floats(0.01, 1), sigma=st.floats(0, 2)),
    ),
)
PLANS = st.builds(
    FaultPlan,
    faults=st.lists(
        st.builds(
            Fault,
            effect=EFFECTS,
            kinds=st.lists(st.sampled_from(Kind), max_size=3).map(tuple),
            objects=st.text(max_size=9),
            skip=st.integers(0, 9),
            count=st.none() | st.integers(0, 9),
            probability=st.floats(0, 1),
        ),
        max_size=4,
    ).map(tuple),
    seed=st.integers(),
    download_bytes_per_s=st.none() | st.floats(1, 1e9),
)


@given(PLANS)
def test_plan_round_trips_through_json(plan: FaultPlan) -> None:
    assert FaultPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "a fault plan is [], expected a JSON object"),
        ('{"fault": []}', "FaultPlan knows"),
        ('{"faults": [{"effect": {"type": "explode"}}]}', "effect has type 'explode', expected one of ['delay'"),
        ('{"faults": [{"effect": {"type": "status", "code": 418}}]}', "status 418 cannot be injected"),
        ('{"faults": [{"effect": {"type": "status"}}]}', "Status: "),
        ('{"faults": [{"effect": {"type": "hang", "stage": "later"}}]}', "stage is 'later', expected one of"),
        ('{"faults": [{"effect": {"type": "hang"}, "kinds": ["reading"]}]}', "'reading' is not a valid Kind"),
        ('{"faults": [{"effect": {"type": "hang"}, "probability": 2}]}', "probability is 2, expected 0 to 1"),
        ('{"download_bytes_per_s": 0}', "a bandwidth is 0, expected more than 0"),
        ("{", "Expecting property name"),
    ],
)
def test_invalid_plan_error_names_the_fault(http: Http, text: str, told: str) -> None:
    answer = http("POST", "/_ckptkit/faults", body=text)
    assert answer.status == 400
    assert told in answer.json()["error"]["message"]


def test_faults_and_log_have_their_own_address(server: BucketServer, http: Http) -> None:
    plan = once(Status(code=503), Kind.WRITE)
    assert http("POST", "/_ckptkit/faults", body=plan.as_json()).json() == plan.as_json()
    assert server.faults == plan
    assert [http.insert("a/b", b"12345").status for _ in range(2)] == [503, 200]
    assert http("GET", "/_ckptkit/faults").json() == {"plan": plan.as_json(), "fired": [1]}
    log = http("GET", "/_ckptkit/log").json()
    assert list(log["totals"]) == ["write"]
    assert [(each["name"], each["status"], each["fault"]) for each in log["entries"]] == [
        ("a/b", 503, "status"),
        ("a/b", 200, None),
    ]
    assert http("DELETE", "/_ckptkit/log").status == 204
    assert http("GET", "/_ckptkit/log").json() == {"totals": {}, "entries": []}
    assert http("GET", "/_ckptkit/other").status == 404


def test_the_log_counts_requests_bytes_and_seconds_by_kind(server: BucketServer, http: Http) -> None:
    for number in range(3):
        http.insert(f"name-{number}", MEGABYTE)
    http("GET", f"{object_path('name-0')}?alt=media", headers={"Range": "bytes=0-99"})
    http.read("absent")
    writes, reads = server.log.totals(Kind.WRITE), server.log.totals(Kind.READ)
    assert (writes.count, writes.failed, writes.received_bytes) == (3, 0, 3_000_000)
    assert (reads.count, reads.failed) == (2, 1)
    assert reads.sent_bytes == 100 + len(f"No such object: {BUCKET}/absent")
    assert 0 < writes.elapsed_s < 10
    assert server.log.totals(Kind.COMPOSE).count == 0
    assert [(entry.kind, entry.name, entry.status) for entry in server.log.entries()][-2:] == [
        (Kind.READ, "name-0", 206),
        (Kind.READ, "absent", 404),
    ]


def test_who_has_an_answer_without_a_body_finds_it_in_the_log(
    server: BucketServer, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that counts deletions right after them would miss the last one, on a slow machine and nowhere else."""
    http.put("a")
    prepare = web.StreamResponse.prepare

    async def slow_after_the_head(self: web.StreamResponse, request: web.BaseRequest) -> AbstractStreamWriter | None:
        writer = await prepare(self, request)
        time.sleep(0.2)
        return writer

    monkeypatch.setattr(web.StreamResponse, "prepare", slow_after_the_head)
    assert http("DELETE", object_path("a")).status == 204
    assert server.log.totals(Kind.DELETE).count == 1


def test_plan_is_accepted_by_the_constructor(tmp_path: Path) -> None:
    with BucketServer(dir=tmp_path, buckets=[BUCKET], faults=once(Status(code=429))) as server:
        answers: list[Answer] = [Http(server.url).insert("name", b"x") for _ in range(2)]
    assert [answer.status for answer in answers] == [429, 200]


def http_connection(target: Http, *, timeout_s: float) -> HTTPConnection:
    return HTTPConnection(target.host, target.port, timeout=timeout_s)


def timed(act: Callable[[], object]) -> float:
    start_s = time.monotonic()
    act()
    return time.monotonic() - start_s


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_until(holds: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)

"""If this fails, a bad request ends in a traceback, or in a file outside the bucket's directory."""

import json
import random
from pathlib import Path

import pytest
from bucket_http import BUCKET, Answer, Http, object_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.testing.bucket import BucketDefect, BucketServer, Kind
from ckptkit.testing.bucket.objects import ObjectStore

UPLOAD = f"/upload/storage/v1/b/{BUCKET}/o"
MULTIPART = {"Content-Type": "multipart/related; boundary=cut"}


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/storage/v1/b/absent-bucket/o", 404, "notFound"),
        ("GET", "/storage/v1/b/UPPER/o", 400, "invalid"),
        ("GET", "/storage/v1/b/..%2F..%2Fetc/o", 400, "invalid"),
        ("GET", "/storage/v1/b/x/o", 400, "invalid"),
        ("GET", "/storage/v2/b", 404, "notFound"),
        ("GET", "/storage/v1/b/test-bucket/iam", 404, "notFound"),
        ("GET", "/", 404, "notFound"),
        ("GET", "//", 404, "notFound"),
        ("GET", "/storage/v1/b/test-bucket/o/a/b", 404, "notFound"),
        ("POST", object_path("name"), 405, "methodNotAllowed"),
        ("DELETE", "/storage/v1/b", 405, "methodNotAllowed"),
        ("GET", UPLOAD, 405, "methodNotAllowed"),
        ("POST", UPLOAD, 400, "invalid"),
        ("POST", UPLOAD + "?uploadType=other", 400, "invalid"),
        ("POST", UPLOAD + "?uploadType=media", 400, "required"),
        ("POST", UPLOAD + "?uploadType=resumable", 400, "required"),
        ("POST", UPLOAD + "?uploadType=multipart&name=x", 400, "invalid"),
        ("PUT", UPLOAD + "?uploadType=resumable&upload_id=../../x", 404, "notFound"),
        ("GET", object_path("name") + "?ifGenerationMatch=x", 400, "invalid"),
        ("GET", object_path("name") + "?ifGenerationMatch=-1", 400, "invalid"),
        ("DELETE", object_path("name") + "?generation=1.5", 400, "invalid"),
        ("GET", f"/storage/v1/b/{BUCKET}/o/%ff%fe", 400, "invalid"),
        ("GET", f"/storage/v1/b/{BUCKET}/o/%zz?alt=json", 404, "notFound"),
        ("GET", f"/storage/v1/b/{BUCKET}/o/..", 400, "invalid"),
        ("POST", f"{object_path('name')}/compose", 400, "invalid"),
        ("POST", "/batch/storage/v1", 400, "invalid"),
    ],
)
def test_bad_path_or_parameter_gets_the_status_of_gcs(
    http: Http, method: str, path: str, status: int, reason: str
) -> None:
    answer = http(method, path)
    assert (answer.status, answer.reason()) == (status, reason)


@pytest.mark.parametrize("name", [".", "..", "a\rb", "a\nb", "x" * 1025, "é" * 513, ".well-known/acme-challenge/x"])
def test_invalid_object_names_are_refused(http: Http, name: str) -> None:
    resumable = http("POST", UPLOAD, query={"uploadType": "resumable"}, body={"name": name})
    copied = http("POST", f"{object_path('source')}/copyTo/b/{BUCKET}/o/{object_path(name).rpartition('/')[2]}")
    for answer in (http.insert(name, b"x"), resumable, copied):
        assert (answer.status, answer.reason()) == (400, "invalid")
    assert http.names() == []


@pytest.mark.parametrize(
    "name", ["../../../escaped", "/etc/passwd", "a/../../b", "..%2f..", "\\..\\x", "\x00", "é" * 512, "con", "a//b/"]
)
def test_names_that_look_like_paths_stay_in_the_bucket(http: Http, tmp_path: Path, name: str) -> None:
    before = {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents}
    http.put(name, b"data")
    assert http.read(name).body == b"data"
    assert http.names() == [name]
    found = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"data"]
    assert len(found) == 1
    assert found[0].parent.name == "data"
    assert {path for path in tmp_path.parent.rglob("*") if tmp_path not in path.parents} == before
    assert http("DELETE", object_path(name)).status == 204


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--cut",
        b"--cut--",
        b"no boundary at all",
        b"--cut\r\n\r\n",
        b'--cut\r\n\r\n{"name": "x"}',
        b'--cut\r\n\r\n{"name": "x"}\r\n--cut--',
        b'--cut\r\n\r\n{"name": "x"}\r\n--cut\r\n\r\ndata',
        b'--cut\r\n\r\n{"name": "x"}\r\n--cut\r\n\r\ndata\r\n--cut\r\n\r\nthird\r\n--cut--',
        b"--cut\r\n\r\nno json\r\n--cut\r\n\r\ndata\r\n--cut--",
        b"--cut\r\n\r\n[1]\r\n--cut\r\n\r\ndata\r\n--cut--",
        b"--cut\r\n\r\n" + b"[" * 30_000 + b"\r\n--cut\r\n\r\ndata\r\n--cut--",
        b'--cut\r\n\r\n{"name": 5}\r\n--cut\r\n\r\ndata\r\n--cut--',
        b'--cut\r\n\r\n{"name": "\\ud800"}\r\n--cut\r\n\r\ndata\r\n--cut--',
        b'--cut\r\n\r\n{"name": "x", "metadata": {"k": 1}}\r\n--cut\r\n\r\ndata\r\n--cut--',
        b'--cut\r\n\r\n{"name": "x", "contentType": "a\\r\\nb"}\r\n--cut\r\n\r\ndata\r\n--cut--',
        b'--cut\r\n\r\n{"name": "x", "metadata": {"k": "' + b"v" * 9000 + b'"}}\r\n--cut\r\n\r\ndata\r\n--cut--',
        b"--cut\r\n" + b"x" * 200_000,
    ],
)
def test_a_broken_multipart_body_is_400_and_stores_nothing(http: Http, body: bytes) -> None:
    answer = http("POST", UPLOAD, query={"uploadType": "multipart"}, body=body, headers=MULTIPART)
    assert answer.status == 400
    assert answer.reason() in {"badContent", "parseError", "invalid", "required"}
    assert http.names() == []


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "multipart/related", "multipart/mixed; boundary=cut", "multipart/related; boundary"],
)
def test_a_multipart_upload_needs_a_boundary(http: Http, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    answer = http("POST", UPLOAD, query={"uploadType": "multipart"}, body=b"--cut--", headers=headers)
    assert (answer.status, answer.reason()) == (400, "invalid")


def test_oversized_requests_get_413_or_414(http: Http) -> None:
    assert http("GET", object_path("x"), headers={"X-Large": "v" * 20_000}).status == 413
    assert http("GET", object_path("x"), headers={f"X-{n}": "v" * 400 for n in range(60)}).status == 413
    assert http("GET", "/storage/v1/b/" + "x" * 20_000).status == 414
    assert http("PATCH", object_path("x"), body=b"x" * (9 << 20)).status == 413
    assert http("GET", object_path("x"), headers={"X-Huge": "v" * 400_000}).status == 400  # aiohttp's own


def batch(http: Http, *parts: str, boundary: str = "cut") -> Answer:
    body = "".join(
        f"--cut\r\nContent-Type: application/http\r\nContent-ID: <id-{number}>\r\n\r\n{part}\r\n"
        for number, part in enumerate(parts)
    )
    headers = {"Content-Type": f"multipart/mixed; boundary={boundary}"}
    return http("POST", "/batch/storage/v1", body=body + "--cut--", headers=headers)


def test_each_part_of_a_batch_is_answered_separately(http: Http) -> None:
    generation = int(http.put("one")["generation"])
    http.put("two")
    answer = batch(
        http,
        f"DELETE {object_path('one')}?ifGenerationMatch={generation + 1} HTTP/1.1\r\n\r\n",
        f"DELETE {object_path('two')} HTTP/1.1\r\n\r\n",
        f"DELETE {object_path('absent')} HTTP/1.1\r\n\r\n",
        f"PATCH {object_path('one')} HTTP/1.1\r\nContent-Type: application/json\r\n\r\n" + '{"metadata": {"k": "v"}}',
        f"POST {UPLOAD}?uploadType=media&name=no HTTP/1.1\r\n\r\nx",
        "nonsense",
        "GET /storage/v1/b?%zz=1&&= HTTP/1.1\r\n\r\n",
    )
    assert answer.status == 200
    statuses = [int(line.split()[1]) for line in answer.body.splitlines() if line.startswith(b"HTTP/1.1 ")]
    assert statuses == [412, 204, 404, 200, 400, 400, 200]
    assert b"Content-ID: <response-id-3>" in answer.body
    assert http.names() == ["one"]
    assert http("GET", object_path("one")).json()["metadata"] == {"k": "v"}


def test_malformed_batch_is_400(http: Http) -> None:
    assert batch(http).status == 400
    assert batch(http, "x", boundary="other").status == 400
    assert batch(http, *["GET / HTTP/1.1\r\n\r\n"] * 101).status == 400
    headers = {"Content-Type": "multipart/mixed; boundary=cut"}
    assert http("POST", "/batch/storage/v1", body=b"--cut\r\nx\r\n--cut--", headers=headers).status == 400


METHODS = ["GET", "GET", "PUT", "POST", "POST", "POST", "DELETE", "PATCH", "HEAD", "FOO"]
PATHS = [
    "/storage/v1/b", "/storage/v1/b/B", "/storage/v1/b/B/o", "/storage/v1/b/B/o/N", "/storage/v1/b/B/o/N/compose",
    "/storage/v1/b/B/o/N/copyTo/b/B/o/N", "/storage/v1/b/B/o/N/rewriteTo/b/B/o/N", "/storage/v1/b/B/o/N/moveTo/o/N",
    "/upload/storage/v1/b/B/o", "/download/storage/v1/b/B/o/N", "/batch/storage/v1", "/B/N", "/N/N/N",
    "/_ckptkit/faults",
]  # fmt: skip
NAMES = ["a", "a", "a", "b", "a%2Fb", "..", "..%2F..%2Fx", "%00", "%ff", "%", "%zz", "\xe9", "x" * 1100, "", " ", "a/b"]
BUCKETS = [BUCKET, BUCKET, BUCKET, "absent-bucket", "..", "%ff"]
UPLOADS = ["uploadType=media", "uploadType=multipart", "uploadType=resumable", "upload_id=x", "uploadType=x"]
QUERIES = [
    "alt=media", "alt=json", "generation=1", "generation=x", "ifGenerationMatch=0", "ifGenerationMatch=" + "9" * 20,
    "ifGenerationNotMatch=0", "name=a", "name=b", "name=%ff", "name=..", "delimiter=/", "prefix=a", "maxResults=1",
    "matchGlob=%5B", "pageToken=%C3", "&&=",
]  # fmt: skip
HEADERS = [
    "Content-Length: -1", "Content-Length: x", "Transfer-Encoding: chunked", "Range: bytes=0-",
    "Range: bytes=-", "Content-Range: bytes 0-2/3", "Content-Range: bytes */*", "Content-Type: multipart/related",
    "Content-Type: multipart/related; boundary=cut", "x-goog-hash: crc32c=", "Expect: 100-continue", "Host: [", "Host:",
    "If-Match: *", "Content-Encoding: gzip", "nonsense", "X: \xff", "Upgrade: websocket", "Connection: upgrade",
]  # fmt: skip
BODIES = [
    b"",
    b"",
    b"{}",
    b"abc",
    b"--cut\r\n\r\n{}\r\n--cut\r\n\r\n",
    b"{",
    b"5\r\nabcde\r\n0\r\n\r\n",
    b"zz\r\n",
    b"\xff" * 9,
]


@pytest.mark.slow
def test_random_requests_never_crash_the_server(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=random.SystemRandom().randrange(1 << 32), requests=20_000)


@pytest.mark.long
def test_seeded_requests_never_crash_the_server(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=20_261_121, requests=4_000)


REACHED = [Kind.LIST, Kind.STAT, Kind.READ, Kind.WRITE, Kind.RESUME, Kind.PATCH, Kind.DELETE, Kind.COPY]


def bad_request(source: random.Random) -> bytes:
    """Something between a good request and none."""
    path = source.choice(PATHS)
    queries = source.sample(QUERIES, source.randrange(0, 4))
    if path.startswith("/upload"):
        queries += ["name=a", source.choice(UPLOADS)]
    for letter, choices in (("N", NAMES), ("B", BUCKETS)):
        path = "/".join(source.choice(choices) if part == letter else part for part in path.split("/"))
    body = source.choice(BODIES)
    head = [f"{source.choice(METHODS)} {path}?{'&'.join(queries)} HTTP/1.1", "Host: x", "Connection: close"]
    head += source.sample(HEADERS, source.randrange(0, 4))
    head += [f"Content-Length: {len(body)}"] * (source.random() < 0.7)
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def fuzz(directory: Path, *, seed: int, requests: int) -> None:
    print(f"fuzz(directory, seed={seed}, requests={requests})")
    source = random.Random(seed)
    with BucketServer(dir=directory, buckets=[BUCKET]) as server:  # leaving it raises what the server failed on
        http = Http(server.url)
        answered = 0
        for number in range(requests):
            if number % 25 == 0:
                http.put("a", b"there")
            data = bad_request(source)
            answer = http.raw(data, patience_s=0.02)
            answered += bool(answer)
            assert b"Traceback" not in answer, data
            assert not answer.startswith(b"HTTP/1.1 500"), data
            assert answer.startswith(b"HTTP/1.") or not answer, data
        assert answered > requests / 2  # the others left a body open
        reached = {(entry.kind, entry.status >= 400) for entry in server.log.entries()}
        assert reached >= {(kind, failed) for kind in REACHED for failed in (False, True)}, "the fuzz reaches the API"
        http.put("alive", b"yes")
        assert http.read("alive").body == b"yes"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "PUT", "POST", "PATCH", "DELETE"]),
    suffix=st.sampled_from(["", "/compose", f"/copyTo/b/{BUCKET}/o/x", f"/rewriteTo/b/{BUCKET}/o/x", "/moveTo/o/y"]),
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "metadata",
                        "contentType",
                        "name",
                        "sourceObjects",
                        "destination",
                        "generation",
                        "objectPreconditions",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
)
def test_any_json_gets_a_response(http: Http, method: str, suffix: str, body: object) -> None:
    http.put("name")
    answer = http(method, object_path("name") + suffix, body=json.dumps(body))
    assert answer.status in {200, 204, 400, 404, 405, 412}, (answer, body)


def test_server_failure_is_raised_at_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(ObjectStore, "list", broken)
    server = BucketServer(dir=tmp_path, buckets=[BUCKET]).start()
    answer = Http(server.url)("GET", f"/storage/v1/b/{BUCKET}/o")
    assert (answer.status, answer.reason()) == (500, "internalError")
    assert b"on purpose" not in answer.body
    with pytest.raises(BucketDefect, match="the bucket failed on 1 request"):
        server.close()

"""If this fails, bytes that a client sent are not the bytes that the bucket keeps."""

import base64
import hashlib
import json
import os
import socket
from pathlib import Path

import google_crc32c
import pytest
from bucket_http import BUCKET, Answer, Http, object_path

from ckptkit.testing.bucket import BucketServer

UPLOAD = f"/upload/storage/v1/b/{BUCKET}/o"
BLOCK = 256 * 1024


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def multipart(
    http: Http, metadata: object, data: bytes, *, eol: bytes = b"\r\n", boundary: bytes = b"==cut==", **query: object
) -> Answer:
    body = eol.join(
        [
            b"--" + boundary,
            b"Content-Type: application/json; charset=UTF-8",
            b"",
            json.dumps(metadata).encode(),
            b"--" + boundary,
            b"Content-Type: image/png",
            b"",
            data,
            b"--" + boundary + b"--",
        ]
    )
    headers = {"Content-Type": f'multipart/related; boundary="{boundary.decode()}"'}
    return http("POST", UPLOAD, query={"uploadType": "multipart", **query}, body=body, headers=headers)


def start(http: Http, name: str, headers: dict[str, str] | None = None, **query: object) -> str:
    answer = http("POST", UPLOAD, query={"uploadType": "resumable", **query}, body={"name": name}, headers=headers)
    assert answer.status == 200, answer
    return answer.headers["Location"].split(f":{http.port}")[1]


def chunk(http: Http, session: str, data: bytes, content_range: str, headers: dict[str, str] | None = None) -> Answer:
    ranged = {"Content-Range": content_range} if content_range else {}
    return http("PUT", session, body=data, headers={**ranged, **(headers or {})})


def persisted(answer: Answer) -> int:
    assert answer.status == 308, answer
    return int(answer.headers["Range"].removeprefix("bytes=0-")) + 1 if "Range" in answer.headers else 0


def test_media_upload_response_matches_gcs(http: Http) -> None:
    data = os.urandom(1000)
    answer = http.insert("a/b c.bin", data, headers={"Content-Type": "text/x-test"})
    resource = answer.json()
    assert resource["kind"] == "storage#object"
    assert (resource["name"], resource["bucket"], resource["size"]) == ("a/b c.bin", BUCKET, "1000")
    assert (resource["crc32c"], resource["md5Hash"]) == (crc32c(data), md5(data))
    assert (resource["contentType"], resource["metageneration"]) == ("text/x-test", "1")
    assert resource["id"] == f"{BUCKET}/a/b c.bin/{resource['generation']}"
    assert resource["timeCreated"].endswith("Z")
    assert http("GET", object_path("a/b c.bin")).json() == resource
    for link, expected in (("mediaLink", data), ("selfLink", answer.body)):
        assert http("GET", resource[link].split(f":{http.port}")[1]).body == expected


@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 17, 5_000_000])
def test_every_size_round_trips_by_every_kind_of_upload(http: Http, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    assert http.insert("media", data).status == 200
    assert multipart(http, {"name": "multipart"}, data).status == 200
    last = f"bytes 0-{size_bytes - 1}/{size_bytes}" if size_bytes else "bytes */0"
    assert chunk(http, start(http, "resumable"), data, last).status == 200
    assert http("PUT", start(http, "whole"), body=data).status == 200
    for name in ("media", "multipart", "resumable", "whole"):
        answer = http.read(name)
        assert answer.body == data
        assert answer.headers["x-goog-hash"] == f"crc32c={crc32c(data)},md5={md5(data)}"


@pytest.mark.parametrize("eol", [b"\r\n", b"\n"])
@pytest.mark.parametrize(
    "data",
    [b"\r", b"\r\n", b"\n--==cut=", b"\r\n--==cut=", b"--==cut==x", b"\n--", b"x" * 300_000 + b"\n--==cut"],
)
def test_bytes_that_look_like_a_boundary_are_kept(http: Http, data: bytes, eol: bytes) -> None:
    answer = multipart(http, {"name": "tricky", "metadata": {"k": "v"}}, data, eol=eol)
    assert answer.status == 200, answer
    assert (answer.json()["contentType"], answer.json()["metadata"]) == ("image/png", {"k": "v"})
    assert http.read("tricky").body == data


def test_checksums_are_checked_before_the_object_exists(http: Http) -> None:
    data, wrong = b"right", b"wrong"
    headers = {"x-goog-hash": f"crc32c={crc32c(wrong)}"}
    for answer in (
        http.insert("name", data, headers=headers),
        http.insert("name", data, headers={"x-goog-hash": f"md5={md5(wrong)}"}),
        http.insert("name", data, headers={"Content-MD5": md5(wrong)}),
        http.insert("name", data, headers={"x-goog-hash": "crc32c=nonsense"}),
        http.insert("name", data, headers={"Content-MD5": "AAAA"}),
        multipart(http, {"name": "name", "crc32c": crc32c(wrong)}, data),
        multipart(http, {"name": "name", "md5Hash": md5(wrong)}, data),
        chunk(http, start(http, "name"), data, "bytes 0-4/5", headers),
        chunk(http, start(http, "name", headers=headers), data, "bytes 0-4/5"),
    ):
        assert (answer.status, answer.reason()) == (400, "invalid")
        assert http.read("name").status == 404
    good = {"x-goog-hash": f"crc32c={crc32c(data)}, md5={md5(data)}", "Content-MD5": md5(data)}
    assert http.insert("name", data, headers=good).status == 200


def test_a_resumable_upload_in_chunks_with_unknown_total(http: Http) -> None:
    data = os.urandom(3 * BLOCK + 5)
    session = start(http, "chunks")
    assert persisted(chunk(http, session, b"", "bytes */*")) == 0
    for begin in range(0, 3 * BLOCK, BLOCK):
        part = data[begin : begin + BLOCK]
        assert persisted(chunk(http, session, part, f"bytes {begin}-{begin + BLOCK - 1}/*")) == begin + BLOCK
        assert http.read("chunks").status == 404
    done = chunk(http, session, data[3 * BLOCK :], f"bytes {3 * BLOCK}-{len(data) - 1}/{len(data)}")
    assert (done.status, done.json()["size"]) == (200, str(len(data)))
    assert http.read("chunks").body == data
    again = chunk(http, session, b"", f"bytes */{len(data)}")
    assert (again.status, again.json()) == (200, done.json())


def test_unaligned_chunk_is_persisted_to_the_last_block(http: Http) -> None:
    data = os.urandom(2 * BLOCK)
    session = start(http, "odd")
    assert persisted(chunk(http, session, data[: BLOCK + 9], f"bytes 0-{BLOCK + 8}/*")) == BLOCK
    assert persisted(chunk(http, session, b"", "bytes */*")) == BLOCK
    assert chunk(http, session, data[BLOCK:], f"bytes {BLOCK}-{2 * BLOCK - 1}/{2 * BLOCK}").status == 200
    assert http.read("odd").body == data


def test_bytes_sent_twice_count_once(http: Http) -> None:
    data = os.urandom(2 * BLOCK)
    session = start(http, "overlap")
    assert persisted(chunk(http, session, data[:BLOCK], f"bytes 0-{BLOCK - 1}/*")) == BLOCK
    # Other bytes at offsets that are there already: ignored, as by Google.
    assert chunk(http, session, b"?" * BLOCK + data[BLOCK:], f"bytes 0-{2 * BLOCK - 1}/{2 * BLOCK}").status == 200
    assert http.read("overlap").body == data


def test_an_upload_resumes_after_a_broken_connection(http: Http) -> None:
    data = os.urandom(8 * BLOCK)
    session = start(http, "broken")
    head = f"PUT {session} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    head += f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}\r\n\r\n"
    with socket.create_connection((http.host, http.port)) as connection:
        connection.sendall(head.encode() + data[: 5 * BLOCK + 100])
    kept = persisted(chunk(http, session, b"", f"bytes */{len(data)}"))
    assert kept % BLOCK == 0
    assert kept <= 5 * BLOCK
    assert http.read("broken").status == 404
    assert chunk(http, session, data[kept:], f"bytes {kept}-{len(data) - 1}/{len(data)}").status == 200
    assert http.read("broken").body == data


def test_an_upload_resumes_after_a_restart_of_the_server(tmp_path: Path) -> None:
    data = os.urandom(2 * BLOCK)
    with BucketServer(dir=tmp_path, buckets=[BUCKET]) as server:
        session = start(Http(server.url), "restart", ifGenerationMatch=0)
        chunk(Http(server.url), session, data[:BLOCK], f"bytes 0-{BLOCK - 1}/*")
    with BucketServer(dir=tmp_path) as server:
        http = Http(server.url)
        assert persisted(chunk(http, session, b"", "bytes */*")) == BLOCK
        done = chunk(http, session, data[BLOCK:], f"bytes {BLOCK}-{2 * BLOCK - 1}/{2 * BLOCK}")
        assert done.json()["md5Hash"] == md5(data)
    with BucketServer(dir=tmp_path) as server:
        http = Http(server.url)
        assert http.read("restart").body == data
        assert chunk(http, session, b"", "bytes */*").json()["generation"] == done.json()["generation"]


def test_broken_media_upload_leaves_no_object(http: Http, tmp_path: Path) -> None:
    http.put("name", b"before")
    head = f"POST {UPLOAD}?uploadType=media&name=name HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    http.raw(head.encode() + b"x" * 500_000)
    assert http.read("name").body == b"before"
    assert [path for path in tmp_path.rglob("*.part") if path.is_file()] == []


def test_cancelled_or_refused_sessions_are_410(http: Http) -> None:
    session = start(http, "gone")
    assert http("DELETE", session).status == 499
    for answer in (chunk(http, session, b"x", "bytes 0-0/1"), http("DELETE", session)):
        assert (answer.status, answer.reason()) == (410, "gone")
    refused = start(http, "refused", ifGenerationMatch=0)
    http.put("refused", b"other")
    assert chunk(http, refused, b"x", "bytes 0-0/1").status == 412
    assert chunk(http, refused, b"x", "bytes 0-0/1").status == 410
    assert http.read("refused").body == b"other"


@pytest.mark.parametrize(
    ("data", "content_range"),
    [
        (b"x", "bytes 5-5/9"),
        (b"xx", "bytes 0-0/1"),
        (b"x", "bytes 0-0/0"),
        (b"x", "bytes 3-1/9"),
        (b"x", "bites 0-0/1"),
        (b"x", "bytes 0-/1"),
        (b"x", "bytes 0-99999999999999999999/*"),
        (b"x", ""),  # all in one request, of another size than was announced
    ],
)
def test_invalid_chunks_are_refused(http: Http, data: bytes, content_range: str) -> None:
    session = start(http, "name", headers={"X-Upload-Content-Length": "9"})
    answer = chunk(http, session, data, content_range)
    assert (answer.status, answer.reason()) == (400, "invalid")
    assert http.read("name").status == 404


def test_copy_is_independent_of_its_source(http: Http) -> None:
    data = os.urandom(100_000)
    http.put("source", data)
    http("PATCH", object_path("source"), body={"metadata": {"k": "v"}, "contentType": "text/plain"})
    copied = http("POST", f"{object_path('source')}/copyTo/b/{BUCKET}/o/copy").json()
    assert (copied["metadata"], copied["contentType"], copied["metageneration"]) == ({"k": "v"}, "text/plain", "1")
    rewritten = http(
        "POST",
        f"{object_path('source')}/rewriteTo/b/{BUCKET}/o/new",
        body={"metadata": {}},
    ).json()
    assert (rewritten["done"], rewritten["totalBytesRewritten"]) == (True, "100000")
    http.put("source", b"changed")
    http("DELETE", object_path("source"))
    assert http.read("copy").body == http.read("new").body == data
    assert http("POST", f"{object_path('copy')}/moveTo/o/moved").status == 200
    assert http.read("moved").body == data
    assert http.read("copy").status == 404
    onto_itself = http("POST", f"{object_path('moved')}/rewriteTo/b/{BUCKET}/o/moved", body={"contentType": "a/b"})
    assert onto_itself.json()["resource"]["contentType"] == "a/b"
    assert http.read("moved").body == data


def test_a_composite_is_its_parts_in_order(http: Http) -> None:
    parts = {f"part-{number}": os.urandom(10_000 * number) for number in range(4)}
    for name, data in parts.items():
        http.put(name, data)
    body = {"sourceObjects": [{"name": name} for name in parts], "destination": {"contentType": "text/plain"}}
    resource = http("POST", f"{object_path('whole')}/compose", body=body).json()
    assert (resource["componentCount"], resource["contentType"]) == (4, "text/plain")
    assert resource["crc32c"] == crc32c(b"".join(parts.values()))
    assert "md5Hash" not in resource
    assert http.read("whole").body == b"".join(parts.values())
    missing = {"sourceObjects": [{"name": "absent"}]}
    assert http("POST", f"{object_path('whole')}/compose", body=missing).status == 404
    for sources in ([], [{"name": "part-1"}] * 33, "x", [1]):
        assert http("POST", f"{object_path('whole')}/compose", body={"sourceObjects": sources}).status == 400


def test_reader_keeps_its_generation_during_an_overwrite(http: Http) -> None:
    old = os.urandom(30_000_000)
    http.put("name", old)
    with socket.create_connection((http.host, http.port), timeout=10) as connection:
        connection.sendall(
            f"GET {object_path('name')}?alt=media HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        received = connection.recv(1000)
        http.put("name", b"new")
        http("DELETE", object_path("name"))
        while piece := connection.recv(1 << 20):
            received += piece
    assert received.partition(b"\r\n\r\n")[2] == old

"""If this fails, the shipped bucket takes what Google's refuses: a client that loops wrongly would pass every test."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
from bucket_http import BUCKET, Answer, Http, object_path

from ckptkit.store import RemoteStore
from ckptkit.testing.bucket import BucketServer, Kind
from ckptkit.testing.bucket.api import CALL_BYTES, TOKEN_LIFE_US

COLD = "cold-bucket"
MEBIBYTE = 1 << 20
DATA = os.urandom(5 * MEBIBYTE + 7)


@pytest.fixture
def source(http: Http) -> dict[str, Any]:
    created = http("POST", "/storage/v1/b", body={"name": COLD, "storageClass": "NEARLINE"})
    assert created.status == 200
    return http.put("source", DATA)


def rewrite(http: Http, *, target: str = "copy", body: dict[str, Any] | None = None, **query: object) -> Answer:
    return http("POST", f"{object_path('source')}/rewriteTo/b/{COLD}/o/{target}", query=query, body=body)


def changed(token: str, **values: object) -> str:
    state = {**json.loads(base64.urlsafe_b64decode(token)), **values}
    return base64.urlsafe_b64encode(json.dumps(state).encode()).decode()


def test_rewrite_to_another_class_takes_several_calls(http: Http, source: dict[str, Any]) -> None:
    """A client that makes one call would report a copy that does not exist."""
    query: dict[str, Any] = {"maxBytesRewrittenPerCall": 2 * MEBIBYTE, "ifGenerationMatch": 0}
    answers = [rewrite(http, **query).json()]
    while not answers[-1]["done"]:
        assert http("GET", f"/storage/v1/b/{COLD}/o/copy").status == 404, "nothing is there before the last call"
        answers.append(rewrite(http, rewriteToken=answers[-1]["rewriteToken"], **query).json())
    done = [2 * MEBIBYTE, 4 * MEBIBYTE, len(DATA)]
    assert [int(each["totalBytesRewritten"]) for each in answers] == done
    assert {each["objectSize"] for each in answers} == {str(len(DATA))}
    assert answers[-1]["resource"]["storageClass"] == "NEARLINE"
    assert (answers[-1]["resource"]["crc32c"], "rewriteToken" in answers[-1]) == (source["crc32c"], False)
    assert http("GET", f"/storage/v1/b/{COLD}/o/copy", query={"alt": "media"}).body == DATA


def test_rewrite_within_a_class_is_one_call(http: Http, source: dict[str, Any]) -> None:
    """Real copies within a bucket are one call, whatever the caller asks for."""
    path = f"{object_path('source')}/rewriteTo/b/{BUCKET}/o/copy"
    assert http("POST", path, query={"maxBytesRewrittenPerCall": MEBIBYTE}).json()["done"]


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"ifGenerationMatch": 0}, None),
        ({"maxBytesRewrittenPerCall": MEBIBYTE}, {"contentType": "text/plain"}),
        ({"maxBytesRewrittenPerCall": 2 * MEBIBYTE}, None),
        ({"maxBytesRewrittenPerCall": MEBIBYTE, "target": "other"}, None),
    ],
)
def test_token_of_another_request_is_refused(
    http: Http, source: dict[str, Any], query: dict[str, Any], body: dict[str, Any] | None
) -> None:
    """A client that changes a parameter between calls would fail on the real service only."""
    token = rewrite(http, maxBytesRewrittenPerCall=MEBIBYTE).json()["rewriteToken"]
    answer = rewrite(http, rewriteToken=token, body=body, **query)
    assert (answer.status, answer.reason()) == (400, "invalid")
    assert http("GET", f"/storage/v1/b/{COLD}/o/copy").status == 404


def test_damaged_old_and_overtaken_tokens_are_refused(http: Http, source: dict[str, Any]) -> None:
    """Any token was taken: the copy was reported as done after any second call."""
    query: dict[str, Any] = {"maxBytesRewrittenPerCall": MEBIBYTE}
    token = rewrite(http, **query).json()["rewriteToken"]
    for wrong in ("t", token[:-3], base64.b64encode(b"[]").decode(), "x" * 10_000):
        assert rewrite(http, rewriteToken=wrong, **query).status == 400
    began_us = json.loads(base64.urlsafe_b64decode(token))["began_us"]
    assert rewrite(http, rewriteToken=changed(token, began_us=began_us - TOKEN_LIFE_US), **query).status == 410
    http.put("source", DATA)
    assert rewrite(http, rewriteToken=token, **query).status == 400, "the source is another one by now"
    assert rewrite(http, maxBytesRewrittenPerCall=MEBIBYTE + 1).status == 400


def test_copy_between_classes_by_our_store(bucket_env: BucketServer, http: Http) -> None:
    """A copy to a bucket of another class would end after its first call, without an object."""
    big = os.urandom(2 * CALL_BYTES + 1)
    http.put("run/a", big)
    store = RemoteStore(f"gs://{BUCKET}/run")
    http("PATCH", f"/storage/v1/b/{BUCKET}", body={"storageClass": "COLDLINE"})  # of new objects
    bucket_env.log.clear()
    store.copy("a", "b", mode="create")
    assert store.get("b") == big
    assert bucket_env.log.totals(Kind.COPY).count == 3
    with pytest.raises(FileExistsError):
        store.copy("a", "b", mode="create")


def test_selected_fields_of_answers(http: Http) -> None:
    """A client that asks for a part would get the whole, and never miss what it did not ask for."""
    http.put("a/b", b"12345")
    listing = http("GET", f"/storage/v1/b/{BUCKET}/o", query={"fields": "items(name,size),nextPageToken"}).json()
    assert listing == {"items": [{"name": "a/b", "size": "5"}]}
    assert http("GET", f"/storage/v1/b/{BUCKET}/o", query={"fields": "items/name"}).json() == {
        "items": [{"name": "a/b"}]
    }
    assert http("GET", object_path("a/b"), query={"fields": "size"}).json() == {"size": "5"}
    assert http.insert("c", b"x", fields="name").json() == {"name": "c"}
    assert "generation" in http("GET", object_path("a/b"), query={"fields": "*"}).json()
    for wrong in ("items(", "items)", ",", "a//b", "a b;", "a(b", "/", "((((((((((a))))))))))"):
        assert http("GET", object_path("a/b"), query={"fields": wrong}).status == 400, wrong
    assert http("DELETE", object_path("a/b"), query={"fields": "items("}).status == 400
    assert http.read("a/b").body == b"12345", "what is refused is not done"


def test_versions_are_listed_and_not_offered(http: Http) -> None:
    """A bucket that claims to keep versions would lose objects that the caller expects."""
    http.put("a")
    assert len(http("GET", f"/storage/v1/b/{BUCKET}/o", query={"versions": "true"}).json()["items"]) == 1
    assert http("GET", f"/storage/v1/b/{BUCKET}/o", query={"versions": "yes"}).status == 400
    on = {"versioning": {"enabled": True}}
    assert http("PATCH", f"/storage/v1/b/{BUCKET}", body=on).status == 501
    assert http("POST", "/storage/v1/b", body={"name": "versions", **on}).status == 501
    assert http("PATCH", f"/storage/v1/b/{BUCKET}", body={"versioning": {"enabled": False}}).status == 200


def test_client_that_cannot_take_308_gets_200(http: Http) -> None:
    """Clients whose HTTP library follows every 308 would loop."""
    upload = f"/upload/storage/v1/b/{BUCKET}/o"
    started = http("POST", upload, query={"uploadType": "resumable", "name": "name"})
    session = started.headers["Location"].split(f":{http.port}")[1]
    headers = {"Content-Range": "bytes 0-262143/*", "X-GUploader-No-308": "yes"}
    answer = http("PUT", session, body=bytes(262144), headers=headers)
    assert (answer.status, answer.headers["X-Http-Status-Code-Override"]) == (200, "308")
    assert (answer.headers["Range"], answer.body) == ("bytes=0-262143", b"")

"""If this fails, a client reads other bytes, or sees other names, than the bucket holds."""

from urllib.parse import quote

import pytest
from bucket_http import BUCKET, Http, object_path
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.testing.bucket.listing import ListQuery, page

DATA = bytes(range(200))


@pytest.mark.parametrize(
    ("header", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=190-", 190, 200),
        ("bytes=190-9999", 190, 200),
        ("bytes=-5", 195, 200),
        ("bytes=-9999", 0, 200),
        ("BYTES=0-199", 0, 200),
    ],
)
def test_range_returns_partial_content(http: Http, header: str, begin: int, end: int) -> None:
    http.put("name", DATA)
    for path in (f"{object_path('name')}?alt=media", f"/download/storage/v1/b/{BUCKET}/o/name", f"/{BUCKET}/name"):
        answer = http("GET", path, headers={"Range": header})
        assert (answer.status, answer.body) == (206, DATA[begin:end])
        assert answer.headers["Content-Range"] == f"bytes {begin}-{end - 1}/200"


@pytest.mark.parametrize("header", ["bytes=200-", "bytes=200-300", "bytes=-0", "bytes=9999999999999999999-"])
def test_a_range_after_the_end_is_416(http: Http, header: str) -> None:
    http.put("name", DATA)
    answer = http("GET", f"{object_path('name')}?alt=media", headers={"Range": header})
    assert (answer.status, answer.headers["Content-Range"]) == (416, "bytes */200")
    assert answer.body == b"Request range not satisfiable"
    http.put("empty", b"")
    assert http("GET", f"{object_path('empty')}?alt=media", headers={"Range": "bytes=0-"}).status == 416
    assert http.read("empty").status == 200


@pytest.mark.parametrize(
    "header", ["bytes=", "bytes=-", "bytes=5-2", "bytes=a-b", "items=0-1", "bytes=0-1,5-6", "bytes=" + "9" * 5000 + "-"]
)
def test_invalid_range_is_ignored(http: Http, header: str) -> None:
    http.put("name", DATA)
    answer = http("GET", f"{object_path('name')}?alt=media", headers={"Range": header})
    assert (answer.status, answer.body) == (200, DATA)


def test_missing_object_error_has_the_format_of_each_api(http: Http) -> None:
    found = http("GET", object_path("no/such"))
    assert (found.status, found.reason()) == (404, "notFound")
    assert found.json()["error"]["message"] == f"No such object: {BUCKET}/no/such"
    assert http.read("no/such").body == f"No such object: {BUCKET}/no/such".encode()
    xml = http("GET", f"/{BUCKET}/no/such")
    assert xml.status == 404
    assert b"<Code>NoSuchKey</Code>" in xml.body
    for method, path in (("GET", "/storage/v1/b/no-bucket"), ("GET", "/storage/v1/b/no-bucket/o")):
        bucket = http(method, path)
        assert (bucket.status, bucket.reason()) == (404, "notFound")
        assert bucket.json()["error"]["message"] == "The specified bucket does not exist."


def test_buckets_are_made_listed_and_deleted(http: Http) -> None:
    made = http("POST", "/storage/v1/b", query={"project": "p"}, body={"name": "second.bucket", "location": "EU"})
    assert (made.status, made.json()["location"]) == (200, "EU")
    assert http("POST", "/storage/v1/b", body={"name": "second.bucket"}).reason() == "conflict"
    assert [item["name"] for item in http("GET", "/storage/v1/b").json()["items"]] == ["second.bucket", BUCKET]
    http.put("name")
    full = http("DELETE", f"/storage/v1/b/{BUCKET}")
    assert (full.status, full.reason()) == (409, "conflict")
    assert http("DELETE", "/storage/v1/b/second.bucket").status == 204
    assert http("GET", "/storage/v1/b/second.bucket").status == 404


def test_patch_merges_and_put_replaces(http: Http) -> None:
    http.put("name")
    path = object_path("name")
    http("PATCH", path, body={"metadata": {"a": "1", "b": "2"}, "cacheControl": "no-store"})
    merged = http("PATCH", path, body={"metadata": {"a": None, "c": "3"}}).json()
    assert (merged["metadata"], merged["cacheControl"]) == ({"b": "2", "c": "3"}, "no-store")
    assert http.read("name").headers["Cache-Control"] == "no-store"
    replaced = http("PUT", path, body={"metadata": {"d": "4"}}).json()
    assert replaced["metadata"] == {"d": "4"}
    assert "cacheControl" not in replaced
    assert "metadata" not in http("PATCH", path, body={"metadata": None}).json()


def test_a_head_has_the_headers_and_no_body(http: Http) -> None:
    http.put("name", DATA)
    answer = http("HEAD", f"/{BUCKET}/name")
    assert (answer.status, answer.headers["Content-Length"], answer.body) == (200, "200", b"")


NAMES = ["a", "a/", "a/b", "a/b/c", "a/ü", "ab", "b//c", "b/d", "é/x", "😀/y", "%2F/..", "../../etc/passwd", "z"]


def test_names_are_listed_in_the_order_of_their_bytes(http: Http) -> None:
    for name in NAMES:
        http.put(name, name.encode())
    ordered = sorted(NAMES, key=str.encode)
    assert http.names() == http.names(maxResults=1) == http.names(maxResults=4) == ordered
    for name in NAMES:
        assert http.read(name).body == name.encode()
        assert http("GET", f"/{BUCKET}/{quote(name)}").body == name.encode()
    assert http.names(prefix="a/") == ["a/", "a/b", "a/b/c", "a/ü"]
    assert http.names(startOffset="a/b/c", endOffset="b/d") == ["a/b/c", "a/ü", "ab", "b//c"]
    assert http.names(matchGlob="a/*") == ["a/", "a/b", "a/ü"]
    assert http.names(matchGlob="a/**") == ["a/", "a/b", "a/b/c", "a/ü"]
    assert http.names(matchGlob="{a,z}?[!x]*") == []
    assert http.names(matchGlob="{a[a-c],z}") == ["ab", "z"]


def test_delimiter_groups_names(http: Http) -> None:
    for name in NAMES:
        http.put(name)
    listing = f"/storage/v1/b/{BUCKET}/o"
    found = http("GET", listing, query={"delimiter": "/"}).json()
    assert [item["name"] for item in found["items"]] == ["a", "ab", "z"]
    assert found["prefixes"] == ["%2F/", "../", "a/", "b/", "é/", "😀/"]
    within = http("GET", listing, query={"delimiter": "/", "prefix": "a/"}).json()
    assert [item["name"] for item in within["items"]] == ["a/", "a/b", "a/ü"]
    assert within["prefixes"] == ["a/b/"]
    trailing = http("GET", listing, query={"delimiter": "/", "includeTrailingDelimiter": "true"}).json()
    assert "a/" in [item["name"] for item in trailing["items"]]


@pytest.mark.parametrize("query", ["maxResults=0", "maxResults=-1", "maxResults=x", "pageToken=!", "pageToken=AA=A"])
def test_invalid_listing_is_refused(http: Http, query: str) -> None:
    answer = http("GET", f"/storage/v1/b/{BUCKET}/o?{query}")
    assert (answer.status, answer.reason()) == (400, "invalid")


TEXT = st.text(alphabet="ab/\U0010ffff", max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    names=st.sets(TEXT.filter(bool), max_size=20),
    prefix=TEXT,
    delimiter=st.sampled_from(["", "/", "ab"]),
    start=TEXT,
    end=st.none() | TEXT.filter(bool),
    limit=st.integers(1, 5),
    trailing=st.booleans(),
)
def test_pages_match_a_full_scan(
    names: set[str], prefix: str, delimiter: str, start: str, end: str | None, limit: int, trailing: bool
) -> None:
    ordered = sorted(names)
    found = [n for n in ordered if n.startswith(prefix) and n >= start and (end is None or n < end)]
    items: list[str] = []
    prefixes: list[str] = []
    for name in found:
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        group = name[: cut + len(delimiter)]
        if cut < 0 or (trailing and name == group):
            items.append(name)
        if cut >= 0 and group not in prefixes:
            prefixes.append(group)
    query = {"prefix": prefix, "delimiter": delimiter, "startOffset": start, "maxResults": str(limit)}
    query |= {"endOffset": end} if end is not None else {}
    query |= {"includeTrailingDelimiter": "true"} if trailing else {}
    seen = page(ordered, ListQuery.parse(query))
    got_items, got_prefixes = list(seen.names), list(seen.prefixes)
    while seen.token is not None:
        assert 0 < len({*seen.names, *seen.prefixes}) <= limit
        seen = page(ordered, ListQuery.parse({**query, "pageToken": seen.token}))
        got_items += seen.names
        got_prefixes += seen.prefixes
    assert (got_items, got_prefixes) == (items, prefixes)

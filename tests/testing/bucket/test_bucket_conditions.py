"""If this fails, a commit can be lost: two writers both believe that their generation won."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from bucket_http import BUCKET, Answer, Http, object_path

from ckptkit.testing.bucket import BucketServer

UPLOAD = f"/upload/storage/v1/b/{BUCKET}/o"


def write_media(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("POST", UPLOAD, query={"uploadType": "media", "name": name, **query}, body=b"new")


def write_multipart(http: Http, name: str, query: dict[str, object]) -> Answer:
    body = (
        b'--cut\r\nContent-Type: application/json\r\n\r\n{"name": "%s"}\r\n' % name.encode()
        + b"--cut\r\nContent-Type: text/plain\r\n\r\nnew\r\n--cut--"
    )
    headers = {"Content-Type": "multipart/related; boundary=cut"}
    return http("POST", UPLOAD, query={"uploadType": "multipart", **query}, body=body, headers=headers)


def write_resumable(http: Http, name: str, query: dict[str, object]) -> Answer:
    started = http("POST", UPLOAD, query={"uploadType": "resumable", "name": name, **query})
    if started.status != 200:
        return started
    target = started.headers["Location"].split(f":{http.port}")[1]
    return http("PUT", target, body=b"new", headers={"Content-Range": "bytes 0-2/3"})


def copy(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("POST", f"{object_path('source')}/copyTo/b/{BUCKET}/o/{name}", query=query)


def rewrite(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("POST", f"{object_path('source')}/rewriteTo/b/{BUCKET}/o/{name}", query=query)


def move(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("POST", f"{object_path('source')}/moveTo/o/{name}", query=query)


def compose(http: Http, name: str, query: dict[str, object]) -> Answer:
    body = {"sourceObjects": [{"name": "source"}, {"name": "source"}], "destination": {}}
    return http("POST", f"{object_path(name)}/compose", query=query, body=body)


def patch(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("PATCH", object_path(name), query=query, body={"metadata": {"k": "v"}})


def update(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("PUT", object_path(name), query=query, body={"contentType": "text/plain"})


def delete(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("DELETE", object_path(name), query=query)


def stat(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http("GET", object_path(name), query=query)


def read(http: Http, name: str, query: dict[str, object]) -> Answer:
    return http.read(name, **query)


Verb = Callable[[Http, str, dict[str, object]], Answer]
CREATORS: list[Verb] = [write_media, write_multipart, write_resumable, copy, rewrite, move, compose]
CHANGERS: list[Verb] = [*CREATORS, patch, update, delete]
READERS: list[Verb] = [stat, read]


@pytest.mark.parametrize("verb", CHANGERS + READERS)
def test_satisfied_precondition_allows_the_request(http: Http, verb: Verb) -> None:
    http.put("source")
    for query in ("ifGenerationMatch", "ifMetagenerationMatch", "ifGenerationNotMatch", "ifMetagenerationNotMatch"):
        found = http.put("name")
        http.put("source")
        value = found["generation"] if "Generation" in query else found["metageneration"]
        answer = verb(http, "name", {query: int(value) + (7 if "Not" in query else 0)})
        assert answer.status in {200, 204}, (query, answer)


@pytest.mark.parametrize("verb", CHANGERS + READERS)
@pytest.mark.parametrize(
    "query", ["ifGenerationMatch", "ifMetagenerationMatch", "ifGenerationNotMatch", "ifMetagenerationNotMatch"]
)
def test_a_precondition_that_fails_changes_nothing(http: Http, verb: Verb, query: str) -> None:
    http.put("source")
    found = http.put("name", b"old")
    value = found["generation"] if "Generation" in query else found["metageneration"]
    answer = verb(http, "name", {query: int(value) + (0 if "Not" in query else 7)})
    if "Not" in query:
        assert (answer.status, answer.body) == (304, b"")
    elif verb is read:
        assert answer.status == 412
        assert answer.body == b"At least one of the pre-conditions you specified did not hold."
    else:
        assert (answer.status, answer.reason()) == (412, "conditionNotMet")
        assert answer.json()["error"]["errors"][0]["location"] == "If-Match"
    assert stat(http, "name", {}).json() == found
    assert stat(http, "source", {}).status == 200


@pytest.mark.parametrize("verb", CREATORS)
def test_generation_zero_means_absent(http: Http, verb: Verb) -> None:
    http.put("source")
    assert verb(http, "name", {"ifGenerationNotMatch": 0}).status == 304
    assert verb(http, "name", {"ifGenerationNotMatch": 5}).status == 304, "without a live object nothing can differ"
    assert verb(http, "name", {"ifGenerationMatch": 5}).status == 412
    assert verb(http, "name", {"ifMetagenerationMatch": 1}).status == 412
    assert verb(http, "name", {"ifGenerationMatch": 0}).status == 200
    http.put("source")
    assert verb(http, "name", {"ifGenerationMatch": 0}).status == 412
    assert verb(http, "name", {"ifGenerationNotMatch": 0}).status == 200


@pytest.mark.parametrize("verb", [patch, update, delete, stat, read])
def test_absent_object_is_404_under_any_condition(http: Http, verb: Verb) -> None:
    assert verb(http, "absent", {"ifGenerationMatch": 5}).status == 404
    assert verb(http, "absent", {}).status == 404


@pytest.mark.parametrize("verb", [copy, rewrite, move])
def test_source_of_a_copy_has_its_own_conditions(http: Http, verb: Verb) -> None:
    source = http.put("source")
    wrong, right = int(source["generation"]) + 1, source["generation"]
    assert verb(http, "name", {"ifSourceGenerationMatch": wrong}).status == 412
    assert verb(http, "name", {"ifSourceGenerationNotMatch": right}).status == 412
    assert verb(http, "name", {"ifSourceMetagenerationMatch": 9}).status == 412
    assert verb(http, "name", {"ifSourceGenerationMatch": right}).status == 200


def test_component_of_a_compose_has_its_own_condition(http: Http) -> None:
    generation = int(http.put("source")["generation"])
    for wrong, status in ((1, 412), (0, 200)):
        condition = {"name": "source", "objectPreconditions": {"ifGenerationMatch": str(generation + wrong)}}
        answer = http("POST", f"{object_path('whole')}/compose", body={"sourceObjects": [condition]})
        assert answer.status == status, answer


def test_a_bucket_has_metageneration_conditions(http: Http) -> None:
    path = f"/storage/v1/b/{BUCKET}"
    assert http("GET", path, query={"ifMetagenerationMatch": 9}).status == 412
    assert http("GET", path, query={"ifMetagenerationNotMatch": 1}).status == 304
    assert http("PATCH", path, query={"ifMetagenerationMatch": 9}, body={"labels": {"a": "b"}}).status == 412
    changed = http("PATCH", path, query={"ifMetagenerationMatch": 1}, body={"labels": {"a": "b"}})
    assert (changed.status, changed.json()["metageneration"]) == (200, "2")
    assert http("DELETE", path, query={"ifMetagenerationMatch": 1}).status == 412
    assert http("DELETE", path, query={"ifMetagenerationMatch": 2}).status == 204
    assert http("GET", path).status == 404


def test_etags_work_as_preconditions(http: Http) -> None:
    etag = http.put("name")["etag"]
    assert http("GET", object_path("name"), headers={"If-None-Match": etag}).status == 304
    assert http("GET", object_path("name"), headers={"If-Match": "other"}).status == 412
    assert http("DELETE", object_path("name"), headers={"If-Match": etag}).status == 204


def test_metadata_changes_metageneration_bytes_change_generation(http: Http) -> None:
    first = http.put("name")
    second = patch(http, "name", {}).json()
    third = http.put("name")
    assert second["generation"] == first["generation"]
    assert (first["metageneration"], second["metageneration"], third["metageneration"]) == ("1", "2", "1")
    assert int(third["generation"]) > int(first["generation"])
    assert second["metadata"] == {"k": "v"}
    assert len({first["etag"], second["etag"], third["etag"]}) == 3


def test_only_the_live_generation_is_found(http: Http) -> None:
    old, new = http.put("name", b"old"), http.put("name", b"new")
    assert http.read("name", generation=old["generation"]).status == 404
    assert http.read("name", generation=new["generation"]).body == b"new"
    assert delete(http, "name", {"generation": old["generation"]}).status == 404
    assert delete(http, "name", {"generation": new["generation"]}).status == 204


def test_generations_are_never_reused(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        with BucketServer(dir=tmp_path, buckets=[BUCKET]) as server:
            http = Http(server.url)
            for _ in range(20):
                seen.append(int(http.put("name")["generation"]))
                delete(http, "name", {})
    assert seen == sorted(set(seen))


def test_one_of_many_creators_wins(http: Http) -> None:
    for round_number in range(5):
        name = f"race-{round_number}"
        statuses: list[int] = []

        def create(name: str = name, statuses: list[int] = statuses) -> None:
            statuses.append(http.insert(name, b"mine", ifGenerationMatch=0).status)

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] + [412] * 7


def test_guarded_increments_are_not_lost(http: Http) -> None:
    http.put("counter", b"0")

    def increment() -> None:
        done = 0
        while done < 10:
            found = http.read("counter")
            generation = found.headers["x-goog-generation"]
            done += http.insert("counter", b"%d" % (int(found.body) + 1), ifGenerationMatch=generation).status == 200

    threads = [threading.Thread(target=increment) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert http.read("counter").body == b"60"

"""Kills a store after each of its file operations in turn, for every verb; prints its findings as JSON.

A process of its own: it forks for each point, which a test process full of threads must not do. The kill is
`os._exit` from an audit hook, before the operation takes place: no handler, no buffer flushed by Python.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ckptkit.testing.bucket.api import Api
from ckptkit.testing.bucket.call import Call, resolve
from ckptkit.testing.bucket.conditions import Preconditions
from ckptkit.testing.bucket.content import Checksums
from ckptkit.testing.bucket.listing import ListQuery
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.sessions import Plan, Sessions

ANY = Preconditions()
BUCKET = "bucket"
OPERATIONS = frozenset(
    {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
)
KILLED = 86
State = dict[str, tuple[bytes, str]]


def put(store: ObjectStore, name: str, data: bytes) -> None:
    spool = store.directory(BUCKET).new_spool()
    spool.append([data])
    store.commit(BUCKET, name, spool, spool.seal(), {"contentType": "text/plain"}, ANY)
    spool.discard()


def compose(store: ObjectStore) -> None:
    path = f"/storage/v1/b/{BUCKET}/o/new/compose"
    body = json.dumps({"sourceObjects": [{"name": "one"}, {"name": "two"}]}).encode()
    call = Call(method="POST", path=path, query={}, headers={}, base_url="", body=body)
    Api(store).handle(call, resolve("POST", path, {}))


def resumable(store: ObjectStore) -> None:
    sessions = Sessions(store)
    plan = Plan(
        bucket=BUCKET,
        name="new",
        fields={"contentType": "text/plain"},
        checksums=Checksums(),
        conditions=ANY,
        total_bytes=None,
    )
    session = sessions.open(plan)
    assert session.spool is not None
    session.spool.append([b"resumed"])
    sessions.finish(session, session.spool, Checksums())


VERBS: dict[str, Callable[[ObjectStore], object]] = {
    "create": lambda store: put(store, "new", b"created"),
    "overwrite": lambda store: put(store, "one", b"overwritten"),
    "delete": lambda store: store.delete(BUCKET, "one", ANY),
    "patch": lambda store: store.patch(BUCKET, "one", lambda _: {"contentType": "text/html"}, ANY),
    "copy": lambda store: store.copy((BUCKET, "one"), (BUCKET, "new"), ANY, ANY),
    "copy over": lambda store: store.copy((BUCKET, "one"), (BUCKET, "two"), ANY, ANY),
    "move": lambda store: store.move(BUCKET, "one", "new", ANY, ANY),
    "compose": compose,
    "resumable": resumable,
    "create bucket": lambda store: store.create_bucket("other", {}),
    "delete bucket": lambda store: store.delete_bucket("empty", ANY),
}


def prepare(root: Path) -> None:
    store = ObjectStore(root)
    store.create_bucket(BUCKET, {})
    store.create_bucket("empty", {})
    put(store, "one", b"first")
    put(store, "two", b"second")
    store.close()


def observe(root: Path) -> State:
    """The objects that a server serves after the kill; asserts that nothing else is left on disk."""
    store = ObjectStore(root)
    Sessions(store).close()
    state: State = {record.name: (b"", "bucket") for record in store.buckets()}
    records, _ = store.list(BUCKET, ListQuery())
    for record in records:
        with store.open(BUCKET, record.name, ANY)[1] as file:
            data = file.read()
        assert len(data) == record.content.size_bytes
        state[record.name] = (data, record.fields.get("contentType", ""))
    store.close()
    data_files = [path for path in root.rglob("data/*") if path.is_file()]
    assert len(data_files) == len(records), f"{len(data_files)} files for {len(records)} objects"
    assert not list(root.rglob("*.tmp"))
    sessions = {path.stem for path in root.rglob("spool/*.json")}
    assert {path.stem for path in root.rglob("spool/*.part")} <= sessions
    return state


def run_until(verb: str, root: Path, point: int) -> bool:
    """Do `verb` in a child that dies before its operation number `point`; False when it got to the end."""
    child = os.fork()
    if child == 0:
        left = point

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in OPERATIONS and str(root) in str(arguments[0]):
                left -= 1
                if left < 0:
                    os._exit(KILLED)

        store = ObjectStore(root)
        sys.addaudithook(hook)
        VERBS[verb](store)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, KILLED}, f"{verb} failed by itself at point {point}: {status}"
    return status == KILLED


def points(verb: str, scratch: Path) -> int:
    """The number of points at which `verb` was killed; raises when one left neither the old nor the new state."""
    whole = scratch / "whole"
    prepare(whole)
    before = observe(whole)
    assert not run_until(verb, whole, 10_000)
    after = observe(whole)
    assert after != before
    allowed = [before, after] + ([{**before, **after}] if verb == "move" else [])  # a move may leave both names
    point = 0
    while True:
        root = scratch / str(point)
        prepare(root)
        killed = run_until(verb, root, point)
        found = observe(root)
        assert found in allowed, f"{verb} killed at {point}: {found}"
        shutil.rmtree(root)
        if not killed:
            return point
        point += 1


def main() -> None:
    found: dict[str, int] = {}
    for verb in VERBS:
        with tempfile.TemporaryDirectory() as scratch:
            found[verb] = points(verb, Path(scratch))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Serves a mounted bucket: `python -m tests.mount PATH TYPE CACHED_S`, with commands as lines of JSON on stdin."""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from tests.mount.objects import ObjectTree
from tests.mount.protocol import REQUEST_BYTES_MAX, UNANSWERED, Request

_NO_SUID, _NO_DEV = 2, 4  # MS_NOSUID, MS_NODEV


def _serve(path: str, type_name: str, cached_s: int) -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None, use_errno=True).mount(
        b"bucket", os.fsencode(path), type_name.encode(), _NO_SUID | _NO_DEV, options
    ):
        _say(os.strerror(ctypes.get_errno()))
        return
    _say(None)
    tree, buffer = ObjectTree(cached_s), bytearray(REQUEST_BYTES_MAX)  # one: a new one for each request costs more
    while True:
        readable, _, _ = select.select([fuse, sys.stdin.fileno()], [], [])
        if fuse in readable:
            try:
                request = Request.of(bytes(memoryview(buffer)[: os.readv(fuse, [buffer])]))
            except OSError:  # unmounted
                return
            if request.opcode not in UNANSWERED:
                os.write(fuse, tree.answer(request))
        elif not _obey(tree):
            return


def _obey(tree: ObjectTree) -> bool:
    line = sys.stdin.buffer.raw.readline()  # pyright: ignore[reportAttributeAccessIssue]  nothing stays in a buffer
    if not line:
        return False
    ((act, value),) = json.loads(line).items()
    answer = None
    if act == "set":
        tree.changes, tree.changes_max, tree.listing_lag = 0, value["changes_max"], value["listing_lag"]
    elif act == "revive":
        tree.revive()
    elif act == "put":
        tree.put(value["name"], Path(value["source"]))
    elif act == "delete":
        tree.delete(value)
    elif act == "listing":
        answer = tree.listing(value)
    else:
        answer = tree.changes
    _say(answer)
    return True


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))

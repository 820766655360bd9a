"""The bucket as a command: `python -m ckptkit.testing.bucket --port 0 --dir D --bucket NAME`."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

from ckptkit.testing.bucket.faults import FaultPlan
from ckptkit.testing.bucket.injector import Injector
from ckptkit.testing.bucket.log import RequestLog
from ckptkit.testing.bucket.server import serving


def main() -> int:
    """Print the address on the first line, serve until SIGTERM or SIGINT; 1 if the server itself failed."""
    arguments = _parser().parse_args()
    plan = FaultPlan() if arguments.faults is None else _read_plan(arguments.faults)
    defects = asyncio.run(_serve(arguments, plan))
    for defect in defects:
        sys.stderr.write(f"the bucket failed on a request: {defect!r}\n")
    return 1 if defects else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckptkit.testing.bucket", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--dir", type=Path, required=True, help="where objects are kept over restarts")
    parser.add_argument("--bucket", action="append", default=[], help="made if it is not there; may be repeated")
    parser.add_argument("--faults", type=Path, help="a fault plan in JSON; see ckptkit/testing/bucket/faults.py")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when stdin ends: with a pipe, when the parent dies"
    )
    return parser


def _stop_with_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: it had stopped already
        loop.call_soon_threadsafe(stop.set)


def _read_plan(path: Path) -> FaultPlan:
    try:
        return FaultPlan.from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: no fault plan: {error}") from error


async def _serve(arguments: argparse.Namespace, plan: FaultPlan) -> list[Exception]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, args=(loop, stop), name="ckptkit-bucket-stdin", daemon=True).start()
    async with serving(arguments.dir, arguments.bucket, Injector(plan), RequestLog(), arguments.port) as handler:
        sys.stdout.write(f"{handler.url}\n")
        sys.stdout.flush()
        await stop.wait()
    return handler.defects


if __name__ == "__main__":
    sys.exit(main())

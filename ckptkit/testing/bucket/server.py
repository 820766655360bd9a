"""Runs the bucket: in a thread of this process, or in the foreground for the command."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from aiohttp import web

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.faults import FaultPlan
from ckptkit.testing.bucket.injector import Injector
from ckptkit.testing.bucket.log import RequestLog
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.web import Web
from ckptkit.util.words import count_text

_READ_BYTES: Final = 1 << 20  # how far a connection reads ahead of the disk
_PARSER_LIMIT_BYTES: Final = 256 * 1024  # beyond it aiohttp answers 400 itself; `web` answers 413 and 414 before
_STOP_S: Final = 1.0


@final
class BucketServer:
    """A Google Cloud Storage of one's own, on a free port of this host, over the directory `dir`.

    Between `start` and `close` it serves from one thread, `ckptkit-bucket`. `close` (or leaving the `with`) waits for
    that thread and raises `BucketDefect` if the server itself failed on any request. Committed objects stay in `dir`;
    the next server that opens it serves them.

        with BucketServer(dir=tmp_path, buckets=["run"], faults=FaultPlan(seed=1)) as server:
            subprocess.run(command, env={**os.environ, **server.env()})
            assert server.log.totals(Kind.WRITE).count == 5
    """

    def __init__(
        self, *, dir: Path | str, buckets: Sequence[str] = (), faults: FaultPlan | None = None, port: int = 0
    ) -> None:
        self._dir = Path(dir)
        self._buckets = tuple(buckets)
        self._port = port
        self._injector = Injector(faults or FaultPlan())
        self._thread: threading.Thread | None = None
        self.log = RequestLog()

    def start(self) -> Self:
        """Return once requests are answered; raises what keeps the server from it."""
        ready: Future[Web] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="ckptkit-bucket", daemon=True)
        self._thread.start()
        try:
            self._web = ready.result()
        except BaseException:
            self._join()
            raise
        return self

    def close(self) -> None:
        """Stop serving, drop connections in flight, and raise the first failure of the server itself."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._join()
        if self._web.defects:
            raise BucketDefect(
                f"the bucket failed on {count_text(len(self._web.defects), 'request')}"
            ) from self._web.defects[0]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens: `http://127.0.0.1:PORT`."""
        return self._web.url

    def env(self) -> dict[str, str]:
        """The environment in which TensorStore, gcsfs and google-cloud-storage find this bucket."""
        return client_env(self.url)

    @property
    def faults(self) -> FaultPlan:
        """The plan in force; assign another to replace it from the next request on."""
        return self._injector.plan

    @faults.setter
    def faults(self, plan: FaultPlan) -> None:
        self._injector.set_plan(plan)

    def fired(self) -> list[int]:
        """How many requests each fault of the plan in force has hit."""
        return self._injector.fired()

    def _run(self, ready: "Future[Web]") -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main(ready))

    async def _main(self, ready: "Future[Web]") -> None:
        try:
            async with serving(self._dir, self._buckets, self._injector, self.log, self._port) as handler:
                ready.set_result(handler)
                await self._stop.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class BucketDefect(RuntimeError):
    """The fake bucket itself failed: the result of a test with it does not count."""


def client_env(url: str) -> dict[str, str]:
    """The environment that leads the three clients to the bucket at `url`."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        # Else gcsfs asks the real Google over gRPC for the type of the bucket: 33 to 60 s, measured.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@asynccontextmanager
async def serving(
    dir: Path, buckets: Sequence[str], injector: Injector, log: RequestLog, port: int
) -> AsyncIterator[Web]:
    """Serve while the context is open, in the running event loop."""
    store = ObjectStore(dir)
    try:
        handler = Web(store, injector, log)
        _make_buckets(store, buckets)
        logger = logging.Logger("ckptkit.testing.bucket")  # of no tree: aiohttp logs each malformed request
        logger.addHandler(logging.NullHandler())
        server = web.Server(
            handler.handle,
            access_log=None,
            logger=logger,
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
            max_line_size=_PARSER_LIMIT_BYTES,
            max_field_size=_PARSER_LIMIT_BYTES,
            max_headers=1024,
        )
        runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=_STOP_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
            await site.start()
            handler.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield handler
        finally:
            handler.stopped.set()
            await runner.cleanup()
            handler.sessions.close()
    finally:
        store.close()


def _make_buckets(store: ObjectStore, names: Sequence[str]) -> None:
    existing = {record.name for record in store.buckets()}
    for name in dict.fromkeys(names):
        if name in existing:
            continue
        try:
            store.create_bucket(name, {})
        except errors.GoogleError as error:
            raise ValueError(error.message) from error

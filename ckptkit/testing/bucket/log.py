"""The server's log: one entry for each request, and totals by kind."""

import threading
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, final

from ckptkit.testing.bucket.call import CallKind, Route
from ckptkit.testing.bucket.faults import Effect, effect_name

ENTRY_LIMIT: Final = 100_000  # the oldest entries are dropped; totals are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The transport's side of a request: bytes of the bodies, and seconds on a monotonic clock."""

    received_bytes: int
    sent_bytes: int
    started_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request; `status` is 0 when the connection ended without an answer."""

    kind: CallKind
    method: str
    bucket: str
    name: str
    status: int
    fault: str | None
    exchange: Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the requests of one kind; `failed` counts no answer, 4xx and 5xx."""

    count: int = 0
    failed: int = 0
    faulted: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    elapsed_s: float = 0.0

    def plus(self, entry: Entry) -> "Totals":
        """These totals with one more request."""
        return replace(
            self,
            count=self.count + 1,
            failed=self.failed + (entry.status == 0 or entry.status >= 400),
            faulted=self.faulted + (entry.fault is not None),
            received_bytes=self.received_bytes + entry.exchange.received_bytes,
            sent_bytes=self.sent_bytes + entry.exchange.sent_bytes,
            elapsed_s=self.elapsed_s + entry.exchange.elapsed_s,
        )


@final
class RequestLog:
    """Thread-safe; an entry appears when the answer has been handed to the system, whole or not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries: deque[Entry] = deque(maxlen=ENTRY_LIMIT)
            self._totals: dict[CallKind, Totals] = {}

    def add(self, route: Route, name: str, status: int, effect: Effect | None, exchange: Exchange) -> None:
        """Count one request."""
        entry = Entry(
            kind=route.kind,
            method=route.method,
            bucket=route.bucket,
            name=name,
            status=status,
            fault=None if effect is None else effect_name(effect),
            exchange=exchange,
        )
        with self._lock:
            self._entries.append(entry)
            self._totals[entry.kind] = self._totals.get(entry.kind, Totals()).plus(entry)

    def entries(self, kind: CallKind | None = None) -> list[Entry]:
        """The requests in the order in which they ended."""
        with self._lock:
            return [entry for entry in self._entries if kind in {None, entry.kind}]

    def totals(self, kind: CallKind) -> Totals:
        """The sums for one kind."""
        with self._lock:
            return self._totals.get(kind, Totals())

    def as_json(self) -> dict[str, Any]:
        """The answer to `GET /_ckptkit/log`."""
        with self._lock:
            return {
                "totals": {kind.value: asdict(totals) for kind, totals in self._totals.items()},
                "entries": [asdict(entry) for entry in self._entries],
            }

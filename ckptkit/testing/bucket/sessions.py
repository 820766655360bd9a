"""Resumable sessions: how far each upload got, over broken connections and a killed server."""

import asyncio
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Final, final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.conditions import Preconditions
from ckptkit.testing.bucket.content import Checksums, Spool
from ckptkit.testing.bucket.objects import ObjectStore
from ckptkit.testing.bucket.records import JsonObject, ObjectRecord

SESSION_LIMIT: Final = 10_000  # the oldest finished ones are forgotten first
_ENDED_KEPT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The upload that a session was opened for."""

    bucket: str
    name: str
    fields: JsonObject
    checksums: Checksums
    conditions: Preconditions
    total_bytes: int | None

    @classmethod
    def from_json(cls, value: JsonObject) -> "Plan":
        """Read the `asdict` of a plan."""
        checksums, conditions = Checksums(**value["checksums"]), Preconditions(**value["conditions"])
        return cls(**{**value, "checksums": checksums, "conditions": conditions})


@dataclass(slots=True, kw_only=True)
class Session:
    """An upload in progress, or the object that it became."""

    id: str
    plan: Plan
    spool: Spool | None
    result: ObjectRecord | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@final
class Sessions:
    """All sessions of a server; used from its event loop only."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._sessions: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)
        for bucket in store.buckets():
            self._recover(bucket.name)

    def open(self, plan: Plan) -> Session:
        """Begin a session; it is on disk before its name is returned."""
        directory = self._store.directory(plan.bucket)
        self._make_room()
        spool = directory.new_spool()
        session = Session(id=spool.id, plan=plan, spool=spool)
        directory.write_session(session.id, {"plan": asdict(plan), "result": None})
        self._sessions[session.id] = session
        return session

    def find(self, session: str, bucket: str) -> Session:
        """The session; 410 for one that ended, 404 where there was none in this bucket."""
        found = self._sessions.get(session)
        if found is not None and found.plan.bucket == bucket:
            return found
        if session in self._ended:
            raise errors.GoogleError(410, "gone", "The requested upload session is no longer available.")
        raise errors.GoogleError(404, "notFound", "Upload session not found.")

    def finish(self, session: Session, spool: Spool, checksums: Checksums) -> ObjectRecord:
        """Commit what arrived; a refusal (400, 412) ends the session."""
        plan = session.plan
        content = spool.seal()
        try:
            plan.checksums.check(content)
            checksums.check(content)
            record = self._store.commit(plan.bucket, plan.name, spool, content, plan.fields, plan.conditions)
        except errors.GoogleError:
            self.drop(session)
            raise
        session.result, session.spool = record, None
        self._write_result(session, record)
        spool.discard()
        return record

    def drop(self, session: Session) -> None:
        """End a session that committed nothing."""
        self._sessions.pop(session.id, None)
        self._ended.append(session.id)
        if session.spool is not None:
            session.spool.discard()
        self._store.directory(session.plan.bucket).forget_session(session.id)

    def close(self) -> None:
        """Close the spools and leave them for the next start."""
        for session in self._sessions.values():
            if session.spool is not None:
                session.spool.close()

    def _recover(self, bucket: str) -> None:
        directory = self._store.directory(bucket)
        for session_id, state in directory.sessions().items():
            plan = Plan.from_json(state["plan"])
            result = ObjectRecord.from_json(state["result"]) if state["result"] else None
            # Killed between the commit and the note of it: the object carries the session's id.
            result = result or self._store.committed_as(bucket, session_id)
            spool = directory.open_session(session_id)
            session = Session(id=session_id, plan=plan, spool=spool, result=result)
            self._sessions[session_id] = session
            if result is None:
                spool.drop_partial_block()
            else:
                self._write_result(session, result)
                session.spool = None
                spool.discard()

    def _write_result(self, session: Session, record: ObjectRecord) -> None:
        directory = self._store.directory(session.plan.bucket)
        directory.write_session(session.id, {"plan": asdict(session.plan), "result": asdict(record)})

    def _make_room(self) -> None:
        if len(self._sessions) < SESSION_LIMIT:
            return
        oldest = next((each for each in self._sessions.values() if each.result), None)
        if oldest is None:
            raise errors.by_status(429)
        self.drop(oldest)

"""What is done of a work that may be interrupted: numbered objects beside it, each put whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, final

from ckptkit.errors import CheckpointError
from ckptkit.store import Store

_PLAN = "plan.json"


@final
class Journal:
    """One process's notes. A work is known by a fingerprint of its plan and of what it reads."""

    def __init__(self, store: Store, process: int = 0):
        self._store = store
        self._process = process
        self._next = 0

    def holds(self, fingerprint: str) -> bool:
        """Whether what was begun here is this work; raises `CheckpointError` where it is another."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if json.loads(self._store.get(_PLAN))["plan"] != fingerprint:
                raise CheckpointError(
                    f"{self._store.url} is other work than this (another source or target, other options or rules, or "
                    "another --memory); leave --resume out to begin anew",
                    path=self._store.url,
                )
            return True
        return False

    def begin(self, fingerprint: str) -> None:
        """Says that a new work begins; one process does."""
        self._store.put(_PLAN, json.dumps({"plan": fingerprint}).encode())

    def entries(self) -> Iterable[Any]:
        """What this process noted, in order; ends at what is damaged, which is then done again."""
        while True:
            try:
                entry = json.loads(self._store.get(self._key()))
            except (FileNotFoundError, ValueError):
                return
            self._next += 1
            yield entry

    def add(self, entry: Any) -> None:
        """Notes what is written and safe."""
        self._store.put(self._key(), json.dumps(entry).encode())
        self._next += 1

    def _key(self) -> str:
        return f"done-{self._process}-{self._next}.json"

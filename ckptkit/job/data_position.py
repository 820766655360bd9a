"""A position in a global order of data: the same for every process, so that any number of them continues from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = "ckptkit.batches/1"
_OF_GRAIN = {"global_next_index"}  # the whole state of `grain.experimental.ElasticIterator`


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """The next step, and the first record that it takes. `records` is the length of the data, None where unknown.

    `streams`: the states of the streams that one process read, by their numbers, out of `stream_count`; data that is
    read by index has none.
    """

    step: int
    record: int
    global_batch: int
    records: int | None = None
    stream_count: int = 0
    streams: Mapping[int, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values that are JSON."""
        return {
            "format": FORMAT,
            "step": self.step,
            "record": self.record,
            "global_batch": self.global_batch,
            "records": self.records,
            "stream_count": self.stream_count,
            "streams": {str(number): state for number, state in self.streams.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> DataPosition:
        """The position from the result of `to_json`. Raises ValueError for anything else."""
        if saved.get("format") != FORMAT:
            raise ValueError(
                f"not a position of ElasticBatches: format is {saved.get('format')!r}, expected {FORMAT!r}"
            )
        plain = {name: value for name, value in saved.items() if name not in ("format", "streams")}
        return cls(**plain, streams={int(number): state for number, state in saved["streams"].items()})


def joined(states: Sequence[str], needed: Collection[int] = ()) -> str | None:
    """One state for any process, from the states that processes saved of their iterators.

    Returns None if each state belongs to its process alone. `needed` are the streams that the asking process reads.

    Raises ValueError if the states are of different positions, or none has the state of a needed stream.
    """
    values = [_plain(state) for state in states]
    if all(set(value) == _OF_GRAIN for value in values):
        _require_equal(values)
        return states[0]
    if any(value.get("format") != FORMAT for value in values):
        return None
    found = [DataPosition.from_json(value) for value in values]
    _require_equal([{**value, "streams": None} for value in values])
    streams = {number: state for each in found for number, state in each.streams.items()}
    if missing := sorted(set(needed) - set(streams)) if found[0].step else []:
        raise ValueError(f"no reachable process holds the position of stream {', '.join(map(str, missing[:8]))}")
    return json.dumps({**values[0], "streams": {str(number): streams[number] for number in sorted(streams)}}, indent=4)


def _plain(state: str) -> Mapping[str, Any]:
    try:
        value = json.loads(state)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _require_equal(values: Sequence[Mapping[str, Any]]) -> None:
    other = next((value for value in values if value != values[0]), None)
    if other is not None:
        raise ValueError(f"processes saved different positions in the data: {dict(values[0])} and {dict(other)}")

"""The beats of a host's workers as a message. Times are ages: each machine has a monotonic clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.util.clock import monotonic_s
from ckptkit.util.heartbeat import Beats, Saves


def beats_message(beats: Mapping[int, Beats | None]) -> dict[str, Any]:
    """The fields of the message: one row for each process, its beats or null."""
    now_s = monotonic_s()
    rows = [[process, None if each is None else _row(each, now_s)] for process, each in beats.items()]
    return {"is": "beats", "beats": rows}


def beats_of(message: Mapping[str, Any], processes: range) -> dict[int, Beats | None]:
    """The beats in a message that was just received, of `processes` alone."""
    now_s = monotonic_s()
    rows = [(int(process), row) for process, row in message["beats"]]
    return {process: None if row is None else _beats(row, now_s) for process, row in rows if process in processes}


def _row(beats: Beats, now_s: float) -> list[float]:
    saves = beats.saves
    ages = [now_s - beats.at_s, now_s - beats.first_s]
    return [
        beats.count,
        beats.step,
        beats.first_step,
        *ages,
        beats.longest_s,
        saves.count,
        saves.own_s,
        saves.computing_s,
    ]


def _beats(row: list[float], now_s: float) -> Beats:
    count, step, first_step, age_s, first_age_s, longest_s, saves, own_s, computing_s = row
    return Beats(
        count=int(count),
        step=int(step),
        at_s=now_s - float(age_s),
        longest_s=float(longest_s),
        first_step=int(first_step),
        first_s=now_s - float(first_age_s),
        saves=Saves(count=int(saves), own_s=float(own_s), computing_s=float(computing_s)),
    )

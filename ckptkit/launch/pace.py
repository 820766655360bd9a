"""Names a process of a running job that is persistently slower than the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import final

from ckptkit.util.clock import monotonic_s, time_text
from ckptkit.util.heartbeat import Beats, Saves
from ckptkit.util.stragglers import late, slow

_SAMPLE_S = 1.0  # a host sends the beats of its workers so often
_SAMPLES_MAX = 32


@final
class Pace:
    """Follows the saves of one attempt. A sample of a process is the mean of its saves in a second or more."""

    def __init__(self) -> None:
        self._seen: dict[int, Saves] = {}
        self._own: dict[int, deque[float]] = {}
        self._waits: dict[int, deque[float]] = {}
        self._named: set[tuple[str, int]] = set()
        self._next_s = 0.0

    def look(self, beats: Mapping[int, Beats | None]) -> list[str]:
        """Takes the newest beats; returns a line for each process that is slow and was not named yet."""
        if monotonic_s() < self._next_s:
            return []
        self._next_s = monotonic_s() + _SAMPLE_S
        for process, each in beats.items():
            if each is not None:
                self._take(process, each.saves)
        found = {}
        for each in slow(self._own):
            text = (
                f"process {each.process} is slow: it takes {time_text(each.own_s)} for its part of a save, the others "
            )
            found["save", each.process] = text + f"{time_text(each.others_s)}; look at its host"
        if (last := late(self._waits)) is not None:
            text = f"process {last.process} is slow: it starts its steps last; at saves the others wait "
            text += f"{time_text(last.others_s)} or more for the devices, and it waits {time_text(last.own_s)}"
            found["step", last.process] = text + "; look at its host"
        new = {key: text for key, text in found.items() if key not in self._named}
        self._named.update(new)
        return list(new.values())

    def _take(self, process: int, saves: Saves) -> None:
        before = self._seen.get(process, Saves())
        if (count := saves.count - before.count) > 0:
            self._seen[process] = saves
            for kept, total_s in (
                (self._own, saves.own_s - before.own_s),
                (self._waits, saves.computing_s - before.computing_s),
            ):
                kept.setdefault(process, deque(maxlen=_SAMPLES_MAX)).append(total_s / count)

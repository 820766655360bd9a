"""Names of what is measured; nothing here imports JAX, because the number of devices must be set before that."""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("125m", "many", "one")
DEVICES = (1, 8)


@dataclass(frozen=True, slots=True)
class CaseName:
    """A state on a number of devices, written `125m@8`."""

    state: str
    devices: int

    @classmethod
    def parse(cls, text: str) -> CaseName:
        """Reads `125m@8`; `125m` alone is on one device. Raises ValueError naming what there is."""
        state, _, devices = text.partition("@")
        if state not in STATES or (devices or "1") not in map(str, DEVICES):
            raise ValueError(f"unknown state {text!r}; choose among {', '.join(map(str, ALL_CASES))}")
        return cls(state, int(devices or 1))

    def __str__(self) -> str:
        return f"{self.state}@{self.devices}"


ALL_CASES = tuple(CaseName(state, devices) for state in STATES for devices in DEVICES)
DEFAULT_CASE = CaseName("125m", 1)

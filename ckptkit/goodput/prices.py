"""The cost of a run in money: seconds times hosts times a price. No currency is converted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptkit.goodput.parts import Part
from ckptkit.goodput.report import GoodputReport

_HOUR_S = 3600.0
_PRICE = re.compile(r"([^\d\s.]{0,3})\s*(\d+(?:\.\d+)?|\.\d+)\s*(/h|/GB-month)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of one unit, such as an hour of a host, with the sign of its currency (may be empty)."""

    amount: float
    sign: str = ""

    @classmethod
    def parse(cls, text: str, unit: str) -> Price:
        """`2.5`, `2.5/h` or `$2.5/h`, for the unit `/h`. Raises ValueError for anything else."""
        found = _PRICE.fullmatch(text.strip())
        if found is None or found[3] not in (None, unit):
            raise ValueError(f"{text!r} is not a price; write 2.5{unit} or $2.5{unit}")
        return cls(amount=float(found[2]), sign=found[1])

    def __str__(self) -> str:
        return f"{self.sign}{self.amount:,.2f}" if self.amount >= 0.1 else f"{self.sign}{self.amount:.2g}"

    def text(self, cost: float) -> str:
        """A cost in the price's currency, with two decimals."""
        return f"{self.sign}{cost:,.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrice:
    """The price of a whole job: `hosts` hosts, each at `host_h` an hour."""

    host_h: Price
    hosts: int

    def cost(self, seconds: float) -> float:
        """The cost of so many seconds of the job."""
        return self.host_h.amount * self.hosts * seconds / _HOUR_S

    def text(self, seconds: float) -> str:
        """The cost of so many seconds of the job, as it is shown."""
        return self.host_h.text(self.cost(seconds))

    @property
    def rate_text(self) -> str:
        """The price of the job for an hour, with its arithmetic."""
        return f"{self.hosts:,} x {self.host_h} = {self.text(_HOUR_S)} an hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The cost of a run: in all, by kind of time, and of each loss until new steps were done again.

    `losses[i]` belongs to `GoodputReport.disruptions[i]`; None where no new step was done after it.
    """

    price: JobPrice
    total: float
    parts: Mapping[Part, float]
    losses: tuple[float | None, ...]

    @property
    def badput(self) -> float:
        """The cost of all time that was not productive."""
        return self.total - self.parts[Part.PRODUCTIVE]

    def to_json(self) -> dict[str, Any]:
        """The bill as plain values."""
        plain = asdict(self)
        return {**plain, "parts": {str(part): cost for part, cost in self.parts.items()}, "badput": self.badput}


def bill_of(report: GoodputReport, price: JobPrice) -> Bill:
    """The costs of a run. `parts` add up to `total`; the losses' costs are among them, in several kinds of time."""
    caught_up = [loss.caught_up_s for loss in report.disruptions]
    return Bill(
        price=price,
        total=price.cost(report.wall_s),
        parts={part: price.cost(seconds) for part, seconds in report.parts_s.items()},
        losses=tuple(None if seconds is None else price.cost(seconds) for seconds in caught_up),
    )

"""The script of misbehaviour: which requests, how often, and what happens to them.

A plan is data: frozen, comparable, and the same in JSON (`--faults FILE.json`, `POST /_ckptkit/faults`):

    {"seed": 7, "download_bytes_per_s": 50e6, "faults": [
      {"effect": {"type": "status", "code": 503}, "kinds": ["write"], "objects": "run/*", "count": 3},
      {"effect": {"type": "delay", "latency": {"type": "lognormal", "median_s": 0.02, "sigma": 0.5}}},
      {"effect": {"type": "reset", "stage": "download", "after_bytes": 1000}, "probability": 0.1}]}
"""

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, TypeVar

from ckptkit.testing.bucket.call import CallKind

STATUSES: Final = frozenset({401, 403, 404, 408, 429, 500, 502, 503, 504})
LATENCY_LIMIT_S: Final = 60.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Always the same latency."""

    seconds: float

    def draw(self, _source: random.Random) -> float:
        """One latency in seconds."""
        return self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Any latency between two bounds."""

    low_s: float
    high_s: float

    def draw(self, source: random.Random) -> float:
        """One latency in seconds."""
        return source.uniform(self.low_s, self.high_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """A median with a long tail, as object stores have; cut at `LATENCY_LIMIT_S`."""

    median_s: float
    sigma: float

    def draw(self, source: random.Random) -> float:
        """One latency in seconds."""
        return min(LATENCY_LIMIT_S, source.lognormvariate(math.log(self.median_s), self.sigma))


Latency = Fixed | Uniform | Lognormal


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Answer with an error; `after` does the work first, so that the client does not know that it was done.

    `nested`: the message in the answer's JSON is an object, as front ends before the service send it.
    """

    code: int
    stage: Literal["before", "after"] = "before"
    nested: bool = False

    def __post_init__(self) -> None:
        _check_word("stage", self.stage, "before", "after")
        if self.code not in STATUSES:
            raise ValueError(f"status {self.code} cannot be injected; expected one of {sorted(STATUSES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionWithdrawn:
    """403 `forbidden`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFull:
    """403 `quotaExceeded`; give it the kinds that write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Reset the connection (RST).

    `before`: nothing was read or done. `upload`: after `after_bytes` of the request's body. `after`: the work was
    done, the answer is lost. `download`: after `after_bytes` of the answer's body.
    """

    stage: Literal["before", "upload", "after", "download"] = "before"
    after_bytes: int = 0

    def __post_init__(self) -> None:
        _check_word("stage", self.stage, "before", "upload", "after", "download")
        if self.after_bytes < 0:
            raise ValueError(f"after_bytes is {self.after_bytes}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """Close the connection in good order after `after_bytes` of a body that was announced longer."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Wait before anything is done: a slow first byte. Later faults apply too."""

    latency: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowBody:
    """Send the answer's body at this pace."""

    bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Never answer; ends when the client goes away or the server stops."""

    stage: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        _check_word("stage", self.stage, "before", "after")


Effect = Status | PermissionWithdrawn | QuotaFull | Reset | Truncate | Delay | SlowBody | Hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of the script: `effect` on requests of `kinds` (none: all) for `objects` (a glob, `*` has slashes).
    A listing is hit by its prefix.

    Of the matching requests the first `skip` pass; each later one is hit with `probability`, until `count` are.
    """

    effect: Effect
    kinds: tuple[CallKind, ...] = ()
    objects: str = "*"
    skip: int = 0
    count: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"probability is {self.probability}, expected 0 to 1")
        if self.skip < 0 or (self.count is not None and self.count < 0):
            raise ValueError(f"skip is {self.skip} and count is {self.count}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The whole script. The first fault that hits ends the search, except that delays add up.

    The draws depend on the seed, the line, the kind, the object and how often that object was asked for in that way,
    not on how requests interleave. Each bandwidth is one token bucket that all connections share.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    download_bytes_per_s: float | None = None
    upload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.download_bytes_per_s, self.upload_bytes_per_s):
            if rate is not None and not rate > 0:
                raise ValueError(f"a bandwidth is {rate}, expected more than 0 bytes per second, or none")

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read a plan; `ValueError` names what is wrong with it."""
        document = _mapping(value, "a fault plan")
        faults = document.pop("faults", [])
        if not isinstance(faults, list):
            raise ValueError("faults is not a list")
        return _build(cls, {**document, "faults": tuple(_fault(each) for each in faults)})

    def as_json(self) -> dict[str, Any]:
        """The plan as `from_json` reads it."""
        faults = [
            {**asdict(each), "kinds": [kind.value for kind in each.kinds], "effect": _tagged(each.effect)}
            for each in self.faults
        ]
        return {**asdict(self), "faults": faults}


_EFFECTS: Final[Mapping[str, type]] = {
    "status": Status,
    "permission_withdrawn": PermissionWithdrawn,
    "quota_full": QuotaFull,
    "reset": Reset,
    "truncate": Truncate,
    "delay": Delay,
    "slow_body": SlowBody,
    "hang": Hang,
}
_LATENCIES: Final[Mapping[str, type]] = {"fixed": Fixed, "uniform": Uniform, "lognormal": Lognormal}


def effect_name(effect: Effect) -> str:
    """The name of an effect in JSON and in the request log."""
    return next(name for name, kind in _EFFECTS.items() if kind is type(effect))


def _fault(value: object) -> Fault:
    document = _mapping(value, "a fault")
    effect = _tagged_value(document.pop("effect", None), _EFFECTS, "effect")
    kinds = tuple(CallKind(kind) for kind in document.pop("kinds", ()))
    return _build(Fault, {**document, "effect": effect, "kinds": kinds})


def _tagged_value(value: object, types: Mapping[str, type], what: str) -> Any:
    document = _mapping(value, what)
    name = document.pop("type", None)
    if name not in types:
        raise ValueError(f"{what} has type {name!r}, expected one of {sorted(types)}")
    if "latency" in document:
        document["latency"] = _tagged_value(document["latency"], _LATENCIES, "latency")
    return _build(types[name], document)


def _tagged(effect: Effect) -> dict[str, Any]:
    document = {"type": effect_name(effect), **asdict(effect)}
    if isinstance(effect, Delay):
        name = next(name for name, kind in _LATENCIES.items() if kind is type(effect.latency))
        document["latency"] = {"type": name, **asdict(effect.latency)}
    return document


def _build(kind: type[_T], document: dict[str, Any]) -> _T:
    known = {each.name for each in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(document) - known):
        raise ValueError(f"{kind.__name__} knows {sorted(known)}, found {unknown}")
    try:
        return kind(**document)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}, expected a JSON object")
    return dict(value)


def _check_word(name: str, found: str, *expected: str) -> None:
    if found not in expected:
        raise ValueError(f"{name} is {found!r}, expected one of {list(expected)}")

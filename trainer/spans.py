"""The timing that the loop reports, as a protocol: goodput is folded from these spans by whoever listens."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

SpanKind = Literal[
    "initialization",
    "training_prep",
    "compile",
    "checkpoint_restore",
    "data_loading",
    "step",
    "checkpoint_save",
]


class Events(Protocol):
    """What the loop needs of an event log."""

    def span(self, kind: SpanKind, step: int | None = None) -> AbstractContextManager[object]:
        """Time what happens inside."""
        ...


class NoEvents:
    """Times nothing."""

    def span(self, kind: SpanKind, step: int | None = None) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

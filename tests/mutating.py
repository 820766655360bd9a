"""Faults that a test puts into the library, and that a generator has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def mutated(mutations: Mapping[str, Callable[[], Any]], name: str | None) -> Iterator[None]:
    """The library with one fault; None: as it is."""
    if name is None:
        yield
        return
    with mutations[name]():
        yield


@contextmanager
def all_of(*patches: Any) -> Iterator[None]:
    """Several patches as one."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield

"""Operations that do not depend on each other, side by side: their round trips are paid once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptkit.store.backends import properties_of

_AT_A_TIME = 16


def side_by_side(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts`, in their order.

    All of them have ended when this returns or raises, so what follows comes after each; among themselves they have no
    order. Raises what the first in the sequence has raised.
    """
    if len(acts) <= 1:
        return [act() for act in acts]
    with ThreadPoolExecutor(min(len(acts), _AT_A_TIME), thread_name_prefix="ckptkit-ask") as pool:
        begun = [pool.submit(act) for act in acts]
    return [each.result() for each in begun]


def all_of(root: str, acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of `acts` on one store. They run in parallel if each waits for an answer (`Properties.round_trips`),
    else one after the other."""
    return side_by_side(acts) if properties_of(root).round_trips else [act() for act in acts]

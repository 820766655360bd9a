"""What a caller may give for the number of a step."""

from __future__ import annotations

import operator
from typing import Any


def step_number(step: Any) -> Any:
    """A step as an int: NumPy's and JAX's scalars too, a training loop's counter often is one; whole floats.

    What is no number is given back as it is: no step has it, and a save refuses it.
    """
    try:
        return operator.index(step)
    except TypeError:
        return int(step) if isinstance(step, float) and step.is_integer() else step


def saved_step_number(step: Any) -> int:
    """The same for a save; raises TypeError for what is no whole number."""
    number = step_number(step)
    if not isinstance(number, int):
        raise TypeError(f"step {step!r} is no whole number")
    return number

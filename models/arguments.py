"""Checks of numeric arguments."""

from __future__ import annotations

import math
from typing import Any


def check_int(name: str, value: Any, minimum: int = 1) -> int:
    """Return an argument; TypeError if it is not an int, ValueError if it is below a minimum."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < minimum:
        raise ValueError(f"{name} is {value}; expected {minimum} or more")
    return value


def check_number(name: str, value: Any, *, excluded: bool = False) -> float:
    """Return an argument; TypeError if it is not a number, ValueError if it is not finite or too small."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not 0 <= value < math.inf or (excluded and value == 0):
        raise ValueError(f"{name} is {value!r}; expected a finite number {'above' if excluded else 'of at least'} 0")
    return value

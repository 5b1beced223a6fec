"""Parse sizes in bytes and lists of numbers in options of a bench; a UsageError names the wrong flag."""

from __future__ import annotations

import math

from gangline.usage_error import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_in_bytes(word: str, flag: str) -> int:
    """Parse a number of bytes such as 8, 64K or 256M."""
    number, unit = (word[:-1], word[-1].upper()) if word[-1:].isalpha() else (word, "")
    if not number.isdecimal() or not int(number) or unit not in _UNITS:
        raise UsageError(f"{flag} is {word!r}; expected a number of bytes above 0, such as 8, 64K or 256M")
    return int(number) * _UNITS[unit]


def sizes_between(smallest: str, largest: str, factor: int) -> list[int]:
    """Return sizes in bytes, each ``factor`` times the previous one."""
    low, high = size_in_bytes(smallest, "-b"), size_in_bytes(largest, "-e")
    if low > high:
        raise UsageError(f"-b {smallest} is above -e {largest}")
    return [low * factor**power for power in range(math.floor(math.log(high / low, factor) + 1e-9) + 1)]


def counts(words: str, flag: str) -> list[int]:
    """Parse numbers above 0 with commas, without repetitions."""
    found = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in found):
        raise UsageError(f"{flag} is {words!r}; expected numbers above 0 with commas, such as 1,2,4")
    return list(dict.fromkeys(int(word) for word in found))


def factors(words: str, flag: str, most: float) -> list[float]:
    """Parse factors from 1 to ``most`` with commas."""
    try:
        found = [float(word) for word in words.split(",")]
    except ValueError:
        raise UsageError(f"{flag} is {words!r}; expected numbers with commas, such as 1,3,10") from None
    if not all(1 <= factor <= most for factor in found):
        raise UsageError(f"{flag} is {words!r}; expected numbers from 1 to {most:g}")
    return found

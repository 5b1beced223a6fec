"""What options of the commands stand for: contexts, numbers, images; and where commands log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.collectives.context import Context


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Have gangline log to stderr, with the time of day, while a command runs."""
    log = logging.getLogger("gangline")
    level = log.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def context_of(word: str | None, gpus: str | None, cpus: int | None) -> str | list[Context]:
    """What `Module` takes as its context, from --context, --gpus and --cpus, of which one at most is given.

    Raises:
        ValueError: several are given.
    """
    given = {"--context": word, "--gpus": gpus, "--cpus": cpus}
    flags = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise ValueError(f"{' and '.join(flags)} are given; expected one of them")
    if cpus is not None:
        from gangline.collectives.context import cpu

        return [cpu(index) for index in range(cpus)]
    return word or gpus or "auto"


def numbers(flag: str, words: str | None, kind: type[Any], count: int | None = None) -> list[Any]:
    """Numbers with commas between them; none for None.

    Raises:
        ValueError: a word is no number, or there are not ``count``.
    """
    try:
        found = [kind(word) for word in words.split(",")] if words else []
    except ValueError:
        raise ValueError(f"{flag} is {words!r}; expected numbers with commas, such as 3,1") from None
    if found and count is not None and len(found) != count:
        raise ValueError(f"{flag} is {words!r}, {len(found)} numbers; expected {count}")
    return found


def image_shape_of(words: str | None) -> tuple[int, int, int] | None:
    """(channels, height, width) from --image-shape, such as "3,64,64"; None for None.

    Raises:
        ValueError: it is no such shape.
    """
    if words is None:
        return None
    channels, height, width = numbers("--image-shape", words or ",", int, 3)
    if channels not in (1, 3) or min(height, width) < 1:
        raise ValueError(f"--image-shape is {words!r}; expected 1 or 3 channels, height and width, such as 3,64,64")
    return channels, height, width


def per_channel(flag: str, words: str | None, channels: int) -> tuple[float, ...] | None:
    """One number a channel; a single one serves all. None for None.

    Raises:
        ValueError: another count.
    """
    found = numbers(flag, words, float)
    if len(found) not in (0, 1, channels):
        raise ValueError(f"{flag} is {words!r}, {len(found)} numbers; expected one, or {channels}, one a channel")
    return tuple(found * channels if len(found) == 1 else found) or None


def metrics_of(top_k: int, num_classes: int | None) -> list[Any]:
    """Return the metrics to score with: accuracy, and top-k accuracy if ``top_k`` is above 1.

    Raises:
        ValueError: there are not so many classes.
    """
    if num_classes is not None and top_k > num_classes:
        raise ValueError(f"--top-k is {top_k}, but there are {num_classes} classes")
    return ["acc", *([("top_k_accuracy", {"top_k": top_k})] if top_k > 1 else [])]

"""Log lines on the terminal of programs that have not configured logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Print the lines of logger "gangline" inside the block, if the program has not configured logging."""
    logger = logging.getLogger("gangline")
    if logger.hasHandlers():
        yield
        return
    handler = _AboveBars()
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]  # not generic at run time
    """Writes each line above the progress bars of tqdm, if there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if getattr(bars, "_instances", None):
            bars.write(self.format(record), file=self.stream)
        else:
            super().emit(record)

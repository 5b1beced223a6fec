"""Logging of the commands: level by -v, -q or GANGLINE_LOG, to stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_level(verbose: bool, quiet: bool) -> None:
    """Set GANGLINE_LOG for this process and those that it starts."""
    if verbose and quiet:
        raise typer.BadParameter("-v and -q are both given; expected one of them")
    if verbose or quiet:
        os.environ["GANGLINE_LOG"] = "debug" if verbose else "warning"
    word = os.environ.get("GANGLINE_LOG", "info")
    if word not in LEVELS:
        raise typer.BadParameter(f"GANGLINE_LOG is {word!r}; expected one of {', '.join(LEVELS)}")


@contextmanager
def reported_first() -> Iterator[None]:
    """After an error in this context, ignore SIGTERM until `main` has reported the error.

    A launcher stops other workers at about the time at which they detect that a worker has failed.
    """
    try:
        yield
    except Exception:  # any error is raised again
        with suppress(ValueError):  # outside the main thread, which alone receives signals
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log gangline's messages to stderr in this context, with the time of day."""
    log = logging.getLogger("gangline")
    level = log.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(LEVELS[os.environ.get("GANGLINE_LOG", "info")])
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
        log.setLevel(level)

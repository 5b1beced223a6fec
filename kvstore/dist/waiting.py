"""Waiting for sockets: a look or two while others run, and only then sleep, for to be woken costs more than to look."""

from __future__ import annotations

import os
import time
from typing import Any

import zmq

LOOKS_SECONDS = 0.0003


def poll(poller: zmq.Poller, timeout_ms: int, looks_seconds: float) -> dict[Any, int]:
    """What has come; returns when something has, or after ``timeout_ms``.

    Args:
        poller: what is waited for.
        timeout_ms: in milliseconds.
        looks_seconds: how long to look and let others run before this thread sleeps.
    """
    ends = time.perf_counter() + looks_seconds
    while looks_seconds:
        events = dict(poller.poll(0))
        if events:
            return events
        if time.perf_counter() >= ends:
            break
        os.sched_yield()
    return dict(poller.poll(timeout_ms))

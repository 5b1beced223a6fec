"""The end of a ZeroMQ context, which must not be the end of everything."""

from __future__ import annotations

import logging
import threading

import zmq

_log = logging.getLogger("gangline")

_PATIENCE = 15.0
"""Seconds; the longest that closed sockets may still send is 10."""


def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate a context whose sockets are closed: returns when what they still send has gone out, as they linger.

    One that has not ended after 15 s is left behind with a warning, as libzmq (4.3) makes them by mistakes of its own
    and of ours: a socket that binds without a linger (`Line`), one that nobody closed.
    """
    ending = threading.Thread(target=context.term, name="gangline-context-end", daemon=True)
    ending.start()
    ending.join(_PATIENCE)
    if ending.is_alive():
        _log.warning("a ZeroMQ context has not ended within %g s; it is left behind", _PATIENCE)

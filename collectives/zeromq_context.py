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

    libzmq (4.3) loses, about once in a thousand contexts with monitors on a busy machine, word of a socket's end: its
    threads sleep and `zmq.Context.term` never returns. Such a context is left behind after 15 s, with a warning.
    """
    ending = threading.Thread(target=context.term, name="gangline-context-end", daemon=True)
    ending.start()
    ending.join(_PATIENCE)
    if ending.is_alive():
        _log.warning("a ZeroMQ context has not ended within %g s; it is left behind", _PATIENCE)

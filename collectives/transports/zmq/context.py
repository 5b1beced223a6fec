"""End of ZeroMQ contexts, and notes on the libzmq defects that this package works around.

Seen with libzmq 4.3; the code that depends on a note refers to it by number.

1. Linger at bind (no libzmq issue is known).
   - Defect: a lost connection is closed with the linger that its socket had at bind(), infinite by default. If this
     side closes at that moment with a message unsent, its context never terminates.
   - Here: sockets set linger to 0 before they bind, and pass the real linger to close().
2. ZAP (similar: libzmq issue 2733).
   - Defect: with a ZAP handler that admits peers, about 1 in 100 contexts never terminated.
   - Here: ROUTER routing ids identify peers.
3. Unread messages (libzmq issue 3392; for -1 pull request 2756, which disconnects the endpoint).
   - Defect: when a connection is reset, or a Unix socket's peer closes, messages that a receive high-water mark kept
     from being read are dropped; with RECONNECT_IVL -1 also those received that the application has not read.
   - Here: the data transport reconnects after 24 days. With tcp it has a high-water mark, which bounds what a late rank
     buffers; its messages are counted, so that a loss is an error.
4. Heartbeats of a connection that is no longer read (libzmq issue 4364; similar: 3937 and 4767).
   - Defect: a socket stops to read a connection because of a receive high-water mark, or because it is closed and
     lingers. If the peer then disconnects, the next heartbeat aborts the process: "Assertion failed: !_io_error".
   - Here: heartbeats are used with tcp only, where nothing else detects a silent host, and by sockets without a
     high-water mark or linger; a rank that closes first reads what its peers have sent until they close too, for at
     most half a second.
5. ROUTER_HANDOVER (libzmq issues 3238 and 4407).
   - Defect: a connection whose identity a newer connection takes over stays open but is no longer read.
   - Here: no two sockets of one identity connect to a ROUTER while both are used.
"""

from __future__ import annotations

import logging
import threading

import zmq

from gangline.collectives.limits import CONTEXT_END_SECONDS

_log = logging.getLogger("gangline")


class SharedContext:
    """ZeroMQ context that several `PeerSockets` use at the same time; the last one to be closed terminates it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._users = 0

    def take(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Return the context to a user, which calls `release` once."""
        self._users += 1
        return self._context

    def release(self) -> None:
        """Terminate the context if no other user is left; see `end`."""
        self._users -= 1
        if not self._users:
            end(self._context)


def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate a context whose sockets are closed; blocks while their unsent messages linger.

    A context that has not terminated after 15 s is abandoned with a warning: a defect of libzmq (note 1), or a socket
    that was not closed, must not block the program.
    """
    ending = threading.Thread(target=context.term, name="gangline-context-end", daemon=True)
    ending.start()
    ending.join(CONTEXT_END_SECONDS)
    if ending.is_alive():
        _log.warning("a ZeroMQ context has not terminated within %g s and is abandoned", CONTEXT_END_SECONDS)

"""End of ZeroMQ contexts, and notes on the libzmq defects that this package works around.

Seen with libzmq 4.3; the code that depends on a note refers to it by number.

1. Linger at bind. libzmq closes a lost connection with the linger that its socket had at bind(), infinite by default.
   If this side closes at that moment with a message unsent, its context never terminates. Sockets here set linger to
   0 before they bind, and pass the real linger to close().
2. ZAP. With a ZAP handler that admits peers, about 1 in 100 contexts never terminated. Peers are identified by ROUTER
   routing ids instead.
3. Unread messages. When a connection is reset, or a Unix socket's peer closes, libzmq drops messages that a receive
   high-water mark kept it from reading. With RECONNECT_IVL -1 it also drops received messages that the application
   has not read. The data transport has a reconnection interval of 24 days instead. With tcp it has a high-water mark,
   which bounds what a late rank buffers; its messages are counted, so that a loss is an error.
4. Heartbeats of a connection that is no longer read. When a socket stops to read a connection, because of a receive
   high-water mark or because it is closed and lingers, and the peer then disconnects, the next heartbeat aborts the
   process: "Assertion failed: !_io_error"; zeromq/libzmq issues 3937 and 4767 describe a similar one. Heartbeats are
   used with tcp only, where nothing else detects a silent host, and by sockets without a high-water mark or linger; a
   rank that closes first reads what its peers have sent until they close too, for at most half a second.
5. ROUTER_HANDOVER. A connection whose identity a newer connection takes over stays open but is no longer read. So no
   two sockets of one identity may connect to a ROUTER while both are used.
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

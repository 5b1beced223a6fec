"""Socket buffers: small on loopback."""

from __future__ import annotations

import pytest
import zmq

from gangline.collectives.transports.addresses import is_loopback
from gangline.kvstore.parameter_server.transport.socket_buffers import limit_loopback_buffers


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("[fe80::1]", False),
        ("head", False),
        ("*", False),
    ],
)
def test_buffers_are_small_on_loopback_only(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as socket:
        before = [socket.getsockopt(option) for option in (zmq.SNDBUF, zmq.RCVBUF)]
        limit_loopback_buffers(socket, host)
        after = [socket.getsockopt(option) for option in (zmq.SNDBUF, zmq.RCVBUF)]
    assert after == ([192 << 10] * 2 if expected else before)

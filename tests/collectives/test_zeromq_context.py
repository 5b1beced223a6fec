"""Termination of ZeroMQ contexts."""

from __future__ import annotations

import logging
import threading

import pytest
import zmq

from gangline.collectives.transports.zmq import context as zmq_context


def test_sent_messages_leave_before_a_context_terminates() -> None:
    with zmq.Context() as other, other.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(b"x" * (1 << 20))
        push.close()
        zmq_context.end(context)
        assert context.closed
        assert pull.poll(10_000)


def test_a_context_that_does_not_terminate_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_context, "CONTEXT_END_SECONDS", 0.1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    open_one = context.socket(zmq.PUSH)  # term() waits for it
    with caplog.at_level(logging.WARNING, "gangline"):
        zmq_context.end(context)
    assert caplog.messages == ["a ZeroMQ context has not terminated within 0.1 s and is abandoned"]
    open_one.close(0)
    [thread] = [one for one in threading.enumerate() if one.name == "gangline-context-end"]
    thread.join(30)
    assert not thread.is_alive()

"""A thousand mutated messages to a live job; `make fuzz` sends a million."""

from __future__ import annotations

import socket

import pytest
import torch

from tests.kvstore.parameter_server.fuzz import check
from tests.kvstore.parameter_server.in_process import Job


@pytest.mark.parametrize("name", ["dist_async", pytest.param("dist_sync", marks=pytest.mark.slow)])
def test_mutated_messages_change_no_honest_round(name: str) -> None:
    print(check(name, 1000, seed=1))


def test_a_message_of_the_first_zeromq_protocol_does_not_end_the_scheduler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")
    with Job(1) as job:
        port = int(job.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\x01\x00\x03\x00ab")  # an empty identity and a frame; it carries no descriptor
            with job.stores()[0] as kv:
                kv.init("key", torch.zeros(1))
    assert job.scheduler._listener.rejected == 1
    assert "a message of an old version of ZeroMQ's protocol" in caplog.text

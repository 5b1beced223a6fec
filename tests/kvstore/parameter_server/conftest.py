"""Fixtures of the tests of the parameter server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gangline.kvstore.parameter_server.client import server_client
from gangline.kvstore.parameter_server.server.server import Server
from tests.kvstore.parameter_server.in_process import LIMIT


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Event that servers of this process wait for before they handle messages."""
    monkeypatch.setenv("GANGLINE_TRANSPORT", "ipc")
    monkeypatch.setattr(server_client, "CLOSE_SECONDS", 0.05)
    gate = threading.Event()
    gate.set()
    receive = Server._receive

    def held(server: Server, *message: Any) -> None:
        gate.wait(LIMIT)
        receive(server, *message)

    monkeypatch.setattr(Server, "_receive", held)
    yield gate
    gate.set()

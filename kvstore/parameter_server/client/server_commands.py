"""Requests to all servers: wait for the answers, run a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gangline.kvstore.parameter_server.client.pending import PendingRequests, RequestWork
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Command, CommandResult
from gangline.kvstore.parameter_server.transport.frames import frame_of


def request_all(servers: ServerClient, requests: Sequence[Request], what: str) -> None:
    """Send requests and wait until all are answered."""
    work = RequestWork(what)
    with PendingRequests(work, what) as pending:
        pending.submit(requests, servers)
    work.is_awaited = True
    servers.wait(work.is_completed)
    work.wait()


def command(
    servers: ServerClient,
    name: str,
    payload: bytes | Sequence[bytes] = b"",
    datas: Sequence[Sequence[Tensor]] | None = None,
) -> list[tuple[bytes, list[Tensor]]]:
    """Run a command on every server and return payload and tensors of each result, in rank order.

    Args:
        servers: client of the servers.
        name: name of the command.
        payload: for all servers, or one per server.
        datas: tensors for each server.
    """
    results: dict[int, tuple[bytes, list[Tensor]]] = {}

    def request(server: int) -> Request:
        own = payload if isinstance(payload, bytes) else payload[server]

        def on_answer(answer: Any, data: list[Tensor]) -> bool:
            assert isinstance(answer, CommandResult)
            results[server] = answer.payload, data
            return True

        return Request(
            server,
            lambda sequence: Command(sequence, name, own),
            name,
            frames=[frame_of(one) for one in (() if datas is None else datas[server])],
            on_answer=on_answer,
            wants_values=True,
        )

    request_all(servers, [request(server) for server in range(servers.count)], name)
    return [results[server] for server in range(servers.count)]

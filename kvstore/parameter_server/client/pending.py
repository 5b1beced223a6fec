"""Work of several requests to servers, with the first error among them; commands to all servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from gangline.collectives.errors import DeadNodeError, StallError
from gangline.collectives.work import Work
from gangline.kvstore.compression import Codec
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Command, CommandResult, Message
from gangline.kvstore.parameter_server.transport.frames import frame_of


class RequestWork(Work):
    """Work of requests that knows whether a thread waits for it."""

    is_awaited = False

    def wait(self, timeout: float | None = None) -> None:  # noqa: D102  inherited
        self.is_awaited = timeout is None
        try:
            super().wait(timeout)
        finally:
            self.is_awaited = False


class PendingRequests:
    """A Work that completes when all its requests have completed, with the first error among them.

    A context manager: the Work does not complete before the block ends, and an exception in the block becomes its
    error.
    """

    def __init__(
        self,
        work: Work,
        name: str,
        codec: Codec | None = None,
        on_late_error: Callable[[Exception], None] = lambda _: None,
        on_streams: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Start without requests.

        Args:
            work: completed when the requests are.
            name: for errors.
            codec: compression of pulled values.
            on_late_error: called with errors of requests that completed when they were sent.
            on_streams: makes a context in which answers are handled: the GPU streams that pulled values are written on.
        """
        self.name = name
        self.codec = codec
        self._on_late_error = on_late_error
        self.on_error: Callable[[BaseException], None] = lambda _: None
        """Called with the first error."""
        self._on_streams = on_streams
        self._work = work
        self._open = 1
        self._ended = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request], servers: ServerClient) -> None:
        """Send requests and add them to those that the Work waits for."""
        with self._lock:
            self._open += len(requests)
        for request in requests:
            request.is_awaited = self._is_awaited
            if request.completes_when_sent:
                request.on_sent = partial(self._end, None)
                request.on_error = partial(self._fail, request)
            else:
                request.on_answer = self._ending_with(request.on_answer)
                request.on_error = self._end
        for request in requests:
            try:
                servers.submit(request)
            except Exception as error:  # noqa: BLE001  the Work raises it
                self._end(error)

    def _is_awaited(self) -> bool:
        return isinstance(self._work, RequestWork) and self._work.is_awaited

    def __enter__(self) -> PendingRequests:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._end(error)
        return True  # the Work raises it

    def _ending_with(self, take: Callable[[Message, list[Tensor]], bool]) -> Callable[[Message, list[Tensor]], bool]:
        def on_answer(message: Message, datas: list[Tensor]) -> bool:
            with self._on_streams():
                is_complete = take(message, datas)
            if is_complete:
                self._end(None)
            return is_complete

        return on_answer

    def _fail(self, request: Request, error: Exception) -> None:
        if request.sequence:  # it was sent, so it has completed already
            self.on_error(error)
            self._on_late_error(error)
        else:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            # after a death or a stall, the other requests may never be answered
            ends = not self._ended and (not self._open or isinstance(error, (DeadNodeError, StallError)))
            self._ended |= ends
        if ends:
            if self._error is not None:
                self.on_error(self._error)
            self._work.complete(self._error)


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
    """Run a command on every server and return payload and tensors of each result, in rank order."""
    results: dict[int, tuple[bytes, list[Tensor]]] = {}

    def request(server: int) -> Request:
        own = payload if isinstance(payload, bytes) else payload[server]

        def on_answer(answer: Any, data: list[Tensor]) -> bool:
            assert isinstance(answer, CommandResult)
            results[server] = answer.payload, data
            return True

        return Request(
            server,
            Command(0, name, own),
            name,
            frames=[frame_of(one) for one in (() if datas is None else datas[server])],
            on_answer=on_answer,
        )

    request_all(servers, [request(server) for server in range(servers.count)], name)
    return [results[server] for server in range(servers.count)]

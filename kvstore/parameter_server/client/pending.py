"""Work of several requests to servers, with the first error among them; commands to all servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gangline.collectives.errors import DeadNodeError, StallError
from gangline.collectives.streams import Ordered
from gangline.collectives.work import Work
from gangline.kvstore.compression import Codec
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Command, CommandResult, Message
from gangline.kvstore.parameter_server.transport.frames import frame_of


class RequestWork(Work):
    """Work of requests: it completes when all of them have completed, with the first error among them."""

    def __init__(
        self,
        name: str,
        section: Ordered | None = None,
        codec: Codec | None = None,
        on_late_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Start without requests; ``codec``: compression of pulled values.

        ``section`` has the GPU streams on which values are read and answers are written; None: all are on the host.
        ``on_late_error`` is called with errors of requests that completed when they were sent.
        """
        super().__init__(name, None if section is None else section.join)
        self.name = name
        self.codec = codec
        self.is_awaited = False
        """True while a thread waits without a limit."""
        self.on_error: Callable[[BaseException], None] = lambda _: None
        """Called with the first error."""
        self._section = section
        self._on_late_error = on_late_error
        self._open = 1
        self._ended = False
        self._first_error: BaseException | None = None
        self._counting = threading.Lock()

    def run(self, prepare: Callable[[RequestWork], None]) -> None:
        """Call a function that submits requests; the Work does not complete before, and the function's error is its."""
        error: BaseException | None = None
        try:
            if self._section is None:
                prepare(self)
            else:
                with self._section:
                    prepare(self)
        except BaseException as raised:  # noqa: BLE001  the Work raises it
            error = raised
        self._end(error)

    def submit(self, requests: Sequence[Request], servers: ServerClient) -> None:
        """Send requests and add them to those that the Work waits for."""
        with self._counting:
            self._open += len(requests)
        for request in requests:
            request.work = self
            request.on_end, request.on_error = self._end, self._fail
            if self._section is not None and request.on_answer is not None:
                request.on_answer = partial(_handle_on_streams, self._section, request.on_answer)
        for request in requests:
            try:
                servers.submit(request)
            except Exception as error:  # noqa: BLE001  the Work raises it
                self._end(error)

    def _wait_until_over(self, timeout: float | None) -> None:
        self.is_awaited = timeout is None
        try:
            super()._wait_until_over(timeout)
        finally:
            self.is_awaited = False

    def _fail(self, request: Request, error: Exception) -> None:
        if request.completes_when_sent and request.sequence:  # it has completed already
            self.on_error(error)
            self._on_late_error(error)
        else:
            self._end(error)

    def _end(self, error: BaseException | None = None) -> None:
        with self._counting:
            self._open -= 1
            if error is not None:
                self._first_error = self._first_error or error
            # after a death or a stall, the other requests may never be answered
            is_over = not self._open or (error is not None and isinstance(error, (DeadNodeError, StallError)))
            ends = is_over and not self._ended
            self._ended |= ends
        if ends:
            if self._first_error is not None:
                self.on_error(self._first_error)
            self.complete(self._first_error)


def _handle_on_streams(
    section: Ordered, handle: Callable[[Any, list[Tensor]], bool], answer: Message, datas: list[Tensor]
) -> bool:
    with section.resumed():
        return handle(answer, datas)


def request_all(servers: ServerClient, requests: Sequence[Request], what: str) -> None:
    """Send requests and wait until all are answered."""
    work = RequestWork(what)
    work.run(lambda work: work.submit(requests, servers))
    work.is_awaited = True
    servers.wait(work.is_completed)
    work.wait()


def command(
    servers: ServerClient, name: str, payload: bytes | Mapping[int, tuple[bytes, Sequence[Tensor]]] = b""
) -> list[tuple[bytes, list[Tensor]]]:
    """Run a command on servers and return payload and tensors of each result, in rank order.

    ``payload`` is for all servers, or payload and tensors by rank for some.
    """
    results: dict[int, tuple[bytes, list[Tensor]]] = {}
    if isinstance(payload, bytes):
        payload = dict.fromkeys(range(servers.count), (payload, ()))

    def request(server: int, own: bytes, tensors: Sequence[Tensor]) -> Request:
        def on_answer(answer: CommandResult, data: list[Tensor]) -> bool:
            results[server] = answer.payload, data
            return True

        return Request(server, Command(0, name, own), name, frames=[*map(frame_of, tensors)], on_answer=on_answer)

    request_all(servers, [request(server, *of_server) for server, of_server in payload.items()], name)
    return [results[server] for server in sorted(results)]

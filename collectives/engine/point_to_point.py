"""send and recv: messages between two ranks, matched by tag, any number of them in progress."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

from gangline.collectives.call_signature import CallSignature, encode_signature
from gangline.collectives.engine.engine import Engine
from gangline.collectives.engine.host_staging import data_of, flat_buffer, write_back
from gangline.collectives.errors import GanglineError, MismatchError
from gangline.collectives.limits import WAIT_CHECK_SECONDS
from gangline.collectives.liveness.membership import has_closed
from gangline.collectives.streams import Ordered, SideStreams
from gangline.collectives.transports.base import MessageTag, ReceiveRequest, SendRequest, wait_until
from gangline.collectives.work import GuardedLock, NoThreadError, Work, start_thread

_YIELD_SECONDS = 0.002  # without a message, before the first sleep


class ReceiveWork(Work):
    """Handle of a receive."""

    source = -1
    """Rank that sent the message; -1 until the message has arrived."""


@dataclass(eq=False, slots=True)
class _PendingSend:
    request: SendRequest
    to: int
    code: int
    work: Work


@dataclass(eq=False, slots=True)
class _PendingReceive:
    tensor: Tensor
    sources: tuple[int, ...]
    """Ranks that may send the message."""
    message_tag: MessageTag
    work: ReceiveWork
    recv_code: int
    """Code of the call as this rank made it, for errors."""
    section: Ordered | None
    """Section that writes a GPU tensor, ordered after the work on the caller's streams; None for a CPU tensor."""

    def take(self, write: Callable[[Tensor], None]) -> None:
        """Fill a contiguous 1-d host tensor by ``write``, and copy its values to the tensor."""
        with self.section or nullcontext():
            flat = flat_buffer(self.tensor)
            write(flat)
            write_back(self.tensor, flat)


@dataclass(eq=False, slots=True)
class _EarlyMessage:
    """A message that arrived before its receive was called."""

    message_tag: MessageTag
    data: Tensor

    def into(self, flat: Tensor) -> None:
        flat.copy_(self.data.view(flat.dtype))


class PointToPoint:
    """Messages of one rank, moved by a background thread while asynchronous ones are pending, else by the caller."""

    def __init__(self, engine: Engine) -> None:
        resources = engine.resources
        self._engine = engine
        self._rank = resources.rank
        self._transport = resources.messages
        self._watchdog = resources.messages_watchdog
        self._gone = resources.membership.gone
        self._side_streams = SideStreams()
        self._lock = GuardedLock()
        self._sends: list[_PendingSend] = []
        self._receives: list[_PendingReceive] = []
        self._early: dict[int, deque[_EarlyMessage]] = {}
        self._error: GanglineError | None = None
        self._timed: Work | None = None  # the message whose wait the watchdog times
        self._timed_code = 0
        self._thread: Thread | None = None

    def send(self, flat: Tensor, to: int, tag: int) -> Work:
        """Start to send a contiguous 1-d tensor."""
        code = encode_signature("send", flat.numel(), flat.dtype, None, None)
        self._engine.check_open()
        with self._lock:
            self._check_open()
            if to == self._rank:
                data = flat.view(torch.uint8).clone()
                self._early.setdefault(to, deque()).append(_EarlyMessage(MessageTag(tag, code), data))
                self._wake_thread()
                return Work.finished("send")
            self._time_oldest()
            if self._timed is None:  # `send` may detect that the other rank is gone
                self._watchdog.begin(0, code)
            with self._end_on_error(code):
                request = self._transport.send(to, flat.view(torch.uint8), MessageTag(tag, code))
            self._wake_thread()
            if request.is_done():
                return Work.finished("send")
            work = Work("send")
            self._sends.append(_PendingSend(request, to, code, work))
            return work

    def receive(self, tensor: Tensor, sources: Sequence[int], tag: int) -> ReceiveWork:
        """Start to receive into a tensor, from the first of these ranks that sends."""
        self._engine.check_open()
        code = encode_signature("send", tensor.numel(), tensor.dtype, None, None)
        section = self._side_streams.behind_caller([tensor]) if tensor.is_cuda else None
        name = "recv"
        work = ReceiveWork(name, result=tensor) if section is None else ReceiveWork(name, section.join, tensor)
        with self._lock:
            self._check_open()
            recv_code = encode_signature("recv", tensor.numel(), tensor.dtype, None, None)
            message_tag = MessageTag(tag, code)
            self._receives.append(
                _PendingReceive(data_of(tensor), tuple(sources), message_tag, work, recv_code, section)
            )
            self._wake_thread()
        return work

    def check_sent(self, tag: int) -> None:
        """Raise ValueError if this rank waits for a message to itself that it has not sent."""
        with self._lock:
            sent = sum(one.message_tag.sequence == tag for one in self._early.get(self._rank, ()))
            sent -= sum(one.message_tag.sequence == tag and self._rank in one.sources for one in self._receives)
        if sent <= 0:
            raise ValueError(
                f"source is {self._rank}, this rank itself, which has sent itself no message with tag {tag}, and "
                "cannot while it waits; call send first, or recv with async_op=True"
            )

    def finish(self, work: Work, *, async_op: bool) -> Work | None:
        """Wait for a message and return None, or complete it in the background and return its Work.

        Raises:
            GanglineError: if a rank is dead or late, or (a `MismatchError`) sent another number of elements or dtype.
        """
        if async_op:
            with self._lock:
                if (self._sends or self._receives) and self._thread is None:
                    try:
                        self._thread = start_thread(self._run_thread, "gangline-messages")
                    except NoThreadError as error:
                        self._fail(error, self._timed_code)
                        raise
            return work
        try:
            if self._thread is None:
                self._progress_until(work.is_completed)
            else:  # the thread ends when no message is pending
                work.wait()
        except GanglineError:
            raise
        except BaseException as error:  # an interrupted call must not take a later message
            with self._lock:
                self._time_oldest()
                self._fail(error, self._timed_code)
            raise
        work.wait()
        return None

    def close(self) -> None:
        """Fail all pending messages and end the background thread."""
        with self._lock:
            if self._error is None:
                self._end(GanglineError("the communicator is closed"))
            self._wake_thread()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._error is not None:
            raise self._error

    def _run_thread(self) -> None:
        def is_over() -> bool:
            if self._sends or self._receives:
                return False
            self._thread = None
            return True

        try:
            self._progress_until(is_over)
        except BaseException as error:  # noqa: BLE001  of `waiter` or of a sleep: the pending works raise it
            with self._lock:
                self._time_oldest()
                self._fail(error, self._timed_code)
                self._thread = None

    def _wake_thread(self) -> None:
        """Wake the background thread to check the pending messages; the caller holds the lock."""
        if self._thread is not None:
            self._transport.wake()

    def _progress_until(self, is_over: Callable[[], bool]) -> None:
        """Advance all messages until ``is_over()``, which is called under the lock."""
        idle_since = time.monotonic()
        sleep: Callable[[float], None] = time.sleep
        seconds = 0.0

        def progress() -> bool:
            nonlocal idle_since, sleep, seconds
            with self._lock:
                if is_over():
                    return True
                sleep, seconds = time.sleep, 0.0
                if time.monotonic() - idle_since >= _YIELD_SECONDS:
                    sources = {source for one in self._receives for source in one.sources} - {self._rank}
                    targets = {one.to for one in self._sends}
                    sleep, seconds = self._transport.waiter(sources, targets), WAIT_CHECK_SECONDS
                if self._progress():
                    idle_since, seconds = time.monotonic(), 0.0
            return False

        wait_until(progress, lambda _: self._pause(sleep, seconds), self._check_waits)

    def _pause(self, sleep: Callable[[float], None], seconds: float) -> None:
        """Sleep; at first for 0 s, which yields to other threads and processes."""
        sleep(seconds)

    def _check_waits(self) -> None:
        """Check that the ranks that pending messages wait for are alive."""
        with self._lock:
            peers = [one.to for one in self._sends]
            for one in self._receives:  # a receive from several ranks does not need ranks that have left regularly
                peers += [source for source in one.sources if not has_closed(self._gone.get(source))] or one.sources
            if not peers:
                return
            with suppress(Exception), self._end_on_error(self._timed_code):  # the pending works raise it
                self._engine.check_open()
                self._watchdog.check(peers)

    @contextmanager
    def _end_on_error(self, code: int) -> Iterator[None]:
        """End the communicator on all ranks after any error in this context, which handles a call's message."""
        try:
            yield
        except BaseException as error:  # of the system or of torch too: a message may be half read
            self._fail(error, code)
            raise

    def _fail(self, error: BaseException, code: int) -> None:
        """End the communicator on all ranks; pending and later calls raise an error that names ``error``."""
        if self._error is None:
            self._engine.failed(error, code)
            assert self._engine.error is not None
            reason = type(self._engine.error)(*self._engine.error.args)
            reason.__cause__ = None if isinstance(error, GanglineError) else error
            self._transport.withdraw()
            self._end(reason)

    def _end(self, error: GanglineError) -> None:
        self._error = error
        for work in [one.work for one in self._sends] + [one.work for one in self._receives]:
            work.complete(error)
        self._sends, self._receives = [], []

    def _progress(self) -> bool:
        """Advance all messages; return whether one ended, with or without an error."""
        try:
            with self._end_on_error(self._timed_code):
                return self._advance()
        except Exception:  # noqa: BLE001  the pending works raise it
            return True

    def _advance(self) -> bool:
        self._time_oldest()
        self._transport.progress()
        before = len(self._sends) + len(self._receives)
        for sent in [one for one in self._sends if one.request.is_done()]:
            self._sends.remove(sent)
            sent.work.complete()
        # receives that match the same message take it in the order of their calls
        awaited: defaultdict[int, set[int]] = defaultdict(set)
        for receive in list(self._receives):
            of_tag = awaited[receive.message_tag.sequence]
            sources = [source for source in receive.sources if source not in of_tag]
            with self._end_on_error(receive.recv_code):
                if not any(self._take_message(receive, source) for source in sources):
                    of_tag.update(receive.sources)
        return len(self._sends) + len(self._receives) < before

    def _time_oldest(self) -> None:
        """Start timing a pending message, unless the watchdog already times a pending message."""
        if self._timed is not None and not self._timed.is_completed():
            return
        pending: list[tuple[Work, int]] = [(one.work, one.recv_code) for one in self._receives]
        pending += [(one.work, one.code) for one in self._sends]
        self._timed = None
        for self._timed, self._timed_code in pending[:1]:
            self._watchdog.begin(0, self._timed_code)

    def _take_message(self, receive: _PendingReceive, source: int) -> bool:
        """Complete a receive if its message from a rank has arrived; return whether it had. Keep other messages."""
        early = self._early.setdefault(source, deque())
        for message in early:
            if message.message_tag.sequence == receive.message_tag.sequence:
                if self._fits(message.message_tag, receive, source):
                    early.remove(message)
                    receive.take(message.into)
                    self._complete(receive, source)
                return True
        if source == self._rank:
            return False
        while (request := self._transport.poll(source)) is not None:
            if request.message_tag == receive.message_tag:
                receive.take(lambda flat, request=request: request.into(flat.view(torch.uint8)))  # type: ignore[misc]
                self._complete(receive, source)
                return True
            early.append(_read_early(request))
            if request.message_tag.sequence == receive.message_tag.sequence:
                self._fits(request.message_tag, receive, source)
                return True
        return False

    def _fits(self, message_tag: MessageTag, receive: _PendingReceive, source: int) -> bool:
        """Return whether a message with the right tag has the expected size and dtype; if not, fail the receive."""
        if message_tag == receive.message_tag:
            return True
        sent, expected = CallSignature.from_code(message_tag.code), CallSignature.from_code(receive.message_tag.code)
        self._receives.remove(receive)
        receive.work.complete(
            MismatchError(
                f"rank {source} sent {_text(sent)} with tag {message_tag.sequence}, and this rank's recv "
                f"expects {_text(expected)}; the message is kept for a recv that fits"
            )
        )
        return False

    def _complete(self, receive: _PendingReceive, source: int) -> None:
        self._receives.remove(receive)
        receive.work.source = source
        receive.work.complete()


def _read_early(request: ReceiveRequest) -> _EarlyMessage:
    data = torch.empty(request.nbytes, dtype=torch.uint8, device="cpu")
    request.into(data)
    return _EarlyMessage(request.message_tag, data)


def _text(call: CallSignature) -> str:
    return f"{call.count} x {str(call.dtype).removeprefix('torch.')}"

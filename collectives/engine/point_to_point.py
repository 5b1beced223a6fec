"""send and recv: messages between two ranks, matched by tag, any number of them under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.collectives.call_signature import CallSignature, encode_signature
from gangline.collectives.engine.arguments import overwrite
from gangline.collectives.engine.engine import Engine, GroupResources
from gangline.collectives.errors import GanglineError, MismatchError
from gangline.collectives.streams import Ordered, SideStreams
from gangline.collectives.transports.base import MessageTag, ReceiveRequest, SendRequest
from gangline.collectives.work import Work

_LOOKS = 200  # before the first nap
_NAP_SECONDS = 0.0002
_CHECK_SECONDS = 0.01


@dataclass(eq=False, slots=True)
class _Sending:
    send_request: SendRequest
    to: int
    code: int
    work: Work


@dataclass(eq=False, slots=True)
class _Receiving:
    tensor: Tensor
    source: int
    message_tag: MessageTag
    work: Work
    recv_code: int
    """The same call from this side, for errors."""
    section: Ordered | None
    """Of a tensor on a GPU: where it is written, behind what the caller's streams held when the call came."""

    def take(self, write: Callable[[Tensor], None]) -> None:
        """Have the tensor written as a contiguous 1-d one."""
        with self.section or nullcontext():
            overwrite(self.tensor, write)


@dataclass(eq=False, slots=True)
class _Kept:
    """A message that came before it was asked for."""

    message_tag: MessageTag
    data: Tensor

    def into(self, flat: Tensor) -> None:
        flat.copy_(self.data.view(flat.dtype))


class PointToPoint:
    """The messages of one rank. Whoever waits moves all of them; a thread does while nobody waits."""

    def __init__(self, resources: GroupResources, engine: Engine) -> None:
        self._engine = engine  # a communicator fails as a whole
        self._transport = resources.messages
        self._watchdog = resources.messages_watchdog
        self._lock = threading.Lock()
        self._lanes = SideStreams()
        self._sending: list[_Sending] = []
        self._receiving: list[_Receiving] = []
        self._kept: dict[int, deque[_Kept]] = {}
        self._error: GanglineError | None = None
        self._watched: Work | None = None  # whose wait the watch's clock counts
        self._thread: threading.Thread | None = None

    def send(self, flat: Tensor, to: int, tag: int) -> Work:
        """Begin to send a contiguous 1-d tensor."""
        code = encode_signature("send", flat.numel(), flat.dtype, None, None)
        with self._lock:
            self._check_open()
            self._watch_one()
            if self._watched is None:  # a transport may find out here that the other rank is gone
                self._watchdog.begin(0, code)
            with self._ending_with_the_transport():
                send_request = self._transport.send(to, flat.view(torch.uint8), MessageTag(tag, code))
            if send_request.is_done():
                return Work.finished("send")
            work = Work("send")
            self._sending.append(_Sending(send_request, to, code, work))
            return work

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Begin to receive into a tensor."""
        code = encode_signature("send", tensor.numel(), tensor.dtype, None, None)
        section = self._lanes.behind_caller([tensor]) if tensor.is_cuda else None
        work = Work("recv", result=tensor) if section is None else Work("recv", section.join, tensor)
        with self._lock:
            self._check_open()
            recv_code = encode_signature("recv", tensor.numel(), tensor.dtype, None, None)
            self._receiving.append(_Receiving(tensor, source, MessageTag(tag, code), work, recv_code, section))
        return work

    def finish(self, work: Work, *, async_op: bool) -> Work | None:
        """Have a message moved to its end: by this thread, or in the background.

        Raises:
            GanglineError: a rank is dead or late, or (a `MismatchError`) sent something else.
        """
        if async_op:
            self._move_in_background()
            return work
        self._move_until(work)
        work.wait()
        return None

    def close(self) -> None:
        """Take no more; what is under way fails."""
        with self._lock:
            if self._error is None:
                self._end(GanglineError("the communicator is closed"))
        if self._thread is not None:
            self._thread.join()

    def _check_open(self) -> None:
        self._engine.check_open()
        if self._error is not None:
            raise self._error

    def _move_in_background(self) -> None:
        with self._lock:
            if (self._sending or self._receiving) and self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gangline-messages", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        looks = 0
        while True:
            with self._lock:
                if not self._sending and not self._receiving:
                    self._thread = None
                    return
                looks = 0 if self._move() else looks + 1
            self._rest(looks)

    def _move_until(self, work: Work) -> None:
        looks = 0
        while not work.is_completed():
            with self._lock:
                looks = 0 if work.is_completed() or self._move() else looks + 1
            self._rest(looks)

    def _rest(self, looks: int) -> None:
        """Wait a little, the longer the longer nothing came; see now and then whether it still can."""
        if looks < _LOOKS:
            time.sleep(0)  # another thread, or process, may have what is waited for
            return
        time.sleep(_NAP_SECONDS)
        if looks % int(_CHECK_SECONDS / _NAP_SECONDS) == 0:
            self._see_to_it()

    def _see_to_it(self) -> None:
        with self._lock:
            waiting = [one.source for one in self._receiving] + [one.to for one in self._sending]
            if not waiting:
                return
            with suppress(GanglineError), self._ending_with_the_transport():
                self._engine.check_open()
                self._watchdog.check(waiting)

    @contextmanager
    def _ending_with_the_transport(self) -> Iterator[None]:
        """Around what may find out that messages cannot go on: then nothing on the communicator does."""
        try:
            yield
        except GanglineError as error:
            self._engine.end(error)
            self._end(error)
            raise

    def _end(self, error: GanglineError) -> None:
        self._error = error
        for work in [one.work for one in self._sending] + [one.work for one in self._receiving]:
            work.complete(error)
        self._sending, self._receiving = [], []

    def _move(self) -> bool:
        """Move on what can be moved; gives whether anything ended, by an error too."""
        try:
            with self._ending_with_the_transport():
                return self._move_on()
        except GanglineError:
            return True

    def _move_on(self) -> bool:
        self._watch_one()
        self._transport.progress()
        before = len(self._sending) + len(self._receiving)
        for sending in [one for one in self._sending if one.send_request.is_done()]:
            self._sending.remove(sending)
            sending.work.complete()
        missing: set[tuple[int, int]] = set()  # receives of one tag end in the order in which they began
        for receiving in list(self._receiving):
            what = receiving.source, receiving.message_tag.sequence
            if what not in missing and not self._look_for(receiving):
                missing.add(what)
        return len(self._sending) + len(self._receiving) < before

    def _watch_one(self) -> None:
        """See that the watch's clock counts the wait of a message that is under way."""
        if self._watched is not None and not self._watched.is_completed():
            return
        under_way = [(one.work, one.recv_code) for one in self._receiving]
        under_way += [(one.work, one.code) for one in self._sending]
        self._watched = None
        for self._watched, code in under_way[:1]:
            self._watchdog.begin(0, code)

    def _look_for(self, wanted: _Receiving) -> bool:
        """End a receive if its message is here, and tell whether it was; what else its source has sent is kept."""
        kept = self._kept.setdefault(wanted.source, deque())
        for message in kept:
            if message.message_tag.sequence == wanted.message_tag.sequence:
                if self._fits(message.message_tag, wanted):
                    kept.remove(message)
                    wanted.take(message.into)
                    self._complete(wanted)
                return True
        while (receive_request := self._transport.poll(wanted.source)) is not None:
            if receive_request.message_tag == wanted.message_tag:
                wanted.take(lambda flat, message=receive_request: message.into(flat.view(torch.uint8)))  # type: ignore[misc]
                self._complete(wanted)
                return True
            kept.append(_keep(receive_request))
            if receive_request.message_tag.sequence == wanted.message_tag.sequence:
                self._fits(receive_request.message_tag, wanted)
                return True
        return False

    def _fits(self, message_tag: MessageTag, wanted: _Receiving) -> bool:
        """Whether a message of the right tag is what is wanted; if not the receive fails, and the message is kept."""
        if message_tag == wanted.message_tag:
            return True
        sent, expected = CallSignature.from_code(message_tag.code), CallSignature.from_code(wanted.message_tag.code)
        self._receiving.remove(wanted)
        wanted.work.complete(
            MismatchError(
                f"rank {wanted.source} sent {_words(sent)} with tag {message_tag.sequence}, "
                f"and this rank's recv expects "
                f"{_words(expected)}; the message is kept for a recv that fits"
            )
        )
        return False

    def _complete(self, wanted: _Receiving) -> None:
        self._receiving.remove(wanted)
        wanted.work.complete()


def _keep(receive_request: ReceiveRequest) -> _Kept:
    data = torch.empty(receive_request.nbytes, dtype=torch.uint8)
    receive_request.into(data)
    return _Kept(receive_request.message_tag, data)


def _words(call: CallSignature) -> str:
    return f"{call.count} x {str(call.dtype).removeprefix('torch.')}"

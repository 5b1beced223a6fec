"""Which way the collectives of a communicator go for tensors on GPUs: by NCCL, or through the host's memory.

The ranks decide it once, together, when the first call comes in which a rank's tensor is on a GPU. The trouble is with
ranks whose tensor is on the CPU then: they make an ordinary call and know of nothing to decide. So ranks with a GPU
say by their roster that they are at the call and would decide, in a way that disturbs no ordinary call, and wait until
all have said so, or one is seen in an ordinary call: then everything goes through the host for good. Where all have
said so, they exchange what NCCL needs. From then on every call begins by a look at whether all tensors are on the
agreed GPUs, which also sees that the ranks are at the same call, and alive, before the GPUs wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgpack
import torch
from torch import Tensor

from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.devices.backends.nccl_bindings import BINDINGS, Binding
from gangline.collectives.devices.nccl_communicator import NcclCommunicator
from gangline.collectives.engine import host_collectives
from gangline.collectives.engine.engine import Engine
from gangline.collectives.engine.executor import Parts
from gangline.collectives.errors import GanglineError
from gangline.collectives.liveness.limits import limits
from gangline.collectives.liveness.membership import CLOSED
from gangline.collectives.liveness.watchdog import Watchdog

_log = logging.getLogger("gangline")

_DECIDES, _SAW_ALL = 1 << 61, 1 << 62
"""Added to the number of a call in what a rank says of itself: numbers that no ordinary call has."""
_NUMBERS = _DECIDES - 1
_PAUSE_SECONDS = 0.001
_CHECK_SECONDS = 0.01
_UNKNOWN = torch.int16  # the only dtype of ours that NCCL lacks


@dataclass(frozen=True)
class _Running:
    """A call that a GPU is at."""

    event: torch.cuda.Event
    code: int


class NcclSelection:
    """The decision of one rank's communicator, and NCCL's communicator where that is what was decided."""

    def __init__(self, engine: Engine) -> None:
        self.nccl: NcclCommunicator | None = None
        """What makes the calls, once NCCL was decided for."""
        self._engine = engine
        self._is_decided = False
        self._device = torch.device("cpu")
        self._binding: Binding | None = None
        self._lock = threading.Lock()  # of what follows
        self._running: list[_Running] = []
        self._thread: threading.Thread | None = None

    def run(
        self, code: int, tensor: Tensor, by_host: Callable[[], None], by_nccl: Callable[[NcclCommunicator], None]
    ) -> None:
        """Make a call one way or the other.

        Args:
            code: `Call.code`.
            tensor: the call's, on this rank.
            by_host: makes it on the host, wherever the tensor lies.
            by_nccl: starts it on the current stream of the tensor's GPU.

        Raises:
            GanglineError: a rank is dead, late, or at another call.
        """
        nccl = self._chosen(code, tensor)
        if nccl is None:
            by_host()
            return
        try:
            by_nccl(nccl)
        except BaseException as error:  # noqa: BLE001  raised again
            raise self._engine.failed(error, code) from None
        self._see_to_its_end(code)

    def _chosen(self, code: int, tensor: Tensor) -> NcclCommunicator | None:
        """What makes a call, if it goes by NCCL: a collective of the ranks where that is decided, or to be."""
        if (self._is_decided or not tensor.is_cuda) and self.nccl is None:
            return None
        if tensor.dtype == _UNKNOWN or not tensor.numel():
            return None
        if not self._is_decided:
            self._decide(code, tensor.device)
            self._is_decided = True
            if self.nccl is None:
                return None
        return self.nccl if self._are_all_there(code, tensor.device == self._device) else None

    def _see_to_its_end(self, code: int) -> None:
        """A call has been started on the current stream, where NCCL would wait for a dead rank for ever."""
        event = torch.cuda.current_stream(self._device).record_event()
        with self._lock:
            self._running.append(_Running(event, code))
            if self._thread is None:
                self._thread = threading.Thread(target=self._attend, name="gangline-nccl", daemon=True)
                self._thread.start()

    def abort(self) -> None:
        """End what runs on this rank's GPU; from any thread."""
        with self._lock:
            binding, self._binding = self._binding, None
            self._running = []
        if binding is not None:
            binding.abort()

    def close(self) -> None:
        """Wait for what runs, and give everything back."""
        thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            binding, self._binding = self._binding, None
        if binding is not None and self._engine.error is None:
            binding.destroy()
        elif binding is not None:  # other ranks may be gone, and to destroy may wait for them
            binding.abort()

    def _decide(self, code: int, device: torch.device) -> None:
        engine = self._engine
        if not self._are_all_on_gpus(code):
            self._say("a rank's tensor is on the CPU")
            return
        size, rank = engine.resources.size, engine.resources.rank
        try:
            name = nccl_bindings.chosen()
            problem = nccl_bindings.missing(name)
            gpu = "" if problem else str(torch.cuda.get_device_properties(device).uuid)
        except BaseException as error:  # noqa: BLE001  raised again
            raise engine.failed(error, code) from None
        cards = [
            msgpack.unpackb(one)
            for one in host_collectives.exchange(engine, msgpack.packb([problem, engine.resources.hosts[rank], gpu]))
        ]
        reason = _reason(cards)
        if reason:
            self._say(reason)
            return
        try:
            unique_id = host_collectives.exchange(engine, BINDINGS[name].unique_id() if rank == 0 else b"")[0]
            self._binding = self._made(lambda: BINDINGS[name].for_rank(device, unique_id, rank, size), code)
        except BaseException as error:  # noqa: BLE001  raised again
            raise engine.failed(error, code) from None
        self._device = device
        self.nccl = NcclCommunicator(device, self._binding, rank, size)

    def _are_all_on_gpus(self, code: int) -> bool:
        """Whether every rank comes to this call with a tensor on a GPU, once that is known; all come to the same."""
        engine = self._engine
        resources = engine.resources
        engine.check_open()
        number = engine.next_number
        with engine.lock:
            resources.watchdog.begin(0, code)  # so that it tells the others nothing but what is told here
            try:
                return self._hear_all(number, code)
            except BaseException as error:  # noqa: BLE001  raised again
                raise engine.failed(error, code) from None
            finally:
                resources.membership.look(number, code)

    def _hear_all(self, number: int, code: int) -> bool:
        resources = self._engine.resources
        others = [rank for rank in range(resources.size) if rank != resources.rank]
        for word in (_DECIDES, _SAW_ALL):  # who has said the second is known to know that all said the first
            while True:
                resources.membership.look(number + word, code)
                at = {rank: resources.membership.at.get(rank, (0, 0))[0] for rank in others}
                passed = {rank for rank in others if self._is_ordinary(rank, at[rank], number)}
                if word == _DECIDES and passed:
                    return False
                missing = [rank for rank in others if rank not in passed and at[rank] < number + word]
                if not missing:
                    break
                resources.watchdog.check(missing)
                time.sleep(_PAUSE_SECONDS)
        return True

    def _is_ordinary(self, rank: int, said: int, number: int) -> bool:
        """Whether a rank has come to the call, or beyond it, without being about to decide."""
        if self._engine.resources.membership.gone.get(rank) == CLOSED:
            return True
        return said & _NUMBERS > number or (said & _NUMBERS == number and said < _DECIDES)

    def _made(self, make: Callable[[], Binding], code: int) -> Binding:
        """What is made in a thread of its own, for NCCL waits for ranks that died meanwhile."""
        made: Future[Binding] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001  it belongs to the waiter
                made.set_exception(error)

        threading.Thread(target=run, name="gangline-nccl-join", daemon=True).start()
        watchdog = self._new_watch()
        watchdog.begin(0, code)
        while True:
            try:
                return made.result(_CHECK_SECONDS)
            except TimeoutError:
                if made.done():
                    raise
                watchdog.check(())

    def _are_all_there(self, code: int, is_there: bool) -> bool:
        """Whether all ranks' tensors are on the agreed GPUs; the ranks are at the same call, or that is an error."""
        engine = self._engine
        resources = engine.resources
        with engine.call(code) as sequence:
            slot_exchange = resources.slot_exchange
            if slot_exchange is not None and engine.is_shared("all_gather", 1):
                slots = slot_exchange.slots(1, torch.uint8)
                slots[slot_exchange.parity][slot_exchange.rank].fill_(is_there)
                return all(bool(slot) for slot in slots[engine.meet(sequence, code)])
            flags = torch.zeros(resources.size, dtype=torch.uint8)
            flags[resources.rank] = is_there
            program, chunks = engine.program("all_gather", 1, None)
            engine.run(program, Parts(flags, chunks), sequence, code)
            return bool(flags.all())

    def _attend(self) -> None:
        """While the GPU is at calls, see whether they can end."""
        watchdog = self._new_watch()
        watched: _Running | None = None
        while True:
            with self._lock:
                self._running = [one for one in self._running if not one.event.query()]  # type: ignore[no-untyped-call]
                if not self._running:
                    self._thread = None
                    return
                oldest = self._running[0]
            if oldest is not watched:
                watched = oldest
                watchdog.begin(0, oldest.code)
            try:
                self._engine.check_open()
                watchdog.check(())
            except GanglineError as error:
                self._engine.end(error)
                self.abort()
            time.sleep(_CHECK_SECONDS)

    def _new_watch(self) -> Watchdog:
        """One that another thread may use beside the engine's."""
        resources, bounds = self._engine.resources, limits()
        return Watchdog(
            resources.membership, bounds.timeout if resources.timeout is None else resources.timeout, bounds.stall_warn
        )

    def _say(self, reason: str) -> None:
        if reason not in _said:
            _said.add(reason)
            _log.warning("tensors on GPUs go through host memory, not by NCCL: %s", reason)


_said: set[str] = set()


def _reason(cards: list[list[str | int]]) -> str:
    """Why these ranks cannot be joined by NCCL; "" where they can: problem, host and GPU of each."""
    for rank, (problem, _, _) in enumerate(cards):
        if problem:
            return f"rank {rank}: {problem}"
    positions = [(host, gpu) for _, host, gpu in cards]
    for rank, position in enumerate(positions):
        if position in positions[:rank]:
            return f"ranks {positions.index(position)} and {rank} have the same GPU, and NCCL wants distinct ones"
    return ""

"""Selection between NCCL and host memory for a communicator's collectives on GPU tensors.

The ranks decide once, together, in the first call in which a rank's tensor is on a GPU. A rank whose tensor is on the
CPU makes an ordinary call and takes no part in the decision. Ranks with a GPU tensor therefore propose NCCL through the
membership, which does not disturb ordinary calls. If a rank makes an ordinary call instead, all later calls use host
memory. If all ranks propose, they exchange the data that NCCL needs. Every later call first checks that all tensors are
on the agreed GPUs, and so detects dead ranks and mismatched calls before the GPUs wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

import msgpack
import torch
from torch import Tensor

from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.devices.backends.nccl import DTYPES as NCCL_DTYPES
from gangline.collectives.devices.backends.nccl_bindings import BINDINGS, Binding
from gangline.collectives.devices.nccl_communicator import NcclCommunicator
from gangline.collectives.eager import has_modes, leave_modes
from gangline.collectives.engine.arguments import Call
from gangline.collectives.engine.engine import Engine
from gangline.collectives.engine.host_collectives import HostCollectives
from gangline.collectives.limits import NCCL_CALL_SECONDS
from gangline.collectives.liveness.membership import PROPOSALS, has_closed
from gangline.collectives.transports.base import wait_until

_log = logging.getLogger("gangline")

_PROPOSED, _ALL_PROPOSED = PROPOSALS, PROPOSALS << 1
"""Flags in the published number of a call; ordinary calls have neither."""
_NUMBERS = _PROPOSED - 1
_PAUSE_SECONDS = 0.001
_CHECK_SECONDS = 0.01
_IDLE_SECONDS = 1.0
"""Idle time after which the watching thread ends: starting a thread costs as much as a call."""


class NcclSelection:
    """The decision of one rank's communicator, and its NCCL communicator if NCCL was chosen."""

    def __init__(self, engine: Engine, host: HostCollectives) -> None:
        self.nccl: NcclCommunicator | None = None
        """NCCL's communicator, once the ranks have chosen NCCL."""
        self._engine = engine
        self._host = host
        self._is_decided = False
        self._has_agreed = False
        self._device = torch.device("cpu")
        self._binding: Binding | None = None
        self._lock = threading.Lock()  # guards _binding, _running and _thread
        self._calling = threading.Lock()  # held in calls of the binding: NCCL allows one at a time
        self._running: list[tuple[torch.cuda.Event, int]] = []  # after each call that the GPU runs, and its code
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def run(self, calls: Sequence[Call]) -> None:
        """Run calls of a collective after all earlier ones; with NCCL, several agree once and launch one group."""
        self._engine.wait_for_pending()
        self._engine.lock.acquire()
        modes = leave_modes() if has_modes() else None
        try:
            if modes is not None:
                modes.__enter__()
            is_group = len(calls) > 1 and all(is_known(call.first) for call in calls)
            if is_group and (nccl := self.choose(calls[0].code, *(call.first for call in calls))) is not None:
                self._launch(nccl, calls)
                return
            for call in calls:
                is_plain = is_group or (self.nccl is None and not call.first.is_cuda)
                nccl = None if is_plain else self.choose(call.code, call.first)
                if nccl is None:
                    self._host.run(call)
                else:
                    self._launch(nccl, [call])
        finally:
            if modes is not None:
                modes.__exit__(None, None, None)
            self._engine.lock.release()

    def choose(self, code: int, *tensors: Tensor) -> NcclCommunicator | None:
        """Return NCCL's communicator if a call uses NCCL, or None if it goes through host memory.

        Collective once a rank has passed a tensor on a GPU. Several tensors, none of them empty or of a dtype that NCCL
        lacks, are of calls that are launched as a group.

        Raises:
            GanglineError: if a rank is dead, late or in another call.
        """
        tensor = tensors[0]
        if (self._is_decided or not tensor.is_cuda) and self.nccl is None:
            return None
        if not is_known(tensor):
            return None
        if not self._is_decided:
            self._decide(code, tensor.device)
            self._is_decided = True
            if self.nccl is None:
                return None
        if self._has_agreed:
            return self.nccl
        return self.nccl if all(self._host.gather_flags(code, self._all_here(tensors))) else None

    def _all_here(self, tensors: Sequence[Tensor]) -> bool:
        is_alone = len(tensors) == 1  # a tensor that is not contiguous is copied before its call, and not in a group
        return all(one.device == self._device and (is_alone or one.is_contiguous()) for one in tensors)

    def uses_nccl(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether this rank's calls on ``tensors`` use NCCL, provided that the other ranks' calls do."""
        return self.nccl is not None and bool(tensors) and self._all_here(tensors) and all(map(is_known, tensors))

    @contextmanager
    def skip_check(self) -> Iterator[None]:
        """Skip the check before each call in this context: all ranks already know that `uses_nccl` is true."""
        self._has_agreed = True
        try:
            yield
        finally:
            self._has_agreed = False

    def _launch(self, nccl: NcclCommunicator, calls: Sequence[Call]) -> None:
        """Start one call of a collective, or several together, with NCCL on the current stream of this rank's GPU."""
        code = calls[0].code
        try:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{calls[0].rule.name} was called while a CUDA graph is captured, but ranks agree on each call on "
                    "the host; expected collectives outside of the graph"
                )
            with self._calling:
                self._engine.check_open()  # an abort in another thread has ended the binding
                nccl.launch(calls)
            self._watch_call(code)
        except BaseException as error:  # noqa: BLE001  raised again
            if isinstance(error, Exception):
                self._engine.check_open()  # an abort is the reason for NCCL's error
            raise self._engine.failed(error, code) from None

    def _watch_call(self, code: int) -> None:
        """Watch a call on the current stream, because NCCL would wait forever for a dead rank."""
        event = torch.cuda.current_stream(self._device).record_event()
        with self._lock:
            self._running.append((event, code))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="gangline-nccl", daemon=True)
                self._thread.start()

    def abort(self) -> None:
        """Abort the calls that run on this rank's GPU; callable from any thread, after `Engine.end`.

        A thread inside NCCL has 5 s to leave it; if it waits there for a rank that is gone, the abort ends its call.
        """
        with self._lock:
            binding, self._binding = self._binding, None
            self._running = []
        if binding is not None:
            self._end(binding.abort)

    def close(self) -> None:
        """Wait for running calls and release all resources."""
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            binding, self._binding = self._binding, None
        if binding is not None:  # ncclCommDestroy may wait for ranks that are gone
            self._end(binding.destroy if self._engine.error is None else binding.abort)

    def _end(self, end: Callable[[], None]) -> None:
        is_alone = self._calling.acquire(timeout=NCCL_CALL_SECONDS)
        try:
            end()
        finally:
            if is_alone:
                self._calling.release()

    def _decide(self, code: int, device: torch.device) -> None:
        engine = self._engine
        if not self._all_on_gpus(code):
            self._warn_once("a rank's tensor is on the CPU")
            return
        size, rank = engine.resources.size, engine.resources.rank
        try:
            name = nccl_bindings.selected()
            problem = nccl_bindings.unavailable_reason(name)
            gpu = "" if problem else str(torch.cuda.get_device_properties(device).uuid)
        except BaseException as error:  # noqa: BLE001  raised again
            raise engine.failed(error, code) from None
        reports = [
            msgpack.unpackb(one)
            for one in self._host.exchange(msgpack.packb([problem, engine.resources.hosts[rank], gpu]))
        ]
        reason = _reason(reports)
        if reason:
            self._warn_once(reason)
            return
        try:
            unique_id = self._host.exchange(BINDINGS[name].unique_id() if rank == 0 else b"")[0]
            binding, problem = self._make(lambda: BINDINGS[name].for_rank(device, unique_id, rank, size), code)
            problems = [one.decode() for one in self._host.exchange(problem.encode())]
        except BaseException as error:  # noqa: BLE001  raised again
            raise engine.failed(error, code) from None
        refusing = next((rank for rank, one in enumerate(problems) if one), None)
        if refusing is not None:  # for two parts of one GPU (MIG), for example
            if binding is not None:
                binding.abort()
            self._warn_once(f"rank {refusing}: {problems[refusing]}")
        elif binding is not None:
            self._device, self._binding = device, binding
            self.nccl = NcclCommunicator(binding, rank, size)
            self._engine.hold()  # all calls pass `choose`

    def _all_on_gpus(self, code: int) -> bool:
        """Return whether all ranks make this call with a tensor on a GPU; the result is the same on all ranks."""
        engine = self._engine
        resources = engine.resources
        engine.check_open()
        number = engine.next_number
        with engine.lock:
            resources.watchdog.begin(0, code)  # publish only the numbers below
            try:
                is_agreed = self._wait_for_proposals(number, _PROPOSED, code)
                if is_agreed:  # a rank with the second flag knows that all have the first
                    self._wait_for_proposals(number, _ALL_PROPOSED, code)
            except BaseException as error:  # noqa: BLE001  raised again
                raise engine.failed(error, code) from None
            if not is_agreed:  # else the next call of this number is an exchange, and ranks may be waiting in it
                resources.membership.announce_and_read(number, code)
            return is_agreed

    def _wait_for_proposals(self, number: int, flag: int, code: int) -> bool:
        """Propose NCCL and wait; return True if all ranks propose, False if a rank makes an ordinary call."""
        resources = self._engine.resources
        others = [rank for rank in range(resources.size) if rank != resources.rank]
        passed: set[int] = set()
        missing: list[int] = []

        def is_decided() -> bool:
            nonlocal passed, missing
            resources.membership.announce_and_read(number + flag, code)
            at = {rank: resources.membership.at.get(rank, (0, 0))[0] for rank in others}
            passed = {rank for rank in others if self._is_ordinary(rank, at[rank], number)}
            missing = [rank for rank in others if rank not in passed and at[rank] < number + flag]
            return not missing or (flag == _PROPOSED and bool(passed))

        wait_until(is_decided, lambda _: time.sleep(_PAUSE_SECONDS), lambda: resources.watchdog.check(missing))
        return not passed

    def _is_ordinary(self, rank: int, published: int, number: int) -> bool:
        """Return whether a rank has reached the call, or a later one, without a proposal."""
        if has_closed(self._engine.resources.membership.gone.get(rank)):
            return True
        return published & _NUMBERS > number or (published & _NUMBERS == number and published < _PROPOSED)

    def _make(self, make: Callable[[], Binding], code: int) -> tuple[Binding | None, str]:
        """Run ``make`` in a thread, because NCCL waits for ranks that may have died; return its result or its error."""
        made: Future[Binding] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001  raised by the waiting thread
                made.set_exception(error)

        threading.Thread(target=run, name="gangline-nccl-join", daemon=True).start()
        watchdog = self._engine.resources.watchdog.another()
        watchdog.begin(0, code)
        wait_until(made.done, lambda _: wait([made], _CHECK_SECONDS), lambda: watchdog.check(()))
        error = made.exception()
        return (made.result(), "") if error is None else (None, f"{type(error).__name__}: {error}")

    def _watch(self) -> None:
        """Check that running calls can end."""
        torch.cuda.set_device(self._device)  # a thread begins on GPU 0, where a query would take memory
        _allow_queries_during_capture()
        watchdog = self._engine.resources.watchdog.another()

        def check() -> None:
            self._engine.check_open()
            watchdog.check(())

        ends_at = time.monotonic() + _IDLE_SECONDS
        while True:
            with self._lock:
                oldest = self._running[0] if self._running else None
                if oldest is None and (self._closing.is_set() or time.monotonic() > ends_at):
                    self._thread = None
                    return
            if oldest is None:
                self._closing.wait(_CHECK_SECONDS)
                continue
            ends_at = time.monotonic() + _IDLE_SECONDS
            event, code = oldest
            watchdog.begin(0, code)
            try:
                wait_until(event.query, lambda _: time.sleep(_CHECK_SECONDS), check)
                with self._lock:
                    self._running = self._running[1:]  # empty after an abort
            except BaseException as error:  # noqa: BLE001  of CUDA too: later calls of all ranks raise it
                self._engine.failed(error, code)
                self.abort()

    def _warn_once(self, reason: str) -> None:
        if reason not in _warned:
            _warned.add(reason)
            _log.warning("tensors on GPUs go through host memory, not by NCCL: %s", reason)


def _allow_queries_during_capture() -> None:
    """Allow this thread to query events while another one captures a CUDA graph, which otherwise becomes invalid."""
    with suppress(OSError):  # no driver: a simulated GPU
        relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


_warned: set[str] = set()


def is_known(tensor: Tensor) -> bool:
    """Return whether NCCL supports the tensor; the result is the same on all ranks."""
    return tensor.dtype in NCCL_DTYPES and tensor.numel() > 0


def _reason(reports: list[list[str | int]]) -> str:
    """Return why these ranks cannot use NCCL, "" if they can; a report is a rank's problem, host and GPU."""
    for rank, (problem, _, _) in enumerate(reports):
        if problem:
            return f"rank {rank}: {problem}"
    gpus = [(host, gpu) for _, host, gpu in reports]
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            return f"ranks {gpus.index(gpu)} and {rank} have the same GPU, and NCCL needs distinct ones"
    return ""

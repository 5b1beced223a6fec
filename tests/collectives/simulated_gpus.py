"""Simulated GPUs: tensors on them, streams that run in any order that events allow, and NCCL.

An operation on a default stream runs only when a caller waits for it or queries it, so that code which reads a value
without waiting for it gets the old one. Those on side streams run late too, or as early as they can ("early"), or
either, by chance: a section that does not wait for the caller's stream then reads what is not written yet. Tests run in
several orders by the fixture `stream_order`.

What this cannot show: speed, memory that a kernel writes outside its tensors, and the order of kernels on one stream of
different libraries.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.engine import host_staging

ELEMENTS = {0: torch.int8, 1: torch.uint8, 2: torch.int32, 4: torch.int64, 6: torch.float16, 7: torch.float32}
ELEMENTS |= {8: torch.float64, 9: torch.bfloat16}
FUNCTIONS = {0: torch.add, 1: torch.mul, 2: torch.maximum, 3: torch.minimum}
"""Dtypes and operations by their numbers in NCCL."""
_MEAN = 4
aten = torch.ops.aten
_LIMIT = 20.0
_lock = threading.RLock()
_here = threading.local()
_defaults: dict[torch.device, Stream] = {}
_streams: dict[int, Stream] = {}
_AT_ONCE = {aten.detach.default, aten.view.default, aten.as_strided.default, aten.new_empty.default, aten.t.default}
_FOR_THE_HOST = {aten._local_scalar_dense.default, aten.equal.default}
_AT_ONCE |= {aten.select.int, aten.slice.Tensor, aten.transpose.int, aten.unbind.int, aten.alias.default}


_is_early: Callable[[], bool] = bool


@contextmanager
def side_streams_run(order: str) -> Iterator[None]:
    """Run side streams "early", "late", or either by chance, which the string seeds."""
    global _is_early
    draw = random.Random(order).random
    of_order: dict[str, Callable[[], bool]] = {"late": lambda: False, "early": lambda: True}
    _is_early = of_order.get(order, lambda: draw() < 0.5)
    try:
        yield
    finally:
        _is_early = bool


class Stream:
    """Queue of operations; each returns True if it could run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with _lock:
            self.cuda_stream = len(_streams) + 1
            _streams[self.cuda_stream] = self
        self._operations: deque[Callable[[], bool]] = deque()
        self._put = self._done = 0
        self._is_running = False

    def put(self, operation: Callable[[], bool]) -> None:
        with _lock:
            self._operations.append(operation)
            self._put += 1
            is_side = all(self is not default for default in _defaults.values())
            if is_side and not self._is_running and _is_early():  # not when an operation frees a tensor
                self.reach(self._put)

    def reach(self, number: int) -> bool:
        with _lock:
            before, self._is_running = self._is_running, True
            try:
                while self._done < number:
                    if not self._operations[0]():
                        return False
                    self._operations.popleft()
                    self._done += 1
                return True
            finally:
                self._is_running = before

    def record_event(self) -> Event:
        return Event(self, self._put)

    def wait_event(self, event: Event) -> None:
        self.put(event.query)


class Event:
    waits: ClassVar[int] = 0
    """Number of times that the host has waited for a GPU."""

    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.reach(self._number)

    def synchronize(self) -> None:
        Event.waits += 1
        until = time.monotonic() + _LIMIT
        while not self.query():
            assert time.monotonic() < until, "what a stream waits for does not come"
            time.sleep(0.001)


class SimulatedGpuTensor(torch.Tensor):
    """Tensor on a simulated GPU: only operations on a stream of the GPU may read and write it."""

    inner: Tensor
    card: torch.device
    streams: set[Stream]
    """Streams that may still use the memory: the one on which it was allocated, and recorded ones."""

    @staticmethod
    def __new__(cls, inner: Tensor, card: torch.device) -> SimulatedGpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner, made.card, made.streams = inner, card, {current_stream(card)}
        return made

    def __del__(self) -> None:
        """Free the memory after the streams' earlier operations, as the allocator of CUDA does."""
        inner = self.inner
        for stream in self.streams:
            stream.put(lambda: inner is not None)

    device = property(lambda self: self.card)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        assert stream.device == self.card
        self.streams.add(stream)

    def host(self) -> Tensor:
        """Return the values after the current stream's earlier operations."""
        current_stream(self.card).record_event().synchronize()
        return self.inner.clone()

    def tolist(self) -> Any:
        return self.host().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        card = next(leaf.card for leaf in leaves if isinstance(leaf, SimulatedGpuTensor))
        inner = [_inner(arg) for arg in args]
        stream = current_stream(card)
        if func in _FOR_THE_HOST or (func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")):
            stream.record_event().synchronize()
            return func(*inner, **kwargs)
        if func in _AT_ONCE or func.is_view:
            made = func(*inner, **{name: value for name, value in kwargs.items() if name == "dtype"})
            return (
                [SimulatedGpuTensor(one, card) for one in made]
                if isinstance(made, (list, tuple))
                else SimulatedGpuTensor(made, card)
            )
        if func is aten.clone.default:
            memory_format = kwargs.get("memory_format", torch.preserve_format)
            made = torch.empty_like(inner[0], memory_format=memory_format)
            stream.put(lambda: made.copy_(inner[0]) is not None)
            return SimulatedGpuTensor(made, card)
        if func is not aten.copy_.default:
            return _kernel(func, args, kwargs, card)
        stream.put(lambda: func(*inner) is not None)
        waits = func is aten.copy_.default and not (len(args) > 2 and args[2])
        if waits and not all(isinstance(arg, SimulatedGpuTensor) for arg in args[:2]):
            stream.record_event().synchronize()
        return args[0]


def _kernel(func: Any, args: Any, kwargs: Any, card: torch.device) -> Any:
    """Put any operation on the current stream; return the tensors that it writes, or will write."""
    inner, options = tree_map(_inner, args), tree_map(_inner, kwargs)
    name = func._schema.name
    if name.endswith("_") or "out" in kwargs:

        def write() -> bool:
            func(*inner, **options)
            return True

        current_stream(card).put(write)
        return kwargs.get("out", args[0]) if func._schema.returns else None
    try:
        shapes = func(*tree_map(_on_meta, inner), **tree_map(_on_meta, options))
    except NotImplementedError:  # torch has no shapes for this operation without values
        shapes = func(*tree_map(_copy, inner), **tree_map(_copy, options))
    made = tree_map(lambda shape: torch.empty_like(shape, device="cpu"), shapes)

    def run() -> bool:
        for out, value in zip(tree_leaves(made), tree_leaves(func(*inner, **options)), strict=True):
            if value.numel():  # the host's batch normalization returns nothing where that of a GPU does
                out.copy_(value)
        return True

    current_stream(card).put(run)
    return tree_map(lambda out: SimulatedGpuTensor(out, card), made)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, SimulatedGpuTensor) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _made_there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch that creates a tensor, on the simulated GPU that ``device`` names."""

    def made(*args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(*args, device=device, **options)
        values = make(*[_inner(arg) for arg in args], device="cpu", **options)
        return on_simulated_gpu(values, torch.device(device).index)

    return made


_to = Tensor.to


def _moved(tensor: Tensor, *args: Any, copy: bool = False, **options: Any) -> Tensor:
    """Run `Tensor.to`, which may name a simulated GPU."""
    given = [arg for arg in args if isinstance(arg, torch.device)]
    device = given[0] if given else options.get("device")
    if not isinstance(device, torch.device) or device.type != "cuda":
        return _to(tensor, *args, copy=copy, **options)
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype)
    if tensor.device == device and tensor.dtype == dtype and not copy:
        return tensor
    if isinstance(tensor, SimulatedGpuTensor) and tensor.device != device:
        return _copied_between_gpus(tensor, device, dtype)
    return on_simulated_gpu(
        _to(tensor.host() if isinstance(tensor, SimulatedGpuTensor) else tensor, dtype), device.index
    )


def _copied_between_gpus(tensor: SimulatedGpuTensor, device: torch.device, dtype: torch.dtype) -> SimulatedGpuTensor:
    """Copy as torch does, for which the host waits in no case: in the order of both GPUs' current streams."""
    made = on_simulated_gpu(torch.empty_like(tensor.inner, dtype=dtype), device.index)
    source, target = current_stream(tensor.device), current_stream(device)
    target.wait_event(source.record_event())  # type: ignore[arg-type]
    target.put(lambda: made.inner.copy_(tensor.inner) is not None)
    source.wait_event(target.record_event())  # type: ignore[arg-type]
    return made


def on_simulated_gpu(values: Tensor, index: int = 0) -> SimulatedGpuTensor:
    """Return a tensor on a simulated GPU; a kernel on the current stream writes its values."""
    card = torch.device("cuda", index)
    made = SimulatedGpuTensor(torch.full_like(values, 77 if values.dtype != torch.bool else True), card)
    kept = values.clone()
    current_stream(card).put(lambda: made.inner.copy_(kept) is not None)
    return made


def current_stream(device: torch.device) -> Stream:
    chosen: dict[torch.device, Stream] = _here.__dict__
    with _lock:
        if device not in _defaults:
            _defaults[device] = Stream(device)
        return chosen.get(str(device)) or _defaults[device]  # type: ignore[call-overload,no-any-return]


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    chosen = _here.__dict__
    before = chosen.get(str(stream.device))
    chosen[str(stream.device)] = stream
    try:
        yield
    finally:
        chosen[str(stream.device)] = before


def reduced(values: Sequence[Tensor], op: int) -> Tensor:
    """Reduce as NCCL, which divides floating-point numbers before it adds them for a mean."""
    if op == _MEAN:
        return reduce(torch.add, [value / len(values) for value in values])
    return reduce(FUNCTIONS[op], values)


class NcclCalls:
    """Collective calls of a binding of NCCL, each as one `_call` with all arguments; op and root are 0 if not used."""

    def all_reduce(self, position: int, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._call("all_reduce", position, source, target, count, dtype, op, 0, stream)

    def reduce(
        self, position: int, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        self._call("reduce", position, source, target, count, dtype, op, root, stream)

    def broadcast(
        self, position: int, source: int, target: int, count: int, dtype: int, root: int, stream: int
    ) -> None:
        self._call("broadcast", position, source, target, count, dtype, 0, root, stream)

    def all_gather(self, position: int, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        self._call("all_gather", position, source, target, count, dtype, 0, 0, stream)

    def reduce_scatter(
        self, position: int, source: int, target: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        self._call("reduce_scatter", position, source, target, count, dtype, op, 0, stream)

    def _call(self, name: str, *arguments: int) -> None:
        raise NotImplementedError


class HostRank(NcclCalls):
    """NCCL by its manual, for ranks in threads: a call ends on a stream once all ranks' calls have begun."""

    calls: ClassVar[list[tuple[str, int]]] = []
    """Calls of all communicators in order, with the number of ranks that have made each."""
    fails_at: ClassVar[dict[int, str]] = {}
    """Call in which a rank raises an error, by rank."""
    _shared: ClassVar[defaultdict[bytes, dict[Any, Any]]] = defaultdict(lambda: defaultdict(dict))
    _ids = iter(range(1, 1 << 20))

    def __init__(self, device: torch.device, unique_id: bytes, rank: int, size: int) -> None:
        assert len(unique_id) == 128
        self.is_aborted = False
        self.is_destroyed = False
        self._device, self._rank, self._size = device, rank, size
        with _lock:  # the ranks are threads, and a defaultdict can give two of them different values
            self._table = self._shared[unique_id]
        self._number = 0
        self._group: list[tuple[str, int, int, int, int]] | None = None

    @classmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> HostRank:
        return cls(device, unique_id, rank, size)

    @classmethod
    def unique_id(cls) -> bytes:
        return next(cls._ids).to_bytes(128, "little")

    def start(self) -> None:
        assert self._group is None
        self._group = []

    def end(self) -> None:
        assert self._group is not None
        group, self._group = self._group, None
        if not group:
            return
        posted: list[None] = []
        taken = [one for one in group if one[0] == "receive"]
        given = [one for one in group if one[0] == "send"]

        def messages() -> bool:
            if not posted:
                posted.append(None)
                for _, address, nbytes, to, _ in given:
                    self._table["from", self._rank, to].setdefault("queue", deque()).append(
                        at(address, nbytes, 1).clone()
                    )
            while taken and not self.is_aborted:
                _, address, nbytes, source, _ = taken[0]
                queue = self._table["from", source, self._rank].get("queue")
                if not queue:
                    return False
                at(address, nbytes, 1).copy_(queue.popleft())
                taken.pop(0)
            return True

        _streams[group[0][4]].put(messages)

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        assert self._group is not None
        self._group.append(("send", source, nbytes, to, stream))

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        assert self._group is not None
        self._group.append(("receive", target, nbytes, source, stream))

    def abort(self) -> None:
        assert not self.is_destroyed
        self.is_aborted = True

    def destroy(self) -> None:
        assert not self.is_aborted
        self.is_destroyed = True

    def _call(self, name: str, *arguments: int) -> None:
        _, source, target, count, dtype, op, root, stream = arguments
        given = count * self._size if name == "reduce_scatter" else count
        taken = count * self._size if name == "all_gather" else count
        if self.fails_at.get(self._rank) == name:
            raise RuntimeError(f"NCCL has had enough of {name}")
        self._number += 1
        with _lock:
            there = self._table["call", self._number]
        own: list[Tensor] = []

        def kernel() -> bool:
            if self.is_aborted:
                return True
            if not own:
                own.append(at(source, given, dtype).clone())
                there[self._rank] = (own[0], (name, given, taken, dtype, op, root))
                HostRank.calls.append((name, len(there)))
            if len(there) < self._size:
                return False
            assert len({said for _, said in there.values()}) == 1
            values = [there[rank][0] for rank in range(self._size)]
            if name == "broadcast":
                at(target, taken, dtype).copy_(values[root])
            elif name == "all_gather":
                at(target, taken, dtype).copy_(torch.cat(values))
            elif name != "reduce" or self._rank == root:
                first = self._rank * taken if name == "reduce_scatter" else 0
                at(target, taken, dtype).copy_(reduced(values, op)[first : first + taken])
            return True

        _streams[stream].put(kernel)


def at(address: int, count: int, dtype: int) -> Tensor:
    element = ELEMENTS[dtype]
    octets = (ctypes.c_uint8 * (count * element.itemsize)).from_address(address)
    return torch.frombuffer(octets, dtype=element) if count else torch.empty(0, dtype=element)


def _host_memory(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count * dtype.itemsize,), 0x5A if dtype != torch.bool else 0, dtype=torch.uint8).view(dtype)


@contextmanager
def simulated_gpus(*, nccl: str = "") -> Iterator[None]:
    """Simulate a machine with GPUs.

    Args:
        nccl: reason why NCCL cannot be used; "" if it can.
    """
    _defaults.clear()
    HostRank.calls = []
    HostRank.fails_at = {}
    Event.waits = 0
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "current_stream", current_stream),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", _on),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")),
            (host_staging, "pinned_memory", _host_memory),
            (nccl_bindings, "missing", lambda name: nccl),
        ):
            stack.enter_context(patch.object(target, name, value))
        for name in ("empty", "empty_like", "zeros"):
            stack.enter_context(patch.object(torch, name, _made_there(getattr(torch, name))))
        stack.enter_context(patch.object(Tensor, "to", _moved))
        stack.enter_context(patch.dict(nccl_bindings.BINDINGS, dict.fromkeys(nccl_bindings.BINDINGS, HostRank)))
        yield

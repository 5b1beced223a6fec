"""Simulated GPUs: tensors on them, streams that run in any order that events allow, and NCCL.

An operation on a default stream runs only when a caller waits for it or queries it, so that code which reads a value
without waiting for it gets the old one. Those on side streams run late too, or as early as they can ("early"), or
either, by chance: a section that does not wait for the caller's stream then reads what is not written yet. Tests run in
several orders by the fixture `stream_order`.

Memory that is freed is poisoned after the work of its own stream and of those that `record_stream` named, and must not
be written afterwards. The first call of NCCL between ranks waits until both are in it. A graph's capture forbids waits
and queries, events have times, and `counted` counts what a step has the host do.

What this cannot show: speed, and whether kernels and copies overlap; memory that a kernel writes outside its tensors,
or that is too little; freed memory that other work happens to read before it is poisoned; host memory that changes
while a ``non_blocking`` `Tensor.to` copies from it, because that takes the values at once; kernels of one stream from
different libraries; the replay of a graph, whose kernels run once; contexts of CUDA on other GPUs; times between two
streams; and operations whose results' sizes depend on values.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gangline.collectives.devices import device_group, nccl_selection
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.engine import host_staging

ELEMENTS = {0: torch.int8, 1: torch.uint8, 2: torch.int32, 4: torch.int64, 6: torch.float16, 7: torch.float32}
ELEMENTS |= {8: torch.float64, 9: torch.bfloat16}
FUNCTIONS = {0: torch.add, 1: torch.mul, 2: torch.maximum, 3: torch.minimum}
"""Dtypes and operations by their numbers in NCCL."""
_MEAN = 4
aten = torch.ops.aten
LIMIT_SECONDS = 20.0
GPUS = 4
POISON = 77
"""Value of memory that nothing has written yet, and byte of freed memory."""
_lock = threading.RLock()
_here = threading.local()
_defaults: dict[torch.device, Stream] = {}
_streams: dict[int, Stream] = {}
_captured: dict[Stream, Stream] = {}
"""Streams that graphs are captured from, each with the first one of its graph."""
_refused: list[str] = []
"""Threads that made a call which is forbidden meanwhile."""
_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
_freed: list[torch.UntypedStorage] = []
_AT_ONCE = {aten.detach.default, aten.view.default, aten.as_strided.default, aten.new_empty.default, aten.t.default}
_FOR_THE_HOST = {aten._local_scalar_dense.default, aten.equal.default}
_AT_ONCE |= {aten.select.int, aten.slice.Tensor, aten.transpose.int, aten.unbind.int, aten.alias.default}

for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("aten::"):  # torch 2.13 frees an operation that two threads look up first at once
        _packet, _, _overload = _name.removeprefix("aten::").partition(".")
        getattr(getattr(aten, _packet), _overload or "default")

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
            self.append(operation)
            is_side = all(self is not default for default in _defaults.values())
            if is_side and not self._is_running and _is_early():
                self.reach(self._put)

    def append(self, operation: Callable[[], bool]) -> None:
        """Put an operation that does not run yet, whatever the order."""
        with _lock:
            self._operations.append(operation)
            self._put += 1

    def reach(self, number: int) -> bool:
        with _lock:
            if self._is_running:
                return self._done >= number
            self._is_running = True
            try:
                while self._done < number:
                    if not self._operations[0]():
                        return False
                    self._done += 1
                    self._operations.popleft()
                return True
            finally:
                self._is_running = False

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        stream, number = event._stream, event._number
        if stream in _captured:  # the capture goes on here
            _captured[self] = _captured[stream]
        self.put(lambda: stream.reach(number))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def drop(self) -> None:
        self._operations.clear()
        self._done = self._put


class Event:
    """Event whose time, in milliseconds, is the number of operations that its stream has got before it."""

    waits: ClassVar[int] = 0
    """Number of times that the host has waited for a GPU."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing

    device = property(lambda self: self._stream.device)

    def record(self, stream: Any) -> None:
        self._stream: Stream = stream
        self._number = stream._put
        self._is_complete = False

    def query(self) -> bool:
        _refuse_in_capture()
        self._is_complete = self._stream.reach(self._number)
        return self._is_complete

    def synchronize(self) -> None:
        Event.waits += 1
        if not self._is_complete:  # as far as the host knows
            _count(self.device).waits.append(threading.current_thread().name)
        _wait_until(self.query, f"an event on {self.device}")

    def elapsed_time(self, end: Event) -> float:
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        assert self._stream is end._stream, "times are simulated on one stream only"
        return float(end._number - self._number)


def _wait_until(is_true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not is_true():
        if time.monotonic() > until:
            raise RuntimeError(f"a simulated GPU waited {LIMIT_SECONDS:g} s for {what}, which does not come")
        time.sleep(0.001)


@dataclass
class Counts:
    """Counts of what a GPU cost the host: waits, by the waiting thread's name, and elements of copies."""

    waits: list[str] = field(default_factory=list)
    to_host: list[int] = field(default_factory=list)
    to_gpu: list[int] = field(default_factory=list)


_counts: dict[torch.device, Counts] = {}


@contextmanager
def counted(index: int = 0) -> Iterator[Counts]:
    """Count from here on what a GPU has the host do, in all threads."""
    _counts[torch.device("cuda", index)] = counts = Counts()
    yield counts
    del _counts[torch.device("cuda", index)]


def _count(card: torch.device) -> Counts:
    return _counts.get(card) or Counts()


@contextmanager
def capture(stream: Any) -> Iterator[None]:
    """Capture a stream as `torch.cuda.graph` does: until the end no thread may query or wait, unless it is relaxed.

    What is captured runs once, as if the graph was replayed once.
    """
    _captured[stream], refused = stream, len(_refused)
    try:
        with _on(stream):
            yield
    finally:
        for joined in [one for one, first in _captured.items() if first is stream]:
            del _captured[joined]
    if len(_refused) > refused:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def _is_capturing() -> bool:
    return current_stream(torch.device("cuda", _current_device())) in _captured


def _refuse_in_capture() -> None:
    if _captured and not getattr(_here, "is_relaxed", False):
        _refused.append(threading.current_thread().name)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _relax() -> None:
    _here.is_relaxed = True


class _Memory:
    """Memory of tensors; once there are none, other tensors may get it when its streams have done their work."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        self.storage, self.streams = storage, {stream}

    def __del__(self) -> None:
        """Poison the memory after the earlier operations of all its streams."""
        storage, left = self.storage, len(self.streams)

        def free() -> bool:
            nonlocal left
            left -= 1
            if not left:
                storage.fill_(POISON)
                _freed.append(storage)
            return True

        for stream in self.streams:
            stream.append(free)


class SimulatedGpuTensor(torch.Tensor):
    """Tensor on a simulated GPU: only operations on a stream of the GPU may read and write it."""

    inner: Tensor
    card: torch.device
    memory: _Memory

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
        made.inner, made.card = inner, card
        storage = inner.untyped_storage()
        with _lock:
            made.memory = _memories.get(storage.data_ptr()) or _Memory(storage, current_stream(card))
            if storage.nbytes():
                _memories[storage.data_ptr()] = made.memory
        return made

    device = property(lambda self: self.card)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: SimulatedGpuTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.inner, self.card, self.memory = value.inner, value.card, value.memory

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        assert stream.device == self.card
        self.memory.streams.add(stream)

    def host(self) -> Tensor:
        """Return the values after the current stream's earlier operations, for a test: it is not counted."""
        event = current_stream(self.card).record_event()
        _wait_until(event.query, f"the values on {self.card}")
        return self.inner.clone()

    def tolist(self) -> Any:
        current_stream(self.card).synchronize()
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        card = next(leaf.card for leaf in leaves if isinstance(leaf, SimulatedGpuTensor))
        inner = [_inner(arg) for arg in args]
        stream = current_stream(card)
        if func in _FOR_THE_HOST or (func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")):
            stream.synchronize()
            _count(card).to_host.append(inner[0].numel())
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
        on_gpu = [isinstance(arg, SimulatedGpuTensor) for arg in args[:2]]
        if all(on_gpu) and args[1].card != card:  # as torch: on the source's stream, between both streams' work
            source = current_stream(args[1].card)
            source.wait_event(stream.record_event())
            source.put(lambda: func(*inner) is not None)
            stream.wait_event(source.record_event())
            return args[0]
        stream.put(lambda: func(*inner) is not None)
        if not all(on_gpu):
            (_count(card).to_gpu if on_gpu[0] else _count(card).to_host).append(args[0].numel())
            if not (len(args) > 2 and args[2]):
                stream.synchronize()
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
    except NotImplementedError:  # the operation has no kernel that gives shapes alone
        shapes = func(*tree_map(_as_ones, inner), **tree_map(_as_ones, options))
    made = tree_map(lambda shape: torch.empty_like(shape, device="cpu"), shapes)

    def run() -> bool:
        for out, value in zip(tree_leaves(made), tree_leaves(func(*inner, **options)), strict=True):
            if value.numel():  # a CPU kernel may leave out what a GPU's gives
                out.copy_(value)
        return True

    current_stream(card).put(run)
    return tree_map(lambda out: SimulatedGpuTensor(out, card), made)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, SimulatedGpuTensor) else value


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _as_ones(value: Any) -> Any:
    return torch.ones_like(value) if isinstance(value, Tensor) else value


def _made_there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch that creates a tensor, on the simulated GPU that ``device`` names."""

    def made(*args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(*args, device=device, **options)
        values, card = make(*[_inner(arg) for arg in args], device="cpu", **options), torch.device(device)
        if make is _tensor:
            _count_upload(values, card)
        return on_simulated_gpu(values, card.index)

    return made


_tensor, _to = torch.tensor, Tensor.to


def _count_upload(values: Tensor, card: torch.device, *, waits: bool = True) -> None:
    _count(card).to_gpu.append(values.numel())
    if waits:
        current_stream(card).synchronize()


def _moved(tensor: Tensor, *args: Any, copy: bool = False, **options: Any) -> Tensor:
    """Run `Tensor.to`, which may name a simulated GPU; the result has no autograd history."""
    given = [arg for arg in args if isinstance(arg, torch.device)]
    device = given[0] if given else options.get("device")
    if not isinstance(device, torch.device) or device.type != "cuda":
        return _to(tensor, *args, copy=copy, **options)
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype)
    if tensor.device == device and tensor.dtype == dtype and not copy:
        return tensor
    if isinstance(tensor, SimulatedGpuTensor) and tensor.device != device:
        return _copied_between_gpus(tensor, device, dtype)
    if isinstance(tensor, SimulatedGpuTensor):
        return on_simulated_gpu(torch.empty_like(tensor.inner, dtype=dtype), device.index).copy_(tensor.detach())
    waits = not (options.get("non_blocking") or any(arg is True for arg in args))
    _count_upload(tensor, device, waits=waits)
    return on_simulated_gpu(_to(tensor, dtype), device.index)


def _copied_between_gpus(tensor: SimulatedGpuTensor, device: torch.device, dtype: torch.dtype) -> SimulatedGpuTensor:
    """Copy as torch does, for which the host waits in no case: in the order of both GPUs' current streams."""
    made = on_simulated_gpu(torch.empty_like(tensor.inner, dtype=dtype), device.index)
    source, target = current_stream(tensor.device), current_stream(device)
    target.wait_event(source.record_event())
    target.put(lambda: made.inner.copy_(tensor.inner) is not None)
    source.wait_event(target.record_event())
    return made


def on_simulated_gpu(values: Tensor, index: int = 0) -> SimulatedGpuTensor:
    """Return a tensor on a simulated GPU; a kernel on the current stream writes its values."""
    card = torch.device("cuda", index)
    inner, kept = torch.full_like(values, POISON if values.dtype != torch.bool else True), values.clone()
    current_stream(card).put(lambda: inner.copy_(kept) is not None)
    return SimulatedGpuTensor(inner, card)


def current_stream(device: torch.device) -> Stream:
    chosen: dict[torch.device, Stream] = _here.__dict__
    with _lock:
        if device not in _defaults:
            _defaults[device] = Stream(device)
        return chosen.get(str(device)) or _defaults[device]


def _current_device() -> int:
    return getattr(_here, "index", 0)


def _set_device(device: Any) -> None:
    _here.index = torch.device("cuda", device).index if isinstance(device, int) else device.index


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    chosen, index = _here.__dict__, _current_device()
    before = chosen.get(str(stream.device))
    chosen[str(stream.device)] = stream
    _here.index = stream.device.index
    try:
        yield
    finally:
        chosen[str(stream.device)] = before
        _here.index = index


def reduced(values: Sequence[Tensor], op: int) -> Tensor:
    """Reduce as NCCL, which divides floating-point numbers before it adds them for a mean."""
    if op == _MEAN:
        return reduce(torch.add, [value / len(values) for value in values])
    return reduce(FUNCTIONS[op], values)


class NcclCalls:
    """Collective calls of a binding of NCCL, each as one `_call` with all arguments; op and root are 0 if not used."""

    _group: list[Any] | None = None
    """Calls since the group's start."""

    def start(self) -> None:
        assert self._group is None
        self._group = []

    def _ended(self) -> list[Any]:
        assert self._group is not None
        group, self._group = self._group, None
        return group

    def call(self, name: str, position: int, *arguments: int) -> None:
        source, target, count, dtype, *options, stream = arguments
        op = options.pop(0) if "reduce" in name else 0
        root = options.pop() if name in ("reduce", "broadcast") else 0
        assert not options
        self._call(name, position, source, target, count, dtype, op, root, stream)

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
        self._rank, self._size = rank, size
        with _lock:  # the ranks are threads, and a defaultdict can give two of them different values
            self._table = self._shared[unique_id]
        self._number = 0
        self._grouped: list[tuple[Any, ...]] = []  # collective calls since the group's start

    @classmethod
    def for_rank(cls, device: torch.device, unique_id: bytes, rank: int, size: int) -> HostRank:
        return cls(device, unique_id, rank, size)

    @classmethod
    def for_gpus(cls, gpus: Sequence[int]) -> HostGpus:
        return HostGpus(gpus)

    @classmethod
    def unique_id(cls) -> bytes:
        return next(cls._ids).to_bytes(128, "little")

    def end(self) -> None:
        group, grouped, self._grouped = self._ended(), self._grouped, []
        for name, *arguments in grouped:
            self._call(name, *arguments)
        if not group:
            return
        self._connect({peer for _, _, _, peer, _ in group})
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

    def _connect(self, peers: Iterable[int]) -> None:
        """Block until these ranks are in a call with this one too, as NCCL does in the first call of two ranks."""
        reached = self._table["connections"]
        reached.update({(self._rank, peer): None for peer in peers})
        _wait_until(
            lambda: self.is_aborted or all((peer, self._rank) in reached for peer in peers),
            f"ranks {sorted(peers)} to be in a call of NCCL with rank {self._rank}",
        )
        if self.is_aborted:
            raise RuntimeError("NCCL's call was aborted")

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
        if self.fails_at.get(self._rank) == name:
            raise RuntimeError(f"NCCL has had enough of {name}")
        if self._group is not None:
            self._grouped.append((name, *arguments))
            return
        self._connect(range(self._size))
        self.launch(name, *arguments)

    def launch(self, name: str, *arguments: int) -> None:
        _, source, target, count, dtype, op, root, stream = arguments
        given = count * self._size if name == "reduce_scatter" else count
        taken = count * self._size if name == "all_gather" else count
        self._number += 1
        with _lock:
            there, streams = self._table["call", self._number], self._table["streams", self._number]
        own: list[Tensor] = []

        def kernel() -> bool:
            if self.is_aborted:
                return True
            if not own:
                own.append(at(source, given, dtype).clone())
                there[self._rank] = (own[0], (name, given, taken, dtype, op, root))
                HostRank.calls.append((name, len(there)))
            for other, number in list(streams.items()):  # other GPUs run too while this one waits
                other.reach(number)
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

        with _lock:
            streams[_streams[stream]] = _streams[stream]._put + 1
            _streams[stream].put(kernel)


class HostGpus(NcclCalls):
    """NCCL for the GPUs of one process, whose calls meet at the end of a group."""

    groups: ClassVar[list[list[str]]] = []
    """Names of the calls of each group of all communicators."""

    def __init__(self, gpus: Sequence[int]) -> None:
        unique_id, size = HostRank.unique_id(), len(gpus)
        self._ranks = [HostRank(torch.device("cuda", gpu), unique_id, index, size) for index, gpu in enumerate(gpus)]

    def end(self) -> None:
        group = self._ended()
        self.groups.append([name for _, (name, *_) in group])
        for position, call in group:
            self._ranks[position].launch(*call)

    def _call(self, name: str, *arguments: int) -> None:
        assert self._group is not None, f"{name} outside of a group waits for the other GPUs for ever"
        self._group.append((arguments[0], (name, *arguments)))


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
    _freed.clear()
    HostRank.calls = []
    HostRank.fails_at = {}
    Event.waits = 0
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "current_stream", current_stream),
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "stream", _on),
            (torch.cuda, "set_device", _set_device),
            (torch.cuda, "current_device", _current_device),
            (torch.cuda, "is_current_stream_capturing", _is_capturing),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")),
            (torch.cuda, "get_device_name", lambda device: "GPU"),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "device_count", lambda: GPUS),
            (torch.cuda, "can_device_access_peer", lambda one, other: True),
            (torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(GPUS))),
            (device_group, "_groups", {}),
            (host_staging, "pinned_memory", _host_memory),
            (nccl_bindings, "unavailable_reason", lambda name: nccl),
            (nccl_selection, "_allow_queries_during_capture", _relax),
        ):
            stack.enter_context(patch.object(target, name, value))
        for name in ("empty", "empty_like", "zeros", "tensor"):
            stack.enter_context(patch.object(torch, name, _made_there(getattr(torch, name))))
        stack.enter_context(patch.object(Tensor, "to", _moved))
        stack.enter_context(patch.dict(nccl_bindings.BINDINGS, dict.fromkeys(nccl_bindings.BINDINGS, HostRank)))
        yield
        with _lock:
            for stream in _streams.values():
                stream.reach(stream._put)
            for stream in _streams.values():
                stream.drop()
        for storage in _freed:
            values = torch.tensor([], dtype=torch.uint8).set_(storage)
            assert (values == POISON).all(), "freed memory was written: record_stream() lacks the stream that writes"

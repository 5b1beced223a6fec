"""NCCL backend for distinct GPUs: one thread makes the calls of every position, on each GPU's current stream."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer
from gangline.collectives.devices.backends.nccl_bindings import BINDINGS, Binding
from gangline.collectives.thread_pool import ProcessLock

_log = logging.getLogger("gangline")

# The enumerators of nccl.h, stable across releases: bindings name them differently, or lack newer ones.
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.bool: 1,  # bytes of 0 and 1
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3, "mean": 4}
_BOOL_OPS = {"sum": 2, "max": 2, "product": 3, "min": 3}  # on 0 and 1, "or" is max and "and" is min

_Call = tuple[str, int, Tensor, Tensor, str | None] | tuple[str, int, Tensor, Tensor, str | None, int]
"""Arguments of `call` after the binding."""

_group_lock = ProcessLock()  # concurrent groups could launch kernels in different orders on different GPUs
_unsupported: set[torch.dtype] = set()
_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()


class Nccl(Backend):
    """Collectives by NCCL, which chooses the order of summation, the same for every position, and rounds at each hop.

    NCCL divides before it adds for a mean. It does not support int16 and complex numbers.
    """

    name = "nccl"

    def __init__(self, devices: Sequence[torch.device], binding: Binding | None = None) -> None:
        """Create communicators for distinct GPUs by a binding; None: the one that GANGLINE_NCCL_BINDING selects."""
        super().__init__(devices)
        gpus = [device.index for device in devices]
        self._binding = BINDINGS[nccl_bindings.selected()].for_gpus(gpus) if binding is None else binding
        _bindings.add(self._binding)

    @classmethod
    def unsupported_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        for position, device in enumerate(devices):
            if device.type != "cuda":
                return f"{device} is not a GPU"
            if device in devices[:position]:
                return f"gpu({device.index}) is listed twice, and NCCL needs distinct GPUs"
        return ""

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: ARG003, D102  inherited
        return nccl_bindings.unavailable_reason(nccl_bindings.selected())

    def supports(self, dtype: torch.dtype) -> bool:  # noqa: D102  inherited
        if dtype not in DTYPES and dtype not in _unsupported:
            _unsupported.add(dtype)
            _log.info("tensors of %s move by torch's copies: NCCL does not support the dtype", dtype)
        return dtype in DTYPES

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            flats = [flattened.written(tensor) for tensor in tensors]
            self._group(("all_reduce", position, flat, flat, op) for position, flat in enumerate(flats))

    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:  # noqa: D102  inherited
        self._run_at_each_position("all_gather", tensors, outs)

    def reduce_scatter(  # noqa: D102  inherited
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str
    ) -> None:
        self._run_at_each_position("reduce_scatter", tensors, outs, op)

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            sums: list[_Call] = []
            copied: list[_Call] = []
            for values, total, outs in flattened.transfers(transfers):
                root = self.devices.index(total.device)
                for position, value in enumerate(values):  # NCCL writes the root's target only
                    sums.append(("reduce", position, value, total if position == root else value, op, root))
                for position, out in enumerate(outs):  # NCCL reads the root's source only
                    copied.append(("broadcast", position, total if position == root else out, out, None, root))
            self._group(sums)
            self._group(copied)  # a second group: calls of one group may run concurrently

    def _run_at_each_position(
        self, name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str | None = None
    ) -> None:
        with Flattened() as flattened:
            pairs = [(flattened.read(one), flattened.written(out)) for one, out in zip(tensors, outs, strict=True)]
            self._group((name, position, *pair, op) for position, pair in enumerate(pairs))

    def _group(self, calls: Iterable[_Call]) -> None:
        """Make calls as one group, at most one group at a time in this process."""
        calls = list(calls)
        if calls:
            with _group_lock, grouped(self._binding):
                for arguments in calls:
                    call(self._binding, *arguments)


@contextmanager
def grouped(binding: Binding) -> Iterator[None]:
    """Make NCCL calls as one group."""
    binding.start()
    try:
        yield
    finally:
        binding.end()


def call(
    binding: Binding,
    name: str,
    position: int,
    source: Tensor,
    target: Tensor,
    op: str | None = None,
    root: int | None = None,
) -> None:
    """Make a collective call on contiguous 1-D tensors and on the current stream of their GPU."""
    options = [DTYPES[source.dtype]]
    if op is not None:
        options.append((_BOOL_OPS if source.dtype == torch.bool else _OPS)[op])
    if root is not None:
        options.append(root)
    count = min(len(source), len(target))  # the other tensor has one row per rank in all_gather and reduce_scatter
    addresses = source.data_ptr(), target.data_ptr()
    binding.call(name, position, *addresses, count, *options, stream_of(source))


def stream_of(tensor: Tensor) -> int:
    """Return the CUDA handle of the current stream of a tensor's GPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


@atexit.register
def _destroy_all() -> None:
    """Destroy the communicators, which the interpreter's exit would free after parts of torch and CUDA."""
    for binding in _bindings:
        binding.start()  # else each communicator would wait for the others
        binding.destroy()
        binding.end()

"""NCCL backend for distinct GPUs: one thread makes the calls of every position, on each GPU's current stream."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gangline.collectives.devices.backends import copies, nccl_bindings
from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer
from gangline.collectives.devices.backends.nccl_bindings import BINDINGS, Binding

_log = logging.getLogger("gangline")

# The enumerators of nccl.h, which no release has changed: bindings name them differently, or lack the newer ones.
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

_group_lock = threading.Lock()  # concurrent groups could launch kernels in different orders on different GPUs
_unsupported: set[torch.dtype] = set()
_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()


class Nccl(Backend):
    """Collectives by NCCL, which chooses the order of summation, the same for every position, and rounds at each hop.

    NCCL divides before it adds for a mean. int16 and complex numbers, which it does not support, are moved by `copies`.
    """

    name = "nccl"

    def __init__(self, devices: Sequence[torch.device], binding: Binding | None = None) -> None:
        """Create communicators for GPUs.

        Args:
            devices: distinct GPUs, at least one.
            binding: the binding; None: the one that GANGLINE_NCCL_BINDING selects.
        """
        super().__init__(devices)
        gpus = [device.index for device in devices]
        self._binding = BINDINGS[nccl_bindings.selected()].for_gpus(gpus) if binding is None else binding
        _bindings.add(self._binding)

    @classmethod
    def unfit(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        for position, device in enumerate(devices):
            if device.type != "cuda":
                return f"{device} is not a GPU"
            if device in devices[:position]:
                return f"gpu({device.index}) is listed twice, and NCCL needs distinct GPUs"
        return ""

    @classmethod
    def missing(cls, devices: Sequence[torch.device]) -> str:  # noqa: ARG003, D102  inherited
        return nccl_bindings.missing(nccl_bindings.selected())

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        if not _supports(tensors[0].dtype):
            copies.move([(tensors, tensors[0], tensors[1:])], op)
            return
        with Flattened() as flattened:
            flats = [flattened.written(tensor) for tensor in tensors]
            with grouped(self._binding):
                for position, flat in enumerate(flats):
                    address, stream = flat.data_ptr(), self.stream(position)
                    self._binding.all_reduce(position, address, address, len(flat), *enumerators(flat, op), stream)

    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:  # noqa: D102  inherited
        if not _supports(tensors[0].dtype):
            super().all_gather(tensors, outs)
            return
        with Flattened() as flattened:
            pairs = [(flattened.read(one), flattened.written(out)) for one, out in zip(tensors, outs, strict=True)]
            with grouped(self._binding):
                for position, (given, out) in enumerate(pairs):
                    addresses, stream = (given.data_ptr(), out.data_ptr()), self.stream(position)
                    self._binding.all_gather(position, *addresses, len(given), DTYPES[given.dtype], stream)

    def reduce_scatter(  # noqa: D102  inherited
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str
    ) -> None:
        if not _supports(tensors[0].dtype):
            super().reduce_scatter(tensors, outs, op)
            return
        with Flattened() as flattened:
            pairs = [(flattened.read(one), flattened.written(out)) for one, out in zip(tensors, outs, strict=True)]
            with grouped(self._binding):
                for position, (given, out) in enumerate(pairs):
                    addresses, stream = (given.data_ptr(), out.data_ptr()), self.stream(position)
                    self._binding.reduce_scatter(position, *addresses, len(out), *enumerators(out, op), stream)

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        copies.move([transfer for transfer in transfers if not _supports(transfer[1].dtype)], op)
        with Flattened() as flattened:
            flat = flattened.transfers(transfer for transfer in transfers if _supports(transfer[1].dtype))
            sums = [(values, total) for values, total, _ in flat if values]
            copied = [(total, outs) for _, total, outs in flat if outs]
            if sums:
                with grouped(self._binding):
                    for values, total in sums:
                        self._reduce(values, total, op)
            if copied:
                with grouped(self._binding):  # a second group, because calls of one group may run concurrently
                    for total, outs in copied:
                        self._broadcast(total, outs)

    def stream(self, position: int) -> int:
        """Return the CUDA handle of the stream for a position's calls."""
        return torch.cuda.current_stream(self.devices[position]).cuda_stream

    def _reduce(self, values: Sequence[Tensor], total: Tensor, op: str) -> None:
        root = self.devices.index(total.device)
        for position, value in enumerate(values):
            target = total if position == root else value  # NCCL writes the root's only
            addresses, stream = (value.data_ptr(), target.data_ptr()), self.stream(position)
            self._binding.reduce(position, *addresses, len(value), *enumerators(value, op), root, stream)

    def _broadcast(self, total: Tensor, outs: Sequence[Tensor]) -> None:
        root = self.devices.index(total.device)
        for position, out in enumerate(outs):
            source = total if position == root else out  # NCCL reads the root's only
            addresses, stream = (source.data_ptr(), out.data_ptr()), self.stream(position)
            self._binding.broadcast(position, *addresses, len(out), DTYPES[out.dtype], root, stream)


@contextmanager
def grouped(binding: Binding) -> Iterator[None]:
    """Make NCCL calls as one group, at most one group at a time in this process."""
    with _group_lock:
        binding.start()
        try:
            yield
        finally:
            binding.end()


@atexit.register
def _destroy_all() -> None:
    """Destroy the communicators; when the interpreter ends, they would be freed after parts of torch and CUDA."""
    for binding in _bindings:
        binding.start()  # else each communicator would wait for the others
        binding.destroy()
        binding.end()


def enumerators(tensor: Tensor, op: str) -> tuple[int, int]:
    """Return the enumerators of nccl.h for the tensor's dtype and an operation."""
    ops = _BOOL_OPS if tensor.dtype == torch.bool else _OPS
    return DTYPES[tensor.dtype], ops[op]


def _supports(dtype: torch.dtype) -> bool:
    if dtype not in DTYPES and dtype not in _unsupported:
        _unsupported.add(dtype)
        _log.info("tensors of %s move by torch's copies: NCCL does not support the dtype", dtype)
    return dtype in DTYPES

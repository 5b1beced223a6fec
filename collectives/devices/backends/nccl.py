"""NVIDIA's NCCL between distinct GPUs: every place's call is made by one thread, on its GPU's current stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gangline.collectives.devices.backends import copies, nccl_bindings
from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer
from gangline.collectives.devices.backends.nccl_bindings import BINDINGS, Binding

_log = logging.getLogger("gangline")

# The numbers of nccl.h, which no release has changed: bindings name them differently, or lack the newer ones.
_DTYPES = {
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
_OPS = {"sum": 0, "mean": 0, "product": 1, "max": 2, "min": 3}
_BOOL_OPS = {"sum": 2, "max": 2, "product": 3, "min": 3}  # the sum is "or", the product "and"

_group = threading.Lock()  # two groups at once could start kernels in another order on one GPU than on the next
_refused: set[torch.dtype] = set()


class Nccl(Backend):
    """Combines in the order that NCCL chooses, the same for every place; partial sums are rounded at each hop.

    A mean is a sum, divided. int16, which NCCL does not know, goes by `copies`.
    """

    name = "nccl"

    def __init__(self, devices: Sequence[torch.device], binding: Binding | None = None) -> None:
        """Join GPUs.

        Args:
            devices: distinct GPUs; one is enough.
            binding: what is called; None: what GANGLINE_NCCL_BINDING says.
        """
        super().__init__(devices)
        gpus = [device.index for device in devices]
        self._binding = BINDINGS[nccl_bindings.chosen()](gpus) if binding is None else binding

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        if not _knows(tensors[0].dtype):
            copies.move([(tensors, tensors[0], tensors[1:])], op)
            return
        flattened = Flattened()
        flats = [flattened.written(tensor) for tensor in tensors]
        with self._calls():
            for place, flat in enumerate(flats):
                address, stream = flat.data_ptr(), self.stream(place)
                self._binding.all_reduce(place, address, address, len(flat), *_numbers(flat, op), stream)
        self._divide(flats, op)
        flattened.finish()

    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:  # noqa: D102  inherited
        if not _knows(tensors[0].dtype):
            super().all_gather(tensors, outs)
            return
        flattened = Flattened()
        pairs = [(flattened.read(one), flattened.written(out)) for one, out in zip(tensors, outs, strict=True)]
        with self._calls():
            for place, (given, out) in enumerate(pairs):
                addresses, stream = (given.data_ptr(), out.data_ptr()), self.stream(place)
                self._binding.all_gather(place, *addresses, len(given), _DTYPES[given.dtype], stream)
        flattened.finish()

    def reduce_scatter(  # noqa: D102  inherited
        self, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str
    ) -> None:
        if not _knows(tensors[0].dtype):
            super().reduce_scatter(tensors, outs, op)
            return
        flattened = Flattened()
        pairs = [(flattened.read(one), flattened.written(out)) for one, out in zip(tensors, outs, strict=True)]
        with self._calls():
            for place, (given, out) in enumerate(pairs):
                addresses, stream = (given.data_ptr(), out.data_ptr()), self.stream(place)
                self._binding.reduce_scatter(place, *addresses, len(out), *_numbers(out, op), stream)
        self._divide([out for _, out in pairs], op)
        flattened.finish()

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        copies.move([transfer for transfer in transfers if not _knows(transfer[1].dtype)], op)
        flattened = Flattened()
        flat = flattened.transfers(transfer for transfer in transfers if _knows(transfer[1].dtype))
        sums = [(values, total) for values, total, _ in flat if values]
        copied = [(total, outs) for _, total, outs in flat if outs]
        if sums:
            with self._calls():
                for values, total in sums:
                    self._reduce(values, total, op)
            self._divide([total for _, total in sums], op)
        if copied:
            with self._calls():  # a group of its own: calls of one group may run side by side
                for total, outs in copied:
                    self._broadcast(total, outs)
        flattened.finish()

    def stream(self, place: int) -> int:
        """The stream that a place's calls go to, as CUDA's handle."""
        return torch.cuda.current_stream(self.devices[place]).cuda_stream

    def _reduce(self, values: Sequence[Tensor], total: Tensor, op: str) -> None:
        root = self.devices.index(total.device)
        for place, value in enumerate(values):
            target = total if place == root else value  # NCCL writes the root's only
            addresses, stream = (value.data_ptr(), target.data_ptr()), self.stream(place)
            self._binding.reduce(place, *addresses, len(value), *_numbers(value, op), root, stream)

    def _broadcast(self, total: Tensor, outs: Sequence[Tensor]) -> None:
        root = self.devices.index(total.device)
        for place, out in enumerate(outs):
            source = total if place == root else out  # NCCL reads the root's only
            addresses, stream = (source.data_ptr(), out.data_ptr()), self.stream(place)
            self._binding.broadcast(place, *addresses, len(out), _DTYPES[out.dtype], root, stream)

    def _divide(self, flats: Sequence[Tensor], op: str) -> None:
        if op == "mean" and len(self.devices) > 1:
            for flat in flats:
                flat.div_(len(self.devices))

    @contextmanager
    def _calls(self) -> Iterator[None]:
        with _group:
            self._binding.start()
            try:
                yield
            finally:
                self._binding.end()


def unfit(devices: Sequence[torch.device]) -> str:
    """Why these devices cannot be joined so whatever is installed; "" where they may be."""
    for place, device in enumerate(devices):
        if device.type != "cuda":
            return f"{device} is no GPU"
        if device in devices[:place]:
            return f"gpu({device.index}) stands twice, and NCCL wants distinct GPUs"
    return ""


def missing(devices: Sequence[torch.device]) -> str:  # noqa: ARG001  as other ways have it
    """What this machine lacks to join GPUs so; "" where it lacks nothing."""
    return nccl_bindings.missing(nccl_bindings.chosen())


def _numbers(tensor: Tensor, op: str) -> tuple[int, int]:
    ops = _BOOL_OPS if tensor.dtype == torch.bool else _OPS
    return _DTYPES[tensor.dtype], ops[op]


def _knows(dtype: torch.dtype) -> bool:
    if dtype not in _DTYPES and dtype not in _refused:
        _refused.add(dtype)
        _log.info("tensors of %s move by torch's copies: NCCL does not know them", dtype)
    return dtype in _DTYPES

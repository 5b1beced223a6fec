"""NCCL between ranks that have one GPU each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gangline.collectives.devices.backends.base import Flattened
from gangline.collectives.devices.backends.nccl import DTYPES, enumerators
from gangline.collectives.devices.backends.nccl_bindings import Binding
from gangline.collectives.engine.host_staging import copy_values


class NcclCommunicator:
    """Collectives of one rank on tensors of its GPU, enqueued on that GPU's current stream.

    The ranks have agreed on each call before; written tensors are not expanded. NCCL chooses the order of summation,
    the same on all ranks, and divides before it adds for a mean. int16 and complex numbers are not supported.

    NCCL's first call between two ranks waits until both are in it. So nothing is held that another rank of this
    process, in a thread, would need.
    """

    def __init__(self, device: torch.device, binding: Binding, rank: int, size: int) -> None:
        self._device = device
        self._binding = binding
        self._rank = rank
        self._size = size

    def all_reduce(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """Run `Communicator.all_reduce`; ``result`` may be ``tensor``."""
        if result is not tensor:
            copy_values(result, tensor)
        with Flattened() as flattened:
            flat = flattened.written(result)
            address = flat.data_ptr()
            self._binding.all_reduce(0, address, address, len(flat), *enumerators(flat, op), self._stream())

    def reduce(self, tensor: Tensor, result: Tensor | None, root: int, op: str) -> None:
        """Run `Communicator.reduce`; ``result`` is None except at the root."""
        with Flattened() as flattened:
            value = flattened.read(tensor)
            target = value if result is None else flattened.written(result)  # NCCL writes the root's only
            addresses = value.data_ptr(), target.data_ptr()
            self._binding.reduce(0, *addresses, len(value), *enumerators(value, op), root, self._stream())

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Run `Communicator.broadcast`."""
        with Flattened() as flattened:
            flat = flattened.written(tensor)
            address = flat.data_ptr()
            self._binding.broadcast(0, address, address, len(flat), DTYPES[flat.dtype], root, self._stream())

    def launch(self, name: str, calls: Sequence[tuple[Any, ...]]) -> None:
        """Run a method of this class for each tuple of arguments, as one group; tensors of several are contiguous."""
        if len(calls) == 1:
            getattr(self, name)(*calls[0])
            return
        with self._group():
            for arguments in calls:
                getattr(self, name)(*arguments)

    def all_gather(self, tensor: Tensor, result: Tensor) -> None:
        """Run `Communicator.all_gather`."""
        with Flattened() as flattened:
            value, rows = flattened.read(tensor), flattened.written(result)
            addresses = value.data_ptr(), rows.data_ptr()
            self._binding.all_gather(0, *addresses, len(value), DTYPES[value.dtype], self._stream())

    def reduce_scatter(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """Run `Communicator.reduce_scatter`."""
        with Flattened() as flattened:
            rows, row = flattened.read(tensor), flattened.written(result)
            addresses = rows.data_ptr(), row.data_ptr()
            self._binding.reduce_scatter(0, *addresses, len(row), *enumerators(row, op), self._stream())

    def all_to_all(self, tensor: Tensor, result: Tensor) -> None:
        """Run `Communicator.all_to_all`."""
        with Flattened() as flattened:
            sent = flattened.read(tensor).view(self._size, -1)
            received = flattened.written(result).view(self._size, -1)
            self._exchange(dict(enumerate(sent)), dict(enumerate(received)))

    def gather(self, tensor: Tensor, result: Tensor | None, root: int) -> None:
        """Run `Communicator.gather`; ``result`` is None except at the root."""
        with Flattened() as flattened:
            received = () if result is None else flattened.written(result).view(self._size, -1)
            self._exchange({root: flattened.read(tensor)}, dict(enumerate(received)))

    def scatter(self, tensor: Tensor | None, result: Tensor, root: int) -> None:
        """Run `Communicator.scatter`; ``tensor`` is None except at the root."""
        with Flattened() as flattened:
            sent = () if tensor is None else flattened.read(tensor).view(self._size, -1)
            self._exchange(dict(enumerate(sent)), {root: flattened.written(result)})

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Send and receive contiguous tensors, by peer rank; this rank's own one is copied."""
        stream = self._stream()
        if self._rank in sent:
            received.pop(self._rank).copy_(sent.pop(self._rank))
        with self._group():
            for to, row in sent.items():
                self._binding.send(row.data_ptr(), row.nbytes, to, stream)
            for source, row in received.items():
                self._binding.receive(row.data_ptr(), row.nbytes, source, stream)

    @contextmanager
    def _group(self) -> Iterator[None]:
        self._binding.start()
        try:
            yield
        finally:
            self._binding.end()

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

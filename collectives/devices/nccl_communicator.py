"""NCCL between ranks that have one GPU each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from gangline.collectives.devices.backends.base import Flattened
from gangline.collectives.devices.backends.nccl import call, grouped, stream_of
from gangline.collectives.devices.backends.nccl_bindings import Binding
from gangline.collectives.engine.host_staging import copy_values


class NcclCommunicator:
    """Collectives of one rank on tensors of its GPU, enqueued on that GPU's current stream.

    The ranks have agreed on each call before; written tensors are not expanded. NCCL chooses the order of summation,
    the same on all ranks, and divides before it adds for a mean. int16 and complex numbers are not supported.

    NCCL's first call between two ranks waits until both are in it. So nothing is held that another rank of this
    process, in a thread, would need.
    """

    def __init__(self, binding: Binding, rank: int, size: int) -> None:
        self._binding = binding
        self._rank = rank
        self._size = size

    def all_reduce(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """Run `Communicator.all_reduce`; ``result`` may be ``tensor``."""
        if result is not tensor:
            copy_values(result, tensor)
        with Flattened() as flattened:
            flat = flattened.written(result)
            call(self._binding, "all_reduce", 0, flat, flat, op)

    def reduce(self, tensor: Tensor, result: Tensor | None, root: int, op: str) -> None:
        """Run `Communicator.reduce`; ``result`` is None except at the root."""
        with Flattened() as flattened:
            value = flattened.read(tensor)
            target = value if result is None else flattened.written(result)  # NCCL writes the root's only
            call(self._binding, "reduce", 0, value, target, op, root)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Run `Communicator.broadcast`."""
        with Flattened() as flattened:
            flat = flattened.written(tensor)
            call(self._binding, "broadcast", 0, flat, flat, root=root)

    def launch(self, name: str, calls: Sequence[tuple[Any, ...]]) -> None:
        """Run a method of this class for each tuple of arguments, as one group; tensors of several are contiguous."""
        with grouped(self._binding) if len(calls) > 1 else nullcontext():
            for arguments in calls:
                getattr(self, name)(*arguments)

    def all_gather(self, tensor: Tensor, result: Tensor) -> None:
        """Run `Communicator.all_gather`."""
        with Flattened() as flattened:
            call(self._binding, "all_gather", 0, flattened.read(tensor), flattened.written(result))

    def reduce_scatter(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """Run `Communicator.reduce_scatter`."""
        with Flattened() as flattened:
            call(self._binding, "reduce_scatter", 0, flattened.read(tensor), flattened.written(result), op)

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
        if self._rank in sent:
            received.pop(self._rank).copy_(sent.pop(self._rank))
        with grouped(self._binding):
            for to, row in sent.items():
                self._binding.send(row.data_ptr(), row.nbytes, to, stream_of(row))
            for source, row in received.items():
                self._binding.receive(row.data_ptr(), row.nbytes, source, stream_of(row))

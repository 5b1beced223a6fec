"""The interface of the ways to move tensors among the devices of one process, and what several of them need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gangline.collectives.engine.host_staging import data_of

Transfer = tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]
"""Tensors to combine, where the result goes, and where it is copied to."""


class Backend(ABC):
    """Moves and combines tensors, one of each device, in the order of the devices' current streams.

    Every collective is a list of transfers: what an implementation must have is `move`. The callers have checked what
    they give: tensors of one transfer have one shape and dtype, any strides, and what is written is not expanded.
    """

    name: ClassVar[str]
    """What GANGLINE_DEVICE_GROUP calls it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        """A device for each place; a place is an index into the lists of tensors."""

    @abstractmethod
    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:
        """For each (values, total, outs): combine ``values`` into ``total``, and copy that into each of ``outs``.

        Args:
            transfers: values and outs hold a tensor for each place, in order, or nothing at all; without values
                ``total`` is only copied. A total lies on one of the devices; it may be one of its values, and outs
                may be values too. No transfer reads what another writes.
            op: one of `gangline.collectives.call_signature.OPS`.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        """Combine tensors, one of each place, and write the result into all of them."""

    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Copy the tensor of place r into row r of every out."""
        self.move([((), tensor, [out[row] for out in outs]) for row, tensor in enumerate(tensors)])

    def reduce_scatter(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str) -> None:
        """Combine row r of all tensors into the out of place r."""
        self.move([([tensor[row] for tensor in tensors], out, ()) for row, out in enumerate(outs)], op)


class Flattened:
    """Tensors of any strides as contiguous 1-d ones, for implementations that know of addresses and counts only.

    What is written is put back by `finish`: a tensor that lies in one piece is itself written, behind torch's back.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Tensor, Tensor]] = []
        self._written: list[Tensor] = []

    def read(self, tensor: Tensor) -> Tensor:
        """The values; a view where they lie in one piece."""
        data = data_of(tensor).resolve_neg().contiguous()
        return _line(data)

    def written(self, tensor: Tensor) -> Tensor:
        """Where values to be read and written, or only written, lie until `finish`."""
        self._written.append(tensor)
        flat = self.read(tensor)
        if flat.data_ptr() != tensor.data_ptr() or tensor.is_neg():
            self._pieces.append((tensor, flat))
        return flat

    def transfers(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Transfers among contiguous 1-d tensors; those of nothing are left out."""
        return [
            ([self.read(value) for value in values], self.written(total), [self.written(out) for out in outs])
            for values, total, outs in transfers
            if total.numel()
        ]

    def finish(self) -> None:
        """Put back what lies in pieces, and tell autograd what has changed."""
        for tensor, flat in self._pieces:
            data_of(tensor).copy_(flat.view(tensor.shape))
        mark_written(self._written)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Have autograd see a change that torch did not make, as it sees those of torch's own operations."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def parts(count: int, size: int, align: int = 1) -> list[slice]:
    """``count`` elements cut into ``size`` slices as equal as multiples of ``align`` can be; the last may be empty."""
    step = -(-count // (size * align)) * align
    return [slice(min(place * step, count), min((place + 1) * step, count)) for place in range(size)]


def _line(data: Tensor) -> Tensor:
    """A contiguous tensor as 1-d, of stride 1; after `view` one element would keep the stride that it had."""
    return data.as_strided((data.numel(),), (1,))

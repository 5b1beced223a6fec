"""The interface of the backends that move tensors between the devices of one process, and their common parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import ClassVar

import torch
from torch import Tensor

from gangline.collectives.engine.host_staging import data_of

Transfer = tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]
"""Tensors to combine, the tensor for the result, and the tensors to copy the result to."""
_ALIGN = 16  # elements


class Backend(ABC):
    """Operations on tensors, one per device, in the order of the devices' current streams.

    Callers have checked the tensors: those of one transfer have one shape and dtype, any strides, and written ones are
    not expanded.
    """

    name: ClassVar[str]
    """Value of GANGLINE_DEVICE_GROUP that selects this backend."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        """Device of each position; a position is an index into the lists of tensors."""
        self.owners = {device: self.devices.index(device) for device in self.devices}
        """First position of each device, at which this device combines values."""

    def supports(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Return whether this backend moves tensors of a dtype; `Copies` moves the others."""
        return True

    @classmethod
    def unsupported_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: ARG003
        """Return why this backend cannot serve the devices on any machine; "" if it can."""
        return ""

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: ARG003
        """Return what this machine lacks to serve the devices; "" if nothing."""
        return ""

    @classmethod
    def trial_failure(cls, devices: Sequence[torch.device]) -> str:  # noqa: ARG003
        """Try operations that the driver may report wrongly; return what failed, "" if nothing."""
        return ""

    @abstractmethod
    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:
        """Run each (values, total, outs): combine ``values`` into ``total``, and copy ``total`` into each of ``outs``.

        Args:
            transfers: values and outs hold one tensor per position, in order, or are empty; without values ``total`` is
                only copied. A total is on one of the devices; it may be one of its values, and outs may be values too.
                No transfer reads a tensor that another one writes.
            op: one of `gangline.collectives.call_signature.OPS`.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        """Combine tensors, one per position, and write the result into all of them."""

    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Copy the tensor of position r into row r of every out."""
        self.move([((), tensor, [out[row] for out in outs]) for row, tensor in enumerate(tensors)])

    def reduce_scatter(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], op: str) -> None:
        """Combine row r of all tensors into the out of position r."""
        self.move([([tensor[row] for tensor in tensors], out, ()) for row, out in enumerate(outs)], op)


class Flattened:
    """Contiguous 1-D views or copies of tensors on their devices, for backends that take addresses and counts.

    The end of the ``with`` section copies results back to tensors that are not contiguous, unless it raises. Contiguous
    ones are written directly, unseen by torch. (`engine.host_staging` does the same through host memory.)
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._written: list[Tensor] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values, contiguous: a view if possible."""
        return data_of(tensor).resolve_neg().resolve_conj().contiguous().view(-1)

    def written(self, tensor: Tensor) -> Tensor:
        """Return the values as memory to read and write, or only write, in this section."""
        self._written.append(tensor)
        flat = self.read(tensor)
        if flat.data_ptr() != tensor.data_ptr() or tensor.is_neg():
            self._copies.append((tensor, flat))
        return flat

    def transfers(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Return the transfers with contiguous 1-D tensors; empty ones are omitted."""
        return [
            ([self.read(value) for value in values], self.written(total), [self.written(out) for out in outs])
            for values, total, outs in transfers
            if total.numel()
        ]

    def __enter__(self) -> Flattened:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Copy results back to non-contiguous tensors, and report all written tensors to autograd."""
        if kind is None:
            for tensor, flat in self._copies:
                data_of(tensor).copy_(flat.view(tensor.shape))
            mark_written(self._written)


def join(streams: Sequence[torch.cuda.Stream], others: Sequence[torch.cuda.Stream]) -> None:
    """Make each stream wait for the work so far on all others."""
    events = [other.record_event() for other in others]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Increment the autograd version of tensors that were written without torch."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def in_slices(flats: Sequence[Tensor], owners: Sequence[int], count: int) -> list[Transfer]:
    """Return the transfers of an all-reduce of contiguous 1-D tensors, in slices that ``owners`` combine in turn.

    There are ``count`` slices, as equal as multiples of 16 elements can be: loads of 16 bytes are then aligned for
    every dtype. Empty ones are omitted.
    """
    length = len(flats[0])
    step = -(-length // (count * _ALIGN)) * _ALIGN
    transfers: list[Transfer] = []
    for start, owner in zip(range(0, length, max(step, 1)), cycle(owners), strict=False):
        slices = [flat[start : start + step] for flat in flats]
        transfers.append((slices, slices[owner], slices))
    return transfers

"""NCCL between ranks that have a GPU each: the bindings of one rank, and the collectives by them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from gangline.collectives.devices.backends.base import Flattened
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.backends.nccl_bindings import Binding, CupyBinding, PyncclBinding
from gangline.collectives.engine.host_staging import data_of

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_BYTE = 1  # nccl.h's ncclUint8


class RankBinding(Binding, Protocol):
    """NCCL's communicator of one rank, which is its only place; ``root`` says which rank the calls' root stands for."""

    root: int

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:
        """This rank's part of ncclSend, of bytes."""

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:
        """This rank's part of ncclRecv, of bytes."""

    def abort(self) -> None:
        """ncclCommAbort: what runs ends, whatever the other ranks do; from any thread. Nothing is called after it."""

    def destroy(self) -> None:
        """ncclCommDestroy, once nothing runs."""


class CupyRank(CupyBinding):
    """`cupy.cuda.nccl` for one rank."""

    def __init__(self, device: torch.device, unique_id: bytes, rank: int, size: int) -> None:
        self._nccl = import_module("cupy.cuda.nccl")
        self.root = 0
        with torch.cuda.device(device):
            try:
                made = self._nccl.NcclCommunicator(size, unique_id, rank)
            except TypeError:  # before cupy 14 it is a tuple of chars, which are signed
                made = self._nccl.NcclCommunicator(size, struct.unpack(f"{_ID_BYTES}b", unique_id), rank)
        self._communicators = [made]

    @staticmethod
    def unique_id() -> bytes:
        """What all ranks make the same communicator by; one of them calls this."""
        found: bytes | tuple[int, ...] = import_module("cupy.cuda.nccl").get_unique_id()
        return found if isinstance(found, bytes) else struct.pack(f"{_ID_BYTES}b", *found)

    def reduce(  # noqa: D102  as Binding's, and so below
        self,
        place: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        root: int,  # noqa: ARG002
        stream: int,
    ) -> None:
        super().reduce(place, source, target, count, dtype, op, self.root, stream)

    def broadcast(  # noqa: D102
        self,
        place: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        root: int,  # noqa: ARG002
        stream: int,
    ) -> None:
        super().broadcast(place, source, target, count, dtype, self.root, stream)

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:  # noqa: D102  as RankBinding's
        self._communicators[0].send(source, nbytes, _BYTE, to, stream)

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:  # noqa: D102
        self._communicators[0].recv(target, nbytes, _BYTE, source, stream)

    def abort(self) -> None:  # noqa: D102
        self._communicators[0].abort()

    def destroy(self) -> None:  # noqa: D102
        self._communicators[0].destroy()


class PyncclRank(PyncclBinding):
    """`pynccl.Nccl` for one rank."""

    def __init__(self, device: torch.device, unique_id: bytes, rank: int, size: int) -> None:
        with torch.cuda.device(device):
            super().__init__([device.index])  # which finds the library; its communicator of one is not needed
            self._nccl.comm_destroy(self._communicators.pop())
            self.root = 0
            handle = ctypes.c_void_p()
            identity = import_module("pynccl.binding").ncclUniqueId()  # longer than NCCL's, which reads its beginning
            ctypes.memmove(ctypes.addressof(identity), unique_id, _ID_BYTES)
            code = self._nccl.comm_init_rank(ctypes.byref(handle), size, identity, rank)
        if not handle.value:
            raise RuntimeError(f"ncclCommInitRank of rank {rank} of {size} on {device} gave error {code}")
        self._communicators.append(handle.value)

    @staticmethod
    def unique_id() -> bytes:
        """What all ranks make the same communicator by; one of them calls this."""
        binding = PyncclBinding([torch.cuda.current_device()])  # which finds the library
        identity: Any = binding._nccl.get_unique_id()
        return ctypes.string_at(ctypes.addressof(identity), _ID_BYTES)

    def reduce(  # noqa: D102  as Binding's, and so below
        self,
        place: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        op: int,
        root: int,  # noqa: ARG002
        stream: int,
    ) -> None:
        super().reduce(place, source, target, count, dtype, op, self.root, stream)

    def broadcast(  # noqa: D102
        self,
        place: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        root: int,  # noqa: ARG002
        stream: int,
    ) -> None:
        super().broadcast(place, source, target, count, dtype, self.root, stream)

    def send(self, source: int, nbytes: int, to: int, stream: int) -> None:  # noqa: D102  as RankBinding's
        self._nccl.pp_send(source, self.count(nbytes), _BYTE, to, self._communicators[0], stream)

    def receive(self, target: int, nbytes: int, source: int, stream: int) -> None:  # noqa: D102
        self._nccl.pp_recv(target, self.count(nbytes), _BYTE, source, self._communicators[0], stream)

    def abort(self) -> None:  # noqa: D102
        self._nccl.comm_abort(self._communicators[0])

    def destroy(self) -> None:  # noqa: D102
        self._nccl.comm_destroy(self._communicators[0])


RANKS: dict[str, type[CupyRank] | type[PyncclRank]] = {"cupy": CupyRank, "pynccl": PyncclRank}
"""By the names of `gangline.collectives.devices.backends.nccl_bindings.BINDINGS`."""


class NcclCommunicator:
    """The collectives of one rank, whose tensors lie on its GPU, started on that GPU's current stream.

    All tensors are those of a call, whose ranks have agreed on it; what is written is not expanded. Sums are made in
    the order that NCCL chooses, the same on all ranks; a mean is a sum, divided. int16, which NCCL does not know, must
    not come here.
    """

    def __init__(self, device: torch.device, binding: RankBinding, rank: int, size: int) -> None:
        self._binding = binding
        self._nccl = Nccl([device], binding)
        self._rank = rank
        self._size = size

    def all_reduce(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """As `Communicator.all_reduce`; ``result`` may be ``tensor``."""
        if result is not tensor:
            data_of(result).copy_(data_of(tensor))
        self._nccl.all_reduce([result], op)
        self._divide(result, op)

    def reduce(self, tensor: Tensor, result: Tensor | None, root: int, op: str) -> None:
        """As `Communicator.reduce`; ``result`` is the root's."""
        self._binding.root = root
        self._nccl.move([([tensor], tensor if result is None else result, ())], op)  # NCCL writes the root's only
        if result is not None:
            self._divide(result, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """As `Communicator.broadcast`."""
        self._binding.root = root
        self._nccl.move([((), tensor, [tensor])])

    def all_gather(self, tensor: Tensor, result: Tensor) -> None:
        """As `Communicator.all_gather`."""
        self._nccl.all_gather([tensor], [result])

    def reduce_scatter(self, tensor: Tensor, result: Tensor, op: str) -> None:
        """As `Communicator.reduce_scatter`."""
        self._nccl.reduce_scatter([tensor], [result], op)
        self._divide(result, op)

    def all_to_all(self, tensor: Tensor, result: Tensor) -> None:
        """As `Communicator.all_to_all`."""
        with self._messages() as flattened:
            given = flattened.read(tensor).view(self._size, -1)
            taken = flattened.written(result).view(self._size, -1)
            self._exchange(dict(enumerate(given)), dict(enumerate(taken)))

    def gather(self, tensor: Tensor, result: Tensor | None, root: int) -> None:
        """As `Communicator.gather`; ``result`` is the root's."""
        with self._messages() as flattened:
            taken = () if result is None else flattened.written(result).view(self._size, -1)
            self._exchange({root: flattened.read(tensor)}, dict(enumerate(taken)))

    def scatter(self, tensor: Tensor | None, result: Tensor, root: int) -> None:
        """As `Communicator.scatter`; ``tensor`` is the root's."""
        with self._messages() as flattened:
            given = () if tensor is None else flattened.read(tensor).view(self._size, -1)
            self._exchange(dict(enumerate(given)), {root: flattened.written(result)})

    def _exchange(self, given: dict[int, Tensor], taken: dict[int, Tensor]) -> None:
        """Send to ranks, and receive from ranks, contiguous tensors; one's own to oneself is copied."""
        stream = self._nccl.stream(0)
        if self._rank in given:
            taken.pop(self._rank).copy_(given.pop(self._rank))
        self._binding.start()
        try:
            for to, row in given.items():
                self._binding.send(row.data_ptr(), row.nbytes, to, stream)
            for source, row in taken.items():
                self._binding.receive(row.data_ptr(), row.nbytes, source, stream)
        finally:
            self._binding.end()

    @contextmanager
    def _messages(self) -> Iterator[Flattened]:
        flattened = Flattened()
        yield flattened
        flattened.finish()

    def _divide(self, result: Tensor, op: str) -> None:
        if op == "mean":
            data_of(result).div_(self._size)

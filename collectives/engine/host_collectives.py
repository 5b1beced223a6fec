"""The collectives on contiguous tensors, each in its two ways: over the board, or by a schedule."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.call_signature import encode_signature
from gangline.collectives.engine.engine import Engine
from gangline.collectives.engine.executor import Chunks, Parts, Rows
from gangline.collectives.engine.reduction import HALVES, combine
from gangline.collectives.schedule import Receive, Reduce, Step

_UFUNCS = {"sum": np.add, "mean": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


class SmallAllReduce:
    """All-reduce over the board for one number of elements, dtype and operation: everything is looked up once."""

    def __init__(self, engine: Engine, count: int, dtype: torch.dtype, op: str) -> None:
        slot_exchange = engine.resources.slot_exchange
        assert slot_exchange is not None
        self._engine = engine
        self._slot_exchange = slot_exchange
        self._code = encode_signature("all_reduce", count, dtype, op, None)
        self._op = op
        self._divisor = slot_exchange.size if op == "mean" else 1
        self._slots = slot_exchange.slots(count * dtype.itemsize, dtype)
        self._is_half = dtype in HALVES
        if not self._is_half:
            self._function: Callable[..., object] = _UFUNCS[op]
            self._quietly = contextvars.copy_context().run  # infinities are results, not warnings
            self._quietly(np.seterr, all="ignore")
            self._arrays = [[slot.numpy() for slot in slots] for slots in self._slots]
            self._own = [arrays[slot_exchange.rank] for arrays in self._arrays]

    def __call__(self, tensor: Tensor, out: Tensor) -> None:
        """Reduce a contiguous tensor into another of its shape, or itself; no gradient may look at them."""
        engine = self._engine
        code = self._code
        with engine.lock:
            sequence = engine.begin(code)
            try:
                if self._is_half:
                    self._slots[self._slot_exchange.parity][self._slot_exchange.rank].copy_(tensor.view(-1))
                    combine(self._slots[engine.meet(sequence, code)], self._op, out.view(-1), self._divisor)
                else:
                    given = tensor.numpy()
                    self._plain(given, given if out is tensor else out.numpy(), sequence, code)
            except BaseException as error:  # noqa: BLE001  raised again
                raise engine.failed(error, code) from None

    def _plain(self, given: np.ndarray, array: np.ndarray, sequence: int, code: int) -> None:
        """The same by numpy, which takes a third of the time for a few bytes."""
        if given.ndim != 1:
            given, array = given.reshape(-1), array.reshape(-1)
        self._own[self._slot_exchange.parity][...] = given
        slots = self._arrays[self._engine.meet(sequence, code)]
        function, quietly = self._function, self._quietly
        if len(slots) == 1:
            array[...] = slots[0]
        else:
            quietly(function, slots[0], slots[1], out=array)
            for slot in slots[2:]:
                quietly(function, array, slot, out=array)
        if self._divisor != 1:
            array /= self._divisor


def all_reduce(engine: Engine, flat: Tensor, op: str) -> None:
    """Reduce a contiguous 1-d tensor in place, by a schedule."""
    code = encode_signature("all_reduce", flat.numel(), flat.dtype, op, None)
    with engine.call(code) as sequence:
        program, chunks = engine.program("all_reduce", flat.nbytes, None)
        engine.run(program, Parts(flat, chunks), sequence, code, op)


def reduce(engine: Engine, flat: Tensor, out: Tensor | None, root: int, op: str) -> None:
    """Reduce contiguous 1-d tensors into the root's ``out``, which may be ``flat``; others' are left as they are."""
    code = encode_signature("reduce", flat.numel(), flat.dtype, op, root)
    with engine.call(code) as sequence:
        if engine.is_shared("reduce", flat.nbytes):
            values = _shared(engine, flat, sequence, code)
            if out is not None:
                combine(values, op, out, engine.resources.size if op == "mean" else 1)
            return
        program, chunks = engine.program("reduce", flat.nbytes, root)
        if out is None:
            buffer = flat.clone() if _writes(program) else flat
        else:
            buffer = out if out.data_ptr() == flat.data_ptr() else out.copy_(flat)
        engine.run(program, Parts(buffer, chunks), sequence, code, op)


def broadcast(engine: Engine, flat: Tensor, root: int) -> None:
    """Make a contiguous 1-d tensor the root's on all ranks."""
    code = encode_signature("broadcast", flat.numel(), flat.dtype, None, root)
    with engine.call(code) as sequence:
        if engine.is_shared("broadcast", flat.nbytes):
            given = flat if engine.resources.rank == root else flat[:0]
            slots = _shared(engine, given, sequence, code, like=flat)
            if engine.resources.rank != root:
                flat.copy_(slots[root])
            return
        program, chunks = engine.program("broadcast", flat.nbytes, root)
        engine.run(program, Parts(flat, chunks), sequence, code)


def all_gather(engine: Engine, flat: Tensor, out: Tensor) -> None:
    """Gather contiguous (n,) tensors into a contiguous (size, n) one on all ranks."""
    code = encode_signature("all_gather", flat.numel(), flat.dtype, None, None)
    with engine.call(code) as sequence:
        if engine.is_shared("all_gather", flat.nbytes):
            for row, value in zip(out, _shared(engine, flat, sequence, code), strict=True):
                row.copy_(value)
            return
        out[engine.resources.rank].copy_(flat)
        program, chunks = engine.program("all_gather", flat.nbytes, None)
        engine.run(program, Parts(out.view(-1), chunks), sequence, code)


def reduce_scatter(engine: Engine, rows: Tensor, out: Tensor, op: str) -> None:
    """Reduce contiguous (size, n) tensors, and give each rank the row of its number, a contiguous (n,) tensor."""
    resources = engine.resources
    code = encode_signature("reduce_scatter", out.numel(), rows.dtype, op, None)
    with engine.call(code) as sequence:
        if engine.is_shared("reduce_scatter", rows.nbytes):
            values = [
                value.view(rows.shape)[resources.rank] for value in _shared(engine, rows.view(-1), sequence, code)
            ]
            combine(values, op, out, resources.size if op == "mean" else 1)
            return
        program, chunks = engine.program("reduce_scatter", rows.nbytes, None)
        own = range(resources.rank * (chunks // resources.size), (resources.rank + 1) * (chunks // resources.size))
        if _writes(program) <= set(own):
            engine.run(program, _OwnRow(rows.view(-1), out, own, chunks), sequence, code, op)
            if not program:
                out.copy_(rows[resources.rank])
            return
        scratch = rows.clone()
        engine.run(program, Parts(scratch.view(-1), chunks), sequence, code, op)
        out.copy_(scratch[resources.rank])


def all_to_all(engine: Engine, rows: Tensor, out: Tensor) -> None:
    """Give row j of a contiguous (size, n) tensor to rank j, whose row i then comes from rank i."""
    resources = engine.resources
    code = encode_signature("all_to_all", rows[0].numel(), rows.dtype, None, None)
    with engine.call(code) as sequence:
        if engine.is_shared("all_to_all", rows.nbytes):
            for row, value in zip(out, _shared(engine, rows.view(-1), sequence, code), strict=True):
                row.copy_(value.view(rows.shape)[resources.rank])
            return
        out[resources.rank].copy_(rows[resources.rank])
        program, _ = engine.program("all_to_all", rows.nbytes, None)
        engine.run(program, Rows(resources.rank, resources.size, rows, out), sequence, code)


def gather(engine: Engine, flat: Tensor, out: Tensor | None, root: int) -> None:
    """Gather contiguous (n,) tensors into the root's contiguous (size, n) ``out``."""
    resources = engine.resources
    code = encode_signature("gather", flat.numel(), flat.dtype, None, root)
    with engine.call(code) as sequence:
        if engine.is_shared("gather", flat.nbytes):
            for row, value in zip(out if out is not None else (), _shared(engine, flat, sequence, code), strict=False):
                row.copy_(value)
            return
        program, chunks = engine.program("gather", flat.nbytes, root)
        rows = (
            flat.new_empty((resources.size, flat.numel())) if out is None else out
        )  # pages that nobody touches cost nothing
        rows[resources.rank].copy_(flat)
        engine.run(program, Parts(rows.view(-1), chunks), sequence, code)


def scatter(engine: Engine, rows: Tensor | None, out: Tensor, root: int) -> None:
    """Give row r of the root's contiguous (size, n) tensor to rank r."""
    resources = engine.resources
    code = encode_signature("scatter", out.numel(), out.dtype, None, root)
    nbytes = out.nbytes * resources.size
    with engine.call(code) as sequence:
        if engine.is_shared("scatter", nbytes):
            given = out[:0] if rows is None else rows.view(-1)
            slots = _shared(engine, given, sequence, code, like=out.new_empty(resources.size * out.numel()))
            out.copy_(slots[root].view(resources.size, -1)[resources.rank] if out.numel() else out)
            return
        program, chunks = engine.program("scatter", nbytes, root)
        buffer = out.new_empty((resources.size, out.numel())) if rows is None else rows
        engine.run(program, Parts(buffer.view(-1), chunks), sequence, code)
        out.copy_(buffer[resources.rank])


def barrier(engine: Engine) -> None:
    """Return when all ranks are here."""
    _meet(engine, encode_signature("barrier", 0, torch.uint8, None, None))


def empty(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that lies where all ranks of the host can reach it, if the transport has such memory."""
    count = math.prod(shape)
    _meet(engine, encode_signature("empty", count, dtype, None, None))
    return engine.resources.transport.empty(count * dtype.itemsize, partial(exchange, engine)).view(dtype).view(shape)


def exchange(engine: Engine, blob: bytes) -> list[bytes]:
    """Everybody's bytes, in rank order."""
    size = engine.resources.size
    sizes = torch.empty((size, 1), dtype=torch.int64)
    all_gather(engine, torch.tensor([len(blob)]), sizes)
    longest = int(sizes.max())
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else own[:0]
    everybody = torch.empty((size, longest), dtype=torch.uint8)
    all_gather(engine, own, everybody)
    return [row[: int(length)].numpy().tobytes() for row, length in zip(everybody, sizes.view(-1), strict=True)]


class _OwnRow(Chunks):
    """A reduce-scatter that writes nothing but this rank's row: the tensor that was given stays as it is."""

    def __init__(self, rows: Tensor, out: Tensor, own: range, chunks: int) -> None:
        self._given = Parts(rows, chunks)
        self._taken = Parts(out, len(own))
        self._first = own.start
        self._written: set[int] = set()

    def source(self, first: int, last: int) -> Tensor:
        if self._written.issuperset(range(first, last)):  # a sum to be added to
            return self._own(first, last)
        return self._given.source(first, last)

    def target(self, first: int, last: int) -> Tensor:
        self._written.update(range(first, last))
        return self._own(first, last)

    def _own(self, first: int, last: int) -> Tensor:
        return self._taken.source(first - self._first, last - self._first)


def _shared(engine: Engine, given: Tensor, sequence: int, code: int, like: Tensor | None = None) -> list[Tensor]:
    """Lay a 1-d tensor on the board; gives everybody's, good until the next call.

    Args:
        engine: whose board.
        given: what this rank lays open.
        sequence: of the call.
        code: of the call.
        like: as long as the longest that a rank gives; None: all give as much as this one.
    """
    slot_exchange = engine.resources.slot_exchange
    assert slot_exchange is not None
    slots = slot_exchange.slots((given if like is None else like).nbytes, given.dtype)
    slots[slot_exchange.parity][slot_exchange.rank][: given.numel()].copy_(given)
    return slots[engine.meet(sequence, code)]


def _meet(engine: Engine, code: int) -> None:
    """See that all ranks are at this call."""
    with engine.call(code) as sequence:
        if engine.resources.slot_exchange is not None:
            engine.meet(sequence, code)
            return
        program, chunks = engine.program("all_reduce", 0, None)
        engine.run(program, Parts(torch.empty(0, dtype=torch.uint8), chunks), sequence, code)


@lru_cache(maxsize=1024)
def _writes(program: tuple[Step, ...]) -> frozenset[int]:
    """The chunks that a program writes."""
    return frozenset(
        chunk for step in program if isinstance(step, Receive | Reduce) for chunk in range(step.first, step.last)
    )

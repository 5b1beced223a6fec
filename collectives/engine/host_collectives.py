"""Collectives in host memory: through shared slots for small tensors, by a schedule for large ones."""

from __future__ import annotations

import math
import time
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.call_signature import encode_signature
from gangline.collectives.compiled_core import ALL_GATHER, ALL_REDUCE, DONE, reduction
from gangline.collectives.engine.engine import Engine, Plan
from gangline.collectives.engine.executor import AllToAllChunks, Chunks, EqualChunks, run
from gangline.collectives.engine.host_staging import (
    as_plain,
    as_rows,
    copy_values,
    flat_buffer,
    flat_values,
    overlap,
    write_back,
)
from gangline.collectives.engine.reduction import as_sent, combine
from gangline.collectives.engine.uneven_all_to_all import UnevenAllToAll
from gangline.collectives.schedule import Receive, Send, Step
from gangline.collectives.transports.base import SLOT_BYTES, MessageTag
from gangline.collectives.transports.shm.slots import CompiledSlotExchange

_CALLS_PER_CHOICE = 8  # between exchanges of rank 0's choice, in which ranks wait for each other
_TRIAL_CHOICES = 8  # of them begins with a trial of the slower way, if that is nearly as fast; at first more often
_MOST_SLOT_VIEWS = 4096
_NO_MEMORY = "the values of a tensor of shape {} are in no memory; expected a tensor with storage"


class HostCollectives:
    """Collectives of one rank, on tensors of any layout on the CPU or a GPU.

    Methods have the names of `NcclCommunicator`. They take the call's code (`encode_signature`) and then the same
    arguments: checked tensors and options.
    """

    def __init__(self, engine: Engine) -> None:
        resources = engine.resources
        self.all_to_all_uneven = UnevenAllToAll(engine, self._all_gather)
        self._engine = engine
        self._transport, self._slot_exchange = resources.transport, resources.slot_exchange
        self._rank, self._size = resources.rank, resources.size
        self._slots: dict[tuple[int, torch.dtype], list[list[Tensor]]] = {}  # views, by bytes and dtype
        self._costs: dict[tuple[int, bool], Costs] = {}  # by the logarithm of bytes, and whether memory is registered
        self._ways: dict[int, list[int]] = {}  # of the next large all-reduces, by the logarithm of bytes

    @cached_property
    def _choices(self) -> list[np.ndarray]:
        """By parity, the byte of rank 0's slot that holds its choice for a large all-reduce."""
        assert self._slot_exchange is not None
        return [slots[0].numpy() for slots in self._slot_exchange.slots(1, torch.uint8)]

    def all_reduce(self, code: int, tensor: Tensor, result: Tensor, op: str) -> None:
        """Reduce over all ranks; ``result`` may be ``tensor``."""
        is_compiled = isinstance(self._slot_exchange, CompiledSlotExchange) and reduction(tensor.dtype, op) is not None
        plan = self._engine.plan("all_reduce", tensor.nbytes, streams=is_compiled)
        if plan is None and is_compiled:
            source, flat = as_plain(flat_values(tensor)), as_plain(flat_buffer(result))
            if flat.nbytes > SLOT_BYTES:
                self._large(source, flat, op, code)
            elif not self._engine.run_compiled(ALL_REDUCE, source, flat, op, SLOT_BYTES):
                self._engine.check_open()
                raise ValueError(_NO_MEMORY.format(tuple(tensor.shape)))
        else:
            source = flat_values(tensor)
            flat = source if result is tensor else flat_buffer(result)
            with self._engine.call(code) as message_tag:
                if plan is None:
                    combine(self._publish(source, flat.nbytes, message_tag), op, flat, self._divisor(op))
                else:
                    self._by_schedule(source, flat, op, plan, message_tag)
        write_back(result, flat)

    def reduce(self, code: int, tensor: Tensor, result: Tensor | None, root: int, op: str) -> None:
        """Reduce to the root, whose ``result`` may be ``tensor``; on the other ranks ``result`` is None."""
        flat = flat_values(tensor)
        out = None if result is None else flat if result is tensor else flat_buffer(result)
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("reduce", flat.nbytes, root)
            if plan is not None:
                self._by_schedule(flat, out, op, plan, message_tag)
            else:
                slots = self._publish(flat, flat.nbytes, message_tag)
                if out is not None:
                    combine(slots, op, out, self._divisor(op))
        if result is not None and out is not None:
            write_back(result, out)

    def _by_schedule(self, flat: Tensor, out: Tensor | None, op: str, plan: Plan, message_tag: MessageTag) -> None:
        """Reduce ``flat`` into ``out``, which may be ``flat``; None on ranks that get no result."""
        buffer = as_sent(flat, op)
        chunks: Chunks | None = None
        if buffer is flat and out is None:
            buffer = flat if all(isinstance(step, Send) for step in plan.steps) else flat.clone()
        elif buffer is flat and out is not None:
            if out is not flat:
                if len(_written_chunks(plan.steps)) == plan.chunks and not overlap([flat], [out]):
                    chunks = _KeptInput(flat, out, range(plan.chunks), plan.chunks)
                else:
                    copy_values(out, flat)
            buffer = out
        chunks = chunks or EqualChunks(buffer, plan.chunks)
        run(plan.steps, self._transport, chunks, message_tag, op, self._divisor(op))
        if out is not None and out is not buffer:
            out.copy_(buffer)

    def broadcast(self, code: int, tensor: Tensor, root: int) -> None:
        """Copy the root's values to all ranks."""
        is_root = self._rank == root
        flat = flat_values(tensor) if is_root else flat_buffer(tensor)
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("broadcast", flat.nbytes, root)
            if plan is None:
                slots = self._publish(flat if is_root else flat[:0], flat.nbytes, message_tag)
                if not is_root:
                    flat.copy_(slots[root])
            else:
                run(plan.steps, self._transport, EqualChunks(flat, plan.chunks), message_tag)
        if not is_root:
            write_back(tensor, flat)

    def all_gather(self, code: int, tensor: Tensor, result: Tensor) -> None:
        """Gather every rank's tensor into the (size, ...) ``result`` of all ranks."""
        self.gather(code, tensor, result, None)

    def gather(self, code: int, tensor: Tensor, result: Tensor | None, root: int | None) -> None:
        """Gather every rank's tensor into the (size, ...) ``result`` of the root; all ranks have one if it is None."""
        flat = flat_values(tensor)
        out = None if result is None else flat_buffer(result)
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("all_gather" if root is None else "gather", flat.nbytes, root)
            if plan is None:
                slots = self._publish(flat, flat.nbytes, message_tag)
                for row, slot in zip(as_rows(out, self._size), slots, strict=True) if out is not None else ():
                    row.copy_(slot)
            else:  # on the other ranks, rows that the schedule does not write take no physical memory
                buffer = flat.new_empty(self._size * flat.numel()) if out is None else out
                copy_values(as_rows(buffer, self._size)[self._rank], flat)
                run(plan.steps, self._transport, EqualChunks(buffer, plan.chunks), message_tag)
        if result is not None and out is not None:
            write_back(result, out)

    def reduce_scatter(self, code: int, tensor: Tensor, result: Tensor, op: str) -> None:
        """Reduce (size, ...) tensors; row r of the outcome is the ``result`` of rank r."""
        flat, out = flat_values(tensor), flat_buffer(result)
        rank, size = self._rank, self._size
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("reduce_scatter", flat.nbytes)
            if plan is None:
                slots = self._publish(flat, flat.nbytes, message_tag)
                combine([as_rows(slot, size)[rank] for slot in slots], op, out, self._divisor(op))
            else:
                chunks_per_rank = plan.chunks // size
                own = range(rank * chunks_per_rank, (rank + 1) * chunks_per_rank)
                if overlap([flat], [out]) and out.data_ptr() != as_rows(flat, size)[rank].data_ptr():
                    flat = flat.clone()
                flat = as_sent(flat, op)
                if _written_chunks(plan.steps) == frozenset(own):
                    row = out.to(flat.dtype)
                    chunks: Chunks = _KeptInput(flat, row, own, plan.chunks)
                    run(plan.steps, self._transport, chunks, message_tag, op, self._divisor(op))
                    if row is not out:
                        out.copy_(row)
                else:
                    scratch = flat.clone()
                    chunks = EqualChunks(scratch, plan.chunks)
                    run(plan.steps, self._transport, chunks, message_tag, op, self._divisor(op))
                    out.copy_(as_rows(scratch, size)[rank])
        write_back(result, out)

    def all_to_all(self, code: int, tensor: Tensor, result: Tensor) -> None:
        """Send row j of the (size, ...) ``tensor`` to rank j, and receive row i of ``result`` from rank i."""
        flat, out = flat_values(tensor), flat_buffer(result)
        rank, size = self._rank, self._size
        if overlap([flat], [out]):
            flat = flat.clone()
        sent, received = as_rows(flat, size), as_rows(out, size)
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("all_to_all", flat.nbytes)
            if plan is None:
                for row, slot in zip(received, self._publish(flat, flat.nbytes, message_tag), strict=True):
                    row.copy_(as_rows(slot, size)[rank])
            else:
                received[rank].copy_(sent[rank])
                run(plan.steps, self._transport, AllToAllChunks(rank, size, sent, received), message_tag)
        write_back(result, out)

    def scatter(self, code: int, tensor: Tensor | None, result: Tensor, root: int) -> None:
        """Send row r of the root's (size, ...) ``tensor``, None on the other ranks, to the ``result`` of rank r."""
        flat = None if tensor is None else flat_values(tensor)
        out = flat_buffer(result)
        nbytes = out.nbytes * self._size
        with self._engine.call(code) as message_tag:
            plan = self._engine.plan("scatter", nbytes, root)
            if plan is None:
                slots = self._publish(out[:0] if flat is None else flat, nbytes, message_tag)
                out.copy_(as_rows(slots[root], self._size)[self._rank])
            else:
                buffer = out.new_empty(self._size * out.numel()) if flat is None else flat
                run(plan.steps, self._transport, EqualChunks(buffer, plan.chunks), message_tag)
                copy_values(out, as_rows(buffer, self._size)[self._rank])
        write_back(result, out)

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`."""
        self._synchronize(encode_signature("barrier", 0, torch.uint8, None, None))

    @torch.inference_mode(mode=False)
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in memory that all ranks of the host can read, if the transport has such memory."""
        count = math.prod(shape)
        self._synchronize(encode_signature("empty", count, dtype, None, None))
        return self._transport.empty(count * dtype.itemsize, self.exchange).view(dtype).view(shape)

    def exchange(self, blob: bytes) -> list[bytes]:
        """Return every rank's bytes in rank order: a `BootstrapAllGather`."""
        lengths = torch.empty((self._size, 1), dtype=torch.int64, device="cpu")
        self._all_gather(torch.tensor([len(blob)], device="cpu"), lengths)
        longest = int(lengths.max())
        own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if blob:
            own[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        blobs = torch.empty((self._size, longest), dtype=torch.uint8, device="cpu")
        self._all_gather(own, blobs)
        return [row[:length].tobytes() for row, length in zip(blobs.numpy(), lengths.flatten().tolist(), strict=True)]

    def _all_gather(self, tensor: Tensor, result: Tensor) -> None:
        if isinstance(self._slot_exchange, CompiledSlotExchange):
            if self._engine.run_compiled(ALL_GATHER, tensor, result):
                return
            self._engine.check_open()
        self.all_gather(encode_signature("all_gather", tensor.numel(), tensor.dtype, None, None), tensor, result)

    def _large(self, source: Tensor, flat: Tensor, op: str, code: int) -> None:
        """Reduce a tensor above a slot: in chunks through the slots, or by the schedule, as rank 0 chooses.

        Chunks are two to three times as fast on idle cores, and slower where ranks wait for a core after each chunk.
        Both ways give the same bits for two ranks, because addition is commutative.
        """
        engine, slot_exchange = self._engine, self._slot_exchange
        assert isinstance(slot_exchange, CompiledSlotExchange)
        plan = engine.plan("all_reduce", flat.nbytes)
        assert plan is not None
        size = flat.nbytes.bit_length()
        costs = self._costs.setdefault((size, self._transport.is_registered(flat)), Costs())
        with engine.call(code) as message_tag:
            ways = self._ways.setdefault(size, [])
            if not ways:
                if self._rank == 0:
                    self._choices[slot_exchange.parity][0] = costs.choose()
                choice = int(self._choices[engine.exchange_slots(*message_tag)][0])
                ways += [choice & 1] * _CALLS_PER_CHOICE
                if choice & 2:  # a trial: the second call of a way finds its memory in caches
                    ways[-2:] = [1 - ways[0]] * 2
            way = ways.pop()
            began = time.perf_counter()
            if way:
                self._by_schedule(source, flat, op, plan, message_tag)
            elif engine.run_core(ALL_REDUCE, source, flat, op, flat.nbytes) != DONE:
                raise ValueError(_NO_MEMORY.format(tuple(flat.shape)))
            costs.note(way, time.perf_counter() - began)

    def _divisor(self, op: str) -> int:
        return self._size if op == "mean" else 1

    def _publish(self, flat: Tensor, nbytes: int, message_tag: MessageTag) -> list[Tensor]:
        """Copy a tensor into this rank's slot and return all ranks' slots, which are valid until the next call.

        Args:
            flat: 1-d tensor; other ranks' may be longer.
            nbytes: bytes of the longest tensor of a rank.
            message_tag: number and code of the call.
        """
        slot_exchange = self._slot_exchange
        assert slot_exchange is not None
        slots = self._slots.get((nbytes, flat.dtype))
        if slots is None:
            if len(self._slots) >= _MOST_SLOT_VIEWS:
                self._slots.clear()
            slots = self._slots[nbytes, flat.dtype] = slot_exchange.slots(nbytes, flat.dtype)
        slots[slot_exchange.parity][self._rank][: flat.numel()].copy_(flat)
        return slots[self._engine.exchange_slots(*message_tag)]

    def _synchronize(self, code: int) -> None:
        """Wait until all ranks are in this call."""
        with self._engine.call(code) as message_tag:
            if self._slot_exchange is not None:
                self._engine.exchange_slots(*message_tag)
                return
            plan = self._engine.plan("all_reduce", 0)
            assert plan is not None  # without shared memory there is always a schedule
            chunks = EqualChunks(torch.empty(0, dtype=torch.uint8, device="cpu"), plan.chunks)
            run(plan.steps, self._transport, chunks, message_tag)


class Costs:
    """Measured seconds of two ways to do the same, and the choice between them: the faster one, with some trials."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        self._choices, self._next_trial = 0, 4

    def choose(self) -> int:
        """Return the way of the next calls, 0 or 1; 2 more if the first of them are to try the other way."""
        best = int(self._seconds[1] < self._seconds[0])  # a way without a time is the best one
        self._choices += 1
        if self._choices < self._next_trial or not all(self._seconds):
            return best
        slower = self._seconds[1 - best] / self._seconds[best]  # slower ways are tried less often
        self._next_trial += int(min(self._choices, _TRIAL_CHOICES) * slower)
        return best + 2

    def note(self, way: int, seconds: float) -> None:
        """Record a call's time; outliers have little weight."""
        known = self._seconds[way]
        self._seconds[way] = seconds if not known or seconds < known else known + (min(seconds, 2 * known) - known) / 4


class _KeptInput(Chunks):
    """Chunks that are read from the input until they are written to the result, so that the input needs no copy.

    For the steps that `_written_chunks` accepts: each reads either written chunks or unwritten ones.
    """

    def __init__(self, given: Tensor, out: Tensor, own: range, chunks: int) -> None:
        """Use an input of ``chunks`` chunks; the steps write the chunks ``own``, which are ``out``."""
        self._given = EqualChunks(given, chunks)
        self._out = EqualChunks(out, len(own))
        self._first = own.start
        self._written: set[int] = set()

    def source(self, first: int, last: int) -> Tensor:
        if self._written.issuperset(range(first, last)):  # a partial sum
            return self._out.source(first - self._first, last - self._first)
        return self._given.source(first, last)

    def target(self, first: int, last: int) -> Tensor:
        self._written.update(range(first, last))
        return self._out.target(first - self._first, last - self._first)


@lru_cache(maxsize=1024)
def _written_chunks(steps: tuple[Step, ...]) -> frozenset[int]:
    """Return the chunks that a rank's steps write; none if a step reads both written and unwritten chunks."""
    written: set[int] = set()
    for step in steps:
        chunks = range(step.first, step.last)
        if not isinstance(step, Receive) and len(written.intersection(chunks)) not in (0, len(chunks)):
            return frozenset()
        if not isinstance(step, Send):
            written.update(chunks)
    return frozenset(written)

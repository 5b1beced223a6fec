"""Collectives in host memory: through shared slots for small tensors, by a schedule for large ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from gangline.collectives.call_signature import TABLE
from gangline.collectives.compiled_core import ALL_GATHER, ALL_REDUCE, BROADCAST, DONE, reduction
from gangline.collectives.engine.arguments import Call, check_call
from gangline.collectives.engine.engine import Engine, Plan, RunningCall
from gangline.collectives.engine.executor import Chunks, Region, is_at, run
from gangline.collectives.engine.host_staging import (
    as_plain,
    as_rows,
    flat_buffer,
    flat_values,
    overlap,
    write_back,
)
from gangline.collectives.engine.reduction import as_sent
from gangline.collectives.engine.uneven_all_to_all import UnevenAllToAll
from gangline.collectives.transports.base import SLOT_BYTES, MessageTag

_CALLS_PER_CHOICE = 8  # between exchanges of rank 0's choice, in which ranks wait for each other
_TRIAL_CHOICES = 8  # of them begins with a trial of the slower path, if that is nearly as fast; at first more often
_TRIAL_FLAG = 2
_MOST_PLANS = 4096


class Path(IntEnum):
    """Path of the data of a large all-reduce: in chunks through the slots, or by a schedule."""

    SLOTS = 0
    SCHEDULE = 1


class HostCollectives:
    """Collectives of one rank, on tensors of any layout on the CPU or a GPU."""

    def __init__(self, engine: Engine) -> None:
        resources = engine.resources
        self.all_to_all_uneven = UnevenAllToAll(engine, self._all_gather)
        self._engine = engine
        self._transport, self._slot_exchange = resources.transport, resources.slot_exchange
        self._rank, self._size = resources.rank, resources.size
        self._plans: dict[tuple[object, ...], Plan | None] = {}
        self._costs: dict[int, Costs] = {}  # by the logarithm of bytes
        self._paths: dict[int, list[Path]] = {}  # of the next large all-reduces, by the logarithm of bytes

    def run(self, call: Call) -> None:
        """Run a collective: through the slots if its tensors fit, else by a schedule."""
        key = call.number, call.nbytes, call.root, call.op, call.first.dtype
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(call)
        plan = self._plans[key]
        if plan is not None:
            with RunningCall(self._engine, call.code) as message_tag:
                chunks, out = self._staged(call, plan)
                run(plan.steps, self._transport, chunks, message_tag, call.op or "sum", self._divisor(call))
                self._finish(call, chunks, out)
        elif call.nbytes > SLOT_BYTES:
            self._large(call)
        else:
            self._by_core(call, partial(self._engine.run_compiled, call.number))

    def _plan(self, call: Call) -> Plan | None:
        can_reduce = not call.rule.has_op or reduction(call.first.dtype, call.op or "") is not None
        streams = can_reduce and call.number == ALL_REDUCE
        return self._engine.plan(call.rule.name, call.nbytes, call.root, streams=streams, has_slots=can_reduce)

    def _by_core(self, call: Call, run_core: Callable[..., int]) -> None:
        """Run a call with its tensors, or with plain copies of those that the core declines."""
        rule, tensor, result = call.rule, call.tensor, call.result
        option = (call.root, call.op) if rule.has_op and rule.has_root else call.op if rule.has_op else call.root
        is_broadcast = call.number == BROADCAST  # whose one tensor is read on one rank and written on the others
        given, out = (call.first, None) if is_broadcast else (tensor, result)
        if run_core(given, out, option, call.nbytes) == DONE:
            return
        self._engine.check_open()
        flat = None if tensor is None else as_plain(flat_values(tensor))
        written = None if result is None else flat if result is tensor else as_plain(flat_buffer(result))
        given = flat if flat is None or not rule.in_rows else as_rows(flat, self._size)
        out = written if written is None or not rule.out_rows else as_rows(written, self._size)
        if is_broadcast:
            given, out = written if given is None else given, None
        if run_core(given, out, option, call.nbytes) != DONE:
            self._engine.check_open()
            shape = tuple(call.first.shape)
            raise ValueError(
                f"the values of a tensor of shape {shape} are in no memory; expected a tensor with storage"
            )
        if result is not None and written is not None:
            write_back(result, written)

    def _by_schedule(self, call: Call, plan: Plan, message_tag: MessageTag) -> int:
        """Run the steps of a plan, and return when the first message had arrived (`executor.run`)."""
        chunks, out = self._staged(call, plan)
        arrived = run(plan.steps, self._transport, chunks, message_tag, call.op or "sum", self._divisor(call))
        self._finish(call, chunks, out)
        return arrived

    def _divisor(self, call: Call) -> int:
        return self._size if call.op == "mean" else 1

    def _finish(self, call: Call, chunks: Chunks, out: Tensor | None) -> None:
        chunks.finish()
        if call.result is not None and out is not None:
            write_back(call.result, out)

    def _staged(self, call: Call, plan: Plan) -> tuple[Chunks, Tensor | None]:
        """Return the memory of a plan's chunks, and that of this rank's result, which `write_back` takes."""
        rule, rank, size, total = call.rule, self._rank, self._size, plan.chunks
        flat = None if call.tensor is None else flat_values(call.tensor)
        out = None if call.result is None else flat if call.result is call.tensor else flat_buffer(call.result)
        values = flat if flat is None or call.op is None else as_sent(flat, call.op)
        every, own = range(total), range(rank * (total // size), (rank + 1) * (total // size))
        read, written = own if rule.out_rows else every, own if rule.in_rows else every
        if rule.in_rows and rule.out_rows:  # chunk i * size + j goes from rank i to rank j
            read, written = range(rank * size, (rank + 1) * size), range(rank, total, size)
        elif rule.out_rows:
            written = every
        elif rule.in_rows:
            read = every
        given = None if values is None else Region(values, read)
        result = None if out is None else Region(out, written)
        is_copy, is_same = values is not flat, values is out and read == written
        if given and result and not (is_copy or is_same) and overlap([given.flat], [result.flat]):
            is_copy = not (is_at(given, result) or is_at(result, given))
            given = Region(given.flat.clone(), read) if is_copy else given
        count = call.nbytes // call.first.itemsize * (size if rule.out_rows and not rule.in_rows else 1)
        return Chunks(total, count, given, result, is_scratch=is_copy), out

    def synchronize(self, code: int) -> None:
        """Wait until all ranks are in a call."""
        self.gather_flags(code, 0)

    def gather_flags(self, code: int, flag: int) -> list[int]:
        """Return a byte of every rank, as a call of this code."""
        with RunningCall(self._engine, code) as message_tag:
            if self._slot_exchange is not None:
                return self._exchange_flags(flag, message_tag)
            flags = torch.zeros(self._size, dtype=torch.uint8, device="cpu")
            own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
            call = Call(ALL_GATHER, TABLE[ALL_GATHER], code, own, flags, None, None, 1, own)
            plan = self._engine.plan("all_gather", 1)
            assert plan is not None  # without slots there is always a schedule
            self._by_schedule(call, plan, message_tag)
        return flags.tolist()

    @cached_property
    def _flags(self) -> list[list[np.ndarray]]:
        """By parity and rank, the first byte of a slot."""
        assert self._slot_exchange is not None
        return [[slot.numpy() for slot in slots] for slots in self._slot_exchange.slots(1, torch.uint8)]

    def _exchange_flags(self, flag: int, message_tag: MessageTag) -> list[int]:
        assert self._slot_exchange is not None
        self._flags[self._slot_exchange.parity][self._rank][0] = flag
        parity = self._engine.exchange_slots(*message_tag)
        return [int(slot[0]) for slot in self._flags[parity]]

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
        self.run(check_call(ALL_GATHER, tensor, result, None, self._rank, self._size))

    def _large(self, call: Call) -> None:
        """Reduce a tensor above a slot: in chunks through the slots, or by the schedule, as rank 0 chooses.

        Chunks are two to three times as fast on idle cores, and slower where ranks wait for a core after each chunk.
        Both paths give the same bits for two ranks, because addition is commutative.
        """
        engine, slot_exchange, size = self._engine, self._slot_exchange, call.nbytes.bit_length()
        assert slot_exchange is not None
        costs = self._costs.get(size) or self._costs.setdefault(size, Costs())
        with RunningCall(engine, call.code) as message_tag:
            paths = self._paths.get(size) or self._paths.setdefault(size, [])
            if not paths:
                self._choose_paths(paths, costs, message_tag)
            path = paths.pop()
            if path is Path.SCHEDULE:
                plan = engine.plan("all_reduce", call.nbytes)
                assert plan is not None
                arrived = self._by_schedule(call, plan, message_tag)
            else:
                self._by_core(call, partial(engine.run_core, ALL_REDUCE))
                arrived = slot_exchange.arrived
            costs.note(path, time.monotonic_ns() - arrived)

    def _choose_paths(self, paths: list[Path], costs: Costs, message_tag: MessageTag) -> None:
        """Take rank 0's choice for the next calls."""
        flag = 0
        if self._rank == 0:
            path, tries_other = costs.choose()
            flag = path + _TRIAL_FLAG * tries_other
        flag = self._exchange_flags(flag, message_tag)[0]
        path, tries_other = Path(flag % _TRIAL_FLAG), flag >= _TRIAL_FLAG
        paths += [path] * _CALLS_PER_CHOICE
        if tries_other:  # the second call of a path finds its memory in caches
            paths[-2:] = [Path(1 - path)] * 2


class Costs:
    """Measured times of the two paths, and the choice between them: the faster one, with some trials of the other.

    A call's time begins when the first data of the other ranks is there, so that a late rank makes no path slow.
    """

    def __init__(self) -> None:
        self._times = [0.0, 0.0]
        self._choices, self._next_trial = 0, 4

    def choose(self) -> tuple[Path, bool]:
        """Return the path of the next calls, and whether the first of them are to try the other one."""
        best = Path(self._times[1] < self._times[0])  # a path without a time is the best one
        self._choices += 1
        if self._choices < self._next_trial or not all(self._times):
            return best, False
        slower = self._times[1 - best] / self._times[best]  # slower paths are tried less often
        self._next_trial += int(min(self._choices, _TRIAL_CHOICES) * slower)
        return best, True

    def note(self, path: Path, elapsed: float) -> None:
        """Record a call's time; outliers have little weight."""
        known = self._times[path]
        self._times[path] = elapsed if not known or elapsed < known else known + (min(elapsed, 2 * known) - known) / 4

"""Backend with torch's copies and sums: for CPU contexts, for one GPU at several positions, and as the fallback.

The caller chooses the device of each sum (its owner); torch copies the bytes, directly between GPUs, in the order of
the current streams. Large sums on the CPU run in C, chunk by chunk, so that a chunk is summed and copied while it is in
a core's cache.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter

import torch
from torch import Tensor

from gangline.collectives import thread_pool
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.compiled_core import core
from gangline.collectives.devices.backends.base import Backend, Transfer, even_slices, mark_written
from gangline.collectives.engine import host_staging, reduction

_MIN_THREADED = 8 << 20  # bytes of sums below which threads do not pay
_MIN_STREAMED = 1 << 20  # bytes of a sum that bypasses the cache: a smaller one is read again before it leaves it

_MOST_SMALL = 16 * 1024  # bytes of a tensor up to which calls cost more than passes over memory
LEAST_JOINT = 8  # tensors for which joint calls pay

_SPAN = 2 << 20  # bytes that a thread takes at once: few enough that no thread waits long for the last one
_LEAST_SPAN = 256 * 1024  # bytes; in smaller spans calls dominate

_is_cpu = attrgetter("is_cpu")
_Span = tuple[Transfer, int, int]
"""A transfer, and the first element and the end of the part of it."""


class Copies(Backend):
    """Transfers by ``copy_`` and reductions by torch's arithmetic, on any devices.

    Values are combined in the order of the positions, so results are bitwise reproducible; float16 and bfloat16 are
    combined in float32 and rounded once.
    """

    name = "copies"

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        move(transfers, op)

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        if len(set(self.devices)) == 1 or not all(tensor.is_contiguous() for tensor in tensors):
            move([(tensors, tensors[0], tensors[1:])], op)
            return
        flats = [tensor.view(-1) for tensor in tensors]
        transfers: list[Transfer] = []  # each device combines a slice, so that all links are busy
        for position, part in enumerate(even_slices(len(flats[0]), len(flats))):
            pieces = [flat[part] for flat in flats]
            transfers.append((pieces, pieces[position], pieces[:position] + pieces[position + 1 :]))
        move(transfers, op)


def move(transfers: Sequence[Transfer], op: str = "sum") -> None:
    """Run `Backend.move` for values and outs on any devices, in any number."""
    transfers = [(values, total, [out for out in outs if out is not total]) for values, total, outs in transfers]
    if any(total.is_cpu and any(one.is_cuda for one in (*values, *outs)) for values, total, outs in transfers):
        _move_by_the_host(transfers, op)
        return
    if core is not None and op == "sum" and sum(total.nbytes for _, total, _ in transfers) >= _MIN_THREADED:
        transfers = _run_in_chunks(transfers)
    if op == "sum" and len(transfers) >= LEAST_JOINT:
        transfers = _run_small_jointly(transfers)
    for values, total, outs in transfers:
        if values:
            _combine(values, total, op)
        for out in outs:
            out.copy_(total, non_blocking=total.is_cuda and out.is_cuda)


def _move_by_the_host(transfers: Sequence[Transfer], op: str) -> None:
    """Combine values of GPUs on the host, for which it waits once for each GPU, and copy totals to GPUs without a wait.

    Copies use pinned memory: from and to other memory each one makes the host wait, and is several times slower.
    """
    by_host = [transfer for transfer in transfers if transfer[1].is_cpu]
    copies = iter(host_staging.copies_on_host([value for values, _, _ in by_host for value in values]))
    on_host: list[Transfer] = [
        (list(islice(copies, len(values))), total, [out for out in outs if out.is_cpu])
        for values, total, outs in by_host
    ]
    move(on_host + [transfer for transfer in transfers if not transfer[1].is_cpu], op)
    for _, total, outs in by_host:
        if gpus := [out for out in outs if out.is_cuda]:
            host_staging.copy_to_gpus(total, gpus)


def _run_in_chunks(transfers: Sequence[Transfer]) -> Sequence[Transfer]:
    """Run the transfers that can be chunked, if they are large enough for threads; return the others."""
    plain = [_is_plain(transfer) for transfer in transfers]
    chunked = [transfer for transfer, is_plain in zip(transfers, plain, strict=True) if is_plain]
    if sum(total.nbytes for _, total, _ in chunked) < _MIN_THREADED:
        return transfers
    _move_in_chunks(chunked)
    return [transfer for transfer, is_plain in zip(transfers, plain, strict=True) if not is_plain]


def _run_small_jointly(transfers: Sequence[Transfer]) -> Sequence[Transfer]:
    """Run small transfers on the CPU with a call for all of them in place of one for each; return the others."""
    alike: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
    left: list[Transfer] = []
    for transfer in transfers:
        values, total, outs = transfer
        (alike[len(values), len(outs)] if is_small(total) else left).append(transfer)
    for some in alike.values():
        totals = [total for _, total, _ in some]
        columns = [*zip(*(values for values, _, _ in some), strict=True)]
        copied = [*zip(*(outs for _, _, outs in some), strict=True)]
        on_host = all(map(_is_cpu, chain(totals, *columns, *copied)))
        read = {*map(Tensor.data_ptr, chain(*columns))}
        if len(some) < LEAST_JOINT or not on_host or not read.isdisjoint(map(Tensor.data_ptr, totals)):
            left += some
        else:
            move_jointly(columns, totals, copied)
    return left


def move_jointly(
    values: Iterable[tuple[Tensor, ...]], totals: list[Tensor], outs: Iterable[tuple[Tensor, ...]]
) -> None:
    """Run transfers with a call for all of them in place of one for each.

    Args:
        values: the first value of every transfer, then the second of every one, and so on; all on the CPU.
        totals: of dtypes other than float16 and bfloat16, on the CPU, none in the memory of a value.
        outs: the first output of every transfer, and so on.
    """
    for number, of_position in enumerate(values):
        (torch._foreach_add_ if number else torch._foreach_copy_)(totals, of_position)
    for of_position in outs:
        torch._foreach_copy_(of_position, totals)


def is_small(total: Tensor) -> bool:
    """Return whether joint calls pay for transfers like this one, and can be used."""
    return total.nbytes <= _MOST_SMALL and total.dtype not in reduction.HALVES


def _combine(values: Sequence[Tensor], out: Tensor, op: str) -> None:
    is_needed_later = any(value.device == out.device and value.data_ptr() == out.data_ptr() for value in values[2:])
    if op != "sum" or is_needed_later:
        divisor = len(values) if op == "mean" else 1
        reduction.combine([_on(value, out) for value in values], op, out, divisor)
    else:
        _add_up(values, out)


def _add_up(values: Sequence[Tensor], out: Tensor) -> None:
    """Sum into ``out`` directly and copy remote values one at a time: fewer temporaries than `reduction.combine`."""
    first, *others = values
    if not others:
        out.copy_(first)
        return
    total = out
    if out.dtype in reduction.HALVES and len(others) > 1:
        total = torch.empty_like(out, dtype=torch.float32)
    torch.add(_on(first, out).to(total.dtype), _on(others[0], out), out=total)
    for value in others[1:]:
        total.add_(_on(value, out))
    if total is not out:
        out.copy_(total)


def _on(value: Tensor, out: Tensor) -> Tensor:
    return value if value.device == out.device else value.to(out.device, non_blocking=value.is_cuda and out.is_cuda)


def _is_plain(transfer: Transfer) -> bool:
    """Return whether `gangline._core` gives the same result faster: contiguous float32 or float64 on the CPU."""
    values, total, outs = transfer
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        for tensor in (total, *values, *outs)
    )


def _move_in_chunks(transfers: Sequence[Transfer]) -> None:
    """Split the transfers into spans, which as many threads as torch uses take one by one."""
    threads = torch.get_num_threads()
    most = min(_SPAN, max(_LEAST_SPAN, sum(total.nbytes for _, total, _ in transfers) // (4 * threads)))
    spans: deque[_Span] = deque()
    for transfer in transfers:
        count, step = transfer[1].numel(), most // transfer[1].itemsize
        spans.extend((transfer, start, min(start + step, count)) for start in range(0, count, step))
    thread_pool.run([partial(_run, spans)] * threads)
    mark_written([tensor for _, total, outs in transfers for tensor in (total, *outs)])


def _run(spans: deque[_Span]) -> None:
    """Sum and copy spans until none is left; a deque's `popleft` is atomic."""
    assert core is not None
    while spans:
        try:
            (values, total, outs), begin, end = spans.popleft()
        except IndexError:  # another thread took the last one
            return
        sources, targets = (values, (total, *outs)) if values else ([total], outs)
        offset = begin * total.itemsize
        if targets:
            core.combine(
                DTYPES.index(total.dtype),
                0,
                1,
                end - begin,
                tuple(one.data_ptr() + offset for one in sources),
                tuple(one.data_ptr() + offset for one in targets),
                total.nbytes >= _MIN_STREAMED,
            )

"""Backend with torch's copies and sums: for CPU contexts, for one GPU at several positions, and as the fallback.

The caller chooses the device of each sum (its owner); torch copies the bytes, directly between GPUs, in the order of
the current streams. Large sums on the CPU run in C, which reads each value and writes each output once.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import attrgetter

import torch
from torch import Tensor

from gangline.collectives import thread_pool
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.compiled_core import core
from gangline.collectives.devices.backends.base import Backend, Transfer, in_slices, mark_written
from gangline.collectives.engine import host_staging, reduction

_MIN_COMPILED = 1 << 20  # bytes of sums from which threads and non-temporal stores pay off
_NUMBERS = {dtype: DTYPES.index(dtype) for dtype in (torch.float32, torch.float64)}  # that `gangline._core` knows best

_MOST_SMALL = 16 * 1024  # bytes of a tensor up to which calls cost more than memory traffic
LEAST_JOINT = 8  # minimum number of tensors for which joint calls pay off

_is_cpu, _is_cuda, _nbytes, _dtype = map(attrgetter, ("is_cpu", "is_cuda", "nbytes", "dtype"))


class Copies(Backend):
    """Transfers by ``copy_`` and reductions by torch's arithmetic, on any devices.

    Values are combined in the order of the positions, so results are bitwise reproducible; float16 and bfloat16 are
    combined in float32 and rounded once.
    """

    name = "copies"

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        move(transfers, op)

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        if all(tensor.is_contiguous() for tensor in tensors):  # each device combines a slice: all links are busy
            flats = [tensor.view(-1) for tensor in tensors]
            move(in_slices(flats, [*self.owners.values()], len(self.owners)), op)
        else:
            move([(tensors, tensors[0], tensors[1:])], op)


def move(transfers: Sequence[Transfer], op: str = "sum") -> None:
    """Run `Backend.move` for values and outs on any devices, in any number."""
    nbytes, crosses, apart = 0, False, list[Transfer]()
    for values, total, outs in transfers:  # no call for each of them
        nbytes += total.nbytes
        crosses = crosses or (total.is_cpu and True in map(_is_cuda, chain(values, outs)))
        others = outs if id(total) not in map(id, outs) else [out for out in outs if out is not total]
        apart.append((values, total, others))
    transfers = apart
    if crosses:
        _move_by_the_host(transfers, op)
        return
    if op == "sum" and (len(transfers) >= LEAST_JOINT or nbytes >= _MIN_COMPILED):
        transfers = _run_jointly(transfers)
    for values, total, outs in transfers:
        if values:
            reduction.combine(values, op, total, len(values) if op == "mean" else 1)
        for out in outs:
            out.copy_(total, non_blocking=total.is_cuda and out.is_cuda)


def _move_by_the_host(transfers: Sequence[Transfer], op: str) -> None:
    """Combine values of GPUs on the host, waiting once for each GPU, and copy totals to GPUs asynchronously.

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


def move_compiled(values: Sequence[Sequence[Tensor]], totals: list[Tensor], outs: Sequence[Sequence[Tensor]]) -> bool:
    """Run transfers by `gangline._core` if possible and faster; otherwise return False without effect.

    The arguments are those of `move_jointly`, on any devices, and may share memory.
    """
    if core is None or sum(map(_nbytes, totals)) < _MIN_COMPILED:
        return False
    columns = [*(values or [totals]), *([totals] if values else ()), *outs]
    if not _are_plain(totals, [*chain(*columns)]):
        return False
    heads = zip(map(_NUMBERS.get, map(_dtype, totals)), map(Tensor.numel, totals), strict=True)
    counts = len(values) or 1, len(columns) - (len(values) or 1)
    rows = zip(*(map(Tensor.data_ptr, column) for column in columns), strict=True)
    if not _combined([word for head, row in zip(heads, rows, strict=True) for word in (*head, *counts, *row)]):
        return False
    mark_written(chain(totals if values else (), *outs))
    return True


def _run_jointly(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Run transfers that have equal numbers of tensors with one call, if possible and faster; return the others."""
    alike: defaultdict[tuple[int, int, bool, bool], list[Transfer]] = defaultdict(list)
    for values, total, outs in transfers:
        if values or outs:
            key = len(values), len(outs), total.dtype in _NUMBERS, is_small(total)
            alike[key].append((values, total, outs))
    left: list[Transfer] = []
    for (*_, are_small), some in alike.items():
        totals = [total for _, total, _ in some]
        summed, copied = ([*zip(*(transfer[place] for transfer in some), strict=True)] for place in (0, 2))
        if move_compiled(summed, totals, copied):
            continue
        is_joint = are_small and len(some) >= LEAST_JOINT and all(map(_is_cpu, chain(totals, *summed, *copied)))
        if is_joint and {*map(Tensor.data_ptr, chain(*summed))}.isdisjoint(map(Tensor.data_ptr, totals)):
            move_jointly(summed, totals, copied)
        else:
            left += some
    return left


def move_jointly(
    values: Iterable[tuple[Tensor, ...]], totals: list[Tensor], outs: Iterable[tuple[Tensor, ...]]
) -> None:
    """Run transfers with one call for all of them.

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
    """Return whether joint calls are possible and pay off for transfers like this one."""
    return total.nbytes <= _MOST_SMALL and total.dtype not in reduction.HALVES


def _are_plain(totals: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are contiguous, on the CPU, and of the totals' dtype, float32 or float64."""
    return (
        _NUMBERS.keys() >= {*map(_dtype, totals)}
        and all(map(_is_cpu, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def _combined(words: list[int]) -> bool:
    """Run sums in as many threads as torch uses; return False if they overlap."""
    packed = array("q", words).tobytes()
    if not _are_apart(packed):
        return False
    assert core is not None
    thread_pool.share(partial(core.combine, 0, 1, True, packed, bytearray(8)), torch.get_num_threads())
    return True


@lru_cache(maxsize=256)
def _are_apart(packed: bytes) -> bool:
    """Return whether no packed sum writes memory that another sum uses, or that partly overlaps its own tensors."""
    words, at = memoryview(packed).cast("q"), 0
    used: dict[tuple[int, int, int], bool] = {}  # memory of each sum, and whether it writes it
    while at < len(words):
        number, count, sources, outs = words[at : at + 4]
        for place in range(sources + outs):
            begin = words[at + 4 + place]
            key = begin, begin + count * DTYPES[number].itemsize, at
            used[key] = used.get(key, False) or place >= sources
        at += 4 + sources + outs
    read = written = 0  # ends of the memory so far
    for (begin, end, _), is_written in sorted(used.items()):
        if begin < end and (begin < written or (is_written and begin < read)):
            return False
        read, written = max(read, end), max(written, end if is_written else 0)
    return True

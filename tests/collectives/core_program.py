"""Program that runs `gangline._core` without torch: ranks that are threads, and sums of arrays, checked with numpy.

The tests run it with builds of the core for AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, which
checks the order of memory accesses by the rules of C and not by those of this machine's processor.

    python core_program.py PATH_OF_THE_CORE
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SLOT = 1 << 12
DTYPES = ("f4", "f8", "f2", None, "i1", "i2", "i4", "i8", "u1")  # None: bfloat16, which numpy lacks
OPS: tuple[Any, ...] = (np.add, np.add, np.multiply, np.minimum, np.maximum)
NAMES = ("sum", "mean", "product", "min", "max")
ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, BARRIER = range(9)
CALLS = [
    (dtype, op, count, flag)
    for dtype, name in enumerate(DTYPES)
    for op in range(len(OPS))
    for count in (0, 5, 1030, 17_000)  # ranks reduce a part each of the last one, if it has 64 KiB
    for flag in (0, 1)
    if name and (op != 1 or name[0] == "f")
]


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
KINDS = {"i": 0, "u": 1, "f": 2}


@DESCRIBE
def describe(array: Any, out: Any) -> int:
    """Fill a DLTensor as torch does; numpy has no such function."""
    found = out.contents
    found.data, found.ndim, found.offset = array.ctypes.data, array.ndim, 0
    found.device[:] = (1, 0)
    found.dtype[:] = (KINDS[array.dtype.kind], 8 * array.itemsize, 1, 0)
    words = (ctypes.c_int64 * (2 * array.ndim))(*array.shape, *(stride // array.itemsize for stride in array.strides))
    KEPT.words = [*getattr(KEPT, "words", [])[-1:], words]  # until after the next array
    found.shape, found.strides = ctypes.addressof(words), ctypes.addressof(words) + 8 * array.ndim
    return 0


KEPT = threading.local()
FUNCTIONS = (ctypes.c_void_p * 7)(1, 0, 0, 0, 0, ctypes.cast(describe, ctypes.c_void_p).value, 0)  # DLPackExchangeAPI


def load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_core", path)
    spec = importlib.util.spec_from_loader("_core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def given(rank: int, dtype: int, count: int) -> np.ndarray:
    return ((np.arange(count) * (rank + 3)) % 7 - 2).astype(DTYPES[dtype])


def expected(size: int, dtype: int, op: int, count: int) -> np.ndarray:
    total = given(0, dtype, count)
    for rank in range(1, size):
        total = OPS[op](total, given(rank, dtype, count))
    return (total / size).astype(total.dtype) if op == 1 else total


class Memory:
    """Marks, slots, futexes and flags of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.words = np.zeros((size, 64), np.int64)  # futex, asleep flags, marks from 16 and from 32 on
        self.slots = np.zeros((size, 2, SLOT), np.uint8)

    def group(self, rank: int) -> bytes:
        at = [self.words[other].ctypes.data for other in range(self.size)]
        words = [self.size, rank, SLOT, 20, 50, at[rank]]
        for other in range(self.size):
            slots = self.slots[other]
            words += [at[other] + 128, at[other] + 256, slots[0].ctypes.data, slots[1].ctypes.data]
            words.append(at[other] + 8 * (1 + rank))
        return struct.pack(f"{len(words)}q", *words)


def reduce_in_threads(core: Any, size: int) -> None:
    memory = Memory(size)
    problems: list[str] = []

    def run_rank(rank: int) -> None:
        slots = core.open_slots(memory.group(rank))
        state = bytearray(8 * core.SHARED)
        shared = memoryview(state).cast("q")
        shared[core.LIMITS :] = memoryview(struct.pack("9q", *[1 << 30] * 9)).cast("q")
        collective, begin, end = core.caller((slots, lambda: time.sleep(0), lambda error: error, state))
        for sequence, (dtype, op, count, is_in_place) in enumerate(CALLS, 1):
            tensor = given(rank, dtype, count)
            out = tensor if is_in_place else np.empty_like(tensor)
            total = expected(size, dtype, op, count)
            rows = np.stack([given(other, dtype, count) for other in range(size)])
            own, row = rows[rank].copy(), np.empty_like(tensor)
            calls: list[tuple[int, Any, Any, Any, Any]] = [
                (ALL_REDUCE, tensor, out, NAMES[op], total),
                (BARRIER, None, None, None, None),
            ]
            if rows.nbytes <= SLOT:
                calls += [
                    (ALL_GATHER, own, np.empty_like(rows), None, rows),
                    (BROADCAST, own, own, size - 1, rows[-1]),
                    (REDUCE_SCATTER, np.stack([rows[rank]] * size), row, NAMES[op], total),
                    (ALL_TO_ALL, np.stack([rows[rank]] * size), np.empty_like(rows), None, rows),
                    (REDUCE, rows[rank].copy(), np.empty_like(row), (0, NAMES[op]), None if rank else total),
                    (GATHER, rows[rank].copy(), None if rank else np.empty_like(rows), 0, None if rank else rows),
                    (SCATTER, None if rank else rows, np.empty_like(row), 0, rows[rank]),
                ]
            unchecked: list[tuple[Any, Any]] = []
            for place, (number, operand, result, option, wanted) in enumerate(calls):
                unchecked.append((result, wanted))
                is_begun = (sequence + place + rank) % 3 == 0  # other ranks run it, or begin it too
                found = begin(number, operand, result, option) if is_begun else -4
                if found > 0 and place % 2 and place + 1 < len(calls):
                    continue  # the next call ends it
                found = end(found, True) if found > 0 else collective(number, operand, result, option)
                if found == -4:  # each 256th call must take the lock
                    shared[core.LOCKED] = threading.get_ident()
                    shared[core.SEQUENCE] += 1
                    found = collective(number, operand, result, option, -1)
                    shared[core.LOCKED] = 0
                if found < 0 or not all(w is None or np.array_equal(r, w) for r, w in unchecked):
                    problems.append(f"rank {rank}: {number} {DTYPES[dtype]} {NAMES[op]} {count}: {found}")
                    return
                unchecked.clear()
            if core.exchange(slots, sequence, 7) == -1:
                count_now, *_ = core.state(slots)
                while not all(memory.words[other, 16 + 16 * (count_now & 1)] >= count_now for other in range(size)):
                    time.sleep(0)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def combine(core: Any) -> None:
    for dtype, op, count, streams in CALLS:
        for operands in (1, 2, 3):
            sources = [given(rank, dtype, count) for rank in range(operands)]
            outs = [sources[0], np.empty(count + 1, DTYPES[dtype])[1:]]
            words = [dtype, count, operands, 2, *(one.ctypes.data for one in (*sources, *outs))]
            packed = struct.pack(f"{len(words)}q", *words)
            core.combine(op, operands if op == 1 else 1, bool(streams), packed, bytearray(8))
            for out in outs:
                assert np.array_equal(out, expected(operands, dtype, op, count)), (dtype, op, count, operands)


def combine_in_threads(core: Any) -> None:
    """Threads that share a number take the spans of all sums, each one once: one taken twice would be added twice."""
    count = 200_000
    sources = [[given(rank, dtype, count) for rank in range(2)] for dtype in (0, 1, 6, 7)]
    words: list[int] = []
    for dtype, (first, second) in zip((0, 1, 6, 7), sources, strict=True):
        words += [dtype, count, 2, 1, first.ctypes.data, second.ctypes.data, first.ctypes.data]
    packed, taken = struct.pack(f"{len(words)}q", *words), bytearray(8)
    threads = [threading.Thread(target=core.combine, args=(0, 1, True, packed, taken)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dtype, (first, _) in zip((0, 1, 6, 7), sources, strict=True):
        assert np.array_equal(first, expected(2, dtype, 0, count)), dtype


def main() -> None:
    core = load(str(Path(sys.argv[1]).resolve()))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(ctypes.addressof(FUNCTIONS), b"dlpack_exchange_api", None)
    assert core.use_tensors(capsule, np.ndarray, np.ndarray, lambda _: False, lambda _: False)
    combine(core)
    combine_in_threads(core)
    for size in (1, 2, 3):
        reduce_in_threads(core, size)
    print("equal")


if __name__ == "__main__":
    main()

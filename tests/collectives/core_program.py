"""Program that runs `gangline._core` without torch: ranks that are threads, and sums of arrays, checked with numpy.

The tests run it with builds of the core for AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, which
checks the order of memory accesses by the rules of C and not by those of this machine's processor.

    python core_program.py PATH_OF_THE_CORE
"""

from __future__ import annotations

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
CALLS = [
    (dtype, op, count, by_part)
    for dtype, name in enumerate(DTYPES)
    for op in range(len(OPS))
    for count in (0, 1, 5, 1030, 5000)
    for by_part in (0, 1)
    if name and (op != 1 or name[0] == "f")
]


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

    def run(rank: int) -> None:
        slots = core.open_slots(memory.group(rank))
        for sequence, (dtype, op, count, by_part) in enumerate(CALLS, 1):
            tensor = given(rank, dtype, count)
            out = tensor if sequence % 2 else np.empty_like(tensor)
            chunk = SLOT // tensor.itemsize // (1 + sequence % 3)
            code = 1000 + sequence
            prepared = struct.pack("7q", count, dtype, op, size if op == 1 else 1, code, chunk, by_part)
            found = core.all_reduce(slots, prepared, tensor.ctypes.data, out.ctypes.data, sequence)
            while found == 1:
                time.sleep(0)
                found = core.resume(slots)
            if found or not np.array_equal(out, expected(size, dtype, op, count)):
                problems.append(f"rank {rank}: {DTYPES[dtype]} {OPS[op].__name__} {count} by_part={by_part}: {found}")
                return
            while (found := core.exchange(slots, sequence, 7)) == 1:
                count_now = core.exchanges(slots)
                while not all(memory.words[other, 16 + 16 * (count_now & 1)] >= count_now for other in range(size)):
                    time.sleep(0)
                break

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
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
    combine(core)
    combine_in_threads(core)
    for size in (1, 2, 3):
        reduce_in_threads(core, size)
    print("equal")


if __name__ == "__main__":
    main()

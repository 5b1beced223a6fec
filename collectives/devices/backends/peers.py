"""Peer access between GPUs, proven by writing and reading back in a child process that may hang.

The driver's answer about peer access is unreliable: on some GPUs copies give wrong bytes, on others the first attempt
never returns. So a child process tries, and the parent waits up to a deadline.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import permutations
from pathlib import Path

import numpy as np

from gangline.collectives.devices.backends import kernels

Pair = tuple[int, int]
"""The GPU that reads and writes, and the GPU that owns the memory, by torch's index."""

_DEADLINE = 60.0  # seconds per pair, including the start of the child and its first kernel
_KILL_TIMEOUT = 5.0  # seconds for a killed child to end
_COMMAND = (sys.executable, "-m", "gangline.collectives.devices.backends.peers")
_ROOT = str(Path(__file__).absolute().parents[4])  # PYTHONPATH of the child; not resolved, since folders may be links
_COUNT = 1 << 16  # elements per trial

_known: dict[Pair, str] = {}
_lock = threading.Lock()


def problem(devices: Sequence[int]) -> str:
    """Return why some GPUs, maybe one of them twice, cannot access others' memory; "" if all can. Tried once."""
    pairs = [*permutations(sorted(set(devices)), 2)]
    with _lock:
        _known.update(prove([pair for pair in pairs if pair not in _known]))
        failed = next((pair for pair in pairs if _known[pair]), None)
    return "" if failed is None else "gpu({}) and the memory of gpu({}): {}".format(*failed, _known[failed])


def prove(pairs: Sequence[Pair], command: Sequence[str] = _COMMAND, deadline: float = _DEADLINE) -> dict[Pair, str]:
    """Try pairs in child processes and return the problem of each; "" for those that work.

    Args:
        pairs: pairs to try, in this order.
        command: command of the child, which takes arguments like "0,1 1,0" and prints a line after each pair: "ok", or
            the problem.
        deadline: seconds to wait for a line; then the child is killed, and another one tries the pairs after that one.
    """
    problems: list[str] = []
    while len(problems) < len(pairs):
        left = pairs[len(problems) :]
        lines, end = _lines([*command, *(f"{one},{other}" for one, other in left)], len(left), deadline)
        problems += ["" if line == "ok" else line for line in lines] + [end] * (len(lines) < len(left))
    return dict(zip(pairs, problems, strict=True))


def _lines(command: Sequence[str], count: int, deadline: float) -> tuple[list[str], str]:
    """Return the lines that a child printed, and why the output ended."""
    child = subprocess.Popen(  # noqa: S603  our own command
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])},
        start_new_session=True,
    )
    lines: list[str] = []
    end = f"no answer within {deadline:g} s"
    assert child.stdout is not None
    with child.stdout, selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        read, until = b"", time.monotonic() + deadline
        while len(lines) < count and selector.select(max(0.0, until - time.monotonic())):
            piece = os.read(child.stdout.fileno(), 4096)
            if not piece:
                end = f"the process that tried it ended with {child.wait()}"
                break
            *whole, read = (read + piece).split(b"\n")
            lines += [line.decode() for line in whole]
            until = time.monotonic() + deadline if whole else until
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver may not die
        child.wait(_KILL_TIMEOUT)
    return lines[:count], end


def _try(one: int, other: int) -> str:
    """Read and write the memory of GPU ``other`` from ``one``; return the problem, or "ok"."""
    cupy = import_module("cupy")
    if not cupy.cuda.runtime.deviceCanAccessPeer(one, other):
        return "the driver reports no peer access"
    reach(one, other)
    expected = np.arange(_COUNT, dtype=np.float32) * 3 + one
    with cupy.cuda.Device(other):
        far_values, far_out = cupy.asarray(expected), cupy.zeros(_COUNT, cupy.float32)
        cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Device(one):
        near_out = cupy.zeros(_COUNT, cupy.float32)
        kernel = cupy.RawKernel(kernels.source("float32", "sum", 1, 2), kernels.NAME)
        pointers = [np.uint64(array.data.ptr) for array in (far_values, near_out, far_out)]
        kernel((kernels.blocks(_COUNT, 4),), (kernels.BLOCK,), (*pointers, np.int64(_COUNT)))
        cupy.cuda.runtime.deviceSynchronize()
        read = near_out.get()
    with cupy.cuda.Device(other):
        written = far_out.get()
    if not (np.array_equal(read, expected) and np.array_equal(written, expected)):
        return "reads or writes gave wrong values"
    return "ok"


def reach(one: int, other: int) -> None:
    """Enable access from kernels on GPU ``one`` to the memory of ``other``; idempotent."""
    cupy = import_module("cupy")
    already_enabled = 704  # cudaErrorPeerAccessAlreadyEnabled: by us, or by torch
    with cupy.cuda.Device(one):
        try:
            cupy.cuda.runtime.deviceEnablePeerAccess(other)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != already_enabled:
                raise


def _main(arguments: Sequence[str]) -> None:
    for argument in arguments:
        one, _, other = argument.partition(",")
        try:
            line = _try(int(one), int(other))
        except Exception as error:  # noqa: BLE001  any error means that the pair does not work
            line = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(line, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])

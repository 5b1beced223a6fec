"""`gangline bench device-group`: sums and copies between the devices of one process, beside a copy of one buffer.

An all-reduce in place of k buffers of n bytes reads and writes at least 2 k n bytes, a copy of one buffer 2 n.
ratio_to_copy is the first rate over the second; on one GPU used for all contexts it can reach 1, between GPUs their
links limit it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch.cuda.nccl
import typer

from gangline.bench.driver.harness import in_turn, say
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.networks import context_words
from gangline.bench.workload.options import Gpus, Json, Runs, RunSeconds
from gangline.collectives.devices.backends.selection import check
from gangline.collectives.devices.device_group import DeviceGroup
from gangline.kvstore.context import contexts as contexts_of

Call = Callable[[], Any]

_COPY = "torch copy_"
_IMPLEMENTATIONS = ("nccl", "peer_to_peer", "staged", "copies")


def device_group(
    sizes: Annotated[str, typer.Option(help="Sizes of a buffer in KiB, with commas.")] = "64,1024,16384,65536",
    contexts: Annotated[
        str | None, typer.Option(help="Numbers of contexts, with commas; default: 2,4, or all of --gpus.")
    ] = None,
    gpus: Gpus = None,
    runs: Runs = 7,
    run_seconds: RunSeconds = 0.05,
    json: Json = None,
) -> None:
    """Sum k buffers of float32 in place, and broadcast one, with every implementation available for the devices.

    Measured beside torch: copy_ of one buffer, add_ and copy_ of all, and torch.cuda.nccl where the GPUs are distinct.
    wrong is the number of wrong elements of one call; memory GB/s counts the bytes that must be read and written.
    """
    check_outputs(json)
    words = context_words(contexts, gpus, default=(2, 4))
    rows = run(words, [int(float(size) * 1024) for size in sizes.split(",")], runs, run_seconds)
    publish(rows, json)


def run(contexts: dict[int, str], sizes: Sequence[int], runs: int, run_seconds: float) -> list[Row]:
    """Measure each number of contexts, given with their names, and each size of a buffer in bytes.

    The implementations are measured in turn.
    """
    rows: list[Row] = []
    for count, words in contexts.items():
        groups = _groups(contexts_of(words))
        for size in sizes:
            rows += _measured(groups, count, size, runs, run_seconds)
    return rows


def _groups(contexts: Sequence[Any]) -> list[DeviceGroup]:
    """Create a group with each implementation available for the devices."""
    groups = []
    for name in _IMPLEMENTATIONS:
        try:
            check(name, [context.torch_device for context in contexts], "the bench")
        except (ValueError, RuntimeError) as error:
            say(f"skipping {name}: {error}")
        else:
            groups.append(DeviceGroup(contexts, name))
    return groups


def _measured(groups: Sequence[DeviceGroup], count: int, size: int, runs: int, run_seconds: float) -> list[Row]:
    buffers = [torch.empty(size // 4, device=device) for device in groups[0].devices]
    sides = _sides(groups, buffers)
    wrong = {name: _wrong(name, call, buffers) for name, call in sides.items()}
    for buffer in buffers:
        buffer.zero_()  # sums stay finite, however often they are repeated
    timed = {name: _timed(call, buffers, run_seconds) for name, call in sides.items()}
    seconds = in_turn(timed, runs)
    rows = []
    for name, found in seconds.items():
        who, _, collective = name.rpartition(" ")
        moved, median = _moved(collective, count) * size, spread(found)["p50"]
        copies = [moved / own / (2 * size / copy) for own, copy in zip(found, seconds[_COPY], strict=True)]
        bus = 2 * (count - 1) / count if collective == "all_reduce" else 1
        rows.append(
            {
                "who": "gangline" if who in _IMPLEMENTATIONS else f"torch {torch.__version__}",
                "collective": collective,
                "transport": who,
                "contexts": count,
                "devices": len(set(groups[0].devices)),
                "size": size,
                "count": size // 4,
                "dtype": "float32",
                "redop": "sum" if collective == "all_reduce" else "none",
                "in_place": True,
                "registered": False,
                "time_us": 1e6 * median,
                "algbw_gbs": size / median / 1e9,
                "busbw_gbs": size / median / 1e9 * bus,
                "memory_gbs": moved / median / 1e9,
                "ratio_to_copy": spread(copies)["p50"],
                "wrong": wrong[name],
                **spread([1e6 * one for one in found]),
            }
        )
    return rows


def _moved(collective: str, count: int) -> int:
    """Return the number of times that a buffer's bytes are read or written."""
    return {"all_reduce": 2 * count, "broadcast": count}.get(collective, 2)


def _sides(groups: Sequence[DeviceGroup], buffers: Sequence[torch.Tensor]) -> dict[str, Call]:
    """Return the measured calls by "IMPLEMENTATION COLLECTIVE"."""
    first, *others = buffers
    target = torch.empty_like(first)

    def add_and_copy() -> None:
        for other in others:
            first.add_(other if other.device == first.device else other.to(first.device, non_blocking=True))
        for other in others:
            other.copy_(first, non_blocking=True)

    sides: dict[str, Call] = {_COPY: lambda: target.copy_(first)}
    for group in groups:
        sides[f"{group.implementation} all_reduce"] = partial(group.all_reduce, buffers)
        sides[f"{group.implementation} broadcast"] = partial(group.broadcast, buffers)
    sides["add_, copy_ all_reduce"] = add_and_copy
    if first.is_cuda and len({buffer.device for buffer in buffers}) == len(buffers):
        sides["torch.cuda.nccl all_reduce"] = partial(torch.cuda.nccl.all_reduce, buffers)
    return sides


def _wrong(name: str, call: Call, buffers: Sequence[torch.Tensor]) -> int:
    """Return the number of wrong elements of one call."""
    pattern = torch.arange(len(buffers[0]), dtype=torch.float32) % 1024
    for number, buffer in enumerate(buffers):
        buffer.copy_(pattern * 7 + number)
    call()
    count = len(buffers)
    if name.endswith("all_reduce"):
        expected = pattern * 7 * count + count * (count - 1) / 2
    elif name.endswith("broadcast"):
        expected = pattern * 7
    else:
        return 0
    return sum(int((buffer.cpu() != expected).sum()) for buffer in buffers)


def _timed(call: Call, buffers: Sequence[torch.Tensor], run_seconds: float) -> Callable[[], float]:
    """Return a function that measures the seconds of a call, over about ``run_seconds``."""
    gpus = {buffer.device for buffer in buffers if buffer.is_cuda}

    def finish() -> None:
        for device in gpus:
            torch.cuda.synchronize(device)

    def measure(calls: int) -> float:
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        finish()
        return (time.perf_counter() - start) / calls

    measure(2)  # compiles kernels, allocates buffers
    calls = max(1, round(run_seconds / measure(3)))
    return lambda: measure(calls)

"""`gangline bench compression`: the cost of a codec beside a copy of the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from timeit import timeit
from typing import Annotated, Any

import torch
import typer

from gangline.bench.driver.harness import in_turn
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.options import Json, Runs
from gangline.kvstore.compression import compress, parse

_COPY = "torch copy_"
_PARAMS: tuple[dict[str, Any], ...] = (
    {"type": "2bit", "threshold": 0.5},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "topk", "ratio": 0.01},
)


def compression(
    mib: Annotated[int, typer.Option(help="Size of the tensor in MiB.", min=1)] = 64,
    runs: Runs = 7,
    json: Json = None,
) -> None:
    """Measure compression and decompression of a float32 tensor beside copy_.

    The values are normal with standard deviation 0.3. 2bit has threshold 0.5, topk ratio 0.01; both include the
    residual and the check for NaN and infinity, fp16 and bf16 neither. ratio to copy is the time over that of copy_.
    """
    check_outputs(json)
    publish(measure(mib, runs), json)


def measure(mib: int, runs: int) -> list[Row]:
    """Measure copy_ and each codec in both directions, in milliseconds, with torch's current number of threads."""
    size = mib * 2**20
    values = torch.randn(size // 4, generator=torch.Generator().manual_seed(0)).mul_(0.3)
    target = torch.empty_like(values)
    calls: dict[str, Callable[[], Any]] = {_COPY: lambda: target.copy_(values)}
    bytes_of = {_COPY: size}
    for params in _PARAMS:
        parsed = parse(params)
        codec, name = parsed.codec, f"gangline {params['type']}"
        residual = torch.zeros_like(values) if parsed.error_feedback else None
        payload = codec.encode(values)
        calls[f"{name} compress"] = (
            partial(codec.encode, values)
            if residual is None
            else partial(compress, codec, values, residual, "the bench")
        )
        calls[f"{name} decode"] = partial(codec.decode, payload, target)
        bytes_of[f"{name} compress"] = bytes_of[f"{name} decode"] = payload.numel()
    seconds = in_turn({name: partial(timeit, call, number=1) for name, call in calls.items()}, runs + 1)
    # the first run touches the memory
    times = {name: [1e3 * each for each in found[1:]] for name, found in seconds.items()}
    copies = times[_COPY]
    return [
        {
            "who": name,
            "size": size,
            "payload": bytes_of[name],
            "threads": torch.get_num_threads(),
            "time_ms": spread(found)["p50"],
            "ratio_to_copy": spread([own / copy for own, copy in zip(found, copies, strict=True)])["p50"],
            **spread(found),
        }
        for name, found in times.items()
    ]

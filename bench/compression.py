"""What a codec costs beside a copy of the same tensor: `python -m gangline.bench.compression`.

The tensor is float32, normal, of deviation 0.3; 2bit has threshold 0.5 and its residual, topk ratio 0.01 and its
residual; both include the look for NaN and infinity. fp16 and bf16 do without either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gangline.bench.report import Row, in_turn, publish, spread
from gangline.collectives.compression import Codec, compress, parse

_PARAMS: tuple[dict[str, Any], ...] = (
    {"type": "2bit", "threshold": 0.5},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "topk", "ratio": 0.01},
)


def main(
    mib: Annotated[int, typer.Option(help="Size of the tensor in MiB.", min=1)] = 64,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 7,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Measure, print the table, and the ratios to copy_."""
    publish("compression", measure(mib, runs), json)


def measure(mib: int, runs: int) -> list[Row]:
    """Milliseconds of copy_ and of each codec both ways, with torch's threads as they are."""
    size = mib * 2**20
    values = torch.randn(size // 4, generator=torch.Generator().manual_seed(0)).mul_(0.3)
    target = torch.empty_like(values)
    sides: dict[str, Callable[[], Any]] = {"torch copy_": lambda: target.copy_(values)}
    bytes_of = {"torch copy_": size}
    for params in _PARAMS:
        compression = parse(params)
        codec, name = compression.codec, f"gangline {params['type']}"
        residual = torch.zeros_like(values) if compression.error_feedback else None
        payload = codec.encode(values)
        sides[f"{name} compress"] = (
            _compress(codec, values, residual) if residual is not None else _encode(codec, values)
        )
        sides[f"{name} decode"] = _decode(codec, payload, target)
        bytes_of[f"{name} compress"] = bytes_of[f"{name} decode"] = payload.numel()
    times = in_turn({name: _timed(side) for name, side in sides.items()}, runs + 1)
    times = {name: found[1:] for name, found in times.items()}  # the first run of each touches its memory
    copies = times["torch copy_"]
    return [
        {
            "who": name,
            "size": size,
            "payload": bytes_of[name],
            "threads": torch.get_num_threads(),
            "time_ms": spread(found)["p50"],
            "ratio_to_copy": spread([ours / copy for ours, copy in zip(found, copies, strict=True)])["p50"],
            **spread(found),
        }
        for name, found in times.items()
    ]


def _timed(side: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        side()
        return 1e3 * (time.perf_counter() - began)

    return run


def _compress(codec: Codec, values: torch.Tensor, residual: torch.Tensor) -> Callable[[], Any]:
    return lambda: compress(codec, values, residual, "the bench")


def _encode(codec: Codec, values: torch.Tensor) -> Callable[[], Any]:
    return lambda: codec.encode(values)


def _decode(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    return lambda: codec.decode(payload, out)


if __name__ == "__main__":
    typer.run(main)

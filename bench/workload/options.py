"""Command-line options that several benches share, and their choices."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[int, typer.Option("--runs", help="Runs of each candidate, in turn.", min=1)]
RunSeconds = Annotated[float, typer.Option("--run-seconds", help="Approximate length of a run, in seconds.", min=0.0)]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.", metavar="FILE")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the rows into this .png file.", metavar="FILE")]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", help="GPUs to use as contexts, such as 0,1; one may be repeated. Otherwise CPU contexts."),
]
MinBytes = Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size in bytes, such as 8 or 64K.")]
MaxBytes = Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size in bytes, such as 256M.")]
StepFactor = Annotated[int, typer.Option("-f", "--stepfactor", help="Factor between sizes.", min=2)]

DataType = StrEnum(
    "DataType",
    "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128",
)
ReduceOp = StrEnum("ReduceOp", ["sum", "mean", "product", "min", "max"])
Transport = StrEnum("Transport", ["auto", "shared_memory", "ipc", "tcp"])
"""Transports between the ranks of a collective."""
ServerTransport = StrEnum("ServerTransport", ["auto", "tcp"])
"""Transports between workers and servers."""
DistStore = StrEnum("DistStore", ["dist_sync", "dist_async", "dist_device_sync", "dist_device_async"])
Compression = StrEnum("Compression", ["2bit", "fp16", "bf16"])
"""Compression of what is pushed."""
Collective = StrEnum(
    "Collective",
    ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"],
)
"""Collectives with several algorithms."""

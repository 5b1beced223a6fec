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


class DataType(StrEnum):
    """Data types of collectives."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"


class ReduceOp(StrEnum):
    """Reductions of collectives."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


class Transport(StrEnum):
    """Transports between the ranks of a collective."""

    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    IPC = "ipc"
    TCP = "tcp"


class ServerTransport(StrEnum):
    """Transports between workers and servers."""

    AUTO = "auto"
    TCP = "tcp"


class DistStore(StrEnum):
    """Stores with servers."""

    SYNC = "dist_sync"
    ASYNC = "dist_async"
    DEVICE_SYNC = "dist_device_sync"
    DEVICE_ASYNC = "dist_device_async"


class Compression(StrEnum):
    """Compression of what is pushed."""

    TWO_BIT = "2bit"
    FP16 = "fp16"
    BF16 = "bf16"


class HostCount(StrEnum):
    """Hosts of a parameter-server job."""

    ONE = "1"
    TWO = "2"


class Collective(StrEnum):
    """Collectives with several algorithms."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"

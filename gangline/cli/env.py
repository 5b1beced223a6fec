"""`gangline env`: report the installation, and the devices to train on or those of each worker of a job."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Annotated, Any

import psutil
import typer

from gangline.cli.launch import local_host
from gangline.cli.options import JsonFile, as_usage_errors, print_table, write_json
from gangline.collectives import environments
from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.collectives.environments.variables import unknown_variables
from gangline.doctor.inventory import Device, device_table
from gangline.doctor.this_host import check_host
from gangline.launcher.binding import Host, bind
from gangline.usage_error import UsageError

_CORE = ("gangline", "torch", "numpy", "msgpack", "pyzmq", "safetensors", "torchmetrics")
_CHECKS, _CHECK_SECONDS = ("shared-memory", "dev-shm", "cross-memory-attach", "limits"), 30.0
_OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "pynccl", "s3fs", "tensorboard", "matplotlib", "prometheus-client")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def env(
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", metavar="N", min=1, help="Show the devices of each of N workers.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of the workers, such as 0,2, as for `gangline launch`; with -n.")
    ] = None,
    idle_surplus: Annotated[
        bool, typer.Option("--idle-surplus", help="Leave out workers beyond the GPUs; with -n.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Show devices, versions, shared memory, limits and the launcher, for a bug report."""
    if workers is not None:
        show_job([local_host(gpus)], workers, idle_surplus=idle_surplus, json=json)
        return
    if gpus is not None or idle_surplus:
        raise UsageError("--gpus and --idle-surplus describe a job; expected -n with them")
    devices = device_table()
    report = _report()
    write_json(json, {**report, "devices": {row.context: asdict(row) for row in devices}})
    if json is not None:
        return
    show_devices(devices)
    for section, values in report.items():
        print(section)
        for name, value in values.items():
            print(f"  {name}: {value}")


def show_job(hosts: Sequence[Host], workers: int, *, idle_surplus: bool = False, json: JsonFile = None) -> None:
    """Print a table with the host, GPUs, cores and threads of each worker of a job."""
    with as_usage_errors():
        bindings = bind(hosts, workers, idle_surplus=idle_surplus)
    threads = os.environ.get("OMP_NUM_THREADS")
    rows: list[dict[str, Any]] = [
        {
            "rank": one.rank,
            "host": one.host.address,
            "local_rank": one.local_rank,
            "gpus": [gpu.name for gpu in one.gpus],
            "numa_nodes": sorted({gpu.node for gpu in one.gpus if gpu.node is not None}),
            "cpus": list(one.cpus),
            "threads": int(threads) if threads and threads.isdecimal() else one.threads,
        }
        for one in bindings
    ]
    write_json(json, rows)
    if json is not None:
        return
    print_table(
        {
            "worker": [str(one.rank) for one in bindings],
            "host": [one.host.address for one in bindings],
            "local rank": [str(one.local_rank) for one in bindings],
            "GPUs": [", ".join(gpu.name for gpu in one.gpus) or "any" for one in bindings],
            "NUMA node": [ranges(row["numa_nodes"]) for row in rows],
            "CPUs": [ranges(one.cpus) or "any" for one in bindings],
            "threads": [str(row["threads"] or "any") for row in rows],
        }
    )
    for rank in range(len(rows), workers):
        print(f"worker {rank} is not started: it has no GPU or slot")


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in short form: "0-3,8" for 0, 1, 2, 3, 8."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])  # equal within a run
    groups = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def show_devices(rows: Sequence[Device]) -> None:
    """Print a table of devices, with the access of GPUs to each other's memory."""
    print_table(
        {
            "context": [row.context for row in rows],
            "name": [row.name for row in rows],
            "free": [f"{row.memory_free / 2**30:.1f} GiB" for row in rows],
            "total": [f"{row.memory_total / 2**30:.1f} GiB" for row in rows],
            "capability": [row.compute_capability or "" for row in rows],
            "links": [", ".join(f"{peer} {link}" for peer, link in (row.peers or {}).items()) for row in rows],
        }
    )


def _report() -> dict[str, dict[str, Any]]:
    import torch

    from gangline.collectives import compiled_core
    from gangline.collectives.transports.shm.segments import processor_problem

    unknown = unknown_variables()
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _CORE},
            "compiled core": "used" if compiled_core.core else f"not used: {compiled_core.problem}",
            "torch built for CUDA": torch.version.cuda or "no",
            "NCCL of torch": _nccl_version(),
        },
        "extras": {name: _version(name) for name in _OPTIONAL},
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": len(psutil.Process().cpu_affinity()),
            "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        },
        "checks": {
            "shared memory between ranks": processor_problem() or "works",
            **{one.name: f"{one.status}: {one.measured}" for one in check_host(_CHECKS, _CHECK_SECONDS)},
        },
        "launcher": launcher_report(),
        "variables": {
            name: f"{value} ({unknown[name]})" if name in unknown else value
            for name, value in sorted(os.environ.items())
            if name.startswith(("GANGLINE_", "DMLC_")) or name in _TORCHRUN
        }
        or {"set": "none"},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available():
        return "not used"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def launcher_report() -> dict[str, Any]:
    """Return the launcher's environment, its values and the other launchers that have set variables."""
    found = environments.all_found()
    if not found:
        return {"found": "none"}
    first, *others = found
    report: dict[str, Any] = {"found": first.name}
    if "DMLC_ROLE" in os.environ:
        report["role"] = os.environ["DMLC_ROLE"]
    values: dict[str, Callable[[], Any]] = {
        "rank": first.rank,
        "size": first.size,
        "local rank": environments.local_rank,
        "local size": first.local_size,
        "node rank": first.node_rank,
        "rank 0": lambda: "{0.host}:{0.port}".format(find_rank_info(None, None, None, os.environ)),
    }
    for name, value in values.items():
        try:
            report[name] = value()
        except ValueError as error:
            report[name] = f"unknown: {error}"
    if others:
        report["also found"] = ", ".join(other.name for other in others)
    return {name: value for name, value in report.items() if value is not None}

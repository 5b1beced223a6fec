"""`gangline env`: report the installation and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import psutil
import typer

from gangline.cli.devices import show_devices, show_job
from gangline.cli.launch import local_host
from gangline.cli.options import JsonFile, write_json
from gangline.collectives import environments
from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.collectives.errors import UsageError
from gangline.doctor.gpu_links import read_links
from gangline.doctor.inventory import device_table
from gangline.doctor.this_host import check_host

_CORE = ("gangline", "torch", "numpy", "msgpack", "pyzmq", "safetensors", "torchmetrics")
_CHECKS, _CHECK_SECONDS = ("shared-memory", "dev-shm", "cross-memory-attach", "limits"), 30.0
_OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "pynccl", "s3fs", "tensorboard", "matplotlib")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def env(
    workers: Annotated[
        int | None,
        typer.Option("-n", "--workers", metavar="N", min=1, help="Show the devices of each of N workers."),
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
    links = read_links()
    devices = device_table(links)
    report = _report()
    write_json(json, {**report, "devices": {row.context: asdict(row) for row in devices}})
    if json is not None:
        return
    show_devices(devices, links)
    for section, values in report.items():
        print(section)
        for name, value in values.items():
            print(f"  {name}: {value}")


def _report() -> dict[str, dict[str, Any]]:
    import torch

    from gangline.collectives import compiled_core
    from gangline.collectives.transports.shm.host_group import processor_problem

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
            name: value
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

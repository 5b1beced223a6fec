"""`gangline env`: report the installation and machine; the table of environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NamedTuple

import typer

from gangline.cli.devices import show_devices, show_job
from gangline.cli.launch import local_host
from gangline.cli.options import JsonFile, write_json
from gangline.collectives.errors import UsageError

_CORE = ("gangline", "torch", "numpy", "msgpack", "pyzmq", "safetensors", "torchmetrics")
_CHECKS, _CHECK_SECONDS = ("shared-memory", "dev-shm", "cross-memory-attach", "limits"), 30.0
_OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "pynccl", "s3fs", "tensorboard", "matplotlib")


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
    from gangline.doctor.gpu_links import read_links
    from gangline.doctor.inventory import device_table

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
    import platform

    import psutil
    import torch

    from gangline.collectives.transports.shm.host_group import processor_problem
    from gangline.doctor.this_host import check_host

    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _CORE},
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
        "variables": {one.name: os.environ[one.name] for one in VARIABLES if one.name in os.environ} or {"set": "none"},
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
    from gangline.collectives import environments
    from gangline.collectives.bootstrap.launcher_environment import find_rank_info

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


class Variable(NamedTuple):
    """An environment variable."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "GANGLINE_LOG",
        "info",
        "Log level of the commands: debug, info, warning or error. `gangline -v` is debug, `gangline -q` is warning.",
    ),
    Variable(
        "GANGLINE_TIMEOUT",
        "1800",
        "Seconds that a call waits for other ranks, servers or the scheduler before it raises StallError.",
    ),
    Variable(
        "GANGLINE_STALL_WARN",
        "60",
        "Seconds after which a call that waits logs a warning with the ranks that are missing.",
    ),
    Variable(
        "GANGLINE_NAN_CHECK",
        "0",
        "1 checks each gradient of balanced networks and of stores before it is summed, and raises an error with the "
        "rank and parameter of the first one that is not finite. With a GradScaler infinite gradients are normal.",
    ),
    Variable("GANGLINE_HEARTBEAT", "1", "Seconds between two heartbeats."),
    Variable(
        "GANGLINE_HEARTBEAT_LIMIT",
        "10",
        "Seconds without a sign of life after which a process counts as dead; between ranks of different hosts twice "
        "as long.",
    ),
    Variable(
        "GANGLINE_TRANSPORT",
        "auto",
        "Transport between ranks: auto, shared_memory, ipc or tcp. Rank 0's value counts for all ranks. With tcp "
        "in all processes, workers, servers and the scheduler of one host use TCP as well.",
    ),
    Variable(
        "GANGLINE_ALGO",
        "",
        "Algorithm of a collective, such as `ring`, or `all_reduce=ring:4,broadcast=double_tree` with the number of "
        "segments after the colon. Empty: chosen by size.",
    ),
    Variable(
        "GANGLINE_TUNING",
        "~/.cache/gangline/tuning.json",
        "File with measured algorithm choices, written by `gangline bench tune`.",
    ),
    Variable(
        "GANGLINE_REPLACE_GLOO",
        "0",
        "1 creates process groups of torch.distributed with backend gangline wherever a program asks for gloo. Set by "
        "`gangline run`.",
    ),
    Variable(
        "GANGLINE_DEVICE_GROUP",
        "",
        "How the devices of one process reduce: nccl, peer_to_peer, staged or copies. Empty: the fastest that works.",
    ),
    Variable("GANGLINE_NCCL_BINDING", "", "Python binding of NCCL: cupy or pynccl. Empty: cupy."),
    Variable(
        "GANGLINE_INSECURE",
        "0",
        "1 allows addresses other than loopback without a job key. Traffic is then neither encrypted nor "
        "authenticated: set it only on a network that you trust.",
    ),
    Variable(
        "GANGLINE_JOB_KEY_FILE",
        "",
        "File with the key of a job on several hosts, as `gangline key new` writes it. Only its owner may read it.",
    ),
    Variable(
        "GANGLINE_JOB_KEY_FD",
        "",
        "Set by `gangline launch`: the number of an inherited descriptor that holds the job's key. Removed when read.",
    ),
    Variable(
        "GANGLINE_JOB_ID",
        "",
        "Name of the job; processes of different jobs refuse each other. Set by `gangline launch`; by hand the same in "
        "every process, if two jobs share a key.",
    ),
    Variable(
        "GANGLINE_TIMELINE",
        "",
        "File to which every process of the job appends a trace of what it does; see [monitoring](monitoring.md).",
    ),
    Variable("GANGLINE_TIMELINE_JOB", "", "Set with it for child processes: name of the job whose trace it is."),
    Variable(
        "GANGLINE_WORK_LOAD_LIST",
        "",
        "Relative speed of each worker, such as 3,1; auto measures it. Set by `gangline launch --work-load-list`.",
    ),
    Variable(
        "GANGLINE_RESTART",
        "0",
        "Set by `gangline launch`: number of times that the job was started again (--max-restarts). Above 0, training "
        "resumes from the newest checkpoint that the job wrote. Under torchrun TORCHELASTIC_RESTART_COUNT counts.",
    ),
    Variable(
        "GANGLINE_INCARNATION",
        "0",
        "Set by `gangline launch`: number of times that this process alone was started again (--restart-processes).",
    ),
    Variable(
        "GANGLINE_LEAVING",
        "",
        "Set by `gangline launch`: 1 in a worker that was asked to leave and had to be started again.",
    ),
    Variable(
        "GANGLINE_RESTART_PROCESSES",
        "0",
        "Set by `gangline launch --restart-processes`: number of processes that the others wait for.",
    ),
    Variable(
        "GANGLINE_ELASTIC",
        "",
        "Set by `gangline launch --elastic`: least and most workers of the job, such as 1:4.",
    ),
    Variable(
        "GANGLINE_RESTART_LIMIT",
        "120",
        "Seconds for a restarted process to take its place in the job before the job fails.",
    ),
    Variable("GANGLINE_LAUNCHER_FD", "", "Set by `gangline launch`: pipe by which the scheduler says who has left."),
    Variable("GANGLINE_KEPT_MEMORY", "", "Set by `gangline launch`: memory in which a process's state outlives it."),
    Variable("GANGLINE_RUN_ID", "", "Set by `gangline launch`: name of the job that is the same in all its starts."),
    Variable("GANGLINE_SUPERVISED", "0", "Set by `gangline launch`: servers wait for workers without a limit."),
    Variable("GANGLINE_ANNOUNCE_FD", "", "Set for a scheduler that chooses its port: where it writes the port."),
    Variable(
        "GANGLINE_FAULT",
        "",
        "Scripted faults, for tests only; see [reliability.md](reliability.md#scripted-faults).",
    ),
    Variable("GANGLINE_PARENT", "", "Set for a scheduler or server that a worker starts: the worker's process id."),
    Variable("DMLC_ROLE", "", "worker, server or scheduler."),
    Variable("DMLC_PS_ROOT_URI", "", "Address of the scheduler."),
    Variable("DMLC_PS_ROOT_PORT", "", "Port of the scheduler; at a loopback address it names a Unix socket."),
    Variable("DMLC_NUM_WORKER", "", "Number of workers."),
    Variable("DMLC_NUM_SERVER", "", "Number of servers."),
    Variable("DMLC_WORKER_ID", "", "Rank that this worker asks for."),
    Variable("DMLC_SERVER_ID", "", "Rank that this server asks for."),
    Variable(
        "GANGLINE_STOP_SIGNALS",
        "",
        "Signals that end `gangline train` with a checkpoint, beside TERM and INT, such as USR1. Set under mpirun and "
        "srun.",
    ),
    Variable("DMLC_INTERFACE", "", "Network interface by which other hosts reach this one, such as eth0."),
    Variable(
        "GANGLINE_SIZE",
        "",
        "Number of processes, for launchers that do not set it: completions of an indexed Job of Kubernetes, PMIx.",
    ),
    Variable(
        "GANGLINE_SERVICE",
        "",
        "Headless Service of an indexed Job of Kubernetes. Empty: it has the name of the Job.",
    ),
    Variable("RANK", "", "Rank of this process, as torchrun sets it."),
    Variable("WORLD_SIZE", "", "Number of processes, as torchrun sets it."),
    Variable("LOCAL_RANK", "", "Rank on this host; selects the GPU of contexts `auto` and `gpu`."),
    Variable("LOCAL_WORLD_SIZE", "", "Number of processes on this host, as torchrun sets it."),
    Variable("MASTER_ADDR", "", "Address of rank 0, as torchrun sets it; counts under every launcher."),
    Variable("MASTER_PORT", "", "Port of rank 0, as torchrun sets it; counts under every launcher."),
)


def page() -> str:
    """Return docs/environment.md: the table as Markdown."""
    rows = [
        f"| `{variable.name}` | {f'`{variable.default}`' if variable.default else ''} | {variable.meaning} |"
        for variable in VARIABLES
    ]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """# Environment variables

gangline reads these variables when a process creates a store, a communicator or a job. Launchers set the DMLC_* and
torchrun variables; the others are for you. Variables of MPI, Slurm, Kubernetes and other engines:
[clusters.md](clusters.md#which-variables-are-read).

| variable | default | meaning |
| --- | --- | --- |"""

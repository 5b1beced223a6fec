"""`gangline launch`, `server` and `scheduler`: start the processes of a job, or be one of them."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated, Literal

import typer

from gangline.cli.options import loads_of, numbers
from gangline.collectives.errors import UsageError
from gangline.collectives.workload import check_work_load_list
from gangline.kvstore.launch.binding import Host
from gangline.kvstore.launch.job import JobSpec, free_ports, process_table
from gangline.kvstore.launch.topology import gpu_addresses, read_host


class Launcher(StrEnum):
    """Ways to start processes."""

    LOCAL = "local"


def launch(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Command of each worker, after an optional --.")],
    workers: Annotated[
        int, typer.Option("-n", "--workers", "--num-workers", metavar="N", min=1, help="Number of workers.")
    ],
    servers: Annotated[
        int,
        typer.Option(
            "-s",
            "--servers",
            "--num-servers",
            metavar="N",
            min=0,
            help="Number of servers, beside a scheduler. 0: none; workers of a dist_* store then start their own.",
        ),
    ] = 1,
    launcher: Annotated[Launcher, typer.Option(help="How to start the processes.")] = Launcher.LOCAL,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of the workers, such as 0,2: each worker has its own. A GPU named twice is shared."),
    ] = None,
    idle_surplus: Annotated[
        bool, typer.Option("--idle-surplus", help="Leave out workers beyond the GPUs; otherwise they are an error.")
    ] = False,
    bind: Annotated[
        bool, typer.Option(help="Bind each worker to its own cores, those near its GPU if --gpus names it.")
    ] = True,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Environment variable to pass on; repeatable.")
    ] = None,
    work_load_list: Annotated[
        str | None,
        typer.Option(
            help="Relative speed of each worker, such as 3,1; auto measures it. Global batches are split by it."
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(help="Seconds from SIGTERM until processes are killed.", metavar="SECONDS", min=0),
    ] = 10.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; start nothing.")] = False,
) -> None:
    """Start workers, servers and a scheduler; stop all of them when one fails.

    Each process gets the DMLC_* variables of MXNet's launcher, workers also those of torchrun. The exit code is that
    of the first process that failed, 128+N if signal N killed it, and 75 if a signal stopped the job
    and all workers wrote a checkpoint.
    """
    del launcher  # there is only one yet
    job = JobSpec(
        command=tuple(command),
        workers=workers,
        servers=servers,
        work_load_list=_loads(work_load_list, workers),
        passed_on=tuple(env or ()),
        binds_cores=bind,
        idle_surplus=idle_surplus,
    )
    root_port, master_port = free_ports(2)
    try:
        host = local_host(gpus, is_checked=not dry_run)
        table = process_table(job, os.environ, root_port=root_port, master_port=master_port, hosts=[host])
    except ValueError as error:
        raise UsageError(str(error)) from error
    if dry_run:
        print(*(process.shell_line() for process in table), sep="\n")
        return
    started = sum(process.role == "worker" for process in table)
    if started < workers:
        surplus = f"workers {started} to {workers - 1} are" if workers - started > 1 else f"worker {started} is"
        print(f"gangline: {surplus} not started: there is a GPU for {started} of {workers} workers", file=sys.stderr)
    from gangline.collectives.job_key import JobKey
    from gangline.kvstore.launch.local import run
    from gangline.kvstore.launch.supervisor import StopTimeouts

    raise typer.Exit(run(table, StopTimeouts(stop=grace), JobKey.new()))


def local_host(gpus: str | None, *, is_checked: bool = True) -> Host:
    """Return this host with the GPUs of --gpus.

    Args:
        gpus: value of --gpus.
        is_checked: check that the GPUs exist, and read their NUMA nodes.

    Raises:
        UsageError: if the words name no GPUs, or GPUs that do not exist.
    """
    found = numbers("--gpus", gpus, int)
    if gpus is not None and (not found or min(found) < 0):
        raise UsageError(f"--gpus is {gpus!r}; expected numbers such as 0,2")
    addresses = gpu_addresses() if found and is_checked else []
    missing = sorted({gpu for gpu in found if is_checked and gpu >= len(addresses)})
    if missing:
        there = ", ".join(map(str, range(len(addresses)))) or "none"
        raise UsageError(
            f"--gpus names {', '.join(map(str, missing))}, which this machine does not have; the GPUs here: {there}"
        )
    return read_host(found, os.environ, addresses)


def _loads(words: str | None, workers: int) -> tuple[float, ...] | Literal["auto"]:
    if words is None:
        return ()
    found = loads_of(words)
    if found == "auto":
        return "auto"
    loads = [int(load) if load.is_integer() else load for load in found]
    if len(loads) != workers:
        entries = "1 entry" if len(loads) == 1 else f"{len(loads)} entries"
        raise UsageError(f"--work-load-list has {entries} for {workers} workers")
    try:
        return tuple(check_work_load_list(loads, workers))
    except ValueError as error:
        raise UsageError(f"--work-load-list: {error}") from error


def server() -> None:
    """Run a server of the job that the DMLC_* variables describe."""
    os.environ["DMLC_ROLE"] = "server"
    from gangline.kvstore.parameter_server.server.server import main

    raise typer.Exit(main())


def scheduler() -> None:
    """Run the scheduler of the job that the DMLC_* variables describe."""
    os.environ["DMLC_ROLE"] = "scheduler"
    from gangline.kvstore.parameter_server.scheduler.scheduler import main

    raise typer.Exit(main())

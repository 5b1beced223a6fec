"""`gangline launch`: a job's workers, servers and scheduler, started together."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gangline.collectives.workload import check_work_load_list
from gangline.kvstore.launch.job import JobSpec, cores, free_ports, process_table

_LAUNCHERS = ("local",)


def launch(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="What each worker runs; a -- before it is allowed.")
    ],
    num_workers: Annotated[int, typer.Option("-n", "--num-workers", min=1, help="Worker processes.")],
    num_servers: Annotated[
        int, typer.Option("-s", "--num-servers", min=0, help="Servers, with a scheduler; 0 starts neither.")
    ] = 1,
    launcher: Annotated[str, typer.Option(help="Who starts them: local (on this machine).")] = "local",
    gpus: Annotated[str | None, typer.Option(help="GPUs to deal out to the workers in turn, such as 0,2.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable of this environment to pass on; repeatable.")
    ] = None,
    work_load_list: Annotated[
        str | None, typer.Option(help="The speed of each worker, such as 3,1; global batches are split by it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, as shell lines.")] = False,
) -> None:
    """Start workers, servers and a scheduler, and stop all of them when one fails.

    Each gets the variables of MXNet's launcher (DMLC_*), workers also those of torchrun. The exit code is that of the
    first process that failed, 128 + N if signal N ended it.
    """
    if launcher not in _LAUNCHERS:
        raise typer.BadParameter(f"{launcher!r} is unknown; expected one of {', '.join(_LAUNCHERS)}")
    job = JobSpec(
        command=tuple(command),
        workers=num_workers,
        servers=num_servers,
        gpus=_gpus(gpus),
        work_load_list=_loads(work_load_list, num_workers),
        passed_on=tuple(env or ()),
    )
    root_port, master_port = free_ports(2)
    try:
        table = process_table(job, os.environ, root_port=root_port, master_port=master_port, cores=cores())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if dry_run:
        print(*(process.shell_line() for process in table), sep="\n")
        return
    from gangline.kvstore.launch.local import run

    raise typer.Exit(run(table))


def _gpus(words: str | None) -> tuple[int, ...]:
    if words is None:
        return ()
    numbers = [word.strip() for word in words.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise typer.BadParameter(f"--gpus is {words!r}; expected numbers such as 0,2")
    return tuple(map(int, numbers))


def _loads(words: str | None, workers: int) -> tuple[float, ...]:
    if words is None:
        return ()
    try:
        loads = [int(word) if word.strip().isdecimal() else float(word) for word in words.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--work-load-list is {words!r}; expected numbers such as 3,1") from None
    if len(loads) != workers:
        raise typer.BadParameter(f"--work-load-list has {len(loads)} entries for {workers} workers")
    try:
        return tuple(check_work_load_list(loads, workers))
    except ValueError as error:
        raise typer.BadParameter(f"--work-load-list: {error}") from error

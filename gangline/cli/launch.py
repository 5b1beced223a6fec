"""`gangline launch` and `gangline resize`: start the processes of a job, or change the number of its workers."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer

from gangline.cli.logs import logging_to_stderr
from gangline.cli.options import as_usage_errors, loads_of, numbers, signals_of
from gangline.collectives.environments.job_key import FILE, JobKey, job_key
from gangline.collectives.timeline import recorder
from gangline.collectives.transports.addresses import (
    interface_address,
    is_loopback,
    local_address,
    reachable_address,
    resolved,
)
from gangline.collectives.transports.unix_sockets import connect
from gangline.kvstore.parameter_server.environment import parse_bytes
from gangline.kvstore.restart_variables import parse_bounds
from gangline.kvstore.workload import check_work_load_list
from gangline.launcher.binding import Host
from gangline.launcher.engines.hostfile import HostEntry, loads_of_workers, parse_hosts, read_hostfile
from gangline.launcher.engines.mpi import detect, mpi_table
from gangline.launcher.engines.slurm import batch_script, slurm_table, submit
from gangline.launcher.engines.ssh import SshOptions, plan, ssh_table
from gangline.launcher.job import JobSpec, Process, free_ports, process_table
from gangline.launcher.local import control_socket, run
from gangline.launcher.restarts import Outcome, run_with_restarts
from gangline.launcher.supervisor import ERROR, Reports, StopTimeouts
from gangline.launcher.topology import gpu_addresses, read_host
from gangline.status.metrics import serve_metrics
from gangline.usage_error import UsageError

_host_option = partial(typer.Option, rich_help_panel="Hosts")
_engine_option = partial(typer.Option, rich_help_panel="Engines")


Launcher = Literal["local", "ssh", "mpi", "slurm"]
"""Ways to start processes."""
_OF_LAUNCHERS = {
    "interface": ("local", "ssh", "mpi", "slurm"),
    "ssh": ("ssh",),
    "remote_python": ("ssh",),
    "mpirun": ("mpi",),
    "engine_option": ("mpi", "slurm"),
    "name": ("slurm",),
    "idle_surplus": ("local", "ssh"),
    "bind": ("local", "ssh"),
    "max_restarts": ("local", "ssh"),
    "restart_processes": ("local",),
    "elastic": ("local",),
}
"""Launchers that use an option; an option that is not here is for all."""
_RESTARTS = {
    "mpi": "mpirun restarts nothing, so start the job again with --load-epoch auto",
    "slurm": "Slurm queues the job again: at exit code 75, or after the loss of a node by "
    "--engine-option=--requeue; --load-epoch auto then resumes",
}
"""Restarts of engines that gangline does not restart."""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `gangline launch`."""

    context: typer.Context
    command: Annotated[list[str], typer.Argument(metavar="CMD")]
    """Command of each worker, after an optional --."""
    workers: Annotated[int | None, typer.Option("-n", "-np", "--workers", "--num-workers", metavar="N", min=1)] = None
    """Number of workers; with hosts the default is their number of slots."""
    servers: Annotated[int, typer.Option("-s", "--servers", "--num-servers", metavar="N", min=0)] = 1
    """Number of servers, beside a scheduler. 0: none; workers of a dist_* store then start their own."""
    server_memory: str | None = None
    """Memory of each server, such as 8G,24G: it holds keys in this proportion. Default: by the hosts' free memory."""
    launcher: Launcher = "local"
    """Start the processes on this host, or by ssh, MPI or Slurm."""
    gpus: str | None = None
    """GPUs of the workers, such as 0,2: each worker has its own. A GPU named twice is shared."""
    idle_surplus: Annotated[bool, typer.Option("--idle-surplus")] = False
    """Leave out workers beyond the GPUs; otherwise they are an error."""
    bind: bool = True
    """Bind each worker to its own cores, those near its GPU if --gpus names it."""
    env: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None
    """Environment variable to pass on; repeatable."""
    work_load_list: str | None = None
    """Relative speed of each worker, such as 3,1; auto measures it. Global batches are split by it."""
    grace: Annotated[float, typer.Option(metavar="SECONDS", min=0)] = 10.0
    """Seconds from SIGTERM until processes are killed."""
    max_restarts: Annotated[int, typer.Option(metavar="N", min=0)] = 0
    """Number of times that the whole job starts again after a failure. Training resumes from the newest checkpoint that
    the job wrote."""
    restart_processes: Annotated[int, typer.Option(metavar="N", min=0)] = 0
    """Number of processes of a dist_* store, scheduler included, that start again alone, while the others wait for
    them. Beyond it the job fails."""
    elastic: Annotated[str | None, typer.Option(metavar="MIN:MAX")] = None
    """Least and most workers of a dist_* store, which may change while the job runs: by `gangline resize`, by a SIGTERM
    to a worker and, if GANGLINE_JOB_KEY_FILE names a key, by `gangline join` on other hosts."""
    stop_signals: str | None = None
    """Signals that stop the job, beside INT, TERM and HUP, such as USR1: workers get SIGTERM, write a checkpoint and
    exit with 75."""
    log_dir: Path | None = None
    """Folder for the output of each process, in a file such as worker-0.log on its host."""
    timeline: Path | None = None
    """File for a trace of all processes, to open in ui.perfetto.dev. Each host writes its own."""
    metrics_port: Annotated[str | None, typer.Option(metavar="[HOST:]PORT")] = None
    """Serve Prometheus metrics of this host's processes; see status."""
    hostfile: Annotated[Path | None, _host_option()] = None
    """File with lines such as `node1 slots=4 gpus=0,2 load=3`."""
    hosts: Annotated[str | None, _host_option("-H", "--hosts")] = None
    """Hosts and their slots, such as node1,node2:4."""
    interface: Annotated[str | None, _host_option()] = None
    """Network interface of the job's connections, or an address or network such as 10.1.0.0/16. Without it hosts use
    the addresses at which ssh reaches them. With --elastic it is where workers of other hosts join."""
    ssh: Annotated[str, _host_option()] = "ssh"
    """ssh command, such as "ssh -p 2222"."""
    remote_python: Annotated[str, _host_option(show_default="the same path")] = sys.executable
    """Python on the other hosts."""
    mpirun: Annotated[str, _engine_option()] = "mpirun"
    """mpirun of --launcher mpi."""
    engine_option: Annotated[list[str] | None, _engine_option(metavar="OPTION")] = None
    """Option for mpirun, sbatch or srun, such as --engine-option=--partition=gpu; repeatable."""
    name: Annotated[str, _engine_option()] = "gangline"
    """Name of the job."""
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False
    """Print the commands; start nothing."""


def launch(options: LaunchOptions) -> None:
    """Start workers, servers and a scheduler; stop all of them when one fails, and with --max-restarts start again.

    Each process gets the DMLC_* variables of MXNet's launcher, workers also those of torchrun. The exit code is that
    of the first process that failed in the last start, 128+N if signal N killed it, and 75 if a signal stopped the job
    and all workers wrote a checkpoint. A signal that stops the job and the codes 2, 3, 75, 126 and 127 restart nothing.
    """
    launcher, servers, elastic = options.launcher, options.servers, options.elastic
    _check_used(options)
    entries = _hosts(options)
    workers = options.workers or sum(entry.slots for entry in entries)
    if not workers:
        raise UsageError("the number of workers is missing: -n")
    if options.restart_processes and not servers:
        raise UsageError(
            "--restart-processes needs servers, -s 1 or more: only the workers of their jobs can wait for a restart"
        )
    if options.timeline is not None:
        os.environ[recorder.VARIABLE] = str(options.timeline.absolute())
    if options.metrics_port is not None:
        serve_metrics(options.metrics_port)
    bounds = _bounds(elastic, workers, servers, options.work_load_list)
    stops = signals_of(options.stop_signals)
    if options.gpus is not None and launcher != "local":
        raise UsageError(
            f"--gpus names GPUs of this host; with --launcher {launcher} name them by gpus=0,2 in a --hostfile, "
            "or by options of the engine"
        )
    job = JobSpec(
        command=tuple(options.command),
        workers=workers,
        servers=servers,
        work_load_list=_loads(options.work_load_list, workers) or loads_of_workers(entries, workers),
        passed_on=tuple(options.env or ()),
        binds_cores=options.bind,
        idle_surplus=options.idle_surplus,
        restart_processes=options.restart_processes,
        elastic=bounds,
        server_memory=_server_memory(options.server_memory, servers),
    )
    if launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:  # in an allocation srun starts tasks at once
        raise typer.Exit(_submit(job, options))
    engine_options = tuple(options.engine_option or ())
    timeouts = StopTimeouts(stop=options.grace)
    connection = SshOptions(options.ssh, options.remote_python, options.interface)
    host, shared_key = Host(), None
    is_open = bounds is not None and bool(os.environ.get(FILE))
    if launcher == "local" and options.interface is not None and not is_open:
        raise UsageError(
            f"--interface is for workers that join from other hosts; it needs --elastic, and a key in {FILE}"
        )
    if launcher != "ssh":
        with as_usage_errors():
            host = _address_here(options, entries) or local_host(options.gpus, is_checked=not options.dry_run)
            if is_open:
                name = options.interface
                address = reachable_address() if name is None else interface_address(name, "--interface")[0]
                host, shared_key = replace(host, address=address), job_key()

    def planned(job: JobSpec) -> list[Process]:
        if launcher == "ssh":
            return plan(job, entries, connection)
        root_port, master_port = free_ports(2, host.address)
        table = process_table(job, os.environ, root_port=root_port, master_port=master_port, hosts=[host])
        if launcher == "mpi":
            return mpi_table(table, options.mpirun, detect(options.mpirun), entries, engine_options)
        return slurm_table(table, engine_options) if launcher == "slurm" else table

    with as_usage_errors(), logging_to_stderr():
        first = planned(job)
    if launcher in ("local", "ssh"):
        _report_surplus(first, workers)
    if options.dry_run:
        _print_table(first, entries if launcher == "ssh" else ())
        return
    if bounds is not None:
        print(f"gangline: `gangline resize {os.getpid()} N` changes the number of workers", file=sys.stderr, flush=True)
        if not is_open:
            print(f"gangline: other hosts can add workers if {FILE} names a key", file=sys.stderr, flush=True)
    if options.log_dir is not None and launcher != "ssh":  # whose other hosts have folders of their own
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log-dir {options.log_dir} cannot be created: {error.strerror}") from None

    with as_usage_errors():
        own_key = job_key() if launcher == "ssh" else None  # which readers on other hosts need

    def attempt(restart: int) -> Outcome:
        table = planned(replace(job, restart=restart)) if restart else first
        if servers:
            knows_key = is_open or own_key is not None or launcher in ("mpi", "slurm")
            _print_address(table[0].environment, knows_key=knows_key)
        if launcher == "ssh":
            key = own_key or JobKey.new()
            connections = ssh_table(table, entries, connection, key, options.grace, options.log_dir)
            return run(connections, timeouts, stop_signals=stops)
        if is_open:
            name = f"[{host.address}]" if ":" in host.address else host.address
            address = f"{name}:{table[0].environment['DMLC_PS_ROOT_PORT']}"
            line = f"{FILE}=... gangline join {address} -- {shlex.join(options.command)}"
            print(f"gangline: on another host, with the same key: {line}", file=sys.stderr, flush=True)
        return run(
            table,
            timeouts,
            # mpirun and srun pass no descriptors on: GANGLINE_JOB_KEY_FILE names the key of their jobs.
            (shared_key or JobKey.new()) if launcher == "local" else None,
            stop_signals=stops,
            reports=Reports(options.log_dir),
            restart_processes=options.restart_processes,
            elastic=bounds,
        )

    raise typer.Exit(run_with_restarts(attempt, options.max_restarts))


def _address_here(options: LaunchOptions, entries: Sequence[HostEntry]) -> Host | None:
    """Return this host as others reach it, if the job has workers on several hosts that mpirun or srun starts."""
    is_slurm = options.launcher == "slurm" and os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
    if not is_slurm and (options.launcher != "mpi" or not entries):
        return None
    if options.interface is not None:
        return Host(interface_address(options.interface, "--interface")[0])
    name = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    return Host(resolved(name) if is_slurm else local_address(entries[0].name))


def _submit(job: JobSpec, options: LaunchOptions) -> int:
    """Submit a job to Slurm and wait for it, or print its batch script; return the exit code."""
    words = [sys.executable, "-m", "gangline", "launch", "--launcher", "slurm", "-n", str(job.workers)]
    words += ["-s", str(job.servers), "--grace", f"{options.grace:g}"]
    for option, value in (
        ("--server-memory", options.server_memory),
        ("--work-load-list", job.loads_text() or None),
        ("--interface", options.interface),
        ("--log-dir", options.log_dir),
        ("--stop-signals", options.stop_signals),
        *(("--env", variable) for variable in job.passed_on),
    ):
        if value is not None:
            words += [option, str(value)]
    engine_options = tuple(options.engine_option or ())
    script = batch_script([*words, "--", *job.command], job.workers, options.grace, options.name, engine_options)
    if options.dry_run:
        print(script, end="")
        return 0
    try:
        return submit(script)
    except FileNotFoundError:
        raise UsageError("sbatch is not here; install Slurm, or print what it would get by --dry-run") from None


def _server_memory(words: str | None, servers: int) -> tuple[int, ...]:
    """Return the bytes of each server by --server-memory; empty: not given."""
    if words is None:
        return ()
    sizes = words.split(",")
    if len(sizes) != servers:
        given = "1 size" if len(sizes) == 1 else f"{len(sizes)} sizes"
        raise UsageError(f"--server-memory has {given} for {servers} servers (-s); expected one for each")
    with as_usage_errors():
        return tuple(parse_bytes(size, "--server-memory") for size in sizes)


def _check_used(options: LaunchOptions) -> None:
    """Check that the launcher uses all options that were given."""
    launcher = options.launcher
    for name, launchers in _OF_LAUNCHERS.items():
        source = options.context.get_parameter_source(name)
        if launcher not in launchers and source is not None and source.name == "COMMANDLINE":
            instead = f"; {_RESTARTS[launcher]}" if name == "max_restarts" else ""
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with --launcher {launcher}; expected --launcher "
                f"{' or '.join(launchers)}{instead}"
            )


def _hosts(options: LaunchOptions) -> list[HostEntry]:
    hostfile, words, launcher = options.hostfile, options.hosts, options.launcher
    if hostfile is not None and words is not None:
        raise UsageError("--hostfile and -H both name the hosts; expected one of them")
    if launcher == "ssh" and hostfile is None and words is None:
        raise UsageError("--launcher ssh needs the hosts: --hostfile FILE or -H node1,node2:4")
    if launcher not in ("ssh", "mpi") and (hostfile is not None or words is not None):
        raise UsageError("--hostfile and -H are for --launcher ssh and mpi; other engines choose the hosts themselves")
    with as_usage_errors():
        entries = parse_hosts(words) if words is not None else []
        entries = read_hostfile(hostfile) if hostfile is not None else entries
    if launcher == "mpi" and any(entry.gpus for entry in entries):
        raise UsageError("gpus= of a hostfile is for --launcher ssh; with mpirun each rank chooses by its local rank")
    return entries


def _bounds(elastic: str | None, workers: int, servers: int, work_load_list: str | None) -> tuple[int, int] | None:
    """Return the least and the most workers of --elastic."""
    if elastic is None:
        return None
    with as_usage_errors():
        least, most = parse_bounds(elastic, "--elastic")
    if not least <= workers <= most:
        raise UsageError(f"-n is {workers}; expected {least} to {most} workers, by --elastic")
    if not servers:
        raise UsageError("--elastic needs servers, -s 1 or more: only the workers of their jobs can change")
    if work_load_list == "auto":
        raise UsageError("--work-load-list auto measures workers that stay; with --elastic give one number per worker")
    return least, most


def resize(
    process: Annotated[int, typer.Argument(metavar="PID", help="Process id of the `gangline launch`, or of its job.")],
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of workers from now on.")],
) -> None:
    """Change the number of workers of a job on this host that was started with --elastic.

    New workers take part from the next round that all know. Surplus ones, those of the highest ranks, leave after a
    round.
    """
    with _launcher_of(process) as connection:
        connection.sendall(f"{workers}\n".encode())
        answer = connection.recv(1 << 16).decode()
    if not answer or answer.startswith(ERROR):
        raise RuntimeError(answer.removeprefix(ERROR) or "the job has ended")
    print(answer)


def _launcher_of(process: int) -> socket.socket:
    """Connect to the launcher of an elastic job, given the id of any of its processes."""
    ancestors: list[int] = []
    with suppress(psutil.NoSuchProcess):
        ancestors = [one.pid for one in psutil.Process(process).parents()]
    for pid in (process, *ancestors):
        with suppress(ConnectionRefusedError):
            return connect(control_socket(pid))
    raise UsageError(f"no elastic job of yours has process {process}; expected the id that `gangline launch` printed")


def _print_table(table: Sequence[Process], hosts: Sequence[HostEntry]) -> None:
    for index in sorted({process.host for process in table}) if hosts else [0]:
        if hosts:
            print(f"# {hosts[index].name}")
        print(*(one.shell_line() for one in table if one.host == index and not one.is_spare), sep="\n")


def _print_address(environment: Mapping[str, str | None], *, knows_key: bool) -> None:
    """Print where readers of the job's versions attach, and the key that they need from other hosts."""
    host, port = environment["DMLC_PS_ROOT_URI"] or "", environment["DMLC_PS_ROOT_PORT"]
    key = f", with the key of {FILE}" if knows_key else f"; they need a key: set {FILE} before the job starts"
    shown = f"[{host}]" if ":" in host else host
    print(f"gangline: readers attach at {shown}:{port}{'' if is_loopback(host) else key}", file=sys.stderr, flush=True)


def _report_surplus(table: Sequence[Process], workers: int) -> None:
    started = sum(process.role == "worker" and not process.is_spare for process in table)
    if started < workers:
        surplus = f"workers {started} to {workers - 1} are" if workers - started > 1 else f"worker {started} is"
        print(f"gangline: {surplus} not started: there is a GPU for {started} of {workers} workers", file=sys.stderr)


def local_host(gpus: str | None, *, is_checked: bool = True) -> Host:
    """Return this host with the GPUs of --gpus; ``is_checked``: they must exist, and their NUMA nodes are read."""
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

"""Tables of `gangline env`: the devices to train on, or those of each worker of a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gangline.cli.options import JsonFile, write_json
from gangline.collectives.errors import UsageError
from gangline.doctor.gpu_links import LinkMatrix, matrix_table
from gangline.doctor.inventory import Device
from gangline.launcher.binding import Host, bind


def show_job(hosts: Sequence[Host], workers: int, *, idle_surplus: bool = False, json: JsonFile = None) -> None:
    """Print a table with the host, GPUs, cores and threads of each worker of a job.

    Raises:
        UsageError: if the hosts have fewer GPUs or slots than workers.
    """
    try:
        bindings = bind(hosts, workers, idle_surplus=idle_surplus)
    except ValueError as error:
        raise UsageError(str(error)) from error
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
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def show_devices(rows: Sequence[Device], links: LinkMatrix) -> None:
    """Print a table of devices, and one of the links between GPUs."""
    print_table(
        {
            "context": [row.context for row in rows],
            "name": [row.name for row in rows],
            "free": [f"{row.memory_free / 2**30:.1f} GiB" for row in rows],
            "total": [f"{row.memory_total / 2**30:.1f} GiB" for row in rows],
            "capability": [row.compute_capability or "" for row in rows],
            "display": ["" if row.display is None else "yes" if row.display else "no" for row in rows],
            "links": [", ".join(f"{peer} {link}" for peer, link in (row.peers or {}).items()) for row in rows],
        }
    )
    if len(links) > 1:
        print(f"\n{matrix_table(links)}")


def print_table(columns: dict[str, list[str]]) -> None:
    """Print columns by name, without empty ones."""
    shown = {name: column for name, column in columns.items() if any(column)}
    table = Table(*shown)
    for values in zip(*shown.values(), strict=True):
        table.add_row(*values)
    Console().print(table)

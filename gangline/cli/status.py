"""`gangline status`: show what the gangline processes of this user on this host do, and which of them is late."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gangline.status.late import Late, late_processes, waits_of
from gangline.status.metrics import serve_metrics
from gangline.status.query import ProcessStatus, statuses

_LEAST_WAIT = 0.1
"""Seconds from which a wait is shown: shorter ones are part of every step."""
_RATE_SECONDS = 0.5
_FRAMES = 4
_WIDTH = 160
"""Characters of a line in a file or pipe."""


def status(
    watch: Annotated[
        float | None, typer.Option("-w", "--watch", metavar="SECONDS", min=0.1, help="Refresh the table this often.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one line each time.")] = False,
    metrics_port: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve the same as Prometheus metrics, by default on 127.0.0.1."),
    ] = None,
) -> None:
    """Show the running jobs of this user on this host: what each process does, at which rate, and who is late.

    Each process answers on a Unix socket. On other hosts of a job, run the command there.
    """
    if metrics_port is not None:
        serve_metrics(metrics_port)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    before, began = statuses(), time.monotonic()
    if as_json:
        for count in itertools.count():
            now = before if not count else statuses()
            print(json.dumps({"processes": [one.as_json() for one in now], "late": _late_as_json(now)}), flush=True)
            if watch is None:
                return
            time.sleep(watch)
    if watch is None and metrics_port is None:
        time.sleep(_RATE_SECONDS)
        console.print(_page(before, statuses(), time.monotonic() - began))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(watch or 1.0)
            now, ended = statuses(), time.monotonic()
            live.update(_page(before, now, ended - began), refresh=True)
            before, began = now, ended


def _late_as_json(processes: Sequence[ProcessStatus]) -> list[dict[str, Any]]:
    return [
        {"job": job, **vars(late)}
        for job, own in groupby(processes, key=lambda one: one.job)
        for late in late_processes(list(own), _LEAST_WAIT)
    ]


def _page(before: Sequence[ProcessStatus], now: Sequence[ProcessStatus], seconds: float) -> Group:
    """Return the tables of all jobs, with rates over the seconds between two looks."""
    former = {one.process: one for one in before}
    pages: list[Table | Text] = []
    for _, own in groupby(now, key=lambda one: one.job):
        pages += _job(list(own), former, seconds)
    return Group(*pages or [Text("no gangline process of this user runs on this host")])


def _job(processes: Sequence[ProcessStatus], former: dict[int, ProcessStatus], seconds: float) -> list[Table | Text]:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "pid", "state", "CPU", "memory", "counts and rates", "waits"):
        is_number = name in ("pid", "CPU", "memory")
        is_text = name in ("counts and rates", "waits")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=not is_text)
    for one in processes:
        earlier = former.get(one.process)
        cpu = "" if earlier is None else f"{(one.cpu_seconds - earlier.cpu_seconds) / seconds:.0%}"
        state = one.state if one.answers or one.state == "stopped" else f"{one.state}, does not answer"
        waits = [wait for wait in waits_of(one, processes) if wait["seconds"] >= _LEAST_WAIT]
        texts = [f"{wait['seconds']:.1f} s in {wait['what']} for {_names(wait['missing'])}" for wait in waits[:1]]
        memory = f"{one.memory_bytes / 2**20:.0f} MiB"
        cells = one.name, str(one.process), state, cpu, memory, _rates(earlier, one, seconds), "".join(texts)
        table.add_row(*map(Text, cells))  # without rich's markup, which processes may have in their texts
    of_user = [one for one in processes if one.name.startswith(("worker", "rank"))] or processes
    heading = Text(of_user[0].command, style="bold", overflow="ellipsis", no_wrap=True)
    return [heading, table, *(_verdict(late, processes) for late in late_processes(processes, _LEAST_WAIT)), Text("")]


def _rates(earlier: ProcessStatus | None, now: ProcessStatus, seconds: float) -> str:
    """Return each counter and its rate, summed over the groups of a communicator."""
    counters, previous = _counters(now), {} if earlier is None else _counters(earlier)
    words = []
    for name, value in counters.items():
        rate = max(value - previous.get(name, value), 0) / seconds  # less if a group was closed meanwhile
        kind, _, unit = name.rpartition("_")
        words.append(
            f"{rate / 1e6:.1f} MB/s {kind}".rstrip() if unit == "bytes" else f"{value:,} {name} ({rate:.0f}/s)"
        )
    return ", ".join(words)


def _counters(process: ProcessStatus) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in process.parts:
        total.update(part["counters"])
    return total


def _verdict(late: Late, processes: Sequence[ProcessStatus]) -> Text:
    process = next((one for one in processes if one.name == late.name), None)
    seconds = f", for {late.seconds:.1f} s: {_names(late.waiting)} {'waits' if len(late.waiting) == 1 else 'wait'}"
    words = f" in {late.what}"
    if process is None:
        words += "; it is on another host, or has ended"
    elif process.state == "stopped":
        words += f"; process {process.process} is stopped: kill -CONT {process.process}"
    elif process.stack:
        words += "\n  ".join(["; it is at", *reversed(process.stack[-_FRAMES:])])
    return Text(f"late: {late.name}{seconds}", style="bold").append(words, style="not bold")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

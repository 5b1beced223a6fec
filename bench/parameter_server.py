"""`gangline bench ps`: push and pull through the parameter server, beside MXNet's.

A job is a scheduler, servers and workers, all processes of this machine; jobs are idle while another one is measured.
"""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from gangline.bench.driver.harness import Side, fastest, in_turn, say
from gangline.bench.driver.hosts import Hosts, obstacle
from gangline.bench.driver.installed import available_peers, interpreter, started
from gangline.bench.driver.processes import SERVER, Candidate
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, command_line, publish
from gangline.bench.report.plots import draw_curves
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.report.tables import print_ratios
from gangline.bench.workload.options import (
    Compression,
    DistStore,
    Json,
    MinBytes,
    Plot,
    Runs,
    ServerTransport,
    StepFactor,
)
from gangline.bench.workload.sizes import size_in_bytes, sizes_between
from gangline.usage_error import UsageError

PUSH, PUSH_PULL, PUSHPULL = "push", "push+pull", "pushpull"
"""The measured calls."""
_ITEM = 4  # bytes of a float32
_LONG = 1.0  # seconds of a step that is not repeated within a run
_RUN_SECONDS = 0.2
_COMPRESSIONS: Mapping[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.5},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
}


@dataclass(frozen=True)
class Case:
    """The options of `gangline bench ps`."""

    minbytes: MinBytes = "4K"
    maxbytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size in bytes; it is always measured.")] = (
        "64M"
    )
    stepfactor: StepFactor = 16
    workers: Annotated[int, typer.Option("-n", "--workers", help="Worker processes.", min=1)] = 2
    servers: Annotated[int, typer.Option("-s", "--servers", help="Server processes.", min=1)] = 1
    store: Annotated[DistStore, typer.Option(help="Kind of store.")] = DistStore.dist_sync
    transport: Annotated[
        ServerTransport, typer.Option(help="gangline's transport; auto: shared memory where possible.")
    ] = ServerTransport.auto
    pushpull: Annotated[bool, typer.Option(help="Also measure the call pushpull.")] = False
    compression: Annotated[Compression | None, typer.Option(help="Also measure compressed pushes.")] = None
    peers: Annotated[str, typer.Option(help="Peers to measure beside gangline: mxnet.")] = ""
    hosts: Annotated[
        int, typer.Option(help="2: run the servers in one network namespace and the workers in another.", min=1, max=2)
    ] = 1
    rate: Annotated[str | None, typer.Option(help="Rate of the link between the two hosts, such as 100mbit.")] = None
    check: Annotated[bool, typer.Option(help="Check every element of the results.")] = True
    runs: Runs = 3
    json: Json = None
    plot: Plot = None

    def sizes(self) -> list[int]:
        """Return the bytes of the key in each measurement, after checking that the job can be measured here."""
        largest = size_in_bytes(self.maxbytes, "-e")
        sizes = sorted({*sizes_between(self.minbytes, self.maxbytes, self.stepfactor), largest})
        if sizes[0] < _ITEM:
            raise UsageError(f"-b is {sizes[0]}; expected {_ITEM} bytes or more, those of one float32")
        if self.rate is not None and self.hosts == 1:
            raise UsageError(f"--rate is {self.rate}, but there is no link; expected --hosts 2 with it")
        if self.hosts > 1 and (why := obstacle()) is not None:
            raise RuntimeError(f"--hosts {self.hosts}: {why}")
        return sizes


def ps(case: Case) -> None:
    """Push a key of float32 from every worker and pull the sum.

    size is that of the key; time is that of one push and pull: the mean over a run on the slowest worker, and the
    median over the runs. --compression adds the push alone, until the servers have it, uncompressed and compressed, and
    push and pull with both compressed (pulls as fp16). MXNet runs at the fastest of several settings for each size
    and call. error is the largest deviation from the exact sum.
    """
    check_outputs(case.json, case.plot)
    rows = measure(case)
    publish(rows, case.json)
    if case.plot is not None:
        draw_curves(
            command_line(),
            rows,
            case.plot,
            panels=lambda row: f"{row['mode']}, {row['workers']} workers",
            curves=lambda row: ", ".join(filter(None, [row["who"], row["transport"], row["call"], row["compression"]])),
            figures=("time_us",),
        )
    print_ratios(rows, "size", ("mode", "transport", "call", "compression"))


def measure(case: Case) -> list[Row]:
    """Measure each size; the sides of a size are measured in turn.

    Raises:
        GroupError: if gangline fails. A peer that fails is skipped from then on, with a line on stderr.
    """
    sizes, peers = case.sizes(), available_peers(case.peers, "parameter_server")
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate=case.rate)) if case.hosts > 1 else None
        own = _own_jobs(stack, case, hosts)
        others = {peer: jobs for peer in peers if (jobs := _peer_jobs(stack, peer, case))}
        return [row for size in sizes for row in _Size(case, size).rows(own, others)]


@dataclass(frozen=True)
class _Size:
    case: Case
    size: int

    def rows(
        self, own: Sequence[tuple[RankGroup, str, str | None]], others: dict[str, list[RankGroup]]
    ) -> Iterator[Row]:
        """Prepare all sides, measure them in turn, and free their memory."""
        sides = [self._prepared("gangline", job, call, compression) for job, call, compression in own]
        for call in _calls(self.case):
            sides += fastest(list(others), others, partial(self._prepared, call=call))
        sides = [side for side in sides if side.who in ("gangline", *others)]  # without failed ones
        say(f"measuring {self.size} bytes, {self.case.runs} runs each, in turn")
        seconds = in_turn({side: side.seconds for side in sides}, self.case.runs)
        yield from [self._row(side, seconds) for side in sides]
        for job in {*(job for job, _, _ in own), *(job for jobs in others.values() for job in jobs)}:
            job.release()

    def _prepared(self, who: str, job: RankGroup, call: str, compression: str | None = None) -> Side:
        """Create the key and choose the steps of a run."""
        options = {
            "count": self.size // _ITEM,
            "workers": self.case.workers,
            "call": call,
            "compression": compression,
        }
        step = job.prepare(options, call)
        return Side(who, job, options, call, 1 if step > _LONG else job.steps_in(_RUN_SECONDS, call))

    def _row(self, side: Side, seconds: Mapping[Side, Sequence[float]]) -> Row:
        case, bytes_of_key = self.case, self.size // _ITEM * _ITEM
        figures = spread([1e6 * each for each in seconds[side]])
        ours = side.who == "gangline"
        return {
            "who": side.group.who,
            "setting": side.group.candidate.setting or None,
            "mode": case.store,
            "transport": case.transport if ours and case.hosts == 1 else "tcp",
            "call": side.name,
            "compression": side.options["compression"],
            "workers": case.workers,
            "servers": case.servers,
            "hosts": case.hosts if case.hosts > 1 else None,
            "rate": case.rate,
            "size": bytes_of_key,
            "time_us": figures["p50"],
            "gb_per_s": bytes_of_key / figures["p50"] / 1e3,
            "error": side.group.error(side.name) if case.check else None,
            **(_ratios(side, seconds) if ours else {}),
            **figures,
        }


def _ratios(side: Side, seconds: Mapping[Side, Sequence[float]]) -> Row:
    """Return the speed-up of a side of gangline's over others.

    A call is compared with the peer's same call, pushpull also with the peer's push and pull, and a compressed call
    with the uncompressed call.
    """
    found: Row = {}
    coding = side.options["compression"]
    for other, theirs in seconds.items():
        ratio = times_as_fast(seconds[side], theirs)
        if other.who == "gangline":
            if coding is not None and (other.name, other.options["compression"]) == (side.name, None):
                found["ratio_to_float32"] = ratio
        elif coding is None and other.name == side.name:
            found[f"ratio_to_{other.who}"] = ratio
        elif coding is None and (side.name, other.name) == (PUSHPULL, PUSH_PULL):
            found[f"ratio_to_{other.who}_{PUSH_PULL}"] = ratio
    return found


def _calls(case: Case) -> list[str]:
    return [PUSH_PULL, *([PUSHPULL] if case.pushpull else [])]


def _own_jobs(stack: ExitStack, case: Case, hosts: Hosts | None) -> list[tuple[RankGroup, str, str | None]]:
    """Start gangline's jobs, one for each compression; return each with its calls and compression."""
    calls: dict[str | None, list[str]] = {None: _calls(case)}
    if case.compression is not None:
        calls[None].insert(0, PUSH)
        calls |= {case.compression: [PUSH], f"{case.compression}, pulls fp16": [PUSH_PULL]}
    found = []
    for compression, of_job in calls.items():
        job = stack.enter_context(RankGroup(_own_candidate(case, compression), hosts))
        found += [(job, call, compression) for call in of_job]
    return found


def _own_candidate(case: Case, compression: str | None) -> Candidate:
    env = {"BENCH_STORE": case.store, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // case.workers))}
    if compression is not None:
        name, _, pulls = compression.partition(", pulls ")
        params = {**_COMPRESSIONS[name], **({"pull_type": pulls} if pulls else {})}
        env["BENCH_COMPRESSION"] = json_format.dumps(params)
    if case.transport == "tcp" or case.hosts > 1:  # processes of two namespaces could still share memory
        env["GANGLINE_TRANSPORT"] = "tcp"
    if case.hosts > 1:
        env["GANGLINE_INSECURE"] = "1"  # the namespaces are isolated
    return Candidate("parameter_server/gangline", case.workers, case.servers, env=env, server_code=SERVER)


def _peer_jobs(stack: ExitStack, peer: str, case: Case) -> list[RankGroup]:
    """Start a peer's jobs, one for each setting; none if it cannot be started, with the reason on stderr."""
    if case.hosts > 1 or case.store != "dist_sync":
        say(f"skipping {peer}: it is measured with dist_sync on one host only")
        return []
    candidates = [
        Candidate(
            f"parameter_server/{peer}",
            case.workers,
            case.servers,
            env={"BENCH_STORE": case.store, "OMP_NUM_THREADS": threads, "DMLC_NODE_HOST": "127.0.0.1"},
            setting=f"OMP_NUM_THREADS={threads}",
            interpreter=interpreter(peer),
            server_code=f"import {peer}",
        )
        for threads in ("1", "2")
    ]
    return started(stack, peer, candidates)

"""`gangline bench ps`: push and pull through the parameter server, beside MXNet's.

A job is a scheduler, servers and workers, processes of this machine; jobs sleep while another one is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gangline.bench.ps_sides import ITEM, PUSH_PULL, PUSHPULL, Case, Side, own_sides, peer_sides, say
from gangline.bench.report import Row, check_outputs, publish, spread
from gangline.bench.workload import command_line, print_ratios

_TRIALS = 2  # runs of a setting that is tried
_LEAST_STEPS, _MOST_STEPS = 3, 20_000
_LONG = 1.0  # seconds of a step that is not repeated within a run


def ps(
    smallest: Annotated[str, typer.Option("-b", help="The smallest size in bytes, such as 4K.")] = "4K",
    largest: Annotated[str, typer.Option("-e", help="The largest size, which is measured in any case.")] = "64M",
    factor: Annotated[int, typer.Option("-f", help="From one size to the next.", min=2)] = 16,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1)] = 2,
    servers: Annotated[int, typer.Option(help="Server processes.", min=1)] = 1,
    store: Annotated[str, typer.Option(help="The kind of store.")] = "dist_sync",
    transport: Annotated[str, typer.Option(help="gangline's: auto (shared memory where it can) or tcp.")] = "auto",
    pushpull: Annotated[bool, typer.Option(help="Measure the call pushpull, too.")] = False,
    compression: Annotated[
        str | None, typer.Option(help="Measure pushes compressed so, too: 2bit, fp16 or bf16.")
    ] = None,
    peers: Annotated[str, typer.Option(help="What to measure beside gangline: mxnet.")] = "",
    hosts: Annotated[int, typer.Option(help="2: the servers in one network namespace, the workers in another.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Of the link between the two, as tc has it: 100mbit.")] = None,
    check: Annotated[bool, typer.Option(help="Look at every element of the results.")] = True,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this .png.")] = None,
) -> None:
    """Have every worker push a key of float32 and pull the sum.

    size is the key's in bytes; time_us is that of one push and pull: the mean over a run of the worker that took
    longest, and the median over the runs. gb_per_s is size / time. With --compression there are also the push alone,
    until servers have it, as it is and compressed, and push and pull with both compressed (pulls as fp16);
    ratio_to_float32 tells how many times as fast that is. MXNet runs at its best setting for each size and call, found
    first and named. error is the largest deviation from the exact sum. p50, min, p99 and max are of time_us.
    """
    from gangline.bench.peers.installed import chosen
    from gangline.bench.sweep import size_in_bytes, sizes_between

    check_outputs(json, plot)
    sizes = {*sizes_between(smallest, largest, factor), size_in_bytes(largest, "-e")}
    case = Case(
        sizes=sorted(sizes),
        workers=workers,
        servers=servers,
        store=store,
        transport=transport,
        pushpull=pushpull,
        compression=compression,
        peers=chosen(peers, "ps", on_gpus=False),
        hosts=hosts,
        rate=rate,
        check=check,
        runs=runs,
    )
    rows = measure(case)
    publish(command_line(), rows, json)
    if plot is not None:
        from gangline.bench.ps_plot import draw

        draw(command_line(), rows, plot)
    print_ratios(rows, ("mode", "transport", "call", *(["compression"] if compression else []), "size"))


def measure(case: Case) -> list[Row]:
    """Rows for each size; the sides of a size are measured in turn.

    Raises:
        JobError: gangline failed. A peer that does is left out from there on, with a line that says so.
    """
    from gangline.bench.hosts import Hosts

    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, rate=case.rate)) if case.hosts > 1 else None
        own = own_sides(stack, case, hosts)
        others = {peer: ways for peer in case.peers if (ways := peer_sides(stack, peer, case))}
        return [row for size in case.sizes for row in _Size(case, size).rows(own, others)]


@dataclass(frozen=True)
class _Size:
    """One size of the key."""

    case: Case
    size: int

    def rows(self, own: Sequence[Side], others: dict[str, list[Side]]) -> Iterator[Row]:
        """Prepare all sides, measure them in turn, and give their memory back."""
        from gangline.bench.jobs import JobError

        sides = {side: self._prepared(side) for side in own}
        for peer in list(others):
            try:
                sides |= self._best(others[peer])
            except JobError as error:
                print(f"skipping {peer}: {error}")
                for side in others.pop(peer):
                    side.job.close()
        seconds: dict[Side, list[float]] = {side: [] for side in sides}
        say(f"measuring {self.size} bytes, {self.case.runs} runs each, in turn")
        for _ in range(self.case.runs):
            for side, steps in sides.items():
                seconds[side].append(side.job.seconds(side.name, steps))
        yield from [self._row(side, seconds) for side in sides]
        for job in {side.job for side in (*own, *(side for ways in others.values() for side in ways))}:
            job.ask({"release": True})

    def _prepared(self, side: Side) -> int:
        """How many steps a run has."""
        options = {
            "count": self.size // ITEM,
            "workers": self.case.workers,
            "call": side.call,
            "compression": side.compression,
        }
        answers = side.job.ask({"prepare": options, "as": side.name})
        step = max(answer["seconds"] for answer in answers)
        return 1 if step > _LONG else min(max(math.ceil(self.case.run_seconds / step), _LEAST_STEPS), _MOST_STEPS)

    def _best(self, ways: Sequence[Side]) -> dict[Side, int]:
        """The quickest of a peer's sides for each call at this size, and the steps of their runs."""
        best: dict[str, tuple[float, Side, int]] = {}
        for side in ways:
            steps = self._prepared(side)
            seconds = min(side.job.seconds(side.name, steps) for _ in range(_TRIALS))
            if side.call not in best or seconds < best[side.call][0]:
                best[side.call] = seconds, side, steps
        return {side: steps for _, side, steps in best.values()}

    def _row(self, side: Side, seconds: Mapping[Side, Sequence[float]]) -> Row:
        case, bytes_of_key = self.case, self.size // ITEM * ITEM
        figures = spread([1e6 * each for each in seconds[side]])
        ours = side.who == "gangline"
        return {
            "who": side.job.who,
            "setting": side.job.plan.setting or None,
            "mode": case.store,
            "transport": case.transport if ours and case.hosts == 1 else "tcp",
            "call": side.call,
            "compression": side.compression,
            "workers": case.workers,
            "servers": case.servers,
            "hosts": case.hosts if case.hosts > 1 else None,
            "rate": case.rate,
            "size": bytes_of_key,
            "time_us": figures["p50"],
            "gb_per_s": bytes_of_key / figures["p50"] / 1e3,
            "error": self._error(side) if case.check else None,
            **(_ratios(side, seconds) if ours else {}),
            **figures,
        }

    def _error(self, side: Side) -> float:
        return float(max(answer["error"] for answer in side.job.ask({"check": side.name})))


def _ratios(side: Side, seconds: Mapping[Side, Sequence[float]]) -> Row:
    """How many times as fast a side of ours is as others: medians over the runs, each beside its neighbour.

    A peer is compared by the same call; pushpull, which it may not have, by its push and pull as well. What is
    compressed stands beside the same call without.
    """
    found: Row = {}
    for other, theirs in seconds.items():
        ratio = spread([their / own for own, their in zip(seconds[side], theirs, strict=True)])["p50"]
        if other.who == "gangline":
            if side.compression is not None and (other.call, other.compression) == (side.call, None):
                found["ratio_to_float32"] = ratio
        elif side.compression is None and other.call == side.call:
            found[f"ratio_to_{other.who}"] = ratio
        elif side.compression is None and (side.call, other.call) == (PUSHPULL, PUSH_PULL):
            found[f"ratio_to_{other.who}_{PUSH_PULL}"] = ratio
    return found

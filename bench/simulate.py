"""`gangline bench simulate`: what each algorithm would cost on a cluster that one describes, on paper."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.bench.report import Row, check_outputs, publish, spread
from gangline.bench.workload import command_line

if TYPE_CHECKING:
    from gangline.collectives.schedule import Schedule


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, as equal in number as can be, neighbours together; each has a port of its own."""

    ranks: int
    hosts: int
    alpha_inside: float
    """Microseconds a message within a host."""
    alpha_between: float
    """Microseconds a message from one host to another."""
    beta_inside: float
    """GB/s of a rank's port within a host."""
    beta_between: float
    """GB/s of a rank's port to other hosts."""
    gamma: float
    """GB/s that a rank combines."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks:
            raise ValueError(f"--hosts is {self.hosts} for {self.ranks} ranks; expected 1 to {self.ranks}")
        for name in ("beta_inside", "beta_between", "gamma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected more than 0 GB/s")

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(rank * self.hosts // self.ranks for rank in range(self.ranks))

    def seconds(self, schedule: Schedule, nbytes: int) -> float:
        """What a schedule costs; ``nbytes`` as in `Schedule.bytes_on_wire`."""
        from gangline.collectives.schedule import by_host

        alpha = by_host(self.host_of_rank, 1e-6 * self.alpha_inside, 1e-6 * self.alpha_between)
        beta = by_host(self.host_of_rank, 1e-9 / self.beta_inside, 1e-9 / self.beta_between)
        return schedule.cost(nbytes, alpha, beta, 1e-9 / self.gamma)


def simulate(
    ranks: Annotated[int, typer.Option(help="Number of ranks.", min=1)] = 64,
    size: Annotated[str, typer.Option(help="Bytes of the tensor, such as 64K or 100M; of all its rows.")] = "100M",
    hosts: Annotated[int, typer.Option(help="Hosts that the ranks are spread over.", min=1)] = 1,
    collective: Annotated[str, typer.Option(help="Such as all_reduce or broadcast.")] = "all_reduce",
    alpha_inside: Annotated[float, typer.Option(help="Latency of a message within a host, in us.", min=0)] = 3.0,
    alpha_between: Annotated[float, typer.Option(help="The same between hosts.", min=0)] = 10.0,
    beta_inside: Annotated[float, typer.Option(help="Bandwidth of a rank within its host, in GB/s.")] = 100.0,
    beta_between: Annotated[float, typer.Option(help="The same to other hosts.")] = 12.5,
    gamma: Annotated[float, typer.Option(help="Bytes that a rank combines, in GB/s.")] = 200.0,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Price every algorithm of a collective on a cluster, the quickest first; nothing is sent.

    A message takes alpha and its bytes / beta, and holds a port of its sender and one of its receiver meanwhile;
    combining takes bytes / gamma. Algorithms that pipeline get the number of segments that serves them best. steps are
    rounds of messages; bytes_a_rank the most that a rank sends. algbw is size / seconds; busbw as in nccl-tests.
    """
    from gangline.bench.sweep import size_in_bytes

    check_outputs(json, None)
    cluster = Cluster(ranks, hosts, alpha_inside, alpha_between, beta_inside, beta_between, gamma)
    publish(command_line(), measure(cluster, collective, size_in_bytes(size, "--size")), json)


def measure(cluster: Cluster, collective: str, nbytes: int) -> list[Row]:
    """A row for each algorithm, the quickest first.

    Args:
        cluster: what they would run on.
        collective: such as "all_reduce"; its root, if it has one, is rank 0.
        nbytes: of the tensor; of all its rows, where it has one for each rank.

    Raises:
        ValueError: there is no such collective.
    """
    from gangline.collectives import algorithms

    rows = [_row(cluster, collective, algorithm, nbytes) for algorithm in algorithms.names(collective)]
    return sorted(rows, key=lambda row: float(row["seconds"]))


def _row(cluster: Cluster, collective: str, algorithm: str, nbytes: int) -> Row:
    from gangline.bench.sweep import bus_factor

    segments, schedule, seconds = _best(cluster, collective, algorithm, nbytes)
    algbw = nbytes / seconds / 1e9 if seconds else 0.0
    return {
        "who": "gangline",
        "collective": collective,
        "algorithm": algorithm,
        "ranks": cluster.ranks,
        "hosts": cluster.hosts,
        "size": nbytes,
        "segments": segments,
        "steps": schedule.steps(),
        "bytes_a_rank": schedule.bytes_on_wire(nbytes),
        "seconds": seconds,
        "algbw_gbs": algbw,
        "busbw_gbs": algbw * bus_factor(collective, cluster.ranks),
        **spread([seconds]),
    }


def _best(cluster: Cluster, collective: str, algorithm: str, nbytes: int) -> tuple[int, Schedule, float]:
    """Segments, schedule and seconds; segments double as long as that makes it quicker."""
    best: tuple[int, Schedule, float] | None = None
    for power in count():
        schedule = _schedule(cluster, collective, algorithm, segments=1 << power)
        if best is not None and schedule.chunks == best[1].chunks:
            break  # it has no segments
        seconds = cluster.seconds(schedule, nbytes)
        if best is not None and seconds >= best[2]:
            break
        best = (1 << power, schedule, seconds)
    assert best is not None
    return best


def _schedule(cluster: Cluster, collective: str, algorithm: str, segments: int) -> Schedule:
    from gangline.collectives import algorithms
    from gangline.collectives.schedule import ROOTED

    root = 0 if collective in ROOTED else None
    hosts = cluster.host_of_rank
    return algorithms.build(collective, algorithm, cluster.ranks, root=root, segments=segments, hosts=hosts)

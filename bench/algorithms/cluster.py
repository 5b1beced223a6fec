"""Predicted cost of each algorithm of a collective on a described cluster."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from gangline.bench.algorithms.cost import by_host, cost
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.collective_shapes import bus_factor
from gangline.collectives import algorithms
from gangline.collectives.schedule import ROOTED, Schedule
from gangline.usage_error import UsageError


@dataclass(frozen=True)
class Cluster:
    """Ranks distributed equally over hosts, in blocks of neighbours; every rank has its own port."""

    ranks: int
    hosts: int
    alpha_inside: float
    """Latency of a message within a host, in microseconds."""
    alpha_between: float
    """Latency of a message between hosts, in microseconds."""
    beta_inside: float
    """Bandwidth of a rank's port within a host, in GB/s."""
    beta_between: float
    """Bandwidth of a rank's port to other hosts, in GB/s."""
    gamma: float
    """Rate at which a rank reduces, in GB/s."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.ranks:
            raise UsageError(f"--hosts is {self.hosts} for {self.ranks} ranks; expected 1 to {self.ranks}")
        for name in ("beta_inside", "beta_between", "gamma"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected more than 0 GB/s")

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """Host of each rank."""
        return tuple(rank * self.hosts // self.ranks for rank in range(self.ranks))

    def seconds(self, schedule: Schedule, nbytes: int) -> float:
        """Return the cost of a schedule in seconds; ``nbytes`` as in `Schedule.bytes_on_wire`."""
        alpha = by_host(self.host_of_rank, 1e-6 * self.alpha_inside, 1e-6 * self.alpha_between)
        beta = by_host(self.host_of_rank, 1e-9 / self.beta_inside, 1e-9 / self.beta_between)
        return cost(schedule, nbytes, alpha, beta, 1e-9 / self.gamma)


def measure(cluster: Cluster, collective: str, nbytes: int) -> list[Row]:
    """Return a row for each algorithm, fastest first.

    Args:
        cluster: the simulated cluster.
        collective: name of the collective; its root, if it has one, is rank 0.
        nbytes: bytes of the tensor, including all rows if it has one per rank.

    Raises:
        ValueError: if there is no such collective.
    """
    rows = [_row(cluster, collective, algorithm, nbytes) for algorithm in algorithms.names(collective)]
    return sorted(rows, key=lambda row: float(row["seconds"]))


def _row(cluster: Cluster, collective: str, algorithm: str, nbytes: int) -> Row:
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
    """Return segments, schedule and seconds; double the segments while that is faster."""
    best: tuple[int, Schedule, float] | None = None
    for power in count():
        schedule = _schedule(cluster, collective, algorithm, segments=1 << power)
        if best is not None and schedule.chunks == best[1].chunks:
            break  # the algorithm has no segments
        seconds = cluster.seconds(schedule, nbytes)
        if best is not None and seconds >= best[2]:
            break
        best = (1 << power, schedule, seconds)
    assert best is not None
    return best


def _schedule(cluster: Cluster, collective: str, algorithm: str, segments: int) -> Schedule:
    root = 0 if collective in ROOTED else None
    hosts = cluster.host_of_rank
    return algorithms.build(collective, algorithm, cluster.ranks, root=root, segments=segments, hosts=hosts)

"""Binding of workers: the host, GPUs, cores and number of threads of each worker of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOCALHOST = "127.0.0.1"
NCCL_MEMCPY = "NCCL_SHM_USE_CUDA_MEMCPY"
"""Variable that makes NCCL use copy engines, not kernels, between GPUs without peer access."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU."""

    number: int
    core: int
    """Number of the physical core; hardware threads of one core share it."""
    node: int = 0
    """NUMA node."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU for workers."""

    name: str
    """Entry of CUDA_VISIBLE_DEVICES: a number or a UUID."""
    node: int | None = None
    """NUMA node to which the card is attached; None if unknown."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a job, and the resources of its workers."""

    address: str = LOCALHOST
    """Address of the host for the other hosts."""
    cpus: tuple[Cpu, ...] = ()
    """CPUs for workers; empty: unknown, so that workers are not bound to any."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs for workers; a GPU that occurs twice is shared by two workers. Empty: workers see all GPUs of the host."""
    slots: int | None = None
    """Maximum number of workers; None: one per GPU, and any number without `gpus`."""
    needs_memcpy: bool = False
    """Set `NCCL_MEMCPY` if the host has several workers: GPUs lack peer access."""

    @property
    def capacity(self) -> int | None:
        """Maximum number of workers of the host; None: any."""
        limits = [limit for limit in (self.slots, len(self.gpus) or None) if limit is not None]
        return min(limits, default=None)

    def __str__(self) -> str:
        words = [f"GPUs: {', '.join(gpu.name for gpu in self.gpus)}"] if self.gpus else []
        words += [f"slots: {self.slots}"] if self.slots is not None else []
        return f"{self.address} ({'; '.join(words) or 'no limit'})"


@dataclass(frozen=True, slots=True)
class Binding:
    """One worker's place in a job."""

    rank: int
    host: Host
    node_rank: int
    """Number of the host in the job."""
    local_rank: int
    local_size: int
    gpus: tuple[Gpu, ...] = ()
    """The worker's own GPUs; empty: not restricted."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs that the worker may use; empty: not restricted."""
    threads: int | None = None
    """Number of compute threads; None: unknown."""

    def environment(self) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS, if restricted, and NCCL's variables."""
        found = {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpu.name for gpu in self.gpus))} if self.gpus else {}
        if self.threads is not None:
            found["OMP_NUM_THREADS"] = str(self.threads)
        if self.host.needs_memcpy and self.local_size > 1:
            found[NCCL_MEMCPY] = "1"
        return found


def bind(hosts: Sequence[Host], workers: int, *, idle_surplus: bool = False) -> list[Binding]:
    """Assign hosts, GPUs and cores to a job's workers, by rank; fill the first host first.

    A host's GPUs are assigned to its workers in turn. A worker gets an equal part of the cores on the NUMA node of its
    first GPU; without GPUs or a known node, an equal part of the host's cores. Hardware threads of one core stay
    together. On a host with fewer CPUs than workers, workers are not bound to CPUs. Workers beyond the hosts' GPUs or
    slots are left out with ``idle_surplus``, else an error.
    """
    if not hosts:
        raise ValueError("a job has no hosts; expected at least one")
    counts = _counts(hosts, workers, idle_surplus=idle_surplus)
    found: list[Binding] = []
    for node_rank, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        own = [host.gpus[local_rank::count] for local_rank in range(count)]
        parts = _parts(host.cpus, [gpus[0].node if gpus else None for gpus in own])
        cores = len({cpu.core for cpu in host.cpus})
        for local_rank, (gpus, part) in enumerate(zip(own, parts, strict=True)):
            threads = _threads(part, cores // count) if host.cpus else None
            cpus = tuple(cpu.number for cpu in part)
            found.append(Binding(len(found), host, node_rank, local_rank, count, gpus, cpus, threads))
    return found


def _counts(hosts: Sequence[Host], workers: int, *, idle_surplus: bool) -> list[int]:
    """Return the number of workers of each host."""
    left = workers
    counts = []
    for host in hosts:
        count = left if host.capacity is None else min(left, host.capacity)
        counts.append(count)
        left -= count
    if left and (not idle_surplus or left == workers):
        places = workers - left
        raise ValueError(
            f"{workers} workers for {', '.join(map(str, hosts))}: each worker needs a GPU and a slot of its own; "
            f"start at most {places} workers, name a GPU twice to share it (--gpus 0,0), or leave the other "
            f"{left} out by --idle-surplus"
        )
    return counts


def _parts(cpus: Sequence[Cpu], nodes: Sequence[int | None]) -> list[list[Cpu]]:
    """Divide CPUs among workers, given the NUMA node of each worker's GPU; all parts are empty if CPUs do not suffice.

    A worker whose GPU has no known node gets CPUs of the node with the fewest workers per CPU.
    """
    sizes = {node: sum(cpu.node == node for cpu in cpus) for node in sorted({cpu.node for cpu in cpus})}
    wanted = [node if node in sizes else None for node in nodes]
    if any(node is not None for node in wanted):
        members = {node: [rank for rank, own in enumerate(wanted) if own == node] for node in sizes}
        for rank in (rank for rank, own in enumerate(wanted) if own is None):
            members[min(sizes, key=lambda node: (len(members[node]) + 1) / sizes[node])].append(rank)
        if all(len(ranks) <= sizes[node] for node, ranks in members.items()):
            parts: dict[int, list[Cpu]] = {}
            for node, ranks in members.items():
                own = [cpu for cpu in cpus if cpu.node == node]
                parts |= zip(ranks, _split(own, len(ranks)), strict=True)
            return [parts[rank] for rank in range(len(nodes))]
    return list(_split(cpus, len(nodes)))


def _split(cpus: Sequence[Cpu], count: int) -> Iterator[list[Cpu]]:
    """Yield ``count`` parts of nearly equal size: of whole cores, of CPUs if there are fewer cores, else empty ones."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in sorted(cpus, key=lambda cpu: (cpu.node, cpu.core, cpu.number)):
        cores.setdefault(cpu.core, []).append(cpu)
    units = list(cores.values())
    if len(units) < count:
        units = [[cpu] for unit in units for cpu in unit]
    for index in range(count):
        first, last = (len(units) * bound // count for bound in (index, index + 1))
        yield [cpu for unit in units[first:last] for cpu in unit] if len(units) >= count else []


def _threads(part: Sequence[Cpu], share: int) -> int:
    """Return the number of threads: the worker's cores, but no more than its equal share of the host's cores."""
    cores = len({cpu.core for cpu in part})
    return max(1, min(cores, share) if cores else share)

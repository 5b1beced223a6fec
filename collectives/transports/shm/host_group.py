"""The ranks of one host and the memory that they share: one segment per rank, allocated in regions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch

from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.shm import cma
from gangline.collectives.transports.shm.cpu_quota import are_enough, cpu_quotas
from gangline.collectives.transports.shm.segments import Offer, Segment, open_offered, processor_problem

_PAGE = 4096  # bytes


@dataclass
class HostGroup:
    """The ranks of one host, numbered from 0 on this host."""

    rank: int
    """This rank's number on this host."""
    members: Sequence[int]
    """The ranks of this host among the ranks of all hosts, by which wait policies know them."""
    segments: Sequence[Segment]
    """Memory of each rank, of equal size."""
    processes: Sequence[int]
    """Process id of each rank."""
    readers: set[int]
    """Ranks that can read this process's memory (`cma.read`)."""
    has_cores: bool
    """True if the cores that ranks may run on, and their CPU quotas, leave each rank a core of its own."""
    _taken: int = 0  # bytes

    @property
    def size(self) -> int:
        """Number of ranks of this host."""
        return len(self.segments)

    def take(self, nbytes: int) -> list[Segment]:
        """Return the next ``nbytes`` of every rank's segment, at a page boundary.

        Collective: all ranks take the same sizes in the same order.
        """
        begin = self._taken
        self._taken += padded(nbytes)
        return [segment.region(begin, nbytes) for segment in self.segments]


def padded(nbytes: int) -> int:
    """Return the bytes that `HostGroup.take` uses up for a region of ``nbytes``."""
    return -(-nbytes // _PAGE) * _PAGE


def open_host_group(rank: int, members: Sequence[int], nbytes: int, all_gather: BootstrapAllGather) -> HostGroup:
    """Share memory between the ranks of this host, ``members``: a segment of each.

    Collective over the ranks of all hosts: the first all-gather offers the memory, the second reports the outcome.
    Pages that are never used take no memory.

    Raises:
        OSError: on all ranks of all hosts with the same text, if a rank cannot share memory with its host's others.
    """
    content = os.urandom(16)
    probe = torch.frombuffer(bytearray(content), dtype=torch.uint8)  # read by the others between the all-gathers
    offer, handle, problem = None, b"", ""
    try:
        try:
            if reason := processor_problem():
                raise OSError(reason)
            offer = Offer(nbytes)
            handle = offer.handle
        except OSError as error:
            problem = f"rank {rank} cannot offer memory: {error}"
        cores = sorted(os.sched_getaffinity(0))  # mpirun may bind each rank to a different core
        gathered = all_gather(msgpack.packb([handle, os.getpid(), probe.data_ptr(), content, cores, cpu_quotas()]))
        offers = [msgpack.unpackb(gathered[member]) for member in members]
        segments: list[Segment] = []
        if offer is not None and all(handle for handle, *_ in offers):
            try:
                for member, (handle, *_) in zip(members, offers, strict=True):
                    segments.append(offer.segment if member == rank else open_offered(handle))
            except OSError as error:
                problem = f"rank {rank} cannot open the memory of rank {members[len(segments)]}: {error}"
        readable = [
            member
            for member, (_, process, address, known, *_) in zip(members, offers, strict=True)
            if member != rank and cma.may_read(process, address, known)
        ]
        gathered = all_gather(msgpack.packb([problem, readable]))
        outcomes = [msgpack.unpackb(packed) for packed in gathered]
    finally:
        if offer is not None:
            offer.close()
    problems = [reported for reported, *_ in outcomes if reported]
    if problems:
        raise OSError(problems[0])
    return HostGroup(
        list(members).index(rank),
        members,
        segments,
        [process for _, process, *_ in offers],
        {index for index, member in enumerate(members) if rank in outcomes[member][1]},
        len({number for *_, cores, _ in offers for number in cores}) >= len(members)
        and are_enough([quotas for *_, quotas in offers]),
    )

"""Hierarchical: within the hosts, then between them, then within again; few bytes cross between hosts.

All-reduce with p ranks on h hosts of m ranks each: a direct reduce-scatter within each host, which leaves slice j of
the host's sum at local rank j; an all-reduce of slice j by halving and doubling between the ranks with local rank j of
all hosts, for all j at once; a direct all-gather within each host. 2 + 2 ceil(log2 h) rounds; a rank sends 2 n (p - 1)
/ p bytes, of which only 2 n / m (h - 1) / h leave its host.

If hosts have different numbers of ranks, the first rank of each is its leader: a binomial tree reduces to the leader,
the leaders all-reduce, and the tree broadcasts the sum. Broadcast: a binomial tree between leaders, one of which is the
root, then one within each host; reduce is the reversed broadcast.

Source: the two-level schemes of N. T. Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
collective operation performance" (2000); for equal hosts, M. Cho et al., "BlueConnect: decomposing all-reduce for deep
learning on heterogeneous network hierarchy" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.collectives.algorithms import binomial, direct, halving_doubling
from gangline.collectives.schedule import Rounds, in_parallel


def all_reduce(hosts: Sequence[int]) -> tuple[int, Rounds]:
    """All-reduce; rank i is on host ``hosts[i]``."""
    members = _members(hosts)
    if len({len(ranks) for ranks in members}) > 1:
        return len(members), _by_leaders(members)
    return len(hosts), _by_local_ranks(members)


def broadcast(hosts: Sequence[int], root: int) -> tuple[int, Rounds]:
    """Broadcast from the root to the leaders, and from them to all."""
    members = _members(hosts)
    for ranks in members:
        if root in ranks:
            ranks.sort(key=lambda rank: rank != root)
    leaders = [ranks[0] for ranks in members]
    between = binomial.tree(len(leaders), leaders.index(root)).among(leaders)
    return 1, between + in_parallel([binomial.tree(len(ranks), 0).among(ranks) for ranks in members])


def _by_local_ranks(members: Sequence[Sequence[int]]) -> Rounds:
    """Return the rounds for equal hosts: slice j of the tensor, one chunk per host, belongs to each local rank j."""
    hosts, ranks_per_host = len(members), len(members[0])
    gather = in_parallel([direct.gather_rows(ranks_per_host, width=hosts).among(ranks) for ranks in members])
    between = in_parallel(
        [
            halving_doubling.all_reduce(hosts)[1].among([ranks[local] for ranks in members], first_chunk=local * hosts)
            for local in range(ranks_per_host)
        ]
    )
    return gather.backwards(reduce=True) + between + gather


def _by_leaders(members: Sequence[Sequence[int]]) -> Rounds:
    chunks = len(members)
    inside = in_parallel([binomial.tree(len(ranks), 0, chunks).among(ranks) for ranks in members])
    between = halving_doubling.all_reduce(chunks)[1].among([ranks[0] for ranks in members])
    return inside.backwards(reduce=True) + between + inside


def _members(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())

"""Hierarchical: first inside the hosts, then between them, then inside again; few bytes go from host to host.

All-reduce with p ranks on h hosts of m ranks each: a direct reduce-scatter inside each host, after which place j holds
part j of its host's sum; an all-reduce of part j by halving and doubling between the ranks at place j of all hosts, for
all j at once; a direct all-gather inside. 2 + 2 ceil(log2 h) rounds; a rank sends 2 n (p - 1) / p bytes, of which only
2 n / m (h - 1) / h leave its host.

Where hosts have unequal numbers of ranks the first rank of each is its leader: a binomial tree sums to the leader, the
leaders all-reduce, and the tree gives the sum back. Broadcast: a binomial tree between leaders, of whom the root is
one, then one in each host; reduce is the broadcast turned back.

Source: the two-level schemes of N. T. Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
collective operation performance" (2000); in equal hosts as in M. Cho et al., "BlueConnect: decomposing all-reduce for
deep learning on heterogeneous network hierarchy" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.collectives.algorithms import binomial, direct, halving_doubling
from gangline.collectives.schedule.rounds import Rounds, side_by_side
from gangline.collectives.schedule.schedule import Schedule


def all_reduce(hosts: Sequence[int]) -> Schedule:
    """For ranks of which the i-th is on host ``hosts[i]``."""
    members = _members(hosts)
    if len({len(ranks) for ranks in members}) > 1:
        return Schedule("all_reduce", "hierarchical", len(hosts), len(members), _by_leaders(members))
    return Schedule("all_reduce", "hierarchical", len(hosts), len(hosts), _by_places(members))


def broadcast(hosts: Sequence[int], root: int) -> Schedule:
    """From the root to the leaders, and on to all."""
    return Schedule("broadcast", "hierarchical", len(hosts), 1, _down(hosts, root), root)


def reduce(hosts: Sequence[int], root: int) -> Schedule:
    """The broadcast turned back, with sums."""
    return Schedule("reduce", "hierarchical", len(hosts), 1, _down(hosts, root).backwards(reduce=True), root)


def _by_places(members: Sequence[Sequence[int]]) -> Rounds:
    """Hosts of as many ranks each: part j of the tensor, a chunk a host, belongs to place j of every host."""
    hosts, places = len(members), len(members[0])
    gather = side_by_side([direct.gather_rows(places, width=hosts).among(ranks) for ranks in members])
    between = side_by_side(
        [
            halving_doubling.sum_rows(hosts).among([ranks[place] for ranks in members], first_chunk=place * hosts)
            for place in range(places)
        ]
    )
    return gather.backwards(reduce=True) + between + gather


def _by_leaders(members: Sequence[Sequence[int]]) -> Rounds:
    chunks = len(members)
    inside = side_by_side([binomial.tree(len(ranks), 0, chunks).among(ranks) for ranks in members])
    between = halving_doubling.sum_rows(chunks).among([ranks[0] for ranks in members])
    return inside.backwards(reduce=True) + between + inside


def _down(hosts: Sequence[int], root: int) -> Rounds:
    members = _members(hosts)
    for ranks in members:
        if root in ranks:
            ranks.sort(key=lambda rank: rank != root)
    leaders = [ranks[0] for ranks in members]
    between = binomial.tree(len(leaders), leaders.index(root)).among(leaders)
    return between + side_by_side([binomial.tree(len(ranks), 0).among(ranks) for ranks in members])


def _members(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())

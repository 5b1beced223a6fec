"""Cost of rounds of messages: the alpha-beta-gamma model with ports.

Each rank has one outgoing and one incoming port and runs its program in order. A message of n bytes takes alpha + n *
beta seconds and occupies its sender's outgoing and its receiver's incoming port for that time; it starts when both
ports are free and its sender has reached the round. Combining n received bytes takes the receiver n * gamma seconds and
overlaps the next message. A rank reaches the next round when all its messages of this round have arrived and are
combined. Ports of one host are independent of each other: links shared by several ranks are not modelled.

After R. W. Hockney, "The communication challenge for MPP" (1994), and R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.collectives.schedule import IntArray, Schedule, Transfers

FloatArray = NDArray[np.float64]
LinkCost = float | Callable[[IntArray, IntArray], FloatArray]
"""A number, or a function of the arrays of sources and targets of messages."""


def cost(schedule: Schedule, nbytes: int, alpha: LinkCost, beta: LinkCost, gamma: float) -> float:
    """Return the seconds until the last rank is done.

    Args:
        schedule: the rounds of messages.
        nbytes: as in `Schedule.bytes_on_wire`.
        alpha: seconds per message; a number, or a function of the arrays of sources and targets.
        beta: seconds per byte of a message; likewise.
        gamma: seconds per reduced byte.
    """
    begins, port_out, port_in, combined = np.zeros((4, schedule.size))
    for tables in schedule.rounds:
        ends = begins.copy()
        for table in tables:
            source, target, sent = table.source, table.target, schedule.message_bytes(table, nbytes)
            start = np.maximum(np.maximum(begins[source], port_out[source]), port_in[target])
            arrived = start + _at(alpha, table) + sent * _at(beta, table)
            port_out[source] = port_in[target] = arrived
            if table.reduce:
                arrived = combined[target] = np.maximum(combined[target], arrived) + sent * gamma
            ends[target] = np.maximum(ends[target], arrived)
        begins = ends
    return float(max(begins.max(), port_out.max()))


def by_host(hosts: Sequence[int], inside: float, between: float) -> LinkCost:
    """Return the cost of links ``inside`` a host and ``between`` two, given the host of each rank."""
    host = np.asarray(hosts)

    def at(source: IntArray, target: IntArray) -> FloatArray:
        return np.where(host[source] == host[target], inside, between)

    return at


def _at(link_cost: LinkCost, table: Transfers) -> float | FloatArray:
    return link_cost(table.source, table.target) if callable(link_cost) else link_cost

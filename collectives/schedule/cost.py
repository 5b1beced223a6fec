"""What rounds of messages cost: the alpha-beta-gamma model with ports.

Every rank has one port out and one port in, and does its program in order. A message of n bytes takes alpha + n * beta
seconds, during which it holds its sender's port out and its receiver's port in; it starts when both are free and its
sender has come to its round. Combining n bytes that arrived takes their receiver n * gamma seconds, while the next
message may be on its way already. A rank comes to the next round when all that this one brings it has arrived and has
been combined. Ports of the same host are independent of each other: a link that ranks share is not in the model.

After R. W. Hockney, "The communication challenge for MPP" (1994), and R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.collectives.schedule.rounds import IntArray, Rounds, Transfers

FloatArray = NDArray[np.float64]
Price = float | Callable[[IntArray, IntArray], FloatArray]
"""A number, or a function that gives one for each pair of the sources and targets of messages."""


def price(
    rounds: Rounds,
    size: int,
    message_bytes: Callable[[Transfers], IntArray],
    alpha: Price,
    beta: Price,
    gamma: float,
) -> float:
    """Seconds until the last of ``size`` ranks is done.

    Args:
        rounds: who sends to whom.
        size: number of ranks.
        message_bytes: gives the bytes of each message of a table.
        alpha: seconds a message.
        beta: seconds a byte of a message.
        gamma: seconds a byte that is combined.
    """
    begins, port_out, port_in, combined = np.zeros((4, size))
    for tables in rounds:
        ends = begins.copy()
        for table in tables:
            source, target, nbytes = table.source, table.target, message_bytes(table)
            start = np.maximum(np.maximum(begins[source], port_out[source]), port_in[target])
            arrived = start + _at(alpha, table) + nbytes * _at(beta, table)
            port_out[source] = port_in[target] = arrived
            if table.reduce:
                arrived = combined[target] = np.maximum(combined[target], arrived) + nbytes * gamma
            ends[target] = np.maximum(ends[target], arrived)
        begins = ends
    return float(max(begins.max(), port_out.max()))


def by_host(hosts: Sequence[int], inside: float, between: float) -> Price:
    """A price that is one within a host and another between hosts.

    Args:
        hosts: the host of each rank.
        inside: for messages within a host.
        between: for messages from one host to another.
    """
    host = np.asarray(hosts)

    def at(source: IntArray, target: IntArray) -> FloatArray:
        return np.where(host[source] == host[target], inside, between)

    return at


def _at(price: Price, table: Transfers) -> float | FloatArray:
    return price(table.source, table.target) if callable(price) else price

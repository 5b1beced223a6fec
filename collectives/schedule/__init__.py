"""A collective as data: rounds of messages and the steps of each rank. No torch, no sockets."""

from __future__ import annotations

from gangline.collectives.schedule.rounds import IntArray, Round, Rounds, Transfers, cyclic, in_parallel, transfers
from gangline.collectives.schedule.schedule import ROOTED, NumberedStep, Receive, Reduce, Schedule, Send, Step

__all__ = [
    "ROOTED",
    "IntArray",
    "NumberedStep",
    "Receive",
    "Reduce",
    "Round",
    "Rounds",
    "Schedule",
    "Send",
    "Step",
    "Transfers",
    "cyclic",
    "in_parallel",
    "transfers",
]

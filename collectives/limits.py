"""Time limits: those that users set in the environment, and the fixed ones of liveness, transports and processes."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

# Polling.

WAIT_CHECK_SECONDS = 0.01
"""Time between two calls of `WaitPolicy.check` while a rank waits."""

PROGRESS_POLL_SECONDS = 0.0002
"""Sleep between two attempts to send more to ranks of this host while waiting for a rank of another host."""

FUTEX_SLEEP_SECONDS = 0.002
"""Maximum sleep of a rank that waits in shared memory; bounds the cost of a lost wake-up."""

FUTEX_SLEEP_SENDING_SECONDS = 0.0001
"""The same while outgoing messages are unfinished: a receiver that frees space in a queue does not wake the sender."""

STOPPED_CHECKS_PER_LIMIT = 20
"""Checks for stopped and ended processes on this host per ``heartbeat_limit``."""

PARENT_CHECK_SECONDS = 1.0
"""Time between two checks of the fork server that its parent process is alive."""

# Connections.

BOOTSTRAP_WARN_SECONDS = 5.0
"""Waiting time at the rendezvous after which a warning names the missing ranks."""

BOOTSTRAP_STATE_CHECK_SECONDS = 0.2
"""Time between two checks at the rendezvous that the ranks of this host are alive."""

CONNECT_SECONDS = 60.0
"""Time for all peers to connect and to complete the handshake. All are running: they have exchanged addresses."""

CONNECT_POLL_SECONDS = 0.1
"""Time between two checks of that deadline."""

RECONNECT_SECONDS = 1.0
"""Time for a lost membership connection to come back, or a quarter of ``heartbeat_limit`` if that is less."""

MEMBERSHIP_LINGER_SECONDS = 0.5
"""Time to send the last membership messages after close."""

TRANSPORT_LINGER_SECONDS = 10.0
"""Time to send the data of completed calls after close; close blocks if the receiver is that far behind."""

CONTEXT_END_SECONDS = 15.0
"""Time for a ZeroMQ context to terminate before it is abandoned; longer than any linger time."""

# Finding the cause of a failure.

PEER_LOST_SECONDS = 30.0
"""Time for membership to report why data of a peer is unreachable, before the transport raises its own error."""

MISMATCH_REPORT_SECONDS = 0.5
"""Time for the other ranks to report their calls after a mismatch, so that the error names all of them."""

JOIN_REPORT_SECONDS = 2.0
"""Time for the scheduler to name the processes that did not join, after a process has waited for the timeout."""

CLOSE_GRACE_SECONDS = 1.0
"""Time in which data that a rank sent before it closed its communicator may still arrive."""

NCCL_CALL_SECONDS = 5.0
"""Time for a thread to leave NCCL before another thread aborts the communicator, in case a rank is dead."""

SPAWN_CAUSE_SECONDS = 2.0
"""Time for `spawn` to learn how a rank ended after another rank reported losing it."""


class Limits(NamedTuple):
    """Limits that the environment sets, in seconds."""

    heartbeat: float
    """GANGLINE_HEARTBEAT, default 1: time between two heartbeats."""
    heartbeat_limit: float
    """GANGLINE_HEARTBEAT_LIMIT, default 10: time without a sign of life after which a process counts as dead; twice
    as long between ranks of different hosts."""
    stall_warn: float
    """GANGLINE_STALL_WARN, default 60: waiting time in one call after which a warning names the late ranks."""
    timeout: float
    """GANGLINE_TIMEOUT, default 1800: waiting time in one call after which it raises `StallError`."""
    restart_limit: float
    """GANGLINE_RESTART_LIMIT, default 120: time for a restarted process to take its place before the job fails."""


def limits() -> Limits:
    """Return the limits that the environment sets.

    Raises:
        ValueError: if a variable is not a number of seconds above 0.
    """
    return Limits(
        _seconds("GANGLINE_HEARTBEAT", 1),
        _seconds("GANGLINE_HEARTBEAT_LIMIT", 10),
        _seconds("GANGLINE_STALL_WARN", 60),
        _seconds("GANGLINE_TIMEOUT", 1800),
        _seconds("GANGLINE_RESTART_LIMIT", 120),
    )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise ValueError(f"{name} is {text!r}; expected a number of seconds above 0 and below a million")
    return seconds

"""The environment variables that gangline reads: the source of docs/environment.md and of `gangline env`."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """An environment variable."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "GANGLINE_LOG",
        "info",
        "Log level of the commands: debug, info, warning or error. `gangline -v` is debug, `gangline -q` is warning.",
    ),
    Variable(
        "GANGLINE_TIMEOUT",
        "1800",
        "Seconds that a call waits for other ranks, servers or the scheduler before it raises StallError.",
    ),
    Variable(
        "GANGLINE_STALL_WARN",
        "60",
        "Seconds after which a call that waits logs a warning with the ranks that are missing.",
    ),
    Variable("GANGLINE_HEARTBEAT", "1", "Seconds between two heartbeats."),
    Variable("GANGLINE_HEARTBEAT_LIMIT", "10", "Seconds without a heartbeat after which a rank counts as dead."),
    Variable(
        "GANGLINE_TRANSPORT",
        "auto",
        "Transport between ranks: auto, shared_memory, ipc or tcp. Rank 0's value counts for all ranks. With tcp, "
        "workers and servers of one host use TCP as well.",
    ),
    Variable(
        "GANGLINE_ALGO",
        "",
        "Algorithm of a collective, such as `ring`, or `all_reduce=ring:4,broadcast=double_tree` with the number of "
        "segments after the colon. Empty: chosen by size.",
    ),
    Variable(
        "GANGLINE_TUNING",
        "~/.cache/gangline/tuning.json",
        "File with measured algorithm choices, written by `gangline bench tune`.",
    ),
    Variable(
        "GANGLINE_DEVICE_GROUP",
        "",
        "How the devices of one process reduce: nccl, peer_to_peer, staged or copies. Empty: the fastest that works.",
    ),
    Variable(
        "GANGLINE_NCCL_BINDING", "", "Python binding of NCCL: nccl4py, cupy or pynccl. Empty: the first installed."
    ),
    Variable(
        "GANGLINE_INSECURE",
        "0",
        "1 allows addresses other than loopback. Traffic is neither encrypted nor authenticated: set it only on a "
        "network that you trust.",
    ),
    Variable(
        "GANGLINE_WORK_LOAD_LIST",
        "",
        "Relative speed of each worker, such as 3,1. Set by `gangline launch --work-load-list`.",
    ),
    Variable("GANGLINE_SUPERVISED", "0", "Set by `gangline launch`: servers wait for workers without a limit."),
    Variable("GANGLINE_ANNOUNCE_FD", "", "Set for a scheduler that chooses its port: where it writes the port."),
    Variable("DMLC_ROLE", "", "worker, server or scheduler."),
    Variable("DMLC_PS_ROOT_URI", "", "Address of the scheduler."),
    Variable("DMLC_PS_ROOT_PORT", "", "Port of the scheduler."),
    Variable("DMLC_NUM_WORKER", "", "Number of workers."),
    Variable("DMLC_NUM_SERVER", "", "Number of servers."),
    Variable("DMLC_WORKER_ID", "", "Rank that this worker asks for."),
    Variable("DMLC_INTERFACE", "", "Network interface by which other hosts reach this one, such as eth0."),
    Variable("RANK", "", "Rank of this process, as torchrun sets it."),
    Variable("WORLD_SIZE", "", "Number of processes, as torchrun sets it."),
    Variable("LOCAL_RANK", "", "Rank on this host; selects the GPU of context `auto`."),
    Variable("MASTER_ADDR", "", "Address of rank 0, as torchrun sets it."),
    Variable("MASTER_PORT", "", "Port of rank 0, as torchrun sets it."),
)


def page() -> str:
    """Return docs/environment.md: the table as Markdown."""
    rows = [
        f"| `{variable.name}` | {f'`{variable.default}`' if variable.default else ''} | {variable.meaning} |"
        for variable in VARIABLES
    ]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """# Environment variables

gangline reads these variables when a process creates a store, a communicator or a job. Launchers set the DMLC_* and
torchrun variables; the others are for you.

| variable | default | meaning |
| --- | --- | --- |"""

"""`gangline join`: start a worker on this host for an elastic job of another host."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from gangline.collectives.environments.job_key import job_key
from gangline.kvstore.parameter_server.client.rank_request import request_worker
from gangline.usage_error import UsageError


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address that `gangline launch` printed.")],
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Command of the worker, after an optional --.")],
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time to wait for the job.")] = 30.0,
) -> None:
    """Start a worker on this host for a running job of `gangline launch --elastic` on another host.

    GANGLINE_JOB_KEY_FILE must name the job's key. The worker takes part from the next round that all know; at SIGTERM
    it leaves after a round. If it fails, is killed or loses its network, the launcher's host repeats its round.
    """
    host, _, port = address.rpartition(":")  # in brackets if IPv6
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{address!r} is no address; expected HOST:PORT as `gangline launch --elastic` prints it")
    command = command[1:] if command[0] == "--" else command
    if not command or command[0].startswith("-"):
        raise UsageError("the worker's command is missing; expected gangline join [OPTIONS] HOST:PORT -- CMD")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]!r} is not a command of this host")
    variables = request_worker(address, timeout)
    key = job_key()
    if key is not None:
        variables["GANGLINE_JOB_ID"] = key.job_id()
    print(f"gangline: worker {variables['RANK']} of the job at {address}", file=sys.stderr, flush=True)
    # The worker takes the place of this process, so that signals reach it and the exit code is its own.
    os.execvpe(command[0], command, {**os.environ, **variables})  # noqa: S606  the user's command

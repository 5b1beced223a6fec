"""The launcher's part on another host, started by ssh: reads one JSON document and runs this host's processes.

The document comes on standard input, so that the job's key is in no argument; `ssh.py` writes it. Standard input then
stays open: when it ends, all processes here are stopped (see `supervisor`). A document without processes asks for a
description of this host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gangline.collectives.environments.job_key import JobKey
from gangline.collectives.transports.addresses import interface_address
from gangline.launcher.job import Process, free_ports
from gangline.launcher.local import run
from gangline.launcher.supervisor import Reports, StopTimeouts
from gangline.launcher.topology import gpu_addresses, read_host


def main() -> int:
    """Read the document and do what it asks; return the exit code."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: the supervisor reads what follows
        document = json.loads(stdin.readline())
    if "processes" in document:
        return _run(document)
    try:
        description = describe(document)
    except (OSError, ValueError) as error:
        print(f"gangline: {error}", file=sys.stderr)
        return 1
    print(json.dumps(description))
    return 0


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return this host's version, address and network interface, two free ports, CPUs and GPUs."""
    address, interface = _find_address(request["interface"], os.environ.get("SSH_CONNECTION", ""))
    gpus = request["gpus"]
    here = gpu_addresses() if gpus else []
    missing = [gpu for gpu in gpus if gpu >= len(here)]
    if missing:
        raise ValueError(f"GPU {missing[0]} is not there; this host has {len(here)} GPUs")
    host = read_host(gpus, os.environ, here, address=address, slots=request["slots"])
    return {
        "version": version("gangline"),
        "interface": interface,
        "ports": free_ports(2, address),
        "host": asdict(host),
    }


def _find_address(wanted: str | None, connection: str) -> tuple[str, str]:
    """Return this host's address for the job, and the name of its network interface if it was asked for.

    ``wanted`` is as for `interface_address`, or None for the address at which ssh reached this host: the third word of
    sshd's SSH_CONNECTION. ValueError if no interface fits.
    """
    if wanted is not None:
        return interface_address(wanted, "--interface")
    words = connection.split()
    if len(words) != 4:
        raise ValueError(f"SSH_CONNECTION is {connection!r}; expected sshd's four words, or --interface")
    return words[2].partition("%")[0], ""


def _run(document: Mapping[str, Any]) -> int:
    # `gangline` is found without an active environment, and so is `python` if it is a virtual environment's.
    words = [os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)]
    os.environ["PATH"] = os.pathsep.join(words if sys.prefix == sys.base_prefix else reversed(words))
    processes = [Process.from_plain(one) for one in document["processes"]]
    key = JobKey.from_hex(document["key"])
    reports = Reports(Path(document["log_dir"]) if document["log_dir"] else None, document["name"])
    return run(processes, StopTimeouts(stop=document["grace"]), key, reports=reports).code


if __name__ == "__main__":
    sys.exit(main())

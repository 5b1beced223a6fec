"""Launcher for several hosts over ssh: one connection to each, and everything there ends when its connection does.

The ssh command is the user's, with its configuration. Each host is first asked for its address, ports and cores; then a
connection starts `ssh_agent` there, which gets its processes and the job's key on standard input.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gangline.collectives.environments.job_key import JobKey
from gangline.launcher.binding import Cpu, Gpu, Host, bind
from gangline.launcher.engines.hostfile import HostEntry
from gangline.launcher.job import JobSpec, Process, process_table

_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oConnectTimeout=15"),
    *("-oControlMaster=no", "-oForwardAgent=no", "-oEscapeChar=none"),
    *("-oServerAliveInterval=15", "-oServerAliveCountMax=4"),  # end when the host cannot be reached for a minute
)
_ANSWER_SECONDS = 120.0
"""Time for all hosts to describe themselves; the first import of gangline from a slow disk takes a minute."""
_AGENT = "gangline.launcher.engines.ssh_agent"


@dataclass(frozen=True, slots=True)
class SshOptions:
    """Settings of the connections."""

    command: str = "ssh"
    """The ssh command, with further options."""
    python: str = sys.executable
    """Python on the other hosts."""
    interface: str | None = None
    """Network interface, address or network of the job's connections; None: where ssh reaches each host."""


def plan(job: JobSpec, entries: Sequence[HostEntry], options: SshOptions) -> list[Process]:
    """Connect to the hosts and return the processes of the job; nothing stays running there."""
    counted = [Host(entry.name, slots=entry.slots) for entry in entries]
    used = 1 + max(binding.node_rank for binding in bind(counted, job.workers, idle_surplus=job.idle_surplus))
    entries = entries[:used]
    found = _describe(entries, options)
    hosts = [_host(one["host"]) for one in found]
    are_local = [ip_address(host.address).is_loopback for host in hosts]
    if any(are_local) and not all(are_local):
        name = entries[are_local.index(True)].name
        raise ValueError(
            f"ssh reaches host {name} at {hosts[are_local.index(True)].address}, where the other hosts cannot reach "
            "it; name their common network by --interface, such as --interface eth0 or --interface 10.1.0.0/16"
        )
    inherited = {"PATH": os.path.dirname(sys.executable)}  # nothing of this host's environment but what is passed on
    inherited |= {name: os.environ[name] for name in job.passed_on if name in os.environ}
    root_port, master_port = found[0]["ports"]
    table = process_table(job, inherited, root_port=root_port, master_port=master_port, hosts=hosts)
    interfaces = [(host.address, one["interface"]) for host, one in zip(hosts, found, strict=True)]
    own = (options.python, sys.executable)
    return [_adapted(process, own, interfaces) for process in table]


def ssh_table(
    table: Sequence[Process],
    entries: Sequence[HostEntry],
    options: SshOptions,
    key: JobKey,
    grace: float,
    log_dir: Path | None,
) -> list[Process]:
    """Return the ssh commands that run the processes of `plan`, one for each host."""
    connections = []
    for index in sorted({process.host for process in table}):
        name = entries[index].name
        document = json.dumps(
            {
                "name": name,
                "key": key.hex(),
                "grace": grace,
                "log_dir": str(log_dir.absolute()) if log_dir is not None else None,
                "processes": [asdict(process) for process in table if process.host == index],
            }
        )
        connections.append(Process(f"host {name}", None, tuple(_command(options, name)), {}, document=document))
    return connections


def _command(options: SshOptions, host: str) -> list[str]:
    there = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.quote(options.python)} -m {_AGENT}"
    return [*shlex.split(options.command), *_OPTIONS, "--", host, f"exec sh -c {shlex.quote(there)}"]


def _describe(entries: Sequence[HostEntry], options: SshOptions) -> list[dict[str, Any]]:
    """Return each host's description of itself, as `ssh_agent.describe` makes it."""
    started = [
        subprocess.Popen(  # noqa: S603 - the user's ssh
            _command(options, entry.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for entry in entries
    ]
    try:
        for entry, process in zip(entries, started, strict=True):
            assert process.stdin is not None
            request = {"interface": options.interface, "slots": entry.slots, "gpus": entry.gpus}
            with suppress(BrokenPipeError):  # it has ended with an error
                process.stdin.write(f"{json.dumps(request)}\n".encode())
                process.stdin.flush()
        return _answers(entries, started, options)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _answers(
    entries: Sequence[HostEntry], started: Sequence[subprocess.Popen[bytes]], options: SshOptions
) -> list[dict[str, Any]]:
    own = version("gangline")
    found = []
    deadline = time.monotonic() + _ANSWER_SECONDS
    for entry, process in zip(entries, started, strict=True):
        try:
            out, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            silent = [one.name for one, other in zip(entries, started, strict=True) if other.poll() is None]
            raise RuntimeError(
                f"no answer over `{options.command}` within {_ANSWER_SECONDS:g} s from {', '.join(silent)}"
            ) from None
        try:
            found.append(json.loads(out.splitlines()[-1]))  # a profile may have printed something before
        except (IndexError, ValueError):
            reason = errors.decode(errors="replace").strip() or f"exit code {process.returncode}"
            if reason.startswith("gangline: "):  # gangline runs there, and found something wrong
                raise RuntimeError(f"host {entry.name}: {reason.removeprefix('gangline: ')}") from None
            raise RuntimeError(
                f"host {entry.name}: {reason}\nTry `{options.command} "
                f"{entry.name} {options.python} -c 'import gangline'`, which has to work without a password"
            ) from None
        if found[-1]["version"] != own:
            raise RuntimeError(
                f"host {entry.name} has gangline {found[-1]['version']}, and this host {own}; install the same version"
            )
    return found


def _host(found: Mapping[str, Any]) -> Host:
    cpus = tuple(Cpu(**cpu) for cpu in found["cpus"])
    return Host(**{**found, "cpus": cpus, "gpus": tuple(Gpu(**gpu) for gpu in found["gpus"])})


def _adapted(process: Process, pythons: tuple[str, str], interfaces: Sequence[tuple[str, str]]) -> Process:
    """Return a process with the Python of its host, and the network interface if one was asked for."""
    python, local = pythons
    command = process.command
    if process.role != "worker" and command[0] == local:
        command = (python, *command[1:])
    address, name = interfaces[process.host]
    chosen = {"GANGLINE_INTERFACE": address, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}
    return replace(process, command=command, environment={**process.environment, **chosen})

"""Hosts of a job, from a hostfile or from `-H`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A host, as the user names it."""

    name: str
    """Destination for ssh or mpirun, such as node1 or user@10.0.0.1."""
    slots: int = 1
    """Number of workers."""
    gpus: tuple[int, ...] = ()
    """GPUs of the workers; empty: not restricted."""
    load: float | None = None
    """Relative speed of each worker; None: 1."""


def read_hostfile(path: Path) -> list[HostEntry]:
    """Return the hosts of a file with lines such as ``node1 slots=4 gpus=0,2 load=3  # comment``.

    Without ``slots`` a host has one worker for each of its ``gpus``, or one.
    """
    hosts: list[HostEntry] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        try:
            hosts.append(_entry(words))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if any(host.name == words[0] for host in hosts[:-1]):
            raise ValueError(f"{where}: host {words[0]!r} occurs twice; give it more slots instead")
    if not hosts:
        raise ValueError(f"{path} names no host; expected lines such as `node1 slots=4 gpus=0,2 load=3`")
    return hosts


def parse_hosts(words: str) -> list[HostEntry]:
    """Return the hosts of ``-H``, such as ``node1,node2:4``: names, each with its number of workers or one."""
    hosts = []
    for word in words.split(","):
        name, colon, slots = word.strip().rpartition(":")
        hosts.append(_entry([name, f"slots={slots}"] if colon else [slots]))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"host {twice!r} occurs twice; give it more slots instead, as in {twice}:2")
    return hosts


def loads_of_workers(hosts: Sequence[HostEntry], workers: int) -> tuple[float, ...]:
    """Return the load of each worker, by rank; empty if no host has one."""
    loads = [host.load if host.load is not None else 1.0 for host in hosts for _ in range(host.slots)]
    return tuple(loads[:workers]) if any(host.load is not None for host in hosts) else ()


def _entry(words: Sequence[str]) -> HostEntry:
    name, *settings = words
    if not name or name.startswith("-") or "=" in name:  # ssh would take "-o..." for an option
        raise ValueError(f"{name!r} is not the name of a host")
    slots: int | None = None
    gpus: tuple[int, ...] = ()
    load: float | None = None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "slots" and value.isdecimal() and int(value):
            slots = int(value)
        elif key == "gpus" and all(number.isdecimal() for number in value.split(",")):
            gpus = tuple(int(number) for number in value.split(","))
        elif key == "load" and _is_positive(value):
            load = float(value)
        else:
            raise ValueError(f"{setting!r} is not a setting of a host; expected slots=4, gpus=0,2 or load=3")
    return HostEntry(name, slots or len(gpus) or 1, gpus, load)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False

"""Hosts made of network namespaces, to measure and test communication between hosts on one machine."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

from gangline.bench.driver.delayed_switch import DelayedSwitch

_BURST = "128kb"
"""Size of the token bucket (tc-tbf) of a host with a bounded rate."""
_LATENCY = "50ms"
"""Maximum time of a packet in the bucket's queue before it is dropped."""
_counter = itertools.count()


class Hosts:
    """Network namespaces connected by a switch; ``with Hosts(2) as hosts:`` creates and always removes them.

    Each has loopback and an interface ``eth0`` with an address 10.x.y.z. The switch is a bridge in another namespace,
    so that the machine's own network does not change. A process killed by SIGKILL leaves its namespaces behind; their
    names contain its process id, as in ``gangline-4711-0-host0``.

    Attributes:
        names: names of the namespaces.
        addresses: addresses of the hosts, as text.

    Raises:
        RuntimeError: if namespaces cannot be created here; `obstacle` returns the reason beforehand.
    """

    def __init__(self, count: int, *, rate: str | None = None, delay: float = 0.0) -> None:
        """Choose names and addresses; ``with`` creates the hosts.

        Args:
            count: number of hosts.
            rate: upper bound of the rate at which each host sends, in tc's notation, such as "100mbit"; None: none.
            delay: seconds that each packet takes in addition; a round trip takes twice that.

        Raises:
            ValueError: if ``count`` is out of range.
        """
        if not 1 <= count <= 250:
            raise ValueError(f"count is {count}; expected 1 to 250 hosts")
        if (why := obstacle()) is not None:
            raise RuntimeError(why)
        number = next(_counter)
        prefix = f"gangline-{os.getpid()}-{number}"
        subnet = os.getpid() * 16 + number % 16
        self.names = [f"{prefix}-host{index}" for index in range(count)]
        self.addresses = [f"10.{subnet >> 8 & 255}.{subnet & 255}.{index + 1}" for index in range(count)]
        self._rate = rate
        self._delay = delay
        self._delayed: DelayedSwitch | None = None
        self._switch = f"{prefix}-switch"
        self._created: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, host: int) -> list[str]:
        """Return the prefix of a command that runs it on a host.

        Hosts share no core if the machine has enough cores.
        """
        cores = sorted(os.sched_getaffinity(0))
        own = cores[host :: len(self.names)] if len(cores) >= len(self.names) else cores
        return ["taskset", "-c", ",".join(map(str, own)), "ip", "netns", "exec", self.names[host]]

    def close(self) -> None:
        """Remove the hosts; a second call does nothing."""
        if self._delayed is not None:
            self._delayed.close()
            self._delayed = None
        failures = []
        while self._created:
            name = self._created.pop()
            try:
                _ip("netns", "delete", name)
            except RuntimeError as error:
                if Path("/run/netns", name).exists():  # else an interrupt came before it existed
                    failures.append(error)
        if failures:
            raise failures[0]

    def _create(self) -> None:
        if self._delay:
            self._delayed = DelayedSwitch(self._delay)
        for name in (self._switch, *self.names):
            self._created.append(name)  # before the call, so that close() also cleans up an interrupted call
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"host{index}"
            if self._delayed is not None:
                self._delayed.add_device(tap := f"gl{os.getpid()}-{index}")
                _ip("link", "set", tap, "netns", name, "name", "eth0")
            else:
                _ip("link", "add", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self._rate is not None:
                shape = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self._rate)
                _run("tc", "-n", name, *shape, "burst", _BURST, "latency", _LATENCY)
        if self._delayed is not None:
            self._delayed.start()


def obstacle() -> str | None:
    """Return why network namespaces cannot be created here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root; run as root"
    if shutil.which("ip", path=_path()) is None:
        return "network namespaces need the command ip; install it with `apt-get install iproute2`"
    return None


def _path() -> str:
    """Return PATH with the folders of `tc` and, in some distributions, `ip`, which users' shells often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")

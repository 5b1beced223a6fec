"""Hosts made of network namespaces, to measure and test on one machine what runs between several."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_BURST = "128kb"
"""Size of the token bucket (tc-tbf) of a host with a bounded rate."""
_LATENCY = "50ms"
"""Longest time of a packet in the bucket's queue before it is dropped."""
_counter = itertools.count()


class Hosts:
    """Network namespaces connected by a switch; ``with Hosts(2) as hosts:`` creates and always removes them.

    Each has loopback and an interface ``eth0`` with an address 10.x.y.z. The switch is a bridge in another namespace,
    so that the machine's own network does not change. A process killed by SIGKILL leaves its namespaces behind; their
    names contain its process id, as in ``gangline-4711-0-host0``.

    Attributes:
        names: names of the namespaces, for `enter`.
        addresses: addresses of the hosts, as text.

    Raises:
        RuntimeError: if namespaces cannot be created here; `obstacle` returns the reason beforehand.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        """Choose names and addresses; ``with`` creates the hosts.

        Args:
            count: number of hosts.
            rate: upper bound of the rate at which each host sends, in tc's notation, such as "100mbit"; None: none.

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
        self._switch = f"{prefix}-switch"
        self._created: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, host: int) -> list[str]:
        """Return the words that run the command which follows them on a host.

        Hosts share no core if the machine has enough of them.
        """
        cores = sorted(os.sched_getaffinity(0))
        own = cores[host :: len(self.names)] if len(cores) >= len(self.names) else cores
        return ["taskset", "-c", ",".join(map(str, own)), "ip", "netns", "exec", self.names[host]]

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, with its output piped; `close` kills it if it still runs.

        Args:
            host: index of the host.
            command: the command's words.
            env: variables added to this process's environment.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],  # noqa: S607
            env={**os.environ, "PATH": _path(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it; arguments as in `start`.

        Raises:
            subprocess.CalledProcessError: if the exit code is not 0; its note is what the command wrote to stderr.
        """
        process = self.start(host, command, env)
        output, errors = process.communicate()
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, list(command), output, errors)
            error.add_note(errors.strip())
            raise error
        return subprocess.CompletedProcess(list(command), 0, output, errors)

    def cut(self, host: int) -> None:
        """Take a host's link down: packets are lost, and no connection is closed."""
        _ip("-n", self._switch, "link", "set", f"host{host}", "down")

    def mend(self, host: int) -> None:
        """Bring the link up again."""
        _ip("-n", self._switch, "link", "set", f"host{host}", "up")

    def close(self) -> None:
        """Kill the commands that still run and remove the hosts; a second call does nothing."""
        for process in self._processes:
            with process:  # closes its pipes and waits
                process.kill()
        self._processes.clear()
        failures = []
        while self._created:
            name = self._created.pop()
            try:
                _ip("netns", "delete", name)
            except RuntimeError as error:
                if Path("/run/netns", name).exists():  # otherwise an interrupt came before it existed
                    failures.append(error)
        if failures:
            raise failures[0]

    def _create(self) -> None:
        for name in (self._switch, *self.names):
            self._created.append(name)  # first, so that close() also removes what an interrupted call created
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"host{index}"
            _ip("link", "add", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self._rate is not None:
                shape = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", self._rate)
                _run("tc", "-n", name, *shape, "burst", _BURST, "latency", _LATENCY)


def obstacle() -> str | None:
    """Return why network namespaces cannot be created here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root; run as root"
    if shutil.which("ip", path=_path()) is None:
        return "network namespaces need the command ip; install it with `apt-get install iproute2`"
    return None


def enter(name: str) -> None:
    """Move the calling thread, and the threads and processes it starts from now on, into one of `Hosts.names`.

    Raises:
        OSError: if there is no such namespace, or the user lacks the permission.
    """
    with Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"entering network namespace {name}: {os.strerror(number)}")


def _path() -> str:
    """Return PATH with the folders of `tc` and, in some distributions, `ip`, which users' shells often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")

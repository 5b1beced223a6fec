"""Hosts made of network namespaces: what runs between machines, measured and tested on one.

`python -m gangline.bench.hosts COUNT COMMAND...` runs a command in each of COUNT namespaces; its environment holds
HOST, the number of the namespace, and ADDRESSES, the addresses of all.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_BURST = "128kb"
"""What a host with a bounded rate sends at once: a token bucket (tc-tbf)."""
_LATENCY = "50ms"
"""How long what it sends may wait in the bucket's queue before it is dropped."""
_counter = itertools.count()


class Hosts:
    """Network namespaces joined by a switch; ``with Hosts(2) as hosts:`` makes and, whatever happens, removes them.

    Each has an interface ``eth0`` with an address 10.x.y.z, and loopback. The switch is a bridge in a namespace of its
    own, so that the machine's own network is left alone. A process killed by SIGKILL leaves its namespaces; their
    names hold its id, as in ``gangline-4711-0-host0``.

    Attributes:
        names: of the namespaces, for `enter`.
        addresses: of the hosts, as text.

    Raises:
        RuntimeError: namespaces cannot be made here; `obstacle` says why beforehand.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        """Think of names; ``with`` makes the hosts.

        Args:
            count: how many.
            rate: what each host can send at most, as tc writes it, such as "100mbit"; None: no bound.

        Raises:
            ValueError: ``count`` is out of range.
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
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, its output piped; it is killed with the hosts if it still runs then.

        Args:
            host: its index.
            command: its words.
            env: added to this process's environment.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],  # noqa: S607
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it; as `start`.

        Raises:
            subprocess.CalledProcessError: it ended with another code than 0; its ``stderr`` says more.
        """
        process = self.start(host, command, env)
        output, errors = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), output, errors)
        return subprocess.CompletedProcess(list(command), 0, output, errors)

    def cut(self, host: int) -> None:
        """Pull a host's cable: nothing comes or goes, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"host{host}", "down")

    def mend(self, host: int) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", f"host{host}", "up")

    def close(self) -> None:
        """Kill what still runs on the hosts and remove them; again: nothing."""
        for process in self._processes:
            with process:  # closes its pipes, and waits
                process.kill()
        self._processes.clear()
        failures = []
        while self._made:
            name = self._made.pop()
            try:
                _ip("netns", "delete", name)
            except RuntimeError as error:
                if Path("/run/netns", name).exists():  # else it was interrupted before it was made
                    failures.append(error)
        if failures:
            raise failures[0]

    def _make(self) -> None:
        for name in (self._switch, *self.names):
            self._made.append(name)  # before: what an interrupted call made is removed as well
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
    """Why network namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root; run as root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip; `apt-get install iproute2` brings it"
    return None


def enter(name: str) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace of `Hosts.names`.

    Raises:
        OSError: there is none of that name, or this user may not.
    """
    with Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"entering network namespace {name}: {os.strerror(number)}")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _side_by_side(hosts: Hosts, command: Sequence[str]) -> Iterator[str]:
    env = {"ADDRESSES": ",".join(hosts.addresses)}
    started = [hosts.start(index, command, {**env, "HOST": str(index)}) for index in range(len(hosts.names))]
    for index, process in enumerate(started):
        output, errors = process.communicate()
        yield from (f"host {index}: {line}" for line in (output + errors).splitlines())
        if process.returncode:
            raise SystemExit(f"host {index} ended with code {process.returncode}")


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        raise SystemExit("usage: python -m gangline.bench.hosts COUNT COMMAND...")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    with contextlib.suppress(KeyboardInterrupt), Hosts(int(sys.argv[1])) as joined:
        for line in _side_by_side(joined, sys.argv[2:]):
            print(line)

"""Hosts made of network namespaces on which tests run commands, threads and processes of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline.bench.driver import hosts
from gangline.bench.driver.hosts import obstacle as obstacle

_CLONE_NEWNET = 0x40000000


class Hosts(hosts.Hosts):
    """Hosts of the benches that run commands, and kill those that still run at the end."""

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        super().__init__(count, rate=rate)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, with its output piped and these variables added to the environment."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env={**os.environ, "PATH": hosts._path(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Run a command as `start` does and return what it prints."""
        process = self.start(host, command, env)
        output, errors = process.communicate()
        assert process.returncode == 0, f"{command}: {errors}"
        return output

    def cut(self, host: int) -> None:
        """Take a host's link down: packets are lost, and no connection is closed."""
        hosts._ip("-n", self._switch, "link", "set", f"host{host}", "down")

    def close(self) -> None:
        """Kill the commands that still run and remove the hosts."""
        for process in self._processes:
            with process:  # closes its pipes and waits
                process.kill()
        self._processes.clear()
        super().close()


def enter(name: str) -> None:
    """Move the calling thread, and the threads and processes it starts from now on, into one of `Hosts.names`."""
    with Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"entering network namespace {name}: {os.strerror(number)}")


def bind_mount(source: Path, target: Path) -> None:
    """Mount a file over another one, in a mount namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, bind = 1 << 18 | 1 << 14, 1 << 12
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(bytes(source), bytes(target), None, bind, None) == 0

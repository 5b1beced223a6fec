"""A private sshd on a high port, with its own keys: hosts for the ssh launcher."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_MARK = "GANGLINE_TEST_HOST"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")


def missing() -> str | None:
    """Return why no sshd can be started here, or None."""
    if SSHD is None:
        return "there is no sshd: apt-get install openssh-server"
    return None


class Sshd:
    """A running sshd; ``command`` is the ssh command that reaches it.

    Args:
        folder: folder for keys and configuration.
        address: address to listen at.
        enter: words before the command, such as those of ``ip netns exec``.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", enter: Sequence[str] = ()) -> None:
        folder.mkdir(exist_ok=True)
        host_key, self.key = folder / "host_key", folder / "user_key"
        for file in (host_key, self.key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
        authorized = folder / "authorized_keys"
        authorized.write_text(self.key.with_suffix(".pub").read_text())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        config = folder / "sshd_config"
        config.write_text(
            f"ListenAddress {address}:{self.port}\nHostKey {host_key}\nAuthorizedKeysFile {authorized}\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin yes\n"
        )
        self.mark = uuid.uuid4().hex
        with config.open("a") as opened:
            opened.write(f"SetEnv {_MARK}={self.mark}\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        self.folder = folder
        self._log = (folder / "sshd.log").open("wb")
        self.process = subprocess.Popen([*enter, str(SSHD), "-D", "-e", "-f", str(config)], stderr=self._log)
        self.address = address
        until = time.monotonic() + 20
        while b"Server listening" not in (folder / "sshd.log").read_bytes():
            if self.process.poll() is not None or time.monotonic() > until:
                log = (folder / "sshd.log").read_text()
                self.__exit__()
                raise RuntimeError(f"sshd did not start on {address}:{self.port}: {log}")
            time.sleep(0.02)

    def __enter__(self) -> Sshd:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._log.close()

    def running(self) -> set[int]:
        """Return the process ids of what the sessions of this sshd started."""
        found = psutil.process_iter(["environ"])
        return {one.pid for one in found if (one.info["environ"] or {}).get(_MARK) == self.mark}

    def wait_until_empty(self) -> None:
        """Wait until no process of a session is left."""
        until = time.monotonic() + 20
        while left := self.running():
            if time.monotonic() > until:
                raise RuntimeError(f"processes of the host {self.address} are left: {sorted(left)}")
            time.sleep(0.05)

    def settings(self, alias: str) -> str:
        """Return the section of an ssh configuration by which ``alias`` names this sshd."""
        return (
            f"Host {alias}\n  HostName {self.address}\n  Port {self.port}\n  IdentityFile {self.key}\n"
            "  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )


def ssh_command(folder: Path, servers: dict[str, Sshd]) -> str:
    """Write an ssh configuration with these aliases; return the ssh command that uses it."""
    config = folder / "ssh_config"
    config.write_text("".join(server.settings(alias) for alias, server in servers.items()))
    return f"ssh -F {config}"

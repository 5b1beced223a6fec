"""Processes of a rank group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gangline
from gangline.bench.driver.hosts import Hosts
from gangline.collectives.processes.parent_death import die_with_parent

_ROOT = Path(gangline.__file__).resolve().parent.parent
PEERS = _ROOT / "gangline" / "bench" / "peers"
_SERVE = PEERS / "serve.py"
SERVER = "from gangline.kvstore.parameter_server.roles import serve_if_assigned; serve_if_assigned()"
"""Code of gangline's scheduler and servers."""


@dataclass(frozen=True)
class Candidate:
    """A program to measure, with a setting."""

    file: str
    """A file of bench/peers without ``.py``, such as "ranks/gloo", or the path of any other file."""
    ranks: int = 1
    servers: int = 0
    """Number of servers of a parameter-server job, in addition to a scheduler; 0: neither."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all processes."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options for ``prepare``, added to those of the bench."""
    setting: str = ""
    """Text for env, options and launcher in a table."""
    interpreter: Path | None = None
    """The peer's Python; None: this interpreter."""
    launcher: Sequence[str] = ()
    """A command that starts all ranks, such as mpirun; "{size}" in it becomes their number. Empty: every rank is
    started by itself and gets RANK and the like, or DMLC_*, in its environment."""
    server_code: str = ""
    """A line of Python that scheduler and servers run."""
    is_spread: bool = False
    """True if servers, too, are distributed over all hosts."""

    @property
    def path(self) -> Path:
        """The program's file."""
        return PEERS / f"{self.file}.py"  # an absolute path replaces PEERS

    def roles(self) -> list[tuple[str, int]]:
        """Return (role, number) of each process."""
        servers = [("scheduler", 0), *(("server", number) for number in range(self.servers))] if self.servers else []
        return [*servers, *(("rank", number) for number in range(self.ranks))]


@dataclass(frozen=True)
class Address:
    """Addresses by which the processes of a group find each other and the driver."""

    host: str
    port: int
    socket: str
    """Path of the driver's unix socket."""

    def environment(self, candidate: Candidate, role: str, number: int) -> dict[str, str]:
        """Return the variables that identify a process: MXNet's with servers, else torchrun's."""
        if not candidate.servers:
            return {
                "RANK": str(number),
                "WORLD_SIZE": str(candidate.ranks),
                "LOCAL_RANK": str(number),
                "MASTER_ADDR": self.host,
                "MASTER_PORT": str(self.port),
                "RENDEZVOUS": f"{self.socket}.rendezvous",
            }
        return {
            "DMLC_ROLE": "worker" if role == "rank" else role,
            "DMLC_PS_ROOT_URI": self.host,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(candidate.ranks),
            "DMLC_NUM_SERVER": str(candidate.servers),
            **({"DMLC_WORKER_ID": str(number)} if role == "rank" else {}),
        }


class Processes:
    """The processes of a group, each in a separate session."""

    def __init__(self, candidate: Candidate, address: Address, hosts: Hosts | None) -> None:
        """Start the processes.

        Args:
            candidate: what to run.
            address: addresses of the processes and the driver.
            hosts: network namespaces: the ranks are distributed over all of them in blocks; with servers, these run on
                the first and the ranks on the second. None: on this host.
        """
        self.pids: dict[str, int] = {}
        """Process ids by name, such as "rank 0"."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        try:
            for name, argv, env, host in self._commands(candidate, address, hosts):
                inside = hosts.inside(host) if hosts is not None else ()
                self.pids[name] = self._start([*inside, *argv], {**candidate.env, **env}, candidate.interpreter)
        except BaseException:
            self.close()
            raise

    def last_words(self) -> str:
        """Return the last line that the processes printed."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip(" \n-")]
        return lines[-1] if lines else "it printed nothing"

    def close(self) -> None:
        """Kill running processes with all their descendants."""
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()

    def _commands(
        self, candidate: Candidate, address: Address, hosts: Hosts | None
    ) -> Iterator[tuple[str, list[str], dict[str, str], int]]:
        """Yield name, arguments, environment and host of each process."""
        python = str(candidate.interpreter or sys.executable)
        serve = [python, str(_SERVE), str(candidate.path), address.socket]
        if candidate.launcher:
            launcher = [word.replace("{size}", str(candidate.ranks)) for word in candidate.launcher]
            yield "launcher", [*launcher, *serve], {}, 0
            return
        for role, number in candidate.roles():
            argv = serve if role == "rank" else [python, "-c", candidate.server_code]
            host = 0
            if hosts is not None and candidate.is_spread:
                host = number % len(hosts.names)
            elif hosts is not None and role == "rank":
                host = 1 if candidate.servers else number * len(hosts.names) // candidate.ranks
            yield f"{role} {number}", argv, address.environment(candidate, role, number), host

    def _start(self, argv: Sequence[str], env: Mapping[str, str], interpreter: Path | None) -> int:
        env = {**os.environ, **env}
        own = env.pop("PYTHONPATH", "")
        if interpreter is None:  # another interpreter must not find our packages
            env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [own])])
        ends_itself = str(_SERVE) in argv
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd="/",  # no package of ours is in this folder
            env=env,
            start_new_session=True,  # Ctrl-C stops the driver, which then stops these
            preexec_fn=None if ends_itself else partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        self._started.append(process)
        return process.pid

"""Slurm on this machine: munged, slurmctld and slurmd of one node, with all their files in one folder; needs root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

_CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=300
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=1
MinJobAge=2
NodeName={host} NodeAddr={address} CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why Slurm cannot be started here, or None."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"there is no {absent[0]}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"


class Slurm:
    """A running Slurm; ``variables`` let its commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        folder.chmod(0o755)
        ports = []
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [held.getsockname()[1] for held in (one, other)]
        host = socket.gethostname().partition(".")[0]
        values = {"host": host, "address": "127.0.0.1", "ctld_port": ports[0], "slurmd_port": ports[1]}
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, **values))
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
        munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", "--syslog"]
        try:
            self._start(munged)
            self._wait(lambda: (folder / "munge.socket").exists())
            self._start(["slurmctld", "-D", "-i"])
            self._start(["slurmd", "-D"])
            self._wait(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T").stdout)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm."""
        return subprocess.run(command, env={**os.environ, **self.variables}, capture_output=True, text=True)

    def close(self) -> None:
        """Stop the daemons."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, command: list[str]) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        variables = {**os.environ, **self.variables, "PATH": f"{os.environ['PATH']}:{_PATH}"}
        self._processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        log.close()

    def _wait(self, is_ready: object) -> None:
        assert callable(is_ready)
        until = time.monotonic() + 40
        while not is_ready():
            assert time.monotonic() < until, {file.name: file.read_text()[-500:] for file in self.folder.glob("*.out")}
            assert all(process.poll() is None for process in self._processes), [
                file.read_text()[-1500:] for file in (*self.folder.glob("*.out"), *self.folder.glob("*.log"))
            ]
            time.sleep(0.1)

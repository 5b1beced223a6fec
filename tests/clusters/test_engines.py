"""The same training through every engine that can be started here: equal weights, and clean ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.clusters import slurm, sshd
from tests.hosts import Hosts, obstacle
from tests.kvstore.test_launch import ROOT, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("job_script.py")
MPI = {
    "Open MPI": shutil.which("mpirun.openmpi"),
    "MPICH": os.environ.get("GANGLINE_MPICH") or str(ROOT / ".peers" / "mpich" / "bin" / "mpiexec.hydra"),
}
LAUNCH = (sys.executable, "-m", "gangline", "launch")
LAUNCHERS = ["local", "ssh", "Open MPI", "MPICH"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd | None]:
    if sshd.missing() is not None:
        yield None
        return
    with sshd.Sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def command(engine: str, servers: int, server: sshd.Sshd | None, *words: str) -> list[str]:
    """Return the command that starts two workers by an engine; skip the test where the engine is missing."""
    if engine == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    if engine == "local":
        return [*LAUNCH, "-n", "2", "-s", str(servers), *words, "--"]
    if engine == "ssh":
        if server is None:
            pytest.skip(str(sshd.missing()))
        ssh = sshd.ssh_command(server.folder, {"node1": server, "node2": server})
        hosts = ["--ssh", ssh, "-H", "node1,node2", "--env", "PYTHONPATH", "--env", "TMPDIR"]
        return [*LAUNCH, "--launcher", "ssh", *hosts, "-s", str(servers), *words, "--"]
    mpirun = MPI[engine]
    if mpirun is None or not Path(mpirun).exists():
        pytest.skip(f"{engine} is not here: `make engines` says how to install it")
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [*LAUNCH, "--launcher", "mpi", "--mpirun", mpirun, "-n", "2", "-s", str(servers), *words, "--"]


def start(
    engine: str, folder: Path, store: str, task: str, server: sshd.Sshd | None, *words: str, servers: int = 0
) -> Launch:
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    os.environ["PYTHONPATH"] = str(ROOT)
    words_of_job = [sys.executable, str(SCRIPT), str(folder), store, task]
    return Launch([*command(engine, servers, server, *words), *words_of_job], cwd=ROOT)


def wait_for_steps(folder: Path, run: Launch) -> float:
    """Wait until both workers have done steps; return the time at which later waits are to end."""
    until = time.monotonic() + 120
    while not all((folder / f"up{rank}").exists() for rank in range(2)):
        assert run.process.poll() is None, run.end(200)
        assert time.monotonic() < until, [path.read_text() for path in folder.glob("out.txt")]
        time.sleep(0.05)
    return until


def check_nothing_is_left(folder: Path, server: sshd.Sshd | None) -> None:
    """Check that no socket file is left, and no process on the hosts of ssh."""
    assert [path for path in (folder / "tmp").rglob("*") if path.is_socket()] == []
    if server is not None:
        server.wait_until_empty()


def check_weights(folder: Path) -> None:
    """Check that both ranks have the weights of training without gangline."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    data = torch.randn(8, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        network.zero_grad()
        (network(data).square().sum() / 8).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    for rank in range(2):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        assert (found["rank"], found["size"]) == (rank, 2)
        torch.testing.assert_close(torch.tensor(found["weights"], dtype=torch.float64), expected, rtol=0, atol=1e-9)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    for name in ("TMPDIR", "PYTHONPATH", "SLURM_CONF", *names):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restores what the tests set


@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
@pytest.mark.parametrize("engine", [*LAUNCHERS, "torchrun"])
def test_every_engine_gives_the_same_weights(engine: str, store: str, tmp_path: Path, server: sshd.Sshd | None) -> None:
    with start(engine, tmp_path, store, "train", server, servers=int(store == "dist_sync")) as run:
        code, out, errors = run.end(200)
    assert code == 0, (out, errors)
    check_weights(tmp_path)
    check_nothing_is_left(tmp_path, server)


@pytest.mark.parametrize("engine", [*LAUNCHERS, "torchrun"])
def test_a_crash_ends_the_job_with_the_code_of_the_crash(engine: str, tmp_path: Path, server: sshd.Sshd | None) -> None:
    with start(engine, tmp_path, "allreduce", "crash", server) as run:
        code, out, errors = run.end(200)
    # torchrun's own exit code is 1. mpirun and the agents of two hosts see first whichever rank ends first: the one
    # that crashed, before the one whose peer was lost.
    assert code == (1 if engine == "torchrun" else 3), (out, errors)
    check_nothing_is_left(tmp_path, server)


@pytest.mark.parametrize(
    ("task", "number", "expected"),
    [
        ("idle", signal.SIGINT, 130),
        ("idle", signal.SIGTERM, 143),
        ("wait", signal.SIGTERM, 75),
        ("wait", signal.SIGUSR1, 75),
    ],
    ids=["ctrl-c", "term", "preempted", "usr1"],
)
@pytest.mark.parametrize("engine", LAUNCHERS)
def test_signals_end_the_job(
    engine: str, task: str, number: signal.Signals, expected: int, tmp_path: Path, server: sshd.Sshd | None
) -> None:
    with start(engine, tmp_path, "allreduce", task, server, "--stop-signals", "USR1", "--grace", "30") as run:
        wait_for_steps(tmp_path, run)
        run.process.send_signal(number)
        code, out, errors = run.end(200)
    assert code == expected, (out, errors)
    check_nothing_is_left(tmp_path, server)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    if slurm.missing() is not None:
        pytest.skip(str(slurm.missing()))
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: slurm.Slurm, folder: Path, store: str, task: str, servers: int) -> Launch:
    """Submit the batch script of a job and wait for its end; its output is in ``folder``."""
    os.environ.update(cluster.variables)
    options = [f"--engine-option=--output={folder}/out.txt", f"--engine-option=--chdir={ROOT}"]
    words = ["--launcher", "slurm", "-n", "2", "-s", str(servers), "--grace", "30", *options]
    (folder / "tmp").mkdir()
    os.environ["PYTHONPATH"] = str(ROOT)
    return Launch([*LAUNCH, *words, "--", sys.executable, str(SCRIPT), str(folder), store, task], cwd=ROOT)


@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_slurm_gives_the_same_weights(store: str, tmp_path: Path, cluster: slurm.Slurm) -> None:
    with submit(cluster, tmp_path, store, "train", int(store == "dist_sync")) as run:
        code, out, errors = run.end(200)
    assert code == 0, (out, errors, (tmp_path / "out.txt").read_text())
    check_weights(tmp_path)


def test_a_crash_ends_the_job_of_slurm(tmp_path: Path, cluster: slurm.Slurm) -> None:
    with submit(cluster, tmp_path, "allreduce", "crash", 0) as run:
        code, _, errors = run.end(200)
    written = (tmp_path / "out.txt").read_text()
    assert code == 3, written
    assert re.fullmatch(rf"gangline: job \d+ is submitted; its output goes to {tmp_path}/out.txt", errors[0])
    assert re.fullmatch(rf"gangline: job \d+ ended with code 3; the last lines of {tmp_path}/out.txt:", errors[1])
    assert errors[2:] == written.splitlines()[-40:]
    assert re.search(r"^\[srun\] 0: gangline\.collectives\.errors\.DeadNodeError: rank 1 ", written, re.MULTILINE)


def test_ctrl_c_cancels_the_job_of_slurm(tmp_path: Path, cluster: slurm.Slurm) -> None:
    with submit(cluster, tmp_path, "allreduce", "idle", 0) as run:
        wait_for_steps(tmp_path, run)
        run.process.send_signal(signal.SIGINT)
        code, _, errors = run.end(200)
    assert (code, errors[-1].endswith("is cancelled")) == (130, True), errors
    assert cluster.run("squeue", "-h", "-t", "RUNNING,PENDING").stdout == ""


def test_slurm_queues_a_preempted_job_again(tmp_path: Path, cluster: slurm.Slurm) -> None:
    with submit(cluster, tmp_path, "allreduce", "wait", 0) as run:
        until = wait_for_steps(tmp_path, run)
        job = cluster.run("squeue", "-h", "-o", "%i").stdout.split()[0]
        cluster.run("scancel", "--signal=USR1", job)  # to the steps, as --signal=USR1@30 does
        while "Restarts=1" not in cluster.run("scontrol", "show", "job", job).stdout:  # Slurm starts it 2 minutes later
            assert time.monotonic() < until, (tmp_path / "out.txt").read_text()
            time.sleep(0.1)
        cluster.run("scancel", job)
        run.end(200)
    while cluster.run("squeue", "-h").stdout:
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.skipif(
    sshd.missing() is not None or obstacle() is not None, reason=f"{sshd.missing() or ''} {obstacle() or ''}"
)
@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_ssh_between_hosts_with_networks_of_their_own_gives_the_same_weights(store: str, tmp_path: Path) -> None:
    with Hosts(2) as hosts, ExitStack() as stack:
        servers = {
            f"node{index}": stack.enter_context(sshd.Sshd(tmp_path / name, address, ("ip", "netns", "exec", name)))
            for index, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True))
        }
        ssh = sshd.ssh_command(tmp_path, servers)
        os.environ["PYTHONPATH"] = str(ROOT)
        words = ["--launcher", "ssh", "--ssh", ssh, "-H", "node0,node1", "-s", str(2 * (store == "dist_sync"))]
        words += ["--env", "PYTHONPATH", "--", sys.executable, str(SCRIPT), str(tmp_path), store, "train"]
        with Launch(["ip", "netns", "exec", hosts.names[0], *LAUNCH, *words], cwd=ROOT) as run:
            code, out, errors = run.end(200)
        assert code == 0, (out, errors)
        check_weights(tmp_path)
        for server in servers.values():
            server.wait_until_empty()

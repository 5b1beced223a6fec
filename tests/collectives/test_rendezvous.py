"""Rendezvous: rank and size from launchers' variables, and the exchange through a store."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from gangline.collectives.bootstrap import store_all_gather
from gangline.collectives.bootstrap.launcher_environment import find_rank_info, from_environment
from gangline.collectives.bootstrap.rendezvous import Rendezvous, hosts, time_limit
from gangline.collectives.errors import DeadNodeError, StallError, name_ranks
from gangline.collectives.processes.spawning import Ranks
from gangline.collectives.transports.base import BootstrapAllGather

pytestmark = pytest.mark.timeout(60)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "3405643777"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_STEP_NUM_NODES": "5",
}

# Variables of launchers


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (1, 4, "10.1.2.3", 29500)),
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, (1, 4, "127.0.0.1", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, (1, 4, "10.1.2.3", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, (1, 4, "127.0.0.1", 29500)),  # all ranks are on this host: no network
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, "127.0.0.1", 0)),
        (OPEN_MPI | {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (2, 4, "n1", 5000)),
        (OPEN_MPI | TORCHRUN, (1, 4, "10.1.2.3", 29500)),
        (SLURM | {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (3, 8, "n1", 5000)),
        (SLURM | OPEN_MPI | {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (2, 4, "n1", 5000)),
        (MPICH | {"MASTER_PORT": "5000"}, (1, 2, "127.0.0.1", 5000)),
        (MPICH | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (1, 2, "n1", 5000)),
        (MPICH | SLURM | {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (3, 8, "n1", 5000)),
    ],
)
def test_rank_and_size_are_those_of_the_launcher(
    environment: Mapping[str, str], place: tuple[int, int, str, int]
) -> None:
    assert from_environment(environment) == place


def test_ranks_of_mpirun_on_one_machine_connect_on_loopback_at_a_port_of_their_job() -> None:
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    place = from_environment(environment)
    assert place.host == "127.0.0.1"
    assert 16384 <= place.port < 32768
    assert from_environment(environment | {"OMPI_COMM_WORLD_RANK": "0"}).port == place.port
    assert from_environment(environment | {"PMIX_NAMESPACE": "3405643778"}).port != place.port


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("cpu1,gpu[07-09]", "cpu1"),
        ("gpu[12,14]", "gpu12"),
        ("rack[1-2]gpu[3-4]", "rack1gpu3"),
        ("node", "node"),
    ],
)
def test_ranks_of_srun_connect_to_the_first_host_of_their_step(nodes: str, host: str) -> None:
    place = from_environment(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert place[:3] == (3, 8, host)
    assert from_environment(SLURM | {"SLURM_STEP_ID": "1"}).port != place.port


def test_ranks_of_srun_on_one_host_connect_on_loopback() -> None:
    assert from_environment(SLURM | {"SLURM_STEP_NUM_NODES": "1"}).host == "127.0.0.1"


def test_without_a_list_of_hosts_the_launching_one_is_taken() -> None:
    environment = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert from_environment(environment | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}).host == "10.0.0.9"


def test_without_a_launcher_the_error_names_ways_to_start() -> None:
    with pytest.raises(RuntimeError, match=r"torchrun, mpirun or srun, .* collectives\.spawn"):
        from_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        *((TORCHRUN, name) for name in TORCHRUN),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (SLURM, "SLURM_NTASKS"),
    ],
)
def test_incomplete_variables_are_an_error_that_names_the_missing_ones(
    environment: Mapping[str, str], missing: str
) -> None:
    with pytest.raises(ValueError, match=f"^{missing} is not set"):
        from_environment({name: value for name, value in environment.items() if name != missing})


def test_ranks_of_mpirun_on_several_machines_need_an_address() -> None:
    with pytest.raises(ValueError, match=r"^MASTER_ADDR is not set"):
        from_environment(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "one", "RANK is 'one'; expected a whole number, at least 0"),
        ("RANK", "-1", "RANK is '-1'; expected a whole number, at least 0"),
        ("RANK", "4", "rank is 4; expected 0 to 3, because the size is 4"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0'; expected a whole number, at least 1"),
        ("WORLD_SIZE", "4.0", "WORLD_SIZE is '4.0'; expected"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'; expected a whole number, 1 to 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536'; expected"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0'; expected"),
    ],
)
def test_a_bad_number_is_named_with_its_value(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        from_environment(TORCHRUN | {name: value})


def test_arguments_override_the_environment() -> None:
    assert find_rank_info(0, 2, "localhost:77", TORCHRUN) == (0, 2, "127.0.0.1", 77)
    assert find_rank_info(0, 2, "[fd00::7]:77", {}) == (0, 2, "fd00::7", 77)
    assert find_rank_info(0, None, None, TORCHRUN) == (0, 4, "10.1.2.3", 29500)
    assert find_rank_info(None, 9, "n1:77", TORCHRUN) == (1, 9, "n1", 77)
    assert find_rank_info(0, 1, None, {}) == (0, 1, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("rank", "size", "address", "error", "text"),
    [
        (2, 2, "localhost:77", ValueError, "rank is 2; expected 0 to 1"),
        (-1, 2, "localhost:77", ValueError, "rank is -1; expected 0 to 1"),
        (0, 0, "localhost:77", ValueError, "size is 0; expected at least 1"),
        (True, 2, "localhost:77", TypeError, "rank is True; expected an int"),
        (0, 2.0, "localhost:77", TypeError, "size is 2.0; expected an int"),
        (0, 2, "localhost", ValueError, "address is 'localhost'; expected HOST:PORT"),
        (0, 2, "localhost:0", ValueError, "address is 'localhost:0'; expected HOST:PORT"),
        (0, 2, None, ValueError, "MASTER_ADDR is not set"),
        (0, None, "localhost:77", RuntimeError, "no launcher has set"),
    ],
)
def test_arguments_are_checked(rank: Any, size: Any, address: str | None, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        find_rank_info(rank, size, address, {})


def test_time_limits_are_given_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TIMEOUT", "7")
    assert (time_limit(None), time_limit(2.5)) == (7.0, 2.5)
    with pytest.raises(ValueError, match="timeout is 0; expected"):
        time_limit(0)


def test_ranks_in_words() -> None:
    assert (name_ranks([2]), name_ranks({3, 1})) == ("rank 2", "ranks 1, 3")


# Exchange through the store


class Bare:
    """Stands in for a communicator: here processes are joined by their `Rendezvous` alone."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **_options: Any) -> None:
        self.rank, self.size, self.exchange = rank, size, exchange

    def close(self) -> None:
        pass


ranks_of = partial(Ranks, opener=Bare, timeout=20)


@pytest.fixture
def address() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_job_of_one_rank_exchanges_with_itself() -> None:
    job = Rendezvous(0, 1, environment={})
    assert (job.exchange(b"alone"), job.interface()) == ([b"alone"], "127.0.0.1")


def test_jobs_one_after_another_exchange_round_after_round(address: str) -> None:
    with ranks_of(_exchange_twice, 3, (address,)) as ranks:
        results = ranks.results()

    expected = [[f"{job} {number} {rank}\0".encode() for rank in range(3)] for job in range(2) for number in range(3)]
    assert results == [expected] * 3


def _exchange_twice(comm: Bare, address: str) -> list[list[bytes]]:
    got = []
    for number in range(2):
        job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
        got += [job.exchange(f"{number} {turn} {comm.rank}\0".encode()) for turn in range(3)]
        job.close()
    return got


def test_a_job_takes_nothing_from_the_one_before_it(address: str) -> None:
    with ranks_of(_exchange_often, 2, (address,)) as ranks:
        results = ranks.results()
    assert results == [[[f"{number} {rank}".encode() for rank in range(2)] for number in range(10)]] * 2


def _exchange_often(comm: Bare, address: str) -> list[list[bytes]]:
    jobs = (Rendezvous(comm.rank, comm.size, address, timeout=10, environment={}) for _ in range(10))
    return [job.exchange(f"{number} {comm.rank}".encode()) for number, job in enumerate(jobs)]


def test_a_closed_job_cannot_exchange(address: str) -> None:
    with (
        ranks_of(_exchange_when_closed, 2, (address,)) as ranks,
        pytest.raises(RuntimeError, match="has closed its rendezvous"),
    ):
        ranks.results()


def _exchange_when_closed(comm: Bare, address: str) -> None:
    job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
    job.close()
    job.exchange(b"")


def test_the_store_keeps_nothing_of_a_round_and_is_reached_by_loopback_alone(address: str) -> None:
    with ranks_of(_look_at_store, 2, (address,)) as ranks:
        (keys_before, keys_after, listening), _ = ranks.results()
    assert keys_after == keys_before
    assert listening == {"0100007F"}  # 127.0.0.1, as the kernel writes it


def _look_at_store(comm: Bare, address: str) -> tuple[int, int, set[str]]:
    host, port = address.split(":")
    job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
    job.exchange(b"first")
    store = TCPStore(host, int(port), is_master=False)
    comm.exchange(b"")
    before = store.num_keys()
    comm.exchange(b"")
    for number in range(3):
        job.exchange(b"%d" % number)
    comm.exchange(b"")  # rank 0 has cleared the last round
    after = store.num_keys()
    comm.exchange(b"")
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    ours = [words[1].split(":") for words in sockets if words[3] == "0A"]  # ports that listen
    return before, after, {where for where, number in ours if int(number, 16) == int(port)}


def test_ranks_that_do_not_join_are_named(address: str) -> None:
    with ranks_of(_some_stay_away, 4, (address,)) as ranks:
        outcomes = ranks.outcomes()
    assert str(outcomes[0].error) == f"ranks 1, 3 of 4 did not reach {address} within 0.5 s"
    assert isinstance(outcomes[0].error, StallError)


def _some_stay_away(comm: Bare, address: str) -> None:
    if comm.rank in (0, 2):
        job = Rendezvous(comm.rank, comm.size, address, timeout=0.5 if comm.rank == 0 else 0.6, environment={})
        try:
            job.exchange(b"")
        finally:
            comm.exchange(b"")  # rank 0 holds the store, so it waits for rank 2
    else:
        comm.exchange(b"")


def test_a_missing_rank_0_is_named(address: str) -> None:
    with pytest.raises(StallError, match=f"^rank 0 did not open its store at {address} within 0.2 s"):
        Rendezvous(1, 2, address, timeout=0.2, environment={})


def test_the_death_of_rank_0_is_an_error_on_waiting_ranks(address: str) -> None:
    with ranks_of(_keeper_dies, 2, (address,)) as ranks:
        _, waiter = ranks.outcomes()
    assert isinstance(waiter.error, DeadNodeError)
    assert str(waiter.error).startswith(f"rank 1 of 2 lost the process that serves the store at {address}, rank 0")


def _keeper_dies(comm: Bare, address: str) -> None:
    job = Rendezvous(comm.rank, comm.size, address, timeout=20, environment={})
    comm.exchange(b"")
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    job.exchange(b"")


def test_a_rank_of_this_host_that_dies_is_named_at_once(address: str) -> None:
    with ranks_of(_one_dies_between_exchanges, 3, (address,)) as ranks:
        first, second, _ = ranks.outcomes()
    assert [type(first.error), type(second.error)] == [DeadNodeError] * 2
    text = f"rank 2 of 3 died before all had joined at {address}"
    assert str(first.error) == text
    assert str(second.error).startswith((text, "rank 1 of 3 lost the process that serves the store"))  # with rank 0


def _one_dies_between_exchanges(comm: Bare, address: str) -> None:
    job = Rendezvous(comm.rank, comm.size, address, timeout=1000, environment={})
    job.exchange(b"here")
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    job.exchange(b"and here")


def test_a_missing_rank_is_named_in_a_warning(address: str) -> None:
    with ranks_of(_come_after_the_warning, 2, (address,)) as ranks:
        (text, _), (_, got) = ranks.results()
    assert text == f"rank 0 waits at {address} for rank 1 of 2"
    assert got == [b"0", b"1"]


def _come_after_the_warning(comm: Bare, address: str) -> tuple[str, list[bytes]]:
    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            comm.exchange(b"warned")

    texts: list[str] = []
    logging.getLogger("gangline").addHandler(Telling())
    store_all_gather.BOOTSTRAP_WARN_SECONDS = 0.05  # type: ignore[attr-defined]
    if comm.rank == 1:
        comm.exchange(b"")
        store_all_gather.BOOTSTRAP_WARN_SECONDS = 1000  # type: ignore[attr-defined]
    job = Rendezvous(comm.rank, comm.size, address, timeout=1000, environment={})
    got = job.exchange(b"%d" % comm.rank)
    comm.exchange(b"")
    return texts[0] if texts else "", got


def test_a_port_that_another_program_has_is_an_error_of_rank_0() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with ranks_of(_join_as_rank_0, 1, (port,)) as ranks:
            (outcome,) = ranks.outcomes()
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error).startswith(f"rank 0 cannot serve the store at 127.0.0.1:{port}; choose another port")


def _join_as_rank_0(comm: Bare, port: int) -> None:
    Rendezvous(0, 2, f"127.0.0.1:{port}", timeout=1, environment={})


def test_a_store_of_torch_distributed_in_the_same_process_is_shared(address: str) -> None:
    with ranks_of(_beside_torch, 2, (address,)) as ranks:
        assert ranks.results() == [[b"0", b"1"]] * 2


def _beside_torch(comm: Bare, address: str) -> list[bytes]:
    import torch.distributed as dist

    where = f"tcp://{address}"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank, world_size=comm.size)
    try:
        return Rendezvous(comm.rank, comm.size, address, timeout=10, environment={}).exchange(b"%d" % comm.rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("restarts", [0, 1])
def test_under_an_agent_the_agents_store_is_used(address: str, restarts: int) -> None:
    host, port = address.split(":")
    agent = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    if restarts:
        agent.set("gangline/0/0/0/brought/0", "of the attempt before")
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    environment |= {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "2"}
    with ranks_of(_exchange_at_agent, 2, (environment,)) as ranks:
        assert ranks.results() == [[b"0", b"1"]] * 2


def _exchange_at_agent(comm: Bare, environment: dict[str, str]) -> list[bytes]:
    job = Rendezvous(environment=environment | {"RANK": str(comm.rank)}, timeout=10)
    return job.exchange(b"%d" % comm.rank)


def test_other_addresses_than_loopback_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_INSECURE", raising=False)
    with pytest.raises(RuntimeError, match="GANGLINE_INSECURE"):
        Rendezvous(1, 2, "192.0.2.1:29500", timeout=0.2, environment={})


# Hosts


def test_hosts_are_numbered_by_their_first_rank() -> None:
    said: list[bytes] = []

    def exchange(blob: bytes) -> list[bytes]:
        said.append(blob)
        return [b"another machine", blob, b"another machine", blob, b"a third one"]

    assert hosts(exchange) == (0, 1, 0, 1, 2)
    words = said[0].decode().split()
    assert words[0] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert [word.partition(":")[0] for word in words[1:]] == ["net", "pid", "mnt"]


# Launchers


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from gangline.collectives.bootstrap.rendezvous import Rendezvous, hosts
for _ in range(2):
    job = Rendezvous(timeout=30)
    got = job.exchange(b"%d" % job.rank)
    assert got == [b"0", b"1"], got
    assert hosts(job.exchange) == (0, 0)
    job.close()
sys.stdout.write(f"rank {job.rank} of {job.size} at {job.host}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "torchrun --standalone", "mpirun"])
def test_ranks_of_a_launcher_connect(launcher: str, address: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [str(program), str(Path(__file__).parents[2])]
    if launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("no mpirun: apt-get install openmpi-bin")
        command = ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, *command]
    else:
        where = ["--standalone"] if "standalone" in launcher else [f"--master-port={address.split(':')[1]}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *where, *command]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 at 127.0.0.1", "rank 1 of 2 at 127.0.0.1"]

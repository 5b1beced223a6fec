"""Rendezvous: the exchange through a store, for ranks that come late, on other hosts, or by IPv6 alone."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from gangline import connect
from gangline.collectives import torch_backend
from gangline.collectives.bootstrap import rendezvous, store_all_gather
from gangline.collectives.bootstrap.rendezvous import Rendezvous, hosts, time_limit
from gangline.collectives.bootstrap.unix_store import ServedStore, UnixStore
from gangline.collectives.communicator import open_communicator
from gangline.collectives.environments.job_key import FILE, JobKey, write_file
from gangline.collectives.errors import DeadNodeError, StallError
from gangline.collectives.torch_backend import GanglineProcessGroup
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.parameter_server.environment import from_environment
from tests.collectives.processes import Bare, Processes, Rank, bare_ranks, join_group, outcomes_of, results_of
from tests.hosts import Hosts, bind_mount, enter, obstacle
from tests.programs import run

pytestmark = pytest.mark.timeout(90)


def test_time_limits_are_given_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TIMEOUT", "7")
    assert (time_limit(None), time_limit(2.5)) == (7.0, 2.5)
    with pytest.raises(ValueError, match="timeout is 0; expected"):
        time_limit(0)


# Exchange through the store


@pytest.fixture
def address() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_job_of_one_rank_exchanges_with_itself() -> None:
    job = Rendezvous(0, 1, environment={})
    assert (job.exchange(b"alone"), job.interface()) == ([b"alone"], "127.0.0.1")


def test_a_job_takes_nothing_from_the_one_before_it(address: str) -> None:
    results = results_of(_exchange_often, 3, (address,))
    rounds = [(number, turn) for number in range(10) for turn in range(3)]
    assert results == [[[f"{number} {turn} {rank}\0".encode() for rank in range(3)] for number, turn in rounds]] * 3


def _exchange_often(comm: Bare, address: str) -> list[list[bytes]]:
    """Exchange in ten jobs, of which every other one is closed before the next."""
    got = []
    for number in range(10):
        job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
        got += [job.exchange(f"{number} {turn} {comm.rank}\0".encode()) for turn in range(3)]
        if number % 2:
            job.close()
    return got


def test_a_closed_job_cannot_exchange(address: str) -> None:
    with pytest.raises(RuntimeError, match="has closed its rendezvous"):
        results_of(_exchange_when_closed, 2, (address,))


def _exchange_when_closed(comm: Bare, address: str) -> None:
    job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
    job.close()
    job.exchange(b"")


def test_the_store_keeps_nothing_of_a_round_and_listens_at_no_port(address: str) -> None:
    (kept, listening), _ = results_of(_look_at_store, 2, (address,))
    assert kept == {}
    assert listening == []


def _look_at_store(comm: Bare, address: str) -> tuple[dict[str, bytes], list[str]]:
    host, port = address.split(":")
    job = Rendezvous(comm.rank, comm.size, address, timeout=10, environment={})
    for number in range(3):
        job.exchange(b"%d" % number)
    comm.exchange(b"")  # rank 0 has cleared the last round
    store = rendezvous._served_stores.get((host, int(port)))
    kept = dict(store._values) if isinstance(store, ServedStore) else {}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return kept, [words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{int(port):04X}")]


@pytest.mark.parametrize(
    "sent", [b"\x7f\xff\xff\xff", b"\0\0\0\5\xdd\x7f\xff\xff\xff", b"\0\0\0\1\x90", b"\0\0\0\2\x91\1"]
)
def test_a_store_outlives_hostile_bytes(sent: bytes) -> None:
    name = f"gangline-test-{os.getpid()}"
    served = ServedStore(name)
    store = UnixStore(name, 10)
    with closing(unix_sockets.connect(name)) as stranger:
        stranger.sendall(sent)
        assert stranger.recv(1) == b""
    store.set("key", b"value")
    assert (store.check(["key"]), store.check(["key", "other"])) == (True, False)
    assert store.multi_get(["key"]) == served.multi_get(["key"]) == [b"value"]
    assert (store.delete_key("key"), store.delete_key("key"), store.check(["key"])) == (True, False, False)
    served.close()


def test_every_rank_names_those_that_did_not_come(address: str) -> None:
    outcomes = outcomes_of(_two_stay_away, 5, (address,))
    assert str(outcomes[0].error) == f"ranks 3, 4 of 5 did not reach {address} within 2 s"
    assert isinstance(outcomes[0].error, StallError)
    assert all("3, 4" in str(outcome.error) for outcome in outcomes[1:3])


def _two_stay_away(comm: Bare, address: str) -> None:
    if comm.rank < 3:  # rank 0 gives up first, and ends with its store
        Rendezvous(comm.rank, comm.size, address, timeout=2 + comm.rank, environment={}).exchange(b"")


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("has_key", [False, True])
def test_what_accepts_and_never_answers_is_named(has_key: bool, tmp_path: Path) -> None:
    with (
        Hosts(1) as hosts,
        Processes(_ask_the_mute, 1, hosts.names[0], hosts.addresses[0], has_key, str(tmp_path)) as ranks,
    ):
        kinds, texts = ranks.heard(0)
    assert kinds == ["StallError", "RuntimeError", "DeadNodeError"]
    assert all(f"{hosts.addresses[0]}:" in text for text in texts)
    assert all(": no answer within" in texts[number] for number in (0, 2))


def _ask_the_mute(rank: Rank, namespace: str, host: str, has_key: bool, folder: str) -> None:
    """Connect where nobody answers, and lose the answers of a store that is stopped after the ranks have connected."""
    enter(namespace)
    if has_key:
        write_file(JobKey.new(), Path(folder, "key"))
    os.environ |= {FILE: f"{folder}/key"} if has_key else {"GANGLINE_INSECURE": "1"}
    errors: list[BaseException] = []
    with socket.create_server((host, 0)) as mute:
        for number in (1, 0):
            with pytest.raises((StallError, RuntimeError)) as caught:
                connect(number, 2, f"{host}:{mute.getsockname()[1]}", timeout=1)
            errors.append(caught.value)
    port = unix_sockets.free_port("store")
    if not (server := os.fork()):
        serving = TCPStore(host, port, is_master=True, wait_for_workers=False)
        signal.pause()
        serving.check([])
    job = Rendezvous(1, 2, f"{host}:{port}", timeout=1)
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(DeadNodeError) as lost:
        job.exchange(b"")
    os.kill(server, signal.SIGKILL)
    errors.append(lost.value)
    rank.tell([[type(one).__name__ for one in errors], list(map(str, errors))])
    rank.hear()


def test_a_missing_rank_0_is_named(address: str) -> None:
    with pytest.raises(StallError, match=f"^rank 0 did not open its store at {address} within 0.2 s"):
        Rendezvous(1, 2, address, timeout=0.2, environment={})


def test_a_rank_of_this_host_that_dies_is_named_at_once(address: str) -> None:
    _, waiter = outcomes_of(_one_dies_between_exchanges, 2, (address, 0))
    lost = f"lost the process that serves the store at {address}, rank 0"
    assert lost in str(waiter.error)
    first, second, _ = outcomes_of(_one_dies_between_exchanges, 3, (address, 2))
    text = f"rank 2 of 3 died before all had joined at {address}"
    assert str(first.error) == text
    assert str(second.error) == text or lost in str(second.error)  # with rank 0
    assert [type(one.error) for one in (waiter, first, second)] == [DeadNodeError] * 3


def _one_dies_between_exchanges(comm: Bare, address: str, victim: int) -> None:
    job = Rendezvous(comm.rank, comm.size, address, timeout=1000, environment={})
    job.exchange(b"here")
    comm.exchange(b"")
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    job.exchange(b"and here")


def test_a_missing_rank_is_named_in_a_warning(address: str) -> None:
    (text, _), (_, got) = results_of(_come_after_the_warning, 2, (address,))
    assert text == f"rank 0 waits at {address} for rank 1 of 2"
    assert got == [b"0", b"1"]


def _come_after_the_warning(comm: Bare, address: str) -> tuple[str, list[bytes]]:
    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            store_all_gather.BOOTSTRAP_WARN_SECONDS = 1000
            texts.append(record.getMessage())
            comm.exchange(b"warned")

    texts: list[str] = []
    logging.getLogger("gangline").addHandler(Telling())
    store_all_gather.BOOTSTRAP_WARN_SECONDS = 1000 if comm.rank else 0.05
    if comm.rank == 1:
        comm.exchange(b"")
    job = Rendezvous(comm.rank, comm.size, address, timeout=1000, environment={})
    got = job.exchange(b"%d" % comm.rank)
    comm.exchange(b"")
    return texts[0] if texts else "", got


def test_a_port_that_another_job_has_is_an_error_of_rank_0() -> None:
    port = unix_sockets.free_port("store")
    taken = unix_sockets.listen(unix_sockets.name_of("store", port))
    with closing(taken), bare_ranks(_join_as_rank_0, 1, (port,)) as ranks:
        (outcome,) = ranks.outcomes()
    assert type(outcome.error) is RuntimeError
    assert str(outcome.error).startswith(f"rank 0 cannot serve the store at 127.0.0.1:{port}; choose another port")


def _join_as_rank_0(comm: Bare, port: int) -> None:
    Rendezvous(0, 2, f"127.0.0.1:{port}", timeout=1, environment={})


def test_a_store_of_torch_distributed_may_have_the_same_port(address: str) -> None:
    assert results_of(_beside_torch, 2, (address,)) == [[b"0", b"1"]] * 2


def _beside_torch(comm: Bare, address: str) -> list[bytes]:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=comm.rank, world_size=comm.size)
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
    assert results_of(_exchange_at_agent, 2, (environment,)) == [[b"0", b"1"]] * 2


def _exchange_at_agent(comm: Bare, environment: dict[str, str]) -> list[bytes]:
    job = Rendezvous(environment=environment | {"RANK": str(comm.rank)}, timeout=10)
    return job.exchange(b"%d" % comm.rank)


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


# Communicators opened in odd places


def _sum_with_temporary_folder(rank: Rank, folder: str) -> None:
    tempfile.tempdir = folder
    for transport in ("shared_memory", "ipc"):
        with open_communicator(rank.rank, rank.size, rank.exchange, transport=transport, timeout=20) as comm:
            total = comm.all_reduce(torch.ones(3))
        rank.tell(total.tolist())
    rank.hear()


def test_a_long_name_of_the_temporary_folder_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with Processes(_sum_with_temporary_folder, 2, str(folder)) as ranks:
        for _ in range(2):
            assert ranks.all_heard() == [[2.0] * 3] * 2
    assert list(folder.iterdir()) == []


def _connect_again(rank: Rank, port: int) -> None:
    """Rank 0 gives up twice before rank 1 comes; afterwards both connect once more."""
    if rank.rank == 0:
        for _ in range(2):
            with pytest.raises(StallError, match="rank 1 of 2 did not reach"):
                connect(0, 2, f"127.0.0.1:{port}", timeout=0.2)
        rank.tell("late")
    else:
        rank.hear()
    for number in range(2):
        with connect(rank.rank, 2, f"127.0.0.1:{port}", timeout=30) as comm:
            rank.tell(comm.all_reduce(torch.full((1,), 10.0**number)).tolist())
    rank.hear()


def test_connect_can_be_repeated_after_a_timeout() -> None:
    with Processes(_connect_again, 2, unix_sockets.free_port("store")) as ranks:
        assert ranks.heard(0) == "late"
        ranks.say(1, "go")
        for number in range(2):
            assert ranks.all_heard() == [[2 * 10.0**number]] * 2


class _OwnStore(dist.Store):
    """A store of a user, without all that gloo does not need."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=20)) -> None:
        self._inner.wait(keys, timeout)


def _sum_through_own_store(rank: Rank, path: str, namespaces: list[str]) -> None:
    enter(namespaces[rank.rank])
    os.environ["GANGLINE_INSECURE"] = "1"
    assert torch_backend.__all__  # it registers the backend
    store = _OwnStore(dist.FileStore(path, 2))
    dist.init_process_group("gangline", store=store, rank=rank.rank, world_size=2, timeout=timedelta(seconds=20))
    total = torch.ones(2)
    dist.all_reduce(total)
    assert isinstance(dist.group.WORLD, GanglineProcessGroup)
    rank.tell([dist.group.WORLD.communicator.transport, total.tolist()])
    rank.hear()


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_hosts_that_share_a_store_of_the_user_reach_each_other(tmp_path: Path) -> None:
    with Hosts(2) as hosts, Processes(_sum_through_own_store, 2, f"{tmp_path}/store", hosts.names) as ranks:
        assert ranks.all_heard() == [["tcp", [2.0, 2.0]]] * 2


INTERFACES = {
    "a name that rank 0 resolves to loopback": ("127.0.1.1", {}),
    "the wrong default route": ("127.0.1.1", {"GANGLINE_INTERFACE": "eth0", "DMLC_INTERFACE": "lo"}),
    "MXNet's variable": ("127.0.1.1", {"DMLC_INTERFACE": "10.0.0.0/8"}),
    "a file": ("", {"GANGLINE_INTERFACE": "eth0"}),
}


def _meet(rank: Rank, folder: str, namespaces: list[str], kind: str, chosen: dict[str, str]) -> None:
    """Connect by each interface, at a host name that this host resolves by its own /etc/hosts."""
    enter(namespaces[rank.rank])
    bind_mount(Path(f"{folder}/hosts{rank.rank}"), Path("/etc/hosts"))
    os.environ |= {"GANGLINE_INSECURE": "1", "RANK": str(rank.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    os.environ |= {"MASTER_PORT": "29513", "DMLC_PS_ROOT_URI": "node0", "DMLC_PS_ROOT_PORT": "9091", **chosen}
    os.environ |= {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    if kind == "a file":
        join_group(rank, f"{folder}/store", seconds=20)
    else:
        assert torch_backend.__all__  # it registers the backend
        dist.init_process_group("gangline", timeout=timedelta(seconds=20))
    total = torch.ones(2)
    dist.all_reduce(total)
    os.environ["MASTER_PORT"] = "29514"
    with connect(timeout=20) as comm:
        comm.all_reduce(total)
    job = from_environment()
    rank.tell([total.tolist(), job.host, job.interface])
    rank.hear()


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("kind", INTERFACES)
def test_hosts_offer_no_address_that_others_cannot_reach(kind: str, tmp_path: Path) -> None:
    own, chosen = INTERFACES[kind]
    with Hosts(2) as hosts:
        for number, address in enumerate((own or hosts.addresses[0], hosts.addresses[0])):
            (tmp_path / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{address} node0\n")
            if chosen:  # an interface with the route to addresses outside that leads nowhere
                hosts.run(number, ["ip", "link", "add", "dead0", "up", "type", "veth", "peer", "name", "dead1"])
                hosts.run(number, ["ip", "address", "add", f"192.0.2.{9 + number}/24", "dev", "dead0"])
        with Processes(_meet, 2, str(tmp_path), hosts.names, kind, chosen) as ranks:
            assert ranks.all_heard() == [
                [[4.0, 4.0], *place]
                for place in zip(["node0" if not own else hosts.addresses[0], "node0"], hosts.addresses, strict=True)
            ]


def _with_wrong_interface(rank: Rank, port: int) -> None:
    if rank.rank == 1:
        os.environ["GANGLINE_INTERFACE"] = "eth99"
    with pytest.raises(
        ValueError, match=r"GANGLINE_INTERFACE eth99 is not on this host; there are lo \(127.0.0.1\)"
    ) as caught:
        connect(rank.rank, 2, f"127.0.0.1:{port}", timeout=60)
    rank.tell(str(caught.value))
    rank.hear()


def test_a_wrong_interface_is_an_error_of_all_ranks() -> None:
    with Processes(_with_wrong_interface, 2, unix_sockets.free_port("store")) as ranks:
        first, second = ranks.all_heard()
    assert first == f"rank 1: ValueError: {second}"


def _groups_of_some(rank: Rank, path: str) -> None:
    join_group(rank, path, seconds=20)
    if rank.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    found = []
    for number in range(2):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.full((2,), float(number + 1))
        dist.all_reduce(total, group=group)
        found.append(total.tolist())
        if number == 0:
            dist.destroy_process_group(group)
    rank.tell(found)
    rank.hear()


def test_ranks_may_have_made_unequal_numbers_of_groups(tmp_path: Path) -> None:
    with Processes(_groups_of_some, 2, f"{tmp_path}/store") as ranks:
        assert ranks.all_heard() == [[[2.0, 2.0], [4.0, 4.0]]] * 2


SUM = """
import torch, gangline
torch.set_num_threads(1)
for store in ("allreduce", "dist_sync"):
    with gangline.create(store) as kv:
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.ones(2))
        out = torch.zeros(2)
        kv.pull("w", out)
        assert out.tolist() == [2, 2], out
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and the command unshare"
)
@pytest.mark.slow
def test_a_host_with_ipv6_alone_runs_a_job() -> None:
    setup = 'ip link set lo up; ip -4 address flush dev lo; exec "$@"'
    command = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "-c", SUM]
    run(["unshare", "-n", "sh", "-ec", setup, "sh", *command], code=0)


CONNECT = """
import sys, torch, gangline
from gangline.collectives.bootstrap import rendezvous
torch.set_num_threads(1)
opened, open_store = [], rendezvous.TCPStore
rendezvous.TCPStore = lambda *args, **options: opened.append(args) or open_store(*args, **options)
for number in range(3):
    with gangline.connect(timeout=60) as comm:
        assert comm.all_reduce(torch.ones(1)).item() == 2
sys.stdout.write(f"{len(opened)} connection\\n")
"""


@pytest.mark.slow
def test_ranks_of_torchrun_connect_to_its_store_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = run([*command, sys.executable, "-c", CONNECT], code=0)
    assert done.stdout.splitlines() == ["1 connection"] * 2

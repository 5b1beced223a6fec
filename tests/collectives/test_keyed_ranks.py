"""Ranks on several hosts (network namespaces) with the job's key, another one, none, or plain text."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gangline import connect
from gangline.collectives.bootstrap.rendezvous import Rendezvous
from gangline.collectives.bootstrap.store_all_gather import StoreAllGather
from gangline.collectives.environments.job_key import FILE, JobKey, write_file
from gangline.collectives.errors import GanglineError
from gangline.collectives.transports.zmq import curve
from gangline.collectives.transports.zmq.peer_sockets import PeerSockets
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from tests.collectives.processes import Processes, Rank
from tests.hosts import Hosts, enter, obstacle

pytestmark = [pytest.mark.timeout(110), pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]
PORT = 29_500
KINDS = ("right", "other", "none", "plain text")


def write_keys(folder: Path) -> None:
    """Write the keys that `use_key` takes."""
    for kind in ("right", "other"):
        write_file(JobKey.new(), folder / kind)


def use_key(folder: str, kind: str) -> None:
    """Set this process's variables: a key of its own, neither key nor permission ("none"), or no key."""
    for name in (FILE, "GANGLINE_INSECURE", "GANGLINE_JOB_ID"):
        os.environ.pop(name, None)
    if kind in ("right", "other"):
        os.environ[FILE] = f"{folder}/{kind}"
    elif kind == "plain text":
        os.environ["GANGLINE_INSECURE"] = "1"


def _sum_ranks(rank: Rank, folder: str, kinds: list[str], namespaces: list[str], address: str) -> None:
    enter(namespaces[rank.rank])
    use_key(folder, kinds[rank.rank])
    try:
        with connect(rank.rank, rank.size, f"{address}:{PORT}", timeout=20) as comm:
            total = torch.full([1 << 20], 10.0**rank.rank)
            comm.all_reduce(total)
            rank.tell([comm.transport, total.unique().tolist()])
    except (GanglineError, RuntimeError) as error:
        rank.tell([type(error).__name__, str(error)])
    rank.hear()


@pytest.mark.parametrize("kinds", [("right", "right", "right"), ("plain text", "plain text")], ids=str)
def test_ranks_of_several_hosts_with_equal_keys_communicate(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    write_keys(tmp_path)
    with Hosts(len(kinds)) as hosts:
        place = hosts.names, hosts.addresses[0]
        with Processes(_sum_ranks, len(kinds), str(tmp_path), list(kinds), *place) as ranks:
            total = sum(10.0**rank for rank in range(len(kinds)))
            assert ranks.all_heard() == [["tcp", [total]]] * len(kinds)


@pytest.mark.parametrize("kind", ["other", "plain text"])
def test_ranks_with_different_keys_are_told_on_all_sides(tmp_path: Path, kind: str) -> None:
    write_keys(tmp_path)
    with Hosts(3) as hosts:
        place = hosts.names, hosts.addresses[0]
        with Processes(_sum_ranks, 3, str(tmp_path), ["right", kind, "right"], *place) as ranks:
            for rank, (name, text) in enumerate(ranks.all_heard()):
                assert name == "ProtocolError"
                assert "GANGLINE_JOB_KEY_FILE must name a file with the same key" in text
                if rank != 1:
                    assert text.startswith(f"rank {rank} and rank 1 do not have the same job key")
                elif kind == "other":
                    assert text.startswith("rank 1 and ranks 0, 2 do not have the same job key")
                else:
                    assert text.startswith("rank 1 has no job key, unlike ranks 0, 2: ")


class RecordingStore(dist.HashStore):
    """Store whose values a stranger reads, and changes before they are stored, given key and value."""

    def __init__(self, change: Callable[[str, bytes], bytes] = lambda _, value: value) -> None:
        super().__init__()
        self.seen: dict[str, bytes] = {}
        self._change = change

    def set(self, key: str, value: bytes | str) -> None:
        self.seen[key] = self._change(key, value.encode() if isinstance(value, str) else value)
        super().set(key, self.seen[key])


def _exchange_three_times(store: Any, key: JobKey) -> list[Any]:
    def play(rank: int) -> Any:
        exchange = StoreAllGather(store, rank, 2, 20, "the test", "the test", key)
        return [exchange(b"%d of round %d" % (rank, number)) for number in range(3)]

    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(play, rank) for rank in range(2)]
        return [one.exception() or one.result() for one in started]


def test_exchanges_of_a_job_with_a_key_cannot_be_changed_or_repeated() -> None:
    key = JobKey.new()
    honest = RecordingStore()
    expected = [[b"0 of round %d" % number, b"1 of round %d" % number] for number in range(3)]
    assert _exchange_three_times(honest, key) == [expected] * 2
    blobs = {name: value for name, value in honest.seen.items() if "blob" in name}
    assert len(blobs) == 2 * (1 + 3)  # random numbers, then three exchanges
    names = sorted(blobs)
    strangers: list[Callable[[str, bytes], bytes]] = [
        *(
            lambda name, value, at=at: value[:-1] + bytes([value[-1] ^ 1]) if name == at else value for at in names
        ),  # changed
        *(lambda name, value, at=at: blobs[at] if name == at else value for at in names),  # of an earlier job
        lambda name, value: changing.seen["1/blob/1"] if name == "2/blob/1" else value,  # of an earlier round
    ]
    for change in strangers:
        changing = RecordingStore(change)
        for outcome in _exchange_three_times(changing, key):
            assert isinstance(outcome, GanglineError)
            assert "do not have the same job key: GANGLINE_JOB_KEY_FILE" in str(outcome)


def _connect_without_key(rank: Rank, folder: str, namespaces: list[str], address: str) -> None:
    enter(namespaces[rank.rank])
    use_key(folder, "none")
    if rank.rank == 0:
        with socket.create_server((address, PORT)) as server:
            server.settimeout(0)
            rank.tell("listens")
            rank.hear()
            with pytest.raises(BlockingIOError):
                server.accept()
        rank.tell("nobody came")
    else:
        rank.hear()
        with pytest.raises(RuntimeError) as caught:
            connect(1, 2, f"{address}:{PORT}", timeout=20)
        with pytest.raises(RuntimeError, match="without a job key"):
            SchedulerClient("worker", f"tcp://{address}:{PORT}", timeout=20)
        rank.tell(str(caught.value))
    rank.hear()


def test_without_a_key_nothing_is_sent_to_another_host(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        place = hosts.names, hosts.addresses[0]
        with Processes(_connect_without_key, 2, str(tmp_path), *place) as ranks:
            assert ranks.heard(0) == "listens"
            ranks.say(1, "go")
            text = ranks.heard(1)
            for remedy in ("gangline key new", "GANGLINE_JOB_KEY_FILE", "gangline launch", "GANGLINE_INSECURE=1"):
                assert remedy in text
            assert f"address {hosts.addresses[0]} can be reached from other machines" in text
            ranks.say(0, "look")
            assert ranks.heard(0) == "nobody came"


def _exchange_as(rank: Rank, port: int, jobs: list[str]) -> None:
    os.environ["GANGLINE_JOB_ID"] = jobs[rank.rank]
    is_first = jobs[rank.rank] == "first"
    try:
        job = Rendezvous(min(rank.rank, 1), 2, f"127.0.0.1:{port}", timeout=20 if is_first else 1)
        if is_first:
            rank.hear()  # until the other job has given up
        rank.tell([one.decode() for one in job.exchange(b"%d" % rank.rank)])
    except GanglineError as error:
        rank.tell(str(error))
    rank.hear()


def test_ranks_of_two_jobs_at_one_address_do_not_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Processes(_exchange_as, 3, port, ["first", "first", "second"]) as ranks:  # the last is rank 1 of its job
        assert f"rank 0 of 2 did not reach 127.0.0.1:{port} as job second within 1 s" in ranks.heard(2)
        ranks.say(0, "go")
        ranks.say(1, "go")
        assert ranks.heard(0) == ranks.heard(1) == ["0", "1"]


def _open_sockets(rank: Rank, folder: str, kinds: list[str], namespaces: list[str], addresses: list[str]) -> None:
    enter(namespaces[rank.rank])
    use_key(folder, kinds[rank.rank])
    assert curve._SECONDS < 3
    curve._SECONDS = 0.2
    try:
        sockets = PeerSockets(
            rank.rank, rank.size, rank.exchange, address=f"tcp://{addresses[rank.rank]}", options={}, check=None
        )
    except GanglineError as error:
        rank.tell([type(error).__name__, str(error)])
    else:
        rank.tell("connected")
        sockets.close(0)
    rank.hear()


@pytest.mark.parametrize("kinds", [("right", "other"), ("right", "plain text"), ("plain text", "right")], ids=str)
def test_a_rank_that_connects_with_another_key_names_the_key(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Connect as after an exchange that is not authenticated: the sockets alone refuse."""
    write_keys(tmp_path)
    with Hosts(2) as hosts:
        place = hosts.names, hosts.addresses
        with Processes(_open_sockets, 2, str(tmp_path), list(kinds), *place) as ranks:
            name, text = ranks.heard(1)
            assert name == "ProtocolError"
            assert text.startswith(f"rank 1 cannot connect to rank 0: the process at {hosts.addresses[0]}:")
            assert "GANGLINE_JOB_KEY_FILE must name a file with the same key" in text
            assert ("which has no job key" in text) == (kinds[1] == "plain text")

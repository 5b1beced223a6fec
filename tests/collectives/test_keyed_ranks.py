"""Ranks on several hosts (network namespaces) with the job's key, another one, none, or plain text."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from gangline.bench.driver.hosts import Hosts, enter, obstacle
from gangline.collectives import connect
from gangline.collectives.errors import GanglineError
from gangline.collectives.job_key import FILE, JobKey, write_file
from gangline.collectives.transports.zmq import curve
from gangline.collectives.transports.zmq.peer_sockets import PeerSockets
from tests.collectives.processes import Processes, Rank

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]
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
    """As with an exchange that is not authenticated: the sockets alone refuse."""
    write_keys(tmp_path)
    with Hosts(2) as hosts:
        place = hosts.names, hosts.addresses
        with Processes(_open_sockets, 2, str(tmp_path), list(kinds), *place) as ranks:
            name, text = ranks.heard(1)
            assert name == "ProtocolError"
            assert text.startswith(f"rank 1 cannot connect to rank 0: the process at {hosts.addresses[0]}:")
            assert "GANGLINE_JOB_KEY_FILE must name a file with the same key" in text
            assert ("which has no job key" in text) == (kinds[1] == "plain text")

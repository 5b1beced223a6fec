"""Jobs with servers on several hosts (network namespaces): the job's key admits, others are told why not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from gangline import kvstore
from gangline.collectives.errors import GanglineError
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq import curve
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.environment import from_environment
from gangline.kvstore.parameter_server.transport.client_channel import SocketChannel
from gangline.kvstore.parameter_server.transport.poller import Poller
from tests.collectives.processes import Bare
from tests.collectives.test_keyed_ranks import use_key, write_keys
from tests.hosts import Hosts, enter, obstacle
from tests.kvstore.parameter_server.processes import DistJob

pytestmark = [pytest.mark.timeout(110), pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]
KINDS = ("right", "other", "none", "plain text")


class KeyedProcess(Bare):
    """Process of a job with one server: scheduler and server run on the first host, workers on the others."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **more: object) -> None:
        super().__init__(rank, size, exchange, **more)
        hosts = os.environ["GANGLINE_TEST_HOSTS"].split()
        enter(hosts[min(max(0, rank - 1), len(hosts) - 1)])
        use_key(os.environ["GANGLINE_TEST_KEYS"], os.environ["GANGLINE_TEST_KIND"])


def _train(folder: str, rounds: int) -> list[Any]:
    """Push and pull, and let strangers try to disturb the job before and between rounds."""
    outcomes: dict[str, list[str]] = {}
    curve._SECONDS = 0.2
    kv = kvstore.create("dist_sync", timeout=30)
    kv.init("key", torch.zeros(70_001, dtype=torch.float64))
    got = torch.empty(70_001, dtype=torch.float64)
    values = []
    server = kv._scheduler.servers[0]  # type: ignore[attr-defined]
    for number in range(rounds):
        kv.push("key", torch.full((70_001,), 4.0**number, dtype=torch.float64))
        kv.pull("key", got)
        values.append(got.unique().tolist())
        if kv.rank == 0 and number == 0:
            outcomes = {kind: [_try_scheduler(folder, kind), _try_server(folder, kind, server)] for kind in KINDS}
            use_key(folder, "right")
    kv.close()
    return [values, outcomes]


def _try_scheduler(folder: str, kind: str) -> str:
    use_key(folder, kind)
    try:
        SchedulerClient("worker", from_environment().scheduler, timeout=10)
    except (GanglineError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "in"


def _try_server(folder: str, kind: str, address: str) -> str:
    """Send a message to the server; return what comes back."""
    use_key(folder, kind)
    poller, context = Poller(), zmq.Context[zmq.Socket[bytes]]()
    try:
        endpoint, process = (word for word in address.split() if "unix://" not in word)
        identity = b"stranger" + process.removeprefix("process://").encode()
        channel = SocketChannel(endpoint, context, identity, poller)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    channel.send([protocol.pack(protocol.Hello(7, 1, "sync", 0, b"", 0))])
    ends = time.monotonic() + 10
    answer = ""
    while not answer and time.monotonic() < ends:
        events = poller.wait(100, 0.0)
        channel.reconnected(events)
        answer = channel.problem or next((f"in: {len(frames)} frames" for frames in channel.receive(events)), "")
    channel.close()
    context.destroy(0)
    poller.close()
    return answer


def test_only_processes_with_the_key_reach_scheduler_and_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curve._SECONDS < 3
    write_keys(tmp_path)
    monkeypatch.setenv("GANGLINE_TEST_KEYS", str(tmp_path))
    monkeypatch.setenv("GANGLINE_TEST_KIND", "right")
    with Hosts(2) as hosts:
        monkeypatch.setenv("GANGLINE_TEST_HOSTS", " ".join(hosts.names))
        monkeypatch.setenv("GANGLINE_TEST_SCHEDULER", hosts.addresses[0])
        with DistJob(_train, 2, 1, str(tmp_path), 4, opener=KeyedProcess) as job:
            (values, outcomes), (others, _) = job.results()
    assert values == others == [[2 * 4.0**number] for number in range(4)]  # nothing of the strangers counts
    assert outcomes["right"][0].startswith("ValueError: the job has its 2 workers already; a worker has one dist_*")
    assert outcomes["right"][1].startswith("in: ")
    for kind in ("other", "plain text"):
        for said in outcomes[kind]:
            assert "GANGLINE_JOB_KEY_FILE must name a file with the same key in every process" in said
            assert ("this process, which has no job key" in said) == (kind == "plain text")
        assert outcomes[kind][0].startswith("ProtocolError: worker: the process at ")
    for said in outcomes["none"]:
        assert said.startswith(f"RuntimeError: address {hosts.addresses[0]} can be reached from other machines")

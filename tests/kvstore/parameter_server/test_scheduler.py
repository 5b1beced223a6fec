"""Scheduler: ranks, collectives, join(), deaths, the end of a job, and jobs started by hand as trackers start them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from gangline.collectives.errors import DeadNodeError, MismatchError, StallError
from gangline.collectives.liveness.process_state import this_process
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client import scheduler_client
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.protocol import (
    Collective,
    CollectiveResult,
    Heartbeat,
    JobOver,
    Join,
    JoinResult,
    Leave,
    MemberGone,
    Push,
    Register,
    Registered,
    Rejected,
)
from gangline.kvstore.parameter_server.scheduler.scheduler import Scheduler
from gangline.launcher.job import free_ports
from tests import programs
from tests.kvstore.parameter_server.in_process import LIMIT, Job, RawClient

pytestmark = pytest.mark.timeout(110)


def elsewhere(rank: int) -> Register:
    """Return the registration of a worker whose process is not on this host."""
    return Register("worker", rank, ("elsewhere", 1, 1), "")


def here(rank: int) -> Register:
    return Register("worker", rank, this_process(), "")


def exchanged(job: Job, *members: SchedulerClient, name: str = "call") -> bool:
    """Exchange each worker's rank; return whether all of them get all ranks."""
    ranks = [b"%d" % member.rank for member in members]
    return job.each(members, lambda member: member.exchange(b"%d" % member.rank, name)) == [ranks] * len(members)


# Ranks


def test_ranks_that_are_asked_for_are_given() -> None:
    with Job(4) as job:
        wanted = [3, -1, 0, -1]
        members = job.at_once(*[lambda rank=rank: job.member(rank) for rank in wanted])
        assert [member.rank for member in members if member.rank in (0, 3)] == [3, 0]
        assert sorted(member.rank for member in members) == [0, 1, 2, 3]
        assert {member.num_workers for member in members} == {4}
        assert len({tuple(member.servers) for member in members}) == 1
        assert {member.view for member in members} == {1}


def test_processes_that_cannot_take_part_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(2) as job:
        first = job.later(lambda: retried(lambda: job.member(1)))
        text = "worker 1 takes part already; each needs a rank of its own (DMLC_WORKER_ID)"
        assert refusal(job.address, 1) == text
        for rank, said in ((2, "worker 2 cannot take part; ranks are 0 to 1"), (70, "ranks are 0 to 1")):
            with pytest.raises(ValueError, match=said):
                SchedulerClient("worker", job.address, rank=rank, timeout=LIMIT)
        with pytest.raises(ValueError, match="role is 'boss'; expected worker or server"):
            SchedulerClient("boss", job.address, timeout=LIMIT)
        second = job.member(0)
        assert (first.result(LIMIT).rank, second.rank) == (1, 0)
        for role, said in (("worker", "the job has its 2 workers already"), ("server", "its 1 servers already")):
            with pytest.raises(ValueError, match=said):
                SchedulerClient(role, job.address, timeout=LIMIT)
        monkeypatch.setenv("GANGLINE_JOB_ID", "other job")
        with pytest.raises(ValueError, match="the worker belongs to job 'other job' and the scheduler to job ''"):
            SchedulerClient("worker", job.address, timeout=LIMIT)


def refusal(address: str, rank: int) -> str:
    """Return the rejection of a rank once another process has it."""
    while True:
        with RawClient(address, os.urandom(8)) as client:
            client.send(elsewhere(rank))
            client.send(Heartbeat())
            answer = client.receive(heartbeats=True)[0]
        if isinstance(answer, Rejected):
            return answer.text


@pytest.mark.parametrize("timeout", [LIMIT, 0.4], ids=["before its own limit", "after its own limit"])
def test_missing_processes_are_named(timeout: float) -> None:
    with Job(3, 1, timeout=0.5) as job:
        job.gives_up = True
        joining = job.later(lambda: SchedulerClient("worker", job.address, rank=2, timeout=timeout))
        text = r"2 of 3 workers \(present: \[2\]\) did not join within 0.5 s"
        with pytest.raises(StallError, match=text):
            joining.result(LIMIT)
        with pytest.raises(StallError, match=text):
            job.ending.result(LIMIT)


def test_under_a_launcher_the_first_worker_may_register_after_the_timeout() -> None:
    with Job(2, 1, timeout=1.0, is_supervised=True) as job:
        threading.Event().wait(1.5)
        assert [member.rank for member in job.members()] == [0, 1]


def test_a_scheduler_listens_at_a_hosts_name() -> None:
    scheduler = Scheduler(1, 1, "localhost")
    unix_sockets.connect(unix_sockets.name_of("scheduler", scheduler.port)).close()
    scheduler.close()


def test_a_worker_logs_which_scheduler_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert scheduler_client._NOTICE_SECONDS == 5
    monkeypatch.setattr(scheduler_client, "_NOTICE_SECONDS", 0.1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(StallError, match=f"worker waits for the job to begin at tcp://{address} has waited 0.2 s"):
            SchedulerClient("worker", f"tcp://{address}", timeout=0.2)
    said = f"worker waits for the scheduler at {address} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
    assert caplog.messages == [said]


def test_addresses_that_others_reach_are_refused() -> None:
    with pytest.raises(RuntimeError, match="GANGLINE_INSECURE=1"):
        Scheduler(1, 1, "0.0.0.0")


# Collectives


def collective(number: int, data: bytes) -> Collective:
    return Collective(number, "call", -1, len(data).to_bytes(8, "big") + data, "")


def test_data_for_one_rank_do_not_reach_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, int] = defaultdict(int)
    receive = SchedulerClient._receive

    def counted(self: SchedulerClient, frame: bytes) -> None:
        received[f"{self.role} {self.rank}"] += len(frame)
        receive(self, frame)

    monkeypatch.setattr(SchedulerClient, "_receive", counted)
    with Job(3) as job:
        members = job.members()
        parts = [bytes([member.rank]) * (20 << 20) for member in members]
        assert job.each(members, lambda member: member.exchange(parts[member.rank], "save", 0)) == [parts, [], []]
        assert received["worker 0"] > 60 << 20
        assert max(received["worker 1"], received["worker 2"]) < 10_000


def test_a_worker_ahead_waits() -> None:
    with Job(2) as job:
        members = job.members()
        ahead = job.later(lambda: [members[0].exchange(b"first", "call"), members[0].exchange(b"second", "call")])
        assert members[1].exchange(b"1", "call") == [b"first", b"1"]
        assert not ahead.done()
        assert members[1].exchange(b"2", "call") == [b"second", b"2"]
        assert ahead.result(LIMIT) == [[b"first", b"1"], [b"second", b"2"]]


def test_a_call_that_has_timed_out_can_be_repeated_and_another_does_not_meet_the_next_of_the_others() -> None:
    with Job(2) as job:
        zero, one = job.members()
        zero._timeout = 0.2
        for _ in range(2):
            with pytest.raises(StallError, match=r"barrier of worker 0 has waited 0\.2 s for rank 1"):
                zero.exchange(b"early", "barrier")
        zero._timeout = LIMIT
        for name in ("barrier", "call after it"):
            assert exchanged(job, zero, one, name=name)
        zero._timeout = 0.2
        with pytest.raises(StallError):
            zero.exchange(b"", "barrier")
        text = "rank 0 called init, rank 1 called barrier"
        late = job.later(lambda: one.exchange(b"", "barrier"))
        with pytest.raises(MismatchError, match=text):
            zero.exchange(b"", "init")
        with pytest.raises(MismatchError, match=text):
            late.result(LIMIT)


# Deaths and ends


def test_a_death_fails_waiting_workers() -> None:
    with Job(3) as job, RawClient(job.address, b"mortal") as client:
        client.send(elsewhere(2))
        zero, one = job.at_once(lambda: job.member(0), lambda: job.member(1))
        waiting = job.later(lambda: zero.exchange(b"", "barrier"))
        client.close()
        with pytest.raises(DeadNodeError, match=r"worker 2 .*connection lost.*barrier of worker 0"):
            waiting.result(LIMIT)
        with pytest.raises(DeadNodeError, match="worker 2"):  # and later calls
            one.join(b"")
        assert zero.gone["worker", 2] == "was killed or left: connection lost"


def test_a_silent_worker_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "0.6")
    monkeypatch.setenv("GANGLINE_HEARTBEAT", "0.1")
    with Job(2) as job, RawClient(job.address, b"silent") as client:
        client.send(elsewhere(1))
        zero = job.member(0)
        with pytest.raises(DeadNodeError, match="worker 1 gave no sign of life for"):
            zero.exchange(b"", "call")
        client.send(Heartbeat())  # it continues, learns that it counts as dead, and leaves
        client.send(Leave())
        heard = []
        while not isinstance(heard[-1:] and heard[-1], JobOver):
            heard.append(client.receive()[0])
        assert isinstance(heard[0], Registered)
        assert MemberGone("worker", 1, zero.gone["worker", 1]) in heard


def test_a_worker_that_dies_before_the_start_may_be_replaced() -> None:
    with Job(2) as job:
        with RawClient(job.address, b"first") as client:
            client.send(elsewhere(1))
            zero = job.later(lambda: job.member(0))
        one = retried(lambda: job.member(1))
        assert (zero.result(LIMIT).rank, one.rank) == (0, 1)
        assert exchanged(job, zero.result(), one)


def retried(call: Any) -> Any:
    """Repeat a call until the scheduler has freed a rank."""
    while True:
        try:
            return call()
        except ValueError as error:
            assert "takes part already" in str(error) or "has its 2 workers already" in str(error)  # noqa: PT017


def test_a_reconnected_worker_loses_nothing() -> None:
    with Job(2) as job, RawClient(job.address, b"first") as client:
        client.send(here(1))
        zero = job.member(0)
        client.send(collective(1, b"one"))
        assert zero.exchange(b"zero", "call") == [b"zero", b"one"]
        reconnect(client)  # before it has read the answer
        both = [collective(1, data).data for data in (b"zero", b"one")]
        assert client.request(collective(1, b"one")) == CollectiveResult(1, both)
        pending = job.later(lambda: zero.join(b"zero"))
        client.send(Join(1, b"one"))
        joined = pending.result(LIMIT)
        reconnect(client)
        assert client.request(Join(1, b"one")) == joined
        zero.close()
        client.reconnect()
        client.send(here(1))
        assert [type(client.receive()[0]) for _ in range(2)] == [Registered, MemberGone]
        assert isinstance(client.request(Leave()), JobOver)


def reconnect(client: RawClient) -> None:
    """Reconnect worker 1; an answer to the lost connection may arrive on the new one before `Registered`."""
    client.reconnect()
    client.send(here(1))
    while not isinstance(client.receive()[0], Registered):
        pass


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (Leave(), "worker 1 has left the job"),
        (Leave("", OUT_OF_MEMORY), f"worker 1 ended with an error: {OUT_OF_MEMORY}"),
        (Leave("", OUT_OF_MEMORY, remains=True), f"worker 1 ended with an error: {OUT_OF_MEMORY}"),
        (Leave("cannot talk", OUT_OF_MEMORY), "worker 1 cannot talk"),
    ],
    ids=["in order", "by an error", "by an error and its place is kept", "for a reason of the others"],
)
def test_others_get_the_error_that_has_ended_a_worker(leave: Leave, text: str) -> None:
    with Job(3) as job, RawClient(job.address, b"ends") as client, RawClient(job.address, b"late") as late:
        client.send(elsewhere(1))
        late.send(here(2))
        zero = job.member(0)
        assert isinstance(late.receive()[0], Registered)
        waiting = job.later(lambda: zero.exchange(b"", "barrier"))
        assert [type(client.request(one)) for one in (Heartbeat(), leave)] == [Registered, JobOver]
        assert zero.gone == {} or not leave.remains
        client.close()
        with pytest.raises(DeadNodeError, match=re.escape(f"{text} (barrier of worker 0)")):
            waiting.result(LIMIT)
        reconnect(late)
        gone = late.receive()[0]
        assert gone == MemberGone("worker", 1, zero.gone["worker", 1], leave.error)
        assert isinstance(late.request(Leave()), JobOver)


# Invalid messages


def test_a_scheduler_outlives_hostile_bytes() -> None:
    with Job(2) as job, RawClient(job.address, b"stranger") as stranger:
        hostile: list[tuple[Any, tuple[bytes, ...]]] = [
            (b"", ()),
            (b"\xc1\xff", ()),
            (b"x" * 1000, (b"more", b"frames")),
            (b"\x91" * 3000, ()),
            (protocol.pack(Heartbeat()) + b"\0", ()),
            (collective(1, b"mine"), ()),
            (Join(1, b"mine"), ()),
            (Leave(), ()),
            (Push(1, [], None, None, False, None), ()),
            (Registered(0, 1, 1, [], 1.0, 1.0), ()),
            (CollectiveResult(1, []), ()),
            (MemberGone("worker", 0, "I say so"), ()),
            (JoinResult(0, 1, []), ()),
            (JobOver(), ()),
        ]
        too_large = Register("worker", 0, this_process(), "x" * 4096)
        for message, frames in hostile:
            stranger.send(message, *frames)
        stranger.send(too_large)
        assert exchanged(job, *job.members())
        assert (job.scheduler.rejected, job.scheduler._listener.rejected) == (len(hostile), 1)


def test_open_collectives_of_a_worker_are_bounded() -> None:
    with Job(2) as job, RawClient(job.address, b"flood") as flood:
        flood.send(here(1))
        zero = job.member(0)
        assert isinstance(flood.receive()[0], Registered)
        for number in range(2, 1002):
            flood.send(collective(number, bytes(100)))
        for message in (MemberGone("worker", 0, "x"), Push(1, [], None, None, False, None), JobOver()):
            flood.send(message)
        for invalid in (Leave("", "x" * 4097), Leave("", remains=2)):  # type: ignore[arg-type]
            flood.send(invalid)
        flood.send(protocol.pack(Leave("", "xx")).replace(b"xx", b"\xff\xff"))
        assert isinstance(flood.request(here(1)), Registered)
        assert job.scheduler.rejected == 1000 - 64 + 3 + 3
        flood.send(collective(1, b""))
        flood.send(Leave())
        with pytest.raises(DeadNodeError, match="worker 1 has left the job"):
            zero.join(b"")


# Whole jobs, started by hand

SCRIPT = """
import torch
from gangline import kvstore
kv = kvstore.create("dist_sync")
kv.init("w", torch.zeros(3))
out = torch.empty(3)
kv.pushpull("w", torch.full((3,), float(kv.rank + 1)), out=out)
assert out.tolist() == [3.0] * 3, out
print("rank", kv.rank, "of", kv.num_workers)
kv.close()
"""

NO_TORCH = """
import sys
from gangline.kvstore.parameter_server.scheduler import scheduler
code = scheduler.main()
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the scheduler has imported torch"
raise SystemExit(code)
"""


@pytest.fixture
def starts() -> Iterator[Any]:
    """Start processes of one job and kill those that remain."""
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "PYTHONWARNINGS": "error"}
    (port,) = free_ports(1)
    with ExitStack() as stack:

        def start(role: str, *command: str, **more: str) -> subprocess.Popen[str]:
            environment = programs.environment(**{**job, "DMLC_PS_ROOT_PORT": port, "DMLC_ROLE": role, **more})
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=90)
    return process.returncode, said


@pytest.mark.slow
def test_one_script_in_all_roles_as_trackers_start_it(starts: Any) -> None:
    processes = [starts(role, "-c", SCRIPT) for role in ("scheduler", "server", "worker", "worker")]
    said = [ended(process) for process in processes]
    assert said[:2] == [(0, ""), (0, "")]  # they do not run the rest of the script
    assert sorted(said[2:]) == [(0, "rank 0 of 2\n"), (0, "rank 1 of 2\n")]


DIES = "import os, signal; from gangline import kvstore; kv = kvstore.create('dist_sync'); kv.barrier(); "


@pytest.mark.slow
def test_scheduler_and_server_of_a_failed_job_exit_with_1(starts: Any) -> None:
    servers = [starts(role, "-m", f"gangline.kvstore.parameter_server.{role}") for role in ("scheduler", "server")]
    killed = starts("worker", "-c", DIES + "os.kill(os.getpid(), signal.SIGKILL)")
    other = starts("worker", "-c", DIES + "kv.barrier()")
    assert [ended(process)[0] for process in (killed, other, *servers)] == [-signal.SIGKILL, 1, 1, 1]


def test_a_scheduler_without_processes_ends_with_an_error(starts: Any) -> None:
    process = starts("scheduler", "-c", NO_TORCH, GANGLINE_TIMEOUT="0.3")
    assert ended(process) == (1, "ERROR: 2 of 2 workers and 1 of 1 servers did not join within 0.3 s\n")


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_an_address_that_cannot_be_used_is_named(starts: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("-m", "gangline.kvstore.parameter_server.scheduler")
    monkeypatch.setenv("GANGLINE_TRANSPORT", transport)
    with closing(Scheduler(1, 1)) as holder:
        code, said = ended(starts("scheduler", *command, DMLC_PS_ROOT_PORT=str(holder.port)))
    assert code == 1
    assert re.fullmatch(
        rf"ERROR: the scheduler cannot listen at 127.0.0.1:{holder.port}: .*Address already in use.*; end the job or "
        "program that has this port .* or change DMLC_PS_ROOT_PORT, .*\n",
        said,
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DMLC_NUM_WORKER", "two", "; expected a whole number, 1 to 65536"),
        ("DMLC_PS_ROOT_URI", "no-such-host.invalid", ", which this host cannot resolve or reach "),
    ],
)
def test_invalid_variables_are_named(starts: Any, name: str, value: str, expected: str) -> None:
    code, said = ended(starts("scheduler", "-m", "gangline.kvstore.parameter_server.scheduler", **{name: value}))
    assert code == 1
    assert f"{name} is {value!r}{expected}" in said

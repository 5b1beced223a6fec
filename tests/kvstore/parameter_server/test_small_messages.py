"""Python calls of a push and pull of a small key: they are most of its time."""

from __future__ import annotations

import gc
import sys
from types import FrameType, SimpleNamespace

import torch
from torch import Tensor

from gangline import KVStore, kvstore
from gangline.kvstore.parameter_server.environment import ServerJob
from gangline.kvstore.parameter_server.server.rounds import ShardRounds
from gangline.kvstore.parameter_server.server.server import open_server
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.server.shards import PushedValue, Shard, Slot, Waiter
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.processes import run_job

STEPS = 200
MOST_CALLS, MOST_PYTHON_CALLS, MOST_CALLS_OF_SERVER = 185, 105, 78
"""Calls of a push and pull, of Python and C functions, and of Python functions alone; and those of the server. Without
those of the poller, whose number depends on how long the other process takes."""
MOST_SERVER_CALLS = 108
"""Calls of Python functions for three pushes and pulls, without those of the sockets: 103 with 8 workers."""


def count_calls(kv: KVStore, given: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the fewest calls of a push and pull in the worker's thread: acknowledgements arrive with some of them.

    The second number is that of Python functions alone.
    """
    calls = [[0, 0] for _ in range(2 * STEPS)]

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call") and not frame.f_code.co_filename.endswith("poller.py"):
            calls[step][0] += 1
            calls[step][1] += event == "call"

    for step in range(2 * STEPS):
        if step == STEPS:
            sys.setprofile(count)
        kv.push("a", given)
        kv.pull("a", out)
    sys.setprofile(None)
    assert out.unique().tolist() == [1.0]
    return min(one for one, _ in calls[STEPS:]), min(one for _, one in calls[STEPS:])


def count_garbage(kv: KVStore, given: Tensor, out: Tensor) -> int:
    """Return the objects that only the garbage collector frees after pushes, pulls and `pushpull`."""

    def step() -> None:
        kv.push("a", given)
        kv.pull("a", out)
        kv.pushpull("a", given, out)
        kv.push("a", given, async_op=True).wait()

    step()
    gc.collect()
    gc.disable()
    for _ in range(50):
        step()
    kv.barrier()
    return gc.collect()


def count_both() -> tuple[tuple[int, int], int]:
    with kvstore.create("dist_sync") as kv:
        kv.init("a", torch.zeros(1024))
        given, out = torch.ones(1024), torch.empty(1024)
        return count_calls(kv, given, out), count_garbage(kv, given, out)


def test_a_push_and_pull_of_a_small_key_makes_few_calls_and_frees_its_memory_at_once() -> None:
    (((calls, python_calls), garbage),) = run_job(count_both, 1, 1)
    assert 100 < calls < MOST_CALLS
    assert 50 < python_calls <= MOST_PYTHON_CALLS
    assert garbage < 50  # not one for each call


def add_slot(shard: Shard) -> Slot:
    shard.slots.append(Slot(torch.empty(1), 0))
    return shard.slots[-1]


class CountedJob(Job):
    """Job whose server counts the Python functions that it calls."""

    calls = 0

    def _serve(self, place: ServerJob) -> None:
        def count(frame: FrameType, event: str, _: object) -> None:
            self.calls += event == "call" and not frame.f_code.co_filename.endswith("poller.py")

        with open_server(place) as server:
            self._servers.put(server)
            sys.setprofile(count)
            server.run()


def test_a_push_and_pull_of_a_small_key_make_few_calls_of_a_server() -> None:
    with CountedJob(1) as job:
        [kv] = job.stores()
        kv.init("a", torch.zeros(1024))
        given, out, counts = torch.ones(1024), torch.empty(1024), []
        for _ in range(STEPS):
            before = job.calls
            kv.push("a", given)
            kv.pull("a", out)
            counts.append(job.calls - before)
        assert 40 < sorted(counts)[STEPS // 2] <= MOST_CALLS_OF_SERVER  # the server may end a step after the worker


def calls_per_message(workers: int) -> float:
    """Return the Python calls of a server for three pushes and pulls of a worker, without those of its sockets."""
    calls = 0
    pool = SimpleNamespace(size=1, run=lambda thread, nbytes, work, then: (work(), then("")))
    own: Sessions
    rounds = ShardRounds(workers, pool, add_slot, lambda *one: own.send_value(*one), lambda *_: None)  # type: ignore[arg-type]
    listener = SimpleNamespace(send=lambda *_, **__: True, is_full=lambda _: False)
    own = Sessions(listener, rounds.awaited)  # type: ignore[arg-type]
    own.max_backlog = 4 * workers
    sessions = [WorkerSession(b"%d" % rank, rank, None, False) for rank in range(workers)]
    for worker in sessions:
        own.add(worker)
    shard = rounds.shards[0] = Shard(0, "a", 0, 1, [Slot(torch.zeros(1), 0)], True, 0)

    def count(frame: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call" and "/torch/" not in frame.f_code.co_filename

    gc.disable()  # other packages' callbacks are Python functions, and so are torch's modes
    sys.setprofile(count)
    for number in (1, 2, 3):
        for rank, worker in enumerate(sessions):
            value = PushedValue(torch.ones(1), None, lambda: None)
            rounds.push(shard, rank, number, value, None)
            rounds.wait(shard, Waiter(rank, number, number))
            own.acknowledge_push(worker, number, urgent=rank % 2 == 0)
            rounds.advance()
            own.flush()
            rounds.advance()
    sys.setprofile(None)
    gc.enable()
    assert shard.closed == 3
    assert shard.flat.tolist() == [workers]
    return calls / workers


def test_a_message_costs_a_server_the_same_with_many_workers() -> None:
    few, many = calls_per_message(8), calls_per_message(128)
    assert many < 1.2 * few
    assert 50 < few < MOST_SERVER_CALLS

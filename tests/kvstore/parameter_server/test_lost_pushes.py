"""A push that may be lost is final: every later call raises its error, and the other workers get it, too."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from gangline.collectives.errors import DeadNodeError, StallError
from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Failed, Pull, Values, ValuesRead
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.in_process import LIMIT, Job, RawClient
from tests.kvstore.parameter_server.test_failures import digits_of

pytestmark = pytest.mark.timeout(60)


def init(job: Job, stores: list[DistStore], keys: list[str], numel: int = 1) -> None:
    """Initialise keys on all workers; an optimizer with rate 1 adds the sums to the negative value."""
    zeros = [torch.zeros(numel, dtype=torch.float64) for _ in keys]
    job.each(stores, lambda kv: kv.init(keys, zeros))
    job.each(stores, lambda kv: kv.set_optimizer(("sgd", {"lr": 1.0})))


def digit(number: int, numel: int = 1) -> torch.Tensor:
    return torch.full((numel,), 4.0**number, dtype=torch.float64)


def test_a_push_that_stalled_is_final() -> None:
    with Job(2) as job:
        first, second = stores = job.stores(timeout=1)
        init(job, stores, ["key"])
        out = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(StallError, match=r"pushpull of key 'key' has waited 1.* s for server 0"):
            first.pushpull("key", digit(0), out)
        for call in (lambda: first.push("key", digit(0)), lambda: first.pull("key", out), first.barrier):
            with pytest.raises(StallError, match="pushpull of key 'key' has waited"):
                call()
        second.pushpull("key", digit(1), out)  # the server has the first worker's push
        with pytest.raises(DeadNodeError, match="worker 0 has given up a push: pushpull of key 'key' has waited"):
            second.pushpull("key", digit(2), out)


def test_the_death_of_another_worker_ends_a_push_for_good() -> None:
    with Job(2) as job:
        first, second = stores = job.stores(timeout=10)
        init(job, stores, ["both", "mine"])
        second.push("both", digit(1))
        second.close()
        out = torch.zeros(1, dtype=torch.float64)
        for _ in range(2):
            with pytest.raises(DeadNodeError, match="worker 1 has left"):
                first.pushpull("mine", digit(0), out)


def test_a_refused_push_is_reported_though_the_connection_breaks() -> None:
    with Job(1) as job, RawClient.of_worker(job.member(), mode="async") as client:
        client.define(1, 5, [4], bytes(16))
        client.push(2, 5, 1, bytes(8))
        assert client.receive()[0] == Ack([2])
        pull = Pull(4, [[5, 1, DENSE, 0]], False, None)
        numbers = []
        for _ in range(2):  # the worker asks again on a new connection, because the answer may be lost
            failed = client.request(pull)
            assert isinstance(failed, Failed), failed
            assert "the push of worker 0 for key 'key' has 8 bytes" in failed.text
            numbers.append(failed.number)
            client.reconnect_as(job._members[0], mode="async")
        client.send(ValuesRead(numbers[-1:]))
        assert isinstance(client.request(pull), Values)


LARGE = 1 << 18
"""Elements of a key of 2 MiB: sixteen pushes fill the window and the queue."""


def test_close_waits_until_servers_have_all_pushes(gate: threading.Event) -> None:
    with Job(2) as job:
        first, second = stores = job.stores(timeout=20)
        init(job, stores, ["key"], LARGE)
        gate.clear()
        for number in range(12):
            first.push("key", digit(2 * number, LARGE), async_op=True)
        closing = threading.Thread(target=first.close, daemon=True)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        gate.set()
        closing.join(LIMIT)
        assert not closing.is_alive()
        for number in range(12):
            second.push("key", digit(2 * number + 1, LARGE))
        out = torch.zeros(LARGE, dtype=torch.float64)
        second.pull("key", out)
        assert [digits_of(value) for value in out.unique().tolist()] == [[1] * 24]


def push_and_fail(store: DistStore) -> None:
    with store:
        store.push("key", digit(0, LARGE), async_op=True)
        raise ArithmeticError("of the caller")


def test_close_raises_if_servers_did_not_get_all_pushes(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(1) as job:
        (kv,) = stores = job.stores(timeout=0.5)
        init(job, stores, ["key"], LARGE)
        gate.clear()
        kv.push("key", digit(0, LARGE), async_op=True)
        with pytest.raises(StallError, match="closed its store, but servers may not have received push of key 'key'"):
            kv.close()
        gate.set()
        kv.close()  # idempotent
    with Job(1) as job, caplog.at_level(logging.ERROR):
        (kv,) = stores = job.stores(timeout=0.5)
        init(job, stores, ["key"], LARGE)
        gate.clear()
        with pytest.raises(ArithmeticError, match="of the caller"):  # which no other error replaces
            push_and_fail(kv)
        gate.set()
    assert "one of its pushes was lost" in caplog.text

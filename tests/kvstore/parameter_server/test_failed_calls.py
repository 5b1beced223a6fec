"""Calls of a dist store that failed, wait in the queue or run ahead: each push counts once, or its loss is final."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

from gangline.collectives.errors import DeadNodeError, MismatchError, StallError
from gangline.collectives.work import Work
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.parameter_server.client import server_client
from gangline.kvstore.parameter_server.protocol import DENSE, Ack, Failed, Pull, Values
from gangline.kvstore.parameter_server.server import sessions
from gangline.kvstore.parameter_server.store import DistStore
from gangline.kvstore.parameter_server.transport import client_channel
from gangline.kvstore.parameter_server.transport import listener as listener_module
from gangline.kvstore.parameter_server.transport.listener import Listener
from tests.kvstore.parameter_server.digits import digits_of
from tests.kvstore.parameter_server.in_process import LIMIT, Job, RawClient

pytestmark = pytest.mark.timeout(60)


def pulled(kv: DistStore, key: str) -> float:
    out = torch.zeros(1)
    kv.pull(key, out)
    return out.item()


def test_a_queued_push_has_the_learning_rate_of_its_call() -> None:
    with Job(1) as job, job.stores()[0] as kv:
        kv.init("w", torch.zeros(1))
        kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
        gate = threading.Event()
        kv._queue.submit(lambda: gate.wait(LIMIT), Work("gate"), ["w"], 0)
        kv.push("w", torch.ones(1), async_op=True)
        kv.set_learning_rate(0.0)
        gate.set()
        assert pulled(kv, "w") == -1.0


def test_a_join_that_timed_out_is_an_error_of_all_later_calls_and_of_the_others() -> None:
    with Job(2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: kv.init("w", torch.zeros(1)))
        first, second = stores
        first._scheduler._timeout = 0.5
        with pytest.raises(StallError, match=r"join\(\) of worker 0 has waited 0\.5 s"):
            first.join()
        given_up = r"worker 0 has given up join\(\): join\(\) of worker 0 has waited 0\.5 s; only close\(\) can follow"
        for call in (lambda: first.push("w", torch.ones(1)), lambda: pulled(first, "w"), first.barrier, first.join):
            with pytest.raises(StallError, match=given_up):
                call()
        with pytest.raises(DeadNodeError, match=r"worker 0 has given up join\(\)"):
            second.barrier()


AFTER_A_REFUSAL: list[Callable[[DistStore], object]] = [
    lambda kv: pulled(kv, "w"),
    lambda kv: kv.assign("other", torch.ones(1)),
    lambda kv: kv.optimizer_state(),
    lambda kv: kv.load_optimizer_state(OptimizerState.from_parts(kv.optimizer_state().header(), {})),
    lambda kv: kv.pushpull("w", torch.ones(1), torch.ones(1)),
    lambda kv: kv.set_optimizer(("sgd", {"learning_rate": 1.0})),
]


def test_a_refused_push_is_reported_to_each_rank_once() -> None:
    values = [torch.full((1,), math.nan), torch.ones(1)]

    def step(kv: DistStore) -> str:
        try:
            kv.pushpull("w", values[kv.rank], torch.ones(1))
        except (ValueError, MismatchError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with Job(2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: kv.init(["w", "other"], [torch.zeros(1)] * 2))
        job.each(stores, lambda kv: kv.set_optimizer(("sgd", {"learning_rate": 1.0})))
        job.each(stores, lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": 0.5}))
        for call in AFTER_A_REFUSAL:
            texts = job.each(stores, step)
            assert texts[0].startswith("ValueError: the gradient of key 'w' holds NaN")
            assert "the push of worker 0 for key 'w' was refused" in texts[1]
            job.each(stores, call)


def test_a_push_that_fails_keeps_no_shared_memory() -> None:
    with Job(2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: kv.init("b" if kv.rank else "w", torch.zeros(1 << 21)))
        for kv, key, error in (stores[0], "w", "MemoryError"), (stores[1], "b", "has no shard"):
            pool = kv._pool
            assert pool is not None
            used = pool.in_use
            filled = (
                pool.allocate(pool.segment.nbytes - (6 << 20)) if key == "w" else None
            )  # room for one of 2 messages
            with pytest.raises((MismatchError, MemoryError), match="do not fit in" if filled is not None else error):
                kv.pushpull(key, torch.ones(1 << 21))
            if filled is not None:
                pool.free(filled)
            kv._servers.wait(lambda pool=pool, used=used: pool.in_use == used)


def test_workers_that_push_two_keys_in_opposite_orders_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_BACKLOG_BYTES", 0)
    monkeypatch.setattr(server_client, "_WINDOW", 1 << 15)  # half a request, which is sent alone
    monkeypatch.setattr(server_client, "_MAX_QUEUED", 1 << 16)
    values, rounds = torch.ones(1 << 14), 24
    with Job(2) as job:
        stores = job.stores(timeout=15)
        job.each(stores, lambda kv: kv.init(["a", "b"], [values, values]))

        def push(kv: DistStore) -> tuple[float, float]:
            for key in "ab" if kv.rank else "ba":
                for number in range(rounds):
                    kv.push(key, values * (number + 1))
            outs = [torch.zeros_like(values) for _ in "ab"]
            kv.pull(["a", "b"], outs)
            return outs[0][0].item(), outs[1][-1].item()

        assert job.each(stores, push) == [(2.0 * rounds, 2.0 * rounds)] * 2


def test_values_that_a_worker_does_not_read_do_not_pile_up_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, pulls = 4 << 20, 50
    queued: list[int] = []
    send = Listener.send

    def recorded(listener: Listener, identity: bytes, *arguments: Any, **options: Any) -> bool:
        is_sent = send(listener, identity, *arguments, **options)
        stream = listener._streams.get(listener._descriptors.get(identity, -1))
        queued.append(0 if stream is None else sum(map(len, stream._queue)))
        return is_sent

    monkeypatch.setattr(Listener, "send", recorded)
    with Job(1) as job, RawClient.of_worker(job.member()) as client:
        client.define(1, 5, [nbytes // 4], bytes(nbytes))
        for sequence in range(2, 2 + pulls):
            client.pull(sequence, 5, 0)
        for sequence in range(2, 2 + pulls):
            values, (data,) = client.receive()
            assert isinstance(values, Values)
            assert (values.sequence, len(data)) == (sequence, nbytes)
    assert max(queued) <= 2 * nbytes


def test_copies_of_values_that_a_worker_does_not_read_do_not_pile_up_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")
    monkeypatch.setattr(listener_module, "_SENDING_BYTES", 1 << 20)
    dealer = client_channel._dealer

    def slow_dealer(*arguments: Any) -> zmq.Socket[bytes]:
        made = dealer(*arguments)
        made.setsockopt(zmq.RCVHWM, 1)  # it reads no more than it is asked for
        return made

    monkeypatch.setattr(client_channel, "_dealer", slow_dealer)
    rows, width, pulls = 64, 1 << 12, 80
    sent: list[int] = []
    send = Listener.send

    def recorded(listener: Listener, identity: bytes, frames: list[memoryview], *transfers: Any) -> bool:
        sent.append(len(frames[1]) if len(frames) > 1 else 0)
        return send(listener, identity, frames, *transfers)

    monkeypatch.setattr(Listener, "send", recorded)
    numbers = torch.arange(rows).numpy().tobytes()
    with Job(1) as job, RawClient.of_worker(job.member()) as client:
        client.define(1, 5, [rows, width], bytes(4 * rows * width), width=width)
        for sequence in range(2, 2 + pulls):
            client.send(Pull(sequence, [(5, 0, DENSE, len(numbers))], True, None), numbers)
        time.sleep(0.3)  # for the server to take all requests
        unread = sum(sent)
        for sequence in range(2, 2 + pulls):
            values, (data,) = client.receive()
            assert (values.sequence, len(data)) == (sequence, 4 * rows * width)
    assert unread < 40 << 20  # in buffers of the kernel and of ZeroMQ
    assert sum(sent) == pulls * 4 * rows * width


@pytest.mark.parametrize("weighted", [0, 1])
def test_push_on_one_rank_and_push_weighted_on_another_is_an_error_on_both(weighted: int) -> None:
    with Job(2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: kv.init("w", torch.zeros(1)))

        def step(kv: DistStore) -> str:
            if kv.rank == weighted:
                kv.push_weighted("w", torch.ones(1), 2.0)
            else:
                kv.push("w", torch.ones(1))
            with pytest.raises(MismatchError) as told:
                pulled(kv, "w")
            return str(told.value)

        text = f"key 'w' is pushed by push on rank {1 - weighted} and by push_weighted on rank {weighted}"
        assert all(text in one for one in job.each(stores, step))
        job.each(stores, lambda kv: kv.push_weighted("w", torch.full((1,), 4.0), kv.rank + 1.0))
        assert job.each(stores, lambda kv: pulled(kv, "w")) == [4.0, 4.0]


# Pushes that may be lost: every later call raises their error, and the other workers get it, too


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


def test_a_refused_push_is_reported_though_the_connection_breaks() -> None:
    with Job(1) as job, RawClient.of_worker(job.member(), mode="async") as client:
        client.define(1, 5, [4], bytes(16))
        client.push(2, 5, 1, bytes(8))
        assert client.receive()[0] == Ack([2])
        pull = Pull(4, [(5, 1, DENSE, 0)], False, None)
        for _ in range(2):  # the worker asks again on a new connection, because the answer may be lost
            failed = client.request(pull)
            assert isinstance(failed, Failed), failed
            assert "the push of worker 0 for key 'key' has 8 bytes" in failed.text
            client.reconnect_as(job._members[0], mode="async")
        pull.sequence = 5
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


def test_a_second_store_of_a_job_is_refused_after_the_first_was_closed() -> None:
    said = r"has closed its dist_\* store of the job at 127.0.0.1:\d+, whose servers end .* keep one store"
    with Job(1) as job:
        [kv] = job.stores()
        kv.close()
        for name in ("dist_sync", "dist_async"):
            with pytest.raises(RuntimeError, match=said):
                job.stores(name, timeout=5)
        with Job(1) as other:
            [kv] = other.stores()
            kv.init("key", torch.ones(2))
    with Job(1) as job:
        job.stores()[0].init("key", torch.ones(2))
        job._stores.clear()  # drops the store, which closes it
        gc.collect()
        with pytest.raises(RuntimeError, match=said):
            job.stores(timeout=5)

"""Tests of store calls from updaters, from several threads, and during close()."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gangline.kvstore import KVStore, create

NAMES = ["local", "device"]
LIMIT = 10.0
"""Time limit of a wait, in seconds."""


def aside(call: Callable[[], Any]) -> threading.Thread:
    """Start ``call`` in a daemon thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a call hangs"


@pytest.fixture(params=NAMES)
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    made = create(request.param)
    yield made
    ended(aside(made.close))


def pulled(kv: KVStore, key: Any) -> list[float]:
    out = torch.full((2,), 99.0)
    kv.pull(key, out)
    return [float(value) for value in out]


class Blocking:
    """Updater that adds once it is released."""

    def __init__(self) -> None:
        self.inside, self.release = threading.Event(), threading.Event()
        self.updates = 0

    def __call__(self, key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        self.inside.set()
        assert self.release.wait(LIMIT)
        stored.add_(summed)
        self.updates += 1


def closing(kv: KVStore, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Start a thread that closes the store, and return it when that has begun."""
    began = threading.Event()
    finish = kv._queue.close  # type: ignore[attr-defined]

    def close_queue() -> None:
        began.set()
        finish()

    monkeypatch.setattr(kv._queue, "close", close_queue)  # type: ignore[attr-defined]
    thread = aside(kv.close)
    assert began.wait(LIMIT)
    return thread


# -- an updater that calls its store ----------------------------------------------------------------------------------


def test_an_updater_may_pull_while_another_thread_has_pushed_async(kv: KVStore) -> None:
    kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    inside, pushed = threading.Event(), threading.Event()
    seen: list[list[float]] = []

    def update(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "a":
            inside.set()
            assert pushed.wait(LIMIT)
            seen.append(pulled(kv, "b"))
        stored.add_(summed)

    def push_async() -> None:
        assert inside.wait(LIMIT)
        work = kv.push("b", torch.full((2,), 3.0), async_op=True)
        pushed.set()
        work.wait(LIMIT)

    kv.set_updater(update)
    ended(aside(push_async), aside(lambda: kv.push("a", torch.ones(2))))
    assert seen == [[0.0, 0.0]]
    assert pulled(kv, "a") == [1.0, 1.0]
    assert pulled(kv, "b") == [3.0, 3.0]


@pytest.mark.parametrize("outer_async", [False, True])
def test_an_updater_may_push_async_and_then_pull_and_wait(kv: KVStore, outer_async: bool) -> None:
    kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    seen: list[list[float]] = []

    def update(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "a":
            kv.push("b", summed * 5, async_op=True)
            seen.append(pulled(kv, "b"))
            out = torch.zeros(2)
            kv.pull("b", out, async_op=True).wait()
            seen.append(out.tolist())
        stored.add_(summed)

    kv.set_updater(update)
    ended(aside(lambda: kv.push("a", torch.ones(2), async_op=outer_async).wait(LIMIT)))
    assert seen == [[5.0, 5.0]] * 2
    assert pulled(kv, "a") == [1.0, 1.0]


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_push", [False, True])
def test_close_refuses_other_threads_as_soon_as_it_begins_and_waits_for_what_runs(
    kv: KVStore, monkeypatch: pytest.MonkeyPatch, async_push: bool
) -> None:
    update = Blocking()
    kv.init("a", torch.zeros(2))
    kv.set_updater(update)
    pusher = aside(lambda: kv.push("a", torch.ones(2), async_op=async_push).wait(LIMIT))
    assert update.inside.wait(LIMIT)
    closer = closing(kv, monkeypatch)

    def refused() -> None:
        for async_op in (False, True):
            for call in (kv.push, kv.pull, kv.pushpull):
                with pytest.raises(RuntimeError, match="closed"):
                    call("a", torch.ones(2), async_op=async_op)
            with pytest.raises(RuntimeError, match="closed"):
                kv.init("b", torch.ones(2), async_op=async_op)

    ended(aside(refused))
    assert pusher.is_alive()
    assert closer.is_alive()
    update.release.set()
    ended(closer, pusher)
    assert update.updates == 1


@pytest.mark.parametrize(
    ("moment", "async_op"),
    [("_{}", False), ("_{}", True), ("_start", False), ("_start", True), ("run_now", False)],
)
@pytest.mark.parametrize("call", ["push", "pull", "pushpull"])
def test_an_operation_is_refused_if_the_store_closes_before_it_runs(
    kv: KVStore, monkeypatch: pytest.MonkeyPatch, moment: str, call: str, async_op: bool
) -> None:
    kv.init("a", torch.zeros(2))
    moment = moment.format(call)
    if moment != "run_now":
        kv.push("a", torch.ones(2), async_op=True).wait(LIMIT)  # starts the store's thread
    owner: Any = kv._queue if moment == "run_now" else kv  # type: ignore[attr-defined]
    go_on = getattr(owner, moment)

    def late(*arguments: Any, **options: Any) -> Any:
        ended(aside(kv.close))
        return go_on(*arguments, **options)

    monkeypatch.setattr(owner, moment, late)

    def refused() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            getattr(kv, call)("a", torch.ones(2), async_op=async_op).wait(LIMIT)

    ended(aside(refused))


# -- where values lie, and what they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, ("sgd", {"lr": 1.0, "momentum": 0.5})])
def test_a_bare_pull_into_another_device_does_not_move_the_key(kv: KVStore, optimizer: Any) -> None:
    kv.init("a", torch.zeros(2))
    if optimizer is not None:
        kv.set_optimizer(optimizer)
    kv.push("a", torch.full((2,), -3.0))
    before = pulled(kv, "a")
    assert set(before) == {3.0 if optimizer else -3.0}
    kv.pull("a", torch.empty(2, device="meta"))
    assert pulled(kv, "a") == before
    if optimizer is not None:
        kv.push("a", torch.zeros(2))
        assert pulled(kv, "a") == [4.5, 4.5]  # by the momentum that the first push left


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", "momentum_buffer"), ("adam", "exp_avg")])
def test_state_of_float64_loaded_for_a_float32_key_is_float32(kv: KVStore, optimizer: str, state: str) -> None:
    spec = (optimizer, {"lr": 0.1, "momentum": 0.9} if optimizer == "sgd" else {"lr": 0.1})
    with create(kv.type) as wide:
        wide.init("a", torch.zeros(2, dtype=torch.float64))
        wide.set_optimizer(spec)
        wide.push("a", torch.full((2,), 3.0, dtype=torch.float64))
        of_wide = wide.optimizer_state()
    assert of_wide.tensors[f'"a"/{state}'].dtype == torch.float64
    kv.init("a", torch.zeros(2))
    kv.set_optimizer(spec)
    kv.load_optimizer_state(of_wide)
    kv.push("a", torch.ones(2))
    of_key = {place: tensor for place, tensor in kv.optimizer_state().tensors.items() if not place.endswith("/step")}
    assert {tensor.dtype for tensor in of_key.values()} == {torch.float32}
    assert f'"a"/{state}' in of_key


# -- keys -------------------------------------------------------------------------------------------------------------


class ReadSlowly(dict[Any, Any]):
    """Dict that lets other threads run between reading its keys and using them."""

    def __iter__(self) -> Iterator[Any]:
        keys = list(super().__iter__())
        threading.Event().wait(1e-4)
        return iter(keys)


def test_exactly_one_of_several_threads_can_init_a_key(kv: KVStore) -> None:
    rounds, together = 100, threading.Barrier(4)
    won: list[list[int]] = [[] for _ in range(rounds)]
    refused: list[list[int]] = [[] for _ in range(rounds)]
    kv._layout = ReadSlowly()

    def init(rank: int) -> None:
        for number in range(rounds):
            together.wait(LIMIT)
            try:
                kv.init(f"w{number}", torch.full((2,), float(rank)))
            except ValueError:
                refused[number].append(rank)
            else:
                won[number].append(rank)

    ended(*[aside(lambda rank=rank: init(rank)) for rank in range(4)])  # type: ignore[misc]
    for number in range(rounds):
        assert len(won[number]) == 1
        assert len(refused[number]) == 3
        assert pulled(kv, f"w{number}") == [float(won[number][0])] * 2

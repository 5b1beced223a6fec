"""Collectives on GPU tensors: through host memory and by NCCL, on simulated and on real GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import Communicator, num_gpus, spawn
from gangline.collectives.devices import nccl_selection
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.engine.host_collectives import HostCollectives
from gangline.collectives.errors import GanglineError, MismatchError, StallError
from gangline.collectives.liveness.watchdog import Watchdog
from tests.collectives import grid
from tests.collectives.grid import COLLECTIVES
from tests.collectives.ranks import in_threads, outcomes_in_threads, same
from tests.collectives.simulated_gpus import Event, HostRank, SimulatedGpuTensor, on_simulated_gpu, simulated_gpus

COUNT = 37
LARGE = 200_003


@pytest.fixture
def machine(stream_order: None) -> Iterator[None]:
    with simulated_gpus():
        yield


def located(values: Tensor, card: int | None) -> Tensor:
    return values if card is None else on_simulated_gpu(values, card)


def values_of(tensor: Tensor) -> Tensor:
    return tensor.host() if isinstance(tensor, SimulatedGpuTensor) else tensor


def check(
    comm: Communicator,
    collective: str,
    card: int | None,
    *,
    dtype: torch.dtype = torch.float32,
    op: str = "sum",
    root: int = 0,
    count: int = COUNT,
    out: str = "",
    **options: Any,
) -> None:
    """Make a call on a GPU tensor (None: CPU tensor); check it as `grid.check`; NCCL divides before it adds."""
    op = op if collective in grid.REDUCING else "sum"
    kind, out = "rough" if op == "mean" else "exact", out or grid.outs_of(collective)[0]
    cell = grid.Cell(collective, count, dtype, op, root, out, kind=kind, **options)
    grid.check(comm, cell, place=partial(located, card=card), read=values_of)


def check_all(comm: Communicator, card: int | None) -> None:
    for number, collective in enumerate(COLLECTIVES):
        root = number % comm.size
        check(comm, collective, card, root=root)
        check(comm, collective, card, root=root, async_op=True)
        check(comm, collective, card, dtype=torch.int32, root=root, count=LARGE if number % 2 else 0)
        check(comm, collective, card, dtype=torch.int16, op="max", root=root)
        check(
            comm, collective, card, dtype=torch.bool, op="product" if collective in grid.REDUCING else "sum", root=root
        )
        check(comm, collective, card, op="mean", root=root)


# -- through the host -----------------------------------------------------------------------------------------------


def on_one_card(comm: Communicator) -> None:
    check_all(comm, 0)


def on_cards_and_the_host(comm: Communicator) -> None:
    check_all(comm, None if comm.rank == 1 else comm.rank)
    check(comm, "all_reduce", comm.rank)  # the path of the first call is kept


@pytest.mark.parametrize("run", [on_one_card, on_cards_and_the_host])
def test_ranks_without_nccl_use_host_memory(machine: None, run: Any) -> None:
    in_threads(3, run)
    assert not HostRank.calls


def in_a_process(comm: Communicator) -> None:
    with simulated_gpus():
        check_all(comm, comm.rank if comm.rank else None)
        check(comm, "all_reduce", comm.rank)
    with simulated_gpus(nccl="nothing to join processes by"):  # so that all ranks agree on the host path together
        group = comm.split(0)
        check(group, "all_reduce", comm.rank)
        check(group, "all_gather", comm.rank if comm.rank else None, async_op=True)
        group.close()


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("tcp", marks=pytest.mark.slow)])
def test_processes_use_host_memory(transport: str) -> None:
    spawn(in_a_process, 2, transport=transport, timeout=30)


def test_a_cpu_rank_that_does_not_wait_is_detected(machine: None) -> None:
    """A rank contributes to a reduce and is in another call, or has ended, when the others check on it."""

    def run(comm: Communicator) -> Tensor | None:
        values = torch.arange(LARGE, dtype=torch.float32) * 3 + comm.rank
        got = comm.reduce(located(values, None if comm.rank else 0), root=0)
        return None if got is None else values_of(got)

    total, _ = in_threads(2, run)
    assert torch.equal(total, torch.arange(LARGE, dtype=torch.float32) * 6 + 1)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_gpus_that_nccl_refuses_use_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: tuple[int, ...]
) -> None:
    """NCCL takes two parts of one GPU (MIG) for the same GPU; all ranks use the host then, also those that it takes."""
    make = HostRank.for_rank
    made: list[HostRank] = []

    def refuse(device: torch.device, unique_id: bytes, rank: int, size: int) -> HostRank:
        if rank in failing:
            raise RuntimeError("Duplicate GPU detected")
        made.append(make(device, unique_id, rank, size))
        return made[-1]

    def run(comm: Communicator) -> None:
        for _ in range(2):
            check(comm, "all_reduce", comm.rank)
        assert comm._gpus.nccl is None

    monkeypatch.setattr(HostRank, "for_rank", refuse)
    monkeypatch.setattr(nccl_selection, "_warned", set())
    in_threads(2, run)
    text = (
        f"tensors on GPUs go through host memory, not by NCCL: rank {failing[0]}: RuntimeError: Duplicate GPU detected"
    )
    assert [record.getMessage() for record in caplog.records] == [text]
    assert len(made) == 2 - len(failing)
    assert all(one.is_aborted for one in made)


def test_missing_requirements_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(comm: Communicator) -> None:
        check(comm, "all_reduce", comm.rank)
        check(comm, "all_gather", comm.rank)

    with simulated_gpus(nccl="a card index of rank and file"):
        in_threads(2, run)
        in_threads(2, run)
    said = [record.getMessage() for record in caplog.records]
    text = "tensors on GPUs go through host memory, not by NCCL: rank 0: a card index of rank and file"
    assert said == [text]


@pytest.mark.parametrize("cards", [(0, 1, 2), (0, 0, 0), (None, 0, 1), (None, None, None)])
def test_several_tensors_with_a_root_each(machine: None, cards: tuple[int | None, ...]) -> None:
    """By NCCL, through the host, and where NCCL lacks a tensor's dtype or it is not contiguous."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int16)

    def run(comm: Communicator) -> None:
        for kinds, step in ((dtypes[:1] * 4, 1), (dtypes[:3], 1), (dtypes, 1), (dtypes[:3], 2)):
            whole = [located(torch.full((9,), comm.rank + 1, dtype=dtype), cards[comm.rank]) for dtype in kinds]
            tensors, roots = [one[::step] for one in whole], [number % comm.size for number in range(len(kinds))]
            comm.reduce_each(tensors, roots)
            for tensor, root in zip(tensors, roots, strict=True):
                want = 6.0 if root == comm.rank else comm.rank + 1
                assert values_of(tensor).tolist() == [want] * tensor.numel()
            comm.broadcast_each(tensors, roots)
            assert {value for tensor in tensors for value in values_of(tensor).tolist()} == {6.0}
            if step == 2:
                assert {value for one in whole for value in values_of(one)[1::2].tolist()} == {comm.rank + 1}
        comm.broadcast_each([], [])
        with pytest.raises(ValueError, match="shorter"):
            comm.broadcast_each([located(torch.ones(2), cards[comm.rank])], [])

    in_threads(3, run)
    assert bool(HostRank.calls) == (cards == (0, 1, 2))


def test_non_contiguous_tensors_and_outs(machine: None) -> None:
    def run(comm: Communicator) -> None:
        for card in (0, comm.rank):  # through the host on the first communicator, by NCCL on the second
            with comm.split(0) as group:
                for out in ("none", "out"):
                    check(group, "all_reduce", card, count=12, out=out, memory="strided")

    in_threads(2, run)
    assert HostRank.calls


def test_tensors_of_a_call_must_be_on_one_device(machine: None) -> None:
    def run(comm: Communicator) -> None:
        for out in (torch.zeros(3), on_simulated_gpu(torch.zeros(3), 1)):
            with pytest.raises(
                ValueError, match=r"out is on (cpu|cuda:1); expected cuda:0, as the call's other tensor"
            ):
                comm.all_reduce(on_simulated_gpu(torch.ones(3), 0), out=out)
        check(comm, "all_reduce", 0)

    in_threads(2, run)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("cards_of", [(0, 0), (0, 1)])
def test_calls_are_ordered_by_the_callers_own_stream(machine: None, cards_of: tuple[int, int], async_op: bool) -> None:
    """Tensors are written on the current stream before the call, and read on it afterwards."""

    def run(comm: Communicator) -> None:
        card = torch.device("cuda", cards_of[comm.rank])
        with torch.cuda.stream(torch.cuda.Stream(card)):
            for collective in COLLECTIVES:
                check(comm, collective, card.index, async_op=async_op)

    in_threads(2, run)


@pytest.mark.parametrize("async_op", [False, True])
def test_messages_between_gpus_and_the_host(machine: None, async_op: bool) -> None:
    def run(comm: Communicator) -> None:
        for number, cards_of in enumerate([(0, 1), (0, None), (None, 0)]):
            card, tag = cards_of[comm.rank], 5 * number
            values = torch.arange(LARGE, dtype=torch.float32) + tag
            if comm.rank == 0:
                tensor = located(values, card)
                work = comm.send(tensor, 1, tag, async_op=async_op)
                assert (work is None) != async_op
                if isinstance(tensor, SimulatedGpuTensor):
                    tensor.mul_(0)  # after the sent messages
            else:
                tensor = located(torch.zeros(LARGE), card)
                got = comm.recv(tensor, 0, tag, async_op=async_op)
            if async_op:
                (work if comm.rank == 0 else got).wait()
            if comm.rank == 1:
                same(values_of(tensor), values, f"message {tag}")
            comm.barrier()

    in_threads(2, run)


# -- by NCCL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream_order",
    ["late", "early", "random 1", *(pytest.param(f"random {seed}", marks=pytest.mark.slow) for seed in (2, 3))],
    indirect=True,
)
def test_ranks_with_distinct_gpus_use_nccl(machine: None) -> None:
    in_threads(3, lambda comm: check_all(comm, comm.rank))
    names = {name for name, _ in HostRank.calls}
    assert names == {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"}
    assert len([name for name, _ in HostRank.calls if name == "all_reduce"]) == 3 * 4  # no int16 and no empty tensors


def test_one_call_may_use_the_host_or_another_gpu_and_decides_nothing_for_later_ones(machine: None) -> None:
    def run(comm: Communicator) -> None:
        check(comm, "all_reduce", None)
        check(comm, "gather", None, root=1)
        check(comm, "all_reduce", comm.rank)
        for card in (None, 2):
            check(comm, "all_reduce", card if comm.rank else 0)
            check(comm, "broadcast", card if comm.rank else 0, count=LARGE)
        check(comm, "all_reduce", None)
        check(comm, "all_reduce", comm.rank)

    in_threads(2, run)
    assert [name for name, _ in HostRank.calls] == ["all_reduce"] * 4


@pytest.mark.parametrize("is_first", [True, False])
def test_ranks_at_different_calls_get_an_error(machine: None, is_first: bool) -> None:
    def run(comm: Communicator) -> None:
        if not is_first:
            check(comm, "all_reduce", comm.rank)
        comm.all_reduce(on_simulated_gpu(torch.ones(3 + comm.rank), comm.rank))

    errors = outcomes_in_threads(2, run)
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert str(errors[0]) == str(errors[1])
    for count, rank in ((3, 0), (4, 1)):
        assert f"rank {rank}: all_reduce({count} x float32, sum)" in str(errors[0])


def test_a_rank_that_fails_ends_the_others_kernels(machine: None) -> None:
    """One rank never launches its part of the call, so the other's would wait forever."""
    HostRank.fails_at = {1: "all_gather"}

    def run(comm: Communicator) -> str:
        check(comm, "all_reduce", comm.rank)

        def gather_twice() -> None:
            out = comm.all_gather(on_simulated_gpu(torch.ones(3), comm.rank))
            out.host()
            comm.all_gather(on_simulated_gpu(torch.ones(3), comm.rank))

        with pytest.raises(RuntimeError) as raised:
            gather_twice()
        return str(raised.value)

    first, second = in_threads(2, run)
    assert first == "rank 1 left all_gather(3 x float32) by RuntimeError: NCCL has had enough of all_gather"
    assert second == "NCCL has had enough of all_gather"


def _reduce_until(comm: Communicator, error: type[Exception]) -> str:
    def reduce_on_and_on() -> None:
        while True:
            tensor = on_simulated_gpu(torch.ones(3), comm.rank)
            comm.all_reduce(tensor)
            tensor.host()

    with pytest.raises(error) as raised:
        reduce_on_and_on()
    return str(raised.value)


def test_an_abort_ends_running_calls_on_a_gpu(machine: None) -> None:
    def run(comm: Communicator) -> str:
        check(comm, "all_reduce", comm.rank)
        if comm.rank == 0:
            comm.abort(StallError("that was enough"))
        return _reduce_until(comm, StallError)

    assert in_threads(2, run) == ["that was enough"] * 2


def test_a_rank_held_up_after_the_agreement_is_not_taken_to_be_in_another_call(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has agreed on NCCL and is held; rank 0 waits for it in the exchange that follows."""
    exchange, check_wait = HostCollectives.exchange, Watchdog.check
    held, may_go_on = threading.Event(), threading.Event()
    checks: list[None] = []

    def exchange_later(host: HostCollectives, blob: bytes) -> list[bytes]:
        if host._rank == 1 and not held.is_set():
            held.set()
            assert may_go_on.wait(30)
        return exchange(host, blob)

    def noted(watchdog: Watchdog, missing: Iterable[int]) -> None:
        failed = True
        try:
            check_wait(watchdog, missing)
            failed = False
        finally:
            if held.is_set() and watchdog._membership.rank == 0:
                checks.append(None)
                if failed or len(checks) == 5:
                    may_go_on.set()

    monkeypatch.setattr(HostCollectives, "exchange", exchange_later)
    monkeypatch.setattr(Watchdog, "check", noted)
    in_threads(2, lambda comm: check(comm, "all_reduce", comm.rank))
    assert HostRank.calls


def test_an_error_of_a_gpu_that_the_watching_thread_finds_ends_all_ranks(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Event.query

    def fail(event: Event) -> bool:
        if threading.current_thread().name == "gangline-nccl" and event._stream.device.index == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return query(event)

    monkeypatch.setattr(Event, "query", fail)
    texts = in_threads(2, lambda comm: _reduce_until(comm, GanglineError))
    text = (
        "rank 1 left all_reduce(3 x float32, sum) by RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert texts == [text] * 2


@pytest.mark.parametrize("call_ends", [True, False])
def test_an_abort_waits_for_the_thread_inside_nccl(
    machine: None, monkeypatch: pytest.MonkeyPatch, call_ends: bool
) -> None:
    """NCCL forbids an abort beside a call of the same communicator, but a call that never ends must be aborted."""
    monkeypatch.setattr(nccl_selection, "NCCL_CALL_SECONDS", 30 if call_ends else 0.05)
    call, abort = HostRank.call, HostRank.abort
    inside, is_aborted = threading.Event(), threading.Event()
    order: list[str] = []

    def stay_in_gather(binding: HostRank, name: str, *arguments: int) -> None:
        if name == "all_gather" and binding._rank == 0:
            inside.set()
            is_aborted.wait(0.3 if call_ends else 30)  # time enough for an abort that does not wait
            order.append("left")
        call(binding, name, *arguments)

    def noted_abort(binding: HostRank) -> None:
        if binding._rank == 0:
            order.append("aborted")
            is_aborted.set()
        abort(binding)

    monkeypatch.setattr(HostRank, "call", stay_in_gather)
    monkeypatch.setattr(HostRank, "abort", noted_abort)

    def run(comm: Communicator) -> None:
        check(comm, "all_reduce", comm.rank)
        if comm.rank == 0:
            aborting = threading.Thread(target=lambda: inside.wait(30) and comm.abort(StallError("that was enough")))
            aborting.start()
        tensor = on_simulated_gpu(torch.ones(3), comm.rank)
        with suppress(StallError):  # the call may end before the abort
            comm.all_gather(tensor)
        assert _reduce_until(comm, StallError) == "that was enough"
        if comm.rank == 0:
            aborting.join(30)

    in_threads(2, run)
    assert order == (["left", "aborted"] if call_ends else ["aborted", "left"])


# -- on GPUs --------------------------------------------------------------------------------------------------------


def check_on_gpu(comm: Communicator) -> None:
    for collective, dtype, async_op in product(COLLECTIVES, (torch.float32, torch.int16), (False, True)):
        cell = grid.Cell(collective, LARGE, dtype, out=grid.outs_of(collective)[0], async_op=async_op)
        grid.check(comm, cell, place=Tensor.cuda, read=Tensor.cpu)
    other = 1 - comm.rank
    if comm.size == 2:
        received = torch.zeros(LARGE, device="cuda")
        work = comm.send(torch.full((LARGE,), 7.0 + comm.rank, device="cuda"), other, async_op=True)
        comm.recv(received, other)
        work.wait()
        assert torch.equal(received.cpu(), torch.full((LARGE,), 7.0 + other))


@pytest.mark.gpu
@pytest.mark.parametrize("binding", nccl_bindings.BINDINGS)
def test_one_rank_with_nccl(binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> None:
        check_on_gpu(comm)
        assert comm._gpus.nccl is not None

    if not num_gpus():
        pytest.skip("there is no GPU")
    lack = nccl_bindings.unavailable_reason(binding)
    if lack:
        pytest.skip(lack)
    monkeypatch.setenv("GANGLINE_NCCL_BINDING", binding)
    in_threads(1, run)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu() -> None:
    if not num_gpus():
        pytest.skip("there is no GPU")
    spawn(check_on_gpu, 2, timeout=60)

"""Every call, first in a mode of torch and then outside of it: values are right, and what the first one keeps, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gangline
import gangline.horovod.torch as hvd
from gangline.collectives.communicator import Communicator
from gangline.kvstore import KVStore, Trainer, create
from gangline.kvstore.allreduce.store import AllReduceStore
from tests.collectives import grid
from tests.collectives.grid import COLLECTIVES, Cell, check, outs_of
from tests.collectives.processes import Processes, Rank, join_group
from tests.collectives.ranks import in_ranks
from tests.integrations.test_horovod import played
from tests.kvstore.parameter_server.processes import run_job

Call = Callable[[], Any]
COUNTS = (5, 9_001, 300_007)  # elements: within a slot; of a message, in a buffer and in the sender's memory
CPU = torch.device("cpu")


def plainly(call: Call) -> Any:
    return call()


@contextmanager
def _default(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def _in_context(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        with make():
            return call()

    return run


def _transformed(transform: Callable[..., Any], given: Tensor) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        results: list[Any] = []
        transform(lambda x: (results.append(call()), x)[1])(given)
        return torch.func.debug_unwrap(results[0]) if isinstance(results[0], Tensor) else results[0]

    return run


CONTEXTS = {
    "inference": _in_context(torch.inference_mode),
    "no_grad": _in_context(torch.no_grad),
    "device": _in_context(partial(_default, torch.set_default_device, "meta", None)),
    "float64": _in_context(partial(_default, torch.set_default_dtype, torch.float64, torch.float32)),
    "bfloat16": _in_context(partial(_default, torch.set_default_dtype, torch.bfloat16, torch.float32)),
    "autocast": _in_context(partial(torch.autocast, "cpu", torch.bfloat16)),
}
TRANSFORMS = {
    "grad": _transformed(torch.func.grad, torch.zeros(())),
    "vmap": _transformed(torch.func.vmap, torch.zeros(2)),
}
MODES = {**CONTEXTS, **TRANSFORMS}
"""Functions that make a call in a mode of torch."""


def _each(modes: dict[str, Any], *fast: str) -> Any:
    rows = [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in modes]
    return pytest.mark.parametrize("mode", rows)


def inside_then_outside(mode: str, call: Call) -> None:
    for run in (MODES[mode], plainly, MODES[mode]):
        run(call)


def full(value: float, count: int = 3) -> Tensor:
    return torch.full((count,), float(value), device=CPU, dtype=torch.float32)


def _communicator(comm: Communicator, mode: str) -> None:
    for count in COUNTS:
        for collective in (*COLLECTIVES, "all_to_all_uneven", "send_recv"):
            cell = Cell(collective, count, out=outs_of(collective)[0])
            if mode == "inference":  # the call's tensors are made in it, too
                inside_then_outside(mode, partial(check, comm, cell))
            for run in (MODES[mode], plainly) if mode != "inference" else ():
                check(comm, cell, mode, make=lambda *call, run=run: run(partial(grid.call, *call)))  # type: ignore[misc]
    inside_then_outside(mode, lambda: comm.split(0).close())  # type: ignore[union-attr]
    inside_then_outside(mode, comm.barrier)


@pytest.mark.parametrize("mode", ["inference", "grad"])
def test_a_communicator(mode: str) -> None:
    in_ranks("shared_memory", 2, _communicator, mode)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "tcp"])
@pytest.mark.parametrize("mode", MODES)
def test_a_communicator_in_each_mode(transport: str, mode: str) -> None:
    if transport == "in_process" and mode in ("float64", "bfloat16"):
        pytest.skip("the default dtype is one for all threads")
    in_ranks(transport, 2, _communicator, mode)


def _batched(comm: Communicator) -> None:
    rows, other = torch.ones(2, 3), 1 - comm.rank
    for call in (comm.all_reduce, comm.all_gather, partial(comm.send, to=other), partial(comm.recv, source=other)):
        with pytest.raises(TypeError, match=r"a value for each sample of torch\.vmap; expected one that does not"):
            torch.func.vmap(call)(rows)
    assert comm.all_reduce(rows).unique().tolist() == [2.0]  # type: ignore[union-attr]


def test_a_batch_of_vmap_is_refused_and_the_communicator_goes_on() -> None:
    in_ranks("shared_memory", 2, _batched)


def _group(rank: Rank, path: str, mode: str) -> None:
    join_group(rank, path)
    own, other = rank.rank, 1 - rank.rank

    def collectives(count: int, *, async_op: bool) -> None:
        values, outs = full(own, count), [full(0, count), full(0, count)]
        both = full(0, 2 * count)
        for call, got, want in (
            (partial(dist.all_reduce, values), values, 1.0),
            (partial(dist.broadcast, values, 0), values, 1.0),
            (partial(dist.all_gather, outs, values), outs[other], 1.0),
            (partial(dist.all_gather_into_tensor, both, values), both, 1.0),
            (partial(dist.reduce_scatter_tensor, values, both), values, 2.0),
            (partial(dist.all_to_all, outs, [values, values]), outs[other], 2.0),
            (partial(dist.all_to_all_single, both, full(1, 2 * count)), both, 1.0),
            (partial(dist.reduce, values, 0), values, 4.0 if own == 0 else 2.0),
        ):
            work = call(async_op=async_op)
            if work is not None:
                work.wait()
            got = torch.func.debug_unwrap(got)
            assert [got.min().item(), got.max().item()] == [want, want], (call.func, count, async_op)

    def messages(count: int) -> None:
        values, received = full(own, count), [full(9, count), full(9, count)]
        calls = [(dist.isend, values, peer) for peer in (own, other)]
        calls += [(dist.irecv, received[peer], peer) for peer in (own, other)]
        for work in dist.batch_isend_irecv([dist.P2POp(*call) for call in calls]):
            work.wait()
        assert [torch.func.debug_unwrap(one).max().item() for one in received] == [0.0, 1.0]

    for count in COUNTS:
        inside_then_outside(mode, partial(messages, count))
        for async_op in (False, True):
            inside_then_outside(mode, partial(collectives, count, async_op=async_op))
    if mode in CONTEXTS:  # torch's functions of autograd refuse to be transformed
        rows, layer = full(own, own + 1)[:, None], gangline.convert_sync_batchnorm(nn.BatchNorm1d(1))
        inside_then_outside(mode, lambda: gathered.append(gangline.gather_rows(rows).flatten().tolist()))
        inside_then_outside(mode, lambda: layer(rows))
        assert layer.running_mean.item() == pytest.approx((1 - 0.9**3) * 2 / 3)
        assert gathered == [[0.0, 1.0, 1.0]] * 3
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        loader = MODES[mode](lambda: gangline.balance(model, DataLoader([*range(8)], 2), loads=[3, 1]))
        batches = iter(loader)
        first = plainly if mode == "device" else MODES[mode]  # where a DataLoader of torch cannot draw its seed
        parts = [run(partial(next, batches)).tolist() for run in (first, plainly)]
        assert parts == ([[0, 1, 2], [4, 5, 6]] if own == 0 else [[3], [7]])
    rank.tell("ended")
    dist.destroy_process_group()


gathered: list[list[float]] = []


@_each(MODES, "inference", "grad")
def test_a_process_group(mode: str, tmp_path: Path) -> None:
    with Processes(_group, 2, f"{tmp_path}/group", mode) as ranks:
        assert ranks.all_heard() == ["ended"] * 2


def _verbs(store: KVStore, mode: str, path: str) -> None:
    """Call the verbs that take tensors, with all kinds of sums that a store keeps."""
    run, workers, keys = MODES[mode], store.num_workers, ["a", "b", "c"]
    run(lambda: store.init(keys, [full(0)] * 3))
    sgd = {"learning_rate": 1.0, "momentum": 0.5}

    def push_pull() -> None:
        out = full(0)
        store.push("a", full(store.rank + 1))
        store.pull("a", out)
        assert out.isfinite().all()
        store.pushpull("b", full(1), out)
        assert out.isfinite().all()

    def sums() -> None:
        out = full(0)
        for async_op in (False, True):
            store.push("a", full(1), async_op=async_op).wait()
            store.pull("a", out, async_op=async_op).wait()
            assert out.tolist() == [float(workers)] * 3
            store.pushpull("a", full(1), out, async_op=async_op).wait()
            assert out.tolist() == [float(workers)] * 3
            store.push_weighted("b", full(2), 1.0, async_op=async_op).wait()
            store.pull("b", out)
            assert out.tolist() == [2.0] * 3

    def load() -> None:
        file = Path(f"{path}-{store.type}-{store.rank}")
        store.save_optimizer_states(file)
        store.load_optimizer_states(file)
        store.load_compression_residuals(store.compression_residuals())

    inside_then_outside(mode, sums)
    run(lambda: store.set_optimizer(("sgd", sgd)))
    inside_then_outside(mode, push_pull)
    run(lambda: store.set_gradient_compression({"type": "2bit", "threshold": 0.5}))
    inside_then_outside(mode, push_pull)
    if not store.type.startswith("dist"):
        run(load)
        push_pull()
    store.close()


def _allreduce(comm: Communicator, mode: str, path: str) -> None:
    _verbs(AllReduceStore(communicator=comm), mode, path)


def _dist(mode: str, path: str) -> None:
    _verbs(create("dist_sync"), mode, path)


@_each(CONTEXTS, "inference")
def test_stores(mode: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/states"
    _verbs(create("local"), mode, path)
    _verbs(create("device"), mode, path)
    in_ranks("shared_memory", 2, _allreduce, mode, path)
    run_job(_dist, 2, 1, mode, path)


OPTIMIZERS = ("adam", "adagrad", "adamax", "nadam", "radam", "adafactor", "asgd", "rprop")


@_each(CONTEXTS, "inference")
def test_every_optimizer_of_a_store_is_set_in_a_mode(mode: str) -> None:
    for name in OPTIMIZERS:
        weights = {}
        for run in (MODES[mode], plainly):
            with create("local") as store:
                store.init("w", full(1))
                run(partial(store.set_optimizer, (name, {"lr": 0.1})))
                run(partial(store.push, "w", full(1)))
                store.push("w", full(2))
                store.pull("w", out := full(0))
                weights[run] = out.tolist()
        assert weights[MODES[mode]] == pytest.approx(weights[plainly], rel=1e-3), name  # torch rounds ASGD's rate


def _trained(run: Callable[[Call], Any], way: str, store: KVStore, fused: bool) -> list[Tensor]:
    """Return weights after two steps by an optimizer that is made and used in a mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=fused))
    if way == "trainer":
        trainer = run(lambda: Trainer(model.parameters(), "adam", {"learning_rate": 0.1}, store))
        step = partial(trainer.step, 1)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shard = way if way in ("optimizer", "weights") else None
        trainer = run(lambda: gangline.DistributedOptimizer(plain, store, shard=shard, network=model))
        step = trainer.step
    for run_step in (run, plainly):
        trainer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        run_step(step)
    weights = trainer.model_state_dict().values() if way == "weights" else [one.detach() for one in model.parameters()]
    store.close()
    return list(weights)


def _optimizers(comm: Communicator | None, mode: str) -> None:
    ways = ["trainer"] if comm is None else ["trainer", "none", "optimizer", "weights"]
    for way, fused in product(ways, (True, False)):
        in_mode, plain = (
            _trained(
                run, way, create("device") if comm is None else AllReduceStore(communicator=comm.split(0)), fused=fused
            )
            for run in (MODES[mode], plainly)
        )
        torch.testing.assert_close(in_mode, plain, rtol=0, atol=0)


@_each(CONTEXTS, "inference")
def test_optimizers(mode: str) -> None:
    _optimizers(None, mode)
    in_ranks("shared_memory", 2, _optimizers, mode)


@_each({name: CONTEXTS[name] for name in CONTEXTS if name != "autocast"}, "inference")  # its outputs are bfloat16
def test_evaluation(mode: str) -> None:
    data = torch.arange(12.0).view(6, 2) / 7
    dataset, label = TensorDataset(data, data.sum(1, keepdim=True)), data.sum(1, keepdim=True)
    network = nn.Linear(2, 1)
    with torch.no_grad():
        outputs = network(data)
        error = nn.functional.mse_loss(outputs, label).item()
    with gangline.Module(network, nn.MSELoss(), [gangline.cpu(0), gangline.cpu(1)]) as module:
        kept = [gangline.create_metric(one) for one in ("mse", torchmetrics.MeanSquaredError())]

        def evaluate() -> None:
            assert module.score(dataset, "mse", batch_size=2) == [("mse", pytest.approx(error))]
            predicted = module.predict(dataset, batch_size=4)
            assert (predicted.device, predicted.dtype) == (CPU, torch.float32)
            module.forward(data, label, is_train=False)
            for metric in kept if mode != "device" else kept[:1]:  # torchmetrics' sums are on the default device
                module.update_metric(metric, label)
                assert metric.get_name_value()[0][1] == pytest.approx(error, 0.01)  # and of the default dtype

        inside_then_outside(mode, evaluate)
        torch.testing.assert_close(module.predict(dataset, batch_size=4), outputs)


def _horovod(mode: str, rank: int, _: int) -> None:
    def calls() -> None:
        assert hvd.allreduce(full(rank)).tolist() == [0.5] * 3
        assert hvd.allgather(full(rank, rank + 1)).tolist() == [0.0, 1.0, 1.0]
        assert hvd.broadcast(full(rank), 1).tolist() == [1.0] * 3
        assert hvd.reducescatter(full(rank, 4), op=hvd.Sum).tolist() == [1.0] * 2
        assert hvd.alltoall(full(rank, 2)).tolist() == [0.0, 1.0]
        assert hvd.allgather_object(rank) == [0, 1]

    inside_then_outside(mode, calls)


@_each(CONTEXTS, "inference")
def test_horovod(mode: str) -> None:
    played(2, partial(_horovod, mode))

"""The `allreduce` store with values on GPUs: where they are summed and updated, and what is copied to the host."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline import Communicator, Context, Module, cpu, gpu, num_gpus, spawn
from gangline.collectives.devices import device_group
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.engine.host_collectives import HostCollectives
from gangline.kvstore import RowSparse, create
from gangline.kvstore.allreduce.store import AllReduceStore
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.interface import KVStore
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import HostRank, counted, on_simulated_gpu, simulated_gpus

KEYS = [f"key {number}" for number in range(7)]
SHAPE = (5, 3)
NO_NCCL = "nothing to reduce by"


def fused(kv: KVStore, located: Callable[[Tensor], Tensor]) -> Bucket:
    tensors = [(key, torch.zeros(SHAPE)) for key in KEYS]
    (bucket,) = plan(tensors, 1 << 20)
    kv.init(KEYS, [located(tensor) for _, tensor in tensors])
    kv.fuse(bucket)
    return bucket


def pulled(kv: KVStore, keys: list[str]) -> list[Tensor]:
    outs = [torch.empty(SHAPE) for _ in keys]
    kv.pull(keys, outs)
    return outs


def on_card(comm: Communicator) -> Callable[[Tensor], Tensor]:
    return lambda tensor: on_simulated_gpu(tensor, comm.rank)


def devices(kv: KVStore) -> set[str]:
    assert isinstance(kv, AllReduceStore)
    held = [entry.stored for entry in kv._entries.values()]
    held += [flat.sum for flat in kv._flats.values() if flat.sum is not None]
    for optimizer in kv._optimizers.values():
        states = [one.values() for part in optimizer._parts.values() for one in part.optimizer.state.values()]
        held += [value for of_key in states for value in of_key if isinstance(value, Tensor) and value.dim()]
    return {tensor.device.type for tensor in held}


# On simulated GPUs


def _trained(comm: Communicator, weighted: bool) -> Any:
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        kv.set_optimizer(("sgd", {"learning_rate": 0.5, "momentum": 0.5}))
        calls = len(HostRank.calls)
        with counted(comm.rank) as copies:
            for step in (1.0, 2.0):
                flat = on_simulated_gpu(torch.full((bucket.numel,), step * (comm.rank + 1)), comm.rank)
                weight = comm.rank + 1.0 if weighted else None
                kv.push_bucket(bucket, [flat], weight=weight)
                assert flat.host().unique().tolist() == [step * (comm.rank + 1)]
            out = on_simulated_gpu(torch.zeros(bucket.numel), comm.rank)
            kv.pull_bucket(bucket, [out])
        calls = len(HostRank.calls) - calls
        assert devices(kv) == {"cuda"}
        return copies.to_host, copies.to_gpu, bucket.numel, calls, bucket.views(out.host())[KEYS[-1]].unique().tolist()


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("nccl", ["", NO_NCCL])
def test_a_bucket_is_one_reduction_by_nccl_or_one_copy_to_the_host_and_back(
    nccl: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_REPLICA_CHECK", "0")  # a step that compares replicas has one more copy
    total = 5 / 3 if weighted else 3.0  # of the first step
    with simulated_gpus(nccl=nccl):
        for to_host, to_gpu, numel, calls, values in in_threads(2, _trained, weighted):
            assert to_host == to_gpu == ([numel] * 2 if nccl else [])
            assert not (nccl and calls)
            assert values == pytest.approx([-0.5 * (total + 2 * total + 0.5 * total)])
        names = [name for name, _ in HostRank.calls if name == "all_reduce"]
        assert len(names) == (0 if nccl else 2 * 2)  # steps and ranks


def _exchanges_of_a_bucket(comm: Communicator, count: Callable[[], int]) -> list[int]:
    """Return the exchanges of a push: the header, which also says whether the tensor is on the GPU of NCCL."""
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        flat = on_simulated_gpu(torch.ones(bucket.numel), comm.rank)
        kv.push_bucket(bucket, [flat])
        before = count()
        kv.push_bucket(bucket, [flat])
        return [count() - before]


def _exchanges_of_a_module(comm: Communicator, count: Callable[[], int]) -> list[int]:
    """Return the exchanges of six weights: 7 for each call if they were sent one by one."""
    with create("allreduce", communicator=comm) as kv:
        tensors = [on_simulated_gpu(torch.full((4,), comm.rank + 1.0), comm.rank) for _ in range(6)]
        owners = [number % 2 for number in range(6)]
        kv.copy_from_owners("weights", tensors, owners)()
        assert [tensor.host().tolist() for tensor in tensors] == [[owner + 1.0] * 4 for owner in owners]
        before = count()
        kv.copy_from_owners("weights", tensors, owners)()
        copied = count()
        kv.reduce_to_owners("weights", tensors, owners).wait()
        return [copied - before, count() - copied]


def _counted(comm: Communicator, worker: Callable[..., list[int]], counts: Counter[int]) -> list[int]:
    return worker(comm, lambda: counts[comm.rank])


@pytest.mark.parametrize("worker", [_exchanges_of_a_bucket, _exchanges_of_a_module])
def test_with_nccl_a_call_costs_one_exchange_on_the_host(
    worker: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[int] = Counter()

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(host: HostCollectives, *arguments: Any) -> Any:
            counts[host._rank] += 1
            return method(host, *arguments)

        return counted

    for name in ("run", "gather_flags"):
        monkeypatch.setattr(HostCollectives, name, counting(getattr(HostCollectives, name)))
    with simulated_gpus():
        first, second = in_threads(2, _counted, worker, counts)
    assert first == second
    assert set(first) == {1}


def _moves_to_the_host(comm: Communicator) -> list[float]:
    with create("allreduce", communicator=comm) as kv:
        sums = []
        for is_on_host in (False, False, True, False):
            place = (lambda value: value) if is_on_host and comm.rank else on_card(comm)
            tensors = [place(torch.full((4,), comm.rank + 1.0)) for _ in range(2)]
            kv.copy_from_owners("weights", tensors, [0, 1])()
            kv.reduce_to_owners("weights", tensors, [0, 0]).wait()
            sums.append([float((one.host() if one.is_cuda else one)[0]) for one in tensors])
        return sums


def test_a_rank_whose_tensors_are_on_the_host_is_noticed_by_the_header() -> None:
    with simulated_gpus():
        assert in_threads(2, _moves_to_the_host) == [[[2.0, 4.0]] * 4, [[1.0, 2.0]] * 4]


def _of_owners(comm: Communicator) -> tuple[list[float], list[float]]:
    card = on_card(comm)
    weight, gradient = card(torch.ones(4)), card(torch.zeros(4))
    with create("allreduce", communicator=comm) as kv:
        assert isinstance(kv, AllReduceStore)
        kv.broadcast(["weight"], [weight], [weight])
        weight.host()
        if comm.rank == 0:
            weight.add_(9.0)  # kernels of an optimizer, which are late
        kv.copy_from_owners("weights", [weight], [0])
        gradient.add_(comm.rank + 1.0)
        kv.reduce_to_owners("weights", [gradient], [1]).wait()
        return weight.host().tolist(), gradient.host().tolist()


@pytest.mark.usefixtures("stream_order")
def test_owners_send_and_sum_what_late_kernels_have_written() -> None:
    with simulated_gpus():
        (first, _), (second, total) = in_threads(2, _of_owners)
    assert first == second == [10.0] * 4
    assert total == [3.0] * 4


def _compressed(comm: Communicator) -> Any:
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        kv.set_gradient_compression({"type": "fp16"})
        flat = on_simulated_gpu(torch.full((bucket.numel,), comm.rank + 1.0), comm.rank)
        with counted(comm.rank) as copies:
            kv.push_bucket(bucket, [flat])
        return copies.to_host, torch.stack(pulled(kv, KEYS)).unique().tolist()


@pytest.mark.usefixtures("stream_order")
def test_the_payloads_of_a_bucket_are_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "_groups", {})
    monkeypatch.setenv("GANGLINE_DEVICE_GROUP", "copies")
    with simulated_gpus(nccl=NO_NCCL):
        for sizes, values in in_threads(2, _compressed):
            assert sizes == [len(KEYS) * math.prod(SHAPE) * 2]  # bytes
            assert values == [3.0]


def _some_keys(comm: Communicator) -> Any:
    """The mean of a key that a rank leaves out is that of the others."""
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        flat = on_simulated_gpu(torch.full((bucket.numel,), comm.rank + 1.0), comm.rank)
        kv.push_bucket(bucket, [flat], KEYS[comm.rank : comm.rank + 2], weight=1.0)
        return [out.unique().tolist() for out in pulled(kv, KEYS)]


def _after_join(comm: Communicator) -> Any:
    """A joined rank takes part with its GPU."""
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        if comm.rank:
            kv.join()
        else:
            flat = on_simulated_gpu(torch.full((bucket.numel,), 4.0), comm.rank)
            kv.push_bucket(bucket, [flat], weight=3.0)
            kv.join()
        return torch.stack(pulled(kv, KEYS)).unique().tolist()


def _mixed(comm: Communicator) -> Any:
    located = on_card(comm) if comm.rank else lambda tensor: tensor
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, located)
        kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
        with counted(comm.rank) as copies:
            kv.push_bucket(bucket, [located(torch.full((bucket.numel,), comm.rank + 1.0))])
        return devices(kv), copies.to_host, bucket.numel, torch.stack(pulled(kv, KEYS)).unique().tolist()


@pytest.mark.usefixtures("stream_order")
def test_if_a_rank_holds_a_key_on_the_host_all_ranks_do() -> None:
    with simulated_gpus():
        first, second = in_threads(2, _mixed)
        assert first == ({"cpu"}, [], second[2], [-3.0])
        assert second == ({"cpu"}, [second[2]], second[2], [-3.0])


def _ordered(comm: Communicator) -> Any:
    """The caller's kernels before a push and after a pull run late, and see each other's values all the same."""
    with create("allreduce", communicator=comm) as kv:
        kv.init("a", on_simulated_gpu(torch.zeros(SHAPE), comm.rank))
        value, out = (on_simulated_gpu(torch.ones(SHAPE), comm.rank) for _ in range(2))
        value.mul_(comm.rank + 2)
        work = kv.push("a", value, async_op=True)
        kv.pull("a", out, async_op=True).wait()
        work.wait()
        out.mul_(10)
        return out.host().unique().tolist()


def _dropped(comm: Communicator) -> Any:
    """A value that the caller drops keeps its memory until it is pushed."""
    with create("allreduce", communicator=comm) as kv:
        kv.init("a", on_simulated_gpu(torch.zeros(SHAPE), comm.rank))
        work = kv.push("a", on_simulated_gpu(torch.full(SHAPE, comm.rank + 1.0), comm.rank), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        on_simulated_gpu(torch.zeros(SHAPE), comm.rank).host()  # later work of the stream that owned the memory
        work.wait()
        return torch.stack(pulled(kv, ["a"])).unique().tolist()


def _begun_early(comm: Communicator) -> Any:
    """Copy from an owner while the caller's kernels run, which write the tensor before and read it afterwards."""
    with create("allreduce", communicator=comm) as kv:
        assert isinstance(kv, AllReduceStore)
        weight, out = (on_simulated_gpu(torch.full(SHAPE, comm.rank + 1.0), comm.rank) for _ in range(2))
        weight.mul_(10)
        wait = kv.copy_from_owners("weight", [weight], [1], missing=1 << comm.rank, weight=2.0, async_op=True)
        out.mul_(0)
        result = wait()
        out.add_(weight)
        return out.host().unique().tolist(), result


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("nccl", ["", NO_NCCL])
@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (_some_keys, [[0.5], [1.5], [1.0], *[[0.0]] * 4]),
        (_after_join, [4.0]),
        (_ordered, [50.0]),
        (_dropped, [3.0]),
        (_begun_early, ([20.0], (3, 4.0, False))),
    ],
)
def test_calls_are_ordered_with_the_callers_kernels(nccl: str, worker: Callable[..., Any], expected: Any) -> None:
    with simulated_gpus(nccl=nccl):
        assert in_threads(2, worker) == [expected] * 2


def _saved(comm: Communicator, path: str) -> Any:
    """Save the state of a store on GPUs, and load it into another one."""
    found = []
    for number in range(2):
        with create("allreduce", communicator=comm) as kv:
            fused(kv, on_card(comm))
            kv.set_optimizer(("sgd", {"learning_rate": 1.0, "momentum": 0.5}))
            if number:
                kv.load_optimizer_states(path)
            kv.push(KEYS, [on_simulated_gpu(torch.full(SHAPE, comm.rank + 1.0), comm.rank) for _ in KEYS])
            if not comm.rank:
                kv.save_optimizer_states(path)
            kv.barrier()
            assert devices(kv) == {"cuda"}
            found += torch.stack(pulled(kv, KEYS)).unique().tolist()
    return found


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("nccl", ["", NO_NCCL])
def test_optimizer_state_on_gpus_is_saved_and_loaded(nccl: str, tmp_path: Path) -> None:
    with simulated_gpus(nccl=nccl):
        assert in_threads(2, _saved, str(tmp_path / "state")) == [[-3.0, -3.0 - 0.5 * 3.0]] * 2


def _clipped(comm: Communicator) -> Any:
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, on_card(comm))
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_global_norm": 1.0}))
        flat = on_simulated_gpu(torch.full((bucket.numel,), comm.rank + 1.0), comm.rank)
        with counted(comm.rank) as copies:
            kv.push_bucket(bucket, [flat], weight=1.0)
            kv.update()
        return copies.to_host, torch.stack(pulled(kv, KEYS)).unique().tolist()


@pytest.mark.usefixtures("stream_order")
def test_sums_are_clipped_by_their_common_norm_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_REPLICA_CHECK", "0")  # a step that compares replicas has one more copy
    with simulated_gpus():
        for to_host, (value,) in in_threads(2, _clipped):
            assert to_host == []
            assert value == pytest.approx(-1 / math.sqrt(len(KEYS) * math.prod(SHAPE)), rel=1e-5)


# On GPUs


def _on_gpus(comm: Communicator, places: list[Context]) -> Any:
    """Train on GPUs, every worker on its share of each batch; return the weights, and where the store holds them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    data, label = torch.randn(48, 12).double(), torch.randint(5, (48,))
    own = slice(comm.rank, None, comm.size)
    with create("allreduce", communicator=comm) as kv, Module(network, nn.CrossEntropyLoss(), places) as module:
        module.init_optimizer(kv, "sgd", {"lr": 0.1, "momentum": 0.9})
        for _ in range(10):
            module.forward_backward_update(data[own], label[own])
        state = module.optimizer_state().tensors
        return module.get_params(), devices(kv), {value.device.type for value in state.values()}


def _on_the_host(comm: Communicator) -> Any:
    return _on_gpus(comm, [cpu(0)])


def _in_threads_or_processes(worker: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Run a single rank here, where it uses NCCL if there is a binding; several share the GPU through the host."""
    return in_threads(1, worker, *arguments) if size == 1 else spawn(worker, size, *arguments, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not num_gpus(), reason="needs a CUDA GPU; torch sees none here")
@pytest.mark.parametrize("places", [[gpu(0)], [gpu(0), gpu(0)], [gpu(0), cpu(0)]], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_weights_on_gpus_are_those_of_the_host(size: int, places: list[Context]) -> None:
    (expected, *_), *_ = spawn(_on_the_host, 1)
    for weights, held, saved in _in_threads_or_processes(_on_gpus, size, places):
        assert held == {"cuda"}
        assert saved == {"cpu"}
        for name, value in weights.items():
            torch.testing.assert_close(value.cpu(), expected[name], rtol=0, atol=1e-11)


def _rows_and_payloads(comm: Communicator) -> Any:
    with create("allreduce", communicator=comm) as kv:
        kv.init(["table", "weight"], [torch.zeros(9, 2, device="cuda"), torch.zeros(SHAPE, device="cuda")])
        rows = RowSparse(torch.tensor([comm.rank, 4]).cuda(), torch.ones(2, 2, device="cuda"), (9, 2))
        kv.push("table", rows)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.push("weight", torch.full(SHAPE, 0.75, device="cuda"))
        table, weight = torch.empty(9, 2), torch.empty(SHAPE)
        kv.pull(["table", "weight"], [table, weight])
        return table[:, 0].tolist(), weight.unique().tolist(), devices(kv)


@pytest.mark.gpu
@pytest.mark.skipif(not num_gpus(), reason="needs a CUDA GPU; torch sees none here")
@pytest.mark.parametrize("size", [1, 2])
def test_rows_and_payloads_are_summed_on_the_gpu(size: int) -> None:
    for table, weight, held in _in_threads_or_processes(_rows_and_payloads, size):
        assert table == [1.0, float(size > 1), 0.0, 0.0, float(size), 0.0, 0.0, 0.0, 0.0]
        assert weight == [0.5 * size]
        assert held == {"cuda"}


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 2, reason="needs two CUDA GPUs")
def test_with_nccl_nothing_of_a_bucket_goes_through_the_host() -> None:
    if lack := nccl_bindings.unavailable_reason(nccl_bindings.selected()):
        pytest.skip(lack)
    assert spawn(_through_nccl, 2, timeout=60) == [[3.0], [3.0]]


def _through_nccl(comm: Communicator) -> Any:
    device = torch.device("cuda", comm.rank)
    with create("allreduce", communicator=comm) as kv:
        bucket = fused(kv, lambda tensor: tensor.to(device))
        flat = torch.full((bucket.numel,), comm.rank + 1.0, device=device)
        out = torch.empty_like(flat)
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")  # a copy to the host would wait
        kv.push_bucket(bucket, [flat])
        kv.pull_bucket(bucket, [out])
        torch.cuda.set_sync_debug_mode("default")
        assert comm._gpus.nccl is not None
        return bucket.views(out)[KEYS[0]].unique().tolist()

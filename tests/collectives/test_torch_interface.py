"""Probes of torch.distributed's interface with gloo and gangline: what gloo does, gangline does with equal results.

A probe gets a new process group, its rank and the number of ranks, and returns what the test compares.
"""

from __future__ import annotations

import shutil
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives import torch_backend
from tests.collectives.processes import Processes, Rank

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which torch itself calls
    from torch.distributed.optim import ZeroRedundancyOptimizer

Probe = Callable[[Any, int, int], Any]
PROBES: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    PROBES[function.__name__] = function
    return function


def given(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count) % 5 + 2 * rank + 1).to(dtype)


def all_reduced(tensor: Tensor, group: Any, op: Any = ReduceOp.SUM) -> Any:
    dist.all_reduce(tensor, op, group)
    return tensor


# Collectives by operation, dtype and layout

for op_name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
    PROBES[f"all_reduce_{op_name}"] = lambda group, rank, _, name=op_name: all_reduced(  # type: ignore[misc]
        given(rank, dtype=torch.int64 if name[0] == "B" else torch.float64), group, getattr(ReduceOp, name)
    )
for given_dtype in (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.bool, torch.complex64),
):
    PROBES[f"all_reduce_{given_dtype}"] = lambda group, rank, _, dtype=given_dtype: all_reduced(  # type: ignore[misc]
        given(rank, dtype=dtype), group
    )
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": lambda values: values.view(2, 3),
    "empty": lambda values: values[:0],
    "scalar": lambda values: values.sum(),
    "slice": lambda values: values[1:4],
    "transposed": lambda values: values.view(2, 3).T.contiguous().T,
    "parameter": lambda values: nn.Parameter(values).detach(),
}
for layout_name in LAYOUTS:
    PROBES[f"all_reduce_of_{layout_name}"] = lambda group, rank, _, name=layout_name: all_reduced(  # type: ignore[misc]
        LAYOUTS[name](given(rank)), group
    )


@probe
def inference_tensors(group: Any, rank: int, size: int) -> Any:
    with torch.inference_mode():
        tensor, rows = given(rank), [torch.empty(6) for _ in range(size)]
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.all_gather(rows, all_reduced(tensor, group), group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[union-attr]
    return [tensor, *rows]


@probe
def a_reduced_tensor_is_resized(group: Any, rank: int, _: int) -> Any:
    tensor = given(rank)
    dist.all_reduce(tensor, group=group)
    return tensor.resize_(9)[:6]


@probe
def sparse_all_reduce(group: Any, rank: int, _: int) -> Any:
    found = []
    for shape in ((4, 3), (4,)):
        dense = torch.zeros(shape)
        dense[rank] = rank + 1.0
        dense[3] = 5.0
        tensor = dense.to_sparse(1)
        dist.all_reduce(tensor, group=group)
        found += [tensor.coalesce().indices(), tensor.to_dense()]
    work = dist.all_reduce(dense.to_sparse(), group=group, async_op=True)
    assert work is not None
    work.wait()
    return [*found, work.result()[0].to_dense()]


@probe
def reduce_(group: Any, rank: int, size: int) -> Any:
    tensor = given(rank)
    dist.reduce(tensor, size - 1, group=group)
    return tensor if rank == size - 1 else None


@probe
def broadcast(group: Any, rank: int, size: int) -> Any:
    tensor = given(rank)
    dist.broadcast(tensor, size - 1, group)
    return tensor


@probe
def all_gather(group: Any, rank: int, size: int) -> Any:
    rows = [torch.zeros(6) for _ in range(size)]
    dist.all_gather(rows, given(rank), group)
    return rows


@probe
def gather_and_scatter(group: Any, rank: int, size: int) -> Any:
    rows = [torch.zeros(6) for _ in range(size)] if rank == 0 else None
    dist.gather(given(rank), rows, 0, group)
    out = torch.zeros(6)
    dist.scatter(out, rows, 0, group)
    return out


@probe
def all_gather_into_tensor(group: Any, rank: int, size: int) -> Any:
    out = torch.zeros(6 * size)
    dist.all_gather_into_tensor(out, given(rank), group)
    return out


@probe
def reduce_scatter(group: Any, rank: int, size: int) -> Any:
    out, single = torch.zeros(3), torch.zeros(3)
    dist.reduce_scatter(out, [given(rank, 3) + place for place in range(size)], group=group)
    dist.reduce_scatter_tensor(single, given(rank, 3 * size), group=group)
    return out, single


@probe
def all_to_all_single(group: Any, rank: int, size: int) -> Any:
    out, uneven = torch.zeros(2 * size), torch.zeros(size * (rank + 1))
    dist.all_to_all_single(out, given(rank, 2 * size), group=group)
    sizes = [place + 1 for place in range(size)]
    dist.all_to_all_single(uneven, given(rank, sum(sizes)), [rank + 1] * size, sizes, group=group)
    return out, uneven


@probe
def all_to_all_of_unequal_parts(group: Any, rank: int, size: int) -> Any:
    outs = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(outs, [given(rank, place + 1) for place in range(size)], group)
    return outs


# Coalesced and batched


@probe
def all_reduce_coalesced(group: Any, rank: int, _: int) -> Any:
    tensors = [given(rank), given(rank, 3)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


@probe
def all_gather_coalesced(group: Any, rank: int, size: int) -> Any:
    rows = [[torch.zeros(6), torch.zeros(2)] for _ in range(size)]
    dist.all_gather_coalesced(rows, [given(rank), given(rank, 2)], group)
    return rows


@probe
def coalescing_manager(group: Any, rank: int, _: int) -> Any:
    tensors = [given(rank), given(rank, 3)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


@probe
def batch_isend_irecv(group: Any, rank: int, size: int) -> Any:
    out, after, before = torch.zeros(6), (rank + 1) % size, (rank - 1) % size
    send = dist.P2POp(dist.isend, given(rank), after, group, tag=3)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, out, before, group, tag=3)]):
        work.wait()
    return out


# Messages


@probe
def messages_by_tag(group: Any, rank: int, _: int) -> Any:
    if rank == 0:
        dist.send(given(0), 1, group, tag=1)
        dist.send(given(5), 1, group, tag=2)
    elif rank == 1:
        first, second = torch.zeros(6), torch.zeros(6)
        dist.recv(second, 0, group, tag=2)
        assert dist.recv(first, 0, group, tag=1) == 0
        return first, second
    return None


@probe
def messages_from_any_rank(group: Any, rank: int, size: int) -> Any:
    if rank:
        dist.send(given(rank), 0, group)
        dist.isend(given(rank), 0, group, tag=7).wait()  # type: ignore[union-attr]
        return None
    found = {}
    for _ in range(size - 1):
        tensor = torch.zeros(6)
        found[dist.recv(tensor, None, group)] = tensor
    sources = []
    for _ in range(size - 1):
        work = dist.irecv(tensor, None, group, tag=7)
        assert work is not None
        work.wait()
        sources.append(work._source_rank())
    return [found[source] for source in sorted(found)], sorted(sources)


@probe
def objects(group: Any, rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * 1_000 * rank}, group)
    at_root = [None] * size if rank == 0 else None
    dist.gather_object(("rank", rank), at_root, 0, group)
    sent = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0, group)
    taken = [None]
    dist.scatter_object_list(taken, [f"for {place}" for place in range(size)] if rank == 0 else None, 0, group)
    return gathered, at_root, sent, taken


@probe
def object_lists_as_messages(group: Any, rank: int, _: int) -> Any:
    found: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([1, {"two": 2}], 1, group)
    elif rank == 1:
        assert dist.recv_object_list(found, 0, group) == 0
    return found


# Handles


@probe
def work_of_a_call(group: Any, rank: int, _: int) -> Any:
    tensor = given(rank)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda done: [one * 2 for one in done.value()])
    assert work.wait()
    return work.is_completed(), work.is_success(), future.wait(), work.result(), tensor


@probe
def several_calls_in_flight(group: Any, rank: int, _: int) -> Any:
    tensors = [given(rank) + place for place in range(8)]
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        assert work is not None
        work.wait(timedelta(seconds=30))
    return tensors


@probe
def barriers(group: Any, _: int, size: int) -> Any:
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()  # type: ignore[union-attr]
    dist.monitored_barrier(group, timedelta(seconds=30))
    dist.monitored_barrier(group, timedelta(seconds=30), wait_all_ranks=True)
    return group.size() == size


@probe
def monitored_barrier_names_a_late_rank(group: Any, rank: int, _: int) -> Any:
    if rank == 1:
        return True
    with pytest.raises(RuntimeError) as raised:
        dist.monitored_barrier(group, timedelta(seconds=0.2))
    text = "Rank 1 failed to pass monitoredBarrier in 200 ms"
    return rank != 0 or text in str(raised.value) or str(raised.value)


# Groups


@probe
def questions_about_groups(group: Any, rank: int, _: int) -> Any:
    return [
        dist.get_rank(group),
        dist.get_world_size(group),
        dist.get_process_group_ranks(group),
        dist.get_group_rank(group, rank),
        dist.get_global_rank(group, rank),
        dist.get_node_local_rank(fallback_rank=7),
        torch.device("cpu") in group._device_types,
        dist.get_backend(group) == group.name() == group._get_backend(torch.device("cpu")).name(),
        dist.is_backend_available(dist.get_backend(group)),
        dist.distributed_c10d._get_object_coll_device(group),
        dist.get_pg_count() > 1,
    ]


@probe
def subgroups(group: Any, rank: int, size: int) -> Any:
    half = dist.new_group([0, size - 1])
    own, _ = dist.new_subgroups(1)
    by_list, _ = dist.new_subgroups_by_enumeration([[0], list(range(1, size))])
    found = [all_reduced(given(rank), one) for one in (own, by_list)]
    if rank in (0, size - 1):
        found.append(all_reduced(given(rank), half))
    dist.barrier(group)
    return found


@probe
def a_group_is_destroyed(_: Any, rank: int, __: int) -> Any:
    made = dist.new_group()
    before = dist.get_pg_count()
    all_reduced(given(rank), made)
    dist.destroy_process_group(made)
    return before - dist.get_pg_count()


@probe
def a_group_is_aborted(group: Any, rank: int, _: int) -> Any:
    made = dist.new_group()
    all_reduced(given(rank), made)
    dist.barrier(group)
    dist.distributed_c10d._abort_process_group(made)
    return all_reduced(given(rank), group)


@probe
def timeouts_are_set(group: Any, rank: int, _: int) -> Any:
    group.set_timeout(timedelta(seconds=40)) if hasattr(group, "set_timeout") else None
    return all_reduced(given(rank), group)


# Other ways to call


@probe
def functional_collectives(group: Any, rank: int, size: int) -> Any:
    return [
        functional.all_reduce(given(rank), "sum", group) + 0,
        functional.all_gather_tensor(given(rank), 0, group) + 0,
        functional.reduce_scatter_tensor(given(rank, 3 * size), "sum", 0, group) + 0,
        functional.broadcast(given(rank), 1, group) + 0,
        functional.all_to_all_single(given(rank, size), [1] * size, [1] * size, group) + 0,
        *[one + 0 for one in functional.all_reduce_coalesced([given(rank), given(rank, 2)], "max", group)],
        *[one + 0 for one in functional.all_gather_into_tensor_coalesced([given(rank), given(rank, 2)], group)],
    ]


@probe
def differentiable_collectives(group: Any, rank: int, size: int) -> Any:
    found = []
    for call in (
        lambda x: differentiable.all_reduce(x, group=group),
        lambda x: differentiable.broadcast(x, 0, group),
        lambda x: torch.cat(differentiable.all_gather(x, group)),
        lambda x: differentiable.reduce_scatter(torch.zeros(2), list(x.view(size, 2)), group=group),
        lambda x: torch.cat(differentiable.all_to_all(list(torch.zeros(size, 2)), list(x.view(size, 2)), group)),
    ):
        tensor = given(rank, 2 * size).requires_grad_()
        out = call(tensor)
        (out.square().sum()).backward()
        found += [out, tensor.grad]
    return found


@probe
def tensors_without_data(group: Any, rank: int, size: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor, rows = torch.ones(4), [torch.ones(4) for _ in range(size)]
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(tensor, 0, group)
        dist.all_gather(rows, tensor, group)
        gathered = functional.all_gather_tensor(tensor, 0, group) + 1
        (dist.send if rank else dist.recv)(tensor, 1 - min(rank, 1), group)
    return type(tensor).__name__, list(gathered.shape), all_reduced(given(rank), group)


def compiled(function: Callable[[Tensor], Tensor], *, fullgraph: bool = False) -> Callable[[Tensor], Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


@probe
def collectives_in_compiled_functions(group: Any, rank: int, _: int) -> Any:
    def in_place(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor * 2

    def of_functions(tensor: Tensor) -> Tensor:
        return functional.all_reduce(tensor, "sum", group) * dist.get_world_size(group)

    def with_breaks(tensor: Tensor) -> Tensor:
        dist.barrier(group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(tensor, 0, group)
        return tensor * 2

    return [
        compiled(in_place, fullgraph=True)(given(rank)),
        compiled(of_functions, fullgraph=True)(given(rank)),
        compiled(with_breaks)(given(rank)),
    ]


@probe
def events_of_the_profiler(group: Any, rank: int, _: int) -> Any:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        all_reduced(given(rank), group)
        dist.all_reduce(given(rank, 3), group=group, async_op=True).wait()  # type: ignore[union-attr]
        dist.barrier(group)
    backend = dist.get_backend(group)
    events = [event for event in profiled.events() if event.name.startswith(f"{backend}:")]
    return sorted((event.name.replace("::", ":").partition(":")[2], str(event.input_shapes)) for event in events)


# Training


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(model: nn.Module, rank: int, steps: int = 4, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.sin(given(rank, 18).view(3, 6) + step)).square().mean().backward()
        optimizer.step()
    return [value.detach() for value in model.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "views": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused_parameters": {"find_unused_parameters": True},
}
for option_name in OPTIONS:
    PROBES[f"ddp_{option_name}"] = lambda group, rank, _, name=option_name: trained(  # type: ignore[misc]
        DistributedDataParallel(network(), process_group=group, **OPTIONS[name]), rank
    )

HOOKS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "all_reduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "none": lambda group: (None, debugging_hooks.noop_hook),
    "power_sgd": lambda group: (
        powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=0.5),
        powerSGD_hook.powerSGD_hook,
    ),
}
for hook_name in HOOKS:

    def train_with_hook(group: Any, rank: int, _: int, name: str = hook_name) -> Any:
        model = DistributedDataParallel(network(), process_group=group)
        model.register_comm_hook(*HOOKS[name](group))
        return trained(model, rank)

    PROBES[f"ddp_hook_{hook_name}"] = train_with_hook


@probe
def ddp_sparse_gradients(group: Any, rank: int, _: int) -> Any:
    torch.manual_seed(3)
    words = nn.Embedding(9, 4, sparse=True)
    model = DistributedDataParallel(words, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1, 1, rank + 2 + step])).square().sum().backward()
        optimizer.step()
    return words.weight.detach()


@probe
def ddp_accumulates_without_sync(group: Any, rank: int, _: int) -> Any:
    model = DistributedDataParallel(network(), process_group=group)
    with model.no_sync():
        model(given(rank)).sum().backward()
    model(given(rank)).sum().backward()
    return [value.grad for value in model.parameters()]


@probe
def ddp_join_of_uneven_inputs(group: Any, rank: int, size: int) -> Any:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(given(0)).sum().backward()
            optimizer.step()
    return list(model.parameters()) if rank == size - 1 else None


@probe
def ddp_compiled(group: Any, rank: int, _: int) -> Any:
    model = DistributedDataParallel(network(), process_group=group)
    return trained(torch.compile(model, backend="aot_eager"), rank)  # type: ignore[arg-type]


@probe
def ddp_compiled_by_inductor(group: Any, rank: int, _: int) -> Any:
    if shutil.which("g++") is None:
        return "no compiler"
    model = DistributedDataParallel(network(), process_group=group)
    return trained(torch.compile(model), rank)  # type: ignore[arg-type]


@probe
def collectives_compiled_by_inductor(group: Any, rank: int, _: int) -> Any:
    if shutil.which("g++") is None:
        return "no compiler"

    def function(tensor: Tensor) -> Tensor:
        rows = functional.all_gather_tensor(torch.sin(tensor), 0, group)
        scattered = functional.reduce_scatter_tensor(rows, "sum", 0, group)
        return functional.all_reduce(rows * 2, "sum", group) + scattered[0]

    return torch.compile(function, fullgraph=True)(given(rank))


@probe
def zero_redundancy_optimizer(group: Any, rank: int, _: int) -> Any:
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    return trained(model, rank, optimizer=optimizer)


@probe
def fully_shard(group: Any, rank: int, _: int) -> Any:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import DeviceMesh

    model = fsdp.fully_shard(network(), mesh=DeviceMesh.from_group(group, "cpu"))
    trained(model, rank)
    with torch.inference_mode():
        out = model(given(rank))
    model.reshard()  # type: ignore[operator]
    return out, [value.full_tensor().detach() for value in model.parameters()]  # type: ignore[attr-defined]


@probe
def distributed_tensors(group: Any, _: int, size: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(12.0 * size).view(2 * size, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    product = distribute_tensor(whole.T.contiguous(), mesh, [Replicate()]) @ rows.redistribute(mesh, [Replicate()])
    return rows.sum().full_tensor(), product.full_tensor(), rows.redistribute(mesh, [Shard(1)]).full_tensor()


def plain(value: Any) -> Any:
    """Return a value that msgpack can send."""
    if isinstance(value, Tensor):
        data = value.detach()
        numbers = torch.view_as_real(data) if data.is_complex() else data
        return [str(data.dtype), list(data.shape), numbers.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, dict, type(None))) else str(value)


def is_near(found: Any, wanted: Any) -> bool:
    """Return whether values are equal, numbers but for their rounding: gloo adds in another order."""
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(is_near, found, wanted))
    if isinstance(wanted, float):
        return bool(found == pytest.approx(wanted, rel=1e-4, abs=2e-5))
    return bool(found == wanted)


def run_probes(rank: Rank, backend: str, path: str, names: list[str]) -> None:
    assert torch_backend.__all__
    warnings.simplefilter("ignore")
    place = {"rank": rank.rank, "world_size": rank.size}
    dist.init_process_group(backend, init_method=f"file://{path}", timeout=timedelta(seconds=60), **place)
    outcomes = {}
    for name in names:
        group = dist.new_group(timeout=timedelta(seconds=20))
        try:
            outcomes[name] = ["", plain(PROBES[name](group, rank.rank, rank.size))]
        except BaseException:  # noqa: BLE001  the test looks at it
            outcomes[name] = [traceback.format_exc(), None]
        dist.barrier()
    rank.tell(outcomes)
    dist.destroy_process_group()


@cache
def outcomes_of(backend: str, size: int, folder: str) -> list[dict[str, list[Any]]]:
    with Processes(run_probes, size, backend, f"{folder}/{backend}{size}", list(PROBES), limit=200) as processes:
        return processes.all_heard()


GLOO_FAILS = {"all_to_all_of_unequal_parts", "all_reduce_torch.int16", "messages_by_tag"}
"""Probes that gloo fails."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcomes_of.cache_clear()
    return tmp_path_factory.mktemp("torch_interface")


@pytest.mark.slow
@pytest.mark.timeout(420)  # the first one runs all probes
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PROBES)
def test_what_gloo_does_gangline_does(name: str, size: int, folder: Path) -> None:
    pairs = zip(outcomes_of("gloo", size, str(folder)), outcomes_of("gangline", size, str(folder)), strict=True)
    for rank, (by_gloo, by_gangline) in enumerate(pairs):
        (_, wanted), (error, found) = by_gloo[name], by_gangline[name]
        assert not error, f"rank {rank} of {size}: {error}"
        if name in GLOO_FAILS and by_gloo[name][0]:
            continue
        assert not by_gloo[name][0], f"with gloo, rank {rank} of {size}: {by_gloo[name][0]}"
        assert is_near(found, wanted), f"rank {rank} of {size}: {found}, gloo has {wanted}"

"""Probes of torch.distributed's interface with gloo and gangline: what gloo does, gangline does with equal results.

A probe gets a new process group, its rank and the number of ranks, and returns what the test compares.
"""

from __future__ import annotations

import shutil
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from tests.collectives.processes import Processes, Rank, join_group

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


# Collectives: test_torch_backend checks their values; these are other effects and other ways to call them


@probe
def inference_tensors(group: Any, rank: int, size: int) -> Any:
    with torch.inference_mode():
        tensor, rows = given(rank), [torch.empty(6) for _ in range(size)]
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        dist.all_gather(rows, all_reduced(tensor, group), group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    return [tensor, *rows]


@probe
def a_reduced_tensor_is_resized(group: Any, rank: int, _: int) -> Any:
    tensor = given(rank)
    dist.all_reduce(tensor, group=group)
    return tensor.resize_(9)[:6]


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
        work.wait()
        dist.broadcast(tensor, 0, group)
        return tensor * 2

    return [
        compiled(in_place, fullgraph=True)(given(rank)),
        compiled(of_functions, fullgraph=True)(given(rank)),
        compiled(with_breaks)(given(rank)),
    ]


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


@probe
def ddp_compiled_by_inductor(group: Any, rank: int, _: int) -> Any:
    if shutil.which("g++") is None:
        return "no compiler"
    model = DistributedDataParallel(network(), process_group=group)
    return trained(torch.compile(model), rank)


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


def run_probes(rank: Rank, backend: str, path: str) -> None:
    warnings.simplefilter("ignore")
    compiled(torch.sin)(given(rank.rank))  # the first compilation imports for seconds, which no group is to wait for
    join_group(rank, path, backend, seconds=60)
    outcomes = {}
    for name, run in PROBES.items():
        group = dist.new_group(timeout=timedelta(seconds=60))  # ranks that compile share the cores, maybe for 30 s
        try:
            outcomes[name] = ["", plain(run(group, rank.rank, rank.size))]
        except BaseException:  # noqa: BLE001  the test looks at it
            outcomes[name] = [traceback.format_exc(), None]
        dist.barrier()
    rank.tell(outcomes)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Return the outcomes of all probes with gloo and with gangline, each on each rank."""
    folder, found = tmp_path_factory.mktemp("torch_interface"), []
    for backend in ("gloo", "gangline"):
        with Processes(run_probes, request.param, backend, f"{folder}/{backend}", limit=200) as processes:
            found.append(processes.all_heard())
    return found


@pytest.mark.slow
@pytest.mark.timeout(420)  # the first one runs all probes
@pytest.mark.parametrize("name", PROBES)
def test_what_gloo_does_gangline_does(name: str, outcomes: list[list[dict[str, Any]]]) -> None:
    for rank, (by_gloo, by_gangline) in enumerate(zip(*outcomes, strict=True)):
        for backend, of_rank in (("gangline", by_gangline), ("gloo", by_gloo)):
            assert not of_rank[name][0], f"{backend}, rank {rank} of {len(outcomes[0])}"
        assert is_near(by_gangline[name][1], by_gloo[name][1]), f"rank {rank} of {len(outcomes[0])}"

"""Functions that torch.compile compiles and that call gangline, whose own frames are not traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from gangline import DistributedOptimizer, Trainer
from gangline.collectives import torch_backend
from gangline.collectives.communicator import in_process
from gangline.kvstore import create
from tests.programs import python

PACKAGE = Path(torch_backend.__file__).resolve().parents[2]
Call = Callable[[Tensor], object]


def communicator() -> Call:
    (communicator,) = in_process(1)

    def call(tensor: Tensor) -> None:
        communicator.all_reduce(tensor)
        work: Any = communicator.all_reduce(tensor, async_op=True)
        work.wait()

    return call


def process_group() -> Call:
    def call(tensor: Tensor) -> None:
        work: Any = dist.all_reduce(tensor, async_op=True)
        work.wait()

    return call


def store() -> Call:
    made = create("local")
    made.init(0, torch.zeros(3))
    return lambda tensor: made.pushpull(0, tensor, out=tensor)


def _training(network: nn.Module, optimizer: Any, *batch_size: int) -> Call:
    def call(tensor: Tensor) -> None:
        optimizer.zero_grad()
        network(tensor).sum().backward()
        optimizer.step(*batch_size)

    return call


def trainer() -> Call:
    network = nn.Linear(3, 1)
    return _training(network, Trainer(network, "sgd"), 1)


def optimizer() -> Call:
    network = nn.Linear(3, 1)
    return _training(network, DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), "local"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gangline", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [communicator, process_group, store, trainer, optimizer])
def test_no_frame_of_gangline_is_traced(make: Callable[[], Call]) -> None:
    call = make()

    def step(tensor: Tensor) -> Tensor:
        tensor = tensor * 2
        call(tensor)
        return tensor + 1

    torch.compiler.reset()
    clear_compilation_metrics()
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    frames = [(Path(one.co_filename or ""), one.co_name) for one in get_compilation_metrics()]
    assert (Path(__file__), "step") in frames
    traced = [name for file, name in frames if PACKAGE in file.resolve().parents and "tests" not in file.parts]
    assert not traced


_RENAMED = """
import torch, torch._dynamo
del torch._C._dynamo.eval_frame.set_code_exec_strategy
from gangline.collectives.communicator import connect
with connect(0, 1) as comm:
    compiled = torch.compile(lambda x: comm.all_reduce(x + 1) * 2, backend="eager")
    print(compiled(torch.ones(2)).tolist(), comm.rank)
"""


@pytest.mark.slow
def test_a_torch_without_dynamos_private_names_is_accepted() -> None:
    assert python("-c", _RENAMED, code=0).stdout == "[4.0, 4.0] 0\n"

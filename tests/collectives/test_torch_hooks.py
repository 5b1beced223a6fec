"""DDP hooks: compressed gradients, and weights by number of samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives.torch_backend import Samples, weighted_hook
from gangline.kvstore.compression.hook import compress_hook
from tests.collectives.processes import Processes, Rank, join_group, run_until_one_fails

CASES: dict[str, Callable[[int, dist.ProcessGroup], None]] = {}
SHAPES = ((30, 20), (7,), (50, 11), (13, 3), (40, 40))


def case(function: Callable[[int, dist.ProcessGroup], None]) -> Callable[[int, dist.ProcessGroup], None]:
    CASES[function.__name__] = function
    return function


class Given(nn.Module):
    """Module with given gradients: the loss is the product of parameters and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((part * one).sum() for part, one in zip(self.parts, gradients, strict=True))


def gradients_of(rank: int, step: int) -> list[Tensor]:
    """Return multiples of 1/8, so that no sum is rounded."""
    return [
        ((torch.arange(math.prod(shape)) * 5 + 3 * place + 7 * rank + 11 * step) % 17 - 8).view(shape) / 8
        for place, shape in enumerate(SHAPES)
    ]


def two_bit(total: Tensor, threshold: float) -> Tensor:
    return threshold * ((total >= threshold).float() - (total <= -threshold).float())


@case
def two_bits_with_error_feedback_are_exact(rank: int, group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=0.003)
    hook = compress_hook("2bit", threshold=0.25)
    layouts: list[list[int]] = []

    def noting(state: Any, bucket: Any) -> Any:
        layouts[-1].append(len(bucket.parameters()))
        return hook(state, bucket)

    noting.__annotations__ = {}  # DDP compares annotations with classes, but here they are strings
    model.register_comm_hook(group, noting)
    residuals = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    for step in range(6):
        layouts.append([])
        model.zero_grad()
        model(gradients_of(rank, step)).backward()
        want = [torch.zeros(shape) for shape in SHAPES]
        for sender in range(2):
            for place, gradient in enumerate(gradients_of(sender, step)):
                residuals[sender][place] += gradient / 2
                sent = two_bit(residuals[sender][place], 0.25)
                residuals[sender][place] -= sent
                want[place] += sent
        for place, part in enumerate(model.module.parts):
            assert torch.equal(part.grad, want[place])
            assert torch.equal(hook.residual(part), residuals[rank][place])
    assert layouts[0] != layouts[1]  # the residuals still exist
    assert len(layouts[1]) > 1


@case
def half_precision_sums_what_was_rounded(rank: int, group: dist.ProcessGroup) -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model = DistributedDataParallel(Given(), process_group=group)
        hook = compress_hook(name)
        model.register_comm_hook(group, hook)
        model([gradient / 3 for gradient in gradients_of(rank, 0)]).backward()
        rounded = [[(one / 3 / 2).to(dtype).float() for one in gradients_of(sender, 0)] for sender in range(2)]
        for place, part in enumerate(model.module.parts):
            assert torch.equal(part.grad, rounded[0][place] + rounded[1][place])
            assert not hook.residual(part).any()


@case
def a_gradient_that_cannot_be_sent_and_an_option_of_no_codec_are_named(rank: int, group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    model.register_comm_hook(group, compress_hook("2bit"))
    with pytest.raises(Exception, match="the gradient of bucket 0 holds NaN or infinity"):
        model(torch.full((1, 3), torch.nan)).sum().backward()
    with pytest.raises(ValueError, match="has no option 'ratio'"):
        compress_hook("2bit", ratio=0.1)


def networks(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[nn.Module, DistributedDataParallel]:
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)).to(dtype)
    return alone, DistributedDataParallel(copy.deepcopy(alone), process_group=group, bucket_cap_mb=0.005)


@case
def unequal_ranks_have_the_gradient_of_the_whole_batch(rank: int, group: dist.ProcessGroup) -> None:
    alone, shared = networks(group, torch.float64)
    samples = Samples(group)
    shared.register_comm_hook(samples, weighted_hook)
    first, second = (torch.optim.SGD(network.parameters(), lr=0.3) for network in (alone, shared))
    generator = torch.Generator().manual_seed(1)
    for mine, others in ((5, 3), (5, 3), (1, 7), (8, 0), (0, 8), (4, 4)):
        data = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        label = torch.randint(4, (8,), generator=generator)
        share = slice(0, mine) if rank == 0 else slice(mine, 8)
        samples.count = mine if rank == 0 else others
        first.zero_grad()
        second.zero_grad()
        cross_entropy(alone(data), label).backward()
        own = (data[share], label[share]) if samples.count else (data * torch.nan, label)
        cross_entropy(shared(own[0]), own[1]).backward()
        for want, got in zip(alone.parameters(), shared.parameters(), strict=True):
            assert (got.grad - want.grad).norm() <= 1e-11 * want.grad.norm()
        first.step()
        second.step()


@case
def halves_are_weighted_in_float32(rank: int, group: dist.ProcessGroup) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = DistributedDataParallel(nn.Linear(4, 1, bias=False).to(dtype), process_group=group)
        samples = Samples(group)
        model.register_comm_hook(samples, weighted_hook)
        samples.count = 60_000 if rank == 0 else 20_000  # 60,000 x 8 is beyond float16
        model(torch.full((1, 4), 8.0 - 4 * rank, dtype=dtype)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 4), 7.0, dtype=dtype))


@case
def counts_that_cannot_be_are_named(rank: int, group: dist.ProcessGroup) -> None:
    for count, words in ((-1, "Samples.count is -1; expected"), (0, "Samples.count is 0 on every rank")):
        model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        samples = Samples(group)
        model.register_comm_hook(samples, weighted_hook)
        samples.count = count
        with pytest.raises(Exception, match=words):
            model(torch.ones(1, 3)).sum().backward()


def run_cases(rank: Rank, path: str) -> None:
    join_group(rank, path)
    gloo = dist.new_group(backend="gloo")
    calls = [
        (f"{name} {backend}", partial(function, rank.rank, group))
        for backend, group in (("gangline", dist.group.WORLD), ("gloo", gloo))
        for name, function in CASES.items()
    ]
    outcomes = run_until_one_fails(calls)
    rank.tell(outcomes)
    if not any(outcomes.values()):
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the outcomes of all cases on each rank."""
    store = tmp_path_factory.mktemp("torch_hooks") / "store"
    with Processes(run_cases, 2, str(store), limit=60) as processes:
        return processes.all_heard()


@pytest.mark.parametrize("backend", ["gangline", "gloo"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, backend: str, outcomes: list[dict[str, str]]) -> None:
    for rank, of_rank in enumerate(outcomes):
        assert of_rank.get(f"{name} {backend}", "not reached") == "", f"rank {rank}"

"""Cases of public issue threads in which other packages are wrong, hang or refuse, as one job of two ranks.

A docstring names the threads. Cases on samples 1 to 8 have one global batch with shares of 6 and 2, and the gradient of
the mean of w x is 4.5; without weights it would be 5.5.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import gangline
import gangline.horovod.torch as hvd
import gangline.mxnet as mx
from gangline import Communicator, DistributedOptimizer, create, spawn
from gangline.launcher.job import free_ports
from tests.models.unequal_jobs import join

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which torch itself calls
    from torch.distributed.optim import ZeroRedundancyOptimizer

EIGHT = torch.arange(1.0, 9.0).double()[:, None]
CASES: dict[str, tuple[Callable[[], Any], Sequence[Any]]] = {}


def case(*expected: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a case with the result that all ranks expect, or with one of each rank."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[function.__name__] = function, expected * (3 - len(expected))
        return function

    return register


def line(weight: float = 0.0) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, weight)
    return layer


def balanced(model: Any, data: Any = EIGHT, **options: Any) -> gangline.BalancedLoader:
    return gangline.balance(
        model, DataLoader(data, 4, collate_fn=options.pop("collate", None)), loads=[3, 1], **options
    )


def gradient(parameter: Any) -> float:
    assert parameter.grad is not None
    return float(parameter.grad)


# Optimizers


class Together(torch.optim.Optimizer):
    """Steps several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]
            one.step()


def by_muon(shard: str | None, *, is_weighted: bool = True, with_adamw: bool = True) -> float:
    """Train by Muon and AdamW on ranks of unequal memory; return the difference to one device over three steps."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(12, 16, bias=with_adamw), nn.Tanh(), nn.Linear(16, 8, bias=with_adamw)).double()
    alone, x = deepcopy(network), torch.randn(8, 12).double()

    def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
        parameters = list(network.parameters())
        muon = torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02)
        rest = [one for one in parameters if one.ndim != 2]
        return Together(muon, torch.optim.AdamW(rest, lr=0.01)) if rest else muon

    plain = optimizer_of(alone)
    own = x[:6] if dist.get_rank() == 0 else x[6:]
    with create("allreduce", communicator=COMMUNICATORS[0]) as store:
        optimizer = DistributedOptimizer(optimizer_of(network), store, shard=shard, memory=[2, 1], network=network)
        optimizer.weight = len(own) if is_weighted else 1
        for _ in range(3):
            for each, model, data in ((plain, alone, x), (optimizer, network, own)):
                each.zero_grad()
                model(data).square().mean().backward()
                each.step()
        found = optimizer.model_state_dict() if shard == "weights" else network.state_dict()
    return max((float((alone.state_dict()[name] - value).abs().max()) for name, value in found.items()), default=0.0)


def test_the_page_of_muon_shows_the_optimizer_of_these_cases() -> None:
    page = Path(__file__).parents[2] / "docs" / "muon.md"
    assert inspect.getsource(Together).replace("  # type: ignore[override]", "") in page.read_text()


@case([0.0, 0.0])
def muon_by_unequal_memory() -> list[float]:
    """DeepSpeed#7807, #8090; KellerJordan/Muon#45; Moonlight#27; Megatron-LM#5961, #6425; pith-train#58."""
    assert by_muon("optimizer", is_weighted=False, with_adamw=False) > 1e-3
    return [by_muon(shard, with_adamw=False) for shard in ("optimizer", "weights")]


@case([pytest.approx(0, abs=1e-12)] * 2)
def muon_for_matrices_and_adamw_for_the_rest() -> list[float]:
    """DeepSpeed#8438; verl#7120."""
    return [by_muon(shard) for shard in ("optimizer", "weights")]


@case(pytest.approx(-53.55))
def sharpness_aware_minimization() -> float:
    """davda54/sam#94."""
    network = line()
    model = DistributedDataParallel(network)
    for x in balanced(model):
        (model(x) - x).square().mean().backward()
        with torch.no_grad():
            network.weight += 0.05 * gradient(network.weight) / abs(gradient(network.weight))
        model.zero_grad()
        (model(x) - x).square().mean().backward()
    return gradient(network.weight)


@case([-4.5, "Rank 0 exhausted all inputs"], [-4.5, "Detected at least one rank that exhausted inputs"])
def torchs_join_of_unequal_steps() -> list[Any]:
    """microsoft/PyMarlin#80; datasets#6437; transformers#16983: as over gloo, where ZeRO repeats rank 0's last step."""
    network, x = line(), EIGHT[dist.get_rank()][None]
    model = DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first rank has fewer inputs
        with Join([model, optimizer]):
            train(2 + dist.get_rank())
        weight = network.weight.item()
        with pytest.raises(RuntimeError) as raised, Join([model], throw_on_early_termination=True):
            train(2 + dist.get_rank())
    return [weight, str(raised.value).partition(".")[0]]


# Batches and losses


@case(4.5)
def micro_batches_by_a_budget() -> float:
    """verl#6176 with DistributedDataParallel: three micro-batches on rank 0, and one on rank 1."""
    network = line()
    model = DistributedDataParallel(network)
    for batch in balanced(model):
        parts = batch.split(2)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else model.no_sync():
                (model(part).sum() / len(batch)).backward()
    return gradient(network.weight)


@case([4.5] * 3)
def losses_repeated_for_each_sample() -> list[float]:
    """bghira/SimpleTuner#3095."""
    model, found = line(1.0), []
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        for x in balanced(model):
            with mode:
                found.append(gangline.gather_rows(model(x).mean().repeat(len(x))).mean().item())
    return found


@case([3.25, 1.25])
def branches_by_the_data() -> list[float]:
    """horovod#564; lhotse#554; pytorch#41101: rank 1 has no rows for the second branch."""
    branches = nn.ModuleList([line(), line()])

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = branches

        def forward(self, x: Tensor) -> Tensor:
            rows = (x[x > 4], x[x <= 4])
            pairs = zip(self.branches, rows, strict=True)
            return torch.cat([branch(part[:, None]) for branch, part in pairs if len(part)])

    model = DistributedDataParallel(Network(), find_unused_parameters=True)
    for x in balanced(model):
        (model(x).sum() / len(x)).backward()
    return [gradient(branch.weight) for branch in branches]


LENGTHS = torch.tensor([1.0, 5, 2, 8, 3, 3, 7, 1]).double()[:, None]


@case(pytest.approx([139 / 30, 139 / 30, (49 / 16 + 90 / 14) / 2]))
def means_over_tokens_of_two_accumulated_batches() -> list[float]:
    """torchtitan#2206; torchtune#1875, #1917; OpenNMT-py#2293: the mean over all tokens, and that of two means."""
    found, data = [], TensorDataset(EIGHT, LENGTHS)
    count = {"count": lambda batch: batch[1].sum()}
    ways: list[dict[str, Any]] = [{"loss_reduction": "sum"}, {**count, "accumulate": 2}, count]
    for options in ways:
        network = line()
        model = DistributedDataParallel(network)
        for x, lengths in gangline.balance(model, DataLoader(data, 2), loads=[3, 1], **options):
            total = (model(x) * lengths).sum()
            (total / LENGTHS.sum() if "loss_reduction" in options else total / lengths.sum() / 2).backward()
        found.append(gradient(network.weight))
    return found


class Recurrent(nn.Module):
    """The last state of a GRU over packed samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(1, 3, batch_first=True).double()

    def forward(self, samples: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(sample) for sample in samples])
        packed = pack_padded_sequence(pad_sequence(samples, batch_first=True), lengths, True, enforce_sorted=False)
        _, hidden = self.layer(packed)
        return torch.tanh(hidden[-1])


class Alignment(nn.Module):
    """Losses of connectionist temporal classification, of samples that are vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4).double()

    def forward(self, samples: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(sample) for sample in samples])
        scores = self.layer(pad_sequence(samples)).log_softmax(2)
        labels = torch.tensor([[1 + len(sample) % 3] for sample in samples])
        return nn.functional.ctc_loss(scores, labels, lengths, torch.ones_like(lengths), reduction="none")


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1).double()

    def forward(self, samples: list[Tensor]) -> Tensor:
        nested: Tensor = self.layer(torch.nested.nested_tensor(samples, layout=torch.jagged))
        return nested.values().square()


def hooked() -> nn.Module:
    first, last = nn.Linear(1, 2).double(), nn.Linear(2, 1).double()
    first.register_forward_hook(lambda _module, _inputs, output: output * 2)
    last.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    last.register_full_backward_hook(lambda _module, gradients, _: gradients)
    return nn.Sequential(first, nn.Tanh(), last)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "packed GRU": (Recurrent, {}),
    "CTC": (Alignment, {}),
    "jagged tensors": (Jagged, {"count": lambda samples: sum(map(len, samples))}),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(1, 2).double()), {}),
    "hooks": (hooked, {}),
}


@case([pytest.approx(0, abs=1e-14)] * len(NETWORKS))
def gradients_of_unusual_networks() -> list[float]:
    """Gradients of CTC, packed GRU, nested tensors, weight_norm and hooks of users are those of one process."""
    found = []
    for name, (make, options) in NETWORKS.items():
        alone, network = make(), make()  # hooks of parameters are not copied
        network.load_state_dict(alone.state_dict())
        is_sequence = name in ("packed GRU", "CTC", "jagged tensors")
        data: Any = [x / 8 + torch.arange(int(n)).double()[:, None] for x, n in zip(EIGHT, LENGTHS, strict=True)]
        options = {"collate": list, **options} if is_sequence else options
        (alone(data if is_sequence else EIGHT)).mean().backward()
        model = DistributedDataParallel(network)
        for batch in balanced(model, data if is_sequence else EIGHT, **options):
            model(batch).mean().backward()
        pairs = zip(alone.parameters(), network.parameters(), strict=True)
        found.append(max(float((one.grad - other.grad).abs().max()) for one, other in pairs))  # type: ignore[operator]
    return found


@case([-4.5, -2.25])
def stochastic_weight_averaging() -> list[float]:
    """Weights are averaged over the steps by torch's AveragedModel."""
    network = line()
    model = DistributedDataParallel(network)
    averaged, optimizer = AveragedModel(model), SGD(model.parameters(), lr=1.0)
    averaged.update_parameters(model)
    for x in balanced(model):
        model(x).mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    return [network.weight.item(), averaged.module.state_dict()["module.weight"].item()]


# Collectives


@case([-4.0, 2.0])
def a_negative_view() -> Any:
    """pytorch#45760, #59946: gloo leaves it unchanged, without an error."""
    part = torch.tensor([2j, -1j]).conj().imag
    assert part.is_neg()
    dist.all_reduce(part)
    return part.tolist()


# Horovod's interface


def with_horovod(train: Callable[[Callable[..., Any], float], Any]) -> float:
    """Return the difference of what ``train`` returns over Horovod's interface to that of one process.

    Its arguments are a function that wraps an optimizer, and a factor of losses: 1 and 3 on the ranks, whose mean is 2.
    """
    found = torch.tensor(train(hvd.DistributedOptimizer, 1.0 + 2 * hvd.rank()))
    return float((found - torch.tensor(train(lambda optimizer, *_, **__: optimizer, 2.0))).abs().max())


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1)) for _ in range(2)]


def in_turn(wrap: Callable[..., Any], factor: float) -> list[Any]:
    a, b = two()
    first, second = wrap(SGD([a], 0.1), [("a", a)]), wrap(SGD([b], 0.1), [("b", b)])
    weights = []
    for number in range(4):
        optimizer = (first, second)[number % 2]
        optimizer.zero_grad()
        (factor * a * b).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        weights.append([a.item(), b.item()])
    return weights


def overlapping(wrap: Callable[..., Any], factor: float) -> list[Any]:
    a, b = two()
    weights = []
    for optimizer in (wrap(SGD([a], 0.1), [("a", a)]), wrap(SGD([a, b], 0.1), [("a", a), ("b", b)])):
        optimizer.zero_grad()
        (factor * a * b).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        weights.append([a.item(), b.item()])
    return weights


def groups_without_names(wrap: Callable[..., Any], factor: float) -> list[Any]:
    a, b = two()
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": 0.2}]
    optimizer = wrap(SGD(groups, 0.1))
    (factor * a * b).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [a.item(), b.item()]


def one_is_frozen(wrap: Callable[..., Any], factor: float) -> list[Any]:
    a, b = two()
    a.requires_grad_(False)
    optimizer = wrap(SGD([a, b], 0.1), [("a", a), ("b", b)])
    (factor * a * b).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [a.item(), b.item()]


class Signs(torch.optim.Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one -= group["lr"] * one.grad.sign()


def of_ones_own(wrap: Callable[..., Any], factor: float) -> list[Any]:
    a, b = two()
    optimizer = wrap(Signs([a, b], 0.1), [("a", a), ("b", b)])
    (factor * (a - b * 2)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [a.item(), b.item()]


@case([0.0] * 5)
def several_optimizers_groups_and_classes() -> list[float]:
    """horovod#2154, #3077, #2670, #1618, #1354."""
    return [with_horovod(train) for train in (in_turn, overlapping, groups_without_names, one_is_frozen, of_ones_own)]


@case([-3.0, -9.0])
def a_pass_is_left_over_at_the_epochs_end() -> list[float]:
    """horovod#2497, #2466: Horovod raises an error."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(SGD([weight], 1.0), [("weight", weight)], backward_passes_per_step=2)
    weights = []
    for _ in range(2):
        for number, x in enumerate([1.0, 2.0, 3.0]):
            (weight * x).sum().backward()  # type: ignore[no-untyped-call]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        weights.append(weight.item())
    return weights


@case([0.5, 1.5])
def a_gradient_of_one_rank_alone() -> list[float]:
    """horovod#564: each rank computes one of two parameters."""
    parameters = two()
    optimizer = hvd.DistributedOptimizer(SGD(parameters, 1.0), [("a", parameters[0]), ("b", parameters[1])])
    (parameters[hvd.rank()] * (1 + 2 * hvd.rank())).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.synchronize()
    return [gradient(one) for one in parameters]


COMMUNICATORS: list[Communicator] = []


def run(comm: Communicator, path: str, port: int) -> dict[str, Any]:
    join(comm, path, "gangline")
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    hvd.init()
    COMMUNICATORS.append(comm)
    try:
        return {name: function() for name, (function, _) in CASES.items()}
    finally:
        hvd.shutdown()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(run, 2, str(tmp_path_factory.mktemp("job") / "store"), free_ports(1)[0], threads=1)


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_two_ranks_has_its_result(name: str, job: list[dict[str, Any]]) -> None:
    assert [each[name] for each in job] == list(CASES[name][1])


def test_mxnets_iterators_have_full_batches_and_predictions_no_padding() -> None:
    """apache/mxnet#12285, #2258, #15535."""
    samples = mx.io.NDArrayIter(EIGHT.float().numpy(), batch_size=3)
    module = mx.mod.Module(nn.Linear(1, 2, bias=False))
    module.bind(samples.provide_data, for_training=False)
    module.init_params(arg_params={"weight": torch.tensor([[1.0], [0.0]])})
    assert torch.allclose(module.predict(samples)[:, 0], EIGHT.flatten().float().sigmoid())
    with pytest.raises(ValueError, match="batches of 4 samples from"):
        mx.io.NDArrayIter(torch.zeros(3, 1).numpy(), batch_size=4)

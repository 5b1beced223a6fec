"""Pipelines: layers on several contexts give the weights of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from language_model import lstm_language_model, python_documentation
from measure import distance, plain_loop, same_bits
from torch import nn

from gangline import Pipeline, cpu
from gangline.models.pipelines.pipeline import cut, measured_layers, one_forward_one_backward

STEPS = 20
TEXT, _, CHARACTERS = python_documentation(16)
CUTS = {
    1: {"embed": cpu(0)},
    2: {"embed": cpu(0), "lstm2": cpu(1)},
    3: {"embed": cpu(0), "lstm2": cpu(1), "head": cpu(2)},
}


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data, label = TEXT
    return [(data[size * step : size * (step + 1)], label[size * step : size * (step + 1)]) for step in range(count)]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return lstm_language_model(CHARACTERS, 12, 20, dropout=dropout).double()


TWO_COPIES: Any = [{"embed": cpu(0), "lstm2": cpu(1)}, {"embed": cpu(2), "lstm1": cpu(3), "head": cpu(4)}]


def trained(
    stages: Any, micro_batches: int, dropout: float = 0.0, loads: Sequence[float] | None = None, steps: int = 5
) -> dict[str, torch.Tensor]:
    cuts = CUTS[stages] if isinstance(stages, int) else stages
    pipeline = Pipeline(
        network(dropout), nn.CrossEntropyLoss(), cuts, micro_batches=micro_batches, work_load_list=loads
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    for data, label in batches(steps, 10):
        optimizer.zero_grad()
        pipeline.forward_backward(data, label)
        optimizer.step()
    return pipeline.network.state_dict()


@pytest.mark.slow
def test_an_lstm_on_two_and_three_contexts_gives_the_weights_of_one() -> None:
    expected = plain_loop(network(), batches(STEPS, 10), optimizer=torch.optim.Adam, lr=0.01)
    for stages, micro_batches in ((1, 1), (2, 1), (2, 4), (3, 4), (3, 10), (3, 99)):
        assert distance(trained(stages, micro_batches, steps=STEPS), expected) <= 1e-11


@pytest.mark.slow
def test_dropout_depends_neither_on_the_micro_batches_nor_on_the_contexts_nor_on_the_copies() -> None:
    expected = trained(1, 1, dropout=0.3)
    assert distance(trained(2, 5, dropout=0.3), expected) <= 1e-11
    assert distance(trained(3, 2, dropout=0.3), expected) <= 1e-11
    assert distance(trained(TWO_COPIES, 2, dropout=0.3, loads=[2, 1]), expected) <= 1e-11


@pytest.mark.parametrize("loads", [None, [1, 0]])
def test_copies_on_other_contexts_compute_parts_of_the_batch(loads: Any) -> None:
    assert distance(trained(TWO_COPIES, 3, loads=loads), trained(1, 1)) <= 1e-11


def test_copies_follow_the_first_ones_modes_frozen_layers_and_buffers() -> None:
    torch.manual_seed(1)
    own = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    lists: Any = [[cpu(0), cpu(1)], [cpu(2), cpu(3)]]
    data, label = torch.randn(9, 4).double(), torch.randint(0, 3, (9,))
    pipeline = Pipeline(own, nn.CrossEntropyLoss(), lists, sample=data)
    assert len(pipeline.stages) == len(pipeline.contexts) == 4
    own[1].eval()
    own[0].requires_grad_(False)
    own[1].running_mean.fill_(0.3)  # type: ignore[union-attr, operator]
    expected = nn.functional.cross_entropy(own(data), label)
    expected_gradient = torch.autograd.grad(expected, own[2].weight)[0]  # type: ignore[arg-type]
    assert torch.allclose(pipeline.forward_backward(data, label), expected)
    assert own[0].weight.grad is None
    assert torch.allclose(own[2].weight.grad, expected_gradient)  # type: ignore[arg-type]
    assert len(pipeline.idle) == 4


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CHARACTERS).double()),
        nn.CrossEntropyLoss(ignore_index=3),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=["weights", "ignored", "sum"],
)
@pytest.mark.parametrize("cuts", [CUTS[2], TWO_COPIES], ids=["one copy", "two copies"])
def test_gradients_are_those_of_the_whole_batch_and_are_added(loss: nn.Module, cuts: Any) -> None:
    plain, pipeline = network(), Pipeline(network(), loss, cuts, micro_batches=3)
    for data, label in batches(2, 8):
        expected = loss(plain(data), label)
        expected.backward()
        assert torch.allclose(pipeline.forward_backward(data, label), expected, rtol=1e-12)
    for mine, theirs in zip(pipeline.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-13)


def test_a_layer_that_occurs_twice_runs_twice() -> None:
    relu = nn.ReLU()
    network = nn.Sequential(relu, nn.Linear(3, 3), relu)
    pipeline = Pipeline(network, nn.MSELoss(), {"0": cpu(0), "1": cpu(1)})
    assert pipeline.stages == [["0"], ["1", "2"]]
    data = torch.randn(4, 3)
    assert torch.equal(pipeline(data), network(data))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (3, 2), (3, 4), (5, 9)])
def test_each_stage_runs_every_pass_once_and_keeps_few_activations(stages: int, micro_batches: int) -> None:
    orders = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    for stage, order in enumerate(orders):
        assert sorted(order) == sorted({(number, kind) for number in range(micro_batches) for kind in (True, False)})
        kept = list(itertools.accumulate(1 if is_forward else -1 for _, is_forward in order))
        assert max(kept) == min(stages - stage, micro_batches)
    assert finish(orders) == 2 * (micro_batches + stages - 1)  # passes of one unit: the formula of the bubble


def finish(orders: Sequence[Sequence[Any]]) -> int:
    """Return when stages that follow these orders are done, if each pass takes one unit of time."""
    ends: dict[tuple[int, int, bool], int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            if places[stage] < len(order):
                number, is_forward = order[places[stage]]
                other = (stage - 1 if is_forward else stage + 1, number, is_forward)
                if 0 <= other[0] < len(orders) and other not in ends:
                    continue
                clocks[stage] = max(clocks[stage], ends.get(other, 0)) + 1
                ends[stage, number, is_forward] = clocks[stage]
                places[stage] += 1
    return max(clocks)


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [3.0, 1.0], [1.0, 2.0, 1.0]])
def test_the_cut_is_the_best_of_all(speeds: list[float]) -> None:
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    limits: list[float | None] = [None] * len(speeds)
    found = cut(seconds, [1.0] * 8, speeds, limits)

    def slowest(begins: Sequence[int]) -> float:
        ends = [*begins[1:], 8]
        return max(sum(seconds[b:e]) / speed for b, e, speed in zip(begins, ends, speeds, strict=True))

    inner = itertools.combinations(range(1, 8), len(speeds) - 1)
    assert slowest(found) == min(slowest([0, *begins]) for begins in inner)


def test_the_cut_keeps_to_memory() -> None:
    assert cut([1.0] * 6, [1.0] * 6, [1.0, 1.0], [None, 2.0]) == [0, 4]
    with pytest.raises(ValueError, match="cannot be divided such that each context has one layer or more"):
        cut([1.0] * 6, [1.0] * 6, [1.0, 1.0], [2.0, 2.0])
    with pytest.raises(ValueError, match="1 layers for 2 contexts"):
        cut([1.0], [1.0], [1.0, 1.0], [None, None])


def test_an_automatic_cut_balances_measured_layers_and_leaves_the_network_as_it_was() -> None:
    torch.manual_seed(0)
    widths = [64, 64, 64, 1024, 1024, 64]
    layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    sample, state = torch.randn(64, 64), torch.get_rng_state()
    pipeline = Pipeline(layers, nn.MSELoss(), [cpu(0), cpu(1)], sample=sample)
    assert len(pipeline.stages[0]) in (3, 4)  # before or after the largest layer
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(layers.state_dict(), before)
    assert all(parameter.grad is None for parameter in layers.parameters())
    seconds, nbytes = measured_layers(layers, torch.randn(64, 64), cpu(0), 4)
    assert max(seconds) == seconds[3]
    assert nbytes[0] == 4 * (64 * 64 + 64) * 4 + 4 * 64 * 64 * 4


class Failing(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ValueError("the layer failed")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_in_any_stage_ends_all_and_is_raised(place: int) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
    layers[place] = Failing()
    groups = {str(stage): cpu(stage) for stage in range(3)}
    pipeline = Pipeline(nn.Sequential(*layers), nn.MSELoss(), groups)
    with pytest.raises(ValueError, match="the layer failed"):
        pipeline.forward_backward(torch.ones(8, 4), torch.ones(8, 4))


def test_what_does_not_fit_is_named() -> None:
    own, sample, pair = network(), batches(1, 4)[0][0], [cpu(0), cpu(1)]
    groups: Any
    options: dict[str, Any]
    for groups, options, message in (
        ({"lstm1": cpu(0)}, {}, "does not name the first layer, 'embed'"),
        ({"embed": cpu(0), "lstm9": cpu(1)}, {}, r"names \['lstm9'\]; expected names of layers"),
        ({"embed": cpu(0), "lstm1": cpu(1), "head": cpu(0)}, {}, r"group2ctxs has cpu\(0\) again at layer 'head'"),
        (pair, {}, "sample is None"),
        (pair, {"sample": sample, "speeds": [1]}, "speeds has 1 numbers; expected 2"),
        (pair, {"sample": sample, "speeds": [0, 1]}, r"speeds are \[0, 1\]; expected numbers above 0"),
        (TWO_COPIES, {"work_load_list": [1]}, "work_load_list has 1 numbers; expected 2"),
        (CUTS[2], {"micro_batches": 0}, "micro_batches is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline(own, nn.CrossEntropyLoss(), groups, **options)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Sequential"):
        Pipeline(nn.Linear(2, 2), nn.CrossEntropyLoss())  # type: ignore[arg-type]

"""Initialisers: values by name, and parameters that they leave unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from measure import same_bits
from torch import nn

from gangline.models.initializer import initialise

ROWS, COLUMNS = 200, 300  # fan out and fan in of a Linear


def weight(spec: Any) -> torch.Tensor:
    """Return a Linear's initialised weight."""
    network = nn.Linear(COLUMNS, ROWS, dtype=torch.float64)
    initialise(network, spec)
    assert not network.bias.any()
    return network.weight.detach()


def is_uniform(values: torch.Tensor, bound: float) -> bool:
    """Check for a uniform distribution: range, and mean and deviation within 2 %."""
    return bool(
        values.abs().max() <= bound
        and values.max() > 0.999 * bound
        and values.min() < -0.999 * bound
        and values.mean().abs() < 0.02 * bound
        and values.std().sub(bound / math.sqrt(3)).abs() < 0.02 * bound
    )


def is_normal(values: torch.Tensor, sigma: float) -> bool:
    """Check for a normal distribution: mean and deviation within 2 % of sigma, shares within 1, 2 and 3 sigma."""
    shares = [float((values.abs() < n * sigma).double().mean()) for n in (1, 2, 3)]
    return bool(
        values.mean().abs() < 0.02 * sigma
        and values.std().sub(sigma).abs() < 0.02 * sigma
        and all(abs(share - math.erf(n / math.sqrt(2))) < 0.01 for n, share in enumerate(shares, 1))
    )


def is_constant(values: torch.Tensor, expected: float) -> bool:
    return bool((values == expected).all())


def has_orthogonal_rows(values: torch.Tensor, scale: float) -> bool:
    return torch.allclose(values @ values.T, scale**2 * torch.eye(ROWS, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "fits", "number"),
    [
        ("zeros", is_constant, 0.0),
        ("ONES", is_constant, 1.0),
        (("constant", {"value": -2.5}), is_constant, -2.5),
        ("uniform", is_uniform, 0.07),
        (("uniform", {"scale": 2.0}), is_uniform, 2.0),
        ("normal", is_normal, 0.01),
        (("normal", {"sigma": 3.0}), is_normal, 3.0),
        ("xavier", is_uniform, math.sqrt(3 / 250)),
        (("xavier", {"factor_type": "out", "magnitude": 2.34}), is_uniform, math.sqrt(2.34 / ROWS)),
        (("xavier", {"factor_type": "in", "rnd_type": "gaussian"}), is_normal, math.sqrt(3 / COLUMNS)),
        ("msraprelu", is_normal, math.sqrt(2 / (1 + 0.25**2) / 250)),
        (("msraprelu", {"slope": 0.5, "factor_type": "out"}), is_normal, math.sqrt(2 / 1.25 / ROWS)),
        ("orthogonal", has_orthogonal_rows, 1.414),
    ],
)
def test_a_weight_has_the_values_of_its_initialiser(
    spec: Any, fits: Callable[[torch.Tensor, float], bool], number: float
) -> None:
    assert fits(weight(spec), number)


def test_an_initialiser_of_torch_and_xavier_give_torchs_values() -> None:
    kaiming: Any = nn.init.kaiming_normal_
    for spec, function in (("xavier", nn.init.xavier_uniform_), (kaiming, kaiming)):
        network, reference = nn.Linear(6, 4), torch.empty(4, 6)
        torch.manual_seed(9)
        initialise(network, spec)
        torch.manual_seed(9)
        function(reference)
        assert torch.allclose(network.weight, reference)


@pytest.mark.parametrize("layer", [nn.Conv2d(30, 40, (3, 5)), nn.ConvTranspose2d(40, 30, (3, 5))])
def test_fans_of_a_convolution_count_its_places(layer: nn.Module) -> None:
    initialise(layer, "xavier")
    assert is_uniform(layer.weight.detach(), math.sqrt(3 / ((30 + 40) / 2 * 15)))
    initialise(layer, ("xavier", {"factor_type": "in"}))
    assert is_uniform(layer.weight.detach(), math.sqrt(3 / (30 * 15)))


class Odd(nn.Module):
    """Layer with parameters of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_bias = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.ones(2, 3))
        self.gain = nn.Parameter(torch.ones(3))


def test_biases_are_zero() -> None:
    network = nn.ModuleList([nn.Conv1d(3, 2, 2), nn.LSTM(3, 2, 2), nn.MultiheadAttention(4, 2), Odd()])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(5.0)
    initialise(network, "one")
    for name, parameter in network.named_parameters():
        expected = 0.0 if "bias" in name else 1.0
        assert torch.equal(parameter, torch.full_like(parameter, expected)), name


def test_normalisation_begins_as_torch_begins() -> None:
    instance = nn.InstanceNorm1d(4, affine=True)
    layers = nn.Sequential(nn.BatchNorm2d(4), instance, nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.PReLU(4))
    begin = {name: value.clone() for name, value in layers.state_dict().items()}
    with torch.no_grad():
        for value in layers.state_dict().values():
            value.fill_(3)
    initialise(layers, ("constant", {"value": 7.0}))
    assert same_bits(layers.state_dict(), begin)


def test_names_to_skip_keep_their_values() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(5.0)
    network.register_buffer("count", torch.tensor(3.0))

    def fill(tensor: torch.Tensor) -> None:  # of the user's own, which gets only weights
        assert not torch.is_grad_enabled()
        tensor.fill_(1.0)

    initialise(network, fill, skip={"0.weight", "1.weight", "1.bias", "2.bias"})
    filled = {name: float(parameter.detach().unique()) for name, parameter in network.named_parameters()}
    assert filled == {"0.weight": 5, "0.bias": 0, "1.weight": 5, "1.bias": 5, "2.weight": 1, "2.bias": 5}
    assert network.count == 3


NAMES = ("constant", "msraprelu", "normal", "one", "ones", "orthogonal", "uniform", "xavier", "zero", "zeros")
REFUSED: list[Any] = [
    ("xavierr", ValueError, "'xavierr' is unknown; did you mean 'xavier'.*" + ".*".join(f"'{name}'" for name in NAMES)),
    (("uniform", {"sigma": 1.0}), ValueError, "initializer"),
    (("xavier", {"rnd_type": "normal"}), ValueError, "rnd_type is 'normal'"),
    (("msraprelu", {"factor_type": "both"}), ValueError, "factor_type is 'both'"),
    *((spec, ValueError, "initializer") for spec in (("normal", {"sigma": -1.0}), ("xavier", {"magnitude": -1.0}))),
    *((spec, TypeError, "initializer is") for spec in (None, ["uniform", {}], (3, {}), ("uniform", {}, 1))),
    *((spec, ValueError, r"cannot fill parameter '1\.gain'") for spec in ("xavier", "orthogonal")),  # of one dimension
]


def test_a_wrong_initialiser_is_refused() -> None:
    for spec, error, message in REFUSED:
        with pytest.raises(error, match=message):
            initialise(nn.Sequential(nn.Linear(2, 3), Odd()), spec)

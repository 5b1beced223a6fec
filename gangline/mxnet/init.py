"""`mx.init`: initial weights, drawn from torch's random numbers by MXNet's rules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Initializer:
    """Sets biases and means to 0, factors and variances of normalization to 1, and other weights by `weight`."""

    def weight(self, tensor: Tensor) -> None:
        """Set a weight."""
        raise NotImplementedError

    @torch.no_grad()
    def apply(self, network: nn.Module, given: frozenset[str] = frozenset()) -> None:
        """Set the parameters and buffers of a network that are not among those ``given``."""
        for name, layer in network.named_modules():
            own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            for part, tensor in own:
                if f"{name}.{part}".lstrip(".") in given:
                    continue
                if tensor.dim() > 1:
                    self.weight(tensor)
                else:
                    tensor.fill_(1 if part in ("weight", "running_var") else 0)


class Uniform(Initializer):
    """Uniform between -scale and scale."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def weight(self, tensor: Tensor) -> None:
        """Set a weight."""
        tensor.uniform_(-self.scale, self.scale)


class Normal(Initializer):
    """Normal with a standard deviation."""

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = sigma

    def weight(self, tensor: Tensor) -> None:
        """Set a weight."""
        tensor.normal_(0, self.sigma)


class Constant(Initializer):
    """One value."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def weight(self, tensor: Tensor) -> None:
        """Set a weight."""
        tensor.fill_(self.value)


class Xavier(Initializer):
    """sqrt(magnitude / factor) as scale, with the number of inputs ("in"), outputs ("out") or their mean ("avg")."""

    def __init__(self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3) -> None:
        if rnd_type not in ("uniform", "gaussian") or factor_type not in ("in", "out", "avg"):
            raise ValueError(
                f"rnd_type is {rnd_type!r}, factor_type {factor_type!r}; expected uniform or gaussian, "
                "and in, out or avg"
            )
        self.rnd_type, self.factor_type, self.magnitude = rnd_type, factor_type, magnitude

    def weight(self, tensor: Tensor) -> None:
        """Set a weight."""
        area = math.prod(tensor.shape[2:])
        inputs, outputs = tensor.shape[1] * area, tensor.shape[0] * area
        scale = math.sqrt(
            self.magnitude / {"in": inputs, "out": outputs, "avg": (inputs + outputs) / 2}[self.factor_type]
        )
        if self.rnd_type == "uniform":
            tensor.uniform_(-scale, scale)
        else:
            tensor.normal_(0, scale)


class MSRAPrelu(Xavier):
    """Gaussian `Xavier` for rectifiers with a slope."""

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + slope**2))


def Zero() -> Constant:  # noqa: N802  MXNet's name
    """Return `Constant` of 0."""
    return Constant(0)


def One() -> Constant:  # noqa: N802
    """Return `Constant` of 1."""
    return Constant(1)

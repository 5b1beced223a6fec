"""Weight initialisers by MXNet's names, implemented by torch.nn.init."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline.kvstore.errors import did_you_mean
from gangline.models.names import plain_name

Fill = Callable[[torch.Tensor], Any]
InitializerSpec = str | tuple[str, dict[str, Any]] | Fill

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)


def initialise(network: nn.Module, spec: InitializerSpec, skip: Container[str] = ()) -> None:
    """Initialise the network's parameters in place.

    Normalisation layers and PReLU get torch's defaults, parameters with "bias" in their own name get 0. Random numbers
    come from torch's default generator. Parameters whose plain names are in ``skip`` are left alone, and normalisation
    layers that have such a parameter.
    """
    fill = _fill(spec)
    with torch.no_grad():
        for path, module in network.named_modules():
            own = {plain_name(f"{path}.{name}".lstrip(".")): p for name, p in module.named_parameters(recurse=False)}
            if isinstance(module, _NORMALISATIONS):
                if not any(name in skip for name in own):
                    module.reset_parameters()
                continue
            for name, parameter in own.items():
                if name in skip:
                    continue
                try:
                    (nn.init.zeros_ if "bias" in name.rpartition(".")[2] else fill)(parameter)
                except (ValueError, RuntimeError) as error:
                    raise ValueError(f"initializer {spec!r} cannot fill parameter {name!r}: {error}") from error


def _fill(spec: InitializerSpec) -> Fill:
    if callable(spec):
        return spec
    name, arguments = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"initializer is {spec!r}; expected a name, (name, arguments), or a function")
    if name.lower() not in _BY_NAME:
        raise ValueError(
            f"initializer {name!r} is unknown;{did_you_mean(name, _BY_NAME)} expected one of {sorted(_BY_NAME)}, or a "
            "function"
        )
    try:
        return _BY_NAME[name.lower()](**arguments)
    except TypeError as error:
        raise ValueError(f"initializer {name!r} with {arguments}: {error}") from error


def _xavier(rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3.0) -> Fill:
    """Glorot and Bengio 2010, in MXNet's form: scale sqrt(magnitude / factor)."""
    if rnd_type not in ("uniform", "gaussian"):
        raise ValueError(f"rnd_type is {rnd_type!r}; expected 'uniform' or 'gaussian'")
    if factor_type not in ("avg", "in", "out"):
        raise ValueError(f"factor_type is {factor_type!r}; expected 'avg', 'in' or 'out'")

    def fill(tensor: torch.Tensor) -> None:
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(tensor)
        factor = {"avg": (fan_in + fan_out) / 2, "in": fan_in, "out": fan_out}[factor_type]
        _BY_NAME["uniform" if rnd_type == "uniform" else "normal"](math.sqrt(magnitude / factor))(tensor)

    return fill


_BY_NAME: dict[str, Callable[..., Fill]] = {
    "constant": lambda value=0.0: partial(nn.init.constant_, val=value),
    "msraprelu": lambda factor_type="avg", slope=0.25: _xavier("gaussian", factor_type, 2.0 / (1 + slope**2)),
    "normal": lambda sigma=0.01: partial(nn.init.normal_, mean=0.0, std=sigma),
    "one": lambda: nn.init.ones_,
    "ones": lambda: nn.init.ones_,
    "orthogonal": lambda scale=1.414: partial(nn.init.orthogonal_, gain=scale),
    "uniform": lambda scale=0.07: partial(nn.init.uniform_, a=-scale, b=scale),
    "xavier": _xavier,
    "zero": lambda: nn.init.zeros_,
    "zeros": lambda: nn.init.zeros_,
}
"""MXNet's names and arguments; msraprelu follows He et al. 2015."""

"""Names of parameters and buffers, independent of compiled parts of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_COMPILED = "_orig_mod"
"""Attribute of a compiled module that holds the original module."""


def plain_name(name: str) -> str:
    """Return a state_dict name as it was before torch.compile."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def parameters_of(network: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name."""
    named = network.named_parameters(remove_duplicate=remove_duplicate)
    return {plain_name(name): parameter for name, parameter in named}


def buffers_of(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers by plain name, under all their names."""
    return {plain_name(name): buffer for name, buffer in network.named_buffers(remove_duplicate=False)}


def state_of(network: nn.Module, *, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of the state_dict by plain name."""
    state = network.state_dict(keep_vars=keep_vars)
    return {plain_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def as_named_by(network: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by plain name under the names of the network's own state_dict."""
    names = {plain_name(name): name for name in network.state_dict()}
    return {names.get(name, name): value for name, value in state.items()}


def check_parameter_names(network: nn.Module, names: Sequence[str]) -> list[str]:
    """Return ``fixed_param_names`` of a module; ValueError if one is not the name of a parameter."""
    if isinstance(names, str):
        raise TypeError(f"fixed_param_names is {names!r}; expected a list of names")
    known = list(parameters_of(network))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"fixed_param_names has {unknown}, which are no parameters; they are {known}")
    return list(names)

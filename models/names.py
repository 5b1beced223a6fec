"""Names of parameters and buffers, independent of compiled parts of the network."""

from __future__ import annotations

from collections.abc import Mapping
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

"""`mx.model`: checkpoints of weights, as ``prefix-0001.params`` in the format of `nd.save`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gangline.mxnet import nd

Params = Mapping[str, torch.Tensor]


def save_checkpoint(prefix: str, epoch: int, symbol: Any, arg_params: Params, aux_params: Params) -> None:
    """Write parameters and buffers; ``symbol`` is MXNet's, the network is code here."""
    del symbol
    nd.save(f"{prefix}-{epoch:04d}.params", joined(arg_params, aux_params))


def load_checkpoint(prefix: str, epoch: int) -> tuple[None, dict[str, nd.NDArray], dict[str, nd.NDArray]]:
    """Return None for the symbol, parameters, and buffers."""
    return None, *parted(nd.load(f"{prefix}-{epoch:04d}.params"))


def joined(arg_params: Params, aux_params: Params) -> dict[str, torch.Tensor]:
    """Return one dict of what has a kind each."""
    kinds = {"arg": arg_params, "aux": aux_params}
    return {f"{kind}:{name}": one for kind, params in kinds.items() for name, one in params.items()}


def parted(saved: Mapping[str, nd.NDArray]) -> tuple[dict[str, nd.NDArray], dict[str, nd.NDArray]]:
    """Return parameters and buffers of what `joined` has returned."""
    found: dict[str, dict[str, nd.NDArray]] = {"arg": {}, "aux": {}}
    for name, one in saved.items():
        kind, _, rest = name.partition(":")
        found[kind][rest] = one
    return found["arg"], found["aux"]

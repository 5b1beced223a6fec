"""Private names of torch that balancing needs; tests check them with each version of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def flat_parameters(network: nn.Module) -> list[Tensor]:
    """Return the parameters that gradients arrive at under FullyShardedDataParallel (FSDP1); none without it."""
    units = FullyShardedDataParallel.fsdp_modules(network)
    return [unit._flat_param for unit in units if unit._flat_param is not None]


class _Zeros(torch.autograd.Function):
    """A number whose gradient with regard to some parameters is zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


def reduced_parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters whose gradients DistributedDataParallel reduces, by name."""
    return {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}


def enter_forward(model: DistributedDataParallel) -> None:
    """Run what DistributedDataParallel does before forward."""
    tensor = torch.zeros(())  # an input, which it moves to a GPU
    model._pre_forward(tensor)  # type: ignore[no-untyped-call]


def complete_reduction(model: DistributedDataParallel, *, arrived: int) -> None:
    """Take part in the reduction of a step whose forward or backward has failed, with zeros for missing gradients.

    The model has run what comes before forward. A failed backward has brought gradients to ``arrived`` parameters; the
    others had none before.

    Raises:
        RuntimeError: if it is not known which ones they are, or none is missing.
    """
    parameters = list(reduced_parameters(model).values())
    with torch.enable_grad():
        if arrived:
            missing = [parameter for parameter in parameters if parameter.grad is None]
            if not missing or len(parameters) - len(missing) > arrived:
                raise RuntimeError(
                    f"backward failed after {arrived} of {len(parameters)} gradients, and it is not known which ones "
                    "other ranks have got; restart from a checkpoint"
                )
            output = _Zeros.apply(*missing)  # type: ignore[no-untyped-call]
        else:
            output = model._post_forward(_Zeros.apply(*parameters))  # type: ignore[no-untyped-call]
        output.backward()

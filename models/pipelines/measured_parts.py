"""Times and bytes of the parts of any network, between the layers where `cut` may divide it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from gangline.models.pipelines.pipeline import BYTES_PER_PARAMETER_BYTE, MEASURED_RUNS


def layers_of(network: nn.Module) -> list[str]:
    """Return the names of the layers of the Sequential or ModuleList with the most weights; ValueError without one."""
    chains = {name: one for name, one in network.named_modules() if isinstance(one, (nn.Sequential, nn.ModuleList))}
    if not chains:
        raise ValueError(
            f"{type(network).__name__} has no nn.Sequential or nn.ModuleList, whose layers could be divided"
        )
    chain = max(chains, key=lambda name: sum(one.nbytes for one in chains[name].parameters()))
    return [f"{chain}.{name}".lstrip(".") for name, _ in chains[chain].named_children()]


def measured_parts(
    network: nn.Module, names: Sequence[str], arguments: Sequence[Any], named: Mapping[str, Any], kept: int
) -> tuple[list[float], list[float]]:
    """Return seconds and bytes of the part from each of these layers to the next, as `measured_layers`.

    The first part begins with the network's forward on these arguments, a micro-batch; the last one ends with it.
    ValueError if the layers do not run once each, in this order, or the first output needs no gradient.
    """
    numbers = {network.get_submodule(name): number for number, name in enumerate(names)}
    trained = [one for one in network.parameters() if one.requires_grad]
    storages = {one.untyped_storage().data_ptr() for one in network.parameters()}
    weights: list[dict[int, int]] = [{} for _ in names]
    saved: list[dict[int, int]] = [{} for _ in names]

    def now() -> float:
        if any(one.is_cuda for one in trained):
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(module: nn.Module, *given: Any) -> None:
        if module in numbers:
            begun.append((numbers[module], now()))
            for one in _pytree.tree_leaves(given):
                if isinstance(one, torch.Tensor) and one.requires_grad:
                    one.register_hook(lambda _, number=numbers[module]: arrived.setdefault(number, now()) and None)  # type: ignore[no-untyped-call]
        weights[max(len(begun) - 1, 0)].update((id(one), one.nbytes) for one in module.parameters(recurse=False))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in storages:
            saved[max(len(begun) - 1, 0)][storage.data_ptr()] = storage.nbytes()
        return tensor

    runs: list[list[float]] = []
    for _ in range(MEASURED_RUNS + 1):  # the first one allocates
        begun: list[tuple[int, float]] = []  # layers, and when they began
        arrived: dict[int, float] = {}  # when the gradient of a layer's input was computed
        saved[:] = [{} for _ in names]
        start = now()
        hooks = [one.register_forward_pre_hook(begin, with_kwargs=True) for one in network.modules()]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = _pytree.tree_leaves(network(*arguments, **named))[0]
        middle = now()
        for hook in hooks:  # activation checkpointing runs layers again
            hook.remove()
        ran = [names[number] for number, _ in begun]
        if ran != [*names] or not output.requires_grad:
            raise ValueError(f"layers {ran} of {[*names]} ran; expected each once, in order, and an output to train")
        torch.autograd.grad(output.sum(), trained, allow_unused=True)
        end = now()
        forward = [start, *(at for _, at in begun[1:]), middle]
        backward = [end, *(arrived.get(number, end) for number in range(1, len(names))), middle]
        runs.append([b - a + c - d for (a, b), (c, d) in zip(pairwise(forward), pairwise(backward), strict=True)])
    held = [BYTES_PER_PARAMETER_BYTE * sum(one.values()) for one in weights]
    nbytes = [float(own + kept * sum(one.values())) for own, one in zip(held, saved, strict=True)]
    return [statistics.median(of_part) for of_part in zip(*runs[1:], strict=True)], nbytes

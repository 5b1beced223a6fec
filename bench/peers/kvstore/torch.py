"""Plain torch code: add the gradients of a key, copy the sum to each context, key by key."""

from __future__ import annotations

from typing import Any

import torch

from gangline.kvstore.context import contexts


def join() -> dict[str, Any]:
    """Return what `serve.py` needs."""
    return {"who": f"torch {torch.__version__.partition('+')[0]}", "prepare": prepare}


class Gradients:
    """Random gradients of each key on each context, and tensors for their sums.

    Args:
        options: ``keys`` (pairs of name and shape) and ``contexts`` (words such as "cpu(0),cpu(1)").
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._devices = [context.torch_device for context in contexts(options["contexts"])]
        generator = torch.Generator().manual_seed(0)
        self.given = [
            [torch.rand(shape, generator=generator).to(device) for device in self._devices]
            for _, shape in options["keys"]
        ]
        self.outs = [[torch.zeros_like(gradient) for gradient in of_key] for of_key in self.given]

    def wait(self) -> None:
        """Wait for the GPUs."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def check(self) -> float:
        """Return the largest absolute error of a sum."""
        worst = 0.0
        for of_key, pulled in zip(self.given, self.outs, strict=True):
            exact = torch.stack([gradient.double().cpu() for gradient in of_key]).sum(0)
            worst = max(worst, *(float((out.double().cpu() - exact).abs().max()) for out in pulled))
        return worst


def prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Allocate tensors for all keys; sums are computed on the first context.

    Args:
        options: as of `Gradients`.
    """
    gradients = Gradients(options)
    sums = [torch.zeros_like(of_key[0]) for of_key in gradients.given]

    def step() -> None:
        for total, (first, *others) in zip(sums, gradients.given, strict=True):
            if others:  # one pass over the total less than copy_ and add_
                torch.add(first, others[0].to(total.device), out=total)
            else:
                total.copy_(first)
            for other in others[1:]:
                total.add_(other.to(total.device))
        for total, pulled in zip(sums, gradients.outs, strict=True):
            for out in pulled:
                out.copy_(total)
        gradients.wait()

    return {"step": step, "wait": gradients.wait, "check": gradients.check}

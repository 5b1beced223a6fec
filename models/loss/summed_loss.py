"""A loss as a sum over a share of the batch, and what the share adds to the batch's normaliser.

The gradient of a whole batch is then exact however the batch was shared out: add the sums, add the counts, divide
once. A share's own mean would weigh its samples by the share's size, and be NaN where all its labels are ignored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from gangline.models.data.batches import Batch

Loss = nn.Module | Callable[..., torch.Tensor] | None
Normalizer = Callable[[Any], float]

_BY_CLASS: tuple[type[nn.Module], ...] = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_ELEMENT: tuple[type[nn.Module], ...] = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
_BY_SAMPLE: tuple[type[nn.Module], ...] = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss)
_MODULE_OF: dict[Any, Callable[[], nn.Module]] = {
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.huber_loss: nn.HuberLoss,
    F.l1_loss: nn.L1Loss,
    F.mse_loss: nn.MSELoss,
    F.nll_loss: nn.NLLLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
}


class SummedLoss:
    """What a loss is to a replica: `sum_and_count` of its share.

    torch's losses of (output, label) are summed and counted as torch counts for reduction="mean": class weights of
    the labels not ignored, elements, or samples; with reduction="sum" the batch's normaliser is 1. Any other
    callable is a mean over samples, or over what ``normalizer(label)`` counts. None: the output is the loss.
    """

    def __init__(self, loss: Loss, normalizer: Normalizer | None = None) -> None:
        """Check the loss and find out how it counts.

        Raises:
            TypeError: the loss or the normalizer is not callable.
            ValueError: the loss has parameters, or its reduction is "none".
        """
        if loss is not None and not callable(loss):
            raise TypeError(f"loss is {loss!r}; expected a torch loss, a function of (output, label), or None")
        if normalizer is not None and not callable(normalizer):
            raise TypeError(f"loss_normalizer is {normalizer!r}; expected a function of the label")
        loss = next((module() for function, module in _MODULE_OF.items() if function is loss), loss)
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ValueError(
                f"loss {loss} has parameters, which nothing would train; make it part of the network and pass loss=None"
            )
        reduction = getattr(loss, "reduction", "mean")
        if reduction == "none":
            raise ValueError(f"loss {loss} has reduction='none'; expected 'mean' or 'sum'")
        self.loss = loss
        self.normalizer = normalizer
        self.is_sum = normalizer is None and reduction == "sum"
        known = (*_BY_CLASS, *_BY_ELEMENT, *_BY_SAMPLE)
        self._counts_as_torch = normalizer is None and any(_is_plain(loss, kind) for kind in known)
        self._summed = loss
        if self._counts_as_torch:
            self._summed = copy.copy(loss)
            self._summed.reduction = "sum"  # type: ignore[union-attr]
        self._on_device: dict[torch.device, Any] = {}

    def sum_and_count(
        self, output: Batch, label: Batch, host_label: Batch, samples: int
    ) -> tuple[torch.Tensor | None, float]:
        """The share's loss as a sum, and its part of the batch's normaliser; (None, 0) where there is no loss.

        Args:
            output: the network's output for the share.
            label: the share's labels on the output's device.
            host_label: the same labels where the caller had them, so that counting copies nothing from a GPU.
            samples: how many samples the share has.
        """
        if self.loss is None:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point():
                return None, 0.0
            if output.dim():
                return _wide(output).sum(), output.numel()
            return _wide(output) * samples, samples
        if self.is_sum:
            return self._placed(output)(output, label), 1.0
        if self._counts_as_torch:
            _check_tensor(output, f"the output that {type(self.loss).__name__} gets")
            count = self._torch_count(output, host_label)
            return self._placed(output)(output, label), count
        count = float(samples if self.normalizer is None else self.normalizer(host_label))
        if not count:
            return torch.zeros((), device=_device(output)), 0.0
        value = self._placed(output)(output, label)
        if not isinstance(value, torch.Tensor) or value.dim():
            shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"loss {self.loss} gave {shape}; expected a tensor without axes, the mean over samples")
        return _wide(value) * count, count

    def known_normalizer(self, label: Batch | None, samples: int) -> float | None:
        """What a batch's summed loss is divided by, where the labels alone say it; None where that takes outputs.

        Args:
            label: the labels of the whole batch.
            samples: how many samples it has.
        """
        if label is None or self.loss is None or self.normalizer is not None:
            return None
        if self.is_sum:
            return 1.0
        if not self._counts_as_torch:
            return float(samples)
        if self._counts_classes(label) and getattr(self.loss, "weight", None) is None:
            return self._class_count(label)
        return None  # weights are added up share by share, and may round otherwise over the whole batch

    def _placed(self, output: Batch) -> Any:
        """The loss with its own tensors (class weights, say) on the output's device."""
        if not isinstance(self._summed, nn.Module):
            return self._summed
        device = _device(output)
        if not self._counts_as_torch and all(buffer.device == device for buffer in self._summed.buffers()):
            return self._summed
        if device not in self._on_device:
            self._on_device[device] = copy.deepcopy(self._summed).to(device)
        return self._on_device[device]

    def _torch_count(self, output: torch.Tensor, label: torch.Tensor) -> float:
        loss: Any = self.loss
        name = type(loss).__name__
        _check_tensor(label, f"the label that {name} gets")
        if self._counts_classes(label):
            return self._class_count(label)
        if isinstance(loss, nn.CrossEntropyLoss):  # class probabilities: one count for each distribution
            return output.numel() / output.shape[1]
        if loss.reduction == "batchmean":
            return float(output.shape[0])
        if isinstance(loss, _BY_SAMPLE):
            return output.numel() / output.shape[-1]
        if output.dim() != label.dim():
            raise ValueError(
                f"{name} got an output of shape {tuple(output.shape)} and a label of shape {tuple(label.shape)}, "
                "which would mix samples; expected as many axes (reshape or unsqueeze one of them)"
            )
        return float(math.prod(max(sizes) for sizes in zip(output.shape, label.shape, strict=True)))

    def _counts_classes(self, label: Batch) -> TypeGuard[torch.Tensor]:
        """Whether the loss takes these labels as class indices."""
        by_class = any(_is_plain(self.loss, kind) for kind in _BY_CLASS)
        return by_class and isinstance(label, torch.Tensor) and not label.is_floating_point()

    def _class_count(self, label: torch.Tensor) -> float:
        loss: Any = self.loss
        valid = label != loss.ignore_index
        if loss.weight is None:
            return float(valid.sum())
        return float(loss.weight.to(label.device)[label[valid].long()].double().sum())


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A loss in a precision that can hold a sum over many samples."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _is_plain(loss: Any, kind: type[nn.Module]) -> bool:
    """Whether the loss is of torch's kind, or of a subclass that does not compute another value."""
    return isinstance(loss, kind) and type(loss).forward is kind.forward


def _check_tensor(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} is a {type(value).__name__}; expected a tensor (or pass a loss function of your own)")


def _device(output: Batch) -> torch.device:
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.device

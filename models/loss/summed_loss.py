"""A loss as a sum over a share of the batch, with the share's part of the batch's normalizer.

The gradient of the whole batch is then exact for any split: add the sums, add the counts, divide once. The mean of a
share would weight its samples by the share's size, and be NaN if all its labels are ignored.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gangline.models.data.batches import Batch
from gangline.models.ignored_labels import counts_labels

_log = logging.getLogger("gangline")
Loss = nn.Module | Callable[..., torch.Tensor] | None
Normalizer = Callable[[Any], float]

_MODULE_OF: dict[Any, type[nn.Module]] = {
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.huber_loss: nn.HuberLoss,
    F.kl_div: nn.KLDivLoss,
    F.l1_loss: nn.L1Loss,
    F.mse_loss: nn.MSELoss,
    F.nll_loss: nn.NLLLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
}
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_SAMPLE = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss)
_OTHERS = (nn.HingeEmbeddingLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)
_COUNTED_AS_TORCH = (*_MODULE_OF.values(), *_BY_SAMPLE, *_OTHERS)


class SummedLoss:
    """Loss of a share as a sum and a count, see `sum_and_count`.

    torch's losses of (output, label) are summed, and counted as torch does for reduction="mean": class weights of the
    labels not ignored, elements, or samples; with reduction="sum" the batch's normalizer is 1. Any other callable that
    returns the mean of one call of F.cross_entropy or F.nll_loss is counted as that call; else it is taken as a mean
    over samples, which is logged once, or over what ``normalizer(label)`` counts. With None the output is the loss: one
    number, the mean over samples, or one number per sample.
    """

    def __init__(self, loss: Loss, normalizer: Normalizer | None = None) -> None:
        """Check the loss, and the function from the label to the divisor of a custom loss."""
        if isinstance(loss, type):
            raise TypeError(f"loss is the class {loss.__name__}; expected an object: write {loss.__name__}()")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss is {loss!r}; expected a torch loss, a function of (output, label), or None")
        if normalizer is not None and not callable(normalizer):
            raise TypeError(f"loss_normalizer is {normalizer!r}; expected a function of the label")
        loss = _as_module(loss)
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
        self._counts_as_torch = normalizer is None and _is_plain(loss, _COUNTED_AS_TORCH)
        self._summed = loss
        if self._counts_as_torch:
            self._summed = copy.copy(loss)
            self._summed.reduction = "sum"  # type: ignore[union-attr]
        self._on_device: dict[torch.device, Any] = {}
        self._counts_its_call: bool | None = None
        """True if a custom loss returns the mean of one call of torch; None before the first share."""

    def sum_and_count(
        self, output: Batch, label: Batch, host_label: Batch, samples: int
    ) -> tuple[torch.Tensor | None, float]:
        """Return the share's summed loss and its part of the batch's normalizer; (None, 0) if there is no loss.

        The labels are given on the output's device and on the host, so that counting copies nothing from a GPU.
        """
        if self.loss is None:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point():
                return None, 0.0
            if output.numel() == 1:
                return _wide(output).sum() * samples, samples
            return (_wide(output).sum(), samples) if output.numel() == samples else (None, 0.0)
        if self.is_sum:
            return self._placed(output)(output, label), 1.0
        if self._counts_as_torch:
            _check_tensor(output, f"the output for {type(self.loss).__name__}")
            count = _torch_count(self.loss, output, host_label)
            return self._placed(output)(output, label), count
        count = float(samples if self.normalizer is None else self.normalizer(host_label))
        if not count:
            return torch.zeros((), device=_device(output)), 0.0
        if self.normalizer is None and self._counts_its_call is not False and not _is_compiled(self.loss):
            with _ClassLossCalls() as calls:
                value = self._placed(output)(output, label)
            count = self._count_of(value, calls, samples)
            if not count:
                return _wide(value).nan_to_num() * 0, 0.0  # the mean over no labels is NaN, with a zero gradient
        else:
            value = self._placed(output)(output, label)
        if not isinstance(value, torch.Tensor) or value.dim():
            shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"loss {self.loss} gave {shape}; expected a scalar tensor, the mean over samples")
        return _wide(value) * count, count

    def error_without_loss(self, output: Batch) -> Exception:
        """Return the error of backward for a share without a loss, given the network's output."""
        if self.loss is not None:
            return RuntimeError("backward() has no loss: forward() got no label; give one, or call backward(out_grads)")
        what = (
            f"has shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else f"is a {type(output).__name__}"
        )
        if isinstance(output, torch.Tensor) and not output.is_floating_point():
            what += f" and dtype {output.dtype}"
        return ValueError(
            f"the module has loss=None, but the network's output {what}, which is not a loss: expected one "
            "floating-point number, or one per sample; give a loss, such as Module(network, "
            "loss=torch.nn.CrossEntropyLoss()), or call backward(out_grads)"
        )

    def known_normalizer(self, label: Batch | None, samples: int) -> float | None:
        """Return the normalizer of a whole batch if its labels determine it; None if the outputs are needed."""
        if label is None or self.loss is None or self.normalizer is not None:
            return None
        if self.is_sum:
            return 1.0
        if not self._counts_as_torch:
            return float(samples) if self._counts_its_call is False else None
        if _counts_classes(self.loss, label) and getattr(self.loss, "weight", None) is None:
            return _class_count(self.loss, label)
        return None  # class weights summed over the whole batch may round differently than share by share

    def _placed(self, output: Batch) -> Any:
        """Return the loss with its buffers, such as class weights, on the output's device."""
        if not isinstance(self._summed, nn.Module):
            return self._summed
        device = _device(output)
        if not self._counts_as_torch and all(buffer.device == device for buffer in self._summed.buffers()):
            return self._summed
        if device not in self._on_device:
            self._on_device[device] = copy.deepcopy(self._summed).to(device)
        return self._on_device[device]

    def _count_of(self, value: Any, calls: _ClassLossCalls, samples: int) -> float:
        """Return the count of a custom loss that made these calls and returned ``value``."""
        call = next((call for call in calls.made if call[0] is value), None)
        if call is not None:
            _, loss, output, label = call
            if loss.reduction == "sum":
                raise ValueError(
                    f"loss {self.loss} returns a sum; expected a mean, or the torch loss itself, such as "
                    f"torch.nn.{type(loss).__name__}(reduction='sum')"
                )
            self._counts_its_call = True
            return _torch_count(loss, output, label)
        if self._counts_its_call:
            raise ValueError(
                f"loss {self.loss} returned the mean of a call of torch for earlier batches, and something else now; "
                "pass loss_normalizer, a function of the label that returns what the mean is over"
            )
        if self._counts_its_call is None:
            self._counts_its_call = False
            if any(_skips_labels(loss, label) for _, loss, _, label in calls.made):
                _log.warning(
                    "loss %s is weighted by samples where a batch is split, though it calls a torch loss that ignores "
                    "or weights labels, and changes its result: return that result as it is, or pass loss_normalizer",
                    self.loss,
                )
            else:
                text = "loss %s counts as a mean over samples; if it is over something else, pass loss_normalizer"
                _log.info(text, self.loss)
        return samples


class _ClassLossCalls(TorchFunctionMode):
    """Records calls of torch's class losses, whose mean is over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]] = []
        """(result, loss, output, label) of each call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.cross_entropy or func is F.nll_loss:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            output, label = given.pop("input"), given.pop("target")
            self.made.append((result, _MODULE_OF[func](**given), output, label))
        return result


def _as_module(loss: Any) -> Any:
    """Return the torch module of a torch function, also of a partial with options; another loss unchanged."""
    function, options = loss, {}
    if isinstance(loss, functools.partial) and not loss.args:
        function, options = loss.func, loss.keywords
    for one, make in _MODULE_OF.items():
        if one is function:
            with suppress(TypeError):  # an option of the function only, such as the weight of mse_loss
                return make(**options)
    return loss


def _is_compiled(loss: Any) -> bool:
    """Return True for a result of torch.compile, whose calls cannot be seen."""
    return hasattr(loss, "_torchdynamo_orig_callable") or hasattr(loss, "_orig_mod")


def _torch_count(loss: Any, output: torch.Tensor, label: Any) -> float:
    """Return the divisor of a torch loss with reduction="mean"."""
    name = type(loss).__name__
    _check_tensor(label, f"the label for {name}")
    if _counts_classes(loss, label):
        return _class_count(loss, label)
    if isinstance(loss, nn.CrossEntropyLoss):  # class probabilities: one per distribution
        return output.numel() / output.shape[1]
    if loss.reduction == "batchmean":
        return float(output.shape[0])
    if isinstance(loss, _BY_SAMPLE):
        return output.numel() / output.shape[-1]
    if output.dim() != label.dim():
        raise ValueError(
            f"{name} got an output of shape {tuple(output.shape)} and a label of shape {tuple(label.shape)}, "
            "which would mix samples; expected the same number of axes (reshape or unsqueeze one of them)"
        )
    return float(math.prod(max(sizes) for sizes in zip(output.shape, label.shape, strict=True)))


def _counts_classes(loss: Any, label: Batch) -> TypeGuard[torch.Tensor]:
    """Return True if the loss takes these labels as class indices."""
    return _is_plain(loss, _BY_CLASS) and isinstance(label, torch.Tensor) and not label.is_floating_point()


def _class_count(loss: Any, label: torch.Tensor) -> float:
    valid = label != loss.ignore_index
    if loss.weight is None:
        return float(valid.sum())
    return float(loss.weight.to(label.device)[label[valid].long()].double().sum())


def _skips_labels(loss: Any, label: torch.Tensor) -> bool:
    """Return True if the loss weights its labels, or may ignore some."""
    is_set = loss.ignore_index != nn.CrossEntropyLoss().ignore_index
    return is_set or counts_labels(loss.weight, loss.ignore_index, label)


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return half-precision losses as float32, which can hold a sum over many samples."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _is_plain(loss: Any, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return True if the loss is of one of these torch classes, or of a subclass with the same forward."""
    return any(isinstance(loss, kind) and type(loss).forward is kind.forward for kind in kinds)


def _check_tensor(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} is a {type(value).__name__}; expected a tensor (or pass your own loss function)")


def _device(output: Batch) -> torch.device:
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.device

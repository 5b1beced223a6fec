"""Notes for errors of networks and losses: failed layer, shapes and dtypes, labels that are not classes."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gangline.models.data.batches import Batch, tensors_of

_IGNORED = -100
"""Default ``ignore_index`` of torch's CrossEntropyLoss and NLLLoss."""


def explain_forward(error: Exception, network: nn.Module, inputs: Batch) -> None:
    """Add the failed layer and the network's inputs to an error of a forward."""
    names = {id(module): name for name, module in network.named_modules()}
    failed: Any = network
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        failed = caller if id(caller) in names else failed
    if failed is not network:
        is_leaf = next(failed.children(), None) is None  # a block's text would list all its layers
        error.add_note(f"raised in layer {names[id(failed)]!r}, {failed if is_leaf else type(failed).__name__}")
    dtypes = sorted({str(parameter.dtype) for parameter in network.parameters()})
    error.add_note(
        f"the network got {_shapes(inputs)}, its share of the batch; its weights are {', '.join(dtypes) or 'none'}"
    )
    if isinstance(inputs, Mapping):
        error.add_note(
            f"the data are a dict, whose values become arguments of forward() by their names, {list(inputs)}; expected "
            "(data, label) if one of them is the label"
        )


def explain_loss(error: Exception, loss: Any, output: Any, label: Batch | None, label_on_host: Batch | None) -> None:
    """Add the loss's arguments to its error, and the label that is not a class, if the loss takes classes."""
    if label is None:  # the loss is the network's own output
        return
    shapes = _shapes(output) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
    error.add_note(f"the loss got the output {shapes}, and the label {_shapes(label)}")
    takes_classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    if (
        takes_classes
        and isinstance(output, torch.Tensor)
        and output.ndim > 1
        and isinstance(label_on_host, torch.Tensor)
    ):
        try:
            check_classes(label_on_host, output.shape[1], "the share", ignored=loss.ignore_index)
        except ValueError as reason:
            error.add_note(str(reason))


def check_classes(labels: torch.Tensor, num_classes: int, what: str, *, ignored: int = _IGNORED) -> None:
    """Check that labels on the host are classes.

    Args:
        labels: int64 or uint8 numbers from 0 to C - 1, or ``ignored``; or class probabilities, floats of shape
            (samples, C, ...).
        num_classes: C.
        what: name of the data in messages.
        ignored: label that the loss ignores.

    Raises:
        ValueError: if a label is invalid; the message names the first one.
    """
    if labels.is_floating_point():
        if labels.ndim < 2 or labels.shape[1] != num_classes:
            raise ValueError(
                f"the labels of {what} are {labels.dtype} of shape {tuple(labels.shape)}; expected int64 "
                f"class numbers, or probabilities of shape (samples, {num_classes})"
            )
        return
    if labels.dtype not in (torch.int64, torch.uint8):  # what torch's losses take
        raise ValueError(f"the labels of {what} are {labels.dtype}; expected torch.int64, as .long() makes them")
    wrong = ((labels < 0) | (labels >= num_classes)) & (labels != ignored)
    if bool(wrong.any()):
        wrong_indices = wrong.nonzero()
        first = tuple(wrong_indices[0].tolist())
        raise ValueError(
            f"label {int(labels[first])} of sample {first[0]} of {what} is not a class; expected 0 to "
            f"{num_classes - 1} ({len(wrong_indices)} out of range)"
        )


def _shapes(batch: Batch) -> str:
    """Return shapes and dtypes of the tensors of a batch."""
    return ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in tensors_of(batch)) or "nothing"

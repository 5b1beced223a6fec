"""Batches: nested tuples or dicts of tensors whose first axis is the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from gangline.kvstore.numpy_arrays import readable

Batch = Any
"""A tensor, a tuple or list of batches, or a dict of them."""
_MOST_PARTS = 4  # of a batch, which a collate function returns as a list


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Batch) -> Batch:
    """Apply ``function`` to each tensor and keep the nesting."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(function, part) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(map_tensors(function, part) for part in batch)
    raise TypeError(f"a batch holds a {type(batch).__name__}; expected tensors, or tuples or dicts of them")


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return all tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return found


def as_batch(value: Any, what: str) -> Batch:
    """Return ``value`` with numpy arrays as tensors that share their memory; TypeError if it holds anything else."""
    if isinstance(value, np.ndarray):
        return readable(value, what)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping) and value:
        return {name: as_batch(part, f"{what}[{name!r}]") for name, part in value.items()}
    if isinstance(value, (tuple, list)) and value:
        return tuple(as_batch(part, f"{what}[{index}]") for index, part in enumerate(value))
    raise TypeError(
        f"{what} is a {type(value).__name__}; expected a tensor, a numpy array, or a non-empty tuple or dict of them"
    )


def num_samples(batch: Batch, what: str) -> int:
    """Return the number of samples of a batch; ValueError if its tensors disagree, or there are none."""
    if isinstance(batch, torch.Tensor) and batch.dim() and len(batch):  # most batches are one tensor
        return len(batch)
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
    if any(not shape for shape in shapes):
        raise ValueError(f"{what} has a tensor without axes; expected the batch on the first axis")
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1:
        raise ValueError(f"{what} has tensors of shapes {shapes}; expected one batch size on the first axis of all")
    size = sizes.pop()
    if size < 1:
        raise ValueError(f"{what} has no samples; expected at least one")
    return size


def common_rows(batch: Any, samples: int) -> int:
    """Return the length that all tensors and lists of a batch have, or ``samples`` if they have none in common."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, list | tuple):
        parts = [parts]
    elif len(parts) == samples > _MOST_PARTS:  # the samples themselves
        return samples
    lengths: set[int | None] = set()
    for part in parts:
        if isinstance(part, Mapping):
            lengths.add(common_rows(part, -1))
        elif isinstance(part, torch.Tensor | np.ndarray):
            lengths |= {len(part)} if part.ndim else set()
        elif isinstance(part, list | tuple):  # of tensors: of samples, or parts of a batch
            is_plain = not any(isinstance(each, torch.Tensor | np.ndarray | Mapping | list | tuple) for each in part)
            lengths.add(len(part) if is_plain else None)
    found = lengths.pop() if len(lengths) == 1 else None
    return samples if found is None or found < 0 else found


def is_empty(data: Any) -> bool:
    """Return whether data is None or has tensors without samples."""
    return data is None or all(0 in tensor.shape[:1] for tensor in tensors_of(as_batch(data, "data")))


def length_of(items: Any) -> int | None:
    """Return the length of batches, a data set or a sampler; None if it has none."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def take(batch: Batch, index: slice | torch.Tensor) -> Batch:
    """Return the samples at ``index``; views for a slice."""
    return batch[index] if isinstance(batch, torch.Tensor) else map_tensors(lambda tensor: tensor[index], batch)


def move(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on ``device``; tensors that are there already are not copied."""
    is_gpu = device.type == "cuda"
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=is_gpu)
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=is_gpu), batch)


def pinned(batch: Batch) -> Batch:
    """Return the batch in pinned memory, from which `move` to a GPU does not block; GPU tensors stay on the GPU."""
    return map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch)


def concat(parts: Sequence[Batch], device: torch.device) -> Batch:
    """Concatenate batches on the first axis, on ``device``; tensors without axes are stacked."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if len(parts) == 1 and first.dim():
            return first.to(device)
        join = torch.cat if first.dim() else torch.stack
        return join([part.to(device) for part in parts])
    if isinstance(first, Mapping):
        return {name: concat([part[name] for part in parts], device) for name in first}
    return tuple(concat([part[index] for part in parts], device) for index in range(len(first)))


def checked_batch(data: Any, label: Any) -> tuple[Batch, Batch | None]:
    """Return data and label as batches of the same number of samples."""
    data = as_batch(data, "data")
    size = num_samples(data, "data")
    if label is not None:
        label = as_batch(label, "label")
        labels = num_samples(label, "label")
        if labels != size:
            raise ValueError(f"data has {size} samples, but label has {labels}")
    return data, label


def zeros_of(shapes: Any, what: str) -> Batch:
    """Return zeros for a shape, or for a tuple, list or dict of shapes."""
    if isinstance(shapes, Mapping):
        return {name: zeros_of(shape, what) for name, shape in shapes.items()}
    if isinstance(shapes, (tuple, list)) and shapes:
        if all(isinstance(size, int) and not isinstance(size, bool) for size in shapes):
            return torch.zeros(*shapes, device="cpu")
        return tuple(zeros_of(shape, what) for shape in shapes)
    raise TypeError(f"{what} is {shapes!r}; expected a shape such as (64, 1, 28, 28), or a tuple or dict of shapes")


@contextmanager
def evaluating(networks: Sequence[nn.Module]) -> Iterator[None]:
    """Switch networks to evaluation mode in this context, and restore each submodule's mode afterwards."""
    modes = [(module, module.training) for network in networks for module in network.modules()]
    for network in networks:
        network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call_network(network: nn.Module, inputs: Batch) -> Any:
    """Call a network with a batch: tuples as positional arguments, dicts as keywords."""
    if isinstance(inputs, dict):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple) else network(inputs)


def unpacked(data: Any, label: Any) -> tuple[Any, Any]:
    """Return data and label of an object that has both as attributes, such as MXNet's DataBatch."""
    is_array = isinstance(data, (torch.Tensor, np.ndarray))
    if label is not None or is_array or not (hasattr(data, "data") and hasattr(data, "label")):
        return data, label
    return unwrapped(data.data), unwrapped(data.label)


def unwrapped(batch: Any) -> Any:
    """Return the only array of a list, as in MXNet's batches; an empty list means None."""
    if isinstance(batch, list) and len(batch) < 2:
        return batch[0] if batch else None
    return batch

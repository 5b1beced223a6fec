"""Tensors as the operations want them: checked, contiguous and flat, whatever the caller's look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.arithmetic import check_dtype


def check_tensor(tensor: object, name: str = "tensor") -> None:
    """See that collectives take a tensor.

    Raises:
        TypeError: it is none, a sparse one, not on the CPU, or of a dtype that collectives do not take.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise TypeError(f"{name} is {tensor.layout} on {tensor.device}; expected a dense tensor on the CPU")
    check_dtype(tensor.dtype)


def check_written(tensor: Tensor, name: str = "tensor") -> None:
    """See that a tensor can be written.

    Raises:
        ValueError: it is expanded, so that several of its elements are one place in memory.
    """
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, so that elements share memory; "
            "expected a tensor that can be written, such as its clone()"
        )


def fitting(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the caller's, once it is seen to have this shape and dtype.

    Raises:
        ValueError: it has not.
        TypeError: collectives do not take it.
    """
    check_tensor(tensor, name)
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {tuple(shape)} and {dtype}"
        )
    return tensor


def made_or_fitting(name: str, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the caller's that fits and can be written, or a new one.

    Raises:
        ValueError: it does not fit, or cannot be written.
        TypeError: collectives do not take it.
    """
    if tensor is None:
        return torch.empty(tuple(shape), dtype=dtype)
    check_written(fitting(name, tensor, shape, dtype), name)
    return tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous on the CPU."""
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.is_contiguous()


def is_like(tensor: object, other: Tensor) -> bool:
    """Whether a tensor is contiguous on the CPU and has the shape and dtype of another."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return False
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def data_of(tensor: Tensor) -> Tensor:
    """The values, which no gradient looks at."""
    return tensor.detach() if tensor.requires_grad else tensor


def flat_of(tensor: Tensor) -> Tensor:
    """The values as a contiguous 1-d tensor: a view where that can be."""
    return _line(data_of(tensor).contiguous())


def as_rows(flat: Tensor, size: int) -> Tensor:
    """A contiguous 1-d tensor as ``size`` rows, which may be empty."""
    return flat.view(size, flat.numel() // size)


def in_place(tensor: Tensor, change: Callable[[Tensor], None]) -> None:
    """Have the values changed as a contiguous 1-d tensor."""
    flat = flat_of(tensor)
    change(flat)
    _put_back(tensor, flat)


def overwrite(tensor: Tensor, write: Callable[[Tensor], None]) -> None:
    """Have the values written as a contiguous 1-d tensor, whose values before do not matter."""
    data = data_of(tensor)
    flat = _line(data) if data.is_contiguous() else data.new_empty(data.numel())
    write(flat)
    _put_back(tensor, flat)


def into_rows(tensor: Tensor, write: Callable[[Tensor], None]) -> None:
    """Have the values written as contiguous rows, one for each entry of the first axis."""
    overwrite(tensor, lambda flat: write(as_rows(flat, tensor.shape[0])))


def _line(data: Tensor) -> Tensor:
    """A contiguous tensor as 1-d, of stride 1; after `view` one element would keep the stride that it had."""
    return data.as_strided((data.numel(),), (1,))


def _put_back(tensor: Tensor, flat: Tensor) -> None:
    data = data_of(tensor)
    if flat.data_ptr() != data.data_ptr():
        data.copy_(flat.view(data.shape))

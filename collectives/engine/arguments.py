"""Checks of the arguments of collective calls: a wrong type is a TypeError, all else a ValueError."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gangline.collectives.engine.host_staging import data_of
from gangline.collectives.engine.reduction import check_dtype


def check_tensor(tensor: object, name: str = "tensor") -> None:
    """Check that an argument is a dense tensor on the CPU or a GPU, of a dtype that collectives accept."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} is {kind} on {tensor.device}; expected a dense tensor on the CPU or a GPU")
    check_dtype(tensor.dtype)


def check_rows(tensor: object, size: int) -> None:
    """Check that an argument is a tensor that collectives accept, with one row for each of ``size`` ranks."""
    check_tensor(tensor)
    assert isinstance(tensor, Tensor)
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise ValueError(f"tensor has shape {tuple(tensor.shape)}; expected a row for each of {size} ranks")


def check_written(tensor: Tensor, name: str = "tensor") -> None:
    """Check that each element of a tensor has its own memory, so that the tensor can be written."""
    if not tensor.is_contiguous() and _elements_overlap(tensor):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, so that elements share memory; "
            "expected a tensor that can be written, such as its clone()"
        )


def _elements_overlap(tensor: Tensor) -> bool:
    axes = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    if not tensor.numel() or not axes:
        return False
    last = 0  # offset of the last element of the axes so far
    is_nested = True
    for stride, length in axes:
        is_nested = is_nested and stride > last
        last += stride * (length - 1)
    if is_nested:
        return False
    offsets = torch.arange(last + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
    return axes[0][0] == 0 or len(torch.unique(offsets)) < tensor.numel()


def check_fits(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """Check a tensor's shape, and that its dtype and device are those of ``like``."""
    check_tensor(tensor, name)
    check_shape(name, tensor, shape, like.dtype)
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}, as the call's other tensor")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check a tensor's shape and dtype."""
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {tuple(shape)} and {dtype}"
        )


def result_tensor(out: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return ``out`` after checking it, or a new tensor of this shape with the dtype and device of ``like``."""
    if out is None:
        return data_of(like).new_empty(tuple(shape))
    check_fits("out", out, shape, like)
    check_written(out, "out")
    return out


def result_or_in_place(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the tensor that receives a result like ``tensor``: ``out``, or ``tensor`` if ``out`` is None."""
    if out is None:
        check_written(tensor)
        return tensor
    return result_tensor(out, tensor.shape, tensor)


def check_rank(name: str, rank: int, size: int) -> None:
    """Check that an argument is a rank from 0 to ``size - 1``."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} is {rank!r}; expected a rank, an int")
    if not 0 <= rank < size:
        raise ValueError(f"{name} is {rank}; expected a rank from 0 to {size - 1}")


def check_peer(name: str, peer: int, size: int, tag: int) -> None:
    """Check the peer, a rank, and the tag, 0 to 2**31 - 1, of a message."""
    check_rank(name, peer, size)
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise TypeError(f"tag is {tag!r}; expected an int")
    if not 0 <= tag < 1 << 31:
        raise ValueError(f"tag is {tag}; expected a number from 0 to 2**31 - 1")

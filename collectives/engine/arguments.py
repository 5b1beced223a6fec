"""Checked arguments of collective calls: a wrong type is a TypeError, all else a ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES, TABLE, Collective, Ranks, encode_signature
from gangline.collectives.engine.host_staging import data_of
from gangline.collectives.engine.reduction import check as check_reduction
from gangline.collectives.engine.reduction import check_dtype


def check_tensor(tensor: object, name: str = "tensor") -> None:
    """Check that an argument is a dense tensor on the CPU or a GPU, of a dtype that collectives accept."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name} is {kind} on {tensor.device}; expected a dense tensor on the CPU or a GPU")
    if tensor.dtype not in DTYPES:
        check_dtype(tensor.dtype)


class Call(NamedTuple):
    """One rank's part of a checked call of a collective."""

    number: int
    """Index of the collective in `TABLE`."""
    rule: Collective
    """The collective."""
    code: int
    """`CallSignature.code`."""
    tensor: Tensor | None
    """Tensor that is read; None: this rank's is not."""
    result: Tensor | None
    """Tensor that is written, which may be ``tensor``; None: this rank has no result."""
    root: int | None
    op: str | None
    nbytes: int
    """Bytes of a rank's tensor, with all rows; of the root's, if only that one is read."""
    first: Tensor
    """The tensor, or the result if there is none."""


def check_call(number: int, tensor: Tensor | None, out: Tensor | None, option: Any, rank: int, size: int) -> Call:
    """Check the arguments of a collective, and create its result if it has one and ``out`` is None.

    ``number`` is its index in `TABLE`, ``option`` the operation, the root, or (root, operation). ``out`` is ignored on
    ranks that get no result, the tensor on ranks other than the root of a scatter.
    """
    rule = TABLE[number]
    root: Any
    op: Any
    root, op = (option if rule.has_op else (option, None)) if rule.has_root else (None, option)
    is_scatter = rule.in_rows and rule.reads is Ranks.ROOT  # whose tensor the other ranks lack
    first = out if is_scatter else tensor
    check_tensor(first, "out" if is_scatter else "tensor")
    assert first is not None
    if rule.in_rows and not is_scatter and (first.dim() == 0 or first.shape[0] != size):
        raise ValueError(f"tensor has shape {tuple(first.shape)}; expected a row for each of {size} ranks")
    if rule.has_op:
        check_reduction(op, first.dtype)
    if rule.has_root:
        check_rank("root", root, size)
    is_read = rule.reads is Ranks.ALL or rule.reads.include(is_root=rank == root)
    if is_scatter:
        check_written(first, "out")
        if is_read and tensor is None:
            raise TypeError(f"tensor is None at the root of a scatter; expected ({size}, *out.shape)")
        if is_read and tensor is not None:
            _check_fits("tensor", tensor, (size, *first.shape), first)
        result: Tensor | None = first
    elif rule.writes is not Ranks.ALL and not rule.writes.include(is_root=rank == root):
        result = None
    elif out is None and not (rule.in_rows or rule.out_rows):
        if not first.is_contiguous():
            check_written(first)
        result = first
    else:
        row = first.shape[1:] if rule.in_rows else first.shape
        result = _result_tensor(out, (size, *row) if rule.out_rows else row, first)
    count = first.numel() // size if rule.in_rows and not is_scatter else first.numel()
    code = encode_signature(rule.name, count, first.dtype, op, root)
    nbytes = first.nbytes * size if is_scatter else first.nbytes
    return Call(number, rule, code, tensor if is_read else None, result, root, op, nbytes, first)


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


def _check_fits(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> None:
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


def _result_tensor(out: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return ``out`` after checking it, or a new tensor of this shape with the dtype and device of ``like``."""
    if out is None:
        return data_of(like).new_empty(tuple(shape))
    _check_fits("out", out, shape, like)
    check_written(out, "out")
    return out


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

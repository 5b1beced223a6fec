"""What callers give, as the operations want it: checked, and tensors on the host, contiguous and flat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gangline.collectives.engine.host_staging import from_host, host_memory, to_host
from gangline.collectives.engine.reduction import check_dtype


def check_tensor(tensor: object, name: str = "tensor") -> None:
    """See that collectives take a tensor.

    Raises:
        TypeError: it is none, sparse, neither on the CPU nor on a GPU, or of a dtype that collectives do not take.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout != torch.strided:
        raise TypeError(f"{name} is {tensor.layout} on {tensor.device}; expected a dense tensor on the CPU or a GPU")
    check_dtype(tensor.dtype)


def check_rows(tensor: object, size: int) -> None:
    """See that collectives take a tensor, and that it has a row for each rank.

    Raises:
        ValueError: it has not.
        TypeError: collectives do not take it.
    """
    check_tensor(tensor)
    assert isinstance(tensor, Tensor)
    if tensor.dim() == 0 or tensor.shape[0] != size:
        raise ValueError(f"tensor has shape {tuple(tensor.shape)}; expected a row for each of {size} ranks")


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


def fitting(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of the caller's, once it is seen to have this shape, and the dtype and device of another.

    Raises:
        ValueError: it has not.
        TypeError: collectives do not take it.
    """
    check_tensor(tensor, name)
    if tensor.shape != tuple(shape) or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {tuple(shape)} and {like.dtype}"
        )
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}, as the call's other tensor")
    return tensor


def made_or_fitting(name: str, tensor: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of the caller's that fits and can be written, or a new one; like another in dtype and device.

    Raises:
        ValueError: it does not fit, or cannot be written.
        TypeError: collectives do not take it.
    """
    if tensor is None:
        return data_of(like).new_empty(tuple(shape))
    check_written(fitting(name, tensor, shape, like), name)
    return tensor


def in_place_or(tensor: Tensor, out: Tensor | None) -> Tensor:
    """Where a result of a tensor's shape, dtype and device goes: into ``out``, or where there is none, itself.

    Raises:
        ValueError: ``out`` does not fit, or what is written cannot be.
        TypeError: collectives do not take ``out``.
    """
    if out is None:
        check_written(tensor)
        return tensor
    return made_or_fitting("out", out, tensor.shape, tensor)


def check_rank(name: str, rank: int, size: int) -> None:
    """See that a number is a rank's.

    Raises:
        ValueError: there is no such rank.
        TypeError: it is no int.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{name} is {rank!r}; expected a rank, an int")
    if not 0 <= rank < size:
        raise ValueError(f"{name} is {rank}; expected a rank from 0 to {size - 1}")


def check_peer(name: str, rank: int, own: int, size: int, tag: int) -> None:
    """See that a rank is another than one's own, and that messages may have a tag.

    Raises:
        ValueError: an unknown rank, one's own, or a tag out of 0 to 2**31 - 1.
        TypeError: one is no int.
    """
    check_rank(name, rank, size)
    if rank == own:
        raise ValueError(f"{name} is {rank}, this rank itself; expected another")
    if not isinstance(tag, int) or isinstance(tag, bool):
        raise TypeError(f"tag is {tag!r}; expected an int")
    if not 0 <= tag < 1 << 31:
        raise ValueError(f"tag is {tag}; expected a number from 0 to 2**31 - 1")


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
    """The values as a contiguous 1-d tensor of the host: a view where that can be."""
    data = data_of(tensor)
    return to_host(data) if data.is_cuda else _line(data.contiguous())


def as_rows(flat: Tensor, size: int) -> Tensor:
    """A contiguous 1-d tensor as ``size`` rows, which may be empty."""
    return flat.view(size, flat.numel() // size)


def in_place(tensor: Tensor, change: Callable[[Tensor], None]) -> None:
    """Have the values changed as a contiguous 1-d tensor of the host."""
    flat = flat_of(tensor)
    change(flat)
    _put_back(tensor, flat)


def overwrite(tensor: Tensor, write: Callable[[Tensor], None]) -> None:
    """Have the values written as a contiguous 1-d tensor of the host, whose values before do not matter."""
    data = data_of(tensor)
    if data.is_cuda:
        flat = host_memory(data.numel(), data.dtype)
    else:
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
    if data.is_cuda:
        from_host(data, flat)
    elif flat.data_ptr() != data.data_ptr():
        data.copy_(flat.view(data.shape))

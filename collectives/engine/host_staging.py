"""Staging: view or copy tensors of any layout as contiguous 1-d tensors in host memory, and copy results back.

Copies from and to a GPU are ordered on its current stream. Their host memory is pinned and comes from torch's caching
host allocator, which reuses a block only after the copies from it have finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

_is_cuda = attrgetter("is_cuda")


def data_of(tensor: Tensor) -> Tensor:
    """Return the tensor without its autograd history, and writable outside of inference mode and of torch.func.grad.

    Writing to it does not change the tensor's autograd version, so saved tensors stay valid, as with gloo.

    Raises:
        TypeError: if the tensor is a batch of `torch.vmap`.
    """
    if is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            raise TypeError(
                "a tensor has a value for each sample of torch.vmap; expected one that does not depend on the sample: "
                "make the call outside of vmap"
            )
        return data_of(get_unwrapped(tensor))
    if tensor.is_inference():
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.data


def is_contiguous_on_cpu(tensor: object) -> bool:
    """Return whether an object is a dense contiguous tensor on the CPU whose memory holds its values."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor of a subclass as a `torch.Tensor` on the same memory."""
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def flat_values(tensor: Tensor) -> Tensor:
    """Return the values as a contiguous 1-d host tensor: a view if possible, else a copy.

    For a GPU tensor the call waits for the copy, which is enqueued on the GPU's current stream. It does not wait for
    other streams.
    """
    data = data_of(tensor)
    if not data.is_cuda:
        return _flat_view(data.contiguous().resolve_neg().resolve_conj())
    return copies_on_host([data.contiguous().view(-1)])[0]


def flat_buffer(tensor: Tensor) -> Tensor:
    """Return a contiguous 1-d host tensor to be overwritten with new values: a view if possible, else new memory.

    Pass it to `write_back` when it is filled.
    """
    data = data_of(tensor)
    if data.is_cuda:
        return pinned_memory(data.numel(), data.dtype)
    return _flat_view(data) if is_contiguous_on_cpu(data) else data.new_empty(data.numel())


def write_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy the result of `flat_values` or `flat_buffer` into its tensor, unless it is a view of it.

    The copy to a GPU tensor is asynchronous: ``flat`` must not change, and later work on the GPU's current stream sees
    the values.
    """
    data = data_of(tensor)
    if data.is_cuda:
        data.copy_(flat.view(data.shape), non_blocking=True)
    elif flat.data_ptr() != data.data_ptr():
        data.copy_(flat.view(data.shape))


def copies_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of GPU tensors in pinned memory, and the other tensors themselves.

    All copies begin before the host waits, once for each GPU. They follow the work on the GPUs' current streams.
    """
    if True not in map(_is_cuda, tensors):
        return list(tensors)
    copies = [
        pinned_like(tensor).copy_(data_of(tensor), non_blocking=True) if tensor.is_cuda else tensor
        for tensor in tensors
    ]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).record_event().synchronize()
    return copies


def copy_to_gpus(values: Tensor, outs: Sequence[Tensor]) -> None:
    """Copy a host tensor to GPU tensors of its shape.

    The host does not wait, and may change the values afterwards: the GPUs read a copy in pinned memory.
    """
    pinned = pinned_like(values).copy_(data_of(values))
    for out in outs:
        data_of(out).copy_(pinned, non_blocking=True)


def overlap(read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Return whether the memory of a written tensor overlaps that of another written tensor or of one that is read."""
    spans = [(*_span(tensor), False) for tensor in read] + [(*_span(tensor), True) for tensor in written]
    end_of_read = end_of_written = 0
    for begin, end, is_written in sorted(spans):
        if begin < end_of_written or (is_written and begin < end_of_read):
            return True
        if is_written:
            end_of_written = max(end, end_of_written)
        else:
            end_of_read = max(end, end_of_read)
    return False


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another tensor of its shape; their memory may overlap."""
    data, values = data_of(target), data_of(source)
    is_same = data.data_ptr() == values.data_ptr() and data.stride() == values.stride()
    data.copy_(values if is_same or not overlap([values], [data]) else values.clone())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last byte; (0, 0) if it is empty."""
    if not tensor.numel():
        return 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def as_rows(flat: Tensor, size: int) -> Tensor:
    """Return a view of a contiguous 1-d tensor as ``size`` rows, which may be empty."""
    return flat.view(size, flat.numel() // size)


def pinned_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Return a 1-d host tensor that GPUs copy from and to asynchronously."""
    return torch.empty(count, dtype=dtype, pin_memory=True, device="cpu")


def pinned_like(tensor: Tensor) -> Tensor:
    """Return pinned memory for a tensor's values, in its shape, and in its strides if it is dense."""
    memory = pinned_memory(tensor.numel(), tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else memory.view(tensor.shape)


def is_dense(tensor: Tensor) -> bool:
    """Return True if the elements fill a range of memory without gaps or overlap, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat_view(data: Tensor) -> Tensor:
    """Return a 1-d view of stride 1; `Tensor.view` keeps any other stride of a tensor with a single element."""
    return data if data.dim() == 1 and data.stride(0) == 1 else data.as_strided((data.numel(),), (1,))

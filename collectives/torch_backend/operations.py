"""Collectives in torch's forms (lists, split sizes, bitwise operations, means of integers) on a communicator.

Every function is a collective over all ranks of the communicator and returns when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from functools import reduce as reduce_values
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.engine.host_staging import data_of
from gangline.collectives.errors import MismatchError

Op = str | Callable[[Tensor, Tensor], Tensor]
"""Reduction: the communicator's name for it, or a function that is applied in rank order."""

_OPS: dict[str, Op] = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_SUM = ReduceOp.SUM
_DIRECT_BYTES = 1 << 18
"""Minimum bytes of a tensor that is gathered directly into the list of outputs, without a temporary tensor."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that move the same bits


def op_of(reduce_op: ReduceOp | ReduceOp.RedOpType) -> Op:
    """Return the `Op` for a torch reduction.

    Raises:
        ValueError: if it is PREMUL_SUM, which only NCCL supports.
    """
    if reduce_op == _SUM:  # first: the name of a pybind11 enum costs as much as a small all-reduce
        return "sum"
    kind: Any = getattr(reduce_op, "op", reduce_op)
    name: str = kind.name
    if name not in _OPS:
        raise ValueError(f"ReduceOp.{name} is not supported; expected one of {', '.join(_OPS)}: scale, then SUM")
    return _OPS[name]


def all_reduce(comm: Communicator, tensor: Tensor, op: Op) -> None:
    """Reduce a tensor in place, on all ranks."""
    if tensor.is_sparse:
        _all_reduce_sparse(comm, tensor, op)
        return
    data, how = data_of(tensor), _reduction(tensor, op)
    if isinstance(how, str):
        comm.all_reduce(data, how)
    else:
        data.copy_(how(comm.all_gather(data)))


def reduce(comm: Communicator, tensor: Tensor, root: int, op: Op) -> None:
    """Reduce a tensor in place at the root; other ranks' tensors are unchanged."""
    data, how = data_of(tensor), _reduction(tensor, op)
    if isinstance(how, str):
        comm.reduce(data, root, how)
    elif (rows := comm.gather(data, root)) is not None:
        data.copy_(how(rows))


def broadcast(comm: Communicator, tensor: Tensor, root: int) -> None:
    """Copy the root's tensor to all ranks."""
    comm.broadcast(movable(tensor), root)


def all_gather(comm: Communicator, outs: Sequence[Tensor], tensor: Tensor) -> None:
    """Gather every rank's tensor into one of ``outs``; sizes may differ if all ranks pass the same sizes."""
    _check_count("output tensors", outs, comm.size)
    if _are_even(outs) and tensor.nbytes < _DIRECT_BYTES:
        _unpack(comm.all_gather(movable(tensor)), outs)
        return
    if outs[comm.rank].numel() != tensor.numel() or outs[comm.rank].dtype != tensor.dtype:
        raise ValueError(
            f"the input tensor is {tuple(tensor.shape)} of {tensor.dtype}; expected the size of its entry in the "
            f"output list, {tuple(outs[comm.rank].shape)} of {outs[comm.rank].dtype}"
        )
    comm.all_to_all_uneven([movable(tensor)] * comm.size, [movable(out) for out in outs])


def all_gather_single(comm: Communicator, out: Tensor, tensor: Tensor) -> None:
    """Gather every rank's tensor into one: (size, *shape), or concatenated along the first axis."""
    comm.all_gather(movable(tensor), movable(_rows("the output", out, comm.size, tensor.shape)))


def gather(comm: Communicator, outs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
    """Gather every rank's tensor, all of one size, into the root's ``outs``."""
    if comm.rank == root:
        _check_count("output tensors", outs, comm.size)
        _check_even("output tensors", outs)
    rows = comm.gather(movable(tensor), root)
    if rows is not None:
        _unpack(rows, outs)


def gather_single(comm: Communicator, out: Tensor, tensor: Tensor, root: int) -> None:
    """Gather every rank's tensor into the root's ``out``: (size, *shape), or concatenated along the first axis."""
    gather(comm, [*_rows("the output", out, comm.size, tensor.shape)] if comm.rank == root else [], tensor, root)


def scatter(comm: Communicator, out: Tensor, tensors: Sequence[Tensor], root: int) -> None:
    """Send each rank one of the root's tensors, all of one size."""
    if comm.rank != root:
        comm.scatter(None, movable(out), root)
        return
    _check_count("input tensors", tensors, comm.size)
    _check_even("input tensors", tensors)
    comm.scatter(_stack(tensors, out), movable(out), root)


def reduce_scatter(comm: Communicator, out: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
    """Reduce lists of tensors; each rank gets the one at its rank. Sizes may differ between the entries."""
    _check_count("input tensors", tensors, comm.size)
    if _are_even(tensors):
        reduce_scatter_single(comm, out, torch.stack([data_of(tensor).reshape(out.shape) for tensor in tensors]), op)
        return
    for rank, tensor in enumerate(tensors):
        partial = data_of(tensor).clone()
        reduce(comm, partial, rank, op)
        if rank == comm.rank:
            data_of(out).copy_(partial)


def reduce_scatter_single(comm: Communicator, out: Tensor, tensor: Tensor, op: Op) -> None:
    """Reduce tensors of (size, *out.shape), or concatenated along the first axis; each rank gets its row."""
    rows = _rows("the input", tensor, comm.size, out.shape)
    how = _reduction(tensor, op)
    if isinstance(how, str):
        comm.reduce_scatter(data_of(rows), how, out=data_of(out))
    else:
        data_of(out).copy_(how(comm.all_to_all(data_of(rows))))


def all_to_all(comm: Communicator, outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Send tensor j to rank j and receive output i from rank i; all may differ in size.

    Raises:
        MismatchError: if a rank sends another number of elements than its peer expects; raised on all ranks.
    """
    _check_count("output tensors", outs, comm.size)
    _check_count("input tensors", tensors, comm.size)
    comm.all_to_all_uneven([movable(tensor) for tensor in tensors], [movable(out) for out in outs])


def all_to_all_single(
    comm: Communicator, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int]
) -> None:
    """Run `all_to_all` on slices along the first axis; without split sizes the slices are equal."""
    if not out_splits and not splits:
        sent = _rows("the input", tensor, comm.size, _slice_shape("the input", tensor, comm.size))
        received = _rows("the output", out, comm.size, _slice_shape("the output", out, comm.size))
        comm.all_to_all(movable(sent), movable(received))
    else:
        received, sent = movable(out), movable(tensor)
        comm.all_to_all_uneven(
            _split("the input", sent, splits, comm), _split("the output", received, out_splits, comm)
        )


def movable(tensor: Tensor) -> Tensor:
    """Return a view of a dtype that communicators support; sparse and quantised tensors have none."""
    data = data_of(tensor)
    if data.dtype in DTYPES:
        return data
    return data.view(_SAME_SIZE.get(data.itemsize, data.dtype))


def _all_reduce_sparse(comm: Communicator, tensor: Tensor, op: Op) -> None:
    """Reduce a COO tensor in place: gather all ranks' indices and values, and add values of equal indices.

    Raises:
        MismatchError: if the ranks' tensors have different shapes; raised on all ranks.
    """
    if op not in ("sum", "mean"):
        raise TypeError(f"ReduceOp {op} of a sparse tensor is not supported; expected SUM or AVG")
    own = tensor.detach().coalesce()
    indices, values = own.indices().T.contiguous(), own.values()
    layouts = comm.all_gather(torch.tensor([len(indices), own.sparse_dim(), *own.shape], device="cpu"))
    assert isinstance(layouts, Tensor)
    if not (layouts[:, 1:] == layouts[0, 1:]).all():
        raise MismatchError(
            f"in all_reduce the ranks' sparse tensors have sparse dimensions and shapes {layouts[:, 1:]}"
        )
    counts = layouts[:, 0].tolist()
    total = torch.sparse_coo_tensor(
        _gather_rows(comm, indices, counts).T,
        _gather_rows(comm, values, counts),
        own.shape,
        device=own.device,
        check_invariants=False,
    ).coalesce()
    with torch.no_grad():  # detach() of a sparse tensor does not share its number of values
        tensor.copy_(total / comm.size if op == "mean" else total)


def _gather_rows(comm: Communicator, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return all ranks' rows in rank order; ``counts`` are their numbers."""
    padded = rows.new_empty((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = rows.new_empty((comm.size, *padded.shape))
    comm.all_gather(movable(padded), movable(gathered))
    return torch.cat([one[:count] for one, count in zip(gathered, counts, strict=True)])


def _reduction(tensor: Tensor, op: Op) -> str | Callable[[Any], Tensor]:
    """Return the communicator's name of a reduction, or a function of the rows of all ranks."""
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    if isinstance(op, str):
        return _mean_of_integers if op == "mean" and not has_fractions and tensor.dtype != torch.bool else op
    if has_fractions:
        raise TypeError(
            f"a tensor of {tensor.dtype} has no bits to combine; expected integers or bools for {op.__name__}"
        )
    return partial(reduce_values, op)


def _mean_of_integers(rows: Tensor) -> Tensor:
    """Return the mean of rows of integers, rounded towards zero as NCCL does; sums do not wrap."""
    size, values = len(rows), rows.long()
    remainders = values.remainder(size).sum(0)
    means = values.div(size, rounding_mode="floor").sum(0) + remainders.div(size, rounding_mode="floor")
    is_rounded_down = (means < 0) & (remainders % size > 0)
    return means + is_rounded_down


def _rows(name: str, tensor: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor as (size, *shape)."""
    shape = tuple(shape)
    if tensor.shape == (size, *shape):
        return tensor
    if shape and tensor.shape == (size * shape[0], *shape[1:]):
        return torch.unflatten(tensor, 0, (size, shape[0]))
    if tensor.numel() == size * math.prod(shape) and tensor.is_contiguous():
        return tensor.view(size, *shape)
    raise ValueError(
        f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected {size} times {shape}, along "
        "the first axis"
    )


def _slice_shape(name: str, tensor: Tensor, size: int) -> tuple[int, ...]:
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected a first axis divisible by {size} ranks, or split sizes"
        )
    return (tensor.shape[0] // size, *tensor.shape[1:])


def _split(name: str, tensor: Tensor, splits: Sequence[int], comm: Communicator) -> Sequence[Tensor]:
    splits = list(splits) or [_slice_shape(name, tensor, comm.size)[0]] * comm.size
    if len(splits) != comm.size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"{name} has split sizes {splits}; expected {comm.size} that add up to its first axis, {tensor.shape[0]}"
        )
    return torch.split(tensor, splits)


def _stack(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([movable(tensor).reshape(movable(like).shape) for tensor in tensors])


def _unpack(rows: object, outs: Sequence[Tensor]) -> None:
    assert isinstance(rows, Tensor)
    for out, row in zip(outs, rows, strict=True):
        data = movable(out)
        if data.dtype != row.dtype or data.numel() != row.numel():
            raise ValueError(
                f"an output tensor is {tuple(out.shape)} of {out.dtype}; expected {row.numel()} values of {row.dtype}"
            )
        data.copy_(row.view(data.shape))


def _are_even(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _check_even(name: str, tensors: Sequence[Tensor]) -> None:
    if not _are_even(tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"the {name} have shapes {shapes}; expected one size for all ranks")


def _check_count(name: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} {name} were given; expected one for each of {size} ranks")

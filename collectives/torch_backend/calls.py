"""Collectives of torch's process-group interface: one table with a row for each, and the methods made from its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from functools import reduce as reduce_values
from inspect import signature
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from gangline.collectives import compiled_core as core
from gangline.collectives.call_signature import DTYPES
from gangline.collectives.communicator import Communicator
from gangline.collectives.eager import has_modes, leave_modes, run_eagerly
from gangline.collectives.engine.host_staging import data_of
from gangline.collectives.errors import GanglineError, MismatchError, NestedCallError
from gangline.collectives.torch_backend import c10d
from gangline.collectives.torch_backend.c10d import has_dispatch_modes, is_fake, is_profiled
from gangline.collectives.torch_backend.other_devices import OtherDevices
from gangline.collectives.torch_backend.work import (
    BegunWork,
    CoalescedWork,
    FinishedWork,
    GroupWork,
    MessageWork,
    tensors_in,
)
from gangline.collectives.work import NoThreadError, Work, WorkQueue

Tensors = Tensor | Sequence[Tensor]
Op = str | Callable[[Tensor, Tensor], Tensor]
"""Reduction: the communicator's name for it, or a function that is applied in rank order."""

_UNSET = timedelta(milliseconds=-1)  # torch's value for "no timeout for this call"
_NO_TIME = timedelta(0)
_SMALL_ELEMENTS = 1 << 14  # of an asynchronous call that may begin in `wait` or at the queue's next poll
_DIRECT_BYTES = 1 << 18
"""Minimum bytes of a tensor that is gathered directly into the list of outputs, without a temporary tensor."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that move the same bits
_PROFILED = {"recv_anysource": "recvAnySource"}  # as gloo names it
_NAMED_OPS: dict[str, Op] = {
    "SUM": "sum",
    "AVG": "mean",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_PLAIN_OPS = ("sum", "product", "min", "max")  # which the communicator has for all dtypes
_OPS = {hash(getattr(ReduceOp, name)): op for name, op in _NAMED_OPS.items()}  # names of pybind11's enums are slow


def _op_of(reduce_op: Any) -> Op:
    """Return the `Op` of a torch reduction.

    Raises:
        ValueError: if it is PREMUL_SUM, which only NCCL supports.
    """
    if (op := _OPS.get(hash(reduce_op))) is None:
        name = getattr(reduce_op, "op", reduce_op).name
        raise ValueError(f"ReduceOp.{name} is not supported; expected one of {', '.join(_NAMED_OPS)}: scale, then SUM")
    return op


# Collectives in torch's forms (lists, split sizes, bitwise operations, means of integers) on a communicator. Their
# tensors are those that `_data_in` returns.


def _reduced(
    tensor: Tensor, op: Op, reduce: Callable[[str], object], gather: Callable[[], object], out: Tensor
) -> None:
    """Call ``reduce`` with the communicator's operation; if it has none, combine in ``out`` what ``gather`` returns."""
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    combine: Callable[[Any], Tensor] = _mean_of_integers
    if isinstance(op, str):
        if op != "mean" or has_fractions or tensor.dtype == torch.bool:
            reduce(op)
            return
    elif has_fractions:
        raise TypeError(
            f"a tensor of {tensor.dtype} has no bits to combine; expected integers or bools for {op.__name__}"
        )
    else:
        combine = partial(reduce_values, op)
    if (rows := gather()) is not None:
        out.copy_(combine(rows))


def _mean_of_integers(rows: Tensor) -> Tensor:
    """Return the mean of rows of integers, rounded towards zero as NCCL does; sums do not wrap."""
    size, values = len(rows), rows.long()
    remainders = values.remainder(size).sum(0)
    means = values.div(size, rounding_mode="floor").sum(0) + remainders.div(size, rounding_mode="floor")
    is_rounded_down = (means < 0) & (remainders % size > 0)
    return means + is_rounded_down


def _all_reduce(comm: Communicator, tensor: Tensor, op: Op) -> None:
    if tensor.is_sparse:
        _all_reduce_sparse(comm, tensor, op)
    else:
        _reduced(tensor, op, partial(comm.all_reduce, tensor), partial(comm.all_gather, tensor), tensor)


def _reduce(comm: Communicator, tensor: Tensor, root: int, op: Op) -> None:
    _reduced(tensor, op, partial(comm.reduce, tensor, root), partial(comm.gather, tensor, root), tensor)


def _reduce_scatter_single(comm: Communicator, out: Tensor, tensor: Tensor, op: Op) -> None:
    rows = _rows("the input", tensor, comm.size, out.shape)
    _reduced(tensor, op, partial(comm.reduce_scatter, rows, out=out), partial(comm.all_to_all, rows), out)


def _reduce_scatter(comm: Communicator, out: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
    """Reduce lists of tensors; each rank gets the one at its rank. Sizes may differ between the entries."""
    _check_list("input", tensors, comm.size)
    if _are_even(tensors):
        _reduce_scatter_single(comm, out, torch.stack([tensor.reshape(out.shape) for tensor in tensors]), op)
        return
    for rank, tensor in enumerate(tensors):
        summed = tensor.clone()
        _reduce(comm, summed, rank, op)
        if rank == comm.rank:
            out.copy_(summed)


def _all_gather(comm: Communicator, outs: Sequence[Tensor], tensor: Tensor) -> None:
    """Gather every rank's tensor into one of ``outs``; sizes may differ if all ranks pass the same sizes."""
    _check_list("output", outs, comm.size)
    if _are_even(outs) and tensor.nbytes < _DIRECT_BYTES:
        _unpack(comm.all_gather(tensor), outs)
        return
    if outs[comm.rank].numel() != tensor.numel() or outs[comm.rank].dtype != tensor.dtype:
        raise ValueError(
            f"the input tensor is {tuple(tensor.shape)} of {tensor.dtype}; expected the size of its entry in the "
            f"output list, {tuple(outs[comm.rank].shape)} of {outs[comm.rank].dtype}"
        )
    comm.all_to_all_uneven([tensor] * comm.size, outs)


def _all_gather_single(comm: Communicator, out: Tensor, tensor: Tensor) -> None:
    comm.all_gather(tensor, _rows("the output", out, comm.size, tensor.shape))


def _gather(comm: Communicator, outs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
    if comm.rank == root:
        _check_list("output", outs, comm.size, one_size=True)
    if (rows := comm.gather(tensor, root)) is not None:
        _unpack(rows, outs)


def _gather_single(comm: Communicator, out: Tensor, tensor: Tensor, root: int) -> None:
    comm.gather(tensor, root, _rows("the output", out, comm.size, tensor.shape) if comm.rank == root else None)


def _scatter(comm: Communicator, out: Tensor, tensors: Sequence[Tensor], root: int) -> None:
    rows = None
    if comm.rank == root:
        _check_list("input", tensors, comm.size, one_size=True)
        rows = torch.stack([tensor.reshape(out.shape) for tensor in tensors])
    comm.scatter(rows, out, root)


def _all_to_all(comm: Communicator, outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    _check_list("output", outs, comm.size)
    _check_list("input", tensors, comm.size)
    comm.all_to_all_uneven(tensors, outs)


def _all_to_all_single(
    comm: Communicator, out: Tensor, tensor: Tensor, out_splits: Sequence[int] | None, splits: Sequence[int] | None
) -> None:
    """Send slices along the first axis; without split sizes they are equal."""
    parts = _rows_of_slices("the input", tensor, splits, comm.size)
    out_parts = _rows_of_slices("the output", out, out_splits, comm.size)
    if splits or out_splits:
        comm.all_to_all_uneven(torch.split(tensor, parts), torch.split(out, out_parts))
    else:
        rows = _rows("the input", tensor, comm.size, (parts[0], *tensor.shape[1:]))
        comm.all_to_all(rows, _rows("the output", out, comm.size, (out_parts[0], *out.shape[1:])))


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


def _gather_rows(comm: Communicator, rows: Tensor, counts: list[int]) -> Tensor:
    """Return all ranks' rows in rank order; ``counts`` are their numbers."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    outs = torch.split(as_supported_dtype(gathered), counts)
    comm.all_to_all_uneven([as_supported_dtype(rows)] * comm.size, outs)
    return gathered


def _rows(name: str, tensor: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Return a view of a tensor as (size, *shape)."""
    if tensor.is_contiguous() and tensor.numel() == size * math.prod(shape):
        return tensor.view(size, *shape)
    if tensor.shape == (size, *shape):
        return tensor
    if shape and tensor.shape == (size * shape[0], *shape[1:]):
        return torch.unflatten(tensor, 0, (size, shape[0]))
    raise ValueError(
        f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected {size} times {tuple(shape)}, "
        "along the first axis"
    )


def _rows_of_slices(name: str, tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return the number of rows of each rank's slice of a tensor."""
    if not splits:
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected a first axis divisible by {size} ranks, or split "
                "sizes"
            )
        return [tensor.shape[0] // size] * size
    if len(splits) != size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"{name} has split sizes {list(splits)}; expected {size} that add up to its first axis, {tensor.shape[0]}"
        )
    return list(splits)


def _unpack(rows: Any, outs: Sequence[Tensor]) -> None:
    for out, row in zip(outs, rows, strict=True):
        if out.dtype != row.dtype or out.numel() != row.numel():
            raise ValueError(
                f"an output tensor is {tuple(out.shape)} of {out.dtype}; expected {row.numel()} values of {row.dtype}"
            )
        out.copy_(row.view(out.shape))


def _are_even(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _check_list(kind: str, tensors: Sequence[Tensor], size: int, *, one_size: bool = False) -> None:
    if len(tensors) != size:
        raise ValueError(f"{len(tensors)} {kind} tensors were given; expected one for each of {size} ranks")
    if one_size and not _are_even(tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"the {kind} tensors have shapes {shapes}; expected one size for all ranks")


# Conversion of the tensors in torch's calls


def as_supported_dtype(tensor: Tensor) -> Tensor:
    """Return a view of a dtype that communicators support; sparse and quantised tensors have none."""
    data = data_of(tensor)
    return data if data.dtype in DTYPES else data.view(_SAME_SIZE.get(data.itemsize, data.dtype))


def _data_in(argument: Any, moves: bool) -> Any:
    """Return an argument with the data of its tensors: of a supported dtype if they are only moved."""
    if isinstance(argument, Tensor):
        return as_supported_dtype(argument) if moves else argument if argument.is_sparse else data_of(argument)
    return [_data_in(one, moves) for one in argument] if isinstance(argument, (list, tuple)) else argument


def _exactly(tensors: Any, count: int) -> list[Tensor]:
    """Return a tensor or a list of tensors as a list of ``count`` tensors."""
    listed = list(tensors_in(tensors))
    if len(listed) != count:
        raise ValueError(f"{len(listed)} tensors were given; expected {count}, because a rank has one device")
    return listed


def _only(tensors: Tensors) -> Tensor:
    return _exactly(tensors, 1)[0]


def _one_list(lists: Sequence[Any]) -> list[Tensor]:
    """Return the only list inside torch's list of one list per device; empty if a rank passes none."""
    if len(lists) > 1 and not isinstance(lists[0], Tensor):
        raise ValueError(f"{len(lists)} lists of tensors were given; expected one, because a rank has one device")
    return list(tensors_in(lists))


def _pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(outputs) != len(inputs):
        raise ValueError(f"{len(outputs)} outputs were given for {len(inputs)} inputs; expected one for each")
    return list(zip(outputs, inputs, strict=True))


def _transposed(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Return each input with the outputs for it, one per rank: the i-th input of rank r goes to ``outputs[r][i]``."""
    lists = [_exactly(one, len(inputs)) for one in outputs]
    return [(outs, tensor) for tensor, *outs in zip(inputs, *lists, strict=True)]


def _out_rows(size: int, out: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, out if out.dim() > tensor.dim() else out.view(size, *tensor.shape)


def _in_rows(size: int, out: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor if tensor.dim() > out.dim() else tensor.view(size, *out.shape), out


def _new_rows(size: int, outputs: Any, inputs: Any) -> tuple[Tensor | None, Tensor | None]:
    (tensor,) = inputs
    if not outputs:  # of a gather, on other ranks than the root
        return tensor, None
    (outs,) = outputs
    shape, dtype = tensor.shape, tensor.dtype
    for out in outs:
        if type(out) is not Tensor or not out.is_cpu or out.dtype != dtype or out.shape != shape or out.is_inference():
            return None, None
    return (tensor, tensor.new_empty((size, *shape))) if len(outs) == size else (None, None)


def _references() -> int:
    """Return the count of references to an object that only one attribute and one local variable hold."""
    holder = SimpleNamespace(finished=FinishedWork())
    finished = holder.finished
    return getrefcount(finished)


_UNSHARED = _references()  # depends on the version of Python
_PAIR, _LISTS = "output tensor", "outputs inputs"  # names of parameters


class _Row(NamedTuple):
    """One of torch's collectives."""

    methods: str
    """torch's names of the method, that of torch 2.13 and later first."""
    run: Callable[..., Any]
    """Function of the communicator, the tensors, and the root and the reduction if it has them."""
    tensors: str = _LISTS
    """Names of the first parameters; the first one is written."""
    small: int | None = None
    """Number of the collective in `Communicator.run_small`, which is asked first; None: it has none."""
    rows: Callable[..., tuple[Tensor | None, Tensor | None]] | None = None
    """Function of the number of ranks and the given tensors: tensor and out of `run_small`; None: in place."""
    calls: Callable[..., Iterable[tuple[Any, ...]]] | None = None
    """Function that turns the tensors into those of several calls of ``run``; None: one call."""


_TABLE = (
    _Row("allreduce", _all_reduce, "tensors", core.ALL_REDUCE),
    _Row("allreduce_coalesced", _all_reduce, "tensors", calls=zip),
    _Row("reduce", _reduce, "tensors", core.REDUCE),
    _Row("broadcast", Communicator.broadcast, "tensors", core.BROADCAST),
    _Row("allgather", _all_gather, small=core.ALL_GATHER, rows=_new_rows),
    _Row("allgather_coalesced", _all_gather, calls=_transposed),
    _Row("all_gather_single _allgather_base", _all_gather_single, _PAIR, core.ALL_GATHER, _out_rows),
    _Row("all_gather_single_coalesced allgather_into_tensor_coalesced", _all_gather_single, calls=_pairs),
    _Row("reduce_scatter", _reduce_scatter),
    _Row("reduce_scatter_single _reduce_scatter_base", _reduce_scatter_single, _PAIR, core.REDUCE_SCATTER, _in_rows),
    _Row("reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced", _reduce_scatter_single, calls=_pairs),
    _Row("gather", _gather, small=core.GATHER, rows=_new_rows),
    _Row("gather_single gather_into_tensor", _gather_single, _PAIR),  # which torch calls since 2.14
    _Row("scatter", _scatter),
    _Row("alltoall", _all_to_all),
    _Row("all_to_all_single alltoall_base", _all_to_all_single, _PAIR + " output_split_sizes input_split_sizes"),
    _Row("barrier", Communicator.barrier, "", core.BARRIER),
)
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "Tensor": _only,
    "Sequence[Tensor]": _one_list,
    "Sequence[int] | None": lambda sizes: sizes,
}
"""Conversion of what torch passes for a parameter of `_Row.run`, by its annotation."""
_OPTIONS = {"": "opts timeout", "root": "opts timeout root", "op": "opts timeout op", "root op": "opts op timeout root"}
"""Names of the parameters after the tensors, for each combination of those of `_Row.run`. ``opts`` are torch's options:
operation, root, whether the caller waits at once, a timeout. torch's overloads pass an operation or a root instead."""


class _Form:
    """Form of torch's calls of a collective: names of the parameters, and conversions of their values."""

    def __init__(self, row: _Row) -> None:
        parameters = signature(row.run).parameters
        self.row, self.methods, self.tensors = row, row.methods.split(), row.tensors.split()
        self.name = row.run.__name__.strip("_").removesuffix("_single")
        self.has_root, self.has_op = "root" in parameters, "op" in parameters
        self.names = [*self.tensors, *_OPTIONS[" ".join(one for one in ("root", "op") if one in parameters)].split()]
        annotations = [str(one.annotation) for one in parameters.values()]
        self._conversions = [_CONVERSIONS[one] for one in annotations[1 : 1 + len(self.tensors)]]
        self.run = partial(_run_each, row.run, not self.has_op)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name."""
        given = dict(zip(self.names, args, strict=False), **kwargs)
        names = self.names
        if len(args) > len(names) or len(given) < len(args) + len(kwargs) or not given.keys() <= set(names):
            raise TypeError(
                f"{self.methods[0]} got {len(args)} arguments and {list(kwargs)}; expected {', '.join(names)}"
            )
        return given

    def calls(self, given: dict[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
        """Return the name and the arguments of calls of `run`."""
        opts, root, op = given.get("opts"), given.get("root", 0), given.get("op")
        tensors = [given.get(one) for one in self.tensors]
        rest: list[Any] = []
        if self.has_root:
            rest.append(opts if type(opts) is int else getattr(opts, "rootRank", root))
        if self.has_op:
            op = getattr(opts, "reduceOp", opts) if op is None else op
            rest.append(_op_of(ReduceOp.SUM if op is None or type(op) is int else op))  # an int: the root
        if self.row.calls is None:
            converted = [convert(value) for convert, value in zip(self._conversions, tensors, strict=True)]
            return self.name, [(*converted, *rest)]
        calls = [(*one, *rest) for one in self.row.calls(*tensors)]
        return f"{self.name} of {len(calls)}", calls


def _method_of(row: _Row) -> Callable[..., Any]:
    """Return the method of one of torch's collectives."""
    form = _Form(row)

    def call(self: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
        given = form.bind(args, kwargs)
        first = next(tensors_in([*given.values()]), None)
        if first is not None and (not first.is_cpu or is_fake(first)):
            return self._call_other_backend(form.methods, first, args, kwargs)
        counted = self._calls
        try:
            if has_dispatch_modes() and form.tensors:
                # they are to see the operator of this call, which goes past torch's dispatcher
                _torch_method(self._counting_group, form.methods)(*args, **kwargs)
            name, calls = form.calls(given)
            return self._call(name, given.get(form.names[0]), given.get("opts"), given.get("timeout"), form.run, calls)
        except Exception as error:
            if self._calls == counted:  # `_call` was not reached
                self._refuse(form.methods[0], error)
            raise

    return run_eagerly(call if row.small is None else _quick_method_of(form, row.small, run_eagerly(call)))


def _quick_method_of(form: _Form, number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a collective that the core can run: it goes past ``call`` if it can."""
    rows, has_root, has_op, is_barrier = form.row.rows, form.has_root, form.has_op, number == core.BARRIER

    def quick(self: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
        opts: Any = args[-1] if args else None
        if kwargs:
            opts = kwargs.get("opts") if is_barrier and len(kwargs) == 1 and not args else None
        queue, communicator = self._queue, self.communicator
        if (
            (is_async := getattr(opts, "asyncOp", None)) is None  # only torch's options have it
            or queue.counter[0]
            or queue.runner
            or self._limit
            or self._coalesced is not None
            or is_profiled()
            or has_dispatch_modes()
            or getattr(opts, "timeout", _UNSET) > _NO_TIME
        ):
            return call(self, *args, **kwargs)
        tensor: Any = None
        out: Any = None
        option: Any = None
        if rows is not None:
            try:
                tensor, out = rows(communicator.size, *args[:-1])
            except (AttributeError, RuntimeError, TypeError, ValueError):
                return call(self, *args, **kwargs)  # which raises it
        elif not is_barrier:
            tensor = args[0]
            if type(tensor) is list:
                tensor = tensor[0] if len(tensor) == 1 else None
        if has_op:
            option = _OPS.get(hash(opts.reduceOp))
            if has_root:
                option = opts.rootRank, option
        elif has_root:
            option = opts.rootRank
        if is_async:
            is_small = is_barrier or (getattr(tensor, "is_cpu", False) and tensor.numel() <= _SMALL_ELEMENTS)
            is_small = is_small and rows is not _new_rows
            begun = communicator.begin_number(number, tensor, out, option) if is_small else 0
            if begun <= 0:
                return call(self, *args, **kwargs)
            self._calls += 1
            work = BegunWork()
            work.collective, work.begun = number, (communicator._engine, begun, Work.forks)
            work._tensors, work._queue = args[0] if args else (), queue
            return work
        if communicator._run_core(number, tensor, out, option) and not communicator.run_small(
            number, tensor, out, option
        ):
            run = partial(communicator.all_reduce, tensor, option)
            is_plain = number == core.ALL_REDUCE and option in _PLAIN_OPS and type(tensor) is Tensor and tensor.is_cpu
            if not is_plain or tensor.is_sparse or has_modes() or not self._run_now(form.name, run):
                return call(self, *args, **kwargs)
        self._calls += 1
        if rows is _new_rows:
            return _gathered(args[0], out)
        finished = self._finished
        if getrefcount(finished) > _UNSHARED or finished._future is not None:  # a caller keeps it
            finished = self._finished = FinishedWork()
        finished._tensors = () if tensor is None else ref(tensor if rows is None else args[0])
        return finished

    return quick


def _gathered(outs: Any, rows: Tensor | None) -> FinishedWork:
    """Copy gathered rows into the outputs of a call, and return its handle."""
    if rows is not None:
        for out, values in zip(outs[0], rows, strict=True):
            out.data.copy_(values)
    finished: FinishedWork = FinishedWork()
    finished._tensors = outs
    return finished


def _run_each(
    run: Callable[..., Any], moves: bool, communicator: Communicator, calls: Sequence[tuple[Any, ...]]
) -> None:
    for arguments in calls:
        run(communicator, *(_data_in(argument, moves) for argument in arguments))


@run_eagerly
class GroupCollectives:
    """Collectives, messages and coalescing of a process group, under each name that torch 2.11 to 2.15 use."""

    def __init__(self, communicator: Communicator, other_devices: OtherDevices) -> None:
        """Store the communicator for CPU tensors and the backends of other devices."""
        self.communicator = communicator
        self.other_devices = other_devices
        self._queue = WorkQueue(in_order=True)
        self._limit: float | None = None  # timeout of a wait in seconds; None: the communicator's timeout only
        self._calls = 0
        self._coalesced: list[GroupWork] | None = None
        self._finished = FinishedWork()  # of the last call that ended at once; made again only if its caller keeps it

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> GroupWork | Any:
        """Send one tensor to a rank of the group."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> GroupWork | Any:
        """Receive one tensor from a rank of the group."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork | Any:
        """Receive the first tensor with a tag from any rank of the group; the call's `source_rank` names it."""
        return self._message("recv_anysource", tensors, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.other_devices.group(device)._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork | Any:
        if device.type != "cpu":
            return self.other_devices.group(device)._end_coalescing(device)
        if self._coalesced is None:
            raise RuntimeError("_end_coalescing was called without _start_coalescing")
        works, self._coalesced = self._coalesced, None
        return CoalescedWork(works)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later waits; the group's own timeout still ends calls that hang for longer.

        Raises:
            ValueError: if it is not above 0.
        """
        if not timeout > timedelta(0):
            raise ValueError(f"timeout is {timeout}; expected one above 0")
        self._limit = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _wait_for_pending_works(self) -> None:
        self._queue.run(self.communicator._engine.wait_for_pending, Work("wait"), keys=(), priority=0)

    def _finish(self) -> None:
        self._queue.close()

    def _replace_communicator(self, communicator: Communicator, reason: GanglineError) -> None:
        """Run later calls on another communicator; calls that are pending on the present one fail with ``reason``."""
        former, queue = self.communicator, self._queue
        self.communicator, self._queue, self._calls, self._coalesced = communicator, WorkQueue(in_order=True), 0, None
        self.__dict__.pop("_counting_group", None)
        former.abort(reason)
        queue.close()
        former.close()

    # Every call

    def _call_other_backend(
        self, names: Sequence[str], tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call with tensors without data, or on another device than the CPU."""
        if is_fake(tensor):
            group = c10d.recording_group(self.communicator.rank, self.communicator.size)
        else:
            group = self.other_devices.group(tensor.device)
        return _torch_method(group, names)(*args, **kwargs)

    @cached_property
    def _counting_group(self) -> ProcessGroup:
        return c10d.recording_group(self.communicator.rank, self.communicator.size, refuses=False)

    def _call(
        self,
        name: str,
        written: Any,
        opts: object,
        timeout: timedelta | None,
        run: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
    ) -> GroupWork:
        """Run ``run(communicator, calls)`` after all earlier calls."""
        self._calls += 1
        communicator = self.communicator
        communicator._engine.check_outermost()  # before the call is queued
        own = getattr(opts, "timeout", _UNSET) if timeout is None else timeout
        has_own = own > _NO_TIME
        limit = own.total_seconds() if has_own else self._limit
        function = partial(run, communicator, calls)
        waits_at_once = not getattr(opts, "asyncOp", True)
        is_plain = not (limit is not None or is_profiled() or has_dispatch_modes() or has_modes())  # of this thread
        if is_plain and waits_at_once and self._run_now(name, function):
            finished = FinishedWork()
            finished._tensors = written
            return self._counted(finished)
        inner = Work(name)
        work = GroupWork(inner, written, limit, give_up=communicator.abort if has_own else None)
        refuse = partial(communicator.refuse, name)
        operation = partial(work.run, function, refuse)
        if is_profiled():
            read = [tensors for one in calls[-1:] for argument in one if (tensors := [*tensors_in(argument)])]
            work.profile(c10d.begin_range(f"gangline::{name}", *(read[-1] if read else ())))
        submit: Callable[..., None] = self._queue.run
        if limit is not None or not waits_at_once or has_dispatch_modes():
            submit = partial(self._queue.submit, by_waiter=is_plain)
        elif has_modes():
            operation = leave_modes()(operation)
        try:
            submit(operation, inner, keys=(), priority=0)
        except NoThreadError as error:
            refuse(error)
            raise
        if inner.wake is not None and sum(map(Tensor.numel, tensors_in(written))) > _SMALL_ELEMENTS:
            inner.wake()
        return self._counted(work)

    def _run_now(self, name: str, operation: Callable[[], object]) -> bool:
        """Run a call at once unless earlier ones are unfinished; return whether it was run."""
        try:
            return self._queue.run_now(operation, name)
        except GanglineError:
            raise
        except BaseException as error:
            if not (isinstance(error, NestedCallError) and self._queue.is_running_here()):  # by the other ranks, too
                self.communicator.refuse(name, error)
            raise

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise the error also on ranks that make this call, instead of letting them wait for this rank."""
        self._calls += 1
        run = self._queue.submit if self._queue.unfinished else self._queue.run
        with suppress(RuntimeError):  # the group is closed
            run(partial(self.communicator.refuse, name, error), Work(name), keys=(), priority=0)

    def _message(self, name: str, tensors: Tensors, peer: int | None, tag: int) -> GroupWork | Any:
        tensor = _only(tensors)
        if not tensor.is_cpu or is_fake(tensor):
            return self._call_other_backend([name], tensor, [[tensor], *([] if peer is None else [peer]), tag], {})
        call: Any = self.communicator.send if name == "send" else self.communicator.recv
        work = call(as_supported_dtype(tensor), peer, tag, async_op=True)
        self._calls += 1
        if is_profiled():
            c10d.end_range(c10d.begin_range(f"gangline::{_PROFILED.get(name, name)}", tensor))
        return self._counted(MessageWork(work, [tensor], self._limit))

    def _counted(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


for _row in _TABLE:
    for _name in _row.methods.split():
        setattr(GroupCollectives, _name, _method_of(_row))


def _torch_method(group: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Return the method of a group of torch's, under the name that this version of torch has for it."""
    method: Callable[..., Any] = getattr(group, next(name for name in names if hasattr(ProcessGroup, name)))
    return method

"""Horovod's calls on a communicator. Ranks make the same calls in the same order; each call compares them first."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from inspect import Signature, signature, unwrap
from typing import Any, ParamSpec

import msgpack
import torch
from torch import Tensor

from gangline.collectives import environments
from gangline.collectives.communicator import Communicator, connect, in_process
from gangline.collectives.errors import MismatchError, name_ranks
from gangline.collectives.work import Work, WorkQueue
from gangline.kvstore.group.serialization import dtype_named, name_of_dtype

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPERATIONS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
_CALL_BYTES = 1024
_JOIN = ["join"]
_queue = WorkQueue(in_order=True)
_running: set[tuple[Callable[..., Any], str | None]] = set()  # calls with names and handles
followers: dict[str, Callable[[list[Any], list[Any]], object]] = {}
"""Part of a joined rank in a call of the others, by the call's name; arguments are those that `agree` returns."""


class ProcessSet:
    """A group of ranks, whose calls do not involve the others; `add_process_set` or `init` connects it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted({*ranks})
        self.process_set_id: int | None = None
        """Number of the set while it is connected."""
        self._group: Communicator | None = None

    @property
    def group(self) -> Communicator:
        """The communicator of the set.

        Raises:
            ValueError: if `init` was not called, or this rank is not in the set.
        """
        if global_process_set._group is None:
            raise ValueError("Horovod has not been initialized; use hvd.init()")
        if self._group is None:
            raise ValueError(
                f"rank {rank()} calls process set {self.ranks}; expected one of its ranks, and a set added"
            )
        return self._group

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return rank() in self.ranks

    def size(self) -> int:
        """Return the number of ranks in the set; on other ranks too."""
        return self.group.size if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int:
        """Return this process's rank in the set."""
        return self.group.rank


global_process_set = ProcessSet([])
_sets: list[ProcessSet] = []  # by number


def init(comm: None = None, process_sets: Sequence[ProcessSet] | str = ()) -> None:
    """Join the job of the environment; without one, this process is a job of its own. Collective.

    Args:
        comm: None.
        process_sets: sets to add; "dynamic" is Horovod's word for sets that are added later, as they always can be.

    Raises:
        ValueError: if ``comm`` is given: a job has the ranks that its launcher has started; or another word.
    """
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f"process_sets is {process_sets!r}; expected 'dynamic', or sets")
    if comm is not None:
        raise ValueError(f"comm is {comm!r}; expected None: start the ranks that take part, or use a ProcessSet")
    if not is_initialized():
        world = connect() if environments.find() is not None else in_process(1)[0]
        global_process_set._group, global_process_set.ranks = world, list(range(world.size))
        global_process_set.process_set_id = 0
        _sets[:] = [global_process_set]
        for one in () if isinstance(process_sets, str) else process_sets:
            add_process_set(one)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return global_process_set._group is not None


def shutdown() -> None:
    """Leave the job; `init` may be called again."""
    for one in reversed(_sets):
        _disconnect(one)
    _sets.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Connect a group of ranks. Collective: all ranks of the job must call it.

    Raises:
        ValueError: if a rank does not exist, or the set is connected.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world = global_process_set.group
    if added.process_set_id is not None or not {*added.ranks} <= {*range(world.size)}:
        raise ValueError(f"the process set has ranks {added.ranks}; expected ranks below {size()}, and each set once")

    def split() -> None:
        agree(global_process_set, ["add_process_set", added.ranks])
        added._group = world.split(0 if world.rank in added.ranks else None)

    submit(split)
    added.process_set_id = len(_sets)
    _sets.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Disconnect a group; return False if it is not connected, or the one of all ranks."""
    return process_set.process_set_id not in (None, 0) and _disconnect(process_set)


def _disconnect(process_set: ProcessSet) -> bool:
    if process_set._group is not None:
        submit(process_set._group.close)
    process_set._group = process_set.process_set_id = None
    return True


def submit(operation: Callable[[], Any], *, is_async: bool = False, name: str | None = None) -> Work:
    """Run an operation after all earlier ones, on the caller's GPU stream; the Work has what it returns as result."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    work = Work(name or operation.__name__)

    def run() -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            work.result = operation()

    (_queue.submit if is_async else _queue.run)(run, work, (), 0)
    return work


def synchronize(handle: Work) -> Any:
    """Wait for a call; return its result."""
    handle.wait()
    return handle.result


def poll(handle: Work) -> bool:
    """Return whether a call is over."""
    return handle.is_completed()


def agree(process_set: ProcessSet, call: list[Any], own: Any = 0) -> tuple[list[Any], list[Any]]:
    """Exchange what the ranks of a set call; runs within `submit`.

    Args:
        process_set: the ranks.
        call: name and arguments, which must be equal on all ranks that have not joined.
        own: what may differ.

    Returns:
        The call of the ranks that have not joined, and each rank's ``own``; None of those that have. Once all have
        joined: that call, and all ``own``.

    Raises:
        MismatchError: on all ranks, if they make different calls; on those that have not joined, if others have and the
            call needs all.
    """
    packed = msgpack.packb([call, own])
    if len(packed) > _CALL_BYTES:
        raise ValueError(f"{call[0]} has a name or splits of {len(packed)} bytes; expected at most {_CALL_BYTES}")
    row = torch.frombuffer(bytearray(packed.ljust(_CALL_BYTES, b"\0")), dtype=torch.uint8)
    gathered: Any = process_set.group.all_gather(row)
    calls = [msgpack.Unpacker(io.BytesIO(one.numpy().tobytes())).unpack() for one in gathered]
    active = [one for one, _ in calls if one != _JOIN] or [_JOIN]
    if any(one != active[0] for one in active):
        said = "; ".join(f"rank {rank}: {' '.join(map(str, one))}" for rank, (one, _) in enumerate(calls))
        raise MismatchError(f"ranks make different calls: {said}; expected the same calls in the same order on all")
    joined = [rank for rank, (one, _) in enumerate(calls) if one == _JOIN]
    if joined and call != _JOIN and call[0] not in followers:
        raise MismatchError(f"{call[0]} needs all ranks, but {name_ranks(joined)} called join()")
    return active[0], [None if one == _JOIN != active[0] else theirs for one, theirs in calls]


def join(device: int = -1) -> int:  # noqa: ARG001  Horovod's argument
    """Wait until all ranks have called it; meanwhile add zeros in their sums and no rows in what they gather.

    Returns:
        The highest rank of those that called it last; the same on all ranks.
    """

    def follow() -> int:
        calls = 0  # of the others since then
        while True:
            call, owns = agree(global_process_set, _JOIN, calls)
            if call == _JOIN:
                return max(rank for rank, count in enumerate(owns) if not count)
            if call[0] in followers:  # otherwise it is an error on those that made it
                followers[call[0]](call, owns)
            calls += 1

    return int(submit(follow).result)


# Places


def rank() -> int:
    """Return this process's rank."""
    return global_process_set.group.rank


def size() -> int:
    """Return the number of processes."""
    return global_process_set.group.size


def local_rank() -> int:
    """Return the number of lower ranks on this host."""
    hosts = global_process_set.group.hosts
    return hosts[: rank()].count(hosts[rank()])


def local_size() -> int:
    """Return the number of processes on this host."""
    hosts = global_process_set.group.hosts
    return hosts.count(hosts[rank()])


def cross_rank() -> int:
    """Return this host's number among those that have a process of this local rank."""
    return _peer_hosts().index(global_process_set.group.hosts[rank()])


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return len(_peer_hosts())


def _peer_hosts() -> list[int]:
    return [host for host, count in Counter(global_process_set.group.hosts).items() if count > local_rank()]


def is_homogeneous() -> bool:
    """Return whether all hosts have as many processes."""
    return len({*Counter(global_process_set.group.hosts).values()}) == 1


def _kind(tensor: Tensor, first: int = 0) -> list[Any]:
    """Return what must be equal on all ranks: the dtype, and the shape from its ``first`` axis."""
    return [name_of_dtype(tensor.dtype), list(tensor.shape[first:])]


class Compression:
    """Formats in which tensors are sent: `none`, as they are, or `fp16`, floating-point numbers as float16."""

    class none:  # noqa: D106, N801  Horovod's name
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:  # noqa: D102
            return tensor, tensor.dtype

        @staticmethod
        def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:  # noqa: D102
            return tensor.to(ctx)

    class fp16(none):  # noqa: D106, N801
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:  # noqa: D102
            return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype


def checked_op(op: int | None, average: bool | None = None, allowed: Iterable[int] = _OPERATIONS) -> int:
    """Return the operation of a call, of which ``average`` is an older form.

    Raises:
        NotImplementedError: if it is Adasum.
        ValueError: if it is none of those allowed, or both are given.
    """
    if op is not None and average is not None:
        raise ValueError(f"op is {op!r} and average is {average!r}; expected one of them")
    op = op if op is not None else Sum if average is False else Average
    if op == Adasum:
        raise NotImplementedError("op is Adasum, which gangline does not have; expected hvd.Average or hvd.Sum")
    if op not in allowed:
        raise ValueError(f"op is {op!r}; expected hvd's {', '.join(_OPERATIONS[one] for one in allowed)}")
    return op


# Collectives. Each is written once, for one tensor: a function that checks its arguments and returns an operation for
# the queue, and its gradient. `_form` makes the calls of it.

P = ParamSpec("P")
_Begun = tuple[Callable[[], Any], Callable[[Tensor], Tensor]]
_WRITING = {"allreduce", "broadcast"}
"""Collectives whose operation writes to its tensor, which is a copy then, except in place."""


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, result: list[Any], gradient: Callable[[Tensor], Tensor]) -> Any:
        ctx.gradient = gradient
        return result[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.gradient(grads[0]), None, None


def _form(
    function: Callable[..., Any], *, single: bool = True, is_async: bool = False, in_place: bool = False
) -> Callable[..., Any]:
    """Make a call of a collective, for one tensor or a list of them; with a gradient, unless in place or with a handle.

    As in Horovod, a call with a handle may not have the name of another one that runs.
    """
    begin, has_gradient = unwrap(function), not (is_async or in_place)
    first, *others = signature(begin).parameters.values()
    first = first.replace(name="tensor" if single else "tensors")
    shown = Signature([first, *(one for one in others if has_gradient or one.name != "compression")])

    @wraps(begin)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = shown.bind(*args, **kwargs).arguments
        given = arguments.pop(first.name)
        tensors = [given] if single else list(given)
        if in_place and any(one.is_sparse for one in tensors):
            raise ValueError("the tensor is sparse; expected a dense one, or sparse_allreduce_async")
        own = [one.detach() for one in tensors]
        if begin.__name__ in _WRITING and not in_place:
            own = [one.clone() for one in own]
        begun = [begin(one, **arguments) for one in own]
        named = (begin, arguments.get("name") if is_async else None)
        if named in _running:
            raise ValueError(f"a call with the name {named[1]!r} runs; expected another name, or synchronize() first")
        if named[1] is not None:
            _running.add(named)

        def run() -> Any:
            try:
                results = [operation() for operation, _ in begun]
            finally:
                _running.discard(named)
            return results[0] if single else results

        work = submit(run, is_async=is_async, name=begin.__name__)
        if not has_gradient:
            return work if is_async else work.result
        results = [work.result] if single else work.result
        found = [
            _Differentiable.apply(tensor, [result], gradient)  # type: ignore[no-untyped-call]
            for tensor, result, (_, gradient) in zip(tensors, results, begun, strict=True)
        ]
        return found[0] if single else found

    if function is not begin:
        call.__name__ = "grouped_" * (not single) + begin.__name__ + "_async" * is_async + "_" * in_place
        kind = " in place" * in_place + ", of each tensor" * (not single) + ", and return a handle" * is_async
        call.__doc__ = f"Do `{begin.__name__}`{kind}."
    call.__signature__ = shown  # type: ignore[attr-defined]
    return call


def _collective(begin: Callable[P, _Begun]) -> Callable[P, Any]:
    return _form(begin)


def _reduce(group: Communicator, out: Tensor, op: int, before: float, after: float, *, all_present: bool) -> Tensor:
    if not all_present and op not in (Average, Sum):
        raise MismatchError("a rank called join(), which has zeros to add only; expected hvd.Average or hvd.Sum")
    _scale(out, before)
    is_integer = op == Average and not (out.is_floating_point() or out.is_complex())
    group.all_reduce(out, "sum" if is_integer else _OPERATIONS[op])
    if is_integer:
        out.div_(group.size, rounding_mode="trunc")  # as Horovod, which casts the product with 1 / size
    return _scale(out, after)


def _scale(out: Tensor, factor: float) -> Tensor:
    """Multiply in place; integers in float64, and rounded towards zero."""
    if factor == 1:
        return out
    return out.copy_((out if out.is_floating_point() or out.is_complex() else out.double()) * factor)


@_collective
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compression.none] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Begun:
    """Return the reduced tensor, whose gradient is reduced in the same way."""
    op = checked_op(op, average)
    scales, group = (op, prescale_factor, postscale_factor), process_set.group

    def reduced() -> Tensor:
        sent, dtype = compression.compress(tensor)
        _, owns = agree(process_set, ["allreduce", name, *_kind(sent), *scales])
        return compression.decompress(_reduce(group, sent, *scales, all_present=None not in owns), dtype)

    def gradient(grad: Tensor) -> Any:
        return allreduce(grad, None, name, compression, *scales, process_set)

    return sparse_allreduce_async(tensor, name, op, process_set) if tensor.is_sparse else reduced, gradient


def _follow_allreduce(call: list[Any], _: list[Any]) -> None:
    if call[4] in (Average, Sum):  # otherwise it is an error on those that made it
        zeros = torch.zeros(call[3], dtype=dtype_named(call[2]), device="cpu")
        _reduce(global_process_set.group, zeros, *call[4:], all_present=False)


allreduce_ = _form(allreduce, in_place=True)
allreduce_async_ = _form(allreduce, is_async=True, in_place=True)
allreduce_async = _form(allreduce, is_async=True)
grouped_allreduce = _form(allreduce, single=False)
grouped_allreduce_ = _form(allreduce, single=False, in_place=True)
grouped_allreduce_async_ = _form(allreduce, single=False, is_async=True, in_place=True)
grouped_allreduce_async = _form(allreduce, single=False, is_async=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the sum, or the mean, of sparse tensors, whose values are gathered; return a function that waits for it."""
    divisor = process_set.size() if checked_op(op, allowed=(Average, Sum)) == Average else 1
    own = tensor.detach().coalesce()
    rows = grouped_allgather_async([own.values(), own.indices().t().contiguous()], name, process_set)

    def sum_of_rows() -> Tensor:
        values, indices = synchronize(rows)
        mean = values / divisor if divisor > 1 else values
        parts = (indices.t(), mean, own.shape)
        return torch.sparse_coo_tensor(*parts, device=own.device, check_invariants=False).coalesce()

    return partial(synchronize, submit(sum_of_rows, is_async=True, name="sparse_allreduce"))


@_collective
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> _Begun:
    """Return the tensors of all ranks, joined along their first axis, whose length may differ.

    The gradient is this rank's part of the mean of all ranks' gradients.
    """
    group, own = process_set.group, tensor.reshape(tensor.shape or (1,))
    rows: list[int] = []

    def gathered() -> Tensor:
        _, owns = agree(process_set, ["allgather", name, *_kind(own, 1)], len(own))
        rows[:] = [theirs or 0 for theirs in owns]
        return _gathered(group, own, rows)

    def gradient(grad: Tensor) -> Any:
        return allreduce(grad, process_set=process_set).split(rows)[group.rank].view(tensor.shape)

    return gathered, gradient


def _gathered(group: Communicator, tensor: Tensor, rows: list[int]) -> Tensor:
    out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    if len({*rows}) == 1:
        group.all_gather(tensor.contiguous(), out.view(group.size, *tensor.shape))
    else:
        group.all_to_all_uneven([tensor.contiguous()] * group.size, torch.split(out, rows))
    return out


def _follow_allgather(call: list[Any], owns: list[Any]) -> None:
    nothing = torch.empty((0, *call[3]), dtype=dtype_named(call[2]), device="cpu")
    _gathered(global_process_set.group, nothing, [theirs or 0 for theirs in owns])


allgather_async = _form(allgather, is_async=True)
grouped_allgather = _form(allgather, single=False)
grouped_allgather_async = _form(allgather, single=False, is_async=True)


@_collective
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Begun:
    """Return the root's tensor, whose gradient there is the mean of all ranks' gradients, and zero elsewhere."""
    group = process_set.group
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank is {root_rank}; expected one of {process_set.ranks}")

    def sent() -> Tensor:
        agree(process_set, ["broadcast", name, *_kind(tensor), root_rank])
        group.broadcast(tensor, process_set.ranks.index(root_rank))
        return tensor

    return sent, lambda grad: allreduce(grad, process_set=process_set) * (rank() == root_rank)


broadcast_ = _form(broadcast, in_place=True)
broadcast_async_ = _form(broadcast, is_async=True, in_place=True)
broadcast_async = _form(broadcast, is_async=True)


@_collective
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _Begun:
    """Send ``splits`` rows to each rank, the same number without it; return the rows received.

    With ``splits`` return a pair of them and of their numbers by rank, on the device of ``splits``. The gradients are
    sent back.
    """
    group = process_set.group
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.is_complex()):
        raise ValueError(f"splits are of {splits.dtype}; expected integers")
    if splits is None and len(tensor) % group.size:
        raise ValueError(f"the tensor has {len(tensor)} rows for {group.size} ranks; expected a multiple, or splits")
    parts = [len(tensor) // group.size] * group.size if splits is None else [int(one) for one in splits]
    if len(parts) != group.size or sum(parts) != len(tensor) or min(parts) < 0:
        raise ValueError(f"splits are {parts}; expected a number for each of {group.size} ranks, in sum {len(tensor)}")
    rows: list[int] = []

    def moved() -> Any:
        _, owns = agree(process_set, ["alltoall", name, *_kind(tensor, 1)], parts)
        rows[:] = [theirs[group.rank] for theirs in owns]
        out = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        group.all_to_all_uneven(torch.split(tensor.contiguous(), parts), torch.split(out, rows))
        place = splits.device if isinstance(splits, Tensor) else "cpu"
        return out if splits is None else (out, torch.tensor(rows, dtype=torch.int32, device=place))

    return moved, lambda grad: alltoall(grad, rows, None, process_set)[0]


alltoall_async = _form(alltoall, is_async=True)


@_collective
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compression.none] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> _Begun:
    """Return this rank's rows of the reduced tensor: as many as other ranks', or one more on the first ranks.

    Their gradients are gathered, times the number of ranks for a sum.
    """
    scales = checked_op(op, allowed=(Average, Sum)), prescale_factor, postscale_factor
    group = process_set.group
    if tensor.dim() == 0:
        raise ValueError("the tensor is a scalar; expected one with rows to scatter")

    def reduced() -> Any:
        sent, dtype = compression.compress(tensor)
        agree(process_set, ["reducescatter", name, *_kind(sent), *scales])
        rows = [len(part) for part in sent.tensor_split(group.size)]
        if len({*rows}) == 1 and scales[1:] == (1, 1) and sent.is_floating_point():
            own: Any = group.reduce_scatter(sent.reshape(group.size, -1, *sent.shape[1:]), _OPERATIONS[op])
        else:
            whole = _reduce(group, sent.clone(), *scales, all_present=True)
            own = torch.split(whole, rows)[group.rank].clone()
        return compression.decompress(own, dtype)

    factor = prescale_factor * postscale_factor * (group.size if op == Sum else 1)
    return reduced, lambda grad: allgather(grad * factor, None, process_set)


reducescatter_async = _form(reducescatter, is_async=True)
grouped_reducescatter = _form(reducescatter, single=False)
grouped_reducescatter_async = _form(reducescatter, single=False, is_async=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it that have not joined."""
    submit(lambda: agree(process_set, ["barrier"]))


followers.update(allreduce=_follow_allreduce, allgather=_follow_allgather, barrier=lambda *_: None)

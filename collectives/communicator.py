"""`Communicator`: the collectives between processes (or threads), as their users call them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from gangline.collectives.call_signature import CallSignature, encode_signature
from gangline.collectives.devices.nccl_communicator import NcclCommunicator
from gangline.collectives.devices.nccl_selection import NcclSelection
from gangline.collectives.engine import host_collectives, reduction
from gangline.collectives.engine.arguments import (
    as_rows,
    check_peer,
    check_rank,
    check_rows,
    check_tensor,
    check_written,
    data_of,
    fitting,
    flat_of,
    in_place,
    in_place_or,
    into_rows,
    is_like,
    is_plain,
    made_or_fitting,
    overwrite,
)
from gangline.collectives.engine.engine import Engine, GroupResources
from gangline.collectives.engine.host_collectives import SmallAllReduce
from gangline.collectives.engine.point_to_point import PointToPoint
from gangline.collectives.errors import GanglineError
from gangline.collectives.streams import SideStreams
from gangline.collectives.work import Work

_Result = TypeVar("_Result")
_REMEMBERED = 4096  # numbers of elements for which the way of an all-reduce is remembered


class Communicator:
    """A group of ranks that move and reduce tensors together, on the CPU or on GPUs.

    Made by `collectives.connect`, `collectives.spawn` or `split`. Every rank calls the same collectives with tensors of
    the same number of elements and dtype, in the same order; what differs is a `MismatchError` on all of them. A rank
    that dies, or does not come, is an error that names it. After a failed collective the tensors' contents are
    undefined, and every later call raises the same error. One thread at a time makes the calls.

    Tensors may be non-contiguous and empty; what is written must not be expanded, so that elements share memory. They
    are of float32, float64, float16, bfloat16, int8 to int64, uint8 or bool. ``op`` is "sum", "mean", "product", "min"
    or "max". All ranks hold the same bits afterwards. float16 and bfloat16 are added in float32 and rounded when a
    partial sum is handed on; integers wrap around; of bools "sum" is or, "product" is and.

    Tensors on GPUs are taken in the order of the current streams, and results ordered on them: a call may return before
    its result is there. All that a rank gives to one call is on one device. Once a call came in which every rank's
    tensor was on a GPU of its own, collectives on these go by NCCL, if cupy (or what GANGLINE_NCCL_BINDING names) is
    installed on all. Everything else goes through host memory, which is said once, with the reason: send and recv,
    int16, ranks that share a GPU, and ranks of which one's tensor was on the CPU in the first call with one on a GPU.

    With ``async_op=True`` a call returns a `Work` at once: the tensors belong to it until ``wait()``, and
    ``work.result`` is what the call would have returned.
    """

    def __init__(self, resources: GroupResources) -> None:
        self.rank = resources.rank
        """Which of the ranks this is, from 0."""
        self.size = resources.size
        """The number of ranks."""
        self.hosts = resources.hosts
        """The host of each rank, numbered from 0."""
        self.transport = resources.medium
        """By what the ranks are joined: "shared_memory", "ipc", "tcp" or "in_process"."""
        self._resources = resources
        self._engine = Engine(resources)
        self._gpus = NcclSelection(self._engine)
        self._lanes = SideStreams()
        self._messages = PointToPoint(resources, self._engine)
        self._small: dict[tuple[torch.dtype, int, str], SmallAllReduce] = {}
        self._leave = weakref.finalize(self, self._engine.leave)  # when it is dropped, or the program ends

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce a tensor over all ranks.

        Args:
            tensor: any shape.
            op: how elements are combined.
            out: where the result goes, of the same shape and dtype; None: into ``tensor``.
            async_op: return a `Work`.

        Returns:
            The tensor that holds the result.

        Raises:
            ValueError: an unknown ``op``, or ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        small = self._small.get((tensor.dtype, tensor.numel(), op)) if isinstance(tensor, Tensor) else None
        if small is not None and not async_op and is_plain(tensor) and (out is None or is_like(out, tensor)):
            self._engine.settle()  # the shortest way, for it is taken most often
            if self._gpus.nccl is None:
                given = data_of(tensor)
                small(given, given if out is None else data_of(out))
                return tensor if out is None else out
        check_tensor(tensor)
        reduction.check(op, tensor.dtype)
        result = in_place_or(tensor, out)
        reduce = self._all_reduce_way(tensor, op)

        def operation() -> None:
            if result is not tensor:
                data_of(result).copy_(data_of(tensor))
            in_place(result, reduce)

        code = encode_signature("all_reduce", tensor.numel(), tensor.dtype, op, None)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.all_reduce(tensor, result, op), result, async_op
        )

    def reduce(
        self, tensor: Tensor, root: int = 0, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work | None:
        """Reduce a tensor over all ranks for one of them.

        Args:
            tensor: any shape; on other ranks than ``root`` it is left as it is.
            root: who gets the result.
            op: how elements are combined.
            out: at the root, where the result goes; None: into ``tensor``. Others' is ignored.
            async_op: return a `Work`.

        Returns:
            At the root the tensor that holds the result, else None.

        Raises:
            ValueError: an unknown ``op`` or root, or ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        reduction.check(op, tensor.dtype)
        check_rank("root", root, self.size)
        result = None
        if self.rank == root:
            result = in_place_or(tensor, out)

        def operation() -> None:
            given = flat_of(tensor)
            if result is None:
                host_collectives.reduce(self._engine, given, None, root, op)
            else:
                in_place(result, lambda flat: host_collectives.reduce(self._engine, given, flat, root, op))

        code = encode_signature("reduce", tensor.numel(), tensor.dtype, op, root)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.reduce(tensor, result, root, op), result, async_op
        )

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Make a tensor on all ranks what it is on one.

        Args:
            tensor: any shape; it is overwritten on other ranks than ``root``.
            root: whose values are taken.
            async_op: return a `Work`.

        Returns:
            ``tensor``.

        Raises:
            ValueError: an unknown root, or an expanded tensor to be written.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        check_rank("root", root, self.size)
        if self.rank != root:
            check_written(tensor)

        def operation() -> None:
            if self.rank == root:
                host_collectives.broadcast(self._engine, flat_of(tensor), root)
            else:
                in_place(tensor, lambda flat: host_collectives.broadcast(self._engine, flat, root))

        code = encode_signature("broadcast", tensor.numel(), tensor.dtype, None, root)
        return self._call(code, (tensor,), operation, lambda nccl: nccl.broadcast(tensor, root), tensor, async_op)

    def all_gather(self, tensor: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Tensor | Work:
        """Gather every rank's tensor on all ranks.

        Args:
            tensor: any shape.
            out: (size, *tensor.shape), row r from rank r; None makes it.
            async_op: return a `Work`.

        Returns:
            ``out``.

        Raises:
            ValueError: ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        result = made_or_fitting("out", out, (self.size, *tensor.shape), tensor)

        def operation() -> None:
            into_rows(result, lambda rows: host_collectives.all_gather(self._engine, flat_of(tensor), rows))

        code = encode_signature("all_gather", tensor.numel(), tensor.dtype, None, None)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.all_gather(tensor, result), result, async_op
        )

    def reduce_scatter(
        self, tensor: Tensor, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce rows over all ranks, and give each rank one of them.

        Args:
            tensor: (size, ...), a row for each rank; left as it is.
            op: how elements are combined.
            out: where row ``rank`` goes; None makes it.
            async_op: return a `Work`.

        Returns:
            ``out``.

        Raises:
            ValueError: no row for each rank, an unknown ``op``, or ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_rows(tensor, self.size)
        reduction.check(op, tensor.dtype)
        result = made_or_fitting("out", out, tensor.shape[1:], tensor)

        def operation() -> None:
            rows = as_rows(flat_of(tensor), self.size)
            overwrite(result, lambda flat: host_collectives.reduce_scatter(self._engine, rows, flat, op))

        code = encode_signature("reduce_scatter", result.numel(), tensor.dtype, op, None)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.reduce_scatter(tensor, result, op), result, async_op
        )

    def all_to_all(self, tensor: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Tensor | Work:
        """Give each rank a row of one's tensor.

        Args:
            tensor: (size, ...): row j goes to rank j; left as it is.
            out: as ``tensor``: row i comes from rank i; None makes it.
            async_op: return a `Work`.

        Returns:
            ``out``.

        Raises:
            ValueError: no row for each rank, or ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_rows(tensor, self.size)
        result = made_or_fitting("out", out, tensor.shape, tensor)

        def operation() -> None:
            rows = as_rows(flat_of(tensor), self.size)
            into_rows(result, lambda taken: host_collectives.all_to_all(self._engine, rows, taken))

        code = encode_signature("all_to_all", tensor[0].numel(), tensor.dtype, None, None)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.all_to_all(tensor, result), result, async_op
        )

    def gather(
        self, tensor: Tensor, root: int = 0, out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work | None:
        """Gather every rank's tensor on one of them.

        Args:
            tensor: any shape.
            root: who gets them.
            out: at the root (size, *tensor.shape), row r from rank r; None makes it. Others' is ignored.
            async_op: return a `Work`.

        Returns:
            At the root ``out``, else None.

        Raises:
            ValueError: an unknown root, or ``out`` does not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        check_rank("root", root, self.size)
        result = made_or_fitting("out", out, (self.size, *tensor.shape), tensor) if self.rank == root else None

        def operation() -> None:
            if result is None:
                host_collectives.gather(self._engine, flat_of(tensor), None, root)
            else:
                into_rows(result, lambda rows: host_collectives.gather(self._engine, flat_of(tensor), rows, root))

        code = encode_signature("gather", tensor.numel(), tensor.dtype, None, root)
        return self._call(
            code, (tensor, result), operation, lambda nccl: nccl.gather(tensor, result, root), result, async_op
        )

    def scatter(self, tensor: Tensor | None, out: Tensor, root: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Give each rank a row of one rank's tensor.

        Args:
            tensor: at the root (size, *out.shape), row r for rank r; others' is ignored and may be None.
            out: where this rank's row goes.
            root: who gives.
            async_op: return a `Work`.

        Returns:
            ``out``.

        Raises:
            ValueError: an unknown root, or the shapes do not fit.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(out, "out")
        check_written(out, "out")
        check_rank("root", root, self.size)
        given = None
        if self.rank == root:
            if tensor is None:
                raise TypeError(f"tensor is None at the root of a scatter; expected ({self.size}, *out.shape)")
            given = fitting("tensor", tensor, (self.size, *out.shape), out)

        def operation() -> None:
            rows = None if given is None else as_rows(flat_of(given), self.size)
            overwrite(out, lambda flat: host_collectives.scatter(self._engine, rows, flat, root))

        code = encode_signature("scatter", out.numel(), out.dtype, None, root)
        return self._call(code, (out, given), operation, lambda nccl: nccl.scatter(given, out, root), out, async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when every rank has called it.

        Raises:
            GanglineError: a rank is dead, late, or at another call.
        """
        if async_op:
            return self._engine.submit("barrier", partial(host_collectives.barrier, self._engine), None)
        self._engine.settle()
        host_collectives.barrier(self._engine)
        return None

    def send(self, tensor: Tensor, to: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Send a tensor to another rank, which receives it by the same tag; returns when it may be written again.

        Raises:
            ValueError: an unknown rank, this rank itself, or a tag out of 0 to 2**31 - 1.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            GanglineError: the other rank is dead or late.
        """
        check_tensor(tensor)
        check_peer("to", to, self.rank, self.size, tag)
        work = self._messages.send(flat_of(tensor), to, tag)
        return self._messages.finish(work, async_op=async_op)

    def recv(self, tensor: Tensor, source: int, tag: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Receive into a tensor what another rank sends by the same tag; tags may come in any order.

        Returns:
            ``tensor``.

        Raises:
            ValueError: an unknown rank, this rank itself, a tag out of 0 to 2**31 - 1, or an expanded tensor.
            TypeError: no tensor of the CPU or a GPU, or a dtype that collectives do not take.
            MismatchError: what was sent is of another number of elements or dtype.
            GanglineError: the other rank is dead or late.
        """
        check_tensor(tensor)
        check_written(tensor)
        check_peer("source", source, self.rank, self.size, tag)
        work = self._messages.receive(tensor, source, tag)
        done = self._messages.finish(work, async_op=async_op)
        return tensor if done is None else done

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Make a communicator of the ranks that give the same color; a collective.

        Args:
            color: which group; None: none.
            key: the order within the group, smallest first; ties, and None, by rank.

        Returns:
            The group's communicator; None for a rank without color. Close it as any other.

        Raises:
            TypeError: a color or key that is no int.
            GanglineError: a rank is dead, late, or at another call.
        """
        from gangline.collectives.bootstrap.communicators import split

        self._engine.settle()
        return split(self._resources, self._engine, color, key)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in memory that all ranks of the host can reach; collectives on it copy nothing on their way.

        A collective: same arguments and order on all ranks. It serves until `close`, and lives as long as it is used.

        Raises:
            TypeError: a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        reduction.check_dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._engine.settle()
        return host_collectives.empty(self._engine, shape, dtype)

    def close(self) -> None:
        """Finish what was begun, tell the others, and give everything back; a second call does nothing."""
        self._leave.detach()
        self._messages.close()
        self._engine.settle()
        self._gpus.close()
        self._engine.close()

    def abort(self, error: GanglineError) -> None:
        """End what is under way, here and on all ranks; from any thread.

        A call of this rank that waits raises the error within some 10 ms, and so does every later one. The other ranks
        get it where they wait for this one. What has failed or was closed before keeps its first error. `close` is
        still to be called.

        Raises:
            TypeError: the error is not one of gangline's, which other ranks can be told.
        """
        if not isinstance(error, GanglineError):
            raise TypeError(f"error is {error!r}; expected a GanglineError, which other ranks can be told")
        if self._engine.error is None:
            self._engine.end(error)
            self._resources.membership.abort(error)
            self._gpus.abort()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} over {self.transport}>"

    def _all_reduce_way(self, tensor: Tensor, op: str) -> Callable[[Tensor], None]:
        """What reduces a contiguous tensor like this one in place; over the board it is remembered."""
        key = (tensor.dtype, tensor.numel(), op)
        if not self._engine.is_shared("all_reduce", tensor.nbytes):
            return partial(host_collectives.all_reduce, self._engine, op=op)
        if key not in self._small:
            if len(self._small) >= _REMEMBERED:
                self._small.clear()
            self._small[key] = SmallAllReduce(self._engine, tensor.numel(), tensor.dtype, op)
        small = self._small[key]
        return lambda flat: small(flat, flat)

    def _call(
        self,
        code: int,
        tensors: tuple[Tensor, *tuple[Tensor | None, ...]],
        by_host: Callable[[], None],
        by_nccl: Callable[[NcclCommunicator], None],
        result: _Result,
        async_op: bool,
    ) -> _Result | Work:
        """Make a call of this code, on these tensors, behind all that was called before it."""
        operation = partial(self._gpus.run, code, tensors[0], by_host, by_nccl)
        if not async_op:
            self._engine.settle()
            operation()
            return result
        name = CallSignature.from_code(code).collective
        on_gpus = [tensor for tensor in tensors if tensor is not None and tensor.is_cuda]
        if not on_gpus:
            return self._engine.submit(name, operation, result)
        section = self._lanes.behind_caller(on_gpus)

        def operation_in_section() -> None:
            with section:
                operation()

        return self._engine.submit(name, operation_in_section, result, section.join)

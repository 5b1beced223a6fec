"""`Communicator`: the collectives between processes (or threads), as their users call them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from collectives import arithmetic, operations
from collectives.engine import Engine, Lines
from collectives.layout import (
    as_rows,
    check_tensor,
    check_written,
    data_of,
    fitting,
    flat_of,
    in_place,
    into_rows,
    is_like,
    is_plain,
    made_or_fitting,
    overwrite,
)
from collectives.operations import SmallAllReduce
from collectives.point_to_point import PointToPoint
from collectives.work import Work

_Result = TypeVar("_Result")
_REMEMBERED = 4096  # numbers of elements for which the way of an all-reduce is remembered


class Communicator:
    """A group of ranks that move and reduce CPU tensors together.

    Made by `collectives.connect`, `collectives.spawn` or `split`. Every rank calls the same collectives with tensors of
    the same number of elements and dtype, in the same order; what differs is a `MismatchError` on all of them. A rank
    that dies, or does not come, is an error that names it. After a failed collective the tensors' contents are
    undefined, and every later call raises the same error. One thread at a time makes the calls.

    Tensors may be non-contiguous and empty; what is written must not be expanded, so that elements share memory. They
    are of float32, float64, float16, bfloat16, int8 to int64, uint8 or bool. ``op`` is "sum", "mean", "product", "min"
    or "max". All ranks hold the same bits afterwards. float16 and bfloat16 are added in float32 and rounded when a
    partial sum is handed on; integers wrap around; of bools "sum" is or, "product" is and.

    With ``async_op=True`` a call returns a `Work` at once: the tensors belong to it until ``wait()``, and
    ``work.result`` is what the call would have returned.
    """

    def __init__(self, lines: Lines) -> None:
        self.rank = lines.rank
        """Which of the ranks this is, from 0."""
        self.size = lines.size
        """The number of ranks."""
        self.hosts = lines.hosts
        """The host of each rank, numbered from 0."""
        self.transport = lines.medium
        """By what the ranks are joined: "shared_memory", "ipc", "tcp" or "in_process"."""
        self._lines = lines
        self._engine = Engine(lines)
        self._messages = PointToPoint(lines, self._engine)
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
            TypeError: no CPU tensor, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        small = self._small.get((tensor.dtype, tensor.numel(), op)) if isinstance(tensor, Tensor) else None
        if small is not None and not async_op and is_plain(tensor) and (out is None or is_like(out, tensor)):
            self._engine.settle()  # the shortest way, for it is taken most often
            given = data_of(tensor)
            small(given, given if out is None else data_of(out))
            return tensor if out is None else out
        check_tensor(tensor)
        arithmetic.check(op, tensor.dtype)
        result = self._in_place_or(tensor, out)
        reduce = self._all_reduce_way(tensor, op)

        def operation() -> None:
            if result is not tensor:
                data_of(result).copy_(data_of(tensor))
            in_place(result, reduce)

        return self._call("all_reduce", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        arithmetic.check(op, tensor.dtype)
        self._check_rank("root", root)
        result = None
        if self.rank == root:
            result = self._in_place_or(tensor, out)

        def operation() -> None:
            given = flat_of(tensor)
            if result is None:
                operations.reduce(self._engine, given, None, root, op)
            else:
                in_place(result, lambda flat: operations.reduce(self._engine, given, flat, root, op))

        return self._call("reduce", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        self._check_rank("root", root)
        if self.rank != root:
            check_written(tensor)

        def operation() -> None:
            if self.rank == root:
                operations.broadcast(self._engine, flat_of(tensor), root)
            else:
                in_place(tensor, lambda flat: operations.broadcast(self._engine, flat, root))

        return self._call("broadcast", operation, tensor, async_op)

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
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        result = self._rows_for(tensor, out)

        def operation() -> None:
            into_rows(result, lambda rows: operations.all_gather(self._engine, flat_of(tensor), rows))

        return self._call("all_gather", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype or op that does not go together.
            GanglineError: a rank is dead, late, or at another call.
        """
        self._check_rows(tensor)
        arithmetic.check(op, tensor.dtype)
        result = made_or_fitting("out", out, tensor.shape[1:], tensor.dtype)

        def operation() -> None:
            rows = as_rows(flat_of(tensor), self.size)
            overwrite(result, lambda flat: operations.reduce_scatter(self._engine, rows, flat, op))

        return self._call("reduce_scatter", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        self._check_rows(tensor)
        result = made_or_fitting("out", out, tensor.shape, tensor.dtype)

        def operation() -> None:
            rows = as_rows(flat_of(tensor), self.size)
            into_rows(result, lambda taken: operations.all_to_all(self._engine, rows, taken))

        return self._call("all_to_all", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(tensor)
        self._check_rank("root", root)
        result = self._rows_for(tensor, out) if self.rank == root else None

        def operation() -> None:
            if result is None:
                operations.gather(self._engine, flat_of(tensor), None, root)
            else:
                into_rows(result, lambda rows: operations.gather(self._engine, flat_of(tensor), rows, root))

        return self._call("gather", operation, result, async_op)

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
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        check_tensor(out, "out")
        check_written(out, "out")
        self._check_rank("root", root)
        given = None
        if self.rank == root:
            if tensor is None:
                raise TypeError(f"tensor is None at the root of a scatter; expected ({self.size}, *out.shape)")
            given = fitting("tensor", tensor, (self.size, *out.shape), out.dtype)

        def operation() -> None:
            rows = None if given is None else as_rows(flat_of(given), self.size)
            overwrite(out, lambda flat: operations.scatter(self._engine, rows, flat, root))

        return self._call("scatter", operation, out, async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when every rank has called it.

        Raises:
            GanglineError: a rank is dead, late, or at another call.
        """
        return self._call("barrier", lambda: operations.barrier(self._engine), None, async_op)

    def send(self, tensor: Tensor, to: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Send a tensor to another rank, which receives it by the same tag; returns when it may be written again.

        Raises:
            ValueError: an unknown rank, this rank itself, or a tag out of 0 to 2**31 - 1.
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            GanglineError: the other rank is dead or late.
        """
        check_tensor(tensor)
        self._check_peer("to", to, tag)
        work = self._messages.send(flat_of(tensor), to, tag)
        return self._messages.finish(work, async_op=async_op)

    def recv(self, tensor: Tensor, source: int, tag: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Receive into a tensor what another rank sends by the same tag; tags may come in any order.

        Returns:
            ``tensor``.

        Raises:
            ValueError: an unknown rank, this rank itself, a tag out of 0 to 2**31 - 1, or an expanded tensor.
            TypeError: no CPU tensor, or a dtype that collectives do not take.
            MismatchError: what was sent is of another number of elements or dtype.
            GanglineError: the other rank is dead or late.
        """
        check_tensor(tensor)
        check_written(tensor)
        self._check_peer("source", source, tag)
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
        from collectives.opening import split

        self._engine.settle()
        return split(self._lines, self._engine, color, key)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in memory that all ranks of the host can reach; collectives on it copy nothing on their way.

        A collective: same arguments and order on all ranks. It serves until `close`, and lives as long as it is used.

        Raises:
            TypeError: a dtype that collectives do not take.
            GanglineError: a rank is dead, late, or at another call.
        """
        arithmetic.check_dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._engine.settle()
        return operations.empty(self._engine, shape, dtype)

    def close(self) -> None:
        """Finish what was begun, tell the others, and give everything back; a second call does nothing."""
        self._leave.detach()
        self._messages.close()
        self._engine.close()

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
            return partial(operations.all_reduce, self._engine, op=op)
        if key not in self._small:
            if len(self._small) >= _REMEMBERED:
                self._small.clear()
            self._small[key] = SmallAllReduce(self._engine, tensor.numel(), tensor.dtype, op)
        small = self._small[key]
        return lambda flat: small(flat, flat)

    def _call(self, name: str, operation: Callable[[], None], result: _Result, async_op: bool) -> _Result | Work:
        if async_op:
            return self._engine.submit(name, operation, result)
        self._engine.settle()
        operation()
        return result

    def _in_place_or(self, tensor: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            check_written(tensor)
            return tensor
        return made_or_fitting("out", out, tensor.shape, tensor.dtype)

    def _rows_for(self, tensor: Tensor, out: Tensor | None) -> Tensor:
        return made_or_fitting("out", out, (self.size, *tensor.shape), tensor.dtype)

    def _check_rows(self, tensor: Tensor) -> None:
        check_tensor(tensor)
        if tensor.dim() == 0 or tensor.shape[0] != self.size:
            raise ValueError(f"tensor has shape {tuple(tensor.shape)}; expected a row for each of {self.size} ranks")

    def _check_rank(self, name: str, rank: int) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"{name} is {rank!r}; expected a rank, an int")
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} is {rank}; expected a rank from 0 to {self.size - 1}")

    def _check_peer(self, name: str, rank: int, tag: int) -> None:
        self._check_rank(name, rank)
        if rank == self.rank:
            raise ValueError(f"{name} is {rank}, this rank itself; expected another")
        if not isinstance(tag, int) or isinstance(tag, bool):
            raise TypeError(f"tag is {tag!r}; expected an int")
        if not 0 <= tag < 1 << 31:
            raise ValueError(f"tag is {tag}; expected a number from 0 to 2**31 - 1")

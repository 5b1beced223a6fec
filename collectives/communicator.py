"""`Communicator`: collectives between processes or threads, and the functions that create one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gangline.collectives import compiled_core as core
from gangline.collectives import hooks
from gangline.collectives.bootstrap import groups
from gangline.collectives.bootstrap.rendezvous import Rendezvous
from gangline.collectives.call_signature import COLLECTIVES, TABLE, Ranks, encode_signature
from gangline.collectives.devices.nccl_selection import NcclSelection
from gangline.collectives.eager import outside_modes, run_eagerly
from gangline.collectives.engine.arguments import (
    Call,
    check_call,
    check_peer,
    check_tensor,
    check_written,
)
from gangline.collectives.engine.begun_work import BegunWork
from gangline.collectives.engine.engine import Engine, GroupResources
from gangline.collectives.engine.host_collectives import HostCollectives
from gangline.collectives.engine.host_staging import flat_values
from gangline.collectives.engine.point_to_point import PointToPoint
from gangline.collectives.environments import LOOPBACK
from gangline.collectives.errors import GanglineError
from gangline.collectives.liveness.membership import has_closed
from gangline.collectives.streams import SideStreams
from gangline.collectives.timeline import recorder
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.work import Work

_BARRIER_CODE = encode_signature("barrier", 0, torch.uint8, None, None)


def connect(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    transport: str = "auto",
    timeout: float | None = None,
) -> Communicator:
    """Connect the processes of a job. Collective: all of them must call it.

    Args:
        rank: rank of this process, from 0; None: from the environment, as torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
            MASTER_PORT), mpirun or srun set it.
        size: number of processes; None: from the environment.
        address: "HOST:PORT" at which rank 0 waits for the other ranks; None: from the environment.
        transport: "auto" (shared memory within a host, tcp between hosts), or "shared_memory", "ipc" or "tcp" for all
            ranks. GANGLINE_TRANSPORT overrides it, and rank 0's choice overrides the others'.
        timeout: seconds that a call may wait for other ranks; None for GANGLINE_TIMEOUT, which is half an hour unless
            set.

    Raises:
        RuntimeError: if an argument is None and no launcher has set variables, or if the address is not loopback and
            GANGLINE_INSECURE=1 is not set.
        ValueError: if a number or a name is invalid.
        StallError: if a rank does not join in time; ranks may call it again.
    """
    rendezvous = Rendezvous(rank, size, address, timeout=timeout)
    try:
        return open_communicator(
            rendezvous.rank,
            rendezvous.size,
            rendezvous.exchange,
            transport=transport,
            timeout=timeout,
            tcp_host=rendezvous.interface,
        )
    except BaseException:
        rendezvous.fail()
        raise
    finally:
        rendezvous.close()


def open_communicator(
    rank: int,
    size: int,
    exchange: BootstrapAllGather,
    *,
    transport: str = "auto",
    timeout: float | None = None,
    tcp_host: Callable[[], str] = lambda: LOOPBACK,
) -> Communicator:
    """Connect processes that can already exchange bytes; arguments and errors are those of `groups.open_group`."""
    return Communicator(
        groups.open_group(rank, size, exchange, transport=transport, timeout=timeout, tcp_host=tcp_host)
    )


def in_process(size: int, *, timeout: float | None = None) -> list[Communicator]:
    """Return the communicators of ``size`` ranks that are threads of this process, in rank order.

    Args:
        size: number of ranks; each thread uses its own communicator.
        timeout: seconds that a call may wait for other ranks; None for GANGLINE_TIMEOUT.

    Raises:
        ValueError: if ``size`` is below 1.
    """
    return [Communicator(resources) for resources in groups.open_in_process(size, timeout=timeout)]


@run_eagerly
class Communicator:
    """A group of ranks that move and reduce tensors together, on the CPU or on GPUs.

    Created by `connect`, `spawn` or `split`. All ranks must make the same calls in the same
    order, with tensors of the same number of elements and dtype; a difference raises a `MismatchError` on all ranks. A
    rank that dies or does not join a call raises an error that names it. After a failed collective the contents of its
    tensors are undefined, and every later call raises the same error. A communicator is not thread-safe.

    Tensors may be non-contiguous or empty. A tensor that is written must not be expanded or overlap itself; a result
    may overlap an input. Supported dtypes are float32, float64, float16, bfloat16, int8 to int64, uint8, bool,
    complex64 and complex128. ``op`` is "sum", "mean", "product", "min" or "max". All ranks get the same bits. For
    float16 and bfloat16 each hop adds in float32 and rounds its partial sum to the tensor's dtype; a mean of float16
    stays float32 until the end. Integers wrap around. For bool, "sum" is a logical or and "product" a logical and.

    GPU tensors are read and written in the order of the current streams: a call may return before its result is
    computed. All tensors that a rank passes to one call must be on one device. The first call in which a rank passes a
    GPU tensor selects the path of all calls with GPU tensors: NCCL, if every rank passes a tensor on a GPU of its own
    and cupy (or the binding that GANGLINE_NCCL_BINDING names) is installed on all ranks, else host memory. send, recv,
    int16 and complex numbers always use host memory. A warning gives the reason once.

    With ``async_op=True`` a call returns a `Work` at once. The tensors must not be used until ``wait()`` has returned;
    ``work.result`` is what the call would have returned.

    Raises:
        ValueError: in all calls, if an operation, a rank or a tag is unknown, or a tensor does not fit the call: its
            shape, dtype or device differ from those expected, or it is to be written and is expanded.
        TypeError: in all calls, if an argument is not a tensor on the CPU or a GPU, or its dtype is not supported,
            or not by the operation.
        GanglineError: in all calls, if a rank is dead, late or in another call.
    """

    def __init__(self, resources: GroupResources) -> None:
        self.rank = resources.rank
        """This process's rank, from 0."""
        self.size = resources.size
        """Number of ranks."""
        self.hosts = resources.hosts
        """Host of each rank, numbered from 0."""
        self.transport = resources.transport.name
        """Transport between the ranks: "shared_memory", "ipc", "tcp" or "in_process"."""
        if recorder.current is not None:
            hooks.watch_torch()
        self._resources = resources
        self._engine = Engine(resources)
        self._host = HostCollectives(self._engine)
        self._gpus = NcclSelection(self._engine, self._host)
        self._side_streams = SideStreams()
        self._messages = PointToPoint(self._engine)
        self._run_core, self._begin_core = self._engine.run_core, self._engine.begin_core
        self._finalizer = weakref.finalize(self, self._engine.finalize)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce a tensor over all ranks.

        Args:
            tensor: tensor of any shape.
            op: reduction operation.
            out: tensor for the result, of the same shape and dtype; None to overwrite ``tensor``.
            async_op: return a `Work`.

        Returns:
            The tensor that holds the result.
        """
        if async_op or self._run_core(core.ALL_REDUCE, tensor, out, op):
            return self._call(core.ALL_REDUCE, tensor, out, op, async_op)
        return tensor if out is None else out

    def reduce(
        self, tensor: Tensor, root: int = 0, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work | None:
        """Reduce a tensor over all ranks to the root.

        Args:
            tensor: tensor of any shape; not changed on ranks other than ``root``.
            root: rank that gets the result.
            op: reduction operation.
            out: tensor for the result at the root; None to overwrite ``tensor``. Ignored on other ranks.
            async_op: return a `Work`.

        Returns:
            The tensor that holds the result at the root, else None.
        """
        if async_op or self._run_core(core.REDUCE, tensor, out, (root, op)):
            return self._call(core.REDUCE, tensor, out, (root, op), async_op)
        return None if self.rank != root else tensor if out is None else out

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Copy the root's tensor to all ranks.

        Args:
            tensor: tensor of any shape; overwritten on ranks other than ``root``.
            root: rank whose values are sent.
            async_op: return a `Work`.

        Returns:
            ``tensor``.
        """
        if async_op or self._run_core(core.BROADCAST, tensor, None, root):
            return self._call(core.BROADCAST, tensor, None, root, async_op)
        return tensor

    def broadcast_each(self, tensors: Sequence[Tensor], roots: Sequence[int]) -> None:
        """Run `broadcast` for each tensor with its root. With NCCL, ranks agree once and launch one group.

        Args:
            tensors: tensors on one device.
            roots: root of each tensor.
        """
        self._run_each(core.BROADCAST, tensors, roots)

    def reduce_each(self, tensors: Sequence[Tensor], roots: Sequence[int]) -> None:
        """Sum each tensor over all ranks, in place at its root; see `broadcast_each`."""
        self._run_each(core.REDUCE, tensors, [(root, "sum") for root in roots])

    def all_gather(self, tensor: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Tensor | Work:
        """Gather every rank's tensor on all ranks.

        Args:
            tensor: tensor of any shape.
            out: tensor of shape (size, *tensor.shape), whose row r receives rank r's tensor; None to create it.
            async_op: return a `Work`.

        Returns:
            ``out``.
        """
        if async_op or out is None or self._run_core(core.ALL_GATHER, tensor, out, None):
            return self._call(core.ALL_GATHER, tensor, out, None, async_op)
        return out

    def reduce_scatter(
        self, tensor: Tensor, op: str = "sum", out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work:
        """Reduce a tensor over all ranks and give each rank one row of the result.

        Args:
            tensor: tensor of shape (size, ...), with one row for each rank; not changed.
            op: reduction operation.
            out: tensor for row ``rank`` of the result; None to create it.
            async_op: return a `Work`.

        Returns:
            ``out``.
        """
        if async_op or out is None or self._run_core(core.REDUCE_SCATTER, tensor, out, op):
            return self._call(core.REDUCE_SCATTER, tensor, out, op, async_op)
        return out

    def all_to_all(self, tensor: Tensor, out: Tensor | None = None, *, async_op: bool = False) -> Tensor | Work:
        """Send one row of a tensor to each rank, and receive one row from each.

        Args:
            tensor: tensor of shape (size, ...), whose row j is sent to rank j; not changed.
            out: tensor like ``tensor``, whose row i is received from rank i; None to create it.
            async_op: return a `Work`.

        Returns:
            ``out``.
        """
        if async_op or out is None or self._run_core(core.ALL_TO_ALL, tensor, out, None):
            return self._call(core.ALL_TO_ALL, tensor, out, None, async_op)
        return out

    def all_to_all_uneven(self, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Send tensor j to rank j and receive ``outs[i]`` from rank i; all may differ in size.

        Args:
            tensors: a tensor for each rank, all of one dtype.
            outs: a tensor for the elements from each rank, of that dtype.

        Raises:
            MismatchError: on all ranks, if a rank sends another number of elements than its peer expects.
        """
        for name, given in (("tensors", tensors), ("outs", outs)):
            if len(given) != self.size:
                raise ValueError(f"{len(given)} {name} were given; expected one for each of {self.size} ranks")
            for tensor in given:
                check_tensor(tensor, name)
                if tensor.dtype != tensors[0].dtype:
                    raise ValueError(f"{name} has a tensor of {tensor.dtype}; expected {tensors[0].dtype} for all")
        for out in outs:
            check_written(out, "outs")
        self._engine.wait_for_pending()
        code = encode_signature("all_to_all_uneven", 0, tensors[0].dtype, None, None)
        with self._engine.lock.over_several():
            self._host.all_to_all_uneven(code, tensors, outs)

    def gather(
        self, tensor: Tensor, root: int = 0, out: Tensor | None = None, *, async_op: bool = False
    ) -> Tensor | Work | None:
        """Gather every rank's tensor on the root.

        Args:
            tensor: tensor of any shape.
            root: rank that gets the tensors.
            out: at the root, a tensor of shape (size, *tensor.shape), whose row r receives rank r's tensor; None to
                create it. Ignored on other ranks.
            async_op: return a `Work`.

        Returns:
            ``out`` at the root, else None.
        """
        if async_op or self._run_core(core.GATHER, tensor, out, root):
            return self._call(core.GATHER, tensor, out, root, async_op)
        return out if self.rank == root else None

    def scatter(self, tensor: Tensor | None, out: Tensor, root: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Send one row of the root's tensor to each rank.

        Args:
            tensor: at the root, a tensor of shape (size, *out.shape), whose row r is sent to rank r. Ignored on other
                ranks, where it may be None.
            out: tensor for this rank's row.
            root: rank whose rows are sent.
            async_op: return a `Work`.

        Returns:
            ``out``.
        """
        if async_op or self._run_core(core.SCATTER, tensor, out, root):
            return self._call(core.SCATTER, tensor, out, root, async_op)
        return out

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until every rank has called it."""
        if async_op:
            work = self.begin_small(core.BARRIER, None)
            return work or self._engine.submit("barrier", partial(self._host.synchronize, _BARRIER_CODE), None)
        if self._run_core(core.BARRIER, None, None, None) and not self.run_small(core.BARRIER, None):
            self._engine.wait_for_pending()
            with self._engine.lock.over_several():
                self._host.synchronize(_BARRIER_CODE)
        return None

    def send(self, tensor: Tensor, to: int, tag: int = 0, *, async_op: bool = False) -> Work | None:
        """Send a tensor to a rank that calls `recv` with the same tag; return when the tensor may be written again.

        A message to this rank itself is copied, so that `send` returns before `recv` is called.
        """
        check_tensor(tensor)
        check_peer("to", to, self.size, tag)
        with outside_modes():
            work = self._messages.send(flat_values(tensor), to, tag)
            return self._messages.finish(work, async_op=async_op)

    def recv(self, tensor: Tensor, source: int | None, tag: int = 0, *, async_op: bool = False) -> Tensor | Work:
        """Receive a tensor that another rank sends with the same tag; tags may arrive in any order.

        Args:
            tensor: tensor that is overwritten.
            source: rank that sends it; None: any other rank, then reported in ``work.source``.
            tag: tag of the message, from 0 to 2**31 - 1.
            async_op: return a `Work`.

        Returns:
            ``tensor``.

        Raises:
            MismatchError: if the sent tensor has another number of elements or dtype.
            ValueError: if the call waits for a message of this rank to itself that has not been sent.
        """
        check_tensor(tensor)
        check_written(tensor)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sources = [source] if source is not None else others or [self.rank]
        check_peer("source", sources[0], self.size, tag)
        if sources == [self.rank] and not async_op:
            self._messages.check_sent(tag)
        with outside_modes():
            work = self._messages.receive(tensor, sources, tag)
            pending = self._messages.finish(work, async_op=async_op)
        return tensor if pending is None else pending

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Create a communicator of the ranks that pass the same color. Collective: all ranks must call it.

        Args:
            color: group of this rank; None to join no group.
            key: sort key within the group; ties and None are ordered by rank.

        Returns:
            The group's communicator, which must be closed like any other, or None if the color is None.

        Raises:
            TypeError: if the color or the key is neither an int nor None.
        """
        self._engine.wait_for_pending()
        with self._engine.lock.over_several():
            resources = groups.split_group(self._resources, self._host, self._engine.next_number, color, key)
        return None if resources is None else Communicator(resources)

    def _call(self, number: int, tensor: Any, out: Tensor | None, option: Any, async_op: bool) -> Tensor | Work:
        """Run a collective of `TABLE` that `_run_core` has not run; return its result, maybe None, or its `Work`.

        The option is the operation of a reduction, the root, or (root, operation) of a reduce.
        """
        rule, call = TABLE[number], None
        result: Any = tensor if out is None else out
        if out is None and (rule.in_rows or rule.out_rows):  # the result cannot replace the tensor
            call = check_call(number, tensor, None, option, self.rank, self.size)
            result = out = call.result
        elif rule.writes is Ranks.ROOT and self.rank != (option[0] if rule.has_op else option):
            result = None
        if async_op:
            work = self.begin_small(number, tensor, out, option)
            if work is not None:
                work.result = result
                return work
        elif self.run_small(number, tensor, out, option):
            return cast(Tensor, result)
        call = call or check_call(number, tensor, out, option, self.rank, self.size)
        if async_op:
            return self._submit(call, result)
        self._gpus.run([call])
        return cast(Tensor, result)

    def _submit(self, call: Call, result: object) -> Work:
        """Run a call in the background; what runs it does not refer to this object, which may be dropped."""
        run = partial(self._gpus.run, [call])
        if not call.first.is_cuda:
            return self._engine.submit(call.rule.name, run, result)
        tensors = [tensor for tensor in (call.tensor, call.result) if tensor is not None]
        section = self._side_streams.behind_caller(tensors)

        def run_behind() -> None:
            with section:
                run()

        return self._engine.submit(call.rule.name, run_behind, result, section.join)

    def _run_each(self, number: int, tensors: Sequence[Tensor], options: Sequence[object]) -> None:
        pairs = zip(tensors, options, strict=True)
        calls = [check_call(number, tensor, None, option, self.rank, self.size) for tensor, option in pairs]
        self._gpus.run(calls)

    def run_small(
        self, collective: int, tensor: Tensor | None, out: Tensor | None = None, option: object = None
    ) -> bool:
        """Run a collective of plain tensors that fit a slot, if no call is queued; return whether it was run.

        Args:
            collective: its number, from `compiled_core`.
            tensor: tensor; None for a barrier, and on ranks other than the root of a scatter.
            out: tensor for the result; None to overwrite ``tensor``, or if this rank has none.
            option: operation of a reduction, root, or (root, operation) of a reduce.
        """
        status = self._run_core(collective, tensor, out, option)
        if status == core.HELD:
            self._engine.check_outermost()
            if not self._engine.queue.unfinished and self._gpus.nccl is None:
                status = self._engine.run_compiled(collective, tensor, out, option)
        return status == core.DONE

    def begin_small(
        self, collective: int, tensor: Tensor | None, out: Tensor | None = None, option: object = None
    ) -> Work | None:
        """Begin a collective of `run_small` without a thread, unless one is in flight; None: nothing was done."""
        number = self.begin_number(collective, tensor, out, option)
        if number <= 0:
            return None
        result = tensor if out is None else out
        return BegunWork(COLLECTIVES[collective], self._engine, number, Work.forks, result)

    def begin_number(self, collective: int, tensor: Tensor | None, out: Tensor | None, option: object) -> int:
        """Begin it as `begin_small`; return its number, by which the engine ends it, or 0 or less: nothing was done."""
        number = self._begin_core(collective, tensor, out, option)
        if number == core.HELD and self._engine.is_idle():  # it is time to read announcements
            number = self._engine.run_compiled(collective, tensor, out, option, begins=True)
        return number

    def close(self) -> None:
        """Finish pending operations, tell the other ranks that this one closes, and release resources. Idempotent.

        In a forked process it does nothing: the resources are the parent's.
        """
        if not self._engine.is_inherited:
            self._engine.check_outermost()
        self._finalizer.detach()
        if self._engine.is_inherited:
            return
        self._messages.close()
        with suppress(GanglineError):  # of a collective that was begun
            self._engine.wait_for_pending()
        self._gpus.close()
        self._engine.close()

    def abort(self, error: GanglineError) -> None:
        """End running calls with an error, on this rank and all others. Thread-safe.

        A waiting call of this rank raises the error within about 10 ms, and every later call raises it too. The other
        ranks raise it when they wait for this one. A communicator that has failed or is closed keeps its first error.
        `close` must still be called.

        Raises:
            TypeError: if ``error`` is not a `GanglineError`; other errors cannot be sent to other ranks.
        """
        if not isinstance(error, GanglineError):
            raise TypeError(f"error is {error!r}; expected a GanglineError, which can be sent to other ranks")
        if self._engine.error is None:
            self._engine.end(error)
            self._resources.membership.abort(error)
            self._gpus.abort()

    def refuse(self, call: str, error: BaseException) -> None:
        """Announce that this rank does not make its next collective, because of an error. Never blocks.

        Ranks that wait in that collective raise a `MismatchError` with this error's text, and all ranks raise it from
        then on. If all ranks refuse it, the communicator stays usable.

        Args:
            call: name of the collective.
            error: error that this rank's caller gets.
        """
        self._engine.refuse(call, error)

    def uses_nccl(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether this rank's calls on ``tensors`` use NCCL, provided that the other ranks' calls do."""
        return self._gpus.uses_nccl(tensors)

    def skip_nccl_check(self) -> AbstractContextManager[None]:
        """Skip the exchange before each call in this context: all ranks already know that `uses_nccl` is true."""
        return self._gpus.skip_check()

    def dead_ranks(self) -> list[int]:
        """Return the ranks that are known to be dead, without those that have closed the communicator."""
        if self._engine.is_inherited and self._engine.error is not None:
            raise self._engine.error
        membership = self._resources.membership
        membership.announce_and_read(0, 0)
        return sorted(rank for rank, why in membership.gone.items() if not has_closed(why))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size} over {self.transport}>"

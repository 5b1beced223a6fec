"""Collectives and messages of torch's process-group interface, each run as one operation on a `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gangline.collectives.communicator import Communicator
from gangline.collectives.engine.point_to_point import ReceiveWork
from gangline.collectives.torch_backend import operations
from gangline.collectives.torch_backend.arguments import (
    Operation,
    Tensors,
    exactly,
    first_tensor,
    inputs_of,
    one_list,
    op_in,
    pairs_of,
    root_in,
)
from gangline.collectives.torch_backend.c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    begin_range,
    end_range,
    has_dispatch_modes,
    is_fake,
    is_profiled,
    recording_group,
    run_eagerly,
)
from gangline.collectives.torch_backend.other_devices import OtherDevices
from gangline.collectives.torch_backend.work import CoalescedWork, GroupWork, MessageWork
from gangline.collectives.work import Work, WorkQueue

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_UNSET = timedelta(milliseconds=-1)  # torch's value for "no timeout for this call"
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names before torch 2.13, which keeps them beside the new ones."""


def _by_device(
    method: Callable[Concatenate[GroupCollectives, _Arguments], _Result],
) -> Callable[Concatenate[GroupCollectives, _Arguments], _Result]:
    """Forward calls on tensors without data, and on tensors of other devices than the CPU, to the group for those."""
    name = method.__name__
    is_collective = name not in ("send", "recv", "recv_anysource")

    @wraps(method)
    def call(self: GroupCollectives, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        tensor = first_tensor(args) if args else None
        if tensor is None:
            tensor = first_tensor(kwargs.values())
        if tensor is None or (tensor.is_cpu and not is_fake(tensor)):
            calls = self._calls
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if is_collective and self._calls == calls:  # it has not come to `_call`
                    self._refuse(name, error)
                raise
        group = self._recording_group() if is_fake(tensor) else self.other_devices.group(tensor.device)
        known = name if hasattr(ProcessGroup, name) else _OLD_NAMES[name]
        result: _Result = getattr(group, known)(*args, **kwargs)
        return result

    return call  # type: ignore[return-value]  # mypy objects to the name self


@run_eagerly
class GroupCollectives:
    """Collectives of a process group, under each name that torch 2.11 to 2.15 use.

    ``opts`` are torch's options: the operation, the root, whether the caller waits at once, and a timeout. torch's own
    overloads pass these one by one instead.
    """

    def __init__(self, communicator: Communicator, other_devices: OtherDevices) -> None:
        """Store the communicator for CPU tensors and the backends of other devices."""
        self.communicator = communicator
        self.other_devices = other_devices
        self._queue = WorkQueue()
        self._limit: float | None = None  # timeout of a wait in seconds; None: the communicator's timeout only
        self._calls = 0
        self._coalesced: list[GroupWork] | None = None

    def _recording_group(self) -> ProcessGroup:
        return recording_group(self.communicator.rank, self.communicator.size)

    @_by_device
    def allreduce(
        self,
        tensors: Tensors,
        opts: AllreduceOptions | Operation | None = None,
        timeout: timedelta | None = None,
        *,
        op: Operation | None = None,
    ) -> GroupWork:
        """Reduce one tensor in place, on all ranks."""
        (tensor,) = exactly(tensors, 1)
        return self._call("all_reduce", [tensor], opts, timeout, operations.all_reduce, tensor, op_in(opts, op))

    @_by_device
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> GroupWork:
        """Reduce several tensors in place, on all ranks."""
        calls = [(tensor, op_in(opts)) for tensor in tensors]
        return self._calls_in_a_row("all_reduce", tensors, opts, operations.all_reduce, calls)

    @_by_device
    def reduce(
        self,
        tensors: Tensors,
        opts: ReduceOptions | int | None = None,
        op: Operation | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> GroupWork:
        """Reduce one tensor in place at the root; other ranks' tensors are unchanged."""
        (tensor,) = exactly(tensors, 1)
        root = root_in(opts, root)
        return self._call("reduce", [tensor], opts, timeout, operations.reduce, tensor, root, op_in(opts, op))

    @_by_device
    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions | Operation | None = None,
        timeout: timedelta | None = None,
        *,
        op: Operation | None = None,
    ) -> GroupWork:
        """Reduce a list of tensors; each rank gets the one at its rank."""
        (output,), tensors = exactly(outputs, 1), one_list(inputs)
        function = operations.reduce_scatter
        return self._call("reduce_scatter", [output], opts, timeout, function, output, tensors, op_in(opts, op))

    @_by_device
    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> GroupWork:
        """Reduce a tensor with one slice per rank along its first axis; each rank gets its slice."""
        function = operations.reduce_scatter_single
        return self._call("reduce_scatter", [output], opts, None, function, output, tensor, op_in(opts))

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> GroupWork:
        """Run `reduce_scatter_single` on several tensors."""
        calls = [(*pair, op_in(opts)) for pair in pairs_of(outputs, inputs)]
        return self._calls_in_a_row("reduce_scatter", outputs, opts, operations.reduce_scatter_single, calls)

    @_by_device
    def broadcast(
        self,
        tensors: Tensors,
        opts: BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> GroupWork:
        """Copy the root's tensor to all ranks."""
        (tensor,) = exactly(tensors, 1)
        return self._call("broadcast", [tensor], opts, timeout, operations.broadcast, tensor, root_in(opts, root))

    @_by_device
    def allgather(
        self,
        outputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        inputs: Tensors,
        opts: AllgatherOptions | None = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Gather every rank's tensor into a list; sizes may differ if all ranks pass the same sizes."""
        outs, (tensor,) = one_list(outputs), exactly(inputs, 1)
        return self._call("all_gather", outs, opts, timeout, operations.all_gather, outs, tensor)

    @_by_device
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> GroupWork:
        """Gather several tensors: the i-th of rank r goes to ``outputs[r][i]``."""
        lists = [exactly(one, len(inputs)) for one in outputs]
        calls = [(outs, tensor) for tensor, *outs in zip(inputs, *lists, strict=True)]
        return self._calls_in_a_row(
            "all_gather", [out for one in lists for out in one], opts, operations.all_gather, calls
        )

    @_by_device
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None) -> GroupWork:
        """Gather every rank's tensor into one, stacked or concatenated."""
        return self._call("all_gather", [output], opts, None, operations.all_gather_single, output, tensor)

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> GroupWork:
        """Run `all_gather_single` on several tensors."""
        calls = pairs_of(outputs, inputs)
        return self._calls_in_a_row("all_gather", outputs, opts, operations.all_gather_single, calls)

    @_by_device
    def gather(
        self,
        outputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        inputs: Tensors,
        opts: GatherOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> GroupWork:
        """Gather every rank's tensor, all of one size, into the root's list."""
        outs, (tensor,) = one_list(outputs), exactly(inputs, 1)
        return self._call("gather", outs, opts, timeout, operations.gather, outs, tensor, root_in(opts, root))

    @_by_device
    def scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        opts: ScatterOptions | int | None = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> GroupWork:
        """Send each rank one tensor of the root's list, all of one size."""
        (output,), tensors = exactly(outputs, 1), one_list(inputs)
        return self._call("scatter", [output], opts, timeout, operations.scatter, output, tensors, root_in(opts, root))

    @_by_device
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> GroupWork:
        """Send each rank one tensor of the list; sizes may differ."""
        return self._call("all_to_all", outputs, opts, None, operations.all_to_all, outputs, inputs)

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: AllToAllOptions | None = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Send each rank one slice of the tensor along the first axis; sizes may differ."""
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        function = operations.all_to_all_single
        return self._call("all_to_all", [output], opts, timeout, function, output, tensor, *splits)

    @_by_device
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> GroupWork:
        """Send one tensor to a rank of the group."""
        (tensor,) = exactly(tensors, 1)
        work = self.communicator.send(operations.movable(tensor), dst, tag, async_op=True)
        assert work is not None
        return self._message("send", work, tensor)

    def _receive(self, tensors: Tensors, src: int | None, tag: int) -> GroupWork:
        (tensor,) = exactly(tensors, 1)
        work = self.communicator.recv(operations.movable(tensor), src, tag, async_op=True)
        assert isinstance(work, ReceiveWork)
        return self._message("recv" if src is not None else "recvAnySource", work, tensor)

    @_by_device
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> GroupWork:
        """Receive one tensor from a rank of the group."""
        return self._receive(tensors, src, tag)

    @_by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        """Receive the first tensor with a tag from any rank of the group; the call's `source_rank` names it."""
        return self._receive(tensors, None, tag)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Barriers and coalescing

    def barrier(self, opts: BarrierOptions | None = None, timeout: timedelta | None = None) -> GroupWork:
        """Wait until all ranks have called it."""
        return self._call("barrier", [], opts, timeout, Communicator.barrier)

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
        if not self._queue.is_idle():
            self._queue.run(lambda: None, Work("settle"), keys=(self,), priority=0)

    def _finish(self) -> None:
        self._queue.close()

    # Every call

    def _call(
        self,
        name: str,
        written: Sequence[Tensor],
        opts: object,
        timeout: timedelta | None,
        function: Callable[..., object],
        *arguments: Any,
    ) -> GroupWork:
        """Run ``function(communicator, *arguments)`` after all earlier calls."""
        self._calls += 1
        own = getattr(opts, "timeout", _UNSET) if timeout is None else timeout
        has_own = own > timedelta(0)
        limit = own.total_seconds() if has_own else self._limit
        inner = Work(name)
        work = GroupWork(inner, written, limit, give_up=self.communicator.abort if has_own else None)
        refuse = partial(self.communicator.refuse, name)
        operation = partial(work.run, partial(function, self.communicator, *arguments), refuse)
        if is_profiled():
            work.profile(begin_range(f"gangline::{name}", *inputs_of(arguments)))
        run = self._queue.run
        if limit is not None or getattr(opts, "asyncOp", True) or has_dispatch_modes():  # modes belong to a thread
            run = self._queue.submit
        elif torch.is_inference_mode_enabled():  # buffers that are kept must be writable outside of it
            operation = partial(_outside_inference_mode, operation)
        run(operation, inner, keys=(self,), priority=0)
        return self._counted(work)

    def _refuse(self, name: str, error: Exception) -> None:
        """Make ranks that make this call raise an error too, instead of waiting for this rank."""
        self._calls += 1
        run = self._queue.run if self._queue.is_idle() else self._queue.submit
        with suppress(RuntimeError):  # the group is closed
            run(partial(self.communicator.refuse, name, error), Work(name), keys=(self,), priority=0)

    def _calls_in_a_row(
        self,
        name: str,
        written: Sequence[Tensor],
        opts: object,
        function: Callable[..., None],
        calls: Sequence[tuple[Any, ...]],
    ) -> GroupWork:
        def operation(communicator: Communicator) -> None:
            for arguments in calls:
                function(communicator, *arguments)

        return self._call(f"{name} of {len(calls)}", written, opts, None, operation)

    def _message(self, name: str, work: Work, tensor: Tensor) -> GroupWork:
        self._calls += 1
        if is_profiled():
            end_range(begin_range(f"gangline::{name}", tensor))
        return self._counted(MessageWork(work, [tensor], self._limit))

    def _counted(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _outside_inference_mode(operation: Callable[[], None]) -> None:
    with torch.inference_mode(mode=False):
        operation()

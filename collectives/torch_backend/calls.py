"""Collectives and messages of torch's process-group interface, each run as one operation on a `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from gangline.collectives.communicator import Communicator
from gangline.collectives.eager import has_modes, leave_modes, run_eagerly
from gangline.collectives.errors import GanglineError, NestedCallError
from gangline.collectives.torch_backend import operations
from gangline.collectives.torch_backend.c10d import (
    begin_range,
    end_range,
    has_dispatch_modes,
    is_fake,
    is_profiled,
    recording_group,
)
from gangline.collectives.torch_backend.other_devices import OtherDevices
from gangline.collectives.torch_backend.work import CoalescedWork, FinishedWork, GroupWork, MessageWork
from gangline.collectives.work import NoThreadError, Work, WorkQueue

Tensors = Tensor | Sequence[Tensor]

_UNSET = timedelta(milliseconds=-1)  # torch's value for "no timeout for this call"
_NO_TIME = timedelta(0)
_SMALL_ELEMENTS = 1 << 14  # of an asynchronous call that may begin in `wait` or at the queue's next poll
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names before torch 2.13, which keeps them beside the new ones."""
_PROFILED = {"recv_anysource": "recvAnySource"}  # as gloo names it
_PLAIN = ("opts", "timeout")
_WITH_OP = ("opts", "timeout", "op")
_WITH_ROOT = ("opts", "timeout", "root")


def _exactly(tensors: Tensors, count: int) -> list[Tensor]:
    """Return a tensor or a list of tensors as a list of ``count`` tensors."""
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != count:
        raise ValueError(f"{len(found)} tensors were given; expected {count}, because a rank has one device")
    return found


def _only(tensors: Tensors) -> Tensor:
    return _exactly(tensors, 1)[0]


def _one_list(lists: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the only list inside torch's list of one list per device; empty if a rank passes none."""
    if any(isinstance(one, Tensor) for one in lists):
        return [one for one in lists if isinstance(one, Tensor)]
    found = [list(one) for one in lists]
    if len(found) > 1:
        raise ValueError(f"{len(found)} lists of tensors were given; expected one, because a rank has one device")
    return found[0] if found else []


def _same(value: Any) -> Any:
    return value


def _splits(sizes: Sequence[int] | None) -> list[int]:
    return list(sizes or ())


def _pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if len(outputs) != len(inputs):
        raise ValueError(f"{len(outputs)} outputs were given for {len(inputs)} inputs; expected one for each")
    return list(zip(outputs, inputs, strict=True))


def _transposed(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Return each input with the outputs for it, one per rank: the i-th input of rank r goes to ``outputs[r][i]``."""
    lists = [_exactly(one, len(inputs)) for one in outputs]
    return [(outs, tensor) for tensor, *outs in zip(inputs, *lists, strict=True)]


_ONE_EACH: dict[str, Callable[[Any], Any]] = {"output": _same, "tensor": _same}
_SEVERAL: dict[str, Callable[[Any], Any]] = {"outputs": _same, "inputs": _same}


def _collective(
    torch_name: str,
    operation: Callable[..., None],
    tensors: dict[str, Callable[[Any], Any]],
    options: Sequence[str] = _PLAIN,
    calls: Callable[..., Iterable[tuple[Any, ...]]] | None = None,
) -> Any:
    """Return the method of one of torch's collectives.

    Args:
        torch_name: torch's name.
        operation: function of `operations`, called with the communicator, the converted tensors, the root if there is
            one, and the reduction if there is one. Errors and profiles have its name.
        tensors: names of the first parameters, each with its conversion; the first one is written.
        options: names of the further parameters, in torch's order. ``opts`` holds torch's options: operation, root,
            whether the caller waits at once, and a timeout. torch's overloads pass an operation or a root instead.
        calls: function that turns the converted tensors into those of several calls of ``operation``; None: one call.
    """
    name = operation.__name__.removesuffix("_single")
    names = (*tensors, *options)
    has_root, has_op = "root" in options, "op" in options

    def call(self: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(names) or (kwargs and not kwargs.keys() <= set(names)):
            raise TypeError(f"{torch_name} got {len(args)} arguments and {list(kwargs)}; expected {', '.join(names)}")
        given = dict(zip(names, args, strict=False), **kwargs)
        tensor = _first_tensor(given.values())
        if tensor is not None and (not tensor.is_cpu or is_fake(tensor)):
            return self._elsewhere(torch_name, tensor)(*args, **kwargs)
        counted = self._calls
        try:
            if has_dispatch_modes():  # they are to see the operator of this call, which goes past torch's dispatcher
                _method(self._counting_group, torch_name)(*args, **kwargs)
            opts = given.get("opts")
            converted = [convert(given.get(parameter)) for parameter, convert in tensors.items()]
            rest: list[Any] = []
            if has_root:
                rest.append(opts if type(opts) is int else getattr(opts, "rootRank", given.get("root", 0)))
            if has_op:
                op = given.get("op")
                op = getattr(opts, "reduceOp", opts) if op is None else op
                rest.append(operations.op_of(ReduceOp.SUM if op is None or type(op) is int else op))  # an int: the root
            timeout = given.get("timeout")
            if calls is None:
                written = converted[0] if isinstance(converted[0], list) else [converted[0]]
                return self._call(name, written, opts, timeout, operation, *converted, *rest)
            several = [(*one, *rest) for one in calls(*converted)]
            written = [out for first, *_ in several for out in (first if isinstance(first, list) else [first])]
            return self._call(
                f"{name} of {len(several)}", written, opts, timeout, partial(_in_a_row, operation, several)
            )
        except Exception as error:
            if self._calls == counted:  # `_call` was not reached
                self._refuse(torch_name, error)
            raise

    return call


def _in_a_row(operation: Callable[..., None], several: Sequence[tuple[Any, ...]], communicator: Communicator) -> None:
    for arguments in several:
        operation(communicator, *arguments)


@run_eagerly
class GroupCollectives:
    """Collectives of a process group, under each name that torch 2.11 to 2.15 use."""

    def __init__(self, communicator: Communicator, other_devices: OtherDevices) -> None:
        """Store the communicator for CPU tensors and the backends of other devices."""
        self.communicator = communicator
        self.other_devices = other_devices
        self._queue = WorkQueue()
        self._limit: float | None = None  # timeout of a wait in seconds; None: the communicator's timeout only
        self._calls = 0
        self._coalesced: list[GroupWork] | None = None

    allreduce = _collective("allreduce", operations.all_reduce, {"tensors": _only}, _WITH_OP)
    """Reduce one tensor in place, on all ranks."""

    allreduce_coalesced = _collective("allreduce_coalesced", operations.all_reduce, {"tensors": list}, _WITH_OP, zip)
    """Reduce several tensors in place, on all ranks."""

    reduce = _collective("reduce", operations.reduce, {"tensors": _only}, ("opts", "op", "timeout", "root"))
    """Reduce one tensor in place at the root; other ranks' tensors are unchanged."""

    reduce_scatter = _collective(
        "reduce_scatter", operations.reduce_scatter, {"outputs": _only, "inputs": _one_list}, _WITH_OP
    )
    """Reduce a list of tensors; each rank gets the one at its rank."""

    reduce_scatter_single = _reduce_scatter_base = _collective(
        "reduce_scatter_single", operations.reduce_scatter_single, _ONE_EACH, _WITH_OP
    )
    """Reduce a tensor with one slice per rank along its first axis; each rank gets its slice."""

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _collective(
        "reduce_scatter_single_coalesced", operations.reduce_scatter_single, _SEVERAL, _WITH_OP, _pairs
    )
    """Run `reduce_scatter_single` on several tensors."""

    broadcast = _collective("broadcast", operations.broadcast, {"tensors": _only}, _WITH_ROOT)
    """Copy the root's tensor to all ranks."""

    allgather = _collective("allgather", operations.all_gather, {"outputs": _one_list, "inputs": _only})
    """Gather every rank's tensor into a list; sizes may differ if all ranks pass the same sizes."""

    allgather_coalesced = _collective("allgather_coalesced", operations.all_gather, _SEVERAL, calls=_transposed)
    """Gather several tensors: the i-th of rank r goes to ``outputs[r][i]``."""

    all_gather_single = _allgather_base = _collective("all_gather_single", operations.all_gather_single, _ONE_EACH)
    """Gather every rank's tensor into one, stacked or concatenated."""

    all_gather_single_coalesced = allgather_into_tensor_coalesced = _collective(
        "all_gather_single_coalesced", operations.all_gather_single, _SEVERAL, calls=_pairs
    )
    """Run `all_gather_single` on several tensors."""

    gather = _collective("gather", operations.gather, {"outputs": _one_list, "inputs": _only}, _WITH_ROOT)
    """Gather every rank's tensor, all of one size, into the root's list."""

    gather_single = gather_into_tensor = _collective("gather_single", operations.gather_single, _ONE_EACH, _WITH_ROOT)
    """Gather every rank's tensor into the root's one, stacked or concatenated; torch calls it since 2.14."""

    scatter = _collective("scatter", operations.scatter, {"outputs": _only, "inputs": _one_list}, _WITH_ROOT)
    """Send each rank one tensor of the root's list, all of one size."""

    alltoall = _collective("alltoall", operations.all_to_all, {"outputs": list, "inputs": list})
    """Send each rank one tensor of the list; sizes may differ."""

    all_to_all_single = alltoall_base = _collective(
        "all_to_all_single",
        operations.all_to_all_single,
        {**_ONE_EACH, "output_split_sizes": _splits, "input_split_sizes": _splits},
    )
    """Send each rank one slice of the tensor along the first axis; sizes may differ."""

    # Messages, barriers and coalescing

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> GroupWork | Any:
        """Send one tensor to a rank of the group."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> GroupWork | Any:
        """Receive one tensor from a rank of the group."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork | Any:
        """Receive the first tensor with a tag from any rank of the group; the call's `source_rank` names it."""
        return self._message("recv_anysource", tensors, None, tag)

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> GroupWork:
        """Wait until all ranks have called `barrier`."""
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
        if self._queue.unfinished:
            self._queue.run(lambda: None, Work("settle"), keys=(self,), priority=0)

    def _finish(self) -> None:
        self._queue.close()

    def _replace_communicator(self, communicator: Communicator, reason: GanglineError) -> None:
        """Run later calls on another communicator; calls that are pending on the present one fail with ``reason``."""
        former, queue = self.communicator, self._queue
        self.communicator, self._queue, self._calls, self._coalesced = communicator, WorkQueue(), 0, None
        self.__dict__.pop("_counting_group", None)
        former.abort(reason)
        queue.close()
        former.close()

    # Every call

    def _elsewhere(self, name: str, tensor: Tensor) -> Callable[..., Any]:
        """Return the call of that name for tensors without data, or on another device than the CPU."""
        if is_fake(tensor):
            group = recording_group(self.communicator.rank, self.communicator.size)
        else:
            group = self.other_devices.group(tensor.device)
        return _method(group, name)

    @cached_property
    def _counting_group(self) -> ProcessGroup:
        return recording_group(self.communicator.rank, self.communicator.size, refuses=False)

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
        has_own = own > _NO_TIME
        limit = own.total_seconds() if has_own else self._limit
        waits_at_once = not getattr(opts, "asyncOp", True)
        is_plain = limit is None and not is_profiled() and not has_dispatch_modes()  # modes belong to a thread
        is_plain = is_plain and not has_modes()
        if is_plain and waits_at_once and self._run_now(name, partial(function, self.communicator, *arguments)):
            return self._counted(FinishedWork(written))
        inner = Work(name)
        work = GroupWork(inner, written, limit, give_up=self.communicator.abort if has_own else None)
        refuse = partial(self.communicator.refuse, name)
        operation = partial(work.run, partial(function, self.communicator, *arguments), refuse)
        if is_profiled():
            work.profile(begin_range(f"gangline::{name}", *_inputs_of(arguments)))
        run: Callable[..., None] = self._queue.run
        if limit is not None or not waits_at_once or has_dispatch_modes():
            run = partial(self._queue.submit, by_waiter=is_plain)
        elif has_modes():
            operation = leave_modes()(operation)
        try:
            run(operation, inner, keys=(self,), priority=0)
        except NoThreadError as error:
            refuse(error)
            raise
        if inner.wake is not None and sum(map(Tensor.numel, written)) > _SMALL_ELEMENTS:
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
            run(partial(self.communicator.refuse, name, error), Work(name), keys=(self,), priority=0)

    def _message(self, name: str, tensors: Tensors, peer: int | None, tag: int) -> GroupWork | Any:
        tensor = _only(tensors)
        if not tensor.is_cpu or is_fake(tensor):
            return self._elsewhere(name, tensor)([tensor], *([] if peer is None else [peer]), tag)
        call: Any = self.communicator.send if name == "send" else self.communicator.recv
        work = call(operations.movable(tensor), peer, tag, async_op=True)
        self._calls += 1
        if is_profiled():
            end_range(begin_range(f"gangline::{_PROFILED.get(name, name)}", tensor))
        return self._counted(MessageWork(work, [tensor], self._limit))

    def _counted(self, work: GroupWork) -> GroupWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _method(group: Any, name: str) -> Callable[..., Any]:
    """Return the method of a group of torch's, under the name that this version of torch has for it."""
    found: Callable[..., Any] = getattr(group, name if hasattr(ProcessGroup, name) else _OLD_NAMES[name])
    return found


def _first_tensor(values: Iterable[object]) -> Tensor | None:
    """Return the first tensor in a call's arguments."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def _inputs_of(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors that a call reads: its last argument that is a tensor or a list of tensors."""
    found: list[Tensor] = []
    for value in arguments:
        if isinstance(value, Tensor):
            found = [value]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found = list(value)
    return found

"""NCCL between ranks that have one GPU each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from gangline.collectives.devices.backends.base import Flattened
from gangline.collectives.devices.backends.nccl import call, grouped, stream_of
from gangline.collectives.devices.backends.nccl_bindings import Binding
from gangline.collectives.engine.arguments import Call
from gangline.collectives.engine.host_staging import copy_values


class NcclCommunicator:
    """Collectives of one rank on tensors of its GPU, enqueued on that GPU's current stream.

    The ranks have agreed on each call before; written tensors are not expanded. NCCL chooses the order of summation,
    the same on all ranks, and divides before it adds for a mean. int16 and complex numbers are not supported.

    NCCL's first call between two ranks waits until both are in it. So nothing is held that another rank of this
    process, in a thread, would need.
    """

    def __init__(self, binding: Binding, rank: int, size: int) -> None:
        self._binding = binding
        self._rank = rank
        self._size = size

    def launch(self, calls: Sequence[Call]) -> None:
        """Start calls, several as one group; tensors of several are contiguous."""
        with grouped(self._binding) if len(calls) > 1 else nullcontext():
            for one in calls:
                self._start(one)

    def _start(self, one: Call) -> None:
        rule, tensor, result = one.rule, one.tensor, one.result
        if rule.name == "all_reduce" and tensor is not None and result is not None:
            if result is not tensor:
                copy_values(result, tensor)
            tensor = None
        with Flattened() as flattened:
            source = None if tensor is None or tensor is result else flattened.read(tensor)
            target = None if result is None else flattened.written(result)
            if rule.name in ("all_to_all", "gather", "scatter"):
                self._exchange(
                    self._by_peer(source, one.root, has_rows=rule.in_rows),
                    self._by_peer(target, one.root, has_rows=rule.out_rows),
                )
                return
            source, target = target if source is None else source, source if target is None else target
            assert source is not None
            assert target is not None
            call(
                self._binding, rule.name, 0, source, target, one.op, one.root
            )  # NCCL reduces to the root's target only

    def _by_peer(self, flat: Tensor | None, root: int | None, *, has_rows: bool) -> dict[int, Tensor]:
        """Return the part of a tensor for each rank: a row, or the whole of it for the root."""
        if flat is None:
            return {}
        return dict(enumerate(flat.view(self._size, -1))) if has_rows else {root or 0: flat}

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        """Send and receive contiguous tensors, by peer rank; this rank's own one is copied."""
        if self._rank in sent:
            received.pop(self._rank).copy_(sent.pop(self._rank))
        with grouped(self._binding):
            for to, row in sent.items():
                self._binding.send(row.data_ptr(), row.nbytes, to, stream_of(row))
            for source, row in received.items():
                self._binding.receive(row.data_ptr(), row.nbytes, source, stream_of(row))

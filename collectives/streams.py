"""Lanes: a CUDA stream of our own on each GPU, so that moving and summing runs beside the caller's kernels.

On the host there is nothing to order, and the same calls do nothing. No device is ever synchronised whole:
a lane waits for the events of the streams that made its inputs, and its users wait for the lane's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch


class SideStreams:
    """The streams of one owner, made when a GPU is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def behind_caller(self, tensors: Iterable[torch.Tensor]) -> Ordered:
        """A section that runs on the lanes of all GPUs used so far, behind what the caller's streams hold now."""
        tensors = [tensor for tensor in tensors if tensor.is_cuda]
        for device in {tensor.device for tensor in tensors}:
            if device not in self._streams:
                self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return Ordered(self._streams, tensors)


class Ordered:
    """A ``with`` section whose GPU work runs on lanes; enter it once, in any thread."""

    def __init__(self, lanes: dict[torch.device, torch.cuda.Stream], tensors: Sequence[torch.Tensor]) -> None:
        self._lanes = lanes  # of the moment of entering: operations before this one may have come to more GPUs
        self._tensors = tensors
        devices = {tensor.device for tensor in tensors}
        self._before = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._after: dict[torch.device, torch.cuda.Event] = {}
        self._streams = ExitStack()

    def __enter__(self) -> None:
        for device, event in self._before.items():
            self._lanes[device].wait_event(event)
        for tensor in self._tensors:  # memory freed before the lane is done must not be given away
            tensor.record_stream(self._lanes[tensor.device])
        for lane in list(self._lanes.values()):
            self._streams.enter_context(torch.cuda.stream(lane))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.close()
        self._after = {device: lane.record_event() for device, lane in list(self._lanes.items())}
        self._tensors = ()

    def join(self) -> None:
        """Have the caller's current streams wait for the section's work."""
        for device, event in self._after.items():
            torch.cuda.current_stream(device).wait_event(event)

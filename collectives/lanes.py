"""Lanes: a CUDA stream of our own on each GPU, so that moving and summing runs beside the caller's kernels.

On the host there is nothing to order, and the same calls do nothing. No device is ever synchronised whole:
a lane waits for the events of the streams that made its inputs, and its users wait for the lane's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch


class Lanes:
    """The streams of one owner, made when a GPU is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def behind_caller(self, tensors: Iterable[torch.Tensor]) -> Ordered:
        """A section that runs behind what the caller's streams hold now, on the lanes of the tensors' GPUs."""
        tensors = list(tensors)
        devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Ordered([(device, self._streams[device]) for device in devices], tensors)


class Ordered:
    """A ``with`` section whose GPU work runs on lanes; enter it once, in any thread."""

    def __init__(self, lanes: list[tuple[torch.device, torch.cuda.Stream]], tensors: Sequence[torch.Tensor]) -> None:
        self._lanes = lanes
        self._tensors = tensors if lanes else ()  # kept until the caller's streams wait for what uses them
        self._before = [torch.cuda.current_stream(device).record_event() for device, _ in lanes]
        self._after: list[torch.cuda.Event] = []
        self._streams = ExitStack()

    def __enter__(self) -> None:
        for (_, lane), event in zip(self._lanes, self._before, strict=True):
            lane.wait_event(event)
            self._streams.enter_context(torch.cuda.stream(lane))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.close()
        self._after = [lane.record_event() for _, lane in self._lanes]

    def join(self) -> None:
        """Have the caller's current streams wait for the section's work."""
        for (device, _), event in zip(self._lanes, self._after, strict=True):
            torch.cuda.current_stream(device).wait_event(event)
        self._tensors = ()

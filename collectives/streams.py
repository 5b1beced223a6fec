"""Side streams: one CUDA stream per GPU and owner, on which transfers and reductions run beside the caller's kernels.

On the CPU the same calls do nothing. No device is ever synchronised as a whole: a side stream waits for the events of
the streams that produced its inputs, and the consumers wait for the side stream's events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch


class SideStreams:
    """Side streams of one owner, created when a GPU is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def behind_caller(self, tensors: Iterable[torch.Tensor]) -> Ordered:
        """Return a section on the side streams of all GPUs used so far, ordered after the caller's streams.

        Args:
            tensors: what the section uses and others may free before it is done. It may use other tensors of GPUs that
                were used before: it waits for the caller's work on all of these.
        """
        tensors = [tensor for tensor in tensors if tensor.is_cuda]
        for tensor in tensors:
            if tensor.device not in self._streams:
                self._streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]
        return Ordered(self._streams, tensors, self._lock)

    def join(self) -> None:
        """Make the caller's current streams wait for the work of all sections that were entered."""
        for device, stream in list(self._streams.items()):
            torch.cuda.current_stream(device).wait_stream(stream)


class Ordered:
    """``with`` section whose GPU work runs on side streams; enter it once, in any thread."""

    def __init__(
        self, streams: dict[torch.device, torch.cuda.Stream], tensors: Sequence[torch.Tensor], lock: threading.Lock
    ) -> None:
        self._streams = streams  # shared with the owner: another operation may add a GPU before this section is entered
        self._tensors = tensors
        self._before = {device: torch.cuda.current_stream(device).record_event() for device in list(streams)}
        self._after: dict[torch.device, torch.cuda.Event] = {}
        self._lock = lock  # the owner's, for `_after`
        self._current: ExitStack | None = None  # of the streams of `__enter__`, if any

    def __enter__(self) -> None:
        if not self._streams:
            return
        for device, event in self._before.items():
            self._streams[device].wait_event(event)
        for tensor in self._tensors:  # so that torch does not reuse freed memory before the side stream is done
            tensor.record_stream(self._streams[tensor.device])
        self._current = ExitStack()
        for stream in list(self._streams.values()):
            self._current.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *_: object) -> None:
        if self._current is not None:
            self._current.close()
        if self._streams:
            self._record()
        self._tensors = ()

    def resumed(self) -> AbstractContextManager[None]:
        """Run more work on the side streams, after the section was entered, in any thread; `join` waits for it too."""
        return self._resumed() if self._streams else nullcontext()

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        with ExitStack() as current:
            for stream in list(self._streams.values()):
                current.enter_context(torch.cuda.stream(stream))
            yield
        self._record()

    def _record(self) -> None:
        with self._lock:
            self._after = {device: stream.record_event() for device, stream in list(self._streams.items())}

    def join(self) -> None:
        """Make the caller's current streams wait for the section's work."""
        for device, event in self._after.items():
            torch.cuda.current_stream(device).wait_event(event)

"""Functions run side by side, one a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from gangline.collectives.context import Context
from gangline.models.executor.thread_barrier import Aborted

Result = TypeVar("Result")
_PARALLEL = 1 << 18  # elements: enough for torch to share an addition out


class DeviceThreads:
    """Runs calls for several contexts at once.

    CPU contexts, and a GPU that stands twice, get a long-lived thread each, with their share of torch's threads.
    Distinct GPUs need none: what is launched on them runs side by side anyway. One context runs in the caller.
    """

    def __init__(self, contexts: Sequence[Context], *, alone: bool = False) -> None:
        """Start the threads that are needed.

        Args:
            contexts: where calls will run.
            alone: give each a thread in any case: calls wait for one another within, or are timed.
        """
        gpus = [context for context in contexts if context.device_type == "gpu"]
        distinct = len(set(gpus)) == len(gpus) == len(contexts)
        self.uses_threads = len(contexts) > 1 and (alone or not distinct)
        self._contexts = list(contexts)
        self._threads: list[ThreadPoolExecutor] = []
        if self.uses_threads:
            self._start_threads()

    def _start_threads(self) -> None:
        # torch's count for later threads changes too, so it is given back when all have begun.
        callers = torch.get_num_threads()
        share = max(1, callers // len(self._contexts))
        for context in self._contexts:
            thread = ThreadPoolExecutor(1, f"gangline-{context}", _use_threads, (share,))
            thread.submit(lambda: None).result()
            self._threads.append(thread)
        torch.set_num_threads(callers)

    def run(
        self, calls: Sequence[tuple[int, Callable[[], Result]]], *, one_after_another: bool = False
    ) -> list[Result]:
        """Run each (context number, function) and return the results, in order, when all are over.

        Args:
            calls: at most one a context.
            one_after_another: the next begins when the last is over; each still runs in its own thread.

        Raises:
            Exception: the first that a call raised, with a note that names its context.
        """
        tasks = [
            (number, partial(self._named, number, function, self._callers_state(self._contexts[number])))
            for number, function in calls
        ]
        if not self.uses_threads:
            return [task() for _, task in tasks]
        if one_after_another:
            return [self._threads[number].submit(task).result() for number, task in tasks]
        futures = [self._threads[number].submit(task) for number, task in tasks]
        errors = [error for future in futures if (error := future.exception()) is not None]  # waits for all of them
        try:
            if errors:
                raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
            return [future.result() for future in futures]
        finally:  # an error holds this frame: the frame must not hold the error, or what both hold stays for long
            errors.clear()
            futures.clear()

    def _named(self, number: int, function: Callable[[], Result], state: list[AbstractContextManager[Any]]) -> Result:
        try:
            with ExitStack() as stack:
                for part in state:
                    stack.enter_context(part)
                return function()
        except Exception as error:
            if len(self._contexts) > 1:
                error.add_note(f"in the replica on {self._contexts[number]}")
            raise

    def _callers_state(self, context: Context) -> list[AbstractContextManager[Any]]:
        """What belongs to a thread and must hold in the replica's too: autocast, and the streams of GPUs."""
        state: list[AbstractContextManager[Any]] = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        gpus = {each.torch_device for each in self._contexts if each.device_type == "gpu"}
        ordered = sorted(gpus, key=lambda each: each == context.torch_device)  # the last becomes the current one
        state += [torch.cuda.stream(torch.cuda.current_stream(device)) for device in ordered]
        return state

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()


def _use_threads(count: int) -> None:
    """Have this thread's operations use so many of torch's threads, for good.

    A thread takes torch's latest count when its first parallel operation runs, even after a count was set in it; asking
    for the count settles that now, before anybody sets another (backward was 1.5 times slower without).

    A thread that works alone opens a team of two once all the same. OpenMP's idle threads, such as the caller's after
    an update, spin for milliseconds unless OpenMP knows of more threads than cores; then they sleep at once. (Two
    replicas' forward on two cores took 14 ms, not 8, while one of them shared its core with such a thread.)
    """
    if count == 1:
        torch.set_num_threads(2)
        torch.zeros(_PARALLEL).add_(1)
    torch.set_num_threads(count)
    torch.get_num_threads()

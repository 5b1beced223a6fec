"""Threads that run one function per context in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

from gangline.kvstore.context import Context
from gangline.models.batchnorm.sync_batchnorm import Aborted

Result = TypeVar("Result")
_PARALLEL = 1 << 18  # elements: enough for torch to parallelize an addition


class DeviceThreads:
    """Runs calls for several contexts in parallel.

    CPU contexts, and GPUs listed twice, get one long-lived thread each, with an equal part of torch's intra-op threads.
    Distinct GPUs need no threads, because kernel launches are asynchronous. A single context runs in the caller.
    """

    def __init__(self, contexts: Sequence[Context], *, always: bool = False) -> None:
        """Start the threads; ``always``: also for distinct GPUs, because calls wait for each other or are timed."""
        gpus = [context for context in contexts if context.device_type == "gpu"]
        distinct = len(set(gpus)) == len(gpus) == len(contexts)
        self.uses_threads = len(contexts) > 1 and (always or not distinct)
        self._contexts, self._gpus = list(contexts), {context.torch_device for context in gpus}
        self._threads: list[ThreadPoolExecutor] = []
        if self.uses_threads:
            # torch.set_num_threads in a thread also changes the count for threads started later, so it is restored.
            callers = torch.get_num_threads()
            share = max(1, callers // len(self._contexts))
            for context in self._contexts:
                thread = ThreadPoolExecutor(1, f"gangline-{context}", _prepare_thread, (context, share))
                thread.submit(lambda: None).result()
                self._threads.append(thread)
            torch.set_num_threads(callers)

    def run(self, calls: Sequence[tuple[int, Callable[[], Result]]]) -> list[Result]:
        """Run each (context index, function); return the results in order when all have finished."""
        cached = torch.is_autocast_cache_enabled()
        autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=cached)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        streams = {gpu: torch.cuda.current_stream(gpu) for gpu in self._gpus} if self._gpus else {}
        if not self.uses_threads:
            return [self._run_with_note(index, function, autocast, streams) for index, function in calls]
        futures: list[Future[Result]] = []
        errors: list[BaseException] = []
        try:
            for index, function in calls:
                futures.append(self._threads[index].submit(self._run_with_note, index, function, autocast, streams))
            errors += [error for future in futures if (error := future.exception()) is not None]
            if errors:
                raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
            return [future.result() for future in futures]
        except BaseException:  # KeyboardInterrupt too: late gradients would be added to those of the next batch
            wait([thread.submit(int) for thread in self._threads])
            raise
        finally:  # breaks the reference cycle between this frame and the exceptions
            errors.clear()
            futures.clear()

    def _run_with_note(
        self,
        index: int,
        function: Callable[[], Result],
        autocast: Sequence[Callable[[], torch.autocast]],
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> Result:
        """Run a function with the caller's thread-local state: autocast and CUDA streams."""
        try:
            if not (autocast or streams):
                return function()
            with ExitStack() as stack:
                for enter in autocast:
                    stack.enter_context(enter())
                device = self._contexts[index].torch_device
                for gpu in sorted(streams, key=device.__eq__):  # the last becomes the current one
                    stack.enter_context(torch.cuda.stream(streams[gpu]))
                return function()
        except Exception as error:
            if len(self._contexts) > 1:
                error.add_note(f"in the replica on {self._contexts[index]}")
            raise

    def close(self) -> None:
        """Stop the threads."""
        for thread in self._threads:
            thread.shutdown()


def _prepare_thread(context: Context, count: int) -> None:
    if context.device_type == "gpu":  # a new thread is on GPU 0, without a CUDA context
        torch.cuda.set_device(context.torch_device)
    _set_num_threads(count)


def _set_num_threads(count: int) -> None:
    """Limit this thread's intra-op parallelism to ``count`` threads.

    A thread adopts torch's global count at its first parallel operation, even after calling torch.set_num_threads.
    torch.get_num_threads triggers this now, before another thread changes the global count. (Without it, backward was
    1.5 times slower.)

    With a count of 1 the thread first opens a team of two. Idle OpenMP threads, such as the caller's after an update,
    spin for milliseconds unless OpenMP counts more threads than cores; then they sleep at once. (The forward of two
    replicas on two cores took 14 ms instead of 8 while one of them shared its core with a spinning thread.)
    """
    if count == 1:
        torch.set_num_threads(2)
        torch.zeros(_PARALLEL, device="cpu").add_(1)
    torch.set_num_threads(count)
    torch.get_num_threads()

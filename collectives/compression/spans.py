"""Elementwise work over a long tensor, in pieces that stay in a core's cache, by several threads.

torch's own threads meet at a barrier after every operation. Where other work wants the cores too (several ranks on a
host, a backward pass beside the sending) each barrier may cost a turn of the scheduler: ten steps over chunks of 2 MiB
took 2 s for 64 MiB instead of 0.07. Threads that each run through a span, and in which torch works alone, meet once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gangline.collectives.thread_pool import run

_PIECE = 2**17
_CUDA_PIECE = 2**24  # there an operation costs its launch, and scratch is all that pieces spare
_SMALLEST_SPAN = 2**19


def in_spans(work: Callable[[int, int], None], numel: int, device: torch.device) -> None:
    """Have ``work(start, stop)`` done for spans that make up 0 to ``numel``, on as many threads as torch uses.

    Spans begin at multiples of `piece_numel`. On a GPU, and for less than a million values, there is one, on the
    caller's thread. What a span raises, the caller gets once all have ended.
    """
    threads = 1 if device.type != "cpu" else max(1, min(torch.get_num_threads(), numel // _SMALLEST_SPAN))
    if threads == 1:
        work(0, numel)
        return
    pieces = -(-numel // _PIECE)
    borders = [min(numel, pieces * i // threads * _PIECE) for i in range(threads)] + [numel]
    inference = torch.is_inference_mode_enabled()  # this, and whether gradients are recorded, is a thread's own

    def guarded(start: int, stop: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(start, stop)

    run([partial(guarded, borders[i], borders[i + 1]) for i in range(threads)])


def piece_numel(numel: int, device: torch.device) -> int:
    """How many values go through all of a codec's steps at a time: a multiple of 16, but for a shorter tensor."""
    return min(numel, _PIECE if device.type == "cpu" else _CUDA_PIECE)


def pieces(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """The slices of a span, each of `piece_numel` values but the last."""
    step = piece_numel(stop - start, device)
    return (slice(i, min(i + step, stop)) for i in range(start, stop, step)) if step else iter(())

"""Clock offsets: the difference between this host's clock and that of rank 0 or of the scheduler.

Method: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989. A clock value that another
process reads between two of our readings belongs to their mean, within half of the time between them.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from gangline.collectives.timeline.recorder import Timeline

_SAMPLES = 16
_TIME = struct.Struct("<q")


class ClockOffset:
    """Offset of a timeline's clock, from the most precise of the latest samples."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)  # (error, offset)

    def add(self, before: int, theirs: int, after: int) -> None:
        """Add a sample: the other process read ``theirs`` between our ``before`` and ``after``, all in ns."""
        self._samples.append(((after - before + 1) // 2, theirs - (before + after) // 2))
        error, offset = min(self._samples)
        self._timeline.set_offset(offset, error)


def measure_offsets(rank: int, exchange: Callable[[bytes], Sequence[bytes]], timeline: Timeline | None) -> None:
    """Measure the offset to rank 0's clock. Collective.

    A rank knows that rank 0 read its clock after the rank's first exchange began, as that needs all ranks, and before
    its second exchange ended.
    """
    clock = ClockOffset(timeline) if timeline is not None and rank else None
    before = time.monotonic_ns()
    exchange(b"")
    for _ in range(_SAMPLES):
        following = time.monotonic_ns()
        theirs = _TIME.unpack(exchange(_TIME.pack(time.monotonic_ns()))[0])[0]
        if clock is not None:
            clock.add(before, theirs, time.monotonic_ns())
        before = following

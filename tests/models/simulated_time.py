"""Time that passes only where `bench.unequal.waiting_network` waits, so that measured speeds are exact."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gangline.bench.unequal import waiting_network
from gangline.models import elapsed_time


class _Clock(threading.local):
    """A clock of each thread; it has the functions of module `time` that are used there."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


@contextmanager
def simulated_time() -> Iterator[None]:
    """Simulate the time of networks, and measure it by the executors of this process."""
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (waiting_network, elapsed_time):
            patch.setattr(module, "time", clock)
        yield

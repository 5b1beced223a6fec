"""The private names of torch that the backend needs, in one place: those of torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    FakeProcessGroup,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "refusing_backend",
]


def refusing_backend(rank: int, size: int) -> Any:
    """Return a C++ backend that raises on every collective.

    torch requires a backend to be registered for the CPU, to which it sends every call that a Python group lacks.
    """
    fake: Any = FakeProcessGroup  # torch's stub declares none of its options
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(rank, size, options)

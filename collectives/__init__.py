"""Moving and summing tensors between devices and processes; it imports nothing else of gangline's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.communicator import Communicator
    from collectives.context import Context, contexts, cpu, gpu, num_gpus
    from collectives.device_group import DeviceGroup
    from collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
    from collectives.opening import connect, in_process
    from collectives.spawning import spawn
    from collectives.work import Work
    from collectives.workload import split_batch

_HOMES = {
    "communicator": ("Communicator",),
    "context": ("Context", "contexts", "cpu", "gpu", "num_gpus"),
    "device_group": ("DeviceGroup",),
    "errors": ("DeadNodeError", "GanglineError", "MismatchError", "ProtocolError", "StallError"),
    "opening": ("connect", "in_process"),
    "spawning": ("spawn",),
    "work": ("Work",),
    "workload": ("split_batch",),
}

__all__ = [
    "Communicator",
    "Context",
    "DeadNodeError",
    "DeviceGroup",
    "GanglineError",
    "MismatchError",
    "ProtocolError",
    "StallError",
    "Work",
    "connect",
    "contexts",
    "cpu",
    "gpu",
    "in_process",
    "num_gpus",
    "spawn",
    "split_batch",
]


def __getattr__(name: str) -> Any:  # lazy, because importing torch costs seconds
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"collectives.{module}"), name)
    raise AttributeError(f"module 'collectives' has no attribute {name!r}")

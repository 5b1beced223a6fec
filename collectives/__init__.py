"""Collectives: move and reduce tensors between devices and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.collectives.communicator import Communicator, connect, in_process
    from gangline.collectives.context import Context, contexts, cpu, gpu, num_gpus
    from gangline.collectives.devices.device_group import DeviceGroup
    from gangline.collectives.errors import (
        DeadNodeError,
        DiskFullError,
        GanglineError,
        MismatchError,
        ProtocolError,
        StallError,
    )
    from gangline.collectives.processes.spawning import spawn
    from gangline.collectives.work import Work
    from gangline.collectives.workload import split_batch

_HOMES = {
    "communicator": ("Communicator", "connect", "in_process"),
    "context": ("Context", "contexts", "cpu", "gpu", "num_gpus"),
    "devices.device_group": ("DeviceGroup",),
    "errors": ("DeadNodeError", "DiskFullError", "GanglineError", "MismatchError", "ProtocolError", "StallError"),
    "processes.spawning": ("spawn",),
    "work": ("Work",),
    "workload": ("split_batch",),
}

__all__ = [
    "Communicator",
    "Context",
    "DeadNodeError",
    "DeviceGroup",
    "DiskFullError",
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
            return getattr(import_module(f"gangline.collectives.{module}"), name)
    raise AttributeError(f"module 'gangline.collectives' has no attribute {name!r}")

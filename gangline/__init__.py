"""Train one PyTorch network on unequal devices and get the weights that one device would give.

Every public name is importable from here; each is loaded when it is first used, because importing torch takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.collectives import (
        Communicator,
        Context,
        DeadNodeError,
        DeviceGroup,
        GanglineError,
        MismatchError,
        ProtocolError,
        StallError,
        Work,
        connect,
        contexts,
        cpu,
        gpu,
        in_process,
        num_gpus,
        spawn,
        split_batch,
    )
    from gangline.kvstore import KVStore, OptimizerSpec, RowSparse, Trainer, create, register
    from gangline.models import (
        Augmentation,
        Checkpoint,
        EarlyStopping,
        ImageFolder,
        Module,
        Monitor,
        ProgressBar,
        Speedometer,
        TensorBoard,
        TrainingProgress,
        do_checkpoint,
        module_checkpoint,
        split_each_label,
        stop_on,
    )

_PACKAGES = {
    "collectives": (
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
    ),
    "kvstore": ("KVStore", "OptimizerSpec", "RowSparse", "Trainer", "create", "register"),
    "models": (
        "Augmentation",
        "Checkpoint",
        "EarlyStopping",
        "ImageFolder",
        "Module",
        "Monitor",
        "ProgressBar",
        "Speedometer",
        "TensorBoard",
        "TrainingProgress",
        "do_checkpoint",
        "module_checkpoint",
        "split_each_label",
        "stop_on",
    ),
}

__all__ = [
    "Augmentation",
    "Checkpoint",
    "Communicator",
    "Context",
    "DeadNodeError",
    "DeviceGroup",
    "EarlyStopping",
    "GanglineError",
    "ImageFolder",
    "KVStore",
    "MismatchError",
    "Module",
    "Monitor",
    "OptimizerSpec",
    "ProgressBar",
    "ProtocolError",
    "RowSparse",
    "Speedometer",
    "StallError",
    "TensorBoard",
    "Trainer",
    "TrainingProgress",
    "Work",
    "connect",
    "contexts",
    "cpu",
    "create",
    "do_checkpoint",
    "gpu",
    "in_process",
    "module_checkpoint",
    "num_gpus",
    "register",
    "spawn",
    "split_batch",
    "split_each_label",
    "stop_on",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gangline")
    for package, names in _PACKAGES.items():
        if name in names:
            return getattr(import_module(f"gangline.{package}"), name)
    raise AttributeError(f"module 'gangline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

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
        DiskFullError,
        GanglineError,
        MismatchError,
        ProtocolError,
        StallError,
        Work,
        algorithms,
        connect,
        contexts,
        cpu,
        environments,
        gpu,
        in_process,
        num_gpus,
        spawn,
        split_batch,
        torch_backend,
    )
    from gangline.collectives.torch_backend import Samples, compress_hook, weighted_hook
    from gangline.kvstore import DistributedOptimizer, KVStore, OptimizerSpec, RowSparse, Trainer, create, register
    from gangline.kvstore.launch.functions import launch
    from gangline.models import (
        Augmentation,
        BalancedLoader,
        Checkpoint,
        EarlyStopping,
        ElasticBatches,
        ImageFolder,
        Module,
        Monitor,
        ProgressBar,
        Speedometer,
        TensorBoard,
        TorchScheduler,
        TrainingProgress,
        balance,
        convert_sync_batchnorm,
        create_metric,
        create_network,
        digits,
        do_checkpoint,
        freeze_until,
        image_folder,
        learning_rate_factors,
        load_weights,
        module_checkpoint,
        pretrained,
        raw_digits,
        read_progress,
        read_speed,
        replace_last_layer,
        scale_batch,
        split_each_label,
        stop_on,
        synthetic,
    )

_PACKAGES = {
    "collectives": (
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
    ),
    "collectives.torch_backend": (
        "Samples",
        "compress_hook",
        "weighted_hook",
    ),
    "kvstore": (
        "DistributedOptimizer",
        "KVStore",
        "OptimizerSpec",
        "RowSparse",
        "Trainer",
        "create",
        "register",
    ),
    "kvstore.launch.functions": ("launch",),
    "models": (
        "Augmentation",
        "BalancedLoader",
        "Checkpoint",
        "EarlyStopping",
        "ElasticBatches",
        "ImageFolder",
        "Module",
        "Monitor",
        "ProgressBar",
        "Speedometer",
        "TensorBoard",
        "TorchScheduler",
        "TrainingProgress",
        "balance",
        "convert_sync_batchnorm",
        "create_metric",
        "create_network",
        "digits",
        "do_checkpoint",
        "freeze_until",
        "image_folder",
        "learning_rate_factors",
        "load_weights",
        "module_checkpoint",
        "pretrained",
        "raw_digits",
        "read_progress",
        "read_speed",
        "replace_last_layer",
        "scale_batch",
        "split_each_label",
        "stop_on",
        "synthetic",
    ),
}
_MODULES = {name: f"gangline.collectives.{name}" for name in ("algorithms", "environments", "torch_backend")}

__all__ = [
    "Augmentation",
    "BalancedLoader",
    "Checkpoint",
    "Communicator",
    "Context",
    "DeadNodeError",
    "DeviceGroup",
    "DiskFullError",
    "DistributedOptimizer",
    "EarlyStopping",
    "ElasticBatches",
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
    "Samples",
    "Speedometer",
    "StallError",
    "TensorBoard",
    "TorchScheduler",
    "Trainer",
    "TrainingProgress",
    "Work",
    "algorithms",
    "balance",
    "compress_hook",
    "connect",
    "contexts",
    "convert_sync_batchnorm",
    "cpu",
    "create",
    "create_metric",
    "create_network",
    "digits",
    "do_checkpoint",
    "environments",
    "freeze_until",
    "gpu",
    "image_folder",
    "in_process",
    "launch",
    "learning_rate_factors",
    "load_weights",
    "module_checkpoint",
    "num_gpus",
    "pretrained",
    "raw_digits",
    "read_progress",
    "read_speed",
    "register",
    "replace_last_layer",
    "scale_batch",
    "spawn",
    "split_batch",
    "split_each_label",
    "stop_on",
    "synthetic",
    "torch_backend",
    "weighted_hook",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gangline")
    if name in _MODULES:
        return import_module(_MODULES[name])
    for package, names in _PACKAGES.items():
        if name in names:
            return getattr(import_module(f"gangline.{package}"), name)
    raise AttributeError(f"module 'gangline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

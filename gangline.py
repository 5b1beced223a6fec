"""gangline's front door: the public names, imported when they are first used, and the `gangline` command."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives import (
        Communicator,
        Context,
        DeadNodeError,
        GanglineError,
        MismatchError,
        ProtocolError,
        StallError,
        Work,
        contexts,
        cpu,
        gpu,
        num_gpus,
        split_batch,
    )
    from kvstore import KVStore, Trainer
    from models import (
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
        module_checkpoint,
        split_each_label,
        stop_on,
    )

_HOMES = {
    "collectives": (
        "Communicator",
        "Context",
        "DeadNodeError",
        "GanglineError",
        "MismatchError",
        "ProtocolError",
        "StallError",
        "Work",
        "contexts",
        "cpu",
        "gpu",
        "num_gpus",
        "split_batch",
    ),
    "kvstore": ("KVStore", "Trainer"),
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
    "EarlyStopping",
    "GanglineError",
    "ImageFolder",
    "KVStore",
    "MismatchError",
    "Module",
    "Monitor",
    "ProgressBar",
    "ProtocolError",
    "Speedometer",
    "StallError",
    "TensorBoard",
    "Trainer",
    "TrainingProgress",
    "Work",
    "contexts",
    "cpu",
    "gpu",
    "module_checkpoint",
    "num_gpus",
    "split_batch",
    "split_each_label",
    "stop_on",
]


def _check_packages_are_ours() -> None:
    """Say so plainly when a package of the user's own hides one of gangline's."""
    here = Path(__file__).resolve().parent
    for name in ("bench", *_HOMES):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        expected = here / name / "__init__.py"
        if found != expected:
            raise ImportError(
                f"the package {name!r} at {found} hides gangline's at {expected}; "
                "rename yours, or run from a folder that does not hold it"
            )


_check_packages_are_ours()


def __getattr__(name: str) -> Any:
    for package, public in _HOMES.items():
        if name in public:
            return getattr(import_module(package), name)
    raise AttributeError(f"module 'gangline' has no attribute {name!r}")


def main() -> None:
    """Run the `gangline` command: exit code 0 if all went well, 1 with one line on an error, 2 on wrong usage."""
    import typer

    from bench.command import bench
    from collectives.devices import devices
    from kvstore.launch.command import launch
    from models.predict import predict, score
    from models.train import train

    app = typer.Typer(
        help="Data-parallel training for PyTorch on unequal devices.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (train, score, predict, devices):
        app.command()(command)
    app.command(context_settings={"allow_interspersed_args": False})(launch)  # from CMD on all options are its own
    app.add_typer(bench, name="bench")
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"gangline: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()

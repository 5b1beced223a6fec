"""`gangline train`: train a network on digits, image folders or your own data."""

from __future__ import annotations

import typer

from gangline.cli.logs import logging_to_stderr
from gangline.cli.training.options import TrainOptions


def train(options: TrainOptions) -> None:
    """Train a network. The last line of stdout is Validation-accuracy=<float>."""
    from gangline.cli.training.run import run

    with logging_to_stderr():
        result = run(options)
    if result is None:
        return
    if "validation_accuracy" in result:
        print(f"Validation-accuracy={result['validation_accuracy']:.6g}")
    if result["exit_code"]:
        raise typer.Exit(result["exit_code"])

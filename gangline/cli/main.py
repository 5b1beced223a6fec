"""Run the `gangline` command: exit code 0 if all went well, 1 with one line on an error, 2 on wrong usage."""

from __future__ import annotations

import sys

import typer

from gangline.cli.bench import bench
from gangline.cli.devices import devices
from gangline.cli.launch import launch
from gangline.cli.predict import predict, score
from gangline.cli.train import train


def main() -> None:
    """Run the subcommand that the arguments name."""
    app = typer.Typer(
        help="Data-parallel training for PyTorch on unequal devices.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (train, score, predict, devices):
        app.command()(command)
    app.command(context_settings={"allow_interspersed_args": False})(launch)  # options after CMD belong to CMD
    app.add_typer(bench, name="bench")
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"gangline: {error}", file=sys.stderr)
        raise SystemExit(1) from error

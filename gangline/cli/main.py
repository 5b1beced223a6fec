"""The `gangline` command. Subcommands import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli import logs
from gangline.cli.advise import advise
from gangline.cli.bench import bench
from gangline.cli.check import check
from gangline.cli.env import env
from gangline.cli.join import join
from gangline.cli.key import key
from gangline.cli.launch import LaunchOptions, launch, resize
from gangline.cli.options import command
from gangline.cli.plan import plan
from gangline.cli.run import run
from gangline.cli.status import status
from gangline.cli.training.mxnet_flags import TrainCommand
from gangline.cli.training.options import TrainOptions
from gangline.cli.training.predict import PredictOptions, predict
from gangline.cli.training.train import train
from gangline.usage_error import UsageError

app = typer.Typer(
    help="Train one PyTorch network on unequal devices and get the weights that one device would give.",
    epilog="Exit codes: 0 done, 1 error, 2 wrong usage, 3 training diverged, 75 stopped by a signal with a checkpoint "
    "written, 128+N killed by signal N.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"gangline {version('gangline')}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log more, and show all tracebacks.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Log warnings and errors only.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    del version
    logs.set_level(verbose, quiet)


app.command(cls=TrainCommand)(command(train, TrainOptions))
app.command()(command(predict, PredictOptions))
app.command(context_settings={"allow_interspersed_args": False})(advise)
app.command(context_settings={"allow_interspersed_args": False})(
    command(launch, LaunchOptions)
)  # options after CMD belong to CMD
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(context_settings={"allow_interspersed_args": False})(join)
for subcommand in (check, env, plan, status, resize):
    app.command()(subcommand)
app.add_typer(bench, name="bench")
app.add_typer(key, name="key")


def main() -> None:
    """Run the subcommand that the arguments name.

    On an error the exit code is 1, after one line on stderr; a traceback precedes it with -v, or if the error passed
    through the user's code. On wrong usage the exit code is 2.
    """
    handler = signal.getsignal(signal.SIGTERM)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed; `open` takes the lowest descriptor, so that no other file gets it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("GANGLINE_LOG") == "debug" or _is_of_user_code(error):
            traceback.print_exception(error)
        print(f"gangline: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
    finally:
        if handler is not None and signal.getsignal(signal.SIGTERM) != handler:  # see logs.reported_first
            signal.signal(signal.SIGTERM, handler)


def _is_of_user_code(error: BaseException) -> bool:
    """Return True if the error, or one that caused it, passed through a file that is not of an installed package."""
    import gangline

    packages = ("gangline", "collectives", "kvstore", "models", "bench")
    installed = [Path(gangline.__file__).resolve().parent.parent / name for name in packages]
    installed += [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    link: BaseException | None = error
    while link is not None:
        for frame in traceback.extract_tb(link.__traceback__):
            file = Path(frame.filename)
            if file.exists() and not any(file.resolve().is_relative_to(folder) for folder in installed):
                return True
        link = link.__cause__
    return False

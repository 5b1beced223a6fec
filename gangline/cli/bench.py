"""`gangline bench`: the benches as subcommands, each imported when it runs or is listed."""

from __future__ import annotations

import sys
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import gangline
from gangline.bench.workload.collective_shapes import COLLECTIVES
from gangline.cli.options import command

_ROOT = Path(gangline.__file__).resolve().parents[1]
_FILES = {
    "kvstore": "gangline.bench.kvstore",
    "ps": "gangline.bench.parameter_server",
    "training": "gangline.bench.training",
    "balance": "gangline.bench.unequal.contexts",
    "unequal-ranks": "gangline.bench.unequal.ranks",
    "unequal-samples": "gangline.bench.unequal.samples",
    "local-steps": "gangline.bench.local_steps",
    "compression": "gangline.bench.compression",
    "device-group": "gangline.bench.device_group",
    "tune": "gangline.bench.algorithms.tuning",
    "simulate": "gangline.bench.algorithms.simulate",
    **dict.fromkeys(COLLECTIVES, "gangline.bench.collectives"),
    "compare": "gangline.bench.report.compare",
    "connect": "gangline.bench.calls",
    "backend": "gangline.bench.calls",
}
if (_ROOT / "tests" / "bench").is_dir():  # a checkout: the package has no tests
    _FILES |= {"faults": "tests.bench.faults.table", "unequal-hosts": "tests.clusters.unequal_hosts"}


class _Benches(TyperGroup):
    """Group that imports the file of a command when it runs or is listed."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # noqa: ARG002  typer's own click
        return list(_FILES)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name in _FILES and cmd_name not in self.commands:
            self.commands[cmd_name] = _command(cmd_name)
        return super().get_command(ctx, cmd_name)


def _command(name: str) -> Any:
    if _FILES[name].startswith("tests."):
        sys.path.insert(0, str(_ROOT))
    file = import_module(_FILES[name])
    app, short = typer.Typer(add_completion=False), None
    if name in COLLECTIVES:
        run = command(wraps(file.collective)(partial(file.collective, name)), file.Sweep)
        short = f"Measure {name} over a range of sizes, beside gloo and MPI."
    elif name == "ps":
        run = command(file.ps, file.Case)
    else:
        run = getattr(file, name.replace("-", "_"))
    app.command(name, short_help=short)(run)
    return typer.main.get_command(app)


bench = typer.Typer(
    cls=_Benches, help="Measure gangline beside the programs that users would otherwise run.", no_args_is_help=True
)


@bench.callback()
def _no_options() -> None:
    """Make typer build a group although its commands are added later."""

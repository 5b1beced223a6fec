"""`gangline bench`: the benches as subcommands, imported when one of them runs or is listed."""

from __future__ import annotations

import sys
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import gangline
from gangline.cli.options import command

_ROOT = Path(gangline.__file__).resolve().parents[1]


class _Benches(TyperGroup):
    """Group whose commands are imported on first use, so that `gangline --help` answers without them."""

    def _load(self) -> None:
        if self.commands:
            return
        from gangline.bench.algorithms.simulate import simulate
        from gangline.bench.calls import backend, connect
        from gangline.bench.collectives import Sweep, collective
        from gangline.bench.compression import compression
        from gangline.bench.device_group import device_group
        from gangline.bench.kvstore import kvstore
        from gangline.bench.parameter_server import Case, ps
        from gangline.bench.report.compare import compare
        from gangline.bench.training import training
        from gangline.bench.tune import tune
        from gangline.bench.unequal.contexts import balance
        from gangline.bench.unequal.ranks import unequal_ranks
        from gangline.bench.workload.collective_shapes import COLLECTIVES

        benches = typer.Typer()
        for bench_command in (
            kvstore,
            command(ps, Case),
            training,
            balance,
            unequal_ranks,
            compression,
            device_group,
            tune,
            simulate,
        ):
            benches.command()(bench_command)  # typer spells names with dashes
        for name in COLLECTIVES:  # with an underscore, as in JSON and for peers
            of_name = wraps(collective)(partial(collective, name))
            short = f"Measure {name} over a range of sizes, beside gloo and MPI."
            benches.command(name, short_help=short)(command(of_name, Sweep))
        benches.command()(compare)
        benches.command()(connect)
        benches.command()(backend)
        if (_ROOT / "tests" / "bench").is_dir():  # a checkout: the package has no tests
            sys.path.insert(0, str(_ROOT))
            benches.command()(import_module("tests.bench.faults.table").faults)
            benches.command()(import_module("tests.clusters.unequal_hosts").unequal_hosts)
        self.commands.update(typer.main.get_group(benches).commands)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer has its own click
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        self._load()
        return super().get_command(ctx, cmd_name)


bench = typer.Typer(
    cls=_Benches, help="Measure gangline beside the programs that users would otherwise run.", no_args_is_help=True
)


@bench.callback()
def _no_options() -> None:
    """Make typer build a group although its commands are added later."""

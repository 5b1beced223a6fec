"""`gangline bench`: the benches as subcommands. Each imports what it needs when it runs."""

from __future__ import annotations

import typer

from gangline.bench.collectives import COLLECTIVES, collective
from gangline.bench.compare import compare
from gangline.bench.device_group import device_group
from gangline.bench.kvstore import kvstore
from gangline.bench.ps import ps
from gangline.bench.simulate import simulate
from gangline.bench.training import training
from gangline.bench.tune import tune

bench = typer.Typer(help="Measure gangline, side by side with what a user would otherwise run.", no_args_is_help=True)
for command in (kvstore, ps, training, tune, simulate, compare):
    bench.command()(command)
bench.command("device_group")(device_group)
for name in COLLECTIVES:
    bench.command(name)(collective)

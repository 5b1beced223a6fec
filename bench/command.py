"""`gangline bench`: the benches as sub-commands. What they need is imported when one of them runs."""

from __future__ import annotations

import typer

from bench.collectives import COLLECTIVES, collective
from bench.compare import compare
from bench.device_group import device_group
from bench.kvstore import kvstore
from bench.ps import ps
from bench.simulate import simulate
from bench.training import training
from bench.tune import tune

bench = typer.Typer(help="Measure gangline, side by side with what a user would otherwise run.", no_args_is_help=True)
for command in (kvstore, ps, training, tune, simulate, compare):
    bench.command()(command)
bench.command("device_group")(device_group)
for name in COLLECTIVES:
    bench.command(name)(collective)

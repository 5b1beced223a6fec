"""`gangline bench`: the benches as subcommands. Each imports what it needs when it runs."""

from __future__ import annotations

import typer

from gangline.bench.algorithms.simulate import simulate
from gangline.bench.algorithms.tune import tune
from gangline.bench.balance import balance
from gangline.bench.collectives import collective
from gangline.bench.compression import compression
from gangline.bench.device_group import device_group
from gangline.bench.driver.hosts import hosts
from gangline.bench.kvstore import kvstore
from gangline.bench.parameter_server import ps
from gangline.bench.report.compare import compare
from gangline.bench.simplicity import simplicity
from gangline.bench.startup import startup
from gangline.bench.training import training
from gangline.bench.transfer import transfer
from gangline.bench.workload.collective_shapes import COLLECTIVES

bench = typer.Typer(help="Measure gangline beside the programs that users would otherwise run.", no_args_is_help=True)
for command in (kvstore, ps, training, transfer, balance, compression, device_group, tune, simulate):
    bench.command()(command)  # typer spells names with dashes
for name in COLLECTIVES:  # with an underscore, as in JSON and for peers
    bench.command(name, short_help=f"Measure {name} over a range of sizes, beside gloo and MPI.")(collective)
bench.command()(compare)
bench.command()(startup)
bench.command()(simplicity)
bench.command(context_settings={"allow_interspersed_args": False})(hosts)  # options after COMMAND belong to it

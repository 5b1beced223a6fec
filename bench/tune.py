"""`gangline bench tune`: measure every algorithm at every size and write the table from which Communicators choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.bench.driver.harness import say
from gangline.bench.report.output import check_outputs, write_json
from gangline.bench.report.rows import Row, spread
from gangline.bench.report.tables import format_size
from gangline.bench.workload.options import Json
from gangline.bench.workload.sizes import counts

if TYPE_CHECKING:
    from gangline.bench.algorithms.tuning import Tuned
    from gangline.collectives.tuner import Rule, TableKey


def tune(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    transports: Annotated[str, typer.Option(help="Transports, with commas.")] = "shared_memory,ipc,tcp",
    output: Annotated[
        Path | None, typer.Option(help="File to write the table to; default: where gangline looks for it.")
    ] = None,
    json: Json = None,
) -> None:
    """Find the fastest algorithm of each collective for each size on this machine.

    The table keeps its entries for transports and numbers of ranks that are not measured now. An algorithm that fails
    or returns a wrong result is reported and never chosen.
    """
    from gangline.bench.algorithms.tuning import SIZES, measure
    from gangline.collectives.tuner import TUNED, Table, table_path

    check_outputs(json)
    path = output or table_path()
    rules = dict(Table.load(path).rules) if path.exists() else {}
    rows: list[Row] = []
    for transport in (word.strip() for word in transports.split(",")):
        for number in counts(ranks, "--ranks"):
            print(f"# {number} ranks over {transport}")
            found = measure(transport, number, TUNED, SIZES)
            rules |= found.rules
            rows += _rows(found)
            for line in found.refused:
                say(f"refused: {line}")
            for key, of_key in found.rules.items():
                print(_line(key, of_key), flush=True)
    Table(rules).dump(path)
    print(f"# written to {path}")
    if json is not None:
        write_json(rows, json)


def _rows(found: Tuned) -> Iterator[Row]:
    for key, times in found.times.items():
        for size, of_size in times.items():
            for choice, seconds in of_size.items():
                figures = spread([1e6 * each for each in seconds])
                description = {**key._asdict(), "size": size, "dtype": "float32", "algorithm": str(choice)}
                yield {"who": "gangline", **description, "time_us": figures["p50"], **figures}


def _line(key: TableKey, rules: Sequence[Rule]) -> str:
    """Return the choices of a collective as text."""
    words = [f"{choice}" + ("" if nbytes is None else f" up to {format_size(nbytes)}") for nbytes, choice in rules]
    return f"{key.collective:>16}  {', then '.join(words)}"

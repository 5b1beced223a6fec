"""`gangline bench all_reduce`, `all_gather` and so on: the collectives in nccl-tests' terms, beside gloo and MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gangline.bench.report import Row, check_outputs
from gangline.bench.workload import command_line, print_ratios

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv")
"""The sub-commands of `gangline bench`; sendrecv is a ring: each rank sends to the next and receives from the last."""


def collective(
    context: typer.Context,
    smallest: Annotated[str, typer.Option("-b", help="The smallest size in bytes, such as 8 or 64K.")] = "8",
    largest: Annotated[str, typer.Option("-e", help="The largest size.")] = "256M",
    factor: Annotated[int, typer.Option("-f", help="From one size to the next.", min=2)] = 2,
    steps: Annotated[int | None, typer.Option("-n", help="Steps of a run; by default about 0.2 s.", min=1)] = None,
    before: Annotated[int | None, typer.Option("-w", help="Unmeasured steps before them; by default a fifth.")] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2",
    transport: Annotated[str, typer.Option(help="gangline's: auto, shared_memory, ipc or tcp.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As torch names it.")] = "float32",
    op: Annotated[str, typer.Option(help="sum, mean, product, min or max.")] = "sum",
    root: Annotated[int, typer.Option(help="Of broadcast and reduce.", min=0)] = 0,
    registered: Annotated[
        bool | None,
        typer.Option("--registered/--ordinary", help="gangline's tensors of comm.empty(); by default both."),
    ] = None,
    algo: Annotated[str | None, typer.Option(help="The algorithm that gangline takes, such as ring or ring:8.")] = None,
    check: Annotated[bool, typer.Option(help="Look at every element of the results.")] = True,
    percentiles: Annotated[bool, typer.Option(help="Time each step as well, in a run of its own.")] = False,
    peers: Annotated[str, typer.Option(help="What to measure beside gangline, with commas: gloo, mpi.")] = "",
    hosts: Annotated[int, typer.Option(help="Network namespaces that the ranks are spread over.", min=1)] = 1,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 7,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this .png.")] = None,
) -> None:
    """Measure a collective over a range of sizes, out of place and in place.

    size is in bytes, of the larger of a rank's tensors; count is the elements of one, or of one row where it has a row
    for each rank. time_us is that of a step: the mean over a run of the rank that took longest, and the median over the
    runs. algbw is size / time; busbw is what each link carries, whatever the number of ranks. A peer runs at its best
    setting for each size, found first and named. wrong counts the elements that are not as they must be.
    """
    from gangline.bench.peers.installed import chosen
    from gangline.bench.sweep import Sweep, numbers, rows_of, sizes_between, write

    check_outputs(json, plot)
    name = context.info_name or ""
    sweep = Sweep(
        name,
        sizes_between(smallest, largest, factor),
        dtype=dtype,
        op=op,
        root=root,
        registered=(False, True) if registered is None else (registered,),
        transport=transport,
        algorithm=f"{name}={algo}" if algo else None,
        steps=steps,
        before=before,
        runs=runs,
        check=check,
        percentiles=percentiles,
        hosts=hosts,
        peers=chosen(peers, "collectives", on_gpus=False),
    )
    rows: list[Row] = []
    print(_HEAD, end="")
    for number in numbers(ranks):
        print(f"# {name}, {number} ranks" + (f" on {hosts} hosts" if hosts > 1 else ""))
        for of_size in rows_of(sweep, number):
            rows += of_size
            print("\n".join(_lines(of_size)), flush=True)
    if json is not None:
        write(rows, json)
    if plot is not None:
        from gangline.bench.curves import draw

        draw(command_line(), rows, plot)
    print_ratios(rows, ("ranks", "size", "in_place", "registered"))


_HEAD = """\
#                                                      out-of-place                        in-place
#       size       count     type  redop root     time  algbw  busbw #wrong     time  algbw  busbw #wrong  who
#        (B)  (elements)                          (us) (GB/s) (GB/s)            (us) (GB/s) (GB/s)
"""


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each side, as nccl-tests has them."""
    sides: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        sides.setdefault((row["who"], row["registered"]), []).append(row)
    for (who, registered), of_side in sides.items():
        row = of_side[0]
        redop, root = row["redop"] or "none", -1 if row["root"] is None else row["root"]
        what = f"{row['size']:12} {row['count']:11} {row['dtype']:>8} {redop:>6} {root:4}"
        places = [next((row for row in of_side if row["in_place"] is place), None) for place in (False, True)]
        name = ", ".join(filter(None, [who, "registered" if registered else None, row["setting"]]))
        yield f"{what} {_figures(places[0])} {_figures(places[1])}  {name}"


def _figures(row: Row | None) -> str:
    if row is None:
        return f"{'':8} {'':6} {'':6} {'':6}"
    wrong = "N/A" if row["wrong"] is None else row["wrong"]
    time = f"{row['time_us']:8.{2 if row['time_us'] < 1e4 else 0}f}"
    return f"{time} {row['algbw_gbs']:6.2f} {row['busbw_gbs']:6.2f} {wrong:>6}"

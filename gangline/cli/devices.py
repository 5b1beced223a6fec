"""`gangline devices`: print the devices to train on."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from gangline.collectives.devices.inventory import device_table
from gangline.collectives.devices.links import matrix_table, read_links


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the devices to train on, with their memory and links."""
    links = read_links()
    rows = device_table(links)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("context", "name", "memory free", "memory total", "capability", "display", "peer links")
    for row in rows:
        display = "" if row.display is None else "yes" if row.display else "no"
        peers = ", ".join(f"{peer} {link}" for peer, link in (row.peers or {}).items())
        free, total = f"{row.memory_free / 2**30:.1f} GiB", f"{row.memory_total / 2**30:.1f} GiB"
        table.add_row(row.context, row.name, free, total, row.compute_capability or "", display, peers)
    Console().print(table)
    if len(links) > 1:
        print(f"\n{matrix_table(links)}")

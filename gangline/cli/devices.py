"""`gangline devices`: print the devices to train on."""

from __future__ import annotations

from dataclasses import asdict

from gangline.cli.options import JsonFile, write_json


def devices(json: JsonFile = None) -> None:
    """Show the devices to train on, with their memory and links."""
    from rich.console import Console
    from rich.table import Table

    from gangline.collectives.devices.inventory import device_table
    from gangline.collectives.devices.links import matrix_table, read_links

    links = read_links()
    rows = device_table(links)
    write_json(json, [asdict(row) for row in rows])
    if json is not None:
        return
    cells: dict[str, list[str]] = {
        "context": [row.context for row in rows],
        "name": [row.name for row in rows],
        "free": [f"{row.memory_free / 2**30:.1f} GiB" for row in rows],
        "total": [f"{row.memory_total / 2**30:.1f} GiB" for row in rows],
        "capability": [row.compute_capability or "" for row in rows],
        "display": ["" if row.display is None else "yes" if row.display else "no" for row in rows],
        "links": [", ".join(f"{peer} {link}" for peer, link in (row.peers or {}).items()) for row in rows],
    }
    shown = {name: column for name, column in cells.items() if any(column)}
    table = Table(*shown)
    for values in zip(*shown.values(), strict=True):
        table.add_row(*values)
    Console().print(table)
    if len(links) > 1:
        print(f"\n{matrix_table(links)}")

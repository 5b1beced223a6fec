"""Tables: constant fields are in the title, empty ones are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from gangline.bench.report.rows import NOISY, RATES, RUNS, TIMES, Row, figure, is_noisy

LEGEND = f"~ noisy: min..max is over {100 * NOISY:.0f} % of the median"
_HEADERS = {
    "who": "",
    "time_us": "time",
    "time_ms": "time",
    "seconds": "time",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "padded_to_real": "padded/real",
    "times_ddp": "times DDP",
    "gb_per_s": "GB/s",
    "gb_per_s_per_device": "GB/s per device",
    "algbw_gbs": "algbw GB/s",
    "busbw_gbs": "busbw GB/s",
    "memory_gbs": "memory GB/s",
    "bytes_a_rank": "sent per rank",
    "p50": "median",
}
_SIZES = ("size", "payload", "bytes_a_rank")


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows, with a column for each field that differs; `print_ratios` prints ratios to peers."""
    given = [name for name in dict.fromkeys(name for row in rows for name in row) if _is_shown(name, rows)]
    fields = sorted(given, key=lambda name: name == "setting")  # widest last
    constant = [name for name in fields if _is_constant(name, rows)]
    print(f"# {title}")
    runs = max((row.get("runs", 1) for row in rows), default=1)
    words = [_word(name, rows[0][name]) for name in constant] + ([f"{runs} runs"] if runs > 1 else [])
    if words:
        print(f"# {', '.join(words)}")
    columns = {name: [_cell(name, row.get(name)) for row in rows] for name in fields if name not in constant}
    headers = {name: _HEADERS.get(name, name.replace("_", " ")) for name in columns}
    if rows and "p50" in rows[0] and figure(rows[0])[0] == "p50":
        columns["p50"], headers["p50"] = [_cell("p50", row.get("p50")) for row in rows], _HEADERS["p50"]
    noisy = [is_noisy(row) for row in rows]
    if runs > 1:
        shown = formatter(figure(rows[0])[0])
        ends = [f"{shown(row['min'])}..{shown(row['max'])}" if "min" in row else "" for row in rows]
        columns["min..max"] = [end + "~" * mark for end, mark in zip(ends, noisy, strict=True)]
        headers["min..max"] = "min..max"
    text = {name for name in columns if any(isinstance(row.get(name), str) for row in rows)}
    print_columns([(headers[name], values, name in text) for name, values in columns.items()])
    if any(noisy):
        print(f"# {LEGEND}")


def print_ratios(rows: Sequence[Row], index: str, cases: Sequence[str]) -> None:
    """Print gangline's speed-up over each peer, in one table for all peers.

    Args:
        rows: results; gangline's rows have ratios in fields such as ``ratio_to_mxnet``.
        index: the field with a line for each value.
        cases: fields that, together with the peer, have a column for each combination of values.
    """
    own = [row for row in rows if row["who"] == "gangline"]
    peers = list(dict.fromkeys(name for row in own for name in row if name.startswith("ratio_to_")))
    telling = [case for case in cases if len({row.get(case) for row in own}) > 1]
    cells: dict[tuple[Any, tuple[str, ...]], str] = {}
    for name in peers:
        peer = name.removeprefix("ratio_to_")
        for row in own:
            if row.get(name) is not None:
                label = (*((peer,) if len(peers) > 1 else ()), *(_word(case, row.get(case)) for case in telling))
                noisy = is_noisy(row) or any(is_noisy(other) for other in _peer_rows(rows, row, peer, index, cases))
                cells[row[index], label] = f"{row[name]:.3g}{'~' if noisy else ''}"
    if not cells:
        return
    whom = f" as {peers[0].removeprefix('ratio_to_')}" if len(peers) == 1 else ""
    print(f"# times as fast{whom}" + (f" ({LEGEND})" if any(cell.endswith("~") for cell in cells.values()) else ""))
    lines, labels = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    columns = [("\n".join(label), [cells.get((line, label), "") for line in lines], False) for label in labels]
    print_columns([(index, [_cell(index, line) for line in lines], False), *columns])


def print_columns(columns: Iterable[tuple[str, Sequence[str], bool]]) -> None:
    """Print columns, given as (header, cells, is text); text is aligned to the left."""
    given = list(columns)
    table = Table(
        *(Column(header, justify="left" if text else "right", overflow="fold") for header, _, text in given),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for cells in zip(*(cells for _, cells, _ in given), strict=True):
        table.add_row(*cells)
    width = None if Console().is_terminal else 10_000  # files and pipes have none
    Console(highlight=False, width=width).print(table)


def format_size(nbytes: float) -> str:
    """Return bytes as text, such as "256 KiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text, such as "4.28 ms"."""
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{format_number(seconds * scale, 3)} {unit}"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits and without an exponent."""
    if value == 0 or not -1e15 < value < 1e15:
        return f"{value:g}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}g}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    text = f"{value:,.{max(0, digits - max(whole, 1))}f}" if abs(value) >= 1 else f"{value:.{digits}g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def formatter(name: str) -> Callable[[float], str]:
    """Return the function that shows values of a field."""
    if name in TIMES:
        return lambda value: format_seconds(value * TIMES[name])
    return format_size if name in _SIZES else format_number


def _is_shown(name: str, rows: Sequence[Row]) -> bool:
    if name in RUNS or (name.startswith("ratio_to_") and name != "ratio_to_copy"):
        return False
    if name == "count" and any("size" in row for row in rows):
        return False
    return any(row.get(name) is not None for row in rows)


def _is_constant(name: str, rows: Sequence[Row]) -> bool:
    values = [row.get(name) for row in rows]
    if len(values) == 1:
        return not isinstance(values[0], float) and name not in (*RATES, *TIMES)
    return values[0] is not None and all(value == values[0] for value in values)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return formatter(name)(value) if isinstance(value, float) or name in (*_SIZES, *TIMES) else str(value)
    return "" if value is None else str(value)


def _word(name: str, value: Any) -> str:
    """Return a field and its value in words."""
    shown = name.replace("_", " ")
    if value is None:
        return ""
    if isinstance(value, bool):
        return shown if value else f"not {shown}"
    return f"{shown} {_cell(name, value)}"


def _peer_rows(rows: Sequence[Row], own: Row, peer: str, index: str, cases: Sequence[str]) -> list[Row]:
    """Return the rows of a peer to compare with a row of gangline's."""
    name = peer.partition("_")[0]
    fields = [index, *(case for case in cases if case in ("ranks", "in_place", "contexts", "workers"))]
    return [
        row
        for row in rows
        if name in str(row["who"]).lower().partition(",")[0]
        and all(row.get(field) == own.get(field) for field in fields)
    ]

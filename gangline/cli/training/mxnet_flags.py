"""Flags as MXNet's image-classification examples write them, in the words of `gangline train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer.core

from gangline.usage_error import UsageError

_SWITCHES = {"--benchmark": ["--dataset", "random"], "--test-io": ["--test-io"]}
"""Words for MXNet's flags that have a value 0 or 1."""


class TrainCommand(typer.core.TyperCommand):
    """Command that takes `--network resnet --num-layers 50` for resnet50, `--gpus 0,2` and `--benchmark 1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: D102  inherited
        return super().parse_args(ctx, translated(args))


def translated(words: Sequence[str]) -> list[str]:
    """Return the arguments of `gangline train` that MXNet's arguments stand for."""
    pairs = dict(_pairs(words))
    layers = pairs.get("--num-layers")
    if "--num-layers" in pairs and ("--network" not in pairs or not (layers or "").isdecimal()):
        raise UsageError(f"--num-layers is {layers!r}; expected a number, and --network, such as --network resnet")
    found: list[str] = []
    switches: list[str] = []  # last, to win over another --dataset
    for flag, value in _pairs(words):
        if flag in _SWITCHES and value in (None, "0", "1"):
            switches += _SWITCHES[flag] * int(value or 1)
        elif flag == "--gpus" and value is not None:
            found += ["--context", value]
        elif flag == "--network" and layers is not None:
            found += [flag, f"{value}{layers}"]
        elif flag != "--num-layers":
            found += [flag] if value is None else [flag, value]
    return found + switches


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag with its value; None if it has none, or is a value itself."""
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if equals and flag.startswith("--"):
            yield flag, value
        elif flag.startswith("--") and rest and not rest[0].startswith("--"):
            yield flag, rest.pop(0)
        else:
            yield flag + equals + value, None

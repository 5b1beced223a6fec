"""What is measured: a network's parameters and images, and the contexts they are on."""

from __future__ import annotations

import inspect
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.bench.report import Row

_IMAGE_SIZE = 64  # of networks for ImageNet, whose 224 would take minutes on a CPU


@dataclass(frozen=True)
class Images:
    """Random images that suit a network."""

    shape: tuple[int, int, int]
    """(channels, height, width)"""
    classes: int


def images(network: str) -> Images:
    """Images and classes as a network of the zoo is built for; those of 224x224 pixels become 64x64.

    Raises:
        ValueError: the zoo has no such network.
    """
    from gangline.models.zoo import registry

    entry = registry.find(network)
    channels, *size = entry.image_shape
    height, width = (min(edge, _IMAGE_SIZE) for edge in size)
    return Images((channels, height, width), inspect.signature(entry.build).parameters["num_classes"].default)


def parameter_shapes(network: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a network's parameters, in its own order; none of them takes memory.

    Raises:
        ValueError: the zoo has no such network.
    """
    import torch

    from gangline.models.zoo import registry

    with torch.device("meta"):
        built = registry.create(network, images(network).classes)
    return [(name, tuple(parameter.shape)) for name, parameter in built.named_parameters()]


def bytes_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of float32 tensors of these shapes."""
    return sum(4 * math.prod(shape) for _, shape in shapes)


def context_words(counts: str | None, gpus: str | None, default: tuple[int, ...]) -> dict[int, str]:
    """For each number of contexts, the words that name them, such as "cpu(0),cpu(1)".

    Args:
        counts: ``--contexts``, such as "1,2"; None: ``default`` on the host, else all GPUs (and the first alone
            where ``default`` begins with 1).
        gpus: ``--gpus``, such as "0,1"; the first n of them serve n contexts. None: CPU contexts.
        default: numbers of CPU contexts.

    Raises:
        ValueError: a number is none, below 1, or above that of the GPUs; or a GPU is not there.
    """
    places = None
    if gpus is not None:
        from gangline.collectives.context import contexts

        places = [str(context) for context in contexts(gpus)]
    if counts is not None:
        numbers = [_count(word, counts) for word in counts.split(",")]
    elif places is not None:
        numbers = sorted({1, len(places)} if default[0] == 1 else {len(places)})
    else:
        numbers = list(default)
    found = {}
    for number in dict.fromkeys(numbers):
        if places is not None and number > len(places):
            raise ValueError(f"--contexts {counts} asks for {number}, but --gpus {gpus} names {len(places)}")
        found[number] = ",".join(places[:number] if places else (f"cpu({place})" for place in range(number)))
    return found


def distinct_devices(words: str) -> int:
    """How many devices contexts are on: all CPU contexts share the host."""
    return len({"cpu" if word.startswith("cpu") else word for word in words.split(",")})


def command_line() -> str:
    """The command as it was typed, but for where its results go, so that a result names what repeats it."""
    words = ["gangline"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word in ("--json", "--plot"):
            next(rest, None)
        elif not word.startswith(("--json=", "--plot=")):
            words.append(word)
    return shlex.join(words)


def print_ratios(rows: Sequence[Row], fields: Sequence[str]) -> None:
    """A line for each ratio that gangline's rows hold: how many times as fast it is as a peer.

    Args:
        rows: of a bench; a field ``ratio_to_mxnet``, say, is gangline's speed over MXNet's.
        fields: what tells gangline's rows apart.
    """
    for row in rows:
        for name, value in row.items():
            if row["who"] == "gangline" and name.startswith("ratio_to_") and value is not None:
                where = ", ".join(f"{field} {row[field]}" for field in fields)
                print(f"gangline is {value:.2f} times as fast as {name.removeprefix('ratio_to_')}: {where}")


def _count(word: str, words: str) -> int:
    if not word.strip().isdecimal() or not int(word):
        raise ValueError(f"--contexts is {words!r}; expected numbers above 0 with commas, such as 1,2")
    return int(word)

"""The registry of networks that `--network` and users' own code share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from models.checkpoint import load_weights

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Entry:
    """A network's builder and what it takes."""

    build: Callable[..., nn.Module]
    image_shape: tuple[int, int, int]
    """(channels, height, width) of the images it takes when built with defaults."""


_networks: dict[str, Entry] = {}


def register(name: str, image_shape: tuple[int, int, int] = (3, 224, 224)) -> Callable[[Builder], Builder]:
    """Function decorator: have `create` and ``--network`` know a builder that takes ``num_classes``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _networks:
        raise ValueError(f"a network named {name!r} is registered already")

    def decorate(build: Builder) -> Builder:
        _networks[name] = Entry(build, image_shape)
        return build

    return decorate


def names() -> list[str]:
    """All registered names, in order."""
    return sorted(_networks)


def find(name: str) -> Entry:
    """The entry of a name; ValueError with the list where there is none."""
    if name not in _networks:
        raise ValueError(f"network {name!r} is unknown; expected one of {names()}")
    return _networks[name]


def create(name: str, num_classes: int = 10, *, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """Build a network.

    Args:
        name: a registered name.
        num_classes: how many outputs it has.
        weights: a ``.safetensors`` file, or a ``.pth`` or ``.pt`` file of plain tensors, to fill it from.
        options: further arguments of its builder.

    Raises:
        ValueError: an unknown name, or weights that do not fit.
        RuntimeError: names are missing from the weights.
        FileNotFoundError: the weights are not there.
    """
    network = find(name).build(num_classes=num_classes, **options)
    if weights is not None:
        load_weights(network, weights)
    return network

"""Registry of network builders, for `create` and ``--network``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gangline.kvstore.errors import did_you_mean
from gangline.models import import_by_name
from gangline.models.checkpoint.checkpoint import load_weights

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Entry:
    """A network's builder and its input shape."""

    build: Callable[..., nn.Module]
    known_image_shape: tuple[int, int, int] | None
    """(channels, height, width) of its input when built with defaults; None if its builder does not define it."""
    name: str = ""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The input shape; ValueError if it is unknown."""
        if self.known_image_shape is None:
            raise ValueError(
                f"network {self.name!r} does not define its image shape; give --image-shape, such as "
                "--image-shape 3,64,64, or set it on its builder: build.image_shape = (3, 64, 64)"
            )
        return self.known_image_shape


_networks: dict[str, Entry] = {}
_PARTS = re.compile(r"(\d+)")


def register(name: str, image_shape: tuple[int, int, int] = (3, 224, 224)) -> Callable[[Builder], Builder]:
    """Decorator: register a builder with a parameter ``num_classes``, for `create` and ``--network``.

    Raises:
        ValueError: if the name is registered already.
    """
    if name in _networks:
        raise ValueError(f"a network named {name!r} is registered already")

    def decorate(build: Builder) -> Builder:
        _networks[name] = Entry(build, image_shape, name)
        return build

    return decorate


def names() -> list[str]:
    """Return all registered names, sorted, with numbers in them by value."""
    return sorted(_networks, key=lambda name: [int(part) if part.isdecimal() else part for part in _PARTS.split(name)])


def find(name: str) -> Entry:
    """Return the entry of a registered name, or import "package.module:builder" or "torchvision:NAME"."""
    if name.startswith("torchvision:"):
        return Entry(import_by_name.network_builder(name.replace(":", ".models:")), (3, 224, 224), name)
    if import_by_name.is_module_path(name):
        return Entry(import_by_name.network_builder(name), import_by_name.image_shape_of(name), name)
    if name not in _networks:
        raise ValueError(
            f"network {name!r} is unknown;{did_you_mean(name, names())} expected one of {names()}, or "
            "package.module:builder of your own"
        )
    return _networks[name]


def create(name: str, num_classes: int | None = 10, *, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """Build a network.

    Args:
        name: a registered name, or "package.module:builder" of the user's own, which gets ``num_classes`` if it has
            such a parameter.
        num_classes: number of outputs; None: the builder's default.
        weights: a ``.safetensors`` file, or a ``.pth`` or ``.pt`` file of plain tensors, to load.
        options: further arguments of the builder.

    Raises:
        ValueError: if the name is unknown, the weights do not fit, or a builder does not return a network.
        RuntimeError: if the weights lack a parameter, or a builder of the user's own fails.
        FileNotFoundError: if there is no such file of weights.
    """
    classes = {} if num_classes is None else {"num_classes": num_classes}
    network = find(name).build(**classes, **options)
    if weights is not None:
        load_weights(network, weights)
    return network


create_network = create  # the name outside of this package, which has other functions called create

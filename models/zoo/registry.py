"""The registry of networks that `--network` and users' own code share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from gangline.models import import_by_name
from gangline.models.checkpoint.checkpoint import load_weights

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Entry:
    """A network's builder and what it takes."""

    build: Callable[..., nn.Module]
    known_image_shape: tuple[int, int, int] | None
    """(channels, height, width) of the images it takes when built with defaults; None where its builder says none."""
    name: str = ""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The same; ValueError where nobody knows."""
        if self.known_image_shape is None:
            raise ValueError(
                f"network {self.name!r} does not say what images it takes; give --image-shape, such as "
                "--image-shape 3,64,64, or set it on its builder: build.image_shape = (3, 64, 64)"
            )
        return self.known_image_shape


_networks: dict[str, Entry] = {}


def register(name: str, image_shape: tuple[int, int, int] = (3, 224, 224)) -> Callable[[Builder], Builder]:
    """Function decorator: have `create` and ``--network`` know a builder that takes ``num_classes``.

    Raises:
        ValueError: the name is taken.
    """
    if name in _networks:
        raise ValueError(f"a network named {name!r} is registered already")

    def decorate(build: Builder) -> Builder:
        _networks[name] = Entry(build, image_shape, name)
        return build

    return decorate


def names() -> list[str]:
    """All registered names, in order."""
    return sorted(_networks)


def find(name: str) -> Entry:
    """The entry of a registered name, or of "package.module:builder"; the latter's module is imported.

    Raises:
        ValueError: an unknown name, with the list; or as `own.resolve`.
        RuntimeError: the module fails when it is imported.
    """
    if import_by_name.is_own(name):
        return Entry(import_by_name.network_builder(name), import_by_name.image_shape_of(name), name)
    if name not in _networks:
        raise ValueError(
            f"network {name!r} is unknown; expected one of {names()}, or package.module:builder of your own"
        )
    return _networks[name]


def create(name: str, num_classes: int | None = 10, *, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """Build a network.

    Args:
        name: a registered name, or "package.module:builder" of the user's own, which gets ``num_classes`` if it takes
            that.
        num_classes: how many outputs it has; None leaves that to the builder.
        weights: a ``.safetensors`` file, or a ``.pth`` or ``.pt`` file of plain tensors, to fill it from.
        options: further arguments of its builder.

    Raises:
        ValueError: an unknown name, or weights that do not fit; what is found under a name of the user's own gives no
            network.
        RuntimeError: names are missing from the weights; a builder of the user's own fails.
        FileNotFoundError: the weights are not there.
    """
    classes = {} if num_classes is None else {"num_classes": num_classes}
    network = find(name).build(**classes, **options)
    if weights is not None:
        load_weights(network, weights)
    return network

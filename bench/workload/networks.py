"""Parameters and images of a network, and the contexts of a bench."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gangline.bench.workload.sizes import counts as parse_counts
from gangline.kvstore.context import contexts
from gangline.models.zoo import registry
from gangline.usage_error import UsageError

_CHANNELS = 24
_IMAGE_SIZE = 64  # pixels; with 224, networks for ImageNet take minutes on a CPU


@dataclass(frozen=True)
class Images:
    """Shape and number of classes of a network's images."""

    shape: tuple[int, int, int]
    """(channels, height, width)"""
    classes: int


def images(network: str) -> Images:
    """Return the images that a network of the zoo expects, with 64x64 pixels at most."""
    entry = registry.find(network)
    channels, *size = entry.image_shape
    height, width = (min(edge, _IMAGE_SIZE) for edge in size)
    return Images((channels, height, width), inspect.signature(entry.build).parameters["num_classes"].default)


def parameter_shapes(network: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a network's parameters in the network's order, without allocating them."""
    with torch.device("meta"):
        built = registry.create(network, images(network).classes)
    return [(name, tuple(parameter.shape)) for name, parameter in built.named_parameters()]


def bytes_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of float32 tensors of these shapes."""
    return sum(4 * math.prod(shape) for _, shape in shapes)


def context_words(counts: str | None, gpus: str | None, default: tuple[int, ...]) -> dict[int, str]:
    """Return the names of the contexts, such as "cpu(0),cpu(1)", for each number of contexts.

    Args:
        counts: value of ``--contexts``, such as "1,2"; None: ``default`` on the host, else all GPUs (and the first one
            alone if ``default`` begins with 1).
        gpus: value of ``--gpus``, such as "0,1"; n contexts are the first n of them. None: CPU contexts.
        default: numbers of CPU contexts.
    """
    gpu_contexts = None
    if gpus is not None:
        gpu_contexts = [str(context) for context in contexts(gpus)]
    if counts is not None:
        numbers = parse_counts(counts, "--contexts")
    elif gpu_contexts is not None:
        numbers = sorted({1, len(gpu_contexts)} if default[0] == 1 else {len(gpu_contexts)})
    else:
        numbers = list(default)
    found = {}
    for number in dict.fromkeys(numbers):
        if gpu_contexts is not None and number > len(gpu_contexts):
            raise UsageError(f"--contexts {counts} asks for {number}, but --gpus {gpus} names {len(gpu_contexts)}")
        found[number] = ",".join(
            gpu_contexts[:number] if gpu_contexts else (f"cpu({index})" for index in range(number))
        )
    return found


def distinct_devices(words: str) -> int:
    """Return the number of devices of some contexts; all CPU contexts are one device, the host."""
    return len({"cpu" if word.startswith("cpu") else word for word in words.split(",")})


def convolutions() -> nn.Module:
    """Return a network of ten classes whose time depends on samples, not on parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, _CHANNELS, 3, padding=1), nn.ReLU()]
        channels = _CHANNELS
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_CHANNELS, 10))

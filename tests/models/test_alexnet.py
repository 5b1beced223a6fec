"""AlexNet: torchvision's names and shapes, and what the layers compute."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gangline.models import zoo

CONVOLUTIONS = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
"""(outputs, inputs, kernel size) by torchvision's index in ``features``."""


def torchvision_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of torchvision's state dict, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, (outputs, inputs, kernel) in CONVOLUTIONS.items():
        shapes |= {f"features.{place}.weight": (outputs, inputs, kernel, kernel), f"features.{place}.bias": (outputs,)}
    for place, outputs, inputs in ((1, 4096, 256 * 6 * 6), (4, 4096, 4096), (6, classes, 4096)):
        shapes |= {f"classifier.{place}.weight": (outputs, inputs), f"classifier.{place}.bias": (outputs,)}
    return shapes


def reference(state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Compute the network in evaluation mode from its state dict, with functions only."""

    def conv(place: int, value: torch.Tensor, **how: int) -> torch.Tensor:
        at = f"features.{place}"
        return F.relu(F.conv2d(value, state[f"{at}.weight"], state[f"{at}.bias"], **how))

    def linear(place: int, value: torch.Tensor) -> torch.Tensor:
        return value @ state[f"classifier.{place}.weight"].T + state[f"classifier.{place}.bias"]

    value = F.max_pool2d(conv(0, images, stride=4, padding=2), 3, 2)
    value = F.max_pool2d(conv(3, value, padding=2), 3, 2)
    value = conv(10, conv(8, conv(6, value, padding=1), padding=1), padding=1)
    value = F.adaptive_avg_pool2d(F.max_pool2d(value, 3, 2), 6).flatten(1)
    return linear(6, F.relu(linear(4, F.relu(linear(1, value)))))


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return values that differ between rows and columns: outer products, because 57 million draws take long."""
    rows, columns = (torch.rand(size, 1, generator=generator) - 0.5 for size in (shape[0], math.prod(shape[1:])))
    return (0.2 * rows @ columns.T).reshape(shape)


def test_weights_of_torchvisions_names_and_shapes_load_and_give_the_outputs_of_the_layers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {name: drawn(shape, generator) for name, shape in torchvision_shapes(3).items()}
    save_file(state, tmp_path / "alexnet.safetensors")
    network = zoo.create("alexnet", 3, weights=tmp_path / "alexnet.safetensors")
    assert list(network.state_dict()) == list(state)
    network.eval()
    for edges in ((63, 63), (70, 131)):
        images = torch.rand(2, 3, *edges, generator=generator)
        expected = reference(state, images)
        torch.testing.assert_close(network(images), expected)
        assert expected.std() > 0.01  # a missing layer would show in the comparison


def test_it_has_torchvisions_size_and_a_dropout_that_can_be_set_before_the_first_two_linear_layers() -> None:
    with torch.device("meta"):
        networks = zoo.find("alexnet").build(), zoo.create("alexnet", dropout=0.2)
    assert sum(parameter.numel() for parameter in networks[0].parameters()) == 61_100_840
    for network, rate in zip(networks, (0.5, 0.2), strict=True):
        layers = list(network.get_submodule("classifier").children())
        kinds = ["Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"]
        assert [type(layer).__name__ for layer in layers] == kinds
        assert [layer.p for layer in network.modules() if isinstance(layer, nn.Dropout)] == [rate, rate]


def test_images_below_63_pixels_are_refused_before_training() -> None:
    with torch.device("meta"):
        network = zoo.create("alexnet", 2)
        for shape in ((1, 3, 62, 200), (1, 3, 200, 62), (1, 1, 63, 63), (3, 63, 63)):
            with pytest.raises(ValueError, match="height and width of at least 63 pixels: resize them") as caught:
                network(torch.zeros(shape))
            assert str(shape) in str(caught.value)


def test_weights_begin_as_he_says_and_biases_at_0() -> None:
    torch.manual_seed(6)
    network = zoo.create("alexnet", 10)
    for name, value in network.named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif value.numel() > 10_000:
            rows = value.detach().flatten(1)[:512]
            assert rows.std() == pytest.approx(math.sqrt(2 / rows.shape[1]), rel=0.05)

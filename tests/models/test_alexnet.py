"""AlexNet: torchvision's names and shapes, and what the layers compute."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gangline.models import zoo

CONVOLUTIONS = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
"""(outputs, inputs, kernel size) by torchvision's index in ``features``."""


def torchvision_state(classes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of torchvision's state dict, in its order."""
    state: list[tuple[str, tuple[int, ...]]] = []
    for place, (outputs, inputs, kernel) in CONVOLUTIONS.items():
        state.append((f"features.{place}.weight", (outputs, inputs, kernel, kernel)))
        state.append((f"features.{place}.bias", (outputs,)))
    for place, outputs, inputs in ((1, 4096, 256 * 6 * 6), (4, 4096, 4096), (6, classes, 4096)):
        state += [(f"classifier.{place}.weight", (outputs, inputs)), (f"classifier.{place}.bias", (outputs,))]
    return state


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


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_names_shapes_and_counts_are_torchvisions() -> None:
    convolutions = sum(outputs * (inputs * kernel**2 + 1) for outputs, inputs, kernel in CONVOLUTIONS.values())
    hidden = 4096 * (256 * 6 * 6 + 1) + 4096 * (4096 + 1)
    with torch.device("meta"):
        for classes in (1000, 7):
            network = zoo.create("alexnet", classes)
            assert [(name, tuple(value.shape)) for name, value in network.state_dict().items()] == torchvision_state(
                classes
            )
            assert parameters(network) == convolutions + hidden + classes * (4096 + 1)
        network = zoo.find("alexnet").build()
    assert parameters(network) == 61_100_840
    assert zoo.find("alexnet").image_shape == (3, 224, 224)


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return values that differ between rows and columns: outer products, because 57 million draws take long."""
    rows, columns = (torch.rand(size, 1, generator=generator) - 0.5 for size in (shape[0], math.prod(shape[1:])))
    return (0.2 * rows @ columns.T).reshape(shape)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the network for 3 classes, filled from a file, and the file's contents."""
    generator = torch.Generator().manual_seed(3)
    state = {name: drawn(shape, generator) for name, shape in torchvision_state(3)}
    path = tmp_path_factory.mktemp("weights") / "alexnet.safetensors"
    save_file(state, path)
    network = zoo.create("alexnet", 3, weights=path)
    path.unlink()
    return network, state


def test_weights_load_by_name_and_give_the_outputs_of_the_layers(
    loaded: tuple[nn.Module, dict[str, torch.Tensor]],
) -> None:
    network, state = loaded
    network.eval()
    generator = torch.Generator().manual_seed(4)
    for edges in ((63, 63), (70, 131)):
        images = torch.rand(2, 3, *edges, generator=generator)
        expected = reference(state, images)
        torch.testing.assert_close(network(images), expected)
        assert expected.std() > 0.01  # a missing layer would show in the comparison


def test_dropout_is_before_the_first_two_linear_layers_and_can_be_set() -> None:
    with torch.device("meta"):
        rates = [layer.p for layer in zoo.create("alexnet").modules() if isinstance(layer, nn.Dropout)]
        other = [layer.p for layer in zoo.create("alexnet", dropout=0.2).modules() if isinstance(layer, nn.Dropout)]
        kinds = [type(layer).__name__ for layer in zoo.create("alexnet").get_submodule("classifier").children()]
    assert (rates, other) == ([0.5, 0.5], [0.2, 0.2])
    assert kinds == ["Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"]


def test_images_below_63_pixels_are_refused_before_training() -> None:
    with torch.device("meta"):
        network = zoo.create("alexnet", 2)
        for shape in ((1, 3, 62, 200), (1, 3, 200, 62), (1, 1, 63, 63), (3, 63, 63)):
            with pytest.raises(ValueError, match="height and width of at least 63 pixels: resize them") as caught:
                network(torch.zeros(shape))
            assert str(shape) in str(caught.value)
        assert network(torch.zeros(1, 3, 63, 63)).shape == (1, 2)


def test_weights_begin_as_he_says_and_biases_at_0() -> None:
    torch.manual_seed(6)
    network = zoo.create("alexnet", 10)
    for name, value in network.named_parameters():
        if name.endswith("bias"):
            assert not value.any()
        elif value.numel() > 10_000:
            rows = value.detach().flatten(1)[:512]
            assert rows.std() == pytest.approx(math.sqrt(2 / rows.shape[1]), rel=0.05)

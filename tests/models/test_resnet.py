"""Residual networks and AlexNet: torchvision's names and shapes, and what the layers compute."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gangline.models import zoo

RESNETS = {
    "resnet18": ((2, 2, 2, 2), 11_689_512, 122),
    "resnet34": ((3, 4, 6, 3), 21_797_672, 218),
    "resnet50": ((3, 4, 6, 3), 25_557_032, 320),
    "resnet101": ((3, 4, 23, 3), 44_549_160, 626),
    "resnet152": ((3, 8, 36, 3), 60_192_808, 932),
}
"""Depths of the stages, number of parameters, and of entries of the state dict."""


def convolutions(name: str) -> Iterator[tuple[str, str, int, int, int]]:
    """(convolution, its BatchNorm, outputs, inputs, kernel size) of torchvision's network, in its order."""
    yield "conv1", "bn1", 64, 3, 7
    bottleneck = name not in ("resnet18", "resnet34")
    inputs = 64
    for stage, depth in enumerate(RESNETS[name][0], 1):
        width = 32 << stage
        outputs = 4 * width if bottleneck else width
        for block in range(depth):
            at = f"layer{stage}.{block}"
            kernels = [(width, 1), (width, 3), (outputs, 1)] if bottleneck else [(width, 3), (width, 3)]
            before = inputs
            for number, (after, kernel) in enumerate(kernels, 1):
                yield f"{at}.conv{number}", f"{at}.bn{number}", after, before, kernel
                before = after
            if block == 0 and (stage > 1 or bottleneck):
                yield f"{at}.downsample.0", f"{at}.downsample.1", outputs, inputs, 1
            inputs = outputs


def torchvision_state(name: str, classes: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of torchvision's state dict, in its order."""
    state: list[tuple[str, tuple[int, ...]]] = []
    for convolution, norm, outputs, inputs, kernel in convolutions(name):
        state.append((f"{convolution}.weight", (outputs, inputs, kernel, kernel)))
        state += [(f"{norm}.{of}", (outputs,)) for of in ("weight", "bias", "running_mean", "running_var")]
        state.append((f"{norm}.num_batches_tracked", ()))
    features = 512 if name in ("resnet18", "resnet34") else 2048
    return [*state, ("fc.weight", (classes, features)), ("fc.bias", (classes,))]


def without_buffers(state: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    return [entry for entry in state if not entry[0].endswith(("running_mean", "running_var", "num_batches_tracked"))]


def reference(name: str, state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Compute the network in evaluation mode from its state dict, with functions only."""

    def conv_norm(at: str, convolution: str, norm: str, value: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = state[f"{at}{convolution}.weight"]
        value = F.conv2d(value, weight, stride=stride, padding=weight.shape[-1] // 2)
        of = {part: state[f"{at}{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")}
        return F.batch_norm(value, **of)

    value = F.max_pool2d(F.relu(conv_norm("", "conv1", "bn1", images, 2)), 3, 2, 1)
    last = 2 if name in ("resnet18", "resnet34") else 3
    strided = last - 1  # the first 3x3 convolution of either kind of block
    for stage, depth in enumerate(RESNETS[name][0], 1):
        for block in range(depth):
            at, shortcut = f"layer{stage}.{block}.", value
            stride = 2 if stage > 1 and block == 0 else 1
            if f"{at}downsample.0.weight" in state:
                shortcut = conv_norm(at, "downsample.0", "downsample.1", shortcut, stride)
            for number in range(1, last + 1):
                value = conv_norm(at, f"conv{number}", f"bn{number}", value, stride if number == strided else 1)
                value = F.relu(value if number < last else value + shortcut)
    return F.linear(value.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("name", RESNETS)
def test_names_shapes_and_strides_are_torchvisions_in_its_order(name: str) -> None:
    with torch.device("meta"):
        network = zoo.find(name).build()
    state = [(key, tuple(value.shape)) for key, value in network.state_dict().items()]
    assert state == torchvision_state(name, 1000)
    parameters = [(key, tuple(value.shape)) for key, value in network.named_parameters()]
    assert parameters == without_buffers(state)
    assert (sum(math.prod(shape) for _, shape in parameters), len(state)) == RESNETS[name][1:]
    with torch.device("meta"):
        network = zoo.create(name, num_classes=10)
    assert zoo.find(name).image_shape == (3, 224, 224)
    assert [(key, tuple(value.shape)) for key, value in network.state_dict().items()] == torchvision_state(name, 10)
    convolution = "conv1" if name in ("resnet18", "resnet34") else "conv2"
    strided = {key for key, layer in network.named_modules() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)}
    assert strided == {"conv1"} | {
        f"layer{stage}.0.{which}" for stage in (2, 3, 4) for which in (convolution, "downsample.0")
    }


@pytest.mark.parametrize(("name", "size"), [("resnet18", (32, 45)), ("resnet50", (64, 64))])
def test_outputs_are_those_of_the_layers_written_out(name: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = zoo.create(name).eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for value in (layer.weight, layer.running_var):
                nn.init.uniform_(value, 0.5, 1.5)
            for value in (layer.bias, layer.running_mean):
                nn.init.uniform_(value, -0.5, 0.5)
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        logits = network(images)
        expected = reference(name, network.state_dict(), images)
    assert logits.shape == (2, 10)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


# AlexNet


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


def test_alexnet_has_torchvisions_shapes_and_a_dropout_that_can_be_set_before_the_first_two_linear_layers() -> None:
    with torch.device("meta"):
        networks = zoo.find("alexnet").build(), zoo.create("alexnet", dropout=0.2)
    state = networks[0].state_dict()
    assert [(name, tuple(value.shape)) for name, value in state.items()] == [*torchvision_shapes(1000).items()]
    assert sum(value.numel() for value in state.values()) == 61_100_840
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

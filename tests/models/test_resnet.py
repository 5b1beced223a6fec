"""Residual networks: torchvision's names and shapes, and what the layers compute."""

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


def test_initial_weights_are_he_normal_by_fan_out() -> None:
    torch.manual_seed(0)
    network = zoo.create("resnet18")
    layers = dict(network.named_modules())
    for convolution, norm, outputs, _, kernel in convolutions("resnet18"):
        weight = layers[convolution].weight
        deviation = math.sqrt(2 / (outputs * kernel**2))
        assert weight.std().item() == pytest.approx(deviation, rel=0.05)
        assert weight.abs().max().item() > 2.5 * deviation  # a uniform distribution ends at 1.73 deviations
        assert layers[convolution].bias is None
        assert torch.all(layers[norm].weight == 1)
        assert torch.all(layers[norm].bias == 0)
    assert network.fc.weight.abs().max().item() <= 1 / math.sqrt(512)


@pytest.mark.parametrize("size", [(64, 64), (32, 45)], ids=str)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
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

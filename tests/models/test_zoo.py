"""Networks by name, filling them from files, what residual networks compute, and transfer learning."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import same_bits
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from gangline.kvstore.context import cpu
from gangline.models import zoo
from gangline.models.checkpoint.checkpoint import load_weights
from gangline.models.module import Module
from gangline.models.zoo import registry
from gangline.models.zoo.transfer import (
    freeze_until,
    learning_rate_factors,
    pretrained,
    replace_last_layer,
    scale_batch,
)
from tests.programs import RunsCode


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    """Remove the networks that a test registers."""
    before = dict(registry._networks)
    yield
    registry._networks.clear()
    registry._networks.update(before)


DEEP = ("resnet101", "resnet152")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEEP else name for name in zoo.names()]
)
def test_every_network_takes_its_documented_images_and_gives_ten_classes(name: str) -> None:
    shape = zoo.find(name).image_shape
    assert zoo.create(name).eval()(torch.zeros(1, *shape)).shape[:2] == (1, 10)  # of each image, or of each pixel


def test_a_users_network_can_be_registered() -> None:
    @zoo.register("test-linear", image_shape=(1, 2, 3))
    def build(num_classes: int = 10, bias: bool = True) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, num_classes, bias))

    assert build(2)[1].out_features == 2  # the decorator returns the function unchanged
    assert zoo.find("test-linear").image_shape == (1, 2, 3)
    assert zoo.find("test-linear").build is build
    assert zoo.create("test-linear", 4, bias=False)(torch.zeros(5, 1, 2, 3)).shape == (5, 4)
    assert {"lenet", "mlp", "test-linear"} <= set(zoo.names())
    with pytest.raises(ValueError, match="a network named 'test-linear' is registered already"):
        zoo.register("test-linear")(nn.Identity)
    assert zoo.find("test-linear").build is build


def small() -> nn.Module:
    """Network with two parameters and the buffers of a BatchNorm."""
    return nn.Sequential(OrderedDict(fc=nn.Linear(3, 2), norm=nn.BatchNorm1d(2)))


def state(prefix: str = "") -> dict[str, torch.Tensor]:
    """Return values by name that no new network has."""
    return {
        f"{prefix}{name}": torch.full_like(value, 3 + i) for i, (name, value) in enumerate(small().state_dict().items())
    }


def write(params: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(params, path)
    else:
        torch.save(params, path)


SUFFIXES = [".safetensors", ".pth", ".pt"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_fill_the_network_whether_ddp_wrote_them_or_not(tmp_path: Path, suffix: str, prefix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(state(prefix), path)
    for where in (path, str(path)):
        network = small()
        load_weights(network, where)
        assert same_bits(network.state_dict(), state())


def test_weights_of_another_precision_and_of_older_versions_fill_it_too(tmp_path: Path) -> None:
    path, network = tmp_path / "weights.pth", small()
    counted = [name for name in state() if name.endswith("num_batches_tracked")]
    write({name: value.double() for name, value in state().items() if name not in counted}, path)
    load_weights(network, path)
    assert same_bits(network.state_dict(), state() | {name: torch.tensor(0) for name in counted})


WITHOUT_TWO = {name: value for name, value in state().items() if name not in ("fc.bias", "norm.running_var")}
MORE = state() | {"head.weight": torch.ones(2), "head.bias": torch.ones(2)}
WIDER = state() | {"fc.weight": torch.ones(2, 4)}
UNFIT: list[tuple[dict[str, torch.Tensor], type[Exception], str]] = [
    (WITHOUT_TWO, RuntimeError, r"\['fc\.bias', 'norm\.running_var'\] are missing"),
    (MORE, ValueError, r"(?=.*'head\.weight')(?=.*'head\.bias').* are not the network's"),
    (WIDER, ValueError, r"'fc\.weight' has shape \(2, 4\); the network's has \(2, 3\)"),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_torn_and_unfit_weights_are_refused_and_change_nothing(tmp_path: Path, suffix: str) -> None:
    path, network = tmp_path / f"weights{suffix}", small()
    before = {name: value.clone() for name, value in network.state_dict().items()}

    def refused(error: type[Exception], text: str) -> str:
        with pytest.raises(error, match=text) as caught:
            load_weights(network, path)
        assert same_bits(network.state_dict(), before)
        return str(caught.value)

    assert str(path) in refused(FileNotFoundError, "do not exist")
    path.mkdir()
    refused(FileNotFoundError, "do not exist")
    path.rmdir()
    write(state(), path)
    content = path.read_bytes()
    for length in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert str(path) in refused(ValueError, "damaged")
    for unfit, error, text in UNFIT:
        write(unfit, path)
        refused(error, text)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="do not exist"):
        zoo.create("mlp", weights=path)


@pytest.mark.parametrize("writer", ["torch", "torch of old", "pickle"])
@pytest.mark.parametrize("inside", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, writer: str, inside: bool) -> None:
    marker, path = tmp_path / "ran", tmp_path / "weights.pth"
    content: Any = RunsCode(marker)
    if inside:
        content = {**state(), "more": content}
    if writer == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(ValueError, match="hold more than plain tensors") as caught:
        load_weights(small(), path)
    assert str(path) in str(caught.value)
    assert not marker.exists()


NO_STATE_DICT: list[Any] = [
    torch.ones(3),
    [torch.ones(3)],
    {"state_dict": {"fc.weight": torch.ones(2, 3)}},
    {"fc.weight": [1.0]},
    {0: torch.ones(3)},
    3,
]


REFUSED: list[Any] = [
    *(("weights.pth", content, "hold no state dict; expected tensors by name") for content in NO_STATE_DICT),
    *((f"weights{end}", 3, rf"end in '{end}'; expected \.safetensors, ") for end in (".bin", ".params", "")),
]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content, text in REFUSED:
        torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match=text) as caught:
            load_weights(small(), tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


# Residual networks: torchvision's names and shapes, and what the layers compute


RESNETS = {
    "resnet18": ((2, 2, 2, 2), 11_689_512),
    "resnet34": ((3, 4, 6, 3), 21_797_672),
    "resnet50": ((3, 4, 6, 3), 25_557_032),
    "resnet101": ((3, 4, 23, 3), 44_549_160),
    "resnet152": ((3, 8, 36, 3), 60_192_808),
}
"""Depths of the stages, and number of parameters."""


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
    assert sum(parameter.numel() for parameter in network.parameters()) == RESNETS[name][1]
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


# Transfer learning: new last layer, learning-rate factors, frozen layers, weights with another class count


NEW = ["fc2.weight", "fc2.bias"]


def layered(**options: Any) -> nn.Sequential:
    """Network of a convolution and two linear layers."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3),
            norm=nn.BatchNorm2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(8, 4),
            tanh=nn.Tanh(),
            fc2=nn.Linear(4, 3, **options),
        )
    )


def copied_state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("classes", [3, 5])
def test_the_last_layer_is_replaced_even_by_one_of_as_many_classes(classes: int) -> None:
    network = layered()
    before = copied_state(network)
    assert replace_last_layer(network, classes) == NEW
    after = copied_state(network)
    for name, value in after.items():
        assert torch.equal(value, before[name]) != (name in NEW)
    assert network(torch.zeros(2, 1, 4, 4)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "where"),
    [("lenet", "fc2"), ("mlp", "fc3"), ("resnet18", "fc"), ("resnet50", "fc"), ("alexnet", "classifier.6")],
)
def test_the_zoos_networks_end_in_their_classifier(name: str, where: str) -> None:
    with torch.device("meta"):
        network = zoo.create(name, 4)
    assert replace_last_layer(network, 6) == [f"{where}.weight", f"{where}.bias"]
    assert network.get_parameter(f"{where}.weight").shape[0] == 6
    assert network.get_parameter(f"{where}.weight").is_meta


def test_a_1x1_convolution_is_a_last_layer_too() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 3))
    with torch.no_grad():
        before = network[3].weight.clone()
    assert replace_last_layer(network, 7) == ["1.weight", "1.bias"]
    assert network[1](torch.zeros(1, 4, 2, 2)).shape == (1, 7, 2, 2)
    assert torch.equal(network[3].weight, before)


def test_the_new_layer_is_as_the_old_one_was() -> None:
    network = layered(bias=False).eval().to(torch.bfloat16)
    network.get_parameter("fc2.weight").requires_grad_(False)
    assert replace_last_layer(network, 5) == ["fc2.weight"]
    new = network.get_submodule("fc2")
    assert isinstance(new, nn.Linear)
    assert new.bias is None
    assert new.weight.dtype == torch.bfloat16
    assert not new.training
    assert new.weight.requires_grad  # new weights are trained


def tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize("classes", [5, 7, None])
def test_pretrained_weights_serve_any_number_of_classes(tmp_path: Path, classes: int | None) -> None:
    source = copied_state(zoo.create("mlp", 7))
    path = tmp_path / "weights.safetensors"
    save_file({f"module.{name}": value for name, value in source.items()}, path)
    network, new = pretrained("mlp", path if classes else tmp_path, classes)  # a file, or a checkpoint
    assert new == (["fc3.weight", "fc3.bias"] if classes == 5 else [])
    assert network(torch.zeros(2, 784)).shape == (2, classes or 7)
    for name, value in network.state_dict().items():
        assert (value.shape == source[name].shape and torch.equal(value, source[name])) == (name not in new)


def test_layers_before_the_named_one_are_fixed() -> None:
    assert freeze_until(layered(), "conv") == []
    assert freeze_until(layered(), "fc1") == ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    assert freeze_until(layered(), "tanh")[4:] == ["fc1.weight", "fc1.bias"]


def test_layers_of_nested_networks_have_their_place_in_the_whole() -> None:
    with torch.device("meta"):
        alexnet, resnet = zoo.create("alexnet"), zoo.create("resnet18")
    assert freeze_until(alexnet, "classifier") == [n for n, _ in alexnet.named_parameters() if n.startswith("features")]
    assert freeze_until(alexnet, "classifier.4")[-2:] == ["classifier.1.weight", "classifier.1.bias"]
    names = [name for name, _ in resnet.named_parameters()]
    assert freeze_until(resnet, "layer2.1.conv1") == names[: names.index("layer2.1.conv1.weight")]
    assert freeze_until(resnet, "fc") == names[:-2]


def test_factors_are_10_and_20_for_the_new_layer() -> None:
    network = layered()
    assert learning_rate_factors(network, NEW) == {"fc2.weight": 10.0, "fc2.bias": 20.0}
    frozen = freeze_until(network, "fc1")
    assert learning_rate_factors(network, NEW, early=0.1, frozen=frozen) == {
        "fc1.weight": 0.1,
        "fc1.bias": 0.1,
        "fc2.weight": 10.0,
        "fc2.bias": 20.0,
    }
    assert learning_rate_factors(network, [], early=0) == dict.fromkeys(dict(network.named_parameters()), 0.0)
    assert learning_rate_factors(network, NEW, weight=3, bias=1) == {"fc2.weight": 3.0}


def test_backward_ends_at_the_fixed_layers() -> None:
    network = layered()
    in_graph: dict[str, bool] = {}
    for name in ("conv", "fc1"):
        layer = network.get_submodule(name)
        layer.register_forward_hook(lambda _, __, out, name=name: in_graph.update({name: out.requires_grad}))
    with Module(network, nn.CrossEntropyLoss(), cpu(), fixed_param_names=freeze_until(network, "fc1")) as module:
        module.init_optimizer(None, "sgd", {"learning_rate": 0.1})
        module.forward_backward(torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    assert in_graph == {"conv": False, "fc1": True}


def last_of(network: nn.Module, classes: Any = 2) -> Any:
    return partial(replace_last_layer, network, classes)


def factors(**options: Any) -> Any:
    return partial(learning_rate_factors, layered(), **{"new": NEW, **options})


REFUSED_TRANSFERS: list[Any] = [
    *((partial(freeze_until, layered(), name), ValueError, rf"no layer '{name}'.*'fc2'") for name in ("fc3", "")),
    (last_of(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())), ValueError, "Sequential has neither a linear layer"),
    (last_of(nn.Linear(2, 2)), ValueError, "the network is a single Linear"),
    (last_of(tied()), ValueError, r"shared under the names \['0.weight', '1.weight'\]"),
    (last_of(nn.Sequential(nn.LazyLinear(2))), ValueError, "layer '0' has no shape yet"),
    (last_of(layered(), 0), ValueError, "num_classes is 0; expected 1 or more"),
    (last_of(layered(), 2.0), TypeError, "num_classes is 2.0; expected an int"),
    (factors(new=["fc3.weight"]), ValueError, r"new has 'fc3.weight', .*; did you mean 'fc2.weight'\?"),
    (factors(frozen=["conv.wieght"]), ValueError, r"frozen has 'conv.wieght'.*did you mean 'conv.weight'\?"),
    (factors(frozen=["fc2.bias"]), ValueError, r"\['fc2.bias'\] are new and frozen"),
    (factors(new="fc2.weight"), TypeError, "new is 'fc2.weight'; expected a list of names"),
    (factors(weight=-1.0), ValueError, "the factor weight is -1.0"),
    (factors(early=math.nan), ValueError, "the factor early is nan"),
    (partial(scale_batch, 0, 0.1, 2), ValueError, "batch_size is 0"),
    (partial(scale_batch, 8, 0.1, 0), ValueError, "devices is 0"),
    (partial(scale_batch, 8, -0.1, 2), ValueError, "learning rate is -0.1"),
]


def test_wrong_input_is_refused() -> None:
    for call, error, message in REFUSED_TRANSFERS:
        with pytest.raises(error, match=message):
            call()

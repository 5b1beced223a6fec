"""Transfer learning: new last layer, learning-rate factors, frozen layers, weights with another class count."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gangline.collectives.context import cpu
from gangline.models import zoo
from gangline.models.module import Module
from gangline.models.zoo.transfer import (
    freeze_until,
    learning_rate_factors,
    pretrained,
    replace_last_layer,
    scale_batch,
)

NEW = ["fc2.weight", "fc2.bias"]


def small(**options: Any) -> nn.Sequential:
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


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("classes", [3, 5])
def test_the_last_layer_is_replaced_even_by_one_of_as_many_classes(classes: int) -> None:
    network = small()
    before = state(network)
    assert replace_last_layer(network, classes) == NEW
    after = state(network)
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
    network = small(bias=False).eval().to(torch.bfloat16)
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
    source = state(zoo.create("mlp", 7))
    path = tmp_path / "weights.safetensors"
    save_file({f"module.{name}": value for name, value in source.items()}, path)
    network, new = pretrained("mlp", path, classes)
    assert new == (["fc3.weight", "fc3.bias"] if classes == 5 else [])
    assert network(torch.zeros(2, 784)).shape == (2, classes or 7)
    for name, value in network.state_dict().items():
        assert (value.shape == source[name].shape and torch.equal(value, source[name])) == (name not in new)


def test_layers_before_the_named_one_are_fixed() -> None:
    assert freeze_until(small(), "conv") == []
    assert freeze_until(small(), "fc1") == ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    assert freeze_until(small(), "tanh")[4:] == ["fc1.weight", "fc1.bias"]


def test_layers_of_nested_networks_have_their_place_in_the_whole() -> None:
    with torch.device("meta"):
        alexnet, resnet = zoo.create("alexnet"), zoo.create("resnet18")
    assert freeze_until(alexnet, "classifier") == [n for n, _ in alexnet.named_parameters() if n.startswith("features")]
    assert freeze_until(alexnet, "classifier.4")[-2:] == ["classifier.1.weight", "classifier.1.bias"]
    names = [name for name, _ in resnet.named_parameters()]
    assert freeze_until(resnet, "layer2.1.conv1") == names[: names.index("layer2.1.conv1.weight")]
    assert freeze_until(resnet, "fc") == names[:-2]


def test_factors_are_10_and_20_for_the_new_layer() -> None:
    network = small()
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
    network = small()
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
    return partial(learning_rate_factors, small(), **{"new": NEW, **options})


REFUSED: list[Any] = [
    *((partial(freeze_until, small(), name), ValueError, rf"no layer '{name}'.*'fc2'") for name in ("fc3", "")),
    (last_of(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())), ValueError, "Sequential has neither a linear layer"),
    (last_of(nn.Linear(2, 2)), ValueError, "the network is a single Linear"),
    (last_of(tied()), ValueError, r"shared under the names \['0.weight', '1.weight'\]"),
    (last_of(nn.Sequential(nn.LazyLinear(2))), ValueError, "layer '0' has no shape yet"),
    (last_of(small(), 0), ValueError, "num_classes is 0; expected 1 or more"),
    (last_of(small(), 2.0), TypeError, "num_classes is 2.0; expected an int"),
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
    for call, error, message in REFUSED:
        with pytest.raises(error, match=message):
            call()

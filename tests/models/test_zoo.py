"""Networks by name, and filling them from files."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import same_bits
from safetensors.torch import save_file
from torch import nn

from gangline.models import zoo
from gangline.models.checkpoint.checkpoint import load_weights
from gangline.models.zoo import registry


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


class RunsCode:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


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

"""Networks and data of the user's own: import, arguments and training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Run
from torch import nn

from gangline.models import import_by_name, zoo
from gangline.models.data.datasets import Splits

NETS = """\
import torch

def build(num_classes=10, hidden=4):
    return torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Linear(hidden, num_classes))

build.image_shape = (1, 4, 5)

def fixed():
    return torch.nn.Linear(3, 7)

def anything(**options):
    return torch.nn.Linear(3, options["num_classes"], bias=options.get("bias", True))

def needs(depth, num_classes=10):
    return torch.nn.Linear(depth, num_classes)

def odd():
    return "a network"

def breaks(num_classes):
    number = num_classes
    return number / 0

class Net(torch.nn.Linear):
    image_shape = [3, 8, 8]

    def __init__(self, num_classes):
        super().__init__(3, num_classes)

class Shelf:
    @staticmethod
    def build(num_classes):
        return torch.nn.Linear(3, num_classes)

def flat():
    return torch.nn.Linear(3, 2)

flat.image_shape = 784
LIMIT = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a user's package in the current folder; unload its modules after the test."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(NETS)
    (package / "broken.py").write_text("import os\nvalue = undefined_name\n")
    (package / "unready.py").write_text("import own_missing_thing\n")
    (package / "wrong.py").write_text("def build(:\n    pass\n")
    (tmp_path / "single.py").write_text("def build():\n    import torch\n    return torch.nn.Linear(1, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("own_package", "single", "own_data", "torchvision"):
            del sys.modules[name]


def write_data(text: str) -> None:
    sys.modules.pop("own_data", None)
    Path("own_data.py").write_text(f"import torch\n{text}")


def test_num_classes_options_and_weights_reach_a_builder_that_has_these_parameters(tmp_path: Path) -> None:
    for name, outputs in (("build", 5), ("anything", 5), ("Net", 5), ("Shelf.build", 5), ("fixed", 7)):
        network = zoo.create(f"own_package.nets:{name}", num_classes=5)
        assert network(torch.zeros(2, 3)).shape == (2, outputs)
    assert zoo.create("own_package.nets:build", 5, hidden=9)[0].out_features == 9
    assert zoo.create("own_package.nets:anything", 5, bias=False).bias is None
    weights = nn.Linear(3, 7).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    network = zoo.create("own_package.nets:fixed", weights=tmp_path / "weights.pth")
    assert torch.equal(network.weight, weights["weight"])
    # Without num_classes the builder's default is used.
    assert zoo.create("own_package.nets:build", num_classes=None)[1].out_features == 10
    assert zoo.create("mlp", num_classes=None)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_image_shape_is_an_attribute_of_the_builder() -> None:
    assert zoo.find("own_package.nets:build").image_shape == (1, 4, 5)
    assert zoo.find("own_package.nets:Net").image_shape == (3, 8, 8)
    entry = zoo.find("own_package.nets:fixed")
    assert entry.known_image_shape is None
    with pytest.raises(ValueError, match=r"'own_package\.nets:fixed' does not define its image shape; give --image"):
        _ = entry.image_shape
    with pytest.raises(ValueError, match=r"nets:flat' has image_shape 784; expected \(channels, height, width\)"):
        zoo.find("own_package.nets:flat")


def test_networks_of_torchvision_are_found_by_their_names() -> None:
    Path("torchvision").mkdir()
    Path("torchvision/__init__.py").write_text("")
    builder = "def small(*, weights=None, **options):\n    return torch.nn.Linear(3, options['num_classes'])\n"
    Path("torchvision/models.py").write_text(f"import torch\n{builder}")
    assert zoo.create("torchvision:small", 6).out_features == 6
    assert zoo.find("torchvision:small").image_shape == (3, 224, 224)
    with pytest.raises(ValueError, match=r"module 'torchvision.models' has no attribute 'smal'"):
        zoo.create("torchvision:smal")


UNKNOWN: list[Any] = [
    ("nowhere.nets:build", "No module named 'nowhere'; expected a name in .* or on Python's path$"),
    ("own_pakage.nets:build", "No module named 'own_pakage'"),
    ("own_package.net:build", "No module named 'own_package.net'"),
    ("single.nets:build", "'single' is not a package"),
    ("own_package.nets:buidl", "module 'own_package.nets' has no attribute 'buidl'"),
    ("own_package.nets:Shelf.make", "type object 'Shelf' has no attribute 'make'"),
    ("own_package.nets:LIMIT", "is a int; expected a function or a class"),
    ("own_package.nets:needs", "missing a required argument: 'depth'; gangline passes num_classes"),
    ("own_package.nets:odd", "returned a str; expected a torch.nn.Module"),
    ("own_package/nets.py:build", "is not a name; expected package.module:attribute"),
    ("own_package.nets:", "is not a name"),
    ("nets", r"'nets' is unknown; .*'lenet'.*or package\.module:builder"),
]


def test_an_unknown_name_is_refused() -> None:
    for name, message in UNKNOWN:
        with pytest.raises(ValueError, match=message) as caught:
            zoo.create(name)
        assert repr(name) in str(caught.value)
    with pytest.raises(ValueError, match=r"takes \(num_classes=10, hidden=4\): got an unexpected .* 'depth'"):
        zoo.create("own_package.nets:build", depth=3)


def test_an_error_in_user_code_names_its_line() -> None:
    for name, message in (
        ("nets:breaks", r"failed: ZeroDivisionError: division by zero \(.*nets\.py, line 22\)"),
        ("broken:build", r"could not be imported: NameError: name 'undefined_name' is not .*broken\.py, line 2\)"),
        ("unready:build", r"could not be imported: .*No module named 'own_missing_thing' \(.*unready\.py, line 1\)"),
        ("wrong:build", r"could not be imported: SyntaxError: .*wrong\.py, line 1\)"),
    ):
        with pytest.raises(RuntimeError, match=message) as caught:
            zoo.create(f"own_package.{name}")
        assert caught.value.__cause__ is not None
    assert sys.path.count(str(Path.cwd())) == 1  # the current folder is searched once, and first
    assert sys.path[0] == str(Path.cwd())


ARRAYS = "pair = torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)\n"


def made(image_shape: tuple[int, int, int] | None = (1, 2, 3)) -> Splits:
    return import_by_name.make_data("own_data:make", image_shape, torch.float64, 7)


def test_a_data_function_gets_the_arguments_that_it_has_parameters_for() -> None:
    for signature, told in (
        ("", {}),
        ("seed", {"seed": 7}),
        ("image_shape, dtype, seed=0", {"image_shape": (1, 2, 3), "dtype": torch.float64, "seed": 7}),
        ("**options", {"image_shape": (1, 2, 3), "dtype": torch.float64, "seed": 7}),
        ("path='here', *, dtype", {"path": "here", "dtype": torch.float64}),
    ):
        write_data(f"{ARRAYS}def make({signature}):\n    told = dict(locals())\n    return (told, pair), pair, 4\n")
        train, held_out, classes = made()
        assert train[0].get("options", train[0]) == told
        assert held_out[1].shape == (6,)
        assert classes == 4


def test_every_way_to_return_data() -> None:
    for returned, classes in (("Splits(pair, [pair], 3)", 3), ("(pair, pair, None)", None), ("(pair, pair)", None)):
        write_data(f"from gangline.models.data.datasets import Splits\n{ARRAYS}def make():\n    return {returned}\n")
        data = made()
        assert isinstance(data, Splits)
        assert data.num_classes == classes
        assert data.train[0].shape == (6, 3)


def test_an_unknown_image_shape_is_an_error_only_for_functions_that_need_it() -> None:
    write_data(f"{ARRAYS}def make(image_shape=(1, 8, 8)):\n    return pair, pair, image_shape[1]\n")
    assert made(None).num_classes == 8
    assert made((1, 2, 3)).num_classes == 2
    write_data(f"{ARRAYS}def make(image_shape):\n    return pair, pair, 2\n")
    with pytest.raises(ValueError, match="takes image_shape, and the network does not define it; give --image-shape"):
        made(None)


def test_invalid_data_are_refused() -> None:
    for returned, message in (
        ("pair", "returned a Tensor as train data; expected .data, labels., a Dataset or batches"),
        ("pair, None", "returned a NoneType as validation data"),
        ("pair, pair, 3, 4", "returned a tuple of 4; expected .train, validation, number of classes."),
        ("[pair, pair]", "returned a list; expected"),
        ("pair, pair, 0", "returned 0 as the number of classes; expected an int above 0 or None"),
    ):
        write_data(f"{ARRAYS}def make():\n    return {returned}\n")
        with pytest.raises(ValueError, match=message):
            made()


def test_a_function_that_needs_more_or_fails_is_an_error() -> None:
    write_data("def make(path, seed):\n    pass\n")
    with pytest.raises(ValueError, match="missing a required argument: 'path'; gangline passes seed, and other"):
        made()
    write_data("def make():\n    open('nowhere.csv')\n")
    with pytest.raises(RuntimeError, match=r"FileNotFoundError: .*nowhere\.csv' \(.*own_data\.py, line 3\)"):
        made()


COMMAND = """\
import torch

def build(num_classes=10):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, num_classes))

def seven():
    return small(7)

def small(num_classes=3):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, num_classes))

small.image_shape = (1, 4, 4)

def bare(num_classes):
    return small(num_classes)

def pair(count, highest):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(count, 16, generator=generator)
    return data, data[:, : highest + 1].argmax(1)

def make():
    return pair(200, 2), pair(50, 2), 3

def beyond():
    return pair(40, 2), pair(40, 3), 3

def loaders():
    sets = [torch.utils.data.TensorDataset(*pair(count, 2)) for count in (200, 50)]
    return tuple(torch.utils.data.DataLoader(one, batch_size=20) for one in sets)
"""


def command(run: Run, network: str, dataset: str, *flags: str, code: int = 0) -> tuple[str, str]:
    """Run `gangline train` on a network and data of "own_package.command"; return stdout and stderr."""
    Path("own_package/command.py").write_text(COMMAND)
    names = [name if name in ("mlp", "digits") else f"own_package.command:{name}" for name in (network, dataset)]
    return run("train", "--network", names[0], "--dataset", names[1], "--cpus", "2", *flags, code=code)


@pytest.mark.parametrize(
    ("network", "dataset", "flags"),
    [
        ("small", "make", ["--num-epochs", "8"]),
        ("small", "loaders", ["--num-epochs", "8"]),
        ("build", "digits", ["--num-epochs", "3", "--image-shape", "1,6,6"]),
    ],
)
def test_the_command_trains_them(network: str, dataset: str, flags: list[str], run: Run) -> None:
    out, _ = command(run, network, dataset, *flags)
    assert float(out.removeprefix("Validation-accuracy=")) > 0.6


def test_the_command_refuses_mismatched_data_before_training(run: Run) -> None:
    for network, dataset, message in (
        ("seven", "make", "the network returns 7 values per sample, but the data have 3 classes"),
        ("mlp", "make", "the network does not accept a batch of one sample, (1, 16) of torch.float32"),
        ("bare", "loaders", "missing a required argument: 'num_classes'; gangline passes no arguments, and other"),
        ("small", "beyond", "of the held-out data is not a class; expected 0 to 2"),
    ):
        out, err = command(run, network, dataset, code=2)
        assert out == ""
        assert err.splitlines()[-1].startswith("gangline: ")
        assert message in err
        assert "Epoch[" not in err

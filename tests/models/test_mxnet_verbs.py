"""MXNet compatibility: methods and arguments of MXNet's Module, and the lines that fit logs."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import labelled, same_bits
from torch import nn

from gangline import Module, cpu
from gangline.callback import do_checkpoint
from gangline.models.metrics.metric import create as create_metric

CONTEXTS = [cpu(0), cpu(1)]


@dataclass
class DataBatch:
    """Batch as MXNet has it: lists of arrays."""

    data: list[torch.Tensor]
    label: list[torch.Tensor] | None = None


def classifier() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 3)


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled(samples, 4, 3)


def module_of(network: nn.Module | None = None) -> Module:
    return Module(network or classifier(), nn.CrossEntropyLoss(), CONTEXTS)


def test_a_data_batch_equals_its_data_and_label() -> None:
    data, label = batch()
    found = []
    for arguments in ((data, label), (DataBatch([data], [label]),)):
        with module_of() as module:
            module.init_optimizer("local", "sgd", {"lr": 0.1})
            module.forward(*arguments, is_train=True)
            module.backward()
            module.update()
            module.forward_backward(*arguments)
            module.update()
            module.forward_backward_update(*arguments)
            found.append(module.get_params())
    assert same_bits(*found)


def test_a_data_batch_without_labels_and_one_of_several_arrays() -> None:
    data, _ = batch()
    with module_of() as module:
        for label in (None, []):
            module.forward(DataBatch([data], label), is_train=False)
            assert torch.allclose(module.get_outputs(), classifier()(data))
    with Module(nn.Bilinear(4, 4, 1), context=CONTEXTS) as module:
        module.forward(DataBatch([data, data]), is_train=False)
        assert module.get_outputs().shape == (8, 1)


def test_update_metric_counts_the_last_outputs() -> None:
    data, label = batch(9)
    expected = float((classifier()(data).argmax(1) == label).double().mean())
    with module_of() as module:
        metric = create_metric("acc", module.loss.loss)
        for part in (slice(0, 5), slice(5, 9)):
            module.forward(data[part], is_train=False)
            module.update_metric(metric, [label[part]])
    assert metric.get_name_value() == [("accuracy", pytest.approx(expected))]


def test_saved_params_load_into_another_module_and_into_plain_torch(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    with module_of() as module:
        module.init_params("xavier")
        with pytest.raises(ValueError, match=r"net\.params; expected a name that ends in \.safetensors"):
            module.save_params(tmp_path / "net.params")
        module.save_params(path)
        params = module.get_params()
    with module_of(nn.Linear(4, 3)) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.0})
        module.load_params(path)
        module.forward_backward_update(*batch())  # a rate of 0: pull returns the store's weights
        assert same_bits(module.get_params(), params)
        torch.save(module.get_params(), tmp_path / "net.pth")
        module.load_params(tmp_path / "net.pth")


def test_fit_initializes_parameters() -> None:
    options: dict[str, Any] = {"num_epoch": 1, "batch_size": 4, "optimizer_params": {"lr": 0.0}}
    with module_of() as module:
        for initializer, force, weight in (("one", False, 1), ("zeros", False, 1), ("zeros", True, 0)):
            module.fit(batch(), initializer=initializer, force_init=force, **options)
            assert torch.equal(module.get_params()["weight"], torch.full((3, 4), float(weight)))
    bias = {"bias": torch.full((3,), 2.0)}
    with module_of() as module:
        with pytest.raises(RuntimeError, match=r"parameters \['weight'\] are missing"):
            module.fit(batch(), arg_params=bias, **options)
        module.fit(batch(), arg_params=bias, allow_missing=True, **options)
        assert torch.equal(module.get_params()["bias"], bias["bias"])
        assert torch.equal(module.get_params()["weight"], classifier().weight)


def test_parameters_and_buffers_may_be_given_apart() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    both = {name: torch.full_like(value, 7) for name, value in network.state_dict().items()}
    arg = {name: both.pop(name) for name in list(both) if "running" not in name and "num_" not in name}
    replace: Any
    for replace in (
        lambda module: module.set_params(arg, both),
        lambda module: module.init_params(None, arg, both),
        lambda module: module.fit(batch(), num_epoch=0, batch_size=4, arg_params=arg, aux_params=both),
    ):
        with module_of(copy.deepcopy(network)) as module:
            replace(module)
            assert all(torch.all(value == 7) for value in module.get_params().values())
    with module_of() as module, pytest.raises(TypeError, match="aux_params is True; expected tensors by name"):
        module.set_params(arg, True)  # type: ignore[arg-type]


def test_do_checkpoint_saves_the_module_that_is_fitted(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with module_of() as module:
        module.fit(batch(), num_epoch=4, batch_size=4, epoch_end_callback=do_checkpoint(prefix, 2))
        params = module.get_params()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-0002", "net-0004"]
    with Module.load(prefix, 4, network=nn.Linear(4, 3), context=cpu()) as loaded:
        assert same_bits(loaded.get_params(), params)
    with pytest.raises(RuntimeError, match=r"has no module; pass it to fit\(\)"):
        do_checkpoint(prefix)(0)


PLAIN_PROGRAM = """
import logging, sys
import torch
from gangline import Module, cpu
{setup}
data = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
with Module(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), cpu()) as module:
    module.fit(data, data, num_epoch=1, batch_size=2)
logger = logging.getLogger("gangline")
assert not logger.handlers
assert logger.level == logging.NOTSET
"""


LINES = ["Epoch[0] Train-accuracy", "Epoch[0] Time cost", "Epoch[0] Validation-accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "lines"), [("", LINES), ("logging.basicConfig(level=logging.WARNING)", [])])
def test_a_program_sees_the_lines_of_fit_on_stderr_unless_it_has_logging_of_its_own(
    setup: str, lines: list[str]
) -> None:
    program = PLAIN_PROGRAM.format(setup=setup)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [line.split("=")[0] for line in done.stderr.splitlines()] == lines

"""Monitor: outputs, weights and gradients by name; speed of reading data."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from measure import labelled, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gangline import Module, cpu
from gangline.models.data.sources import read_speed
from gangline.models.loop.monitor import Monitor

arrays = partial(labelled, 12, 4, 3)
network = partial(mlp, 4, 6, 3, seed=1, dtype=torch.float32)


class Noting(Monitor):
    """Monitor that keeps its results in place of logging them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rows: list[tuple[int, str, Any]] = []

    def toc_print(self) -> None:
        self.rows += self.toc()


def fitted(monitor: Monitor, **options: Any) -> nn.Module:
    with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(arrays(), num_epoch=1, batch_size=3, shuffle=False, eval_metric="loss", monitor=monitor, **options)
        return module.network


def test_the_values_are_those_of_a_plain_loop() -> None:
    monitor = Noting(1, stat_func=lambda tensor: tensor.double().sum().item(), sort=True)
    fitted(monitor, optimizer_params={"learning_rate": 0.1})
    net, found = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data, label = arrays()
    for step in range(4):
        optimizer.zero_grad()
        outputs = [data[3 * step : 3 * step + 3]]
        for layer in net:
            outputs.append(layer(outputs[-1]))
        nn.functional.cross_entropy(outputs[-1], label[3 * step : 3 * step + 3]).backward()
        optimizer.step()
        tensors = {f"{place}_output": output for place, output in enumerate(outputs[1:])}
        for name, parameter in net.named_parameters():
            tensors |= {name: parameter, f"{name}_grad": parameter.grad}
        found += [(step + 1, name, tensors[name].double().sum().item()) for name in sorted(tensors)]
    assert [row[:2] for row in monitor.rows] == [row[:2] for row in found]
    assert [row[2] for row in monitor.rows] == pytest.approx([row[2] for row in found], rel=1e-4, abs=1e-6)


def test_only_names_that_match_are_logged_and_the_hooks_go(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gangline")
    net: Any = fitted(Monitor(4, pattern=".*weight$"), optimizer_params={"learning_rate": 0.0})
    lines = [line.split() for line in caplog.messages if line.startswith("Batch:")]
    assert [line[:3] for line in lines] == [["Batch:", "1", "0.weight"], ["Batch:", "1", "2.weight"]]
    weights = [net[place].weight.detach() for place in (0, 2)]
    norms = [float(weight.norm() / weight.numel() ** 0.5) for weight in weights]  # as in MXNet
    assert [float(line[3]) for line in lines] == pytest.approx(norms, rel=1e-3)
    assert not any(layer._forward_hooks for layer in net.modules())


class Reads(TensorDataset):
    def __init__(self) -> None:
        super().__init__(*arrays())
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


def test_all_samples_are_read_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0] * 2)
    monkeypatch.setattr("gangline.models.data.sources.time.perf_counter", lambda: next(times))
    data = Reads()
    assert read_speed(data, batch_size=5, epochs=3) == 36 / 4
    assert data.count == 36
    assert read_speed(DataLoader(data, batch_size=5)) == 12 / 4


def test_invalid_values_are_refused() -> None:
    for function, arguments, message in (
        (Monitor, (0,), "interval is 0"),
        (Monitor, (1, None, "("), "not a regular"),
        (read_speed, (arrays(), 3, 0), "epochs is 0"),
        (read_speed, ([],), "no batches"),
        (read_speed, (arrays(),), "batch_size is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)

"""Compiled networks: names, weights and checkpoints are those of the network before torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from measure import same_bits
from torch import nn

from gangline import Module, Monitor, cpu, load_weights
from gangline.callback import Checkpoint

Network = Callable[[], nn.Module]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))


def whole() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def part() -> nn.Module:
    network = plain()
    network[0] = torch.compile(network[0], backend="eager")
    return network


def trained(make: Network, prefix: Path, num_epoch: int, resume: str | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data, label = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    with Module(make(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], [3, 1], fixed_param_names=["2.bias"]) as module:
        module.fit(
            (data, label),
            num_epoch=num_epoch,
            batch_size=8,
            kvstore="device",
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "lr_mult": {"2.weight": 2.0}},
            batch_end_callback=Checkpoint(module, prefix, period=2),
            monitor=Monitor(100),
            initializer="xavier",
            force_init=True,
            resume=resume,
        )
        return module.get_params()


@pytest.mark.parametrize("first", [plain, whole, part])
def test_a_run_goes_on_in_mid_epoch_with_the_network_compiled_or_not(first: Network, tmp_path: Path) -> None:
    expected = trained(plain, tmp_path / "plain", 2)
    for second in (plain, whole, part):
        prefix = tmp_path / first.__name__ / second.__name__
        trained(first, prefix, 1)
        found = trained(second, prefix, 2, resume="auto")
        assert list(found) == list(expected) == list(plain().state_dict())
        assert same_bits(found, expected)


def test_weights_of_either_load_into_either(tmp_path: Path) -> None:
    for source in (plain, whole, part):
        state = {name: torch.full_like(value, 5) for name, value in source().state_dict().items()}
        torch.save(state, tmp_path / "weights.pth")
        for make in (plain, whole, part):
            with Module(make(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
                module.set_params(state)
                module.save_params(tmp_path / "saved.safetensors")
            for path in (tmp_path / "weights.pth", tmp_path / "saved.safetensors"):
                network = make()
                load_weights(network, path)
                assert all(torch.all(value == 5) for value in network.state_dict().values())

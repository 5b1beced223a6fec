"""convert_sync_batchnorm in real torch.distributed jobs on CPUs, against one process over the whole batch."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from measure import distance, gangline_lines, labelled, plain_loop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, convert_sync_batchnorm, spawn
from gangline.models.balanced_batch import weighted
from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm
from tests.models.unequal_jobs import join

SHARES = [[9, 3, 2], [1, 6, 5], [5, 0, 7], [4, 4, 1]]
"""Samples of each rank in each batch."""


def plain() -> nn.Module:
    torch.manual_seed(4)
    layers = [
        nn.Conv2d(1, 4, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.BatchNorm2d(4, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(24, 6),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers).double()


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)).double()


def batch_of(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    data, label = labelled(samples, 12, 3, seed=seed, dtype=torch.float64)
    return data.view(samples, 1, 3, 4), label


def trained(comm: Communicator, path: str, backend: str, shares: list[list[int]]) -> float:
    join(comm, path, backend)
    model = convert_sync_batchnorm(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step, sizes in enumerate(shares):
        optimizer.zero_grad()
        start = sum(sizes[: comm.rank])
        data, label = (part[start : start + sizes[comm.rank]] for part in batch_of(sum(sizes), step))
        (nn.functional.cross_entropy(model(data), label, reduction="sum") / sum(sizes)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()
    batches = [batch_of(sum(sizes), step) for step, sizes in enumerate(shares)]
    return distance(model.state_dict(), plain_loop(plain(), batches, lr=0.02, momentum=0.9))


def test_float64_weights_and_statistics_after_20_steps_are_those_of_one_process(tmp_path: Path) -> None:
    assert max(spawn(trained, 3, str(tmp_path / "store"), "gangline", SHARES * 5, threads=1)) <= 1e-11


def balanced(comm: Communicator, path: str) -> list[tuple[list[int], list[str], float]]:
    join(comm, path, "gloo")
    found = []
    for synchronize in (True, False):
        made = convolutions()
        model = DistributedDataParallel(convert_sync_batchnorm(made) if synchronize else made)
        data = TensorDataset(*batch_of(38, 7))  # the last batch has 2 samples, fewer than ranks
        alone = convolutions()
        alone.load_state_dict(model.module.state_dict())
        sizes = []
        with gangline_lines(logging.WARNING) as lines:
            loader = gangline.balance(model, DataLoader(data, batch_size=4), loads=[3, 1, 1])
            for features, labels in loader:
                nn.functional.cross_entropy(model(features), labels).backward()
                sizes.append(loader.samples)
        for features, labels in DataLoader(data, batch_size=12):
            nn.functional.cross_entropy(alone(features), labels).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found.append((sizes, lines, max((own.grad - one.grad).abs().max().item() for own, one in pairs)))  # type: ignore[operator]
    dist.destroy_process_group()
    return found


def test_ddp_with_balance_and_loads_3_to_1_splits_each_batch_and_warns_of_layers_of_torch(tmp_path: Path) -> None:
    found, of_torch = zip(*spawn(balanced, 3, str(tmp_path / "store"), threads=1), strict=True)
    assert [sum(sizes) for sizes in zip(*(sizes for sizes, *_ in found), strict=True)] == [12, 12, 12, 2]
    assert max(off for *_, off in found) <= 1e-11, "gradients differ from those of one process"
    assert found[0][0][0] > 2 * found[1][0][0]
    assert min(sizes[-1] for sizes, *_ in found) == 0  # a repeated sample, which counts nothing
    assert [texts for _, texts, _ in found] == [[], [], []]
    (_, (text,), _), (_, others, _), _ = of_torch
    assert others == []
    assert "'module.1' and 1 more will take mean and variance from each rank's own share" in text
    assert "loads 3, 1, 1" in text
    assert text.endswith("call gangline.convert_sync_batchnorm(network) before the network is wrapped")


def test_a_gradient_of_weight_0_is_zero_whatever_it_holds() -> None:
    assert weighted(torch.tensor([torch.nan, torch.inf, 1.0]), 0.0).tolist() == [0.0, 0.0, 0.0]


def ill(comm: Communicator, path: str) -> list[str]:
    join(comm, path, "gloo")
    found = []
    layers = convert_sync_batchnorm(nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2)))
    with pytest.raises(RuntimeError, match="different layers") as raised:
        layers[comm.rank](torch.ones(3, 2))  # type: ignore[index]
    found.append(str(raised.value))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as one_value:
        layers[0](torch.ones(comm.rank, 2))  # type: ignore[index]
    found.append(str(one_value.value)[:40])
    layer = layers[0]  # type: ignore[index]
    half = layer(torch.full((4, 2), 3.0, dtype=torch.bfloat16) + comm.rank)
    found.append(f"{half.dtype} {layer.running_mean.tolist()}")
    layer.eval()
    if comm.rank == 0:  # alone: evaluation waits for nobody
        found.append(str(layer(torch.ones(1, 2)).shape))
    own = dist.new_group([comm.rank], use_local_synchronization=True)
    alone = convert_sync_batchnorm(nn.BatchNorm1d(1), own)
    alone(torch.tensor([[0.0], [2.0 + 2 * comm.rank]]))
    assert alone.running_mean == pytest.approx(0.1 + 0.1 * comm.rank)
    dist.destroy_process_group()
    return found


def test_ranks_in_different_layers_one_value_half_precision_evaluation_and_groups(tmp_path: Path) -> None:
    first, second = spawn(ill, 2, str(tmp_path / "store"), threads=1)
    assert first[:3] == second
    assert "rank 0: forward of number 0, rank 1: forward of number 1" in first[0]
    assert first[2].startswith("torch.bfloat16 [0.34999999")
    assert first[3] == "torch.Size([1, 2])"


def test_conversion_keeps_parameters_keys_hooks_and_shared_layers() -> None:
    shared = nn.BatchNorm1d(3)
    before = nn.Sequential(shared, nn.Linear(3, 3), shared, nn.SyncBatchNorm(3), nn.BatchNorm1d(3).eval())
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    keys, parameters = list(before.state_dict()), list(before.parameters())
    after = convert_sync_batchnorm(before)
    assert isinstance(after, nn.Sequential)
    assert after[0] is after[2]
    assert [type(layer) is DistributedBatchNorm for layer in after] == [True, False, True, True, True]
    assert [layer.training for layer in after] == [True, True, True, True, False]
    assert list(after.state_dict()) == keys
    assert all(mine is theirs for mine, theirs in zip(after.parameters(), parameters, strict=True))
    torchs = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    torchs.load_state_dict(after.state_dict())
    copy.deepcopy(after).load_state_dict(torchs.state_dict())
    data = torch.randn(5, 3)
    assert torch.equal(after.train()(data), torchs(data))  # without a process group
    assert calls == [1, 1]
    assert type(convert_sync_batchnorm(nn.BatchNorm2d(2))) is DistributedBatchNorm


def test_layers_that_cannot_be_converted_are_named() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return super().forward(data).relu()

    with pytest.raises(ValueError, match="layer '1' is a Own with a forward of its own"):
        convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), Own(3)))
    with pytest.raises(ValueError, match="layer '0' is a LazyBatchNorm1d without a shape"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def on_gpu(comm: Communicator, path: str) -> float:
    join(comm, path, "gloo")
    reference, layer = nn.BatchNorm1d(3), convert_sync_batchnorm(nn.BatchNorm1d(3)).cuda()
    generator = torch.Generator().manual_seed(1)
    data, gradient = torch.randn(2, 9, 3, generator=generator)
    whole = data.clone().requires_grad_()
    reference(whole).backward(gradient)
    part = slice(0, 7) if comm.rank == 0 else slice(7, 9)
    own = data[part].cuda().requires_grad_()
    layer(own).backward(gradient[part].cuda())
    assert whole.grad is not None
    assert own.grad is not None
    torch.testing.assert_close(own.grad.cpu(), whole.grad[part])
    found = distance(layer.cpu().state_dict(), reference.state_dict())
    dist.destroy_process_group()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_two_ranks_on_a_gpu_have_the_statistics_and_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    assert max(spawn(on_gpu, 2, str(tmp_path / "store"), threads=1)) <= 1e-5

"""Gathers of Lightning under the callback that balances, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainers import message, told

pytest.importorskip("lightning")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def gathers(folder: str) -> list[Any]:
    """Return the gathered rows of each step, and the weight that a loss over gathered rows trains."""
    import lightning.pytorch as pl

    from gangline.integrations.lightning import Balance

    found: list[Any] = []

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.layer.weight)

        def training_step(self, batch: Any, _: int) -> Any:
            rows = self.all_gather(batch[0])
            found.append([list(rows.shape[:1]), rows.flatten().tolist()])
            assert len(self.all_gather(torch.tensor(1.0))) == 2
            self.log("mean", batch[0].mean(), sync_dist=True, on_step=True, on_epoch=True)
            return self.all_gather(self.layer(batch[0]), sync_grads=True).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            found[-1].append(self.trainer.callback_metrics["mean_step"].item())

        def validation_step(self, batch: Any, _: int) -> None:
            assert self.all_gather(batch[0]).shape == (2, 2, 1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    numbers = TensorDataset(torch.arange(1.0, 18.0).reshape(-1, 1))
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder, num_sanity_val_steps=0,
        enable_model_summary=False, callbacks=[Balance([3, 1])], **plain,
    )  # fmt: skip
    network = Network()
    trainer.fit(network, DataLoader(numbers, 4), DataLoader(TensorDataset(torch.ones(4, 1)), 2))
    assert "all_gather" not in vars(trainer.strategy) or trainer.strategy.all_gather.__name__ == "all_gather"
    return [*found, trainer.callback_metrics["mean_epoch"].item(), network.layer.weight.item()]


def test_gathers_of_one_value_for_each_sample_return_the_global_batch(tmp_path: Path) -> None:
    first, second = told(gathers, tmp_path)
    assert first == second
    *steps, mean_of_epoch, trained = first
    assert mean_of_epoch == pytest.approx(9)
    weight = 1.0
    for shape, batch, mean in steps:
        assert shape == [1]
        assert mean == pytest.approx(sum(batch) / len(batch))
        weight -= 0.001 * 2 * weight * sum(x * x for x in batch) / len(batch)
    assert trained == pytest.approx(weight)
    assert [len(batch) for _, batch, _ in steps] == [8, 8, 1]
    assert sorted(x for _, batch, _ in steps for x in batch) == list(range(1, 18))


def evaluations(folder: str) -> list[Any]:
    """Return what validation logs, in a fit and alone, and the samples of each of its steps."""
    import lightning.pytorch as pl
    from torchmetrics import MeanMetric

    from gangline.integrations.lightning import Balance

    found: list[Any] = []

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.mean = MeanMetric()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            (x,) = batch
            found.append([len(x), self.all_gather(x).flatten().tolist()])
            self.mean.update(x)
            self.log("metric", self.mean, on_epoch=True)
            self.log("loss", x.square().mean(), on_epoch=True, sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    numbers = TensorDataset(torch.arange(1.0, 18.0).reshape(-1, 1))
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder, num_sanity_val_steps=1,
        enable_model_summary=False, val_check_interval=2, callbacks=[Balance([3, 1], evaluation=True)], **plain,
    )  # fmt: skip
    network = Network()
    trainer.fit(network, DataLoader(numbers, 4), DataLoader(numbers, 4))
    found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    trainer.validate(network, DataLoader(numbers, 4), verbose=False)
    found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    trainer.test(network, DataLoader(numbers, 4), verbose=False)
    found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    return found


def test_validation_counts_each_sample_once(tmp_path: Path) -> None:
    steps = [list(range(1, 9)), list(range(9, 16)), [16, 17]]
    logged = {"metric": 9.0, "loss": pytest.approx(sum(x * x for x in range(1, 18)) / 17)}
    for rank, found in enumerate(told(evaluations, tmp_path)):
        epoch = [[[6, 5, 1][step] if not rank else [2, 2, 1][step], rows] for step, rows in enumerate(steps)]
        assert found == [epoch[0], *epoch, logged, *epoch, logged, *epoch, logged]


def test_wrong_options_are_errors_of_the_callback() -> None:
    from gangline.integrations.lightning import Balance

    assert message(lambda: Balance(load=[3, 1])).startswith(
        "TypeError: Balance() has no option 'load'; expected loads, global_batch, count, loss_reduction, max_share,"
    )
    assert message(lambda: Balance(max_share=16)).startswith("TypeError: max_share is 16; expected a maximum")

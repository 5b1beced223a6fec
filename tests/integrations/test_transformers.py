"""A balanced Trainer of transformers: what it reports, gathers, accepts and says when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainers import Means, told, trainer_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def losses(folder: str) -> list[Any]:
    """Return for losses of each kind the final loss and the logged ones, if none or every second step is logged."""
    from gangline.integrations.transformers import balance

    found = []
    for uses_items in (False, True):
        for options in ({}, {"logging_steps": 2}):
            model = Means(uses_items)
            trainer = balance(trainer_of(folder, model, **options), loads=[3, 1])
            loss = trainer.train().training_loss
            found.append([loss, *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)])
            model.layer(torch.ones(1)).sum().backward()
            assert model.layer.weight.grad.item() == 1.0  # outside of training there are no weights
    return found


def test_reported_losses_are_means_over_the_global_batches(tmp_path: Path) -> None:
    batches = [4.5, 12.5, 19.5]  # 1 to 8, 9 to 16, 17 to 22
    final, logged = pytest.approx(sum(batches) / 3), pytest.approx(sum(batches[:2]) / 2)
    assert told(losses, tmp_path) == [[[final], [final, logged], [final], [final, logged]]] * 2


def gathers(folder: str) -> list[Any]:
    """Gather per-sample tensors in each step of a Trainer, and during its evaluation; return the sums of rows."""
    from accelerate.utils import operations
    from transformers import Trainer

    from gangline.integrations.transformers import balance

    found: list[Any] = []
    plain = operations._gpu_gather

    class Gathers(Trainer):  # type: ignore[misc, unused-ignore]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            rows = self.accelerator.gather_for_metrics({"losses": outputs["losses"], "means": loss.detach()})
            again = self.accelerator.gather(outputs["losses"].repeat(2, 1))
            found.append([rows["losses"].flatten().tolist(), len(rows["means"]), len(again)])
            return (loss, outputs) if return_outputs else loss

    options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}
    trainer = trainer_of(folder, kind=Gathers, size=17, **options)
    balance(trainer, loads=[3, 1]).train()
    assert operations._gpu_gather is plain
    return found


def test_gathers_of_one_value_for_each_sample_return_the_global_batch(tmp_path: Path) -> None:
    first, *others = [[float(x) for x in range(1, 9)], [float(x) for x in range(9, 17)], [17.0], [1.0, 2.0]]
    steps = [first, first, *others]  # the first step begins again when the kind of the loss is known
    assert told(gathers, tmp_path) == [[[rows, 2, 2 * len(rows)] for rows in steps]] * 2

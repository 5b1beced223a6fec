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

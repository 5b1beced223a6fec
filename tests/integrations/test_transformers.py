"""A balanced Trainer of transformers: what it reports, gathers, accepts and says when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.integrations.trainers import Means, message, told, trainer_of

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


def evaluations(folder: str, uses_items: bool) -> list[Any]:
    """Return the shares of each step, the predictions and the losses of evaluations before, in and after a training."""
    from transformers import EvalPrediction

    from gangline.integrations.transformers import balance

    shares: list[int] = []
    predictions: list[Any] = []

    class Shares(Means):
        def forward(self, x: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
            if not self.training:
                shares.append(len(x))
            return super().forward(x, labels, **options)

    def metrics(result: EvalPrediction) -> dict[str, float]:
        predictions.append(np.asarray(result.predictions).flatten().tolist())
        return {}

    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = balance(trainer_of(folder, Shares(uses_items), **options), loads=[3, 1], evaluation=True)
    trainer.eval_dataset, trainer.compute_metrics = trainer.train_dataset[:17], metrics
    losses = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    losses.append(trainer.predict(trainer.train_dataset[:9]).metrics["test_loss"])
    return [shares[not uses_items :], predictions, losses]  # the first step is run again to find the kind of the loss


@pytest.mark.parametrize("uses_items", [False, True])
def test_evaluation_counts_each_sample_once(uses_items: bool, tmp_path: Path) -> None:
    rows = [float(x) for x in range(1, 18)]
    for rank, found in enumerate(told(evaluations, tmp_path, uses_items)):
        shares, predictions, losses = found
        assert shares == [*[[6, 5, 1], [2, 2, 1]][rank] * 3, *[[5, 1], [2, 1]][rank]]
        assert predictions == [*[rows] * 3, rows[:9]]
        assert losses[0] == 9.0
        assert losses[-1] == 5.0
        assert set(losses[1:-1]) == {9.0}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"x": torch.ones(1), "labels": torch.zeros(1, dtype=torch.int64)}] * 8)


class Generates:
    def _generate_and_score_completions(self) -> None:
        pass


def refusals(folder: str, is_alone: bool) -> list[str]:
    """Return the errors of wrong options and arguments, all of them from balance()."""
    from transformers import Trainer

    from gangline.integrations.transformers import balance

    plain = trainer_of(folder)
    wrong: list[dict[str, Any]] = [{"count": len}, {"load": [3, 1]}, {"stream": "both"}, {"group": "world"}]
    wrong += [{"max_share": 16}]
    if not is_alone:
        wrong += [{"loads": [3, 1, 1]}, {"max_share": [16]}, {"max_share": [4, 3]}, {"stream": "replicated"}]
    texts = [message(lambda options=options: balance(plain, **options)) for options in wrong]
    assert type(plain) is Trainer
    generating = type("GRPOTrainer", (Generates, Trainer), {})
    streamed = {"data": Stream(), "max_steps": 1}
    split = {"accelerator_config": {"dispatch_batches": False}}
    refused = (
        trainer_of(folder, auto_find_batch_size=True),
        trainer_of(folder, kind=generating),
        trainer_of(folder, **streamed),
        trainer_of(folder, **streamed, **split),
    )
    texts += [message(lambda trainer=trainer: balance(trainer)) for trainer in refused]
    assert message(lambda: balance(trainer_of(folder, **streamed, **split), stream="replicated").train()) == "no error"
    return texts


OPTIONS = [
    "TypeError: balance() of a Trainer has no option 'count' (what a loss counts is known from the labels); expected "
    "loads, max_share, stream, group",
    "TypeError: balance() of a Trainer has no option 'load'; expected loads, max_share",
    "ValueError: stream is 'both'; expected 'sharded', 'replicated' or None",
    "TypeError: group is 'world'; expected a process group",
    "TypeError: max_share is 16; expected a maximum for each rank",
]
SIZES = [
    "ValueError: loads is [3, 1, 1]; expected a number above 0 for each of 2 ranks",
    "ValueError: max_share is [16]; expected a maximum number of samples for each of 2 ranks",
    "ValueError: max_share is [4, 3], together 7 samples; expected the global batch of 8",
    "ValueError: stream is 'replicated', but the list is not an IterableDataset",
]
TRAINERS = [
    "ValueError: auto_find_batch_size is True",
    "ValueError: GRPOTrainer generates completions",
    "ValueError: the Stream is an IterableDataset, whose batches rank 0 would cut to equal parts; write "
    'TrainingArguments(accelerator_config={"dispatch_batches": False}), and balance(trainer, stream="replicated")',
    "ValueError: stream is None, but the Stream is an IterableDataset; write balance(trainer, stream=",
]


@pytest.mark.parametrize(("size", "expected"), [(1, [*OPTIONS, *["no error"] * 4]), (2, [*OPTIONS, *SIZES, *TRAINERS])])
def test_wrong_options_and_trainers_are_errors_of_balance(size: int, expected: list[str], tmp_path: Path) -> None:
    for texts in told(refusals, tmp_path, size == 1, size=size):
        assert len(texts) == len(expected)
        for text, begin in zip(texts, expected, strict=True):
            assert text.startswith(begin)


def exhausted(folder: str) -> str:
    """Raise an out-of-memory error on rank 1 in its second step."""
    import os

    from gangline.integrations.transformers import balance

    class Hungry(Means):
        steps = 0

        def forward(self, x: Any, labels: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps > 2 and os.environ["RANK"] == "1":
                torch.empty(1 << 60)
            return super().forward(x, labels, **options)

    error = message(balance(trainer_of(folder, Hungry()), loads=[3, 1]).train)
    torch.distributed.destroy_process_group()
    return error


def test_all_ranks_say_that_one_ran_out_of_memory(tmp_path: Path) -> None:
    text = "Error: rank 1 ran out of memory with 2 samples; limit the samples of each rank, as by balance(trainer, "
    for found, kind in zip(told(exhausted, tmp_path), ("Runtime", "OutOfMemory"), strict=True):
        assert found.startswith(f"{kind}{text}max_share=[8, 1])")

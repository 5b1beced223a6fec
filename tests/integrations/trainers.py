"""Trainers of transformers in jobs of two ranks, whose losses are known numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gangline.launcher.job import free_ports
from tests.collectives.processes import Processes, Rank, join_group


def told(job: Callable[..., Any], tmp_path: Path, *arguments: Any, size: int = 2, limit: float = 100) -> list[Any]:
    """Run ``job(folder, *arguments)`` as ranks that accelerate finds in its environment; return what each returns."""
    place = (job.__module__, job.__name__, str(tmp_path), free_ports(1)[0])
    with Processes(run_rank, size, *place, *arguments, limit=limit) as processes:
        return processes.all_heard()


def run_rank(rank: Rank, module: str, name: str, folder: str, port: int, *arguments: Any) -> None:
    from importlib import import_module

    torch.set_num_threads(1)
    numbers = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    if rank.size > 1:
        join_group(rank, f"{folder}/group")
    rank.tell(getattr(import_module(module), name)(folder, *arguments))


class Means(nn.Module):
    """Returns the mean of w x as loss, or with num_items_in_batch its sum divided by that."""

    def __init__(self, uses_items: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.uses_items = uses_items

    def forward(self, x: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        losses = self.layer(x)
        if self.uses_items:
            return {"loss": losses.sum() / options["num_items_in_batch"], "losses": losses}
        return {"loss": losses.mean(), "losses": losses}


def trainer_of(
    folder: str, model: nn.Module | None = None, kind: Any = None, size: int = 22, data: Any = None, **options: Any
) -> Any:
    """Return a Trainer over samples x = 1, 2, ... in order, with batches of 4 and a learning rate of 0.

    It evaluates on the first two samples.
    """
    from transformers import Trainer, TrainingArguments

    numbers = torch.arange(1.0, size + 1.0).reshape(-1, 1)
    samples = [{"x": x, "labels": torch.zeros(1, dtype=torch.int64)} for x in numbers]
    fixed = {"num_train_epochs": 1, "learning_rate": 0.0, "train_sampling_strategy": "sequential"}
    settings = {"per_device_train_batch_size": 4, **fixed, **options}
    quiet = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(folder, **{**quiet, **settings})
    data = samples if data is None else data
    return (kind or Trainer)(model=model or Means(), args=arguments, train_dataset=data, eval_dataset=samples[:2])


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

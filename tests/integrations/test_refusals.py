"""Setups of accelerate, Lightning and transformers that cannot be combined with unequal batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from gangline.models.data.accelerate_loaders import unprepared
from tests.collectives.processes import Processes, Rank
from tests.integrations.trainers import message


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class Own(BatchSampler):
    pass


def prepared(loader: DataLoader[Any], **options: Any) -> Any:
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(loader, device=torch.device("cpu"), num_processes=2, process_index=1, **options)


def test_loaders_of_accelerate_that_share_batches_out_themselves_are_refused() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=r"DataLoaderDispatcher.*dispatch_batches=False"):
        unprepared(prepared(DataLoader(Stream(), 4), dispatch_batches=True, put_on_device=True))
    own = DataLoader(range(10), batch_sampler=Own(SequentialSampler(range(10)), 2, False))
    with pytest.raises(ValueError, match="split_batches=True with a Own"):
        unprepared(prepared(own, split_batches=True))


def refusals_of_trainers(rank: Rank, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from gangline.integrations.transformers import balance

    def trainer(**options: Any) -> Trainer:
        return Trainer(torch.nn.Linear(2, 1), TrainingArguments(folder, use_cpu=True, report_to="none", **options))

    own = trainer()
    assert balance(own) is own
    assert type(own) is Trainer  # one rank
    rank.tell(
        [
            message(lambda: balance(torch.nn.Linear(1, 1))),
            message(lambda: balance(trainer(average_tokens_across_devices=False))),
        ]
    )


@pytest.mark.slow
def test_trainers_that_normalize_on_their_own_are_refused(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    with Processes(refusals_of_trainers, 1, str(tmp_path)) as processes:
        [texts] = processes.all_heard()
    assert texts[0] == "TypeError: trainer is a Linear; expected a transformers.Trainer"
    assert texts[1].startswith("ValueError: average_tokens_across_devices is False")

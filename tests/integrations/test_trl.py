"""Trainers of trl under unequal shares: the weights of one process, or a refusal by name."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainers import message, told
from tests.models.measure import distance

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORDS = [f"w{index}" for index in range(30)]


def parts() -> tuple[Any, Any]:
    """Return a small causal language model in float64, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tokens = {"pad_token_id": 0, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_attention_heads=2)).double()
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def text(seed: int, length: int | None = None) -> str:
    numbers = torch.randint(0, len(WORDS), (length or 3 + seed % 5,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[number] for number in numbers)


def trained(folder: str, batch_size: int, loads: list[float] | None) -> list[Any]:
    """Train by preferences; return how far each weight moved, and the logged rewards."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from gangline.integrations.transformers import balance

    names = ("prompt", "chosen", "rejected")
    rows = [{name: text(3 * index + part) for part, name in enumerate(names)} for index in range(21)]
    model, tokenizer = parts()
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    arguments = DPOConfig(
        folder, per_device_train_batch_size=batch_size, num_train_epochs=1, logging_steps=1, learning_rate=1.0,
        optim="sgd", gradient_checkpointing=False, disable_tqdm=True, **options,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = DPOTrainer(model, deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer)
    before = [one.detach().clone() for one in model.parameters()]
    if loads:
        trainer = balance(trainer, loads=loads)
    trainer.train()
    logged = [entry["rewards/chosen"] for entry in trainer.state.log_history if "rewards/chosen" in entry]
    moved = [(one.detach() - begin).norm().item() for one, begin in zip(model.parameters(), before, strict=True)]
    return [*moved, *logged]


def test_training_by_preferences_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    [alone] = told(trained, tmp_path, 8, None, size=1)
    assert max(alone) > 0.01
    for found in told(trained, tmp_path, 4, [3, 1]):
        assert found == pytest.approx(alone, rel=1e-6, abs=1e-6)


def tuned(folder: str, batch_size: int, loads: list[float] | None, is_packed: bool) -> dict[str, list[float]]:
    """Train on texts of unequal length, two epochs, with a loss in float32; return the weights.

    Those of plain DistributedDataParallel are within 1e-7 of one process.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from gangline.integrations.transformers import balance

    model, tokenizer = parts()
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    arguments = SFTConfig(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=0.5, lr_scheduler_type="constant", optim="sgd", max_length=24, packing=is_packed,
        gradient_checkpointing=False, disable_tqdm=True, **options,
    )  # fmt: skip
    data = Dataset.from_list([{"text": text(index, 2 + 7 * index % 19)} for index in range(37)])
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    if loads:
        trainer = balance(trainer, loads=loads)
    trainer.train()
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_packed", [False, True])
def test_tuning_on_texts_cut_by_length_gives_the_weights_of_one_process(is_packed: bool, tmp_path: Path) -> None:
    [alone] = told(tuned, tmp_path, 8, None, is_packed, size=1)
    for found in told(tuned, tmp_path, 4, [3, 1], is_packed):
        assert distance(*({name: torch.tensor(each) for name, each in of.items()} for of in (found, alone))) <= 1e-6


def refused(folder: str) -> str:
    """Return the error for a trainer that generates completions; the loader's lists of texts cannot be counted."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from gangline.integrations.transformers import balance

    model, tokenizer = parts()
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    arguments = GRPOConfig(folder, per_device_train_batch_size=4, num_generations=4, **options)
    data = Dataset.from_list([{"prompt": text(index)} for index in range(8)])
    rewards = [lambda completions, **_: [float(len(one)) for one in completions]]
    trainer = GRPOTrainer(model, reward_funcs=rewards, args=arguments, train_dataset=data, processing_class=tokenizer)
    return message(lambda: balance(trainer, loads=[3, 1]))


def test_trainers_that_generate_completions_are_refused_by_name(tmp_path: Path) -> None:
    for found in told(refused, tmp_path):
        assert found.startswith("ValueError: GRPOTrainer generates completions and takes equal parts")

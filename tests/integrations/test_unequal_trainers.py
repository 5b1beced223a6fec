"""Trainers of other packages over texts of unequal length: the weights of one process on the same global batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import gangline
from tests.integrations.trainers import message, told, trainer_of
from tests.models.measure import distance, same_bits
from tests.models.unequal_jobs import Batches, cut, flat, gathered

pytestmark = pytest.mark.timeout(300)

SAMPLES, BATCH = 41, 4
LENGTHS = np.random.default_rng(3).lognormal(2, 1, SAMPLES).clip(2, 40).astype(int).tolist()
"""Number of tokens of each text."""
COSTS = list(range(SAMPLES))
"""Other lengths, by which the last texts are the longest ones."""


class Texts(list[Any]):
    """Random tokens, of which the first are no labels; they note which texts are read together."""

    def __init__(self, name: str = "input_ids", **columns: Sequence[Any]) -> None:
        """Give the tokens this name, and add columns."""
        self.read: Batches = []
        for number, length in enumerate(LENGTHS):
            tokens = torch.randint(1, 20, (length,), generator=torch.Generator().manual_seed(number)).tolist()
            labels = [-100] * (length // 4) + tokens[length // 4 :]
            self.append({name: tokens, "labels": labels, **{key: values[number] for key, values in columns.items()}})

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return samples, as a DataLoader reads them."""
        self.read.append(list(indices))
        return [self[index] for index in indices]


class Table(Texts):
    """Texts with columns, as a data set of Hugging Face has."""

    @property
    def column_names(self) -> list[str]:
        return list(super().__getitem__(0))

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def padded(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = [[torch.tensor(part) for part in list(sample.values())[:2]] for sample in samples]
    tokens = pad_sequence([row[0] for row in rows], batch_first=True)
    labels = pad_sequence([row[1] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}


def shifted(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad, and give the labels of the tokens before them too, which Trainer then counts."""
    batch = padded(samples)
    return {**batch, "shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def updates_of(read: Batches, steps: int, epochs: int = 2) -> list[Batches]:
    """Return the global batches of each update from those that the ranks read; each epoch reads each text once."""
    batches = [list(dict.fromkeys(chain(*parts))) for parts in zip(*gathered(read), strict=True)]  # a text may repeat
    size, updates = len(batches) // epochs, []
    for begin in range(0, len(batches), size):
        epoch = batches[begin : begin + size]
        assert sorted(flat(epoch)) == list(range(SAMPLES))
        updates += [epoch[first : first + steps] for first in range(0, size, steps)]
    return updates


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


# transformers: losses are means over the tokens of an update


def language_model(kind: str = "") -> Any:
    """Return a small Llama, with or without LoRA, or one in which nothing is computed in float32 if it is in float64.

    In float32 the factor of 3 that Trainer has for three ranks is rounded: Llama's norms and loss, and plain
    DistributedDataParallel, are then within 1e-7 of one process. A factor of 2 is exact.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    others = {"num_attention_heads": 2, "use_cache": False}
    if kind == "neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **others)).double()
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **others))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model.double()


def loss_in_float64(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """Return the mean over the tokens of an update; the models compute it in float32."""
    losses = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum")
    return losses / num_items_in_batch


def trainer_over(folder: str, model: Any, texts: Any, arguments: dict[str, Any], **options: Any) -> Any:
    from transformers import Trainer

    kind = partial(Trainer, optimizers=(sgd(model), None), **{"data_collator": padded, **options})
    fixed = {"num_train_epochs": 2, "learning_rate": 0.3, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    random = {"train_sampling_strategy": "random", "per_device_train_batch_size": BATCH}
    return trainer_of(folder, model, kind, data=texts, **{**fixed, **random, **arguments})


def of_transformers(
    folder: str, arguments: dict[str, Any], options: dict[str, Any], model: str = "", collator: str = "", loss: str = ""
) -> float:
    from transformers import DataCollatorWithFlattening

    from gangline.integrations.transformers import balance

    trained = language_model(model)
    alone, texts = deepcopy(trained), Texts()
    loss_of = {"compute_loss_func": loss_in_float64} if loss else {}
    collate = {"": padded, "shifted": shifted, "flattened": DataCollatorWithFlattening()}[collator]
    trainer = balance(trainer_over(folder, trained, texts, arguments, data_collator=collate, **loss_of), **options)
    trainer.train()
    optimizer = sgd(alone)
    for update in updates_of(texts.read, arguments.get("gradient_accumulation_steps", 1)):
        batch = padded([texts[number] for number in flat(update)])
        items = batch["labels"][:, 1:].ne(-100).sum()
        if loss:
            loss_in_float64(alone(**batch), batch["labels"], items).backward()
        else:
            alone(**batch, num_items_in_batch=items).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(trained.state_dict(), alone.state_dict())


# accelerate and Lightning: losses are means of the batches' means over samples, or over the tokens of an update


def valid(batch: dict[str, Tensor]) -> Tensor:
    return batch["labels"][:, 1:].ne(-100).sum()


def mean_of(losses: Tensor, batch: dict[str, Tensor], loss: str) -> Tensor:
    return losses.sum() / valid(batch).clamp(min=1) if loss == "counted" else losses.sum(1).mean()


class Net(nn.Module):
    """Returns the loss of each token, [samples, tokens - 1]; 0 where there is no label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.output = nn.Embedding(20, 8, dtype=torch.float64), nn.Linear(8, 20).double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        seen = torch.tanh(self.embedding(batch["input_ids"]).cumsum(1) / 4)
        logits = self.output(seen[:, :-1]).transpose(1, 2)
        return nn.functional.cross_entropy(logits, batch["labels"][:, 1:], reduction="none")


def distance_from_one_process(trained: nn.Module, texts: Texts, steps: int, loss: str = "") -> float:
    """Train alone on what the ranks have read; with a loss of tokens, an update's loss is the mean over its tokens."""
    alone = Net()
    optimizer = sgd(alone)
    for update in updates_of(texts.read, steps):
        batches = [padded([texts[number] for number in batch]) for batch in update]
        items = sum(int(valid(batch)) for batch in batches) / (len(update) / steps if loss == "counted" else 1)
        for batch in batches:
            losses = alone(batch)
            (losses.sum() / items if loss else losses.sum(1).mean() / steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    return distance(trained.state_dict(), alone.state_dict())


def of_accelerate(folder: str, arguments: dict[str, Any], options: dict[str, Any], loss: str = "") -> float:
    """Train as accelerate's examples of gradient accumulation do; with a loss of tokens as that of language models."""
    del folder
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **arguments)
    texts, net, steps = Texts(), Net(), arguments["gradient_accumulation_steps"]
    plain: Any = DataLoader(texts, BATCH, shuffle=True, collate_fn=padded)
    model, optimizer, prepared = accelerator.prepare(net, sgd(net), plain)
    with gangline.balance(model, prepared, lengths=LENGTHS, **options) as loader:
        for _ in range(2):
            batches = iter(loader)
            if loss != "tokens":
                for batch in batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(mean_of(model(batch), batch, loss))
                        optimizer.step()
                        optimizer.zero_grad()
            while update := list(islice(batches, steps)):
                own = sum(map(valid, update))
                scale = steps * accelerator.num_processes / accelerator.gather(own).sum().double()
                for batch in update:
                    with nullcontext() if batch is update[-1] else model.no_sync():
                        accelerator.backward(model(batch).sum() * scale)
                optimizer.step()
                optimizer.zero_grad()
    return distance_from_one_process(net, texts, steps, loss)


def of_lightning(folder: str, arguments: dict[str, Any], options: dict[str, Any], loss: str = "") -> float:
    network, texts = lightning_module(loss), Texts()
    fit_by_lightning(folder, network, DataLoader(texts, BATCH, shuffle=True, collate_fn=padded), arguments, options)
    return distance_from_one_process(network.net, texts, arguments["accumulate_grad_batches"], loss)


def lightning_module(loss: str = "") -> Any:
    import lightning.pytorch as pl

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return mean_of(self.net(batch), batch, loss)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    return Network()


def fit_by_lightning(
    folder: str, network: Any, loader: Any, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    import lightning.pytorch as pl

    from gangline.integrations.lightning import Balance

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fixed = {"max_epochs": 2, "precision": "64-true", "enable_model_summary": False, **quiet}
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, default_root_dir=folder,
        callbacks=[Balance(lengths=LENGTHS, **options)], **{**fixed, **arguments},
    )  # fmt: skip
    trainer.fit(network, loader)


Case = tuple[str, int, dict[str, Any]]


def case(package: str, steps: int, loads: Any, *, ranks: int = 2, arguments: Any = None, **others: Any) -> Case:
    name = "accumulate_grad_batches" if package == "lightning" else "gradient_accumulation_steps"
    given = {key: others.pop(key) for key in ("model", "collator", "loss") if key in others}
    given["arguments"] = {name: steps, **(arguments or {})}
    return package, ranks, {"options": {"loads": loads, **others}, **given}


CASES: dict[str, Case] = {
    f"{package} {loads} {steps}": case(package, steps, loads)
    for package, all_steps in (("transformers", (1, 2, 4)), ("accelerate", (1, 2, 4)), ("lightning", (1, 2)))
    for loads in ([1, 1], [3, 1])
    for steps in all_steps
}
CASES |= {
    "transformers measured": case("transformers", 2, "auto"),
    "transformers pool": case("transformers", 2, [3, 1], pool=3),
    "transformers lora": case("transformers", 2, [3, 1], model="lora"),
    "transformers flattened": case("transformers", 2, [3, 1], collator="flattened"),
    "transformers shift_labels": case("transformers", 1, [3, 1], collator="shifted"),
    "transformers batch_rebalance": case(
        "transformers", 2, [3, 1], arguments={"train_sampling_strategy": "batch_rebalance"}
    ),
    "transformers group_by_length": case(
        "transformers",
        2,
        [3, 1],
        arguments={"train_sampling_strategy": "group_by_length", "gradient_checkpointing": True},
    ),
    "transformers three ranks": case("transformers", 2, [3, 1, 1], ranks=3, model="neox", loss="float64"),
    "accelerate tokens 1": case("accelerate", 1, [3, 1], loss="tokens", loss_reduction="normalized"),
    "accelerate tokens 4": case("accelerate", 4, [3, 1], loss="tokens", loss_reduction="normalized"),
    **{
        f"{package} tokens of updates, {loads}": case(package, 4, loads, loss="counted", count=valid, accumulate=4)
        for package in ("accelerate", "lightning")
        for loads in ([1, 1], [3, 1])
    },
}
TRAIN: dict[str, Callable[..., float]] = {
    "transformers": of_transformers, "accelerate": of_accelerate, "lightning": of_lightning,
}  # fmt: skip


def job(folder: str, package: str, ranks: int) -> dict[str, Any]:
    """Run the cases of a package in the ranks of one job; those whose package is not installed are left out."""
    found: dict[str, Any] = {}
    for name, (of_package, of_ranks, options) in CASES.items():
        if (of_package, of_ranks) == (package, ranks) and (name != "transformers lora" or has("peft")):
            found[name] = TRAIN[package](f"{folder}/{name}", **options)
    if ranks == 2:
        found["of means"] = of_means(folder, package)
    if (package, ranks) == ("transformers", 2):
        found |= {
            "shares": shares(folder),
            "wrong": wrong(folder),
            "own streams": own_streams(folder),
            "resumed": resumed(folder),
        }
    return found


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


Results = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of each rank; a job runs once."""
    known: dict[Any, Any] = {}

    def of(package: str = "transformers", ranks: int = 2) -> list[dict[str, Any]]:
        pytest.importorskip(package)
        if (package, ranks) not in known:
            known[package, ranks] = None  # in case it fails
            known[package, ranks] = told(job, tmp_path_factory.mktemp(package), package, ranks, size=ranks, limit=280)
        assert known[package, ranks] is not None, "the job has failed in the test before"
        return known[package, ranks]

    return of


def rows(packages: dict[str, str]) -> list[Any]:
    """Return parameters; only a job of accelerate takes less than 10 seconds."""
    return [pytest.param(key, marks=() if it == "accelerate" else pytest.mark.slow) for key, it in packages.items()]


@pytest.mark.parametrize("name", rows({name: package for name, (package, *_) in CASES.items()}))
def test_weights_are_those_of_one_process(name: str, results: Results) -> None:
    if name == "transformers lora":
        pytest.importorskip("peft")
    package, ranks, _ = CASES[name]
    assert max(each[name] for each in results(package, ranks)) <= 1e-11


# What transformers' Trainer knows of lengths


def reads(
    folder: str, texts: Texts, arguments: dict[str, Any] | None = None, model: Any = None, **options: Any
) -> list[Batches]:
    """Train an epoch; return which samples each rank read in each step."""
    from gangline.integrations.transformers import balance

    given = {"num_train_epochs": 1, **(arguments or {})}
    processor = SimpleNamespace(model_input_names=["tokens"]) if "tokens" in texts[0] else None
    trainer = trainer_over(folder, model or language_model(), texts, given, processing_class=processor)
    balance(trainer, loads=[1, 1], **options).train()
    return list(map(list, zip(*gathered(texts.read), strict=True)))


def shares(folder: str) -> dict[str, list[Batches]]:
    keep = {"remove_unused_columns": False}
    return {
        "list": reads(folder, Texts()),
        "input": reads(folder, Table()),
        "first input of the processor": reads(folder, Table("tokens"), keep),
        "column": reads(folder, Table(length=COSTS)),
        "named column": reads(folder, Table(cost=COSTS), {"length_column_name": "cost"}),
        "given": reads(folder, Table(length=LENGTHS), lengths=COSTS),
        "a function": reads(folder, Texts(), lengths=COSTS.__getitem__),
        "memory and lengths": reads(folder, Texts(), lengths=COSTS, max_share=[10_000, 10_000]),
        "lengths=None": reads(folder, Texts(), lengths=None),
        "memory": reads(folder, Texts(), max_share=[3, 8]),
    }


def own_streams(folder: str) -> str:
    """Accumulate batches of a budget from a stream of each rank; return the error."""
    from gangline.integrations.transformers import balance

    arguments = {"max_steps": 2, "gradient_accumulation_steps": 2, "accelerator_config": {"dispatch_batches": False}}
    trainer = trainer_over(folder, language_model(), Stream(), arguments)
    options: dict[str, Any] = {"stream": "sharded", "budget": 100, "lengths": lambda sample: len(sample["input_ids"])}
    return message(lambda: balance(trainer, **options).train())


@pytest.mark.slow
def test_batches_of_own_streams_are_accumulated_by_a_trainer(results: Results) -> None:
    assert [found["own streams"] for found in results()] == ["no error"] * 2


OF_TOKENS = ("list", "input", "first input of the processor")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_TOKENS, "column", "named column", "given", "a function", "memory and lengths"])
def test_lengths_are_those_of_the_data_set_or_given_ones(name: str, results: Results) -> None:
    steps = results()[0]["shares"][name]
    assert {n for step in steps for part in step for n in part} == set(range(SAMPLES))
    lengths = LENGTHS if name in OF_TOKENS else COSTS
    for longer, shorter in steps:
        assert min(lengths[n] for n in longer) >= max(lengths[n] for n in shorter)
    assert any(len(longer) < len(shorter) for longer, shorter in steps)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [("lengths=None", 4), ("memory", 3)])
def test_without_lengths_batches_are_cut_by_number(name: str, first: int, results: Results) -> None:
    sizes = [[len(part) for part in step] for step in results()[0]["shares"][name]]
    assert sizes == [[first, 2 * BATCH - first]] * (SAMPLES // (2 * BATCH)) + [[1, 1]]  # the last text is repeated


class TokenMean(Net):
    """Returns the mean over the tokens of a batch, and does not accept num_items_in_batch."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        del attention_mask
        losses = super().forward({"input_ids": input_ids, "labels": labels})
        return {"loss": losses.sum() / labels[:, 1:].ne(-100).sum()}


def of_means(folder: str, package: str) -> list[Batches]:
    """Accumulate means over tokens, in the order of the texts; return which of them each rank read in each step."""
    if package == "transformers":
        arguments = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
        return reads(folder, Texts(), arguments, TokenMean())
    texts = Texts()
    in_order = DistributedSampler(texts, 1, 0, shuffle=False)  # type: ignore[arg-type]  # Lightning keeps it
    plain: Any = DataLoader(texts, BATCH, sampler=in_order, collate_fn=padded)
    options: dict[str, Any] = {"loads": [1, 1], "count": lambda batch: batch["labels"][:, 1:].ne(-100).sum()}
    if package == "lightning":
        fit_by_lightning(folder, lightning_module(), plain, {"accumulate_grad_batches": 2, "max_epochs": 1}, options)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with gangline.balance(*accelerator.prepare(Net(), plain), lengths=LENGTHS, **options) as loader:
            assert len(list(loader)) == len(texts.read)
    return list(map(list, zip(*gathered(texts.read), strict=True)))


@pytest.mark.parametrize("package", rows({name: name for name in TRAIN}))
def test_batches_whose_means_over_tokens_are_accumulated_keep_their_texts(package: str, results: Results) -> None:
    steps = results(package)[0]["of means"]
    assert [sorted(set(flat(step))) for step in steps] == cut(range(SAMPLES), 2 * BATCH)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Texts())


WRONG: dict[str, tuple[Any, str]] = {
    "too few": ([1, 2], "ValueError: lengths has 2 numbers for the 41 samples of the data set"),
    "nan": ([float("nan"), *COSTS[1:]], "ValueError: the length of sample 0 is nan"),
    "a name": ("length", "TypeError: lengths is 'length'; expected one number for each sample"),
    "a number": (5, "TypeError: lengths is 5; expected one number for each sample"),
    "samples": ([[1, 2]] * SAMPLES, "TypeError: lengths[0] is of type list; expected a number"),
    "of a stream": (COSTS, "ValueError: lengths of a stream are those of its samples; expected a function"),
    "unknown": (None, "ValueError: train_sampling_strategy is 'batch_rebalance', whose place balance() takes, but"),
}


def wrong(folder: str) -> dict[str, str]:
    """Return the errors of balance() with wrong lengths."""
    from gangline.integrations.transformers import balance

    found = {}
    for name, (lengths, _) in WRONG.items():
        streamed = {"max_steps": 1, "accelerator_config": {"dispatch_batches": False}}
        rebalanced = {"train_sampling_strategy": "batch_rebalance"}
        arguments = {"of a stream": streamed, "unknown": rebalanced}.get(name, {})
        options = {"stream": "replicated"} if name == "of a stream" else {}
        trainer = trainer_over(folder, language_model(), Stream() if options else Texts(), arguments)
        found[name] = message(partial(balance, trainer, lengths=lengths, **options))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_lengths_are_errors_of_balance(name: str, results: Results) -> None:
    for found in results():
        assert found["wrong"][name].startswith(WRONG[name][1])


def resumed(folder: str) -> list[bool]:
    """Train, and again from the middle of either epoch, of 3 updates; return if the weights are the same."""
    from gangline.integrations.transformers import balance

    arguments = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    ends = []
    for checkpoint in (None, f"{folder}/resumed/checkpoint-2", f"{folder}/resumed/checkpoint-4"):
        model = language_model()
        trainer = balance(trainer_over(f"{folder}/resumed", model, Texts(), arguments), loads=[3, 1], pool=2)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 6
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    return [same_bits(end, ends[0]) for end in ends[1:]]


@pytest.mark.slow
def test_a_trainer_that_accumulates_resumes_within_an_epoch_with_the_same_bits(results: Results) -> None:
    assert [found["resumed"] for found in results()] == [[True, True]] * 2

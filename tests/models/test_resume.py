"""Resume: a run that was cut off ends with the same bits, or goes on with other contexts or workers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from measure import Cut, distance, labelled, mlp, same_bits
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from gangline import Communicator, Module, cpu, spawn
from gangline.callback import Checkpoint
from gangline.kvstore import KVStore, create
from gangline.models.checkpoint import checkpoint
from tests.kvstore.parameter_server.processes import run_job

SAMPLES, FEATURES = 23, 5
arrays = partial(labelled, SAMPLES, FEATURES, 3)


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset that adds noise from all three host generators to each sample."""

    def __init__(self) -> None:
        self.data, self.label = arrays()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(FEATURES) + random.random() + float(np.random.rand())
        return self.data[index] + noise, self.label[index]


def dropout_and_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "arrays": (arrays, {"batch_size": 6}),
    "dataset": (Augmented, {"batch_size": 6}),
    "loader": (lambda: DataLoader(Augmented(), batch_size=6, shuffle=True), {}),
    "loader-workers": (lambda: DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=2), {}),
    "loader-own-generator": (
        lambda: DataLoader(Augmented(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3)),
        {},
    ),
    "loader-own-sampler": (
        lambda: DataLoader(
            Augmented(), 6, sampler=SubsetRandomSampler(range(SAMPLES), torch.Generator().manual_seed(3))
        ),
        {},
    ),
}


class Words(nn.Module):
    """Network with sparse gradients, and a table that nothing looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = (nn.Embedding(12, 8, sparse=True) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.table((data * 100).long().abs() % 12).mean(1).tanh())
        return output


@dataclass
class Job:
    """A run of 3 epochs with a checkpoint every 2 batches and each epoch."""

    data: str = "arrays"
    loads: Sequence[float] = (2, 1)
    optimizer: str = "sgd"
    cuts: Sequence[int] = (0, 1, 4, 7, 10)
    """Updates to stop after: before the first checkpoint, within each epoch, and at the end of an epoch."""
    accumulate: int = 1
    network: Callable[[], nn.Module] = dropout_and_statistics
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, prefix: Path | None, resume: Any = None, cut: int = -1, store: str | KVStore = "device"
    ) -> dict[str, torch.Tensor] | None:
        """Return weights, optimizer state, learning rate and residuals; None if stopped after ``cut`` updates."""
        rank = 0 if isinstance(store, str) else store.rank
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(11 + rank)
        make, options = DATA[self.data]
        updates = 0

        def count(_: Any) -> None:
            nonlocal updates
            if updates == cut:
                raise Cut
            updates += 1

        contexts = [cpu(index) for index in range(len(self.loads))]
        with (
            contextlib.nullcontext() if isinstance(store, str) else store,
            Module(self.network(), nn.CrossEntropyLoss(), contexts, list(self.loads), **self.options) as module,
        ):
            saves = Checkpoint(module, prefix, period=2) if prefix else None
            rate = lambda epoch, *_: module.set_learning_rate(0.1 / (epoch + 2))  # noqa: E731
            try:
                module.fit(
                    make(),
                    DataLoader(Augmented(), batch_size=9) if self.data == "loader" else None,  # which draws, too
                    num_epoch=3,
                    seed=5,
                    kvstore=store,
                    optimizer=self.optimizer,
                    optimizer_params={"learning_rate": 0.1},
                    batch_end_callback=[saves, count] if saves else count,
                    epoch_end_callback=[rate, Checkpoint(module, prefix)] if prefix else rate,
                    accumulate=self.accumulate,
                    resume=resume,
                    **options,
                )
            except Cut:
                return None
            state = module.optimizer_state()
            residuals = {f"residual {name}": value for name, value in module.compression_residuals().items()}
            return {
                **module.get_params(),
                **state.tensors,
                **residuals,
                "learning rate": torch.tensor(state.learning_rate),
            }

    def check(self, folder: Path, store: Callable[[], str | KVStore] = lambda: "device") -> None:
        """Check that the run ends with the same bits after a cut."""
        whole = self.run(folder / "whole" / "net", store=store())
        assert whole is not None
        for cut in self.cuts:
            prefix = folder / f"cut{cut}" / "net"
            assert self.run(prefix, cut=cut, store=store()) is None
            resumed = self.run(prefix, resume="auto", store=store())
            assert resumed is not None
            assert same_bits(resumed, whole), cut


JOBS = {
    "accumulated": Job(loads=[1, 0, 2], optimizer="adam", accumulate=3, cuts=(0, 1, 2, 5)),
    "2bit": Job(loads=[2, 0, 1], options={"compression_params": {"type": "2bit", "threshold": 0.03}}, cuts=(4,)),
    "topk": Job(options={"compression_params": {"type": "topk", "ratio": 0.1}}, cuts=(1, 4, 10)),
    "fp16": Job(options={"compression_params": {"type": "fp16"}}, cuts=(1, 4, 10)),
    "sparse": Job(loads=[2, 1, 0], optimizer="adagrad", network=Words),
    "sparse, accumulated": Job(optimizer="adam", network=Words, accumulate=2, cuts=(1, 4)),
    **{f"{data} {optimizer}": Job(data, loads, optimizer)
       for data in ("arrays", "dataset", "loader", "loader-own-generator")
       for loads, optimizer in (([1], "sgd"), ([2, 1, 0], "adam"))},
    "loader-workers": Job("loader-workers", [2, 1, 0], "adam", cuts=(7,)),
    "loader-own-sampler": Job("loader-own-sampler", cuts=(5,)),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_a_run_cut_off_after_any_batch_resumes_to_the_same_bits(tmp_path: Path, job: str) -> None:
    JOBS[job].check(tmp_path)


def checked_by_a_worker(comm: Communicator, folder: str) -> None:
    for data in ("arrays", "dataset", "loader"):
        Job(data, [1], "adam", cuts=(3, 4, 8)).check(Path(folder, data), lambda: create("allreduce", communicator=comm))


def test_a_job_that_was_cut_off_resumes_to_the_same_bits_on_all_workers(tmp_path: Path) -> None:
    spawn(checked_by_a_worker, 2, str(tmp_path))
    written = json.loads((tmp_path / "loader" / "whole" / "net-0003" / "checkpoint.json").read_text())
    assert len(written["other_workers"]) == 1
    assert not [*tmp_path.glob("*/*/*.new"), *tmp_path.glob("*/*/*.old")]


def test_a_run_without_compression_leaves_the_residuals_of_a_checkpoint(tmp_path: Path) -> None:
    JOBS["2bit"].run(tmp_path / "net")
    saved = checkpoint.read(tmp_path / "net", 3)
    assert any(value.any() for value in saved.compression_residuals.values())
    with Module(dropout_and_statistics(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"learning_rate": 0.1})
        module.resume(saved)
        assert module.compression_residuals() == {}
        for name, value in module.network.named_parameters():
            assert torch.equal(value, saved.params[name])


def test_saving_changes_nothing_of_the_run(tmp_path: Path) -> None:
    with_checkpoints, without = Job().run(tmp_path / "net"), Job().run(None)
    assert with_checkpoints is not None
    assert without is not None
    assert same_bits(with_checkpoints, without)


def test_files_of_a_checkpoint_that_do_not_fit_are_named(tmp_path: Path) -> None:
    module = Module(nn.Linear(2, 2), nn.MSELoss(), cpu())
    module.init_optimizer("local", "sgd", {"lr": 0.1, "momentum": 0.9})
    module.forward_backward_update(torch.ones(1, 2), torch.ones(1, 2))
    module.save_checkpoint(tmp_path / "net", 0, save_optimizer_states=True)
    folder = tmp_path / "net-0000"
    weights, state = folder / "weights.safetensors", folder / "state.safetensors"
    _, header = checkpoint.files.load(state)
    whole = state.read_bytes()
    checkpoint.files.save(state, {}, header)
    with pytest.raises(ValueError, match=f"{state} is damaged: it holds 0 tensors; checkpoint.json counts 2"):
        checkpoint.read(tmp_path / "net", 0)
    state.write_bytes(whole)
    params, header = checkpoint.files.load(weights)
    checkpoint.files.save(weights, {"other": params["bias"], "weight": params["weight"]}, header)
    with pytest.raises(RuntimeError, match=f"checkpoint {folder}: parameters \\['bias'\\] are missing"):
        Module.load(tmp_path / "net", 0, network=nn.Linear(2, 2), loss=nn.MSELoss())


@pytest.mark.parametrize("step", range(11))
def test_a_save_cut_off_at_any_step_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    prefix = tmp_path / "net"
    module = Module(nn.Linear(2, 2), nn.MSELoss(), cpu())
    module.init_optimizer("local", "sgd", {"lr": 0.1, "momentum": 0.9})
    values = []
    for value in (1.0, 2.0):
        module.forward_backward_update(torch.ones(1, 2), torch.full((1, 2), value))
        values.append(module.get_params()["weight"])
        if value == 1.0:
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)

    calls = 0

    def cut_at_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == step:
                raise Cut
            calls += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", cut_at_step(Path.rename))
        patched.setattr(os, "fsync", cut_at_step(os.fsync))
        patched.setattr(shutil, "rmtree", cut_at_step(shutil.rmtree))
        patched.setattr("gangline.kvstore.optimizer.files.write_aside", cut_at_step(checkpoint.files.write_aside))
        try:
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)
            whole = True
        except Cut:
            whole = False
    saved = checkpoint.read(prefix, 0)
    committed = torch.equal(saved.params["weight"], values[1])
    assert committed or torch.equal(saved.params["weight"], values[0])
    assert committed or not whole
    momentum = saved.require_optimizer_state().tensors['"weight"/momentum_buffer']
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    newest = checkpoint.read(prefix, 1).require_optimizer_state().tensors['"weight"/momentum_buffer']
    assert torch.equal(momentum, newest) == committed  # state and weights are from the same step
    module.save_checkpoint(prefix, 0, save_optimizer_states=True)  # removes the leftovers of the interrupted save
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-0000", "net-0001"]


def test_a_reader_finds_a_whole_checkpoint_while_it_is_replaced(tmp_path: Path) -> None:
    def write() -> None:
        for value in range(40):
            with torch.no_grad():
                network.weight.fill_(value)
            module.run_state.step = value
            module.save_checkpoint(tmp_path / "net", "best")

    network = nn.Linear(2, 2)
    with Module(network, nn.MSELoss(), cpu()) as module, ThreadPoolExecutor(1) as threads:
        module.save_checkpoint(tmp_path / "net", "best")
        written, found = threads.submit(write), set()
        while not written.done():
            saved = checkpoint.read(tmp_path / "net", "best")
            found.add(saved.step)
            assert saved.step == 0 or saved.params["weight"].eq(saved.step).all()
        written.result()
    assert len(found) > 2


def test_missing_checkpoints_and_states_are_errors_that_list_existing_ones(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1, "momentum": 0.9})
        module.forward_backward_update(torch.ones(1, 2), torch.ones(1, 2))
        module.save_checkpoint(prefix, 3)
    with pytest.raises(FileNotFoundError, match=r"net-0004 does not exist.*\[3\]"):
        Module.load(prefix, 4, network=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no optimizer state; save with save_optimizer_states=True"):
        Module.load(prefix, 3, network=nn.Linear(2, 2), load_optimizer_states=True)


def test_a_checkpoint_of_format_3_says_how_to_read_it(tmp_path: Path) -> None:
    """Its files were written by 0.1.0 before format 4, after the first of 3 epochs."""
    with ZipFile(Path(__file__).with_name("format_3.zip")) as archive:
        archive.extractall(tmp_path)

    def trained(resume: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        data = torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 3
        options = {"learning_rate": 0.1, "momentum": 0.9}
        with Module(nn.Linear(4, 3), nn.CrossEntropyLoss(), cpu()) as module:
            module.fit(data, num_epoch=3, batch_size=4, seed=3, optimizer_params=options, resume=resume)
            return module.get_params()

    with pytest.raises(ValueError, match=r"old-0001\.json is a checkpoint of format 3; to read it: mkdir") as caught:
        trained(tmp_path / "old")
    subprocess.run(["sh", "-c", str(caught.value).partition("to read it: ")[2]], check=True)
    assert distance(trained(tmp_path / "old"), trained(None)) <= 1e-6


@pytest.mark.parametrize(
    ("change", "message"), [({"batch_size": 5}, "batch_size"), ({"seed": 6}, "seed"), ({"shuffle": False}, "shuffle")]
)
def test_resuming_in_mid_epoch_by_another_plan_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    Job(loads=[1]).run(tmp_path / "net", cut=7)
    with (
        Module(dropout_and_statistics(), nn.CrossEntropyLoss(), cpu()) as module,
        pytest.raises(ValueError, match=f"middle of an epoch.*{message}"),
    ):
        module.fit(
            arrays(), num_epoch=3, resume=tmp_path / "net", **{"batch_size": 6, "seed": 5, "shuffle": True, **change}
        )


def test_resume_takes_a_new_learning_rate_if_requested(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    for first, second, expected in ((0.1, 0.1, 0.01), (0.1, 0.5, 0.5)):
        with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
            module.init_optimizer("local", "sgd", {"lr": first})
            module.set_learning_rate(0.01)
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)
        with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
            module.init_optimizer("local", "sgd", {"lr": second})
            module.resume(checkpoint.read(prefix, 0))
            assert module.learning_rate == expected


# With other contexts or workers: each sample is trained on exactly once


BATCH, EPOCHS, BATCHES = 2, 2, 12
Params = dict[str, torch.Tensor]
network = partial(mlp, 4, 6, 3, seed=1)


class Recorded(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset that records which samples are read."""

    def __init__(self) -> None:
        self.data, self.label = labelled(SAMPLES, 4, 3, dtype=torch.float64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(int(index))
        return self.data[index], self.label[index]


def part(
    prefix: str, resume: str | None, updates: int | None, contexts: int, store: Any, accumulate: int, loader: bool
) -> tuple[list[int], Params, str]:
    """Resume for a number of updates (None: to the end); return the samples read, in order, and the weights."""
    data, done = Recorded(), 0
    torch.manual_seed(5)  # a DataLoader draws from it

    def stop(_: Any) -> bool:
        nonlocal done
        done += 1
        return done == updates

    with Module(network(), nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        reason = module.fit(
            DataLoader(data, batch_size=BATCH, shuffle=True) if loader else data,
            num_epoch=EPOCHS,
            batch_size=None if loader else BATCH,
            seed=3,
            eval_metric="loss",
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=stop,
            epoch_end_callback=Checkpoint(module, prefix, period=100),
            resume=resume,
            accumulate=accumulate,
        )
        return data.read, module.get_params(), reason


def part_of_a_worker(comm: Communicator, *arguments: Any) -> Any:
    with create("allreduce", communicator=comm) as store:
        prefix, resume, updates, contexts, _, *rest = arguments
        return part(prefix, resume, updates, contexts, store, *rest)


def parts(kind: str, *arguments: Any) -> list[Any]:
    """Return each worker's result: "2 workers" over collectives, "2 of servers", or "3 contexts" in this process."""
    number, _, what = kind.partition(" ")
    prefix, resume, updates, *rest = arguments
    if what == "workers":
        return spawn(part_of_a_worker, int(number), prefix, resume, updates, 1, None, *rest)
    if what == "of servers":
        return run_job(part, int(number), 1, prefix, resume, updates, 1, "dist_sync", *rest)
    return [part(prefix, resume, updates, int(number), "device", *rest)]


CHAINS = [
    ["1 contexts", "2 workers", "3 contexts"],
    ["3 contexts", "1 workers", "2 workers"],
    ["2 workers", "3 workers", "1 contexts"],
    ["1 contexts", "2 of servers", "2 workers"],
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kinds", CHAINS, ids=", ".join)
def test_each_sample_of_an_epoch_is_trained_on_once(tmp_path: Path, kinds: list[str], accumulate: int) -> None:
    prefix = str(tmp_path / "net")
    first = parts(kinds[0], prefix, None, 1, accumulate, False)
    assert [found[2] for found in first] == ["callback"] * len(first)
    between = checkpoint.read(prefix, 0).position["batch"]
    second = parts(kinds[1], prefix, "auto", 1, accumulate, False)
    then = checkpoint.read(prefix, 0).position["batch"]
    assert 0 < between < then < BATCHES
    third = parts(kinds[2], prefix, "auto", None, accumulate, False)
    read, weights, _ = part(str(tmp_path / "whole"), None, None, 1, None, accumulate, False)
    for run, begin, end in ((first, 0, between), (second, between, then), (third, then, 2 * BATCHES)):
        of_run = [index for found in run for index in found[0]]
        expected = read[begin * BATCH : end * BATCH if end <= BATCHES else len(read)]
        assert sorted(of_run) == sorted(expected), (begin, end)
    assert sorted(read[:SAMPLES]) == list(range(SAMPLES))
    assert all(distance(found[1], weights) <= 1e-11 for found in third)


def test_a_shuffling_loader_resumes_with_other_contexts(tmp_path: Path) -> None:
    prefix = str(tmp_path / "net")
    [(first, _, _)] = parts("1 contexts", prefix, None, 2, 1, True)
    [(second, _, _)] = parts("3 contexts", prefix, "auto", 3, 1, True)
    [(third, weights, _)] = parts("2 contexts", prefix, "auto", None, 1, True)
    [(whole, expected, _)] = parts("1 contexts", str(tmp_path / "whole"), None, None, 1, True)
    assert first + second + third == whole
    assert sorted(whole[:SAMPLES]) == list(range(SAMPLES))
    assert distance(weights, expected) <= 1e-11


def refused(comm: Communicator, prefix: str) -> str:
    with pytest.raises(ValueError, match="2 batches into an epoch of 1 workers with batches of their own") as caught:
        part_of_a_worker(comm, prefix, "auto", None, 1, None, 1, True)
    return str(caught.value)


def test_loaders_of_workers_of_their_own_do_not_go_on_with_other_workers(tmp_path: Path) -> None:
    prefix = str(tmp_path / "net")
    parts("1 contexts", prefix, None, 2, 1, True)
    first, second = spawn(refused, 2, prefix)
    assert first == second

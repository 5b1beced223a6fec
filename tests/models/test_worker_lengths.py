"""`Module.fit(lengths=)`: workers get parts of each batch of equal cost, and the weights stay those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from measure import distance, same_bits
from simulated_time import simulated_time
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gangline import Communicator, MismatchError, Module, cpu, spawn
from gangline.bench.unequal.waiting_network import Wait, slow_down
from gangline.callback import Checkpoint
from gangline.kvstore import KVStore, create
from gangline.models.balance import speed_model
from gangline.models.data.lengths import cost_of
from gangline.models.loop.callbacks import BatchEndParam
from tests.kvstore.parameter_server.processes import run_job

speed_model._MIN_SECONDS = 0.0  # in processes of jobs

SAMPLES, BATCH = 250, 100
"""Three batches per epoch, the last one of 50 texts."""
LENGTHS = np.random.default_rng(0).lognormal(2.5, 0.7, SAMPLES).clip(2, 40).astype(int).tolist()


class Texts(Dataset[tuple[Tensor, int]]):
    """Texts whose first token is their number, counted from 1, with a class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(index, index + LENGTHS[index]) % SAMPLES + 1, index % 3


class ReadAhead(Texts):
    """Texts that a process reads ahead."""

    num_workers = 1


def padded(samples: list[tuple[Tensor, int]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = pad_sequence([text for text, _ in samples], batch_first=True)
    return (tokens, (tokens > 0).double()), torch.tensor([label for _, label in samples])


class MeanOfTokens(nn.Module):
    """A layer waits for each token, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wait, self.last = nn.Embedding(SAMPLES + 1, 4), Wait(), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        hidden = self.wait(self.embed(tokens).flatten(0, 1)).view(*tokens.shape, -1).tanh()
        return self.last((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def module(contexts: int = 1, **options: Any) -> Module:
    torch.manual_seed(1)
    return Module(MeanOfTokens().double(), nn.CrossEntropyLoss(), [cpu(n) for n in range(contexts)], **options)


def train(made: Module, store: Any, epochs: int = 2, data: Any = None, **options: Any) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"batch_size": BATCH, "collate_fn": padded, "eval_metric": "loss", "kvstore": store}
    settings["optimizer_params"] = {"learning_rate": 0.5, "momentum": 0.9}
    made.fit(data or Texts(), num_epoch=epochs, **{**settings, **options})
    return made.get_params()


def run(
    store: KVStore, loads: str, contexts: int = 1, seconds: Sequence[float] = (), **options: Any
) -> tuple[list[list[int]], list[float], dict[str, Tensor]]:
    """Train as one worker of a job; return the texts of its shares, the last loads and the weights."""
    torch.set_num_threads(1)
    own: list[list[int]] = []

    def see(param: BatchEndParam) -> None:
        data = param.locals["data"]
        own.append([] if data is None else (data[0][:, 0] - 1).tolist())

    times = simulated_time() if seconds else nullcontext()
    with pytest.MonkeyPatch.context() as patch, times, module(contexts) as made:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
        slow_down(made, [seconds[store.rank]] if seconds else [0.0] * contexts)
        params = train(made, store, **{"lengths": LENGTHS, "batch_end_callback": see, **options})
        return own, made.workers.loads, params


def in_a_job(comm: Communicator, *arguments: Any, **options: Any) -> Any:
    with create("allreduce", communicator=comm) as store:
        return run(store, *arguments, **options)


def on_servers(loads: str, data: Any) -> Any:
    with create("dist_sync") as store:
        return run(store, loads, data=data)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("1,1", {}),
    "unequal": ("3,1", {"lengths": LENGTHS.__getitem__, "eval_data": Texts()}),
    "no padding": ("1,3", {"padding": False}),
    "contexts": ("3,1", {"contexts": 2}),
    "idle": ("1,0", {}),
    "accumulated": ("3,1", {"accumulate": 2}),
    "few": ("3,1", {"batch_size": 3, "epochs": 1}),
    "auto": ("auto", {"seconds": [1e-4, 3e-4], "epochs": 8}),
    "auto equal": ("auto", {"seconds": [1e-4, 1e-4], "epochs": 8}),
}


def of_two_workers(comm: Communicator, folder: str) -> dict[str, Any]:
    found = {name: in_a_job(comm, loads, **options) for name, (loads, options) in CASES.items()}
    return {**found, "resumed": resumed(comm, f"{folder}/net"), "refused": refused(comm)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(of_two_workers, 2, str(tmp_path_factory.mktemp("lengths")))


def alone(epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    with module() as made:
        return train(made, None, epochs, **options)


def check(found: Sequence[Any], loads: Sequence[float], *, padding: bool = True, batch_size: int = BATCH) -> float:
    """Check that shares are consecutive in descending order, and each text is read once an epoch.

    Returns:
        The time of all steps by these loads, relative to that without waiting.
    """
    shares = list(zip(*(own for own, _, _ in found), strict=True))
    per_epoch, slowest, mean = -(-SAMPLES // batch_size), 0.0, 0.0
    for begin in range(0, len(shares), per_epoch):
        epoch = shares[begin : begin + per_epoch]
        assert sorted(itertools.chain(*itertools.chain(*epoch))) == list(range(SAMPLES))
    fastest_first = sorted(range(len(loads)), key=lambda rank: -loads[rank])
    for parts in shares:
        costs = [np.array([LENGTHS[n] for n in part], float) for part in parts]
        longer, shorter = (costs[rank] for rank in fastest_first)
        assert not len(shorter) or longer.min() >= shorter.max()
        assert sum(map(len, parts)) == 1 or [len(part) > 0 for part in parts] == [load > 0 for load in loads]
        times = [cost_of(part, padding=padding) / load for part, load in zip(costs, loads, strict=True) if load]
        slowest, mean = slowest + max(times), mean + sum(times) / len(times)
    return slowest / mean


@pytest.mark.parametrize("name", [name for name, (loads, _) in CASES.items() if loads != "auto"])
def test_shares_of_equal_cost_give_the_weights_of_one_process(name: str, two: list[dict[str, Any]]) -> None:
    loads, options = CASES[name]
    found = [each[name] for each in two]
    known = {key: value for key, value in options.items() if key in ("padding", "batch_size")}
    if "accumulate" not in options:
        within = check(found, [float(load) for load in loads.split(",")], **known)
        assert within <= 1.05 or name == "few"
    expected = alone(**{key: options[key] for key in ("epochs", "batch_size", "accumulate") if key in options})
    for _, _, params in found:
        assert distance(params, expected) <= 1e-11


@pytest.mark.parametrize(("name", "least", "most"), [("auto", 0.2, 0.3), ("auto equal", 0.45, 0.55)])
def test_loads_follow_measured_cost_per_second(name: str, least: float, most: float, two: list[dict[str, Any]]) -> None:
    found = [each[name] for each in two]
    costs = [
        sum(cost_of(np.array([LENGTHS[n] for n in part], float), padding=True) for part in own[-3:])
        for own, _, _ in found
    ]
    assert least <= costs[1] / sum(costs) <= most
    assert least <= found[0][1][1] <= most
    assert found[0][1] == found[1][1]
    assert distance(found[1][2], alone(8)) <= 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("data", [Texts(), ReadAhead()])
def test_workers_with_servers_have_shares_of_equal_cost_too(data: Texts) -> None:
    found = run_job(on_servers, 2, 1, "3,1", data)
    assert check(found, [3, 1]) <= 1.05
    assert distance(found[0][2], alone()) <= 1e-11


def resumed(comm: Communicator, prefix: str) -> bool:
    """Stop after the first batch of the second epoch, and resume; return whether the weights have the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gangline.models.balance.worker_balance._SECONDS", 0.0)  # an exchange after each update
        _, _, expected = in_a_job(comm, "3,1", epochs=3)

        def stop(param: BatchEndParam) -> bool:
            return (param.epoch, param.nbatch) == (1, 0)

        in_a_job(comm, "3,1", epochs=3, batch_end_callback=stop, epoch_end_callback=Checkpoint(None, prefix))
        with pytest.raises(ValueError, match="give the same data, batch_size, shuffle, seed and lengths"):
            in_a_job(comm, "3,1", lengths=[1] * SAMPLES, epochs=3, resume=prefix)
        own, _, params = in_a_job(comm, "3,1", epochs=3, resume=prefix)
        assert len(own) == 5
        return same_bits(params, expected)


def test_an_epoch_that_was_left_is_continued(two: list[dict[str, Any]]) -> None:
    assert [each["resumed"] for each in two] == [True, True]


def refused(comm: Communicator) -> list[str]:
    found = []
    for options in ({"lengths": [1 + comm.rank] * SAMPLES}, {"random": "sample"}):
        with create("allreduce", communicator=comm) as store, module(random=options.pop("random", "context")) as made:
            try:
                train(made, store, **{"lengths": LENGTHS, **options})
            except (MismatchError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_depends_on_the_worker_is_refused_on_all(two: list[dict[str, Any]]) -> None:
    for mismatch, sample in (each["refused"] for each in two):
        assert mismatch.startswith("MismatchError: fit: train_data is {")
        assert sample.startswith("ValueError: lengths is given, but random='sample' draws the masks of dropout")


def unpadded(samples: list[Any]) -> Any:
    raise ValueError(f"{len(samples)} texts")


ARRAYS = torch.zeros(4, 2), torch.zeros(4)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of another data set": ({"lengths": LENGTHS[:-1]}, "lengths has 249 numbers for the 250 samples of the data set"),
    "nan": ({"lengths": [float("nan"), *LENGTHS[1:]]}, "the length of sample 0 is nan; expected a finite number"),
    "negative": ({"lengths": [*LENGTHS[:-1], -1]}, "the length of sample 249 is -1.0; expected"),
    "a negative one": ({"lengths": lambda n: 7.0 - n, "shuffle": False}, "the length of sample 8 is -1.0; expected"),
    "arrays": ({"data": ARRAYS, "lengths": [1] * 4}, "lengths is given, but train_data holds arrays, whose rows are"),
    "batches": ({"data": [ARRAYS], "lengths": [1], "batch_size": None}, "train_data has batches already; expected a"),
    "a loader": (
        {"data": DataLoader(TensorDataset(*ARRAYS)), "lengths": [1] * 4, "batch_size": None},
        "lengths is given, but train_data has batches already; expected a Dataset and its batch_size, or no lengths",
    ),
    "collated arrays": ({"data": ARRAYS}, "collate_fn is given, but train_data holds arrays"),
    "no collate_fn": ({"collate_fn": None}, "expected samples alike, or a collate_fn that pads them"),
    "an error of collate_fn": ({"collate_fn": unpadded}, "100 texts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_lengths_and_data_are_refused(name: str) -> None:
    options, error = REFUSED[name]
    with module() as made, pytest.raises(ValueError, match=r".") as raised:
        train(made, None, **options)
    assert error in str(raised.value)

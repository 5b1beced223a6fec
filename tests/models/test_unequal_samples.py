"""`gangline.balance` with lengths: parts of equal cost, and the weights of one process on the same global batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from measure import distance
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import gangline
from gangline import Communicator, spawn
from gangline.models.balance.rank_balance import RankBalance
from gangline.models.data.lengths import Arrangement, Lengths, cost_of
from gangline.models.data.shares import cut_by_cost, ranks_by_speed
from tests.models.test_unequal_ranks import weights, wrapped
from tests.models.unequal_jobs import Batches, Stream, balanced, flat, gathered, join

SAMPLES, BATCH = 61, 6
LENGTHS = (np.random.default_rng(3).lognormal(2, 1, SAMPLES).clip(1, 60)).astype(int).tolist()
"""Number of tokens of each text."""
Sample = tuple[Tensor, int]


class Texts(Dataset[Sample]):
    """Texts of random tokens, with their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return text(index), index


def text(index: int) -> Tensor:
    return torch.randint(1, 20, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))


def padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([n for _, n in samples])


class Net(nn.Module):
    """Predicts each next token from the token and the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.output = nn.Embedding(20, 8, dtype=torch.float64), nn.Linear(8, 20).double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token that is not padding, [samples, tokens - 1], 0 elsewhere."""
        seen = torch.tanh(self.embedding(tokens).cumsum(1) / 4)
        logits = self.output(seen[:, :-1]).transpose(1, 2)
        return nn.functional.cross_entropy(logits, tokens[:, 1:], ignore_index=0, reduction="none")


def valid(batch: Any) -> Tensor:
    return (batch[0][:, 1:] > 0).sum()


def of_samples(losses: Tensor, tokens: Tensor) -> Tensor:
    return (losses.sum(1) / tokens.shape[0]).sum()


def of_tokens(losses: Tensor, tokens: Tensor) -> Tensor:
    return losses.sum() / (tokens[:, 1:] > 0).sum().clamp(min=1)


def train(engine: str, loss_name: str, options: dict[str, Any]) -> float:
    """Train two epochs; return the distance from one process on the same batches.

    With ``accumulate`` and count= or a normalized loss each update's loss is the mean over its tokens, and the means
    that `BalancedLoader.mean` returns are those of one process.
    """
    loss_of: Callable[[Tensor, Tensor], Tensor] = of_tokens if loss_name == "tokens" else of_samples
    steps = options.get("accumulate", 1)
    is_mean_of_update = loss_name == "normalized" or (loss_name == "tokens" and steps > 1)
    losses_of_update: list[Tensor] = []
    means: list[float] = []
    model = wrapped(engine, Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader: Any = DataLoader(Texts(), BATCH, shuffle=True, collate_fn=padded)
    if loss_name == "tokens":
        options = {"count": valid, **options}
    if loss_name == "normalized":
        options = {"loss_reduction": "normalized", **options}
    loader = gangline.balance(model, loader, **{"lengths": LENGTHS, **options})
    size, epochs = dist.get_world_size(), []
    for _ in range(2):
        updates: list[Batches] = []
        batches = ((*batch, loader.samples) for batch in loader)
        if loss_name == "normalized":
            batches = list(batches)  # type: ignore[assignment, unused-ignore]
        for number, (tokens, indices, samples) in enumerate(batches):
            if loss_name == "normalized":  # weights are all 1; the loop leaves out a repeated sample
                update = batches[number - number % steps :][:steps]  # type: ignore[index, unused-ignore]
                total = sum(gathered(sum(int(valid(batch)) for batch in update if batch[2])))
                loss = model(tokens).sum() * bool(samples) * size / total
                own = indices[:samples].tolist()
            else:
                loss = loss_of(model(tokens), tokens) / steps
                own = indices[:samples].tolist()
                losses_of_update.append(loss.detach() * steps)
                if loader.ends_update:
                    means.append(loader.mean(losses_of_update))
                    losses_of_update.clear()
            loss.backward()
            if not number % steps:
                updates.append([])
            updates[-1].append(list(dict.fromkeys(flat(gathered(own)))))  # a batch of one text is repeated
            is_last = number % steps == steps - 1 or number == len(loader) - 1
            assert loader.ends_update == is_last or loss_name == "normalized"
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        epochs.append(updates)
    loader.close()
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    errors = [0.0]
    for updates in epochs:
        assert sorted(flat([flat(update) for update in updates])) == list(range(SAMPLES))
        for update in updates:
            total = sum(LENGTHS[n] - 1 for batch in update for n in batch)
            scale = 1.0 if loss_name == "normalized" else len(update) / steps
            summed = 0.0
            for batch in update:
                tokens, _ = padded([Texts()[n] for n in batch])
                losses = alone(tokens)
                summed += float(losses.detach().sum())
                (losses.sum() / total * scale if is_mean_of_update else loss_of(losses, tokens) / steps).backward()
            if means:
                of = total if loss_name == "tokens" else sum(map(len, update))
                errors.append(abs(means.pop(0) - summed / max(of, 1)))
            optimizer.step()
            optimizer.zero_grad()
    return max(distance(weights(model), alone.state_dict()), *errors)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("ddp", "samples", {"loads": [1, 1]}),
    "tokens": ("ddp", "tokens", {"loads": [3, 1]}),
    "measured": ("ddp", "tokens", {}),
    "no padding": ("ddp", "tokens", {"loads": [1, 1], "padding": False}),
    "a function": ("ddp", "samples", {"loads": [3, 1], "lengths": LENGTHS.__getitem__}),
    "accumulated means": ("ddp", "samples", {"loads": [3, 1], "accumulate": 2}),
    "accumulated tokens": ("ddp", "normalized", {"loads": [3, 1], "accumulate": 4}),
    "tokens of updates": ("ddp", "tokens", {"loads": [3, 1], "accumulate": 4}),
    "tokens of updates, without lengths": ("ddp", "tokens", {"loads": [3, 1], "accumulate": 4, "lengths": None}),
    "pool": ("ddp", "tokens", {"loads": [3, 1], "pool": 3}),
    "pool, accumulated": ("ddp", "normalized", {"loads": [1, 1], "pool": 4, "accumulate": 2}),
    "memory": ("ddp", "samples", {"loads": [1, 1], "max_share": [80, 1000]}),
}


def job(comm: Communicator, path: str, backend: str, cases: dict[str, Any]) -> dict[str, Any]:
    join(comm, path, backend)
    try:
        found: dict[str, Any] = {name: train(*case) for name, case in cases.items()}
        if backend == "gloo":
            found["streams"] = streams()
            found["refusals"] = refusals()
            found["resumed"] = resumed()
        return found
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(job, 2, str(tmp_path_factory.mktemp("two") / "store"), "gloo", CASES, threads=1)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str, two: list[dict[str, Any]]) -> None:
    assert max(each[name] for each in two) <= 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_those_of_one_process_under_fsdp2_and_on_more_ranks(ranks: int, tmp_path: Path) -> None:
    loads = [[1.0] * ranks, [3.0] + [1.0] * (ranks - 1)]
    cases = {
        f"{engine} {loss} {load} {accumulate}": (engine, loss, {"loads": load, "accumulate": accumulate})
        for engine in ("ddp", "fsdp2")
        for loss in ("samples", "tokens", "normalized")
        for load in loads
        for accumulate in (1, 2, 4)
    }
    for found in spawn(job, ranks, str(tmp_path / "store"), "gangline", cases, threads=1):
        assert max(found.values()) <= 1e-11, found


# The cut


def seconds(costs: np.ndarray[Any, Any], counts: Sequence[int], speeds: Sequence[float], *, padding: bool) -> float:
    """Return the time of the slowest consecutive part of descending costs."""
    ends = np.cumsum(counts)
    parts = [costs[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return max(
        (part.max() * len(part) if padding else part.sum()) / speed if len(part) else 0.0
        for part, speed in zip(parts, speeds, strict=True)
    )


@given(st.integers(0, 2**32), st.integers(1, 10), st.integers(1, 4), st.integers(1, 2), st.booleans())
@example(0, 10, 3, 1, True)
@example(1, 9, 4, 2, True)
@example(2, 10, 3, 1, False)
@example(3, 8, 2, 2, False)
def test_the_cut_is_within_a_twentieth_of_the_best_one(
    seed: int, samples: int, parts: int, minimum: int, padding: bool
) -> None:
    draw = np.random.default_rng(seed)
    costs, speeds = draw.lognormal(3, 1, samples).round(), draw.choice([1.0, 1.5, 3.0], parts).tolist()
    cut = cut_by_cost(costs, speeds, minimum=minimum, padding=padding)
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(costs)))
    counts, number = [len(part) for part in cut], len(speeds)
    for part, following in pairwise(cut):
        assert not len(following) or costs[part].min() >= costs[following].max()
    able = min(number, max(1, len(costs) // minimum))
    assert all(count >= min(minimum, len(costs)) for count in counts[:able])
    descending = np.sort(costs)[::-1]
    every = [
        [*np.diff([0, *ends, len(costs)]), *[0] * (number - able)]
        for ends in combinations(range(1, len(costs)), able - 1)
    ]
    allowed = [split for split in every if all(count >= min(minimum, len(costs)) for count in split[:able])]
    best = min(seconds(descending, split, speeds, padding=padding) for split in allowed)
    assert seconds(descending, counts, speeds, padding=padding) <= 1.05 * best


def test_no_part_exceeds_its_cap_unless_all_do() -> None:
    costs = np.array([9.0, 5, 4, 3, 2, 1, 1])
    assert [costs[part].tolist() for part in cut_by_cost(costs, [1, 1], [None, 6])] == [[9, 5, 4, 3], [2, 1, 1]]
    assert [len(part) for part in cut_by_cost(costs, [1, 1], [1, 3])] == [1, 6]  # caps are their proportions


def test_ranks_change_places_only_if_one_is_much_faster() -> None:
    order = ranks_by_speed([1.0, 1.4, 1.2], [0, 1, 2])
    assert order == [0, 1, 2]
    order = ranks_by_speed([1.0, 3.0, 1.2], order)
    assert order == [1, 0, 2]
    assert ranks_by_speed([1.0, 0.9, 1.2], order) == [1, 0, 2]


@pytest.mark.parametrize(("loads", "most"), [([1.0, 1.0], 1.017), ([1.02, 1.0, 1.0], 1.012), ([3.0, 1.0], 1.02)])
def test_the_ranks_end_an_update_together(loads: list[float], most: float) -> None:
    """Ranks need not wait for each other within it, so their parts may be unequal in one of its batches."""
    balance, draw = RankBalance(0, loads, by_cost=True), np.random.default_rng(0)
    slowest = mean = 0.0
    for _ in range(20):
        costs = draw.lognormal(4, 1, 64 * len(loads)).clip(8, 512)
        steps = balance.split.cut(costs, 4)
        assert sorted(np.concatenate([part for step in steps for part in step]).tolist()) == list(range(len(costs)))
        spent = [
            sum(cost_of(costs[step[rank]], padding=True) for step in steps) / load for rank, load in enumerate(loads)
        ]
        slowest, mean = slowest + max(spent), mean + np.average(spent, weights=loads)
    assert slowest <= most * mean


def test_batches_of_a_pool_are_of_similar_lengths_in_an_order_of_the_seed() -> None:
    order = np.random.default_rng(0).permutation(SAMPLES).tolist()
    batches = [order[begin : begin + 5] for begin in range(0, SAMPLES, 5)]
    arrangement = Arrangement(Lengths(LENGTHS, SAMPLES), pool=4)

    def of(seed: int, skip: int = 0) -> list[Any]:
        return list(arrangement.batches(iter(batches), seed, skip))

    formed = of(7)
    assert sorted(flat(formed)) == list(range(SAMPLES))
    assert sorted(map(len, formed)) == sorted(map(len, batches))
    assert sorted(flat(formed[:4])) == sorted(flat(batches[:4]))
    spread = [max(LENGTHS[n] for n in batch) / np.mean([LENGTHS[n] for n in batch]) for batch in (*formed, *batches)]
    assert sum(spread[: len(formed)]) < 0.8 * sum(spread[len(formed) :])
    assert of(7) == formed != of(8)
    assert of(7, skip=10) == formed[2:]


# Streams, resuming and errors, in the job of the fixture


def streams() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def length(sample: Sample) -> int:
        return len(sample[0])

    def made(numbers: Sequence[int], **options: Any) -> gangline.BalancedLoader:
        stream = Stream(numbers, lambda n: (text(n), n))
        loader: Any = DataLoader(stream, batch_size=BATCH, collate_fn=padded)
        return balanced(loader, lengths=length, **options)

    same = made(range(SAMPLES), stream="replicated", loads=[1, 1])
    read = [(indices[: same.samples].tolist(), tokens.shape) for tokens, indices in same]
    own = made(range(rank, SAMPLES, size), stream="sharded", budget=160, loads=[3, 1])
    filled = [(indices[: own.samples].tolist(), tokens.numel()) for tokens, indices in own if own.samples]
    capped = made(range(rank, SAMPLES, size), stream="sharded", budget=160, loads=[3, 1], max_share=[50, 1000])
    costs = [(tokens.numel(), capped.samples) for tokens, _ in capped if capped.samples]
    return {"same": gathered(read), "own": gathered(filled), "capped": gathered(costs)}


def test_streams_are_cut_by_cost_or_fill_a_budget(two: list[dict[str, Any]]) -> None:
    same, own = two[0]["streams"]["same"], two[0]["streams"]["own"]
    for number, parts in enumerate(zip(*same, strict=True)):
        wanted = range(SAMPLES)[number * 2 * BATCH :][: 2 * BATCH]
        assert sorted(n for indices, _ in parts for n in indices) == list(wanted)
        assert all(shape[1] == max(LENGTHS[n] for n in indices or [0]) for indices, shape in parts if indices)
    assert sum(of_rank[0][1].numel() for of_rank in same) > 0
    assert sorted(n for of_rank in own for indices, _ in of_rank for n in indices) == list(range(SAMPLES))
    for of_rank, most in zip(two[0]["streams"]["capped"], (50, 40), strict=True):
        assert all(cost <= most or samples == 1 for cost, samples in of_rank)
    for of_rank, most in zip(own, (120, 40), strict=True):
        assert all(cost <= most or len(indices) == 1 for indices, cost in of_rank)


def resumed() -> list[int]:
    """Leave an epoch of a pool after three batches; return the samples read before and after by all ranks."""
    seen: list[list[int]] = []
    state: Any = None
    for stop in (3, None):
        loader = balanced(
            DataLoader(Texts(), BATCH, shuffle=True, collate_fn=padded), lengths=LENGTHS, loads=[1, 1], pool=3
        )
        if state is not None:
            loader.load_state_dict(state)
        for number, (_, indices) in enumerate(loader, 1):
            seen.append(indices[: loader.samples].tolist())
            if number == stop:
                state = loader.state_dict()
                break
        loader.close()
    return flat(gathered(flat(seen)))


def test_an_epoch_that_was_left_is_continued_with_its_other_samples(two: list[dict[str, Any]]) -> None:
    assert sorted(two[0]["resumed"]) == list(range(SAMPLES))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "of another data set": ({"lengths": LENGTHS[:-1]}, "lengths has 60 numbers for the 61 samples"),
    "nan": ({"lengths": [float("nan"), *LENGTHS[1:]]}, "the length of sample 0 is nan; expected a finite number"),
    "negative": ({"lengths": [*LENGTHS[:-1], -1]}, "the length of sample 60 is -1.0; expected"),
    "texts": ({"lengths": ["a text"] * SAMPLES}, "lengths[0] is of type str; expected a number"),
    "tokens": ({"lengths": [[1, 2]] * SAMPLES}, "lengths[0] is of type list; expected a number"),
    "a column's name": ({"lengths": "length"}, "lengths is 'length'; expected one number for each sample"),
    "a number": ({"lengths": 5}, "lengths is 5; expected one number for each sample"),
    "a bad function": ({"lengths": lambda _: -2}, "-2.0; expected a finite number"),
    "a function of nothing": ({"lengths": lambda _: None}, "returned no number; expected one for each index"),
    "accumulate alone": ({"accumulate": 2}, "accumulate is 2; expected lengths"),
    "accumulate of a sum": ({"accumulate": 2, "loss_reduction": "sum", "count": len}, "accumulate is 2; expected"),
    "pool of nothing": ({"lengths": LENGTHS, "pool": 0}, "pool is 0; expected a number of global batches"),
    "budget": ({"lengths": LENGTHS, "budget": 100}, 'budget is 100; with stream="sharded" and lengths'),
    "one rank's": ({"lengths": LENGTHS, "each": True}, "lengths is"),
}


def refusals() -> dict[str, list[str]]:
    found = {}
    for name, (options, _) in REFUSALS.items():
        options = dict(options)
        if options.pop("each", False) and dist.get_rank():
            options["lengths"] = [1, *LENGTHS[1:]]
        try:
            list(balanced(DataLoader(Texts(), BATCH, collate_fn=padded), loads=[1, 1], **options))
            found[name] = "no error"
        except Exception as error:  # noqa: BLE001  the test compares texts
            found[name] = f"{type(error).__name__}: {error}"
    return {name: gathered(error) for name, error in found.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_lengths_are_errors_of_all_ranks(name: str, two: list[dict[str, Any]]) -> None:
    for error in two[0]["refusals"][name]:
        assert "Error: " in error
        assert REFUSALS[name][1] in error

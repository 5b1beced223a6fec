"""Equivalence guarantee: any road and any split of workers, ranks and contexts trains as one device does.

The reference is a plain torch loop over the whole batches, without gangline's code. The first test draws combinations
of all features on all roads, see `matrix`; the others look at losses and optimizers of Module, and at corners.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from matrix import COMPRESSIONS, Case, Jobs, on_servers, plainly, train
from matrix import LOSSES as MATRIX_LOSSES
from measure import distance, replicas_are_equal, same_bits
from torch import nn

from gangline import Module, cpu
from tests.kvstore.parameter_server.processes import run_job

FEATURES, CLASSES = 6, 4


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 5, 3),
        nn.GELU(),
        nn.Flatten(),
        nn.LayerNorm(20),
        nn.Linear(20, CLASSES),
    )


def labels(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (samples,), generator=generator)


def labels_some_ignored(samples: int, generator: torch.Generator) -> torch.Tensor:
    found = labels(samples, generator)
    found[torch.rand(samples, generator=generator) < 0.4] = -1
    found[0] = 1  # a whole batch without labels has no loss
    return found


def numbers(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)


def probabilities(samples: int, generator: torch.Generator) -> torch.Tensor:
    return numbers(samples, generator).softmax(1)


def own_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().pow(1.5).sum(1).mean()


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, torch.Generator], torch.Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), labels),
    "function": (nn.functional.cross_entropy, labels),
    "class-weighted": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), labels),
    "ignored": (nn.CrossEntropyLoss(ignore_index=-1), labels_some_ignored),
    "weighted-ignored-smoothed": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=-1, label_smoothing=0.1),
        labels_some_ignored,
    ),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=-1), labels_some_ignored),
    "probabilities": (nn.CrossEntropyLoss(), probabilities),
    "summed": (nn.CrossEntropyLoss(reduction="sum"), labels),
    "squares": (nn.MSELoss(), numbers),
    "squares-summed": (nn.MSELoss(reduction="sum"), numbers),
    "logits": (nn.BCEWithLogitsLoss(), probabilities),
    "margin": (nn.MultiMarginLoss(), labels),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), probabilities),
    "own": (own_loss, numbers),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3}),
    "nag": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "momentum": 0.5}),
}


# Every feature on every road


EVERYWHERE = ("branch", "unused", "eval", "checkpoint", "tied", "inplace", "frozen", "two networks")
FEATURES_OF = {
    "Module": (*EVERYWHERE, "sparse", "batchnorm", "dropout"),
    "Trainer": (*EVERYWHERE, "sparse"),
    "DistributedOptimizer": (*EVERYWHERE, "sparse"),
    "DDP": (*EVERYWHERE, "batchnorm"),
    "FSDP2": (*sorted({*EVERYWHERE} - {"branch"}), "batchnorm"),
}


@st.composite
def cases(draw: st.DrawFn, road: str) -> Case:
    """Draw a job; leave out what has no meaning on the road, but not what the product refuses."""
    is_wrapped = road in ("DDP", "FSDP2")
    workers = draw(st.integers(2 if is_wrapped else 1, 3))
    features = set(draw(st.frozensets(st.sampled_from(FEATURES_OF[road]), max_size=4)))
    shard = None if is_wrapped else draw(st.sampled_from([None, None, "optimizer", "weights"]))
    contexts = st.just(1) if road != "Module" or (shard == "weights" and workers > 1) else st.integers(1, 5 - workers)
    load = st.sampled_from([1, 2, 3, 0.5, 7] + [0] * (road == "Module" and shard is None))
    counts = [draw(contexts) for _ in range(workers)]
    sizes = st.tuples(*(st.tuples(*[load] * count) for count in counts))
    loads = draw(sizes.filter(lambda drawn: any(map(any, drawn))))
    senders = sum(own > 0 for contexts_of_worker in loads for own in contexts_of_worker)
    compression = None if is_wrapped else draw(st.sampled_from([None, None, *COMPRESSIONS]))
    half = road not in ("Trainer", "FSDP2") and draw(st.sampled_from([False, False, False, True]))
    clips = [None, "clip_global_norm"]
    if road in ("Module", "Trainer") or (road != "FSDP2" and shard != "weights"):
        clips += ["clip_norm", "clip_gradient"]
    if road == "DistributedOptimizer" and "sparse" in features:
        clips = [None]  # torch's functions clip dense gradients only
    if "eval" in features or compression or half:
        features.discard("batchnorm")  # a share's rounded gradient has no meaning by itself if it passes others'
    if shard == "weights":
        features.discard("branch")  # workers run the same layers
    if compression:
        half, compression = False, compression if senders > 1 else None
    if road == "DistributedOptimizer":  # alone it is torch's optimizer; GradScaler needs whole gradients
        half, compression = half and shard != "weights", compression if workers > 1 else None
    loss = draw(st.sampled_from(sorted(MATRIX_LOSSES)))
    if loss == "sum" and ((road == "Module" and "inplace" in features) or (road == "DistributedOptimizer" and half)):
        loss = "mean"  # a loss of the user's own is a mean; a loop that averages sums multiplies them, and rounds so
    batch = draw(st.integers(6, 13) if "batchnorm" in features else st.integers(1, 13))
    return Case(
        road,
        loads,
        store=draw(st.sampled_from(["local", "device"])),
        features=frozenset(features),
        loss=loss,
        optimizer=draw(st.sampled_from(["plain sgd", "adagrad"] if "sparse" in features else ["sgd", "adamw"])),
        clip=draw(st.sampled_from(clips)),
        compression=compression,
        half=half,
        shard=shard,
        accumulate=1 if half and is_wrapped else draw(st.integers(1, 3)),
        way=draw(st.sampled_from(["early", "late", "fit"] if road == "Module" else ["early", "late"])),
        batch=batch,
        last=draw(st.integers(4 if "batchnorm" in features else 1, batch)),
        bucket=draw(st.sampled_from([None, 64])),
        seed=draw(st.integers(0, 1000)),
    )


def refusal(case: Case) -> str | None:
    """Return what the error says of a combination that is refused."""
    alone = len(case.loads) == 1
    if case.is_wrapped and case.batch < len(case.loads):
        return f"global_batch is {case.batch}; expected an int with at least one sample for each of"
    if case.road == "Module" and case.shard == "weights":
        if len(case.loads[0]) > 1:
            return "divides the weights among workers, and this one has"
        for refused, words in (
            (case.compression, "compression_params is not available"),
            ("batchnorm" in case.features, "sync_batchnorm=True is not available"),
            (case.half, "autocast=torch.float16 is not available"),
        ):
            if refused:
                return f"{words} with shard='weights'"
    if case.road == "Module" and {"dropout", "checkpoint"} <= case.features:
        return "which activation checkpointing runs twice"
    if case.shard == "weights" and not alone and (case.compression or "sparse" in case.features):
        return "are not compressed|has a sparse gradient; expected a dense one"
    if case.road == "DistributedOptimizer" and case.compression and not alone:
        return "are not compressed"
    if case.road == "DistributedOptimizer" and "sparse" in case.features and not alone:
        return "have sparse gradients, which are not averaged here"
    return None


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


@pytest.mark.parametrize("road", sorted(FEATURES_OF))
@settings(max_examples=settings.default.max_examples // 6)  # type: ignore[union-attr]
@given(data=st.data())
def test_every_combination_of_features_trains_as_one_plain_loop(road: str, data: st.DataObject, jobs: Jobs) -> None:
    case = data.draw(cases(road))
    if words := refusal(case):
        with pytest.raises((ValueError, RuntimeError), match=words):
            jobs.run(case)
        return
    first, *others = jobs.run(case)
    apart = distance(first, plainly(case))
    note(f"distance {apart:.1e}")
    assert apart <= (1e-5 if case.half else 1e-11)
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())


ON_SERVERS = [
    Case("Module", ((2,), (1,)), features=frozenset({"branch", "unused"}), clip="clip_global_norm", bucket=64),
    Case(
        "Module", ((3, 1), (2,)), features=frozenset({"sparse"}), optimizer="adagrad", clip="clip_norm", loss="weighted"
    ),
    Case("Module", ((3,), (1,)), features=frozenset({"batchnorm"}), accumulate=3, loss="ignored", way="fit", last=4),
    Case("Trainer", ((1,), (3,)), optimizer="adamw", clip="clip_gradient", accumulate=2, way="late"),
    Case("DistributedOptimizer", ((1,), (3,)), clip="clip_global_norm", loss="ignored"),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(ON_SERVERS)]
)
def test_workers_with_servers_train_as_one_plain_loop(case: Case) -> None:
    first, second = run_job(on_servers, 2, 2, case)
    assert distance(first, plainly(case)) <= 1e-11
    assert same_bits(second, first)


ON_GPUS = [
    Case("Module", ((2, 1, 1),), features=frozenset({"branch"}), clip="clip_gradient"),
    Case("Module", ((2, 1),), store="device", features=frozenset({"sparse"}), optimizer="plain sgd", clip="clip_norm"),
    Case("Module", ((2, 1),), features=frozenset({"sparse"}), optimizer="adagrad", clip="clip_global_norm"),
    Case("Module", ((1, 2),), store="device", features=frozenset({"unused"}), optimizer="adamw", bucket=64),
    Case("Module", ((2, 1, 1),), store="device", features=frozenset({"dropout"}), accumulate=3, loss="weighted"),
    Case("Module", ((2, 1, 1),), features=frozenset({"batchnorm"}), last=4, way="fit"),
    Case("Module", ((2, 1),), store="device", features=frozenset({"batchnorm", "checkpoint"}), last=4, way="late"),
]


@pytest.mark.parametrize("case", ON_GPUS)
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(devices, marks=pytest.mark.gpu if "gpu" in devices else ())
        for devices in (("cpu",), ("gpu",), ("gpu", "cpu"))
    ],
)
def test_contexts_of_any_kind_train_as_one_plain_loop(case: Case, devices: tuple[str, ...]) -> None:
    """A GPU that is listed twice runs in threads with a barrier where statistics are joined."""
    if "gpu" in devices and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch sees none here")
    assert distance(train(replace(case, devices=devices), None), plainly(case)) <= 1e-9


# Losses and optimizers of Module


@dataclass
class Job:
    """A training job that gangline and plain torch both do."""

    network: Callable[[], nn.Module]
    loss: str
    optimizer: str
    samples: int
    batch_size: int
    epochs: int
    dtype: torch.dtype
    seed: int

    def arguments(self) -> dict[str, Any]:
        """Return the optimizer's arguments; a summed loss needs a smaller learning rate, or training diverges."""
        arguments = dict(OPTIMIZERS[self.optimizer][1])
        if self.loss.endswith("summed"):
            arguments["lr"] /= 50
        return arguments

    def make(self) -> tuple[nn.Module, Any, list[tuple[torch.Tensor, torch.Tensor]]]:
        torch.manual_seed(self.seed)
        network = self.network().to(self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        loss, make_labels = LOSSES[self.loss]
        batches = []
        for start in range(0, self.samples, self.batch_size):
            size = min(self.batch_size, self.samples - start)
            data = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(self.dtype)
            label = make_labels(size, generator)
            batches.append((data, label.to(self.dtype) if label.is_floating_point() else label))
        loss = copy.deepcopy(loss).to(self.dtype) if isinstance(loss, nn.Module) else loss
        return network, loss, batches * self.epochs

    def plainly(self) -> dict[str, torch.Tensor]:
        network, loss, batches = self.make()
        optimizer = OPTIMIZERS[self.optimizer][0](network.parameters(), **self.arguments())
        for data, label in batches:
            optimizer.zero_grad()
            loss(network(data), label).backward()
            optimizer.step()
        return network.state_dict()

    def by_module(self, loads: list[float], store: str) -> dict[str, torch.Tensor]:
        network, loss, batches = self.make()
        contexts = [cpu(index) for index in range(len(loads))]
        with Module(network, loss, contexts, loads) as module:
            module.init_optimizer(store, self.optimizer, self.arguments())
            for data, label in batches:
                module.forward_backward_update(data, label)
            replicas_are_equal(module)
            return module.get_params()


loads = st.lists(
    st.one_of(st.integers(0, 5), st.floats(0, 10, allow_subnormal=False).map(lambda x: round(x, 3))),
    min_size=1,
    max_size=4,
).filter(any)


@settings(max_examples=settings.default.max_examples // 2)  # type: ignore[union-attr]
@given(
    loads=loads,
    store=st.sampled_from(["local", "device"]),
    network=st.sampled_from([perceptron, convolution]),
    loss=st.sampled_from(sorted(LOSSES)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    batch_size=st.integers(1, 13),
    last=st.integers(1, 13),
    seed=st.integers(0, 1000),
)
def test_float64_weights_after_20_steps_are_those_of_one_device(
    loads: list[float],
    store: str,
    network: Callable[[], nn.Module],
    loss: str,
    optimizer: str,
    batch_size: int,
    last: int,
    seed: int,
) -> None:
    samples = 3 * batch_size + min(last, batch_size)  # four batches, the last one often partial
    job = Job(network, loss, optimizer, samples, batch_size, epochs=5, dtype=torch.float64, seed=seed)
    apart = distance(job.by_module(loads, store), job.plainly())
    assert apart <= 1e-11


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_float32_weights_after_one_step_are_those_of_one_device(loss: str) -> None:
    for optimizer, store in (("sgd", "local"), ("adamw", "device")):
        job = Job(perceptron, loss, optimizer, samples=11, batch_size=11, epochs=1, dtype=torch.float32, seed=3)
        assert distance(job.by_module([3, 1, 2], store), job.plainly()) <= 1e-5


def test_one_context_gives_the_same_bits_with_and_without_a_store() -> None:
    from gangline.kvstore import create

    job = Job(perceptron, "cross-entropy", "sgd", 20, 6, epochs=3, dtype=torch.float32, seed=5)
    bare = job.by_module([1], "device")
    network, loss, batches = job.make()
    with create("device") as store, Module(network, loss, cpu()) as module:
        module.init_optimizer(store, "sgd", job.arguments())
        for data, label in batches:
            module.forward_backward_update(data, label)
        assert all(torch.equal(bare[name], value) for name, value in module.get_params().items())


def test_a_share_whose_labels_are_all_ignored_adds_exactly_nothing() -> None:
    torch.manual_seed(0)
    network = perceptron().double()
    data = torch.randn(4, FEATURES, dtype=torch.float64)
    label = torch.tensor([2, 1, -100, -100])
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.1})
        module.forward_backward(data, label)
        assert torch.equal(module.get_loss(), nn.functional.cross_entropy(network(data), label))
        second = module.bound.replicas.all[1].parameters
        assert all(p.grad is not None and not p.grad.any() for p in second.values())

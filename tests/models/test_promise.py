"""Equivalence guarantee: any road and any split of workers, ranks and contexts trains as one device does.

The reference is a plain torch loop over the whole batches, without gangline's code. The first test draws combinations
of all features on all roads, see `matrix`; the others run fixed rows of it, and look at corners.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from matrix import COMPRESSIONS, LOSSES, OPTIMIZERS, Case, Jobs, on_servers, plainly, share_of, train
from measure import distance, same_bits
from torch import nn

from gangline import Module, cpu
from tests.kvstore.parameter_server.processes import run_job

EVERYWHERE = ("branch", "unused", "eval", "checkpoint", "tied", "inplace", "frozen", "two networks")
FEATURES_OF = {
    "Module": (*EVERYWHERE, "sparse", "batchnorm", "dropout"),
    "Trainer": (*EVERYWHERE, "sparse"),
    "DistributedOptimizer": (*EVERYWHERE, "sparse"),
    "DDP": (*EVERYWHERE, "batchnorm"),
    "FSDP2": (*sorted({*EVERYWHERE} - {"branch"}), "batchnorm"),
}


HALF = 2e-3
"""Largest distance with float16, which rounds gradients by 5e-4, and a clipping factor or a bias close to 0 by more.

A lost or wrongly weighted sample, or a step that should be skipped, moves the weights by 0.05 and more.
"""


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
    loss = draw(st.sampled_from(["ignored", "mean", "sum", "weighted"]))
    if loss == "sum" and ("inplace" in features if road == "Module" else half):
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
    return None


def has_gradient_of_nothing(case: Case) -> bool:
    """Return whether only samples without a label that counts use the branch in a step, on workers that have no others.

    One device has gradients of zeros there, with weight decay and momentum; the job has none (docs/own-network.md).
    """
    if "branch" not in case.features or case.is_wrapped or (case.road == "Module" and len(case.loads) == 1):
        return False
    for window in case.windows():
        is_used = is_counted = False
        for rank in range(len(case.loads)):
            shares = [share_of(case, rank, *batch) for batch in window]
            total = sum(case.count(label) for _, label in shares)
            for data, label in shares:
                uses = bool((data[:, 0] > 1.5).any())
                is_used |= uses
                is_counted |= uses and (total if case.road == "Module" else case.count(label)) > 0
        if is_used and not is_counted:
            return True
    return False


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()


@pytest.mark.parametrize("road", sorted(FEATURES_OF))
@settings(max_examples=settings.default.max_examples // 6)  # type: ignore[union-attr]
@given(data=st.data())
def test_every_combination_of_features_trains_as_one_plain_loop(road: str, data: st.DataObject, jobs: Jobs) -> None:
    case = data.draw(cases(road))
    assume(not has_gradient_of_nothing(case))
    if words := refusal(case):
        with pytest.raises((ValueError, RuntimeError), match=words):
            jobs.run(case)
        return
    first, *others = jobs.run(case)
    apart = distance(first, plainly(case))
    note(f"distance {apart:.1e}")
    assert apart <= (HALF if case.half else 1e-11)
    for other in others:
        assert all(torch.equal(first[name], value) for name, value in other.items())


ON_SERVERS = [
    Case(
        "Module", ((3, 1), (2,)), features=frozenset({"sparse"}), optimizer="adagrad", clip="clip_norm", loss="weighted"
    ),
    Case("Module", ((3,), (1,)), features=frozenset({"batchnorm"}), accumulate=3, loss="ignored", way="fit", last=4),
    Case("DistributedOptimizer", ((1,), (3,)), features=frozenset({"sparse", "unused"}), optimizer="adagrad"),
]


@pytest.mark.parametrize("case", ON_SERVERS)
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


def test_every_loss_of_a_module_trains_as_one_plain_loop() -> None:
    for number, (loss, optimizer) in enumerate(zip(LOSSES, cycle(OPTIMIZERS), strict=False)):
        loads = ((3, 1, 2), (1,), (2.345, 0, 1, 0.7))[number % 3]
        case = Case(
            "Module", (loads,), ("local", "device")[number % 2], loss=loss, optimizer=optimizer, epochs=5, batch=11
        )
        assert distance(train(case, None), plainly(case)) <= 1e-11, (loss, optimizer)


def test_one_context_gives_the_same_bits_with_and_without_a_store() -> None:
    case = Case("Module", ((1,),), loss="mean")
    network, batches = case.networks(), [batch for window in case.windows() for batch in window]
    with Module(network, nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer("device", OPTIMIZERS["sgd"][0], case.arguments())
        for data, label in batches:
            module.forward_backward_update(data, label)
        assert module.store_type is None
        assert same_bits(module.get_params(), train(case, None))

"""Gradient clipping sees the gradient of the whole batch: any contexts and workers train as a plain torch loop does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from gangline import Context, Module, cpu, gpu
from gangline.kvstore import KVStore, create
from gangline.kvstore.optimizer.keyed import KeyedOptimizer
from gangline.kvstore.reducer import reducer
from tests.kvstore.parameter_server.processes import run_job

pytestmark = [pytest.mark.timeout(110), pytest.mark.usefixtures("one_thread")]

FEATURES, CLASSES, SAMPLES, BATCH, EPOCHS = 6, 3, 37, 8, 4  # 20 steps; the last batch is partial
CLIPS = {"clip_gradient": 0.02, "clip_norm": 0.1, "clip_global_norm": 0.15}
ARGUMENTS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2}
Params = Mapping[str, torch.Tensor]


class Branches(nn.Module):
    """Network with a branch that runs for some batches only, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.sometimes = nn.Linear(FEATURES, 8)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        rare = x[:, :1] > 1.5
        if rare.any():
            found = found + rare * self.sometimes(x)
        return self.last(found.tanh())


class Words(nn.Module):
    """Network with an embedding table that has sparse gradients."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x[:, :3] * 100).long().abs() % 20).mean(1))


def made(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return {"branches": Branches, "words": Words}[kind](**options).double()


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    label = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    label[torch.rand(SAMPLES, generator=generator) < 0.4] = -100  # ignored
    label[::BATCH] = 1  # a whole batch without labels has no loss
    return data, label


def clip(name: str, parameters: list[nn.Parameter]) -> bool:
    """Clip as a torch loop does; return True if anything changed."""
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    if name == "clip_gradient":
        clip_grad_value_(parameters, CLIPS[name])
    elif name == "clip_global_norm":
        clip_grad_norm_(parameters, CLIPS[name])
    else:
        for parameter in parameters:
            clip_grad_norm_([parameter], CLIPS[name])
    after = [p.grad for p in parameters if p.grad is not None]
    return not all(map(torch.equal, gradients, after))


@cache
def plainly(name: str, kind: str = "branches") -> Params:
    """Run a torch loop of 20 batches."""
    network = made(kind, **({"sparse": False} if kind == "words" else {}))
    own = (
        {"momentum": 0.9, "weight_decay": 1e-2} if kind == "branches" else {}
    )  # sparse gradients have none: updates are lazy
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, **own)
    clipped = 0
    for _ in range(EPOCHS):
        data, label = arrays()
        for part, of_part in zip(data.split(BATCH), label.split(BATCH), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(part), of_part).backward()
            clipped += clip(name, list(network.parameters()))
            optimizer.step()
    assert clipped > EPOCHS
    return {key: value.detach().clone() for key, value in network.state_dict().items()}


def trained(
    name: str,
    store: str | KVStore | None,
    loads: list[float],
    kind: str = "branches",
    contexts: Sequence[Context] = (),
) -> Params:
    places = contexts or [cpu(i) for i in range(len(loads))]
    with Module(made(kind), nn.CrossEntropyLoss(), places, loads) as module:
        module.fit(
            arrays(),
            num_epoch=EPOCHS,
            batch_size=BATCH,
            shuffle=False,
            kvstore=store,
            optimizer_params={**(ARGUMENTS if kind == "branches" else {"learning_rate": 0.1}), name: CLIPS[name]},
            eval_metric="loss",
        )
        return module.get_params()


def test_one_context_gives_torchs_bits_with_and_without_a_store() -> None:
    with create("local") as store:
        for given in (None, store):
            found = trained("clip_global_norm", given, [1])
            assert all(torch.equal(found[key], value) for key, value in plainly("clip_global_norm").items())


@pytest.mark.parametrize("verbs", ["early", "late"])
def test_many_buckets_are_summed_one_by_one_and_clipped_together(verbs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "BUCKET_BYTES", 64)
    updates: list[list[str]] = []
    inner = KeyedOptimizer.update

    def update(own: KeyedOptimizer, gradients: Any, is_wanted: Any) -> None:
        updates.append(sorted(key for key, _ in gradients))
        inner(own, gradients, is_wanted)

    monkeypatch.setattr(KeyedOptimizer, "update", update)
    data, label = arrays()
    with Module(made("branches"), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {**ARGUMENTS, "clip_global_norm": CLIPS["clip_global_norm"]})
        for _ in range(EPOCHS):
            for part, of_part in zip(data.split(BATCH), label.split(BATCH), strict=True):
                if verbs == "early":
                    module.forward_backward_update(part, of_part)
                else:
                    module.forward_backward(part, of_part)
                    module.update()
        found = module.get_params()
    assert distance(found, plainly("clip_global_norm")) <= 1e-11
    assert len(updates) == 20
    assert {len(names) for names in updates} == {4, 6}  # with and without the optional branch


class Breaks(torch.autograd.Function):
    """Identity with a backward that fails while a flag is set."""

    fails = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Breaks.fails:
            raise ArithmeticError("on purpose")
        return gradient


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Breaks.apply(self.first(x)).tanh())


@pytest.mark.parametrize("store", ["local", "device"])
def test_after_a_backward_that_fails_no_weight_has_changed(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "BUCKET_BYTES", 64)
    data, label = arrays()

    def steps(broken: bool) -> Params:
        torch.manual_seed(1)
        with Module(Fragile().double(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
            module.init_optimizer(store, "sgd", {**ARGUMENTS, "clip_global_norm": 0.05})
            for number in range(4):
                before = module.get_params()
                if broken and number in (0, 2):
                    monkeypatch.setattr(Breaks, "fails", True)
                    with pytest.raises(ArithmeticError, match="on purpose") as raised:
                        module.forward_backward_update(data, label)
                    monkeypatch.setattr(Breaks, "fails", False)
                    assert not any("nor could" in note for note in getattr(raised.value, "__notes__", []))
                    assert distance(module.get_params(), before) == 0
                module.forward_backward_update(data, label)
            return module.get_params()

    whole, broken = steps(False), steps(True)
    assert all(torch.equal(broken[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("name", "spoilt"), [("clip_norm", 2), ("clip_global_norm", 4)])
def test_a_norm_that_is_nan_makes_weights_nan(name: str, spoilt: int) -> None:
    network = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)).double()
    with Module(network, None, [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"learning_rate": 1.0, name: 1.0})
        module.forward(arrays()[0], is_train=True)
        module.backward(torch.ones(SAMPLES, CLASSES, dtype=torch.float64))
        for replica in module.bound.replicas.all:
            for key in ("0.weight", "0.bias"):
                gradient = replica.parameters[key].grad
                assert gradient is not None
                gradient.view(-1)[0] = float("nan")
        module.update()
        params = module.get_params()
    assert sum(bool(value.isnan().all()) for value in params.values()) == spoilt
    assert sum(bool(value.isnan().any()) for value in params.values()) == spoilt


def test_decay_is_added_behind_the_clip_with_a_factor_for_each_parameter() -> None:
    network = made("branches")
    reference = copy.deepcopy(network)
    data, label = arrays()
    decays = {"first.weight": 2.0, "first.bias": 0.0, "sometimes.bias": 0.0, "last.bias": 0.0}
    groups = [{"params": [p], "weight_decay": 0.1 * decays.get(name, 1.0)} for name, p in reference.named_parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        arguments = {"learning_rate": 0.1, "wd": 0.1, "wd_mult": decays, "clip_global_norm": 0.01}
        module.init_optimizer("local", "sgd", arguments)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(reference(data), label).backward()
            clip_grad_norm_(reference.parameters(), 0.01)
            optimizer.step()
            module.forward_backward_update(data, label)
        assert distance(module.get_params(), reference.state_dict()) <= 1e-13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none here")
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("store", ["local", "device"])
def test_gpus_train_as_a_torch_loop_that_clips(name: str, store: str) -> None:
    for contexts in ([gpu(0), gpu(0)], [gpu(0), cpu(0)]):
        for kind in ("branches", "words"):
            assert distance(trained(name, store, [2, 1], kind, contexts=contexts), plainly(name, kind)) <= 1e-11


# Workers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("clip_global_norm", "branches"),
        pytest.param("clip_global_norm", "words", marks=pytest.mark.slow),
        pytest.param("clip_norm", "branches", marks=pytest.mark.slow),
        pytest.param("clip_norm", "words", marks=pytest.mark.slow),
        pytest.param("clip_gradient", "branches", marks=pytest.mark.slow),
    ],
)
def test_workers_with_servers_train_as_a_torch_loop_that_clips(name: str, kind: str) -> None:
    first, second = run_job(trained, 2, 2, name, "dist_sync", [1.0, 2.0], kind)
    assert distance(first, plainly(name, kind)) <= 1e-11
    assert all(torch.equal(first[key], second[key]) for key in first)


def resumed(store: str, name: str, prefix: str, contexts: int, begins: bool) -> Params:
    """Train 3 steps and save, or load; then train 3 more."""
    data, label = arrays()
    loss, places = nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]
    if begins:
        module = Module(made("branches"), loss, places)
    else:
        module = Module.load(prefix, 1, network=made("branches"), loss=loss, context=places, load_optimizer_states=True)
    with module:
        module.init_optimizer(store, "adam", {"learning_rate": 0.01, name: CLIPS[name]})
        mine = module.workers.share(SAMPLES)
        for _ in range(3 if begins else 0):
            module.forward_backward_update(data[mine], label[mine])
        if begins:
            module.save_checkpoint(prefix, 1, save_optimizer_states=True)
        for _ in range(3):
            module.forward_backward_update(data[mine], label[mine])
        return module.get_params()


@pytest.mark.parametrize(
    ("store", "name"),
    [
        *(("device", name) for name in CLIPS),
        *(pytest.param("dist_sync", name, marks=pytest.mark.slow) for name in ("clip_norm", "clip_global_norm")),
    ],
)
def test_a_run_resumes_from_its_checkpoint_with_the_same_bits(store: str, name: str, tmp_path: Path) -> None:
    def run(begins: bool) -> list[Params]:
        arguments = (store, name, str(tmp_path / "net"))
        return [resumed(*arguments, 2, begins)] if store == "device" else run_job(resumed, 2, 2, *arguments, 1, begins)

    whole, *_ = run(begins=True)
    for found in run(begins=False):
        assert all(torch.equal(found[key], value) for key, value in whole.items())


def test_a_float16_loss_is_unscaled_before_the_clip_and_overflows_are_skipped() -> None:
    torch.manual_seed(2)
    network = nn.Linear(FEATURES, CLASSES)
    data, label = arrays()
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)], autocast=torch.float16) as module:
        module.init_optimizer("device", "sgd", {"learning_rate": 1.0, "clip_global_norm": 0.01})
        skipped, moved = 0, []
        for factor in (1e4, 1.0, 1.0):
            before = module.get_params()
            assert module.loss_scale is not None
            scale = module.loss_scale.value
            module.forward_backward_update((data * factor).float(), label)
            skipped += module.loss_scale.value < scale
            moved.append(float(torch.cat([(v - before[k]).flatten() for k, v in module.get_params().items()]).norm()))
    assert skipped == 1
    assert moved == [0.0, pytest.approx(0.01, rel=1e-3), pytest.approx(0.01, rel=1e-3)]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"clip_gradient": 1.0, "clip_norm": 2.0},
            "clip_gradient=1.0 and clip_norm=2.0 are given; expected at most",
        ),
        ({"clip_norm": 0}, "clip_norm is 0; expected a number above 0"),
        ({"clip_global_norm": float("nan")}, "clip_global_norm is nan; expected a number above 0"),
    ],
)
def test_bad_thresholds_are_refused_before_training(params: dict[str, float], message: str) -> None:
    with Module(made("branches"), nn.CrossEntropyLoss()) as module, pytest.raises(ValueError, match=message):
        module.fit(arrays(), num_epoch=1, batch_size=BATCH, optimizer_params=params)

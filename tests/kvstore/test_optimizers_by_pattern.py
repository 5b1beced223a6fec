"""Optimizers by patterns of keys: the weights of several torch optimizers in one process, on all stores and fronts."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline import Communicator, Module, OptimizerSpec, Trainer, cpu, create
from gangline.callback import Checkpoint
from gangline.kvstore import KVStore
from tests.collectives.ranks import in_threads
from tests.kvstore.parameter_server.cases import check, play

pytestmark = pytest.mark.timeout(110)

MUON: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "ns_steps": 1}
ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
FAST: dict[str, Any] = {"lr": 0.4, "momentum": 0.9, "nesterov": True}
SLOW: dict[str, Any] = {"lr": 0.1, "momentum": 0.5}


At = Callable[[int, Any], None]
"""Called before each step, with its number and the front."""


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "head" not in name


def is_head(name: str, _: Tensor) -> bool:
    return "head" in name


FUNCTIONS: dict[str, Callable[[str, Tensor], bool]] = {"muon": is_matrix, "rates": is_head}


SPECS: dict[str, tuple[Any, Any, list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]]]] = {
    "muon": (
        {"*.[02].weight": ("muon", MUON), "*": ("adamw", ADAMW)},
        {},
        [(torch.optim.Muon, MUON, r"\.[02]\.weight$"), (torch.optim.AdamW, ADAMW, "")],
    ),
    "rates": (
        {"*head*": (torch.optim.SGD, FAST), "*": OptimizerSpec.parse(("sgd", SLOW))},
        {"clip_global_norm": 0.3, "lr_mult": {}},
        [(torch.optim.SGD, FAST, "head"), (torch.optim.SGD, SLOW, "")],
    ),
}
"""Patterns, arguments beside them, and the torch optimizers with regular expressions of their parameters."""
STEPS = 4


def network(name: str) -> nn.Sequential:
    torch.manual_seed(5)
    body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.LayerNorm(8))
    layers = OrderedDict([("body", body), ("head", nn.Linear(8, 3))])
    return nn.Sequential(OrderedDict([(name, nn.Sequential(layers))])).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randn(9, 6, generator=generator).double(), torch.randn(9, 3, generator=generator).double()


def by_torch(name: str, kind: str, factor: float = 0.5) -> dict[str, Tensor]:
    """Return the weights of torch's optimizers in one process, whose rates are multiplied after the second step."""
    net, left = network(name), dict(network(name).named_parameters())
    named, own = dict(net.named_parameters()), []
    for optimizer_class, arguments, pattern in SPECS[kind][2]:
        keys = [key for key in left if re.search(pattern, key)]
        own.append(optimizer_class([named[key] for key in keys], **arguments))
        left = {key: one for key, one in left.items() if key not in keys}
    for step, (data, label) in enumerate(batches()):
        net.zero_grad()
        nn.functional.mse_loss(net(data), label).backward()
        if norm := SPECS[kind][1].get("clip_global_norm"):
            nn.utils.clip_grad_norm_(net.parameters(), norm)
        for one in own:
            one.param_groups[0]["lr"] *= factor if step == 2 else 1.0
            one.step()
    return {key: one.detach() for key, one in net.named_parameters()}


def share_of(kv: KVStore, *tensors: Tensor) -> list[Tensor]:
    """Return this worker's samples of a batch: 6 of 9, and 3."""
    return [one if kv.num_workers == 1 else one[6:] if kv.rank else one[:6] for one in tensors]


def by_store(kv: KVStore, net: nn.Module, kind: str, at: At) -> dict[str, Tensor]:
    named = dict(net.named_parameters())
    keys = list(named)
    group = kv.set_optimizer(SPECS[kind][:2], keys=keys)
    kv.init(keys, [one.detach() for one in named.values()])
    for step, (data, label) in enumerate(batches()):
        at(step, group)
        share = share_of(kv, data, label)
        parts = [share] if kv.num_workers > 1 else [[one[:2] for one in share], [one[2:] for one in share]]
        gradients = []
        for own_data, own_label in parts:  # of two devices, without other workers
            loss = nn.functional.mse_loss(net(own_data), own_label, reduction="sum") / label.numel()
            gradients.append(torch.autograd.grad(loss, list(named.values())))
        kv.push(keys, [list(of_devices) for of_devices in zip(*gradients, strict=True)])
        kv.update(group=group)
        kv.pull(keys, [one.data for one in named.values()])
    return dict(net.named_parameters())


def by_trainer(
    kv: KVStore, net: nn.Module, kind: str, at: At, *, shard: str | None = None, by_function: bool = False
) -> dict[str, Any]:
    patterns, beside = SPECS[kind][:2]
    if by_function:
        patterns = dict(zip([FUNCTIONS[kind], "*"], patterns.values(), strict=True))
    shard = shard if kv.type == "allreduce" else None
    trainer = Trainer(net, patterns, beside, kvstore=kv, shard=shard, memory=[2, 1] if shard else "auto")
    for step, batch in enumerate(batches()):
        at(step, trainer)
        data, label = share_of(kv, *batch)
        trainer.zero_grad()
        trainer.backward(nn.functional.mse_loss(net(data), label), len(data))
        trainer.step(len(data))
    return trainer.model_state_dict() if shard == "weights" else dict(net.named_parameters())


def by_module(kv: KVStore, net: nn.Module, kind: str, at: At) -> dict[str, Tensor]:
    module = Module(net, nn.MSELoss(), context=[cpu(0), cpu(1)] if kv.num_workers == 1 else [cpu()])
    module.init_optimizer(kv, *SPECS[kind][:2])
    for step, batch in enumerate(batches()):
        at(step, module)
        module.forward_backward_update(*share_of(kv, *batch))
    return module.get_params()


FRONTS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "store": by_store,
    "trainer": by_trainer,
    "owners": partial(by_trainer, shard="optimizer"),
    "function": partial(by_trainer, by_function=True, shard="weights"),
    "module": by_module,
}


def same_weights(kv: KVStore, front: str, kind: str) -> None:
    """Train by a front, beside the keys of the fronts before on the same store."""
    name = f"{front}_{kind}"

    def halve(step: int, one: Any) -> None:
        if step == 2:
            assert one.learning_rate == SPECS[kind][2][0][1]["lr"]
            one.set_learning_rate(one.learning_rate / 2)

    found = FRONTS[front](kv, network(name), kind, halve)
    expected = by_torch(name, kind) if found else {}
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key].detach(), weight, rtol=0, atol=1e-11)


def cases() -> list[Callable[[KVStore], None]]:
    found: list[Any] = [partial(same_weights, front=front, kind=kind) for front in FRONTS for kind in SPECS]
    for one in found:
        one.__name__ = str(one.keywords)
    return found


@pytest.mark.parametrize("store", ["local", "device"])
def test_each_front_trains_as_torch_does_in_one_process(store: str) -> None:
    assert play(store, cases(), {}) == [None] * len(cases())


@pytest.mark.slow
@pytest.mark.parametrize(("store", "servers"), [("allreduce", 0), ("dist_sync", 2)])
def test_each_front_trains_as_torch_does_by_two_workers(store: str, servers: int) -> None:
    check(store, 2, servers, cases())


# Save and resume


def in_two_runs(net: nn.Sequential, folder: Path, *makes: Callable[[KVStore, nn.Module], Any]) -> nn.Sequential:
    """Train two steps by each of two fronts; the second begins with the weights and the saved state of the first."""
    for number, make in enumerate(makes):
        net = copy.deepcopy(net)
        with create("local") as kv:
            trainer = make(kv, net)
            if number:
                trainer.load_states(folder / "states")
            for step, (data, label) in enumerate(batches()):
                if step // 2 == number:
                    trainer.zero_grad()
                    nn.functional.mse_loss(net(data), label).backward()
                    trainer.step(len(data))
            trainer.save_states(folder / "states")
    return net


@pytest.mark.parametrize("kind", SPECS)
def test_a_state_is_loaded_by_other_patterns_that_give_keys_the_same_optimizers(kind: str, tmp_path: Path) -> None:
    patterns, beside, _ = SPECS[kind]
    first, rest = patterns.values()

    def by_patterns(kv: KVStore, net: nn.Module) -> Trainer:
        return Trainer(net, patterns, beside, kv)

    def by_function(kv: KVStore, net: nn.Module) -> Trainer:
        return Trainer(net, {FUNCTIONS[kind]: first, "*": rest}, beside, kv)

    found = in_two_runs(network("net"), tmp_path, by_patterns, by_function)
    expected = in_two_runs(network("net"), tmp_path, by_patterns, by_patterns)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    by_one = by_torch("net", kind, factor=1.0)
    for key, weight in found.named_parameters():
        torch.testing.assert_close(weight.detach(), by_one[key], rtol=0, atol=1e-11)


def test_a_state_of_one_optimizer_is_loaded_by_patterns_of_the_same_class_alone(tmp_path: Path) -> None:
    def alone(kv: KVStore, net: nn.Module) -> Trainer:
        return Trainer(net, "sgd", FAST, kv)

    def two(kv: KVStore, net: nn.Module) -> Trainer:
        return Trainer(net, {"*bias": ("sgd", FAST), "*": ("sgd", FAST)}, kvstore=kv)

    def other(kv: KVStore, net: nn.Module) -> Trainer:
        return Trainer(net, {"*head*": ("adamw", ADAMW), "*": ("sgd", FAST)}, kvstore=kv)

    found, expected = (in_two_runs(network("net"), tmp_path, alone, second) for second in (two, alone))
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    text = "the state of key 'net.head.(weight|bias)' is of optimizer 'sgd', but here it has 'adamw'"
    for first in (alone, two):
        with pytest.raises(ValueError, match=text):
            in_two_runs(network("net"), tmp_path, first, other)


def test_a_module_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    patterns, beside, _ = SPECS["muon"]
    data, label = map(torch.cat, zip(*batches(), strict=True))
    how: dict[str, Any] = {"batch_size": 9, "optimizer": patterns, "optimizer_params": beside, "kvstore": "local"}
    found = []
    for epochs in ([2], [1, 2]):
        for num_epoch in epochs:
            with Module(network("net"), nn.MSELoss(), context=[cpu(0), cpu(1)]) as module:
                saver = Checkpoint(module, tmp_path / str(len(epochs)))
                module.fit((data, label), num_epoch=num_epoch, epoch_end_callback=saver, resume="auto", **how)
                found.append(module.get_params())
    assert all(torch.equal(found[0][key], one) for key, one in found[2].items())


# Wrong uses

BAD: list[tuple[Any, type[Exception], str]] = [
    ({}, ValueError, "the dict of optimizers by pattern is empty; expected one, such as"),
    ({"a": "sgd"}, ValueError, r"key 'b' matches none of the optimizer's patterns \['a'\]; '\*' matches all others"),
    (
        {"*": "sgd", "a": "adam"},
        ValueError,
        r"patterns \['a'\] of the optimizer match no key, or only keys that an ear",
    ),
    ({"c*": "sgd", "*": "adam"}, ValueError, r"patterns \['c\*'\] .* the keys are \['a', 'b'\]"),
    ({("a", "c"): "sgd", ("d",): "adam", "*": "sgd"}, ValueError, r"patterns \[\('d',\)\] of the optimizer match no"),
    ({"a": "muon", "*": "sgd"}, ValueError, "key 'a' does not fit optimizer 'muon': Muon only supports 2D"),
    ({3: "sgd", "*": "sgd"}, ValueError, r"patterns \[3\] of the optimizer match no key"),
    ({"a": "sdg", "*": "sgd"}, ValueError, "optimizer 'sdg' is unknown; expected one of"),
    (({"*": "sgd"}, {"lr": 0.1}), ValueError, r"\['lr'\] stand beside patterns of keys; expected them in the argu"),
    ({"*": ("sgd", {"clip_norm": 1.0})}, ValueError, r"the optimizer of pattern '\*' is \('sgd', {'clip_norm': 1.0}\)"),
    ({"a": {"*": "sgd"}, "*": "sgd"}, ValueError, "the optimizer of pattern 'a' is {'\\*': 'sgd'}; expected arguments"),
    (({"*": "sgd"}, {"clip_norm": -1}), ValueError, "clip_norm is -1; expected a number above 0"),
    ({"a": ("sgd", {"lr": 0}), "*": "sgd"}, ValueError, "the learning rate of the first pattern is 0, to which"),
]


@pytest.mark.parametrize(("spec", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_wrong_patterns_are_refused_by_name(spec: Any, error: type[Exception], text: str) -> None:
    weights = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(3))}
    optimizer, beside = spec if isinstance(spec, tuple) else (spec, None)
    with pytest.raises(error, match=text):  # noqa: PT012  the first two calls set the store up
        trainer = Trainer(weights, optimizer, beside, "local")
        trainer.backward(sum(one.sum() for one in weights.values()), 1)
        trainer.step(1)
    if "does not fit" in text:
        return
    with create("local") as kv, pytest.raises(error, match=text.replace(r"\['a', 'b'\]", r"\[")):
        kv.set_optimizer(spec, keys=["a", "b"])


def test_functions_are_for_fronts_that_know_the_parameters() -> None:
    with (
        create("local") as kv,
        pytest.raises(ValueError, match=r"\[\]; a function is for Trainer, Module and LocalSteps"),
    ):
        kv.set_optimizer({is_matrix: "muon", "*": "adamw"})
    with pytest.raises(ValueError, match=r"is true for none of the parameters \['weight'\]; a function"):
        Trainer(nn.Linear(3, 3, bias=False), {lambda *_: False: "muon", "*": "adamw"}, kvstore="local")


def test_a_frozen_parameter_needs_no_pattern() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    for front in ("trainer", "module"):
        with create("local") as kv:
            if front == "trainer":
                trainer = Trainer(net, {"1.*": "sgd"}, kvstore=kv)
                trainer.backward(net(torch.ones(1, 2)).sum(), 1)
                trainer.step(1)
            else:
                module = Module(net, nn.MSELoss(), context=[cpu(0), cpu(1)])
                module.init_optimizer(kv, {"1.*": "sgd"})
                module.forward_backward_update(torch.ones(2, 2), torch.zeros(2, 2))
        changed = [key for key, one in net.state_dict().items() if not torch.equal(one, before[key])]
        assert changed == ["1.weight", "1.bias"]


def test_a_key_without_a_pattern_is_refused_when_it_is_pushed() -> None:
    with create("local") as kv:
        kv.set_optimizer({"a*": "sgd"})
        kv.init(["a", "b"], [torch.zeros(1)] * 2)
        kv.push("a", torch.ones(1))
        with pytest.raises(ValueError, match=r"key 'b' matches none of the optimizer's patterns \['a\*'\]"):
            kv.push("b", torch.ones(1))
        assert [*kv.optimizer_state().names.values()] == ["sgd"]
        kv.load_optimizer_state(kv.optimizer_state())


def _two_trainers(comm: Communicator) -> list[float]:
    """Return weights and rates after steps in turn of two Trainers with patterns, on one store."""
    nets = [nn.Linear(2, 1) for _ in range(2)]
    with create("allreduce", communicator=comm) as kv:
        specs: list[Any] = [{"*bias": ("sgd", {"lr": 1.0}), "*": ("sgd", {"lr": 0.5})}, {"D.w*": "sgd", "*": "adam"}]
        two = []
        for name, net, spec in zip("GD", nets, specs, strict=True):
            for one in net.parameters():
                nn.init.zeros_(one)
            two.append(Trainer({f"{name}.{key}": one for key, one in net.named_parameters()}, spec, kvstore=kv))
        for net, trainer in zip(nets, two, strict=True):
            trainer.set_learning_rate(trainer.learning_rate * 2)
            trainer.zero_grad()
            net(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
            trainer.step(1)
        return [one.learning_rate for one in two] + [
            float(one[..., 0]) for net in nets for one in net.state_dict().values()
        ]


def test_two_trainers_with_patterns_share_a_store() -> None:
    assert in_threads(2, _two_trainers) == [pytest.approx([2.0, 0.002, -1.5, -2.0, -0.003, -0.002], rel=1e-5)] * 2

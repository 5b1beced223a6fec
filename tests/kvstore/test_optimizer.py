"""Tests of optimizers in stores: equal to torch's bit for bit, names of torch and MXNet, state files, refusals."""

from __future__ import annotations

import functools
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gangline.kvstore import KVStore, OptimizerSpec, create
from gangline.kvstore.optimizer import files
from tests.kvstore.keyed import (
    OPTIMIZERS,
    SHAPES,
    STORES,
    Careless,
    Tensors,
    check_same,
    gradient,
    pulled,
    push,
    weights,
)

LR = 0.05


def torch_run(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Tensors:
    """Return the weights after five steps of torch alone."""
    found = weights()
    optimizer = make(list(found.values()))
    for step in range(5):
        for key, weight in found.items():
            weight.grad = sum_of([gradient(key, step, device) for device in range(2)])
        optimizer.step()
    return {key: weight.detach() for key, weight in found.items()}


def sum_of(values: list[torch.Tensor]) -> torch.Tensor:
    """Add values in order; those of half precision in float32, rounded once."""
    dtype = values[0].dtype
    return sum(value.float() if dtype.itemsize < 4 else value for value in values).to(dtype)  # type: ignore[union-attr]


def start(kv: KVStore, spec: Any, values: Tensors | None = None) -> None:
    values = weights() if values is None else values
    kv.init(list(values), list(values.values()))
    kv.set_optimizer(spec)


@functools.cache
def reference(name: str) -> Tensors:
    """Return `torch_run` for an optimizer name; cached, so read only."""
    optimizer_class, arguments = OPTIMIZERS[name]
    return torch_run(lambda values: optimizer_class(values, **arguments))


# -- torch's arithmetic -----------------------------------------------------------------------------------------------


def test_the_table_of_these_tests_has_every_optimizer() -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected one of {sorted([*OPTIMIZERS, 'sparseadam'])}")):
        OptimizerSpec.parse("no_such_optimizer")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates_and_a_state_that_goes_on_in_another_store_are_torchs_bit_for_bit(
    kv: KVStore, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Keys lack gradients in turn; the keys of names in "weight" and "gamma" alone have weight decay, as in MXNet."""
    optimizer_class, arguments = OPTIMIZERS[name]
    if name != "muon":
        arguments = arguments | ({"maximize": True} if dtype == torch.float64 else {"foreach": dtype.itemsize > 2})
    decay, spec = arguments.get("weight_decay"), arguments
    if decay is not None:
        spec = arguments | {"wd_mult": "mxnet"}
    expected = weights(dtype)
    groups: list[dict[str, Any]] = [{"params": [weight]} for weight in expected.values()]
    for key, group in zip(SHAPES, groups, strict=True):
        if decay is not None and key in (3, "3"):
            group["weight_decay"] = 0.0
    optimizer = optimizer_class(groups, **arguments)
    start(kv, (name, spec), weights(dtype))
    with create("device" if kv.type == "local" else "local") as other:
        for step in range(6):
            if step == 3:
                kv.save_optimizer_states(tmp_path / "states")
                start(other, (name, spec), pulled(kv, dtype=dtype))
                other.load_optimizer_states(tmp_path / "states")
                kv = other
            keys = [key for place, key in enumerate(SHAPES) if place != step % 5]
            given = {key: [gradient(key, step, device).to(dtype) for device in range(2)] for key in keys}
            kv.push(keys, list(given.values()))
            for key, weight in expected.items():
                weight.grad = sum_of(given[key]) if key in given else None
            optimizer.step()
            check_same(pulled(kv, dtype=dtype), expected)


def test_a_class_that_changes_its_gradient_does_not_change_the_pushed_one(kv: KVStore) -> None:
    start(kv, Careless)
    for devices in (1, 2):
        values = [gradient(3, 0, device) for device in range(devices)]
        for async_op in (False, False, True):
            kv.push(3, values, async_op=async_op).wait(20)
        assert all(torch.equal(value, gradient(3, 0, device)) for device, value in enumerate(values))
        assert all(value.grad is None for value in values)


# -- the spec ---------------------------------------------------------------------------------------------------------


class Heavy(torch.optim.Optimizer):
    """Custom optimizer: heavy ball divided by a counter, which it creates when it gets a weight, as torch's Adagrad."""

    def __init__(self, params: Any, lr: float, weight: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "weight": weight})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] += 1
                ball = state.setdefault("ball", torch.zeros_like(p))
                ball.mul_(group["weight"]).add_(p.grad, alpha=1 / state["count"])
                p.add_(ball, alpha=-group["lr"])


class Rateless(torch.optim.Optimizer):
    """Optimizer without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize(
    ("spec", "optimizer_class", "arguments"),
    [
        ((Heavy, {"lr": LR, "weight": 0.25}), Heavy, {"lr": LR, "weight": 0.25}),
        (("sgd", {"wd": 0.02, "momentum": 0.8}), torch.optim.SGD, {"weight_decay": 0.02, "momentum": 0.8}),
        (("adam", {"beta1": 0.7, "beta2": 0.8, "epsilon": 0.01}), torch.optim.Adam, {"betas": (0.7, 0.8), "eps": 0.01}),
        (("adamax", {"learning_rate": 0.1, "beta2": 0.7}), torch.optim.Adamax, {"lr": 0.1, "betas": (0.9, 0.7)}),
        (("nadam", {"beta1": 0.7, "wd": 0.1}), torch.optim.NAdam, {"betas": (0.7, 0.999), "weight_decay": 0.1}),
        (("adam", {"betas": [0.7, 0.8]}), torch.optim.Adam, {"betas": (0.7, 0.8)}),
        (("rmsprop", {"gamma1": 0.8, "gamma2": 0.5}), torch.optim.RMSprop, {"alpha": 0.8, "momentum": 0.5}),
        (("rmsprop", {"epsilon": 0.01, "centered": True}), torch.optim.RMSprop, {"eps": 0.01, "centered": True}),
        (("adadelta", {"rho": 0.5, "epsilon": 0.01}), torch.optim.Adadelta, {"rho": 0.5, "eps": 0.01}),
        (("nag", {"momentum": 0.9}), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (("AdamW", OPTIMIZERS["adamw"][1]), *OPTIMIZERS["adamw"]),
        (["sgd", {"lr": LR}], torch.optim.SGD, {"lr": LR}),
        (torch.optim.SGD, torch.optim.SGD, {}),
        ((torch.optim.AdamW, {"learning_rate": LR, "wd": 0.1}), torch.optim.AdamW, {"lr": LR, "weight_decay": 0.1}),
        (OptimizerSpec.parse(("adam", {"learning_rate": LR})), torch.optim.Adam, {"lr": LR}),
    ],
    ids=str,
)  # fmt: skip
def test_names_of_torch_and_mxnet_classes_lists_and_parsed_specs_mean_torchs_optimizer(
    kv: KVStore, spec: Any, optimizer_class: type[torch.optim.Optimizer], arguments: dict[str, Any], tmp_path: Path
) -> None:
    if isinstance(spec, OptimizerSpec):
        assert (spec.name, spec.arguments) == ("adam", arguments)
    start(kv, spec)
    for step in range(3):
        push(kv, step)
    kv.save_optimizer_states(tmp_path / "states")
    with create(kv.type) as resumed:
        start(resumed, spec, pulled(kv))
        resumed.load_optimizer_states(tmp_path / "states")
        for step in (3, 4):
            push(resumed, step)
        check_same(pulled(resumed), torch_run(lambda values: optimizer_class(values, **arguments)))


@pytest.mark.parametrize("spec", [("adagrad", {"lr": LR, "initial_accumulator_value": 0.5}), (Heavy, {"lr": LR})])
def test_a_key_that_a_loaded_state_lacks_begins_anew(kv: KVStore, spec: Any) -> None:
    """Load a state without a key, as of one that was frozen, or had no gradient on any worker, when it was saved."""
    start(kv, spec)
    push(kv, 0)
    with create(kv.type) as resumed:
        start(resumed, spec)
        resumed.load_optimizer_state(replace(kv.optimizer_state(), tensors={}, plain={}))
        push(resumed, 0)
        check_same(pulled(resumed), pulled(kv))


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "lbfgs": ("lbfgs", ValueError, "'lbfgs' cannot be used.*expected one of.*'sgd'"),
    "unknown": ("sdg", ValueError, "'sdg' is unknown; expected one of.*'adam'.*'sgd'"),
    "instance": (torch.optim.SGD([torch.zeros(1)], lr=0.1), TypeError, "optimizer is SGD"),
    "class without a rate": (Rateless, ValueError, "Rateless has no argument lr"),
    "three parts": (("sgd", {"lr": 0.1}, {}), TypeError, r"optimizer is \('sgd'"),
    "a rate for arguments": (("sgd", 0.1), TypeError, "0.1"),
    "unknown argument": (("sgd", {"momentun": 0.9}), ValueError, "'sgd' has no argument 'momentun'.*'momentum'.*'wd'"),
    "two rates": (("sgd", {"lr": 0.1, "learning_rate": 0.1}), ValueError, "both 'learning_rate' and its other name"),
    "beta1 and betas": (("adam", {"beta1": 0.9, "betas": (0.9, 0.9)}), ValueError, "both betas and beta1 or beta2"),
    "tensor": (("sgd", {"lr": torch.tensor(0.1)}), TypeError, r"argument 'lr' is tensor.*plain data"),
    "object as factor": (("sgd", {"lr_mult": {"w": object()}}), TypeError, "argument 'lr_mult' is <object"),
    "negative rate": (("sgd", {"lr": -0.1}), ValueError, "'sgd' with .*-0.1.* is refused by torch"),
    "factor below 0": (("sgd", {"lr_mult": {"w": -1}}), ValueError, "lr_mult is {'w': -1}; expected a dict"),
    "word for rates": (("sgd", {"lr_mult": "mxnet"}), ValueError, "lr_mult is 'mxnet'; expected a dict"),
    "wd_mult without decay": (("rprop", {"wd_mult": {"w": 2}}), ValueError, "wd_mult is given, but optimizer 'rprop'"),
    "str to rescale": (("sgd", {"rescale_grad": "2"}), ValueError, "rescale_grad is '2'; expected a number"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_fused_sgd_of_torch_is_refused_for_half_precision_on_the_cpu(kv: KVStore, dtype: torch.dtype) -> None:
    kv.init("w", torch.zeros(40, dtype=dtype))
    kv.set_optimizer(("sgd", {"lr": LR, "fused": True}))
    with pytest.raises(ValueError, match=r"key 'w' does not fit optimizer 'sgd': .* leave 'fused' out"):
        kv.push("w", torch.ones(40, dtype=dtype))
    kv.set_optimizer(("sgd", {"lr": LR}))
    kv.push("w", torch.ones(40, dtype=dtype))
    kv.pull("w", out := torch.empty(40, dtype=dtype))
    assert torch.equal(out, torch.full((40,), -LR, dtype=dtype))


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_optimizer_is_named_and_the_former_stays(kv: KVStore, case: str) -> None:
    spec, error, words = REFUSED[case]
    start(kv, ("sgd", OPTIMIZERS["sgd"][1]))
    push(kv, 0)
    with pytest.raises(error, match=words):
        kv.set_optimizer(spec)
    for step in range(1, 5):
        push(kv, step)
    check_same(pulled(kv), reference("sgd"))


# -- states in files --------------------------------------------------------------------------------------------------


def cut(kept: int) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[:kept])


def foreign(tensors: Tensors, metadata: dict[str, str] | None) -> Callable[[Path], Any]:
    return lambda path: save_file(tensors, path, metadata)


def of_store(spec: Any, keys: list[Any], shapes: dict[Any, tuple[int, ...]] = SHAPES) -> Callable[[Path], Any]:
    """Return what writes the state of a store with other keys or shapes, or with another optimizer."""

    def save(path: Path) -> None:
        with create("local") as other:
            ones = {key: torch.ones(shapes.get(key, (2, 2))) for key in keys}
            start(other, spec, ones)
            other.push(keys, list(ones.values()))
            other.save_optimizer_states(path)

    return save


ADAM = ("adam", {"lr": LR})
DAMAGED = "FILE is damaged or not a safetensors file"
NOT_OURS = "FILE was not written by gangline"
FILES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    **{f"{kept} bytes": (cut(kept), ValueError, DAMAGED) for kept in (0, 8, -1)},
    "text": (lambda path: path.write_text("The quick brown fox.\n" * 20), ValueError, "FILE"),
    "torch's": (lambda path: torch.save({"w": torch.zeros(3)}, path), ValueError, "FILE"),
    "no metadata": (foreign({'"fc.weight"/exp_avg': torch.zeros(4, 6)}, None), ValueError, NOT_OURS),
    "others' metadata": (foreign({'"fc.weight"/exp_avg': torch.zeros(4, 6)}, {"format": "pt"}), ValueError, NOT_OURS),
    "no optimizer": (
        lambda path: files.save(path, {"fc.weight": torch.zeros(4, 6)}, {"epoch": 3}),
        ValueError,
        "FILE holds no optimizer state",
    ),
    "missing": (Path.unlink, FileNotFoundError, "FILE is not there"),
    "a folder": (lambda path: path.unlink() or path.mkdir(), FileNotFoundError, "FILE is not there"),
    "unknown key": (of_store(ADAM, ["3", "stranger"]), ValueError, "key 'stranger', which is unknown here"),
    "another shape": (of_store(ADAM, ["fc.weight", 3], {3: (5, 2)}), ValueError, "the state of key"),
    **{
        name: (of_store((name, OPTIMIZERS[name][1]), [3]), ValueError, f"of optimizer '{name}', but 'adam' is set here")
        for name in ("sgd", "adamax")
    },
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_anything_else_is_refused_and_changes_nothing(case: str, tmp_path: Path) -> None:
    replace, error, words = FILES[case]
    path = tmp_path / "folder" / "states"
    for store in STORES:
        with create(store) as kv:
            start(kv, ("adam", OPTIMIZERS["adam"][1]))
            for step in range(2):
                push(kv, step)
            kv.save_optimizer_states(path)
            replace(path)
            with pytest.raises(error, match=re.escape(words.replace("FILE", str(path)))):
                kv.load_optimizer_states(path)
            for step in (2, 3, 4):
                push(kv, step)
            check_same(pulled(kv), reference("adam"))
        if path.is_dir():
            path.rmdir()


def test_saving_replaces_a_file_or_leaves_it_as_it_is_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "deep" / "er" / "states"
    kv = create("local")
    start(kv, "adam", {"key": torch.zeros(1000)})
    kv.save_optimizer_states(kept)
    empty = kept.stat().st_size
    kv.push("key", torch.ones(1000))
    kv.save_optimizer_states(kept)
    assert kept.stat().st_size > empty
    data = kept.read_bytes()
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # writes fail as on a full disk
    try:
        with pytest.raises(OSError, match=r"states.* cannot be written: .*"):
            kv.save_optimizer_states(kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in kept.parent.iterdir()] == ["states"]
    assert kept.read_bytes() == data

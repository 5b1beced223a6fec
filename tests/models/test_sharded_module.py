"""Module(shard="weights"): each worker holds the weights, gradients and state that it owns, by memory."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import pytest
import torch
from measure import same_bits
from torch import nn

from gangline import Module, cpu, create, spawn
from gangline.callback import Checkpoint
from gangline.collectives.errors import GanglineError
from gangline.models.balance import speed_model
from gangline.models.checkpoint import checkpoint as checkpoints

speed_model._MIN_SECONDS = 0.0  # in processes of jobs

LENGTH, CLASSES = 61, 11
mlp = partial(measure.mlp, 10, 40, 30, CLASSES, seed=3)
ADAM: dict[str, Any] = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01, "wd": 0.01}}
CLIPPED: dict[str, Any] = {
    "optimizer": "sgd",
    "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9, "clip_global_norm": 0.05},
}


def normalized() -> nn.Module:
    """Return a network with statistics of batches, dropout, and a layer that is not trained."""
    torch.manual_seed(3)
    layers = [nn.Linear(10, 20), nn.BatchNorm1d(20, momentum=0.3), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, CLASSES)]
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers).double()


def data_of(make: Callable[[], nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples whose last batch of 12 has one."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
    if make is normalized:
        label = label[:-1]  # no statistics of one sample
        return torch.randn(len(label), 10, generator=generator).double(), label
    return torch.randn(LENGTH, 10, generator=generator).double(), label


def module_of(make: Callable[[], nn.Module], store: Any, memory: Any = "auto", **options: Any) -> Module:
    """Return a module whose weights the store's workers are to divide, if there are several."""
    network = make()
    shard = None if store == "local" else "weights"
    if shard is not None and store.rank:
        for parameter in network.parameters():
            nn.init.zeros_(parameter)  # rank 0's count
    return Module(network, nn.CrossEntropyLoss(), context=cpu(), shard=shard, memory=memory, **options)


def results(module: Module, make: Callable[[], nn.Module]) -> list[Any]:
    """Return weights, optimizer state, score and outputs; all are rank 0's."""
    data = data_of(make)
    state = module.optimizer_state()
    return [
        module.get_params(),
        state.tensors,
        module.score(data, batch_size=16),
        module.predict(data[0], batch_size=20),
    ]


def held_bytes(module: Module) -> list[int]:
    """Return the bytes of weights, gradients and state that are in memory between two steps."""
    parameters = list(module.network.parameters())
    weights = sum(one.untyped_storage().nbytes() for one in parameters)
    gradients = sum(one.grad.untyped_storage().nbytes() for one in parameters if one.grad is not None)
    state = module._optimizer._optimizer.optimizer.state()
    return [weights, gradients, sum(one.nbytes for one in state.tensors.values())]


def fit(store: Any, make: Callable[[], nn.Module], how: dict[str, Any], memory: Any = "auto", **options: Any) -> Any:
    """Train 2 epochs of 6 batches; return `results` and the bytes held."""
    with module_of(make, store, memory, **options) as module:
        module.fit(data_of(make), num_epoch=2, batch_size=12, kvstore=store, **how)
        held = held_bytes(module) if store != "local" else []
        return [*results(module, make), held]


def unequal(own: Any, loads: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with a store of this job, whose workers have these loads."""
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=own) as store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
        return call(store, *arguments)


def of_two_workers(own: Any, folder: str) -> dict[str, Any]:
    """Train in many ways as one of two workers; return what each showed."""
    return {
        "saved": unequal(own, "1,1", half, f"{folder}/run", [3, 1], False),
        "loaded": unequal(own, "1,1", load_and_train, f"{folder}/run"),
        "own loaders": unequal(own, "1,1", own_loaders),
        "replaced": unequal(own, "1,1", replaces, f"{folder}/weights.safetensors"),
        "closed": unequal(own, "1,1", is_closed),
        "statistics": [
            unequal(own, "1,0", trains_with_statistics, f"{folder}/statistics", resumed) for resumed in (False, True)
        ],
        "error": unequal(own, "1,1", catches_an_error),
        "measured": unequal(own, "auto", measures),
    }


def of_three_workers(own: Any, folder: str) -> dict[str, Any]:
    return {
        "mlp": unequal(own, "2,3,1", fit, mlp, CLIPPED, [1, 0, 2]),
        "step by step": unequal(own, "1,1,1", step_by_step),
        "resumed": unequal(own, "1,1,1", half, f"{folder}/run", [1, 0, 2], True),
    }


Found = list[dict[str, Any]]
"""The results of each worker."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def two(folder: Path) -> Found:
    return spawn(of_two_workers, 2, str(folder), threads=1)


@pytest.fixture(scope="module")
def three(folder: Path, two: Found) -> Found:
    """Results of three workers, which resume the run of two."""
    return spawn(of_three_workers, 3, str(folder), threads=1)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-11)
    assert found[2] == expected[2]
    torch.testing.assert_close(found[3], expected[3], rtol=0, atol=1e-11)


def test_fit_gives_the_weights_of_one_worker_and_each_holds_its_part_alone(three: Found) -> None:
    expected = fit("local", mlp, CLIPPED)
    found = [each["mlp"] for each in three]
    assert_equal(found[0], expected)
    assert all(params == {} for params, *_ in found[1:])
    whole = sum(one.nbytes for one in expected[0].values())
    held = [one[4] for one in found]
    assert sum(weights for weights, _, _ in held) < whole * 1.02  # apart from one NaN for each that others own
    assert sum(gradients for _, gradients, _ in held) < whole * 1.02
    assert sum(state for _, _, state in held) == sum(one.nbytes for one in expected[1].values())
    assert [state > 100 for _, _, state in held] == [True, False, True]  # memory is [1, 0, 2]


def step_by_step(store: Any) -> Any:
    """Train by gradients of the outputs; return the weights."""
    is_whole = store == "local"
    begin, end = (0, 12) if is_whole else [(0, 7), (7, 12), (12, 12)][store.rank]
    with module_of(mlp, store, "auto" if is_whole else [3, 1, 1]) as module:
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        data, _ = data_of(mlp)
        for step in range(20):
            own = slice(12 * (step % 5) + begin, 12 * (step % 5) + end)
            module.forward(data[own] if end > begin else None, is_train=True)
            grads = 0.01 * torch.cos(torch.arange(12 * CLASSES, dtype=torch.float64).view(12, CLASSES) + step)
            module.backward(grads[begin:end] if end > begin else None)
            module.update()
        return module.get_params()


def test_gradients_of_outputs_give_the_weights_of_one_worker(three: Found) -> None:
    torch.testing.assert_close(three[0]["step by step"], step_by_step("local"), rtol=0, atol=1e-11)


def half(store: Any, prefix: str, memory: Any, resumed: bool) -> Any:
    with module_of(mlp, store, memory) as module:
        data = data_of(mlp)
        how = {**ADAM, "kvstore": store, "batch_size": 12}
        if resumed:
            module.fit(data, num_epoch=2, resume=(prefix, 1), **how)
        else:
            module.fit(data, num_epoch=1, **how)
            module.save_checkpoint(prefix, 1, save_optimizer_states=True)
        return results(module, mlp)


def test_a_checkpoint_is_resumed_by_other_owners_and_by_one_worker(folder: Path, two: Found, three: Found) -> None:
    expected = fit("local", mlp, ADAM)
    assert_equal(three[0]["resumed"], expected)
    with Module(mlp(), nn.CrossEntropyLoss(), context=cpu()) as module:
        module.fit(data_of(mlp), num_epoch=2, batch_size=12, resume=(folder / "run", 1), **ADAM)
        assert_equal(results(module, mlp), expected)
    assert_equal(two[0]["loaded"], expected)


def load_and_train(store: Any, prefix: str) -> Any:
    with Module.load(
        prefix, 1, network=mlp(), load_optimizer_states=True, loss=nn.CrossEntropyLoss(), shard="weights", context=cpu()
    ) as module:
        module.init_optimizer(store, **ADAM)
        module.fit(data_of(mlp), num_epoch=2, begin_epoch=1, batch_size=12, kvstore=store, **ADAM)
        return results(module, mlp)


def own_loaders(store: Any) -> Any:
    """Train and score on loaders of unequal length, one with no batch in some epochs' ends."""
    with module_of(mlp, store) as module:
        data, label = data_of(mlp)
        mine = slice(0, 40) if not store.rank else slice(40, 61)
        dataset = torch.utils.data.TensorDataset(data[mine], label[mine])
        loader = torch.utils.data.DataLoader(dataset, batch_size=6)
        module.fit(loader, loader, num_epoch=2, kvstore=store, **ADAM)
        score = module.score(loader)
        outputs = module.predict(loader)
        batches = [number for _, number, _ in module.iter_predict(loader)]
        return module.get_params(), score, len(outputs), batches


def test_loaders_of_unequal_length_train_and_score_together(two: Found) -> None:
    params, score, length, batches = two[0]["own loaders"]
    _, other_score, other_length, other_batches = two[1]["own loaders"]
    assert (length, other_length) == (40, 21)
    assert (batches, other_batches) == (list(range(7)), list(range(4)))
    assert all(value.isfinite().all() for value in params.values())
    with Module(mlp(), nn.CrossEntropyLoss(), context=cpu()) as module:
        module.set_params(params)
        [(_, expected)] = module.score(data_of(mlp), batch_size=6)
    assert score == other_score == [("accuracy", pytest.approx(expected))]


def replaces(store: Any, path: str) -> Any:
    """Read and replace weights; train again with another optimizer."""
    with module_of(mlp, store, [1, 2]) as module:
        module.fit(data_of(mlp), num_epoch=1, batch_size=12, kvstore=store, **ADAM)
        first = module.get_params()
        module.save_params(path)
        module.fit(data_of(mlp), num_epoch=1, batch_size=12, kvstore=store, **CLIPPED)
        second = module.get_params()
        module.load_params(path)
        third = module.get_params()
        bias = {"0.bias": torch.full((40,), 0.25 + store.rank)}
        module.set_params(bias, allow_missing=True)
        fourth = module.get_params()
        module.set_params(second)  # as a callback that keeps the best does
        fifth = module.get_params()
        missing = {name: value for name, value in second.items() if name != "0.bias"}
        with pytest.raises(RuntimeError, match=r"parameters .* are missing"):
            module.set_params(missing)
        module.set_learning_rate(0.5)
        with pytest.raises(RuntimeError, match="call model_state_dict"):
            module.network.state_dict()
        with pytest.raises(RuntimeError, match="which has divided the weights"):
            module.init_params("xavier", force_init=True)
        with pytest.raises(ValueError, match="expected the same store again"):
            module.init_optimizer("local")
        return first, second, third, fourth, fifth, module.learning_rate


def test_weights_are_read_and_replaced(two: Found) -> None:
    found = [each["replaced"] for each in two]
    first, second, third, fourth, fifth, rate = found[0]
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert same_bits(first, third)
    assert same_bits(second, fifth)
    assert fourth.pop("0.bias").eq(0.25).all()
    assert all(torch.equal(fourth[name], first[name]) for name in fourth)
    assert rate == 0.5
    assert found[1][:5] == ({}, {}, {}, {}, {})
    with Module(mlp(), nn.CrossEntropyLoss(), context=cpu()) as module:
        how = {"num_epoch": 1, "batch_size": 12}
        module.fit(data_of(mlp), **how, **ADAM)
        module.fit(data_of(mlp), **how, **CLIPPED)
        torch.testing.assert_close(second, module.get_params(), rtol=0, atol=1e-11)


def one_updates(communicator: Any) -> Any:
    store = create("allreduce", communicator=communicator)
    module = module_of(mlp, store)
    module.init_optimizer(store, **ADAM)
    data, label = data_of(mlp)
    module.forward_backward(data[:8], label[:8])
    if store.rank:
        module.forward(None, is_train=False)
    else:
        module.update()


def test_a_worker_that_takes_another_step_than_the_others_is_named() -> None:
    with pytest.raises(Exception, match="expected the same steps on all workers"):
        spawn(one_updates, 2)


def is_closed(store: Any) -> bool:
    """Use a network after its module was closed; rank 0 has all weights."""
    network = mlp()
    with Module(network, nn.CrossEntropyLoss(), context=cpu(), shard="weights", memory=[1, 0]) as module:
        module.fit(data_of(mlp), num_epoch=1, batch_size=12, kvstore=store, **ADAM)
        with pytest.raises(TypeError, match=r"cannot be copied or pickled; .* get_params\(\)"):
            pickle.dumps(network)
    if store.rank:
        for use in (network.state_dict, module.get_params, lambda: network(data_of(mlp)[0])):
            with pytest.raises(RuntimeError, match=r"after close\(\) this worker has only the part"):
                use()
    else:
        assert all(value.isfinite().all() for value in module.get_params().values())
    again = Module(network, nn.CrossEntropyLoss(), context=cpu(), shard="weights", memory=[1, 0])
    with pytest.raises(ValueError, match=r"has divided, the weights of this network; make it anew \(rank 1\)"):
        again.init_optimizer(store, **ADAM)
    return True


def test_a_part_is_not_taken_for_the_whole_after_close(two: Found) -> None:
    assert all(each["closed"] for each in two)


def trains_with_statistics(store: Any, prefix: str, resumed: bool) -> Any:
    """Train with statistics of batches on one of two workers; save in mid-epoch, or go on from there."""
    with module_of(normalized, store, random="sample") as module:
        saver = Checkpoint(module, prefix, 4, save_optimizer_states=True)
        stop = [saver, lambda param: param.nbatch == 3 and not resumed]
        module.fit(
            data_of(normalized),
            num_epoch=2,
            batch_size=12,
            kvstore=store,
            batch_end_callback=stop,
            resume=prefix if resumed else None,
            **ADAM,
        )
        return results(module, normalized)


def test_statistics_are_saved_in_mid_epoch_by_a_worker_that_computes_nothing(two: Found) -> None:
    assert_equal(two[0]["statistics"][1], fit("local", normalized, ADAM, random="sample"))


def catches_an_error(store: Any) -> Any:
    """Go on after an error of rank 0's loss, of which the other worker hears at once."""
    module = module_of(mlp, store)
    module.init_optimizer(store, **ADAM)
    data, label = data_of(mlp)
    messages = []
    for step in range(4):
        labels = torch.full((8,), 99) if step in (1, 2) else label[:8]
        own = (data[:8], labels) if not store.rank or step == 2 else (None, None)
        try:
            if step == 3:
                module.forward(own[0], is_train=True)
                module.backward(torch.ones(8 if own[0] is not None else 0, CLASSES).double())
                module.update()
            else:
                module.forward_backward_update(*own)
        except (IndexError, GanglineError) as error:
            messages.append(str(error))
    return messages, module.get_params()


def test_all_workers_hear_of_an_error_and_can_go_on(two: Found) -> None:
    (own, params), (other, _) = (each["error"] for each in two)
    assert own[0] == "Target 99 is out of bounds."
    assert "forward or backward was refused: Target 99 is out of bounds" in other[0]
    assert len(own) == len(other) == 2
    assert all(value.isfinite().all() for value in params.values())


def measures(store: Any) -> Any:
    """Train a network of which worker 1 computes few samples a second; return the loads."""
    network, seconds = mlp(), [0.002, 0.008][store.rank]
    network.register_forward_pre_hook(lambda _, data: time.sleep(seconds * len(data[0])))
    with Module(network, nn.CrossEntropyLoss(), context=cpu(), shard="weights") as module:
        module.fit(data_of(mlp), num_epoch=6, batch_size=30, kvstore=store, **ADAM)
        return module.workers.loads


def test_measured_loads_leave_out_waits_for_the_weights_of_others(two: Found) -> None:
    assert two[0]["measured"][0] > 0.7


def test_a_resumed_run_does_not_keep_what_it_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Module(mlp(), nn.CrossEntropyLoss(), context=cpu()) as module:
        module.fit(data_of(mlp), num_epoch=1, batch_size=12, **ADAM)
        module.save_checkpoint(tmp_path / "run", 1, save_optimizer_states=True)
    read: list[Any] = []
    original = checkpoints.read
    monkeypatch.setattr(checkpoints, "read", lambda *given: read.append(original(*given)) or read[-1])
    held: list[int] = []

    def count(_: Any) -> None:
        held.append(len(read[0].params) + len(read[0].replica_buffers) + (read[0].optimizer_state is not None))

    with Module(mlp(), nn.CrossEntropyLoss(), context=cpu()) as module:
        how = {"batch_size": 12, "resume": (tmp_path / "run", 1), "batch_end_callback": count, **ADAM}
        module.fit(data_of(mlp), num_epoch=2, **how)
    assert held == [0] * 6

"""Reducer: when, in what order and how often buckets are pushed, and equal bits for all kinds of steps."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from measure import Branches, Watch, contexts, distance, in_backward, replicas_are_equal, same_bits, step_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gangline import Module, Work
from gangline.kvstore import KVStore, create
from gangline.kvstore.buckets import Bucket
from gangline.kvstore.local import LocalStore
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.reducer import reducer

LIMIT = 20.0
"""Seconds after which a test that waits has failed."""
FEATURES, WIDTH, CLASSES = 5, 6, 3
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "BUCKET_BYTES", 260)  # a layer of WIDTH, in float32


small_buckets = pytest.mark.usefixtures("_small_buckets")


class Recorder(LocalStore):
    """Local store that records calls, and the order in which they run."""

    def __init__(self) -> None:
        super().__init__("recorder")
        self.pushed: list[tuple[Key, ...]] = []
        self.pulled: list[tuple[Key, ...]] = []
        self.ran: list[tuple[Key, ...]] = []
        self.works: list[Work] = []
        self.on_push: Callable[[], None] = lambda: None
        self.on_run: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def forget(self) -> None:
        for noted in (self.pushed, self.pulled, self.ran, self.works):
            noted.clear()

    def push_bucket(self, bucket: Bucket, values: Any, keys: Any = None, *arguments: Any, **options: Any) -> Work:
        work = super().push_bucket(bucket, values, keys, *arguments, **options)
        self.pushed.append(tuple(bucket.keys if keys is None else keys))
        self.works.append(work)
        self.on_push()
        return work

    def pull_bucket(self, bucket: Bucket, *arguments: Any, **options: Any) -> Work:
        self.pulled.append(tuple(bucket.keys))
        return super().pull_bucket(bucket, *arguments, **options)

    def _merge_bucket(self, bucket: Bucket, *arguments: Any) -> None:
        self.ran.append(tuple(bucket.keys))
        self.on_run()
        super()._merge_bucket(bucket, *arguments)


def fail() -> None:
    raise ArithmeticError("in the middle")


class Gate(nn.Module):
    """Layer that calls ``passed`` during backward; copies share the function."""

    passed: ClassVar[Callable[[], None]]

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return in_backward(data, lambda: type(self).passed())


def gate() -> type[Gate]:
    """Return a subclass of Gate of the test's own; its function does nothing at first."""
    return type("OwnGate", (Gate,), {"passed": staticmethod(lambda: None)})


def gated(own: type[Gate], layers: int = 4) -> nn.Module:
    """Linear layers with a gate between the first and the second."""
    first, *others = [nn.Linear(FEATURES if i == 0 else WIDTH, WIDTH) for i in range(layers)]
    return nn.Sequential(first, own(), *others)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


def batch(samples: int = 6, seed: int = 0, columns: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, FEATURES, generator=generator), torch.randn(samples, columns, generator=generator)


def doubles(samples: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    data, label = batch(samples, seed)
    return data.double(), label.double()


def module_of(network: nn.Module, count: int, store: str | KVStore = "local", **sgd: Any) -> Module:
    """Return a module that trains on this number of contexts; without arguments of SGD the rate is 0.1."""
    module = Module(network, nn.MSELoss(), contexts(count))
    module.init_optimizer(store, "sgd", sgd or {"lr": 0.1})
    return module


class Plain:
    """A plain torch loop on a copy of a network; without arguments of SGD the rate is 0.1."""

    def __init__(self, network: nn.Module, **sgd: Any) -> None:
        self.network = copy.deepcopy(network)
        self.optimizer = torch.optim.SGD(self.network.parameters(), **(sgd or {"lr": 0.1}))

    def backward(self, data: torch.Tensor, label: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.network(data), label).backward()

    def step(self, data: torch.Tensor, label: torch.Tensor) -> None:
        self.backward(data, label)
        self.optimizer.step()

    def distance(self, module: Module) -> float:
        return distance(module.get_params(), self.network.state_dict())


def agree(module: Module, store: KVStore | None = None) -> None:
    """Check that all replicas and the store have the same bits."""
    replicas_are_equal(module)
    if store is not None:
        for name, value in module.bound.replicas.first.parameters.items():
            out = torch.empty_like(value)
            store.pull(name, out)
            assert torch.equal(out, value), name


# -- when buckets are pushed ----------------------------------------------------------------------------------------


@small_buckets
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_layers_are_summed_and_updated_while_backward_still_runs(count: int) -> None:
    own, left = gate(), threading.Event()
    seen: list[int] = []
    with Recorder() as store, module_of(gated(own), count, store) as module:
        module.forward_backward_update(*batch(columns=WIDTH))  # the first bucket is recorded
        store.forget()

        def wait() -> None:
            assert left.wait(LIMIT)
            for work in list(store.works):
                work.wait(LIMIT)
            seen.append(len(store.ran))

        own.passed = wait
        store.on_push = lambda: left.set() if len(store.pushed) == 2 else None
        module.forward_backward_update(*batch(columns=WIDTH))
        assert len(seen) == count  # no replica's backward had reached the first layer
        assert min(seen) >= 2
        assert len(store.pushed) == 4
        assert "0.weight" in store.pushed[-1]
        agree(module, store)


@small_buckets
@pytest.mark.parametrize("count", [1, 2])
def test_pending_buckets_nearest_the_input_are_pushed_first(count: int) -> None:
    all_left = threading.Event()
    layers = 5
    with Recorder() as store, module_of(gated(gate(), layers), count, store) as module:
        module.forward_backward_update(*batch(columns=WIDTH))
        store.forget()
        started, waited = threading.Event(), []

        def pushed() -> None:  # the first push begins alone and blocks until all others are queued
            if len(store.pushed) == 1:
                waited.append(started.wait(LIMIT))
            elif len(store.pushed) == layers:
                all_left.set()

        def run() -> None:
            started.set()
            waited.append(all_left.wait(LIMIT))

        store.on_push, store.on_run = pushed, run
        module.forward_backward_update(*batch(columns=WIDTH))
        assert all(waited)
        assert len(store.pushed) == layers
        last, *others = store.pushed
        assert store.ran == [last, *reversed(others)]
        assert store.pulled == list(reversed(store.pushed))


@small_buckets
@pytest.mark.parametrize("count", [1, 3])
def test_buckets_hold_and_leave_in_the_order_of_the_first_backward(count: int) -> None:
    network = perceptron()
    reference = copy.deepcopy(network)
    order: list[str] = []
    for name, parameter in reference.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[no-untyped-call]
    data, label = batch()
    F.mse_loss(reference(data), label).backward()
    with Recorder() as store, module_of(network, count, store) as module:
        for _ in range(4):
            store.forget()
            module.forward_backward_update(data, label)
        assert len(store.pushed) > 1
        assert list(itertools.chain(*store.pushed)) == order


@small_buckets
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_step_pushes_each_key_once_and_pulls_each_bucket_once(count: int, early: bool) -> None:
    with Recorder() as store, module_of(perceptron(), count, store) as module:
        names = list(module.bound.replicas.first.parameters)
        for size in (6, 6, 1, 7):  # only one replica has a gradient for the third
            store.forget()
            if early:
                module.forward_backward_update(*batch(size))
            else:
                before = module.get_params()
                module.forward_backward(*batch(size))
                assert not store.pushed
                assert same_bits(module.get_params(), before)
                module.update()
            assert Counter(itertools.chain(*store.pushed)) == dict.fromkeys(names, 1)
            assert Counter(store.pulled) == Counter(store.pushed)


@small_buckets
@pytest.mark.parametrize("first", ["several backwards", "failed"])
def test_an_unusual_first_step_does_not_keep_buckets_from_leaving_early(first: str) -> None:
    own, early = gate(), []
    with Recorder() as store, module_of(gated(own), 1 + (first != "failed"), store) as module:
        if first == "failed":
            own.passed = fail
            with pytest.raises(ArithmeticError):
                module.forward_backward_update(*batch(columns=WIDTH))
            own.passed = nothing
            module.forward_backward_update(*batch(columns=WIDTH))
        else:
            for _ in range(2):
                module.forward_backward(*batch(columns=WIDTH))
            module.update()
        own.passed = lambda: early.append(len(store.pushed))
        store.forget()
        module.forward_backward_update(*batch(columns=WIDTH))
        assert max(early) >= 2


# -- parameters that not every step uses ----------------------------------------------------------------------------


@small_buckets
def test_a_backward_of_the_users_own_between_steps_reaches_no_store() -> None:
    network = Branches(FEATURES, CLASSES)
    data, label = batch()
    with Recorder() as store, module_of(network, 1, store) as module:
        module.forward_backward_update(data.abs(), label)
        module.forward_backward_update(-data.abs(), label)  # the branch's bucket then waits
        store.forget()
        for _ in range(2):
            F.mse_loss(network(data.abs()), label).backward()
        assert not store.pushed
        agree(module, store)


@small_buckets
@pytest.mark.parametrize("sparse", [[0, 1], [1]], ids=["all replicas", "second"])
def test_a_gradient_that_turns_sparse_later_leaves_its_bucket(sparse: list[int]) -> None:
    network = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    plain = Plain(network)
    generator = torch.Generator().manual_seed(0)
    with create("local") as store, module_of(network, 2, store) as module:
        for step in range(5):
            if step in (2, 4):  # becomes sparse, then dense again
                for place in sparse:
                    module.bound.replicas.all[place].network[0].sparse = step == 2  # type: ignore[index]
            data = torch.randint(10, (6, 2), generator=generator)
            label = torch.randn(6, CLASSES, generator=generator, dtype=torch.float64)
            module.forward_backward_update(data, label)
            plain.step(data, label)
            agree(module, store)
        assert plain.distance(module) < 1e-12


# -- changes by the user between steps ------------------------------------------------------------------------------


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, FEATURES)),
        nn.Conv2d(1, 4, (1, 2)),
        nn.Conv2d(4, 3, (1, 2)),
        nn.Flatten(),
        nn.Linear(9, CLASSES),
    )


def nothing(*_: Any) -> None:
    pass


def replace_gradients(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.grad = parameter.grad * 3 if parameter.grad is not None else None


def replace_gradients_data(network: nn.Module) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 3


def drop_a_gradient(network: nn.Module) -> None:
    next(network.parameters()).grad = None


def move_away(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()


BEFORE_UPDATE: dict[str, Callable[[nn.Module], None]] = {
    "replaced": replace_gradients,
    "their data replaced": replace_gradients_data,
    "dropped": drop_a_gradient,
    "moved": move_away,
}


@small_buckets
def test_another_memory_format_between_steps_does_not_matter() -> None:
    made = convolution().double()
    plain = Plain(made, **SGD)
    with create("device") as store, Module(made, nn.MSELoss(), contexts(2), [2, 1]) as module:
        module.init_optimizer(store, "sgd", SGD)
        for step in range(5):
            data, label = doubles(5, step)
            module.forward_backward_update(data, label)
            plain.step(data, label)
            if step < 4:
                made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        agree(module, store)
        assert plain.distance(module) < 1e-11


@small_buckets
@pytest.mark.parametrize("change", BEFORE_UPDATE)
@pytest.mark.parametrize("count", [1, 3])
def test_changes_to_all_gradients_before_update_take_effect(change: str, count: int) -> None:
    network = convolution().double()
    plain = Plain(network, **SGD)
    with create("local") as store, module_of(network, count, store, **SGD) as module:
        for step in range(4):
            data, label = doubles(5, step)
            module.forward_backward(data, label)
            plain.backward(data, label)
            if step != 1:
                for network in (plain.network, *(replica.network for replica in module.bound.replicas.all)):
                    BEFORE_UPDATE[change](network)
            module.update()
            plain.optimizer.step()
        agree(module, store)
        assert plain.distance(module) < 1e-12


@small_buckets
def test_weights_set_in_all_replicas_are_those_of_the_store_too() -> None:
    network, fresh = perceptron().double(), perceptron().double()
    plain = Plain(fresh)
    with create("local") as kv, module_of(network, 2, kv) as module:
        for step in range(6):
            data, label = doubles(seed=step)
            if step == 3:
                module.set_params(fresh.state_dict())
                agree(module, kv)
            module.forward_backward_update(data, label)
            if step >= 3:
                plain.step(data, label)
        agree(module, kv)
        assert plain.distance(module) < 1e-13


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
}


@small_buckets
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_network_is_independent(how: str) -> None:
    network = perceptron()
    with Recorder() as store, module_of(network, 2, store) as module:
        module.forward_backward_update(*batch())
        before = copy.deepcopy(network.state_dict())
        made = COPIES[how](network)
        assert same_bits(made.state_dict(), before)
        store.forget()
        data, label = batch()
        F.mse_loss(made(data), label).backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        assert not store.pushed
        assert same_bits(network.state_dict(), before)
        assert not same_bits(made.state_dict(), before)
        module.forward_backward_update(data, label)
        agree(module, store)


def hooks_of(network: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in network.parameters())


def test_after_close_the_network_is_plain_again() -> None:
    network = perceptron()
    with create("local") as store:
        module = module_of(network, 2, store)
        module.forward_backward_update(*batch())
        assert hooks_of(network) == len(list(network.parameters()))
        module.init_optimizer(store, "sgd", {"lr": 0.1})
        assert hooks_of(network) == len(list(network.parameters()))
        module.close()
    assert not hooks_of(network)


@pytest.mark.parametrize("end", ["fit", "close", "init_optimizer"])
def test_a_part_of_the_network_is_saved_without_its_bucket(end: str, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(FEATURES, 4096), nn.ReLU(), nn.Linear(4096, CLASSES))
    data, label = batch()
    with create("local") as store, module_of(network, 2, store, lr=1e-4) as module:
        if end == "fit":
            module.fit((data, label), num_epoch=2, batch_size=len(data), eval_metric="mse")
        else:
            module.forward_backward_update(data, label)
            network[0].bias.requires_grad_(False)  # type: ignore[union-attr]
            module.close() if end == "close" else module.init_optimizer(store, "sgd", {"lr": 1e-4})
        file = tmp_path / "part.pt"
        torch.save(network[0].bias, file)
        assert file.stat().st_size < 2 * 4096 * 4
        for parameter in network.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes


@small_buckets
@pytest.mark.parametrize("count", [1, 3])
def test_training_goes_on_after_fit_as_if_it_had_not_ended(count: int) -> None:
    network = perceptron().double()
    data, label = doubles()
    plain = Plain(network, **SGD)
    with create("local") as store, module_of(network, count, store, **SGD) as module:
        for _ in range(2):
            module.fit((data, label), num_epoch=2, batch_size=len(data), shuffle=False, eval_metric="mse")
            module.forward_backward_update(data, label)
            for _ in range(3):
                plain.step(data, label)
        agree(module, store)
        assert plain.distance(module) < 1e-12


@small_buckets
@pytest.mark.parametrize("close_first", [True, False])
def test_two_modules_train_one_network_one_after_the_other(close_first: bool) -> None:
    network = Branches(FEATURES, CLASSES).double()
    modules, plain = [], Plain(network)
    for number in range(3):
        module = module_of(network, 2, **SGD)
        plain.optimizer = torch.optim.SGD(plain.network.parameters(), **SGD)
        for step, sign in enumerate((1, 1, -1)):  # the last one does not use the branch
            data, label = doubles(6, 10 * number + step)
            module.forward_backward_update(data.abs() * sign, label)
            plain.step(data.abs() * sign, label)
        agree(module)
        assert plain.distance(module) < 1e-12
        if close_first:
            module.close()
        modules.append(module)
    for module in modules:
        module.close()
    assert not hooks_of(network)


# -- a weight with two gradients in one backward --------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Network that calls a layer twice and recomputes both calls in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last, self.recompute = nn.Linear(FEATURES, CLASSES), True

    def forward(self, data: torch.Tensor) -> Any:
        hidden = self.first(data).tanh()
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True) if self.recompute else self.shared(hidden)
            hidden = hidden.tanh()
        return self.last(hidden)


@small_buckets
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("eager", [True, False])
def test_a_weight_whose_gradient_came_twice_in_the_first_backward_waits(count: int, eager: bool) -> None:
    network = Checkpointed().double()
    plain = Plain(network, **SGD)
    with Recorder() as store, module_of(network, count, store, **SGD) as module:
        for step in range(3):
            data, label = doubles(5, step)
            step_of(module, eager, data, label)
            plain.step(data, label)
        agree(module, store)
        assert plain.distance(module) < 1e-12


@small_buckets
@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_after_its_bucket_was_pushed_is_an_error_and_separate_steps_work(count: int) -> None:
    network = Checkpointed().double()
    network.recompute = False
    with create("local") as store, module_of(network, count, store) as module:
        module.forward_backward_update(*doubles())
        for replica in module.bound.replicas.all:
            replica.network.recompute = True  # type: ignore[assignment]
        with pytest.raises(
            RuntimeError, match=r"'shared\.\w+' got another gradient.*use_reentrant=True; call forward_backward\(\)"
        ):
            module.forward_backward_update(*doubles())
        agree(module, store)
        plain, (data, label) = Plain(network), doubles(seed=1)
        step_of(module, False, data, label)
        plain.step(data, label)
        agree(module, store)
        assert plain.distance(module) < 1e-13


# -- errors ---------------------------------------------------------------------------------------------------------


@small_buckets
@pytest.mark.parametrize("failing", [[1], [0, 1]], ids=["second", "both"])
def test_an_error_in_the_middle_of_backward_leaves_replicas_and_store_alike(failing: list[int]) -> None:
    own = gate()
    network = gated(own)
    with Recorder() as store, module_of(network, 2, store) as module:
        module.forward_backward_update(*batch(columns=WIDTH))
        before = module.get_params()
        store.forget()
        left = threading.Event()
        store.on_push = lambda: left.set() if len(store.pushed) == 3 else None

        def fail_there() -> None:
            assert left.wait(LIMIT)
            if any(threading.current_thread().name.startswith(f"gangline-cpu({place})") for place in failing):
                fail()

        own.passed = fail_there
        with pytest.raises(ArithmeticError) as caught:
            module.forward_backward_update(*batch(columns=WIDTH))
        assert [note for note in caught.value.__notes__ if note.startswith("3 of 4 buckets")]
        agree(module, store)
        after = module.get_params()
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"2", "3", "4"}

        own.passed = nothing
        plain, (data, label) = Plain(network), batch(seed=1, columns=WIDTH)
        plain.step(data, label)
        module.forward_backward_update(data, label)
        agree(module, store)
        assert plain.distance(module) < 1e-6


@small_buckets
def test_an_error_before_any_bucket_left_changes_nothing_and_says_nothing_of_buckets() -> None:
    own = gate()
    with create("local") as store, module_of(nn.Sequential(gated(own), own()), 2, store) as module:
        module.forward_backward_update(*batch(columns=WIDTH))
        before = module.get_params()
        own.passed = fail
        with pytest.raises(ArithmeticError) as caught:
            module.forward_backward_update(*batch(columns=WIDTH))
        assert not [note for note in caught.value.__notes__ if "buckets" in note]
        assert same_bits(module.get_params(), before)
        agree(module, store)


@small_buckets
@pytest.mark.parametrize("store", ["local", "device"])
def test_under_a_clip_by_the_common_norm_a_backward_that_fails_changes_no_weight(store: str) -> None:
    own = gate()

    def steps(failing: Collection[int]) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        with Module(gated(own), nn.MSELoss(), contexts(2)) as module:
            module.init_optimizer(store, "sgd", {"lr": 0.1, "momentum": 0.9, "clip_global_norm": 0.05})
            for number in range(4):
                if number in failing:
                    before, own.passed = module.get_params(), fail
                    with pytest.raises(ArithmeticError, match="in the middle") as raised:
                        module.forward_backward_update(*batch(columns=WIDTH))
                    own.passed = nothing
                    assert not any("nor could" in note for note in getattr(raised.value, "__notes__", []))
                    assert same_bits(module.get_params(), before)
                module.forward_backward_update(*batch(columns=WIDTH))
            return module.get_params()

    assert same_bits(steps({0, 2}), steps(()))


# -- copies ---------------------------------------------------------------------------------------------------------


@contextmanager
def operations() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Count torch's copies of single tensors, and all sums, by the number of elements."""
    copies, sums = Counter[int](), Counter[int]()

    def count(func: Any, args: Any, _: Any) -> None:
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy"):
            copies[args[0].numel()] += 1
        elif name in ("add", "add_", "sum") and args[0].dtype != torch.int64:  # not those of bits
            sums[args[0].numel()] += 1
        elif name == "_foreach_add_":  # of small keys, whose sums begin with a joint copy
            sums.update(tensor.numel() for tensor in args[0])

    with Watch(count):
        yield copies, sums


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("layers", [2, 9])
def test_an_update_adds_each_gradient_once_and_copies_weights_as_one(layers: int, count: int, store: str) -> None:
    network = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(layers)])
    data, label = batch(8, columns=FEATURES)
    with create(store) as kv, module_of(network, count, kv) as module:
        module.forward_backward_update(data, label)
        module.forward_backward(data, label)
        with operations() as (copies, sums):
            module.update()
        bucket = layers * (32 + 16)  # each key begins on a cache line of 16 elements
        assert copies == {bucket: count}  # the weights, once per replica
        keys = 2 * layers
        assert sum(sums.values()) == keys * (count - 1) + keys  # the sums, and the optimizer's copies


@pytest.mark.parametrize("count", [1, 2])
def test_on_the_host_backward_copies_no_gradient_and_a_bucket_holds_no_memory(count: int) -> None:
    network = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
    data, label = batch(8, columns=FEATURES)
    with create("local") as store, module_of(network, count, store) as module:
        module.forward_backward_update(data, label)
        module.forward(data, label)
        with operations() as (copies, _):
            module.backward()
        assert not copies
        assert all(bucket.gradients == [None] * count for bucket in module._optimizer._reducer._buckets)

"""Edge cases of Module: modes and parameters changed from outside, mixed data, errors that change nothing."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Cut, distance, labelled, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.data import DataLoader, TensorDataset

from gangline import Module, cpu, gpu, load_weights
from gangline.callback import Checkpoint
from gangline.models.loop.callbacks import BatchEndParam

SAMPLES, FEATURES, CLASSES = 20, 3, 4
CONTEXTS = [[cpu(0)], [cpu(0), cpu(1)]]
both = pytest.mark.parametrize("contexts", CONTEXTS, ids=["one", "two"])
arrays = partial(labelled, SAMPLES, FEATURES, CLASSES)


def classifier() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(FEATURES, CLASSES)


def with_statistics() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(FEATURES), classifier())


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*arrays()), batch_size=5)


def networks(module: Module) -> list[nn.Module]:
    return [replica.network for replica in module.bound.replicas.all]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_resume_with_another_optimizer_than_a_loop_saved_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    epochs: list[int] = []
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer("local", "adam")
        module.forward_backward_update(*arrays())
        module.save_checkpoint(prefix, 1, save_optimizer_states=True)
        state = module.optimizer_state()
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        with pytest.raises(ValueError, match="optimizer 'adam', but 'sgd'"):
            module.fit(arrays(), num_epoch=2, batch_size=5, resume=(prefix, 1))
        assert distance(module.get_params(), classifier().state_dict()) == 0.0
        options: dict[str, Any] = {"epoch_end_callback": lambda epoch, *_: epochs.append(epoch), "optimizer": "adam"}
        module.fit(arrays(), num_epoch=3, batch_size=5, resume=(prefix, 1), **options)
        assert epochs == [1, 2]
    with Module.load(prefix, 1, network=classifier(), context=cpu(), load_optimizer_states=True) as loaded:
        with pytest.raises(ValueError, match="optimizer 'adam', but 'sgd'"):
            loaded.init_optimizer("local", "sgd")
        assert not loaded.optimizer_initialized
        loaded.init_optimizer("local", "adam")
        assert distance(loaded.optimizer_state().tensors, state.tensors) == 0.0


def test_a_lazy_network_can_be_loaded(tmp_path: Path) -> None:
    data, _ = arrays()
    with Module(nn.LazyLinear(CLASSES), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(arrays(), num_epoch=1, batch_size=5)
        module.save_checkpoint(tmp_path / "net", 1)
        outputs = module.predict(data, batch_size=5)
    with Module.load(tmp_path / "net", 1, network=nn.LazyLinear(CLASSES), context=CONTEXTS[1]) as loaded:
        assert torch.allclose(loaded.predict(data, batch_size=5), outputs)


class Shuffled:
    """Batches in an order that torch's generator draws in each epoch."""

    def __init__(self) -> None:
        self.orders: list[list[int]] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(SAMPLES)
        self.orders.append(order.tolist())
        data, label = arrays()
        yield from ((data[part], label[part]) for part in order.split(5))


def test_a_shuffled_iterable_cut_off_in_mid_epoch_reads_that_epoch_in_the_same_order_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, cut, again = Shuffled(), Shuffled(), Shuffled()
    torch.manual_seed(5)
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(whole, num_epoch=2)
    torch.manual_seed(5)
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        save = Checkpoint(module, tmp_path / "net")

        def save_and_cut(param: BatchEndParam) -> None:
            if (param.epoch, param.nbatch) == (1, 1):
                torch.rand(3)  # an augmentation, say
                save(param)
                raise Cut

        with pytest.raises(Cut):
            module.fit(cut, num_epoch=2, batch_end_callback=save_and_cut)
    torch.manual_seed(6)
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(again, num_epoch=2, resume=tmp_path / "net")
    assert cut.orders == whole.orders
    assert again.orders == whole.orders[1:]
    assert "2 batches into epoch 1, but train_data is a plain iterable" in caplog.text


# -- state within a replica's thread ----------------------------------------------------------------------------------


class Pause(nn.Module):
    """Lets another replica's thread run between the setting of random states and a draw."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(1e-3)
        return data


class Deep(nn.Module):
    """Network that applies one layer with dropout six times; outputs are kept, or recomputed in backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Sequential(nn.Linear(100, 100), Pause(), nn.Dropout(0.5), nn.Tanh())
        self.last = nn.Linear(100, CLASSES)
        self.again = again

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            data = recomputed(self.layer, data, use_reentrant=False) if self.again else self.layer(data)
        return self.last(data)  # type: ignore[no-any-return]


def deep_weights(again: bool) -> dict[str, torch.Tensor]:
    data, label = labelled(64, 100, CLASSES, dtype=torch.float64)
    with Module(Deep(again).double(), nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1})
        for _ in range(2):
            module.forward_backward_update(data, label)
        return module.get_params()


def test_recomputed_dropout_draws_the_same_numbers() -> None:
    kept = deep_weights(again=False)
    for _ in range(2):
        assert distance(deep_weights(again=True), kept) == 0.0


@pytest.mark.parametrize("train", [False, True])
def test_the_last_batchs_output_is_gone_before_the_next_is_made(train: bool) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []
    network = classifier()
    network.register_forward_pre_hook(lambda *_: alive.append([output() is not None for output in outputs]))
    network.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    with Module(network, nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer()
        for _ in range(3):
            module.forward(*arrays(), is_train=train)
            if train:
                module.backward()
                module.update()
    assert alive == [[], [False], [False, False]]


# -- optimizers and stores in a second fit ----------------------------------------------------------------------------


def test_a_second_fit_uses_its_own_store() -> None:
    with Module(classifier(), nn.CrossEntropyLoss(), CONTEXTS[1]) as module:
        for store in ("device", "local", "auto"):
            module.fit(arrays(), num_epoch=1, batch_size=5, kvstore=store)
            assert module.store_type == (store if store != "auto" else "local")
        module.contexts = [gpu(0), gpu(2)]
        assert module._resolve_store("auto") == "device"


def test_fit_keeps_the_optimizer_that_the_user_initialised(caplog: pytest.LogCaptureFixture) -> None:
    with Module(classifier(), nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer("local", "adam")
        for params, warned in ((None, False), ({"learning_rate": 0.1}, True)):  # by default no optimizer is requested
            caplog.clear()
            module.fit(arrays(), num_epoch=1, batch_size=5, optimizer="sgd", optimizer_params=params)
            assert module.optimizer_state().name == "adam"
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert any("ignores" in warning for warning in warnings) == warned


# -- modes and parameters changed from outside ------------------------------------------------------------------------


def test_a_part_frozen_after_binding_stays_so_in_every_replica() -> None:
    network = with_statistics()

    def frozen() -> list[tuple[bool, bool, int]]:
        return [(n[0].training, n[1].training, int(n[0].num_batches_tracked)) for n in networks(module)]  # type: ignore[index]

    with Module(network, nn.CrossEntropyLoss(), CONTEXTS[1]) as module:
        module.init_optimizer()
        module.forward_backward_update(*arrays())
        assert frozen() == [(True, True, 1)] * 2
        network[0].eval()
        module.forward_backward_update(*arrays())
        assert frozen() == [(False, True, 1)] * 2
        module.score(arrays(), batch_size=5)
        module.forward_backward_update(*arrays())
        assert frozen() == [(False, True, 1)] * 2
        module.fit(arrays(), arrays(), num_epoch=2, batch_size=5)
        assert frozen() == [(False, True, 1)] * 2
        network[0].train()
        module.forward_backward_update(*arrays())
        assert frozen() == [(True, True, 2)] * 2


def test_a_network_in_evaluation_mode_is_trained_in_training_mode() -> None:
    network = with_statistics().eval()
    with Module(network, nn.CrossEntropyLoss(), CONTEXTS[1]) as module:
        module.init_optimizer()
        for step in (1, 2):
            module.forward_backward_update(*arrays())
            assert [n[0].num_batches_tracked for n in networks(module)] == [step] * 2  # type: ignore[index]
            assert all(part.training for one in networks(module) for part in one.modules())
            network.eval()


def test_a_layer_under_two_names_has_averaged_statistics_under_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.BatchNorm1d(FEATURES)
            self.other = self.one
            self.last = classifier()

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.last(self.other(data))  # type: ignore[no-any-return]

    data, label = arrays()
    with Module(Twice(), nn.CrossEntropyLoss(), CONTEXTS[1], [3, 1]) as module:
        module.init_optimizer()
        module.forward_backward_update(data, label)
        params = module.get_params()
        module.average_statistics()
        for state in (params, *(one.state_dict() for one in networks(module))):
            for name in ("one", "other"):  # the shares' means, weighted by their sizes, give the batch's
                assert torch.allclose(state[f"{name}.running_mean"], data.mean(0) * 0.1, atol=1e-6)


# -- data -------------------------------------------------------------------------------------------------------------


def test_empty_data_are_refused_if_shapes_are_unknown() -> None:
    with Module(nn.LazyLinear(CLASSES), nn.CrossEntropyLoss(), cpu()) as module:
        with pytest.raises(ValueError, match="no batches"):
            module.fit([], num_epoch=1)
        module.fit(loader(), num_epoch=1)


# -- losses and metrics -----------------------------------------------------------------------------------------------


@both
def test_accuracy_and_cross_entropy_of_labels_that_are_probabilities(contexts: Any) -> None:
    data, label = arrays()
    soft = F.one_hot(label, CLASSES) * 0.8 + 0.05
    network = classifier()
    with torch.no_grad():
        outputs = network(data)
    with Module(copy.deepcopy(network), nn.CrossEntropyLoss(), contexts) as module:
        values = dict(module.score((data, soft), ["acc", "ce", "loss"], batch_size=7))
    mean = float(F.cross_entropy(outputs, soft))
    assert values["accuracy"] == pytest.approx(float((outputs.argmax(1) == label).double().mean()))
    assert values["cross-entropy"] == pytest.approx(mean, rel=1e-6)
    assert values["loss"] == pytest.approx(mean, rel=1e-6)


def test_a_loss_that_returns_a_vector_is_refused_with_its_shape() -> None:
    data, label = arrays()
    with Module(classifier(), lambda out, of: F.cross_entropy(out, of, reduction="none"), CONTEXTS[1]) as module:
        for train in (False, True):
            with pytest.raises(ValueError, match=r"gave shape \(10,\); expected a scalar tensor"):
                module.forward(data, label, is_train=train)


def test_the_multi_label_soft_margin_of_more_axes_is_torchs_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(4, 5, 6, generator=generator)
    label = torch.randint(2, (4, 5, 6), generator=generator).float()
    with Module(nn.Identity(), nn.MultiLabelSoftMarginLoss(), CONTEXTS[1]) as module:
        module.forward(data, label, is_train=False)
        assert float(module.get_loss()) == pytest.approx(float(nn.MultiLabelSoftMarginLoss()(data, label)), rel=1e-6)


@dataclass
class WithoutHash:
    scale: float = 2.0

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, label) * self.scale


@both
def test_a_loss_of_ones_own_is_called_as_it_is_now(contexts: Any) -> None:
    data, label = arrays()
    loss, expected = WithoutHash(), F.cross_entropy(classifier()(data), label).item()
    with Module(classifier(), loss, contexts) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.0})
        for scale in (2.0, 10.0):
            loss.scale = scale
            module.forward_backward_update(data, label)
            assert float(module.get_loss()) == pytest.approx(scale * expected, rel=1e-6)


# -- weights that user code writes ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_predictions_use_the_weights_that_the_network_has_now(contexts: list[Any], has_optimizer: bool) -> None:
    data, _ = arrays()
    network = classifier()
    with Module(network, nn.CrossEntropyLoss(), context=contexts) as module:
        if has_optimizer:
            module.init_optimizer("device")
        module.predict(data, batch_size=10)
        with torch.no_grad():
            network.weight.zero_()
            network.bias.fill_(1.0)
        assert module.predict(data, batch_size=10).unique().tolist() == [1.0]  # on all contexts


@both
@pytest.mark.parametrize("trained", [False, True])
def test_statistics_and_frozen_weights_that_are_written_reach_all_contexts(contexts: list[Any], trained: bool) -> None:
    data, labels = arrays()
    network = with_statistics()
    network[1].requires_grad_(False)
    with Module(network, nn.CrossEntropyLoss(), context=contexts) as module:
        module.bind((2, FEATURES))
        if trained:
            module.fit((data, labels), num_epoch=1, batch_size=10)
        with torch.no_grad():
            network[0].running_mean.copy_(torch.arange(FEATURES))
            network[0].running_var.fill_(4.0)
            network[1].weight.mul_(2.0)
        found = module.predict(data, batch_size=10)
        assert distance({"outputs": found}, {"outputs": copy.deepcopy(network).eval()(data).detach()}) < 1e-5


# -- compiled networks ------------------------------------------------------------------------------------------------


Network = Callable[[], nn.Module]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))


def whole() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def part() -> nn.Module:
    network = plain()
    network[0] = torch.compile(network[0], backend="eager")
    return network


def trained(make: Network, prefix: Path, num_epoch: int, resume: str | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data, label = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    with Module(make(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], [3, 1], fixed_param_names=["2.bias"]) as module:
        module.fit(
            (data, label),
            num_epoch=num_epoch,
            batch_size=8,
            kvstore="device",
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "lr_mult": {"2.weight": 2.0}},
            batch_end_callback=Checkpoint(module, prefix, period=2),
            initializer="xavier",
            force_init=True,
            resume=resume,
        )
        return module.get_params()


def test_a_run_goes_on_in_mid_epoch_with_the_network_compiled_or_not(tmp_path: Path) -> None:
    expected = trained(plain, tmp_path / "plain", 2)
    for first, second in ((plain, whole), (whole, part), (part, plain)):
        prefix = tmp_path / f"{first.__name__} {second.__name__}"
        trained(first, prefix, 1)
        found = trained(second, prefix, 2, resume="auto")
        assert list(found) == list(expected) == list(plain().state_dict())
        assert same_bits(found, expected)


def test_weights_of_either_load_into_either(tmp_path: Path) -> None:
    for source in (plain, whole, part):
        state = {name: torch.full_like(value, 5) for name, value in source().state_dict().items()}
        torch.save(state, tmp_path / "weights.pth")
        for make in (plain, whole, part):
            with Module(make(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
                module.set_params(state)
                module.save_params(tmp_path / "saved.safetensors")
            for path in (tmp_path / "weights.pth", tmp_path / "saved.safetensors"):
                network = make()
                load_weights(network, path)
                assert all(torch.all(value == 5) for value in network.state_dict().values())

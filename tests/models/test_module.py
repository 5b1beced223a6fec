"""Module's methods: results, order of calls, and errors for wrong input."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from measure import mlp
from torch import nn
from torch.nn import functional as F

from gangline import Module, cpu
from gangline.callback import Speedometer, do_checkpoint
from gangline.kvstore import create


def linear() -> nn.Linear:
    """Return a layer with two inputs and three outputs; weight (i, j) is i * 10 + j."""
    network = nn.Linear(2, 3)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]))
        network.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    return network


def counted(samples: int, columns: int) -> torch.Tensor:
    """Return samples; column j of sample i holds i + j / 10."""
    return torch.arange(samples).unsqueeze(1) + torch.arange(columns) / 10


CONTEXTS = [cpu(0), cpu(1), cpu(2)]
GOOD = counted(4, 2), counted(4, 3)


# -- forward, backward, update, step by step ------------------------------------------------------------------------


def test_numpy_tuples_and_dicts_are_data_too() -> None:
    class Two(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
            return {"sum": left + right, "parts": (left, right * 2)}

    left, right = counted(5, 2).numpy(), counted(5, 2) * 3
    with Module(Two(), context="cpu(0),cpu(1)") as module:
        assert module.contexts == CONTEXTS[:2]
        for data in ((left, right), {"right": right, "left": left}):
            module.forward(data, is_train=False)
            outputs = module.get_outputs()
            assert torch.equal(outputs["sum"], torch.from_numpy(left) + right)
            assert torch.equal(outputs["parts"][1], right * 2)
    with Module(linear(), nn.MSELoss(), CONTEXTS[:2]) as module:
        module.init_optimizer()
        module.forward_backward_update(left, np.ones((5, 3), np.float32))


def test_backward_from_given_gradients_of_the_outputs() -> None:
    data, out_grads = counted(5, 2), counted(5, 3)
    reference = linear()
    reference(data).backward(out_grads)
    with Module(linear(), context=CONTEXTS[:2], work_load_list=[3, 2]) as module:
        module.bind((5, 2), inputs_need_grad=True)
        module.init_optimizer("local", "sgd", {"lr": 1.0})
        module.forward(data)
        with pytest.raises(RuntimeError, match=r"get_input_grads\(\) came before backward"):
            module.get_input_grads()
        module.backward(out_grads)
        assert torch.allclose(module.get_input_grads(), out_grads @ linear().weight)
        assert [len(part) for part in module.get_input_grads(merge=False)] == [3, 2]
        module.update()
        assert torch.allclose(module.get_params()["weight"], linear().weight - reference.weight.grad)  # type: ignore[operator]
        module.forward(data)
        with pytest.raises(ValueError, match="out_grads has 4 samples, but the batch has 5"):
            module.backward(out_grads[:4])


def test_an_idle_context_holds_no_replica() -> None:
    with Module(linear(), nn.MSELoss(), CONTEXTS, [0, 2, 0]) as module:
        module.init_optimizer("device", "sgd")
        module.forward_backward_update(counted(3, 2), counted(3, 3))
        assert [str(replica.context) for replica in module.bound.replicas.all] == ["cpu(1)"]
        assert module.store_type is None  # one replica needs no store


def test_lazy_layers_learn_their_shape_from_the_first_batch_or_from_bind() -> None:
    for bind in (True, False):
        network = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3))
        with Module(network, nn.MSELoss(), CONTEXTS[:2]) as module:
            if bind:
                module.bind((8, 2))
                module.init_optimizer("local", "sgd", {"lr": 0.1})
                module.forward_backward_update(counted(8, 2), counted(8, 3))
            else:
                data, rate = (counted(8, 2), counted(8, 3)), {"lr": 0.0}
                module.fit(data, num_epoch=1, batch_size=8, optimizer_params=rate, eval_metric="mse", initializer="one")
                assert module.get_params()["0.weight"].eq(1).all()
            assert module.get_params()["0.weight"].shape == (3, 2)
    network = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3))
    network[1].eval()  # frozen statistics stay so
    with Module(network, nn.MSELoss(), cpu()) as module:
        module.bind((8, 2))
        assert [part.training for part in (network, *network)] == [True, True, False]
    with (
        Module(nn.LazyLinear(3), nn.MSELoss(), cpu()) as module,
        pytest.raises(RuntimeError, match=r"parameters \['weight', 'bias'\] have no shape yet; call bind"),
    ):
        module.init_optimizer()


# -- parameters -----------------------------------------------------------------------------------------------------


def test_params_must_fit() -> None:
    weight, bias = torch.zeros(3, 2), torch.zeros(3)
    with Module(linear(), context=cpu()) as module:
        with pytest.raises(RuntimeError, match=r"parameters \['bias'\] are missing"):
            module.set_params({"weight": weight})
        with pytest.raises(ValueError, match=r"parameters \['gain'\] are not the network's"):
            module.set_params({"weight": weight, "bias": bias, "gain": bias})
        with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\); the network's has \(3, 2\)"):
            module.set_params({"weight": weight.T, "bias": bias})
        with pytest.raises(TypeError, match="'bias' is a list"):
            module.set_params({"weight": weight, "bias": [0.0]})  # type: ignore[dict-item]
        assert torch.equal(module.get_params()["weight"], linear().weight)
        module.set_params({"weight": weight, "gain": bias}, allow_missing=True, allow_extra=True)
        assert torch.equal(module.get_params()["bias"], linear().bias)
        module.set_params({"module.weight": weight, "module.bias": bias})  # as DDP names them
        assert not module.get_params()["bias"].any()


# -- batch statistics, random layers, modes -------------------------------------------------------------------------


def test_running_statistics_are_averaged_by_samples_seen() -> None:
    network = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
    data = torch.tensor([[0.0], [2.0], [4.0], [10.0], [20.0]])
    with Module(network, context=CONTEXTS[:2], work_load_list=[3, 2]) as module:
        module.forward(data, is_train=True)
        averaged = module.get_params()
        assert averaged["0.running_mean"].tolist() == pytest.approx([(3 * 2.0 + 2 * 15.0) / 5])
        assert averaged["0.running_var"].tolist() == pytest.approx([(3 * 4.0 + 2 * 50.0) / 5])
        assert int(averaged["0.num_batches_tracked"]) == 1
        layers: Any = [replica.network[0] for replica in module.bound.replicas.all]  # type: ignore[index]
        assert [float(layer.running_mean) for layer in layers] == [2.0, 15.0]  # the call changed no replica
        module.average_statistics()
        assert [float(layer.running_mean) for layer in layers] == [pytest.approx(7.2)] * 2


@pytest.mark.parametrize("loads", [[1], [1, 1, 1]])
def test_random_layers_repeat_bit_for_bit_and_differ_between_contexts(loads: list[float]) -> None:
    def masks() -> list[torch.Tensor]:
        torch.manual_seed(torch.seed() % 1000)  # the caller's generator has no influence
        found = []
        with Module(nn.Dropout(0.5), context=CONTEXTS[: len(loads)], work_load_list=loads) as module:
            for _ in range(4):
                module.forward(torch.ones(6, 50), is_train=True)
                found.append(module.get_outputs())
        return found

    first, second = masks(), masks()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    if loads == [1, 1, 1]:
        assert not torch.equal(first[0][:2], first[0][2:4])


def test_training_leaves_the_callers_random_numbers_alone() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with Module(network, nn.MSELoss(), CONTEXTS[:2]) as module:
        module.fit((counted(8, 2), counted(8, 2)), num_epoch=1, batch_size=4, eval_metric="mse")
    assert torch.equal(torch.rand(3), expected)


def test_a_network_that_begins_to_draw_late_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class Late(nn.Module):
        draws = False

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(data) if Late.draws else data

    with Module(Late(), context=CONTEXTS[:2]) as module:
        module.forward(torch.ones(4, 9), is_train=True)
        Late.draws = True
        module.forward(torch.ones(4, 9), is_train=True)
        assert "the network began to draw random numbers" in caplog.text
        module.run_state.step = 7
        module.forward(torch.ones(4, 9), is_train=True)
        first = module.get_outputs()
        module.run_state.step = 7
        module.forward(torch.ones(4, 9), is_train=True)
        assert torch.equal(first, module.get_outputs())


# -- loops ----------------------------------------------------------------------------------------------------------


def test_scores_count_each_sample_once_and_predictions_keep_the_order() -> None:
    data = counted(11, 2)
    label = torch.tensor([2] * 7 + [0] * 4)  # the network always says 2
    with Module(linear(), nn.CrossEntropyLoss(), CONTEXTS, [3, 1, 1]) as module:
        assert module.score((data, label), "acc", batch_size=4) == [("accuracy", pytest.approx(7 / 11))]
        expected = nn.functional.cross_entropy(linear()(data), label).item()
        assert module.score((data, label), "ce", batch_size=3) == [("cross-entropy", pytest.approx(expected))]
        assert module.score((data, label), "loss", batch_size=3) == [("loss", pytest.approx(expected))]
        assert torch.allclose(module.predict(data, batch_size=4), linear()(data))
        assert torch.allclose(module.predict((data, label), batch_size=4), linear()(data))
        assert len(module.predict(data.numpy(), batch_size=4, num_batch=2)) == 8
        parts = [(number, len(out)) for out, number, _ in module.iter_predict(data, batch_size=4)]
        assert parts == [(0, 4), (1, 4), (2, 3)]


def test_a_store_of_ones_own_is_used_and_left_open() -> None:
    with create("device") as store:
        with Module(linear(), nn.MSELoss(), cpu()) as module:
            module.init_optimizer(store, "sgd", {"lr": 0.1})
            module.forward_backward_update(counted(4, 2), counted(4, 3))
            out = torch.empty(3, 2)
            store.pull("weight", out)
            assert torch.equal(out, module.get_params()["weight"])
            module.set_learning_rate(0.5)
            assert store.learning_rate == 0.5
        store.push("weight", torch.zeros(3, 2))  # still open


# -- memory ---------------------------------------------------------------------------------------------------------


KINDS = {torch.Tensor, nn.Parameter}


def live_bytes() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in KINDS and tensor.layout == torch.strided
    }
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contexts", "copies"),
    [
        (1, 1 + 1),  # gradients and momentum, as in a plain torch loop
        (2, (1 + 2) + (1 + 1 + 1)),  # a replica, its gradients and the first's; the store's weights, sums and momentum
    ],
)
@pytest.mark.parametrize("store", ["local", "device"])
def test_what_a_training_module_holds(contexts: int, copies: int, store: str) -> None:
    network = nn.Linear(500, 400, bias=False)
    weights = 500 * 400 * 4
    data, label = torch.ones(4, 500), torch.ones(4, 400)
    before = live_bytes()
    with Module(network, nn.MSELoss(), CONTEXTS[:contexts]) as module:
        module.init_optimizer(store, "sgd", {"lr": 0.1, "momentum": 0.9})
        for _ in range(2):
            module.forward_backward_update(data, label)
        assert (live_bytes() - before) // weights == copies
        module.bound.replicas.clear_gradients()  # type: ignore[union-attr]
        assert (live_bytes() - before) // weights == copies - contexts


# -- wrong input ----------------------------------------------------------------------------------------------------


REFUSED: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "Module": [
        ({"network": lambda x: x}, TypeError, "network is a function; expected a torch.nn.Module"),
        ({"context": []}, ValueError, "context is empty"),
        ({"context": "tpu(0)"}, ValueError, "'tpu\\(0\\)' names no device"),
        ({"context": 3}, TypeError, "context is 3"),
        ({"work_load_list": [3, 1, 1]}, ValueError, "work_load_list has 3 entries for 2 contexts"),
        ({"work_load_list": [0, 0]}, ValueError, "at least one load above 0"),
        ({"work_load_list": [1, -1]}, ValueError, r"work_load_list\[1\] is -1"),
        ({"work_load_list": [1, float("nan")]}, ValueError, r"work_load_list\[1\] is nan"),
        ({"work_load_list": [True, 1]}, TypeError, r"work_load_list\[0\] is True"),
        ({"work_load_list": "31"}, ValueError, "work_load_list is '31'; expected one number per context, or 'auto'"),
        ({"autocast": "bfloat16"}, ValueError, "autocast is 'bfloat16'; expected torch.bfloat16"),
        ({"random": "batch"}, ValueError, "random is 'batch'; expected 'context' or 'sample'"),
        (
            {"shard": "weights", "context": cpu(), "work_load_list": "auto"},
            ValueError,
            "work_load_list='auto' is not available with shard='weights'; set GANGLINE_WORK_LOAD_LIST=auto",
        ),
        ({"fixed_param_names": ["gain"]}, ValueError, r"\['gain'\], which are no parameters; they are \['weight'"),
        ({"fixed_param_names": "bias"}, TypeError, "expected a list of names"),
        ({"loss": 3}, TypeError, "loss is 3"),
        ({"loss": nn.MSELoss(reduction="none")}, ValueError, "reduction='none'"),
        ({"loss": nn.Bilinear(3, 3, 1)}, ValueError, "has parameters, which nothing would train"),
        ({"loss_normalizer": 3}, TypeError, "loss_normalizer is 3"),
    ],
    "bind": [
        ({"label_shapes": (3, 3)}, ValueError, "data_shapes have a batch of 4, but label_shapes one of 3"),
        ({"data_shapes": "four"}, TypeError, "data_shapes is 'four'"),
        ({"grad_req": "Add"}, ValueError, "grad_req is 'Add'; expected 'write' or 'add'"),
    ],
    "init_optimizer": [
        ({"kvstore": "nosuch"}, ValueError, "no store named 'nosuch'; expected one of .*'device'"),
        ({"kvstore": 3}, TypeError, "kvstore is 3"),
        ({"kvstore": None}, ValueError, "kvstore is None, but gradients of 2 contexts"),
        ({"optimizer": "sdg"}, ValueError, "optimizer 'sdg' is unknown"),
        ({"optimizer_params": {"learning_rat": 1}}, ValueError, "no argument 'learning_rat'.*mean 'learning_rate'"),
        ({"optimizer_params": {"lr": -1.0}}, ValueError, "Invalid learning rate"),
        ({"optimizer": "muon"}, ValueError, "key 'bias' does not fit optimizer 'muon'"),
        ({"optimizer_params": {"lr_mult": {"wieght": 2}}}, ValueError, r"lr_mult names \['wieght'\], which are no"),
    ],
    "forward_backward": [
        ({"data": counted(4, 2), "label": counted(3, 3)}, ValueError, "data has 4 samples, but label has 3"),
        ({"data": counted(0, 2)}, ValueError, "data has no samples"),
        ({"data": "words"}, TypeError, "data is a str"),
        ({"data": counted(4, 2), "label": counted(4, 3).unsqueeze(2)}, ValueError, "would mix samples"),
    ],
    "fit": [
        ({"num_epoch": -1}, ValueError, "num_epoch is -1"),
        ({"num_epoch": 1.5}, TypeError, "num_epoch is 1.5"),
        ({"eval_metric": "accurracy"}, ValueError, "metric 'accurracy' is unknown; did you mean 'accuracy'"),
        ({"resume": "auto"}, ValueError, "no Checkpoint callback"),
        ({"resume": "nowhere/net"}, FileNotFoundError, "no checkpoint nowhere/net"),
        ({"begin_epoch": True}, TypeError, "begin_epoch is True"),
        ({"accumulate": 0}, ValueError, "accumulate is 0; expected"),
        ({"accumulate": None}, TypeError, "accumulate is None; expected"),
        ({"shuffle": "every-epoch"}, TypeError, "shuffle is 'every-epoch'; expected True, a new order in each epoch"),
        ({"batch_end_callback": Speedometer}, TypeError, r"is the class Speedometer; .* write Speedometer\(\.\.\.\)"),
        ({"optimizer_params": {"lr_scheduler": 1}}, ValueError, r"expected it as an argument of fit, such as fit\("),
        ({"epoch_end_callback": do_checkpoint("/proc/x/net")}, OSError, "checkpoint folder /proc/x cannot be made"),
        (
            {"train_data": [GOOD], "eval_data": GOOD, "batch_size": None},
            ValueError,
            "eval_data holds samples, so batch_size is needed",
        ),
    ],
}
"""Arguments that differ from valid ones, by the verb that refuses them."""


@pytest.mark.parametrize("verb", REFUSED)
def test_wrong_arguments_are_named_and_change_nothing(verb: str) -> None:
    valid: dict[str, dict[str, Any]] = {
        "bind": {"data_shapes": (4, 2)},
        "fit": {"train_data": GOOD, "num_epoch": 1, "batch_size": 2, "eval_metric": "mse"},
    }
    for arguments, error, message in REFUSED[verb]:
        if verb == "Module":
            with pytest.raises(error, match=message):
                Module(**{"network": linear(), "context": CONTEXTS[:2], **arguments})
            continue
        with Module(linear(), nn.MSELoss(), CONTEXTS[:2]) as module:
            if verb == "forward_backward":
                module.init_optimizer("device", "sgd", {"lr": 0.0})
            with pytest.raises(error, match=message):
                getattr(module, verb)(**valid.get(verb, {}) | arguments)
            if verb == "init_optimizer":
                assert not module.optimizer_initialized
            if verb == "bind":
                assert not module.bound.is_bound
            if verb != "forward_backward":
                module.init_optimizer("device", "sgd", {"lr": 0.0})
            module.forward_backward_update(*GOOD)
            assert torch.equal(module.get_params()["weight"], linear().weight)


def test_calls_in_a_wrong_order_are_refused_and_lose_nothing() -> None:
    data, label = counted(4, 2), counted(4, 3)
    with Module(linear(), nn.MSELoss(), CONTEXTS[:2]) as module:
        for call, message in (
            (module.backward, r"backward\(\) came before forward\(\)"),
            (module.get_outputs, r"get_outputs\(\) came before forward\(\)"),
            (module.update, r"update\(\) came before init_optimizer\(\)"),
            (module.optimizer_state, r"optimizer_state\(\) came before init_optimizer\(\)"),
            (lambda: module.set_learning_rate(0.1), r"set_learning_rate\(\) came before init_optimizer\(\)"),
            (lambda: module.learning_rate, r"learning_rate came before init_optimizer\(\)"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call()
        module.init_optimizer("local", "sgd", {"lr": 0.0})
        with pytest.raises(RuntimeError, match=r"update\(\) came before backward\(\)"):
            module.update()
        module.forward(data, label, is_train=False)
        with pytest.raises(RuntimeError, match=r"needs a forward\(\) in training mode"):
            module.backward()
        module.forward(data, is_train=True)
        with pytest.raises(RuntimeError, match=r"got no label.*call backward\(out_grads\)"):
            module.backward()
        with pytest.raises(RuntimeError, match="inputs_need_grad=True"):
            module.get_input_grads()
        with pytest.raises(RuntimeError, match=r"get_loss\(\) has no loss"):
            module.get_loss()
        module.forward_backward_update(data, label)
        with pytest.raises(RuntimeError, match=r"update\(\) came before backward\(\)"):
            module.update()
        assert torch.equal(module.get_params()["weight"], linear().weight)


def test_an_error_in_a_replica_names_its_context() -> None:
    class Fails(nn.Module):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            if float(data[0]) > 1:
                raise ArithmeticError("too large")
            return data

    with Module(Fails(), context=CONTEXTS[:2]) as module:
        with pytest.raises(ArithmeticError, match="too large") as raised:
            module.forward(torch.tensor([[0.0], [5.0]]))
        assert raised.value.__notes__ == [
            "the network got (1, 1) of torch.float32, its share of the batch; its weights are none",
            "in the replica on cpu(1)",
        ]


def test_a_second_bind_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with Module(linear(), nn.MSELoss(), cpu()) as module:
        module.bind({"input": (4, 2)}, (4, 3), for_training=False)
        module.bind((4, 2))
        assert "bind() is ignored" in caplog.text
        module.forward(counted(4, 2))
        with pytest.raises(RuntimeError, match="training mode"):
            module.backward()


# -- a network whose output is the loss -----------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [None, "auto"])
def test_an_output_that_is_no_loss_is_refused(loads: str | None) -> None:
    data, label = counted(4, 2), torch.zeros(4, dtype=torch.long)
    with Module(linear(), context=CONTEXTS[:2], work_load_list=loads) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1})
        for run in (
            partial(module.fit, (data, label), num_epoch=1, batch_size=4),
            partial(module.forward_backward, data, label),
            partial(module.forward_backward_update, data, label),
        ):
            message = r"output has shape \(2, 3\), which is not a loss: .* loss=torch\.nn\.CrossEntropyLoss\(\)"
            with pytest.raises(ValueError, match=message):
                run()
        assert torch.equal(module.get_params()["weight"], linear().weight)
        assert module.predict(data, batch_size=4).shape == (4, 3)  # which needs no loss


@pytest.mark.parametrize("shape", [(), (1,), (-1,), (-1, 1)])
def test_a_loss_is_one_number_or_one_per_sample(shape: tuple[int, ...]) -> None:
    class Loss(nn.Linear):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            losses = super().forward(data).square().mean(1)
            return (losses if -1 in shape else losses.mean()).reshape(shape)

    torch.manual_seed(0)
    network = Loss(2, 3).double()
    reference = nn.Linear(2, 3).double()
    reference.load_state_dict(network.state_dict())
    data = torch.randn(4, 2, dtype=torch.float64)
    loss = reference(data).square().mean()
    loss.backward()
    with Module(network, context=CONTEXTS[:2], work_load_list=[3, 1]) as module:
        module.init_optimizer("local", "sgd", {"lr": 1.0})
        module.forward_backward_update(data)
        assert module.get_loss().item() == pytest.approx(loss.item(), rel=1e-12)
        assert reference.weight.grad is not None
        expected = (reference.weight - reference.weight.grad).detach()
        torch.testing.assert_close(module.get_params()["weight"], expected, rtol=1e-12, atol=1e-12)


# -- losses that are functions: which of them count labels as torch does, and what is said of the others -------------


FEATURES, CLASSES = 6, 4
network = partial(mlp, FEATURES, CLASSES, seed=0)


CLASS_LOSSES: dict[str, Any] = {
    "partial": partial(F.cross_entropy, ignore_index=-1),
    "lambda": lambda output, label: F.cross_entropy(output, label, ignore_index=-1),
    "weights": lambda output, label: F.cross_entropy(
        output, label, torch.arange(1.0, CLASSES + 1).double(), ignore_index=-1
    ),
    "nll": lambda output, label: F.nll_loss(output.log_softmax(1), label, ignore_index=-1),
}


@pytest.mark.parametrize("loss", CLASS_LOSSES)
@pytest.mark.parametrize("contexts", [1, 2])
def test_a_function_that_returns_a_torch_mean_counts_the_labels_of_that_mean(loss: str, contexts: int) -> None:
    data = torch.randn(8, FEATURES).double()
    labels = torch.tensor([[0, 1, 2, -1, -1, 1, -1, -1], [3, 0, 1, 1, -1, 2, 0, 3], [-1] * 8])  # one share has none
    with Module(network(), CLASS_LOSSES[loss], [cpu(i) for i in range(contexts)], [3, 1][:contexts]) as module:
        module.init_optimizer("device", "sgd", {"lr": 1.0})
        for label in labels:
            reference = network()
            reference.load_state_dict(module.get_params())
            CLASS_LOSSES[loss](reference(data), label).backward()
            module.forward_backward_update(data, label)
            for name, parameter in reference.named_parameters():
                assert parameter.grad is not None
                assert torch.allclose(module.get_params()[name], parameter - parameter.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("factor", "ignored", "level", "message"),
    [
        (2, -100, "INFO", "counts as a mean over samples"),
        (2, 0, "WARNING", "is weighted by samples"),
        (1, 0, None, "loss"),
    ],
)
def test_what_another_function_is_a_mean_over_is_said_once(
    caplog: pytest.LogCaptureFixture, factor: int, ignored: int, level: str | None, message: str
) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        mean = F.cross_entropy(output, label, ignore_index=ignored)
        return mean * factor if factor != 1 else mean

    caplog.set_level("INFO", "gangline")
    data, label = torch.randn(8, FEATURES).double(), torch.arange(8) % CLASSES
    with Module(network(), loss, [cpu(0), cpu(1)], [3, 1]) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1})
        for _ in range(3):
            module.forward_backward_update(data, label)
    assert [record.levelname for record in caplog.records if message in record.message] == [level] * (level is not None)


def test_losses_of_another_form_are_errors() -> None:
    def mean(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found = F.cross_entropy(output, label)
        return found if len(output) == 8 else found * 2

    data, label = torch.randn(8, FEATURES).double(), torch.arange(8) % CLASSES
    for loss, message in (
        (lambda o, y: F.cross_entropy(o, y, reduction="sum"), r"returns a sum; .*CrossEntropyLoss\(reduction='sum'\)"),
        (mean, "returned the mean of a call of torch for earlier batches"),
    ):
        with Module(network(), loss, cpu()) as module:
            if loss is mean:
                module.forward(data, label, is_train=False)
            with pytest.raises(ValueError, match=message):
                module.forward(data[:4], label[:4], is_train=False)
    with pytest.raises(TypeError, match=r"loss is the class CrossEntropyLoss; .* write CrossEntropyLoss\(\)"):
        Module(network(), nn.CrossEntropyLoss)  # type: ignore[arg-type]

"""Tests of `gangline.mxnet`: scripts beside the real MXNet 1.9.1, and the parts that they touch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gangline.mxnet as mx
from gangline.launcher.job import free_ports
from tests.programs import ROOT, environment, python, run

SCRIPTS = Path(__file__).parent / "scripts"
MXNET = ROOT / ".peers" / "mxnet" / "bin" / "python"
SCHEDULES = [
    "FactorScheduler step=5 factor=0.5",
    "FactorScheduler step=3 factor=0.1 stop_factor_lr=0.004",
    "MultiFactorScheduler step=[4,11] factor=0.3 warmup_steps=3",
    "PolyScheduler max_update=18",
    "CosineScheduler max_update=18 final_lr=0.001 warmup_steps=2 warmup_begin_lr=0.01",
]


def weights(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "weights.npz") as saved:
        return dict(saved)


def folders(tmp_path: Path) -> tuple[Path, Path]:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    return theirs, ours


def assert_equal(theirs: Path, ours: Path) -> None:
    expected, found = weights(theirs), weights(ours)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not MXNET.exists(), reason="it is not installed: make peers")
@pytest.mark.parametrize(("script", "options"), [("fit", ()), ("loop", ()), *(("fit", (one,)) for one in SCHEDULES)])
def test_a_module_script_gives_mxnets_weights(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    theirs, ours = folders(tmp_path)
    run([MXNET, SCRIPTS / f"mxnet_{script}.py", "mxnet", theirs, *options], code=0)
    python(SCRIPTS / f"mxnet_{script}.py", "gangline.mxnet", ours, *options, code=0)
    assert_equal(theirs, ours)


def train_with_mxnets_servers(folder: Path) -> None:
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": free_ports(1)[0], "DMLC_NUM_SERVER": 1}
    job |= {"DMLC_NUM_WORKER": 2, "DMLC_INTERFACE": "lo"}
    serve = [MXNET, "-c", "import mxnet"]  # a scheduler or server of MXNet ends there
    work = [MXNET, SCRIPTS / "mxnet_gluon.py", "mxnet", folder]
    roles = [("scheduler", serve), ("server", serve), ("worker", work), ("worker", work)]
    processes = [
        subprocess.Popen([*map(str, command)], env=environment(**job, DMLC_ROLE=role)) for role, command in roles
    ]
    try:
        assert [process.wait(60) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not MXNET.exists(), reason="it is not installed: make peers")
def test_a_gluon_script_of_two_workers_gives_mxnets_weights(tmp_path: Path) -> None:
    theirs, ours = folders(tmp_path)
    train_with_mxnets_servers(theirs)
    launch = ("-m", "gangline", "launch", "-n", 2, "-s", 1, "--", sys.executable)
    python(*launch, SCRIPTS / "mxnet_gluon.py", "gangline.mxnet", ours, code=0)
    assert_equal(theirs, ours)


@pytest.mark.parametrize("script", ["fit", "loop", "gluon"])
def test_scripts_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, "gangline.mxnet", str(tmp_path)])
    source = (SCRIPTS / f"mxnet_{script}.py").read_text()
    exec(compile(source, script, "exec"), {"__name__": "__main__"})
    assert weights(tmp_path)


def test_symbols_are_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"mx.sym does not exist: write the network as a torch.nn.Module"):
        mx.sym.var("data")
    with pytest.raises(AttributeError, match="no attribute 'numpy_extension'"):
        mx.numpy_extension  # noqa: B018
    with pytest.raises(NotImplementedError, match="use Module"):
        mx.mod.BucketingModule()


def test_arrays_answer_to_mxnets_methods(tmp_path: Path) -> None:
    one = mx.nd.array(np.arange(3))
    assert one.dtype == torch.float32
    assert mx.nd.array(torch.arange(3)).dtype == torch.int64
    assert (one + 1).asnumpy().tolist() == [1, 2, 3]
    assert one.sum().asscalar() == 3
    assert one.context == one.ctx == mx.cpu()
    assert one.astype("int32").as_in_context(mx.cpu()).dtype == torch.int32
    one.wait_to_read()
    mx.nd.waitall()
    one.attach_grad()
    with mx.autograd.record():
        assert mx.autograd.is_recording()
        (one * one).backward()
    assert one.grad.tolist() == [0, 2, 4]
    for saved in ([mx.nd.zeros(2), mx.nd.ones((2, 1))], {"a": mx.nd.ones(3)}):
        mx.nd.save(tmp_path / "file.params", saved)
        loaded = mx.nd.load(tmp_path / "file.params")
        assert str(loaded) == str(saved)


@pytest.mark.parametrize(
    ("handle", "epochs"),
    [
        ("pad", [[[0, 1], [2, 3], [4, 0]]] * 2),
        ("discard", [[[0, 1], [2, 3]]] * 2),
        ("roll_over", [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]]]),
    ],
)
def test_the_last_batch(handle: str, epochs: list[list[list[int]]]) -> None:
    data_iter = mx.io.NDArrayIter(np.arange(5), np.arange(5), 2, last_batch_handle=handle)
    assert data_iter.provide_data == [("data", (2,))]
    for expected in epochs:
        batches = list(data_iter)
        assert [batch.data[0].tolist() for batch in batches] == expected
        assert [batch.label[0].tolist() for batch in batches] == expected
        assert batches[-1].pad == (1 if handle == "pad" else 0)
        data_iter.reset()


def test_files_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2\n3,4\n5,6\n")
    (tmp_path / "label.csv").write_text("0\n1\n2\n")
    data_iter = mx.io.CSVIter(
        data_csv=str(tmp_path / "data.csv"), data_shape=(2,), label_csv=str(tmp_path / "label.csv"), batch_size=2
    )
    assert [batch.data[0].tolist() for batch in data_iter] == [[[1, 2], [3, 4]], [[5, 6], [1, 2]]]
    data_iter.reset()
    assert data_iter.next().label[0].tolist() == [0, 1]


def test_metrics() -> None:
    label = [mx.nd.array(np.array([0, 1, 1]))]
    probabilities = [mx.nd.array(np.array([[0.7, 0.2, 0.1], [0.3, 0.2, 0.5], [0.1, 0.8, 0.1]]))]
    metric = mx.metric.create(["acc", mx.metric.TopKAccuracy(top_k=2), "ce"])
    metric.update(label, probabilities)
    names, values = metric.get()
    assert names == ["accuracy", "top_k_accuracy_2", "cross-entropy"]
    expected = [2 / 3, 2 / 3, -(math.log(0.7) + math.log(0.2) + math.log(0.8)) / 3]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    metric.reset_local()
    assert math.isnan(metric.get()[1][0])
    assert metric.get_global_name_value() == list(zip(names, values, strict=True))
    rmse = mx.metric.create("rmse")
    rmse.update([mx.nd.zeros(2)], [mx.nd.array(np.array([[3.0], [4.0]]))])
    assert rmse.get() == ("rmse", pytest.approx(math.sqrt(12.5)))
    own = mx.metric.create(lambda labels, outputs: (labels == outputs).mean())
    own.update([mx.nd.ones(2)], [mx.nd.ones(2)])
    assert own.get()[1] == 1
    with pytest.raises(ValueError, match="metric 'nonsense' is unknown; expected one of"):
        mx.metric.create("nonsense")


def test_initial_weights() -> None:
    block = mx.gluon.Block(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Linear(3, 2)))
    convolution, norm, linear = block.network
    block.initialize(mx.init.Xavier(factor_type="in", magnitude=2))
    limit = math.sqrt(2 / 36)
    assert 0.8 * limit < float(convolution.weight.detach().abs().max()) <= limit
    assert not convolution.bias.any()
    assert norm.weight.tolist() == norm.running_var.tolist() == [1] * 6
    for initializer, value in ((mx.init.One(), 1), (mx.init.Zero(), 0), (mx.initializer.Constant(3), 3)):
        block.initialize(initializer)
        assert {*linear.weight.flatten().tolist()} == {value}
    for initializer in (mx.init.Uniform(0.5), mx.init.Normal(0.1), mx.init.Orthogonal(), mx.init.MSRAPrelu()):
        block.initialize(initializer)
        assert linear.weight.abs().max() > 0
    with pytest.raises(ValueError, match="rnd_type is 'normal'"):
        block.initialize(mx.init.Xavier("normal"))


def test_checkpoints_hold_the_optimizer_too(tmp_path: Path) -> None:
    data_iter = mx.io.NDArrayIter(np.random.rand(8, 3).astype("float32"), np.arange(8) % 2, 4)

    def made() -> mx.mod.Module:
        return mx.mod.Module(nn.Linear(3, 2))

    def trained(module: mx.mod.Module, epochs: range) -> None:
        module.fit(data_iter, num_epoch=epochs.stop, begin_epoch=epochs.start, optimizer_params=params)

    params = {"learning_rate": 0.1, "momentum": 0.9}
    mx.random.seed(0)
    whole = made()
    whole.fit(
        data_iter,
        num_epoch=2,
        optimizer_params=params,
        epoch_end_callback=mx.callback.module_checkpoint(whole, str(tmp_path / "net"), 1, True),
    )
    module = mx.mod.Module.load(str(tmp_path / "net"), 1, symbol=nn.Linear(3, 2))
    module.bind(data_iter.provide_data, data_iter.provide_label)
    module.init_optimizer(optimizer_params=params)
    module.load_optimizer_states(str(tmp_path / "net-0001.states"))
    trained(module, range(1, 2))
    for name, value in whole.get_params()[0].items():
        torch.testing.assert_close(module.get_params()[0][name], value)
    with pytest.raises(ValueError, match="expected load_optimizer_states"):
        mx.mod.Module.load(str(tmp_path / "net"), 1, True, symbol=nn.Linear(3, 2))


def test_what_module_refuses_and_ignores(caplog: pytest.LogCaptureFixture) -> None:
    data_iter = mx.io.NDArrayIter(np.zeros((4, 3), "float32"), np.zeros(4), 2)
    module = mx.mod.Module(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="num_epoch is None"):
        module.fit(data_iter)
    module.bind(data_iter.provide_data, data_iter.provide_label)
    with pytest.raises(ValueError, match=r"rescale_grad is 0\.5"):
        module.init_optimizer(optimizer_params={"rescale_grad": 0.5})
    module.init_params(mx.init.Zero())
    module.init_params(mx.init.One())  # without force_init
    assert not module.get_params()[0]["weight"].any()
    module.init_optimizer()
    module.init_optimizer(optimizer="adam")
    assert "optimizer already initialized" in caplog.text
    with pytest.raises(ValueError, match=r"gangline.Pipeline divides a network"):
        mx.mod.Module(nn.Linear(3, 2), group2ctxs={"a": 1})


def test_gluon_blocks_and_losses(tmp_path: Path) -> None:
    block = mx.gluon.Block(nn.Linear(3, 2))
    block.collect_params().initialize(mx.init.One(), ctx=[mx.cpu()])
    block.save_parameters(tmp_path / "net.params")
    block.initialize()
    block.load_parameters(tmp_path / "net.params")
    block.hybridize()
    data = mx.nd.ones((4, 3))
    assert block(data).asnumpy().tolist() == [[3, 3]] * 4
    loss = mx.gluon.loss
    label = mx.nd.zeros(4)
    np.testing.assert_allclose(
        loss.SoftmaxCrossEntropyLoss()(block(data), label).asnumpy(), [math.log(2)] * 4, rtol=1e-6
    )
    one_hot = mx.nd.array(np.eye(2)[[0] * 4])
    assert torch.equal(
        loss.SoftmaxCELoss(sparse_label=False)(block(data), one_hot), loss.SoftmaxCELoss()(block(data), label)
    )
    assert loss.L2Loss()(block(data), mx.nd.ones((4, 2))).tolist() == [2] * 4
    assert loss.L1Loss(weight=2)(block(data), mx.nd.ones((4, 2))).tolist() == [4] * 4
    assert loss.SigmoidBCELoss()(mx.nd.zeros((4, 1)), label)[0] == pytest.approx(math.log(2))
    [part] = mx.gluon.utils.split_and_load(np.ones((2, 2)), [mx.cpu(0)])
    assert part.shape == (2, 2)
    with pytest.raises(ValueError, match=r"mx.mod.Module may have several"):
        mx.gluon.utils.split_and_load(data, [mx.cpu(0), mx.cpu(1)])
    assert os.environ.get("DMLC_ROLE") is None

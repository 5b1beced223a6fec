"""Several workers: batches of their own, scores, predictions, reports, checkpoints, later fits and errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torchmetrics
from measure import distance, gangline_lines, labelled, same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gangline import Communicator, DeadNodeError, MismatchError, Module, cpu, spawn
from gangline.callback import Speedometer
from gangline.kvstore import create
from gangline.launcher.job import free_ports
from tests.kvstore.parameter_server.processes import run_job

SAMPLES, FEATURES, CLASSES = 47, 5, 3
Params = Mapping[str, torch.Tensor]


def arrays(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    data, label = labelled(SAMPLES, FEATURES, CLASSES, dtype=torch.float64)
    return data[:samples], label[:samples]


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


METRICS = ["acc", "ce", "loss", ("top_k_accuracy", {"top_k": 2})]


def scored(module: Module, samples: int, batch_size: int) -> list[tuple[str, float]]:
    return module.score(arrays(samples), METRICS, batch_size=batch_size)


def correlations(module: Module) -> list[tuple[str, float]]:
    """Metrics with states that are not combined by a sum."""
    data = torch.arange(SAMPLES * 2.0).view(SAMPLES, 2)
    label = (data.sum(1, keepdim=True) + 40 * data.sin().sum(1, keepdim=True)).float()
    return module.score((data, label), [torchmetrics.PearsonCorrCoef(), torchmetrics.SpearmanCorrCoef()], batch_size=6)


SCORED = [(SAMPLES, 7), (5, 5), (2, 4), (1, 1)]
"""Samples and batch sizes: with three workers some have no share of a batch, or of any."""


def scores_in_a_job(comm: Communicator, loads: str) -> Any:
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
        with Module(network(comm.rank), nn.CrossEntropyLoss(), cpu()) as module:
            module.init_optimizer(store)
            found = [scored(module, *sizes) for sizes in SCORED]
            own_share = module.score([arrays(comm.rank + 2)], "acc")
            outputs = [module.predict(arrays(samples)[0], batch_size=size) for samples, size in SCORED]
            of_dataset = module.predict(TensorDataset(*arrays()), batch_size=4)
            own = [len(part) for part, _, _ in module.iter_predict(arrays()[0], batch_size=7)]
        other = create("allreduce", communicator=comm)
        with other, Module(nn.Linear(2, 1), nn.MSELoss(), cpu()) as module:
            nn.init.constant_(module.network.weight, 0.5)
            module.init_optimizer(other)
            return found, own_share, outputs, of_dataset, own, correlations(module)


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
def test_scores_and_predictions_count_each_sample_once_and_keep_the_order() -> None:
    everybody = spawn(scores_in_a_job, 3, "2,1,0.5")
    with Module(network(0), nn.CrossEntropyLoss(), cpu()) as module:
        expected = [scored(module, *sizes) for sizes in SCORED]
        rights = [(module.predict(arrays(n)[0], batch_size=n).argmax(1) == arrays(n)[1]).sum() for n in (2, 3, 4)]
        whole = module.predict(arrays()[0], batch_size=SAMPLES)
    line = nn.Linear(2, 1)
    nn.init.constant_(line.weight, 0.5)
    with Module(line, nn.MSELoss(), cpu()) as module:
        expected_of_line = correlations(module)
    for rank, (found, own_share, outputs, of_dataset, _, of_line) in enumerate(everybody):
        for values, alone in zip(found, expected, strict=True):
            assert [name for name, _ in values] == [name for name, _ in alone]
            assert [value for _, value in values] == pytest.approx(
                [value for _, value in alone], rel=1e-12, nan_ok=True
            )
        assert own_share == [("accuracy", pytest.approx(float(sum(rights)) / 9))]
        if rank:
            assert [*outputs, of_dataset] == [None] * 5
        else:
            for (samples, _), output in zip(SCORED, outputs, strict=True):
                torch.testing.assert_close(output, whole[:samples])
            torch.testing.assert_close(of_dataset, whole)
        assert dict(of_line) == pytest.approx(dict(expected_of_line), rel=1e-5)
        assert all(0.5 < value < 0.9 for value in dict(of_line).values())
    assert len({repr(found) for found, *_ in everybody}) == 1  # the same bits, NaN among them
    assert [own for *_, own, _ in everybody] == [[4] * 6 + [3], [2] * 6 + [1], [1] * 7]


def own_batches(rank: int) -> list[Any]:
    """Return three batches for rank 0 and five of other sizes for rank 1."""
    data, label = arrays()
    label[torch.rand(SAMPLES, generator=torch.Generator().manual_seed(2)) < 0.6] = -100  # which the loss ignores
    sizes = [[5, 2, 6], [1, 3, 4, 2, 5]][rank]
    own = slice([0, 20][rank], [13, 35][rank])
    return list(zip(data[own].split(sizes), label[own].split(sizes), strict=True))


def own_batches_in_a_job(comm: Communicator, as_loader: bool) -> Params:
    with create("allreduce", communicator=comm) as store, Module(network(comm.rank), nn.CrossEntropyLoss()) as module:
        batches: Any = own_batches(comm.rank)
        if as_loader:
            batches = DataLoader(batches, batch_size=None, sampler=range(len(batches)))
        module.fit(batches, num_epoch=2, kvstore=store, optimizer_params={"learning_rate": 0.1})
        return module.get_params()


def test_batches_of_a_workers_own_are_not_cut_and_may_be_fewer_than_the_others(two: list[dict[str, Any]]) -> None:
    joined = []
    for step in range(5):
        parts = [own_batches(rank)[step] for rank in range(2) if step < len(own_batches(rank))]
        joined.append(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    with Module(network(0), nn.CrossEntropyLoss()) as module:
        module.fit(joined, num_epoch=2, optimizer_params={"learning_rate": 0.1})
        alone = module.get_params()
    for params in (params for each in two for params in each["own batches"]):
        assert distance(params, alone) <= 1e-11


def noisy(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def noise_in_a_job(comm: Communicator) -> tuple[Params, Params]:
    network = noisy(comm.rank)
    network[1].running_mean.fill_(comm.rank + 1)  # rank 0's values are used
    with create("allreduce", communicator=comm) as store, Module(network, nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1})
        begun = module.get_params()
        module.fit(arrays(), num_epoch=2, batch_size=8, seed=5, kvstore=store, eval_metric="loss")
        params = module.get_params()
        module.set_params({name: value + comm.rank for name, value in params.items()})
        assert same_bits(module.get_params(), params)  # rank 0's, which added nothing
        return begun, params


def test_random_streams_and_running_statistics_are_those_of_as_many_contexts_of_one_worker(
    two: list[dict[str, Any]],
) -> None:
    found = [each["noise"] for each in two]
    network = noisy(0)
    network[1].running_mean.fill_(1)
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("local", "sgd", {"learning_rate": 0.1})
        begun = module.get_params()
        module.fit(arrays(), num_epoch=2, batch_size=8, seed=5, eval_metric="loss")
        alone = module.get_params()
    for begun_there, params in found:
        assert same_bits(begun_there, begun)
        assert distance(params, alone) <= 1e-11


def unwritable_in_a_job(comm: Communicator, folder: str) -> str:
    with create("allreduce", communicator=comm) as store, Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer(store)
        with pytest.raises(OSError, match="file") as raised:
            module.save_checkpoint(f"{folder}/file/net", 1)
        module.save_checkpoint(f"{folder}/net", 1)
        return f"{type(raised.value).__name__}: {raised.value}"


def of_two_workers(comm: Communicator, folder: str, ports: list[int]) -> dict[str, Any]:
    """Do many things as one of two workers; return what each showed."""
    return {
        "own batches": [own_batches_in_a_job(comm, as_loader) for as_loader in (False, True)],
        "noise": noise_in_a_job(comm),
        "unwritable": unwritable_in_a_job(comm, folder),
        "reports": reports_in_a_job(comm),
        "refused": refused_in_a_job(comm),
        "parallel": in_parallel(comm, ports[0]),
        "later fits": later_fits_in_a_job(comm, ports[1]),
        "failing": failing_in_a_job(comm, ports[2]),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "file").write_text("not a folder")
    return spawn(of_two_workers, 2, str(folder), free_ports(3), threads=1)


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_all_workers(two: list[dict[str, Any]]) -> None:
    first, second = (each["unwritable"] for each in two)
    assert first.startswith(("FileExistsError", "NotADirectoryError"))
    assert second == first


def reports_in_a_job(comm: Communicator) -> tuple[list[str], int]:
    seen: list[float] = []
    with (
        gangline_lines() as lines,
        create("allreduce", communicator=comm) as store,
        Module(network(), nn.CrossEntropyLoss(), cpu()) as module,
    ):
        module.fit(
            arrays(21),
            arrays(7),
            num_epoch=1,
            batch_size=4,
            kvstore=store,
            batch_end_callback=Speedometer(4, 2),
            eval_end_callback=lambda param: seen.extend(value for _, value in param.eval_metric.get_name_value()),
        )
    shown = [re.split(r"=|\t| \d+\.\d+ s", line)[0] for line in lines]
    return shown, round(seen[0] * 7)


def test_rank_0_reports_and_a_callback_sees_the_same_score_on_all_workers(two: list[dict[str, Any]]) -> None:
    (first, right), (second, right_there) = (each["reports"] for each in two)
    assert first == [
        "Epoch[0] Batch [0-2]",
        "Epoch[0] Batch [2-4]",
        "Epoch[0] Train-accuracy",
        "Epoch[0] Time cost",
        "Epoch[0] Validation-accuracy",
        "Epoch[0] worker 0: load 1, computed",
    ]
    assert second == []
    assert right == right_there


def refused_in_a_job(comm: Communicator) -> str:
    with create("allreduce", communicator=comm) as store, Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
        with pytest.raises(MismatchError) as mismatch:
            module.fit(arrays(), num_epoch=1, batch_size=4 + comm.rank, kvstore=store)
        return str(mismatch.value)


def test_data_that_differ_among_workers_raise_the_same_error_on_all(two: list[dict[str, Any]]) -> None:
    first, second = (each["refused"] for each in two)
    assert first == second
    assert first.startswith("fit: train_data is {")
    assert first.index("'batch_size': 4") < first.index("on rank 0, but") < first.index("'batch_size': 5")


def as_launched(patch: pytest.MonkeyPatch, rank: int, size: int, port: int) -> None:
    """Set the environment as a launcher does."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        patch.setenv(name, str(value))


def failing_in_a_job(comm: Communicator, port: int) -> str:
    def fail(param: Any) -> None:
        if comm.rank == 1 and param.nbatch == 2:
            raise ArithmeticError("this one had enough")

    with pytest.MonkeyPatch.context() as patch:
        as_launched(patch, comm.rank, comm.size, port)
        with Module(network(), nn.CrossEntropyLoss(), cpu()) as module:
            with pytest.raises((ArithmeticError, DeadNodeError)) as raised:
                module.fit(arrays(), num_epoch=5, batch_size=4, kvstore="allreduce", batch_end_callback=fail)
            return f"{type(raised.value).__name__}: {raised.value}"


def test_a_failed_worker_ends_the_others_waits(two: list[dict[str, Any]]) -> None:
    first, second = (each["failing"] for each in two)
    assert second == "ArithmeticError: this one had enough"
    assert first.startswith("DeadNodeError")
    assert "rank 1" in first


def trained(context: str) -> tuple[str | None, int, Params]:
    with Module(network(), nn.CrossEntropyLoss(), context) as module:
        module.fit(arrays(), num_epoch=2, batch_size=8, optimizer_params={"learning_rate": 0.1})
        return module.store_type, module.workers.count, module.get_params()


def in_parallel(comm: Communicator, port: int) -> tuple[str | None, int, Params]:
    with pytest.MonkeyPatch.context() as patch:
        as_launched(patch, comm.rank, comm.size, port)
        return trained("parallel")


def test_all_processes_of_a_job_train_as_one_does(two: list[dict[str, Any]]) -> None:
    _, _, expected = trained("cpu")
    for store, count, params in (each["parallel"] for each in two):
        assert (store, count) == ("allreduce", 2)
        assert distance(params, expected) <= 1e-11


def test_a_store_that_stays_in_the_process_contradicts_a_parallel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    as_launched(monkeypatch, 0, 1, 29500)
    module = Module(network(), nn.CrossEntropyLoss(), "parallel")
    with pytest.raises(ValueError, match=re.escape("kvstore is 'device', which does not leave this process")):
        module.init_optimizer("device")
    assert module.contexts == [cpu()] or torch.cuda.is_available()


def train_thrice(kvstore: str) -> tuple[Params, list[str]]:
    """Train, fine-tune the last layer, and train again; return the weights and the keys of that state."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    data = torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 3, (60,))
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with Module(network, nn.CrossEntropyLoss(), "cpu") as module:
        how = {"num_epoch": 2, "batch_size": 12, "kvstore": kvstore}
        module.fit(data, optimizer="sgd", optimizer_params={"lr": 0.1, "momentum": 0.9}, **how)
        network[0].requires_grad_(False)
        module.fit(data, optimizer="adam", optimizer_params={"lr": 0.01}, **how)
        keys = sorted(module.optimizer_state().shapes)
        network[0].requires_grad_(True)
        module.fit(data, optimizer="adam", optimizer_params={"lr": 0.02}, **how)
        return module.get_params(), keys


def later_fits_in_a_job(comm: Communicator, port: int) -> tuple[Params, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        as_launched(patch, comm.rank, comm.size, port)
        return train_thrice("allreduce")


def test_a_later_fit_with_another_optimizer_keeps_the_workers_store(two: list[dict[str, Any]]) -> None:
    expected, keys = train_thrice("local")
    assert keys == ['"2.bias"', '"2.weight"']
    for weights, own_keys in (*(each["later fits"] for each in two), *run_job(train_thrice, 2, 1, "dist_sync")):
        assert own_keys == keys
        assert distance(weights, expected) <= 1e-11

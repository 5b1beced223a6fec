"""Ray Train on two nodes of this machine: the weights of one process, failures, restarts, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gangline import Module, Trainer, cpu
from gangline.callback import Checkpoint
from tests.kvstore.test_launch import MARK, marked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs ray: pip install "ray[train,tune]"'),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]  # Ray's own


SIZES = (5, 3)
"""Samples of each rank in a batch."""


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(7, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)).double()


def plain_loop(store: str, mine: slice) -> list[torch.Tensor]:
    """Train with some samples of each batch, and return the weights."""
    model, generator = network(), torch.Generator().manual_seed(100)
    trainer = Trainer(model.parameters(), "sgd", {"learning_rate": 0.02, "momentum": 0.5}, store)
    for _ in range(8):
        data, target = (torch.randn(sum(SIZES), n, generator=generator).double()[mine] for n in (7, 2))
        trainer.zero_grad()
        torch.nn.functional.mse_loss(model(data), target).backward()
        trainer.step(len(data))
    trainer.kvstore.close()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start two nodes of one core each; check at the end that none of their processes is left."""
    import ray
    from ray.cluster_utils import Cluster

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mark = os.environ[MARK] = uuid.uuid4().hex
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        nodes.add_node(**node)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()
        del os.environ[MARK]
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert wait_until_gone(mark) == []


def wait_until_gone(mark: str) -> list[str]:
    """Return the names of processes with this mark that do not end in time, beside this one."""
    deadline = time.monotonic() + 30
    while (left := names_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def names_of(mark: str) -> list[str]:
    found = []
    for pid in marked(mark) - {os.getpid()}:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


def run(loop: Callable[[dict[str, Any]], None], folder: Path, failures: int = 0, **config: object) -> None:
    """Call a loop in a worker on each node."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from gangline.integrations.ray_train import GanglineConfig

    TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), **config},
        torch_config=GanglineConfig(),
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 0.6}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=failures)),
    ).fit()


def train(config: dict[str, Any]) -> None:
    import ray

    torch.set_num_threads(1)
    rank, node = torch.distributed.get_rank(), ray.get_runtime_context().get_node_id()
    assert torch.distributed.get_backend() == "gangline"
    own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
    weights = plain_loop(config["store"], own)
    torch.save((weights, node), Path(config["folder"], f"{rank}.pt"))
    if rank == 0 and config.get("fails"):
        raise KeyError("no such thing")


@pytest.mark.parametrize(("store", "fails"), [("dist_sync", False), ("allreduce", True)])
def test_workers_on_two_nodes_train_as_one_process(cluster: str, store: str, fails: bool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such thing") if fails else nullcontext():
        run(train, tmp_path, store=store, fails=fails)
    (first, one), (second, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one != other
    for weights in (first, second):
        for got, expected in zip(weights, plain_loop("local", slice(None)), strict=True):
            assert torch.linalg.norm(got - expected) / torch.linalg.norm(expected) < 1e-9


def fit(kvstore: str, folder: Path, after_epoch: Callable[..., None]) -> dict[str, torch.Tensor]:
    """Train with a checkpoint of each epoch; return the weights."""
    generator = torch.Generator().manual_seed(1)
    data, label = (torch.randn(32, width, generator=generator).double() for width in (7, 2))
    with Module(network(), torch.nn.MSELoss(), cpu(0)) as module:
        callbacks = [Checkpoint(module, folder / "net"), after_epoch]
        options = {"num_epoch": 4, "batch_size": 8, "eval_metric": "mse", "epoch_end_callback": callbacks}
        module.fit((data, label), kvstore=kvstore, **options)
        return module.get_params()


def fit_in_job(config: dict[str, Any]) -> None:
    """Train; worker 1 is killed after the second epoch of the first start."""
    torch.set_num_threads(1)
    rank, restart = (int(os.environ[name]) for name in ("RANK", "GANGLINE_RESTART"))

    def after_epoch(epoch: int, *_: object) -> None:
        if (epoch, rank, restart) == (1, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        assert restart == 0 or epoch > 0, "the run does not resume"

    folder = Path(config["folder"])
    torch.save((fit("dist_sync", folder, after_epoch), restart), folder / f"{rank}.pt")


def test_a_run_with_a_killed_worker_resumes_from_its_checkpoint(cluster: str, tmp_path: Path) -> None:
    run(fit_in_job, tmp_path, failures=1)
    weights, restart = torch.load(tmp_path / "0.pt")
    alone = fit("local", tmp_path / "alone", lambda *_: None)
    assert restart == 1
    for name, expected in alone.items():
        assert torch.linalg.norm(weights[name] - expected) / torch.linalg.norm(expected) < 1e-9


def test_the_example_of_ray_tune_finds_the_better_rate(cluster: str, tmp_path: Path) -> None:
    import ray
    import sweep_ray_tune

    ray.cloudpickle.register_pickle_by_value(sweep_ray_tune)  # the nodes do not have the file
    best = sweep_ray_tune.main(rates=(0.1, 0.0001), epochs=2, cpus=0.5, storage=str(tmp_path))
    assert best == {"learning_rate": 0.1, "epochs": 2}

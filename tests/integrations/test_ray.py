"""Jobs on two Ray nodes of this machine: the weights of one process, failures, restarts, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

if importlib.util.find_spec("ray") is None:
    pytest.skip('needs ray: pip install "ray[train]"', allow_module_level=True)

import ray
from ray.cluster_utils import Cluster

from gangline import Trainer
from gangline.collectives.errors import DeadNodeError
from gangline.integrations import ray_jobs
from gangline.integrations.ray import run
from gangline.integrations.ray_members import Placement, in_cluster
from gangline.launcher.job import JobSpec
from tests.kvstore.test_launch import MARK, ROOT, Launch, marked
from tests.kvstore.test_trainer_dist import OPTIMIZERS, SIZES, batch, network, plain_loop, play

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]  # Ray's own
WORKER, SERVER = {"CPU": 0.6}, {"CPU": 0.2}
PLACED: dict[str, Any] = {"worker_resources": WORKER, "server_resources": SERVER, "strategy": "SPREAD"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start two nodes of one core each; check at the end that none of their processes is left."""
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


def wait_until_gone(mark: str, words: str = "") -> list[str]:
    """Return the names of processes with this mark and words that do not end in time, beside this one."""
    deadline = time.monotonic() + 30
    while (left := [name for name in names_of(mark) if words in name]) and time.monotonic() < deadline:
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


def assert_as_alone(weights: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    for got, expected in zip(weights, alone, strict=True):
        assert torch.linalg.norm(got - expected) / torch.linalg.norm(expected) < 1e-9


def train(store: str) -> tuple[list[torch.Tensor], str]:
    torch.set_num_threads(1)
    return play(OPTIMIZERS["sgd"], store), ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize(("store", "servers"), [("dist_sync", 2), ("allreduce", 0)])
def test_workers_on_two_nodes_train_as_one_process(cluster: str, store: str, servers: int) -> None:
    alone = plain_loop(OPTIMIZERS["sgd"], "local", slice(None))
    found = run(train, store, servers=servers, **PLACED)
    assert len({node for _, node in found}) == 2
    for weights, _ in found:
        assert_as_alone(weights, alone)


def fail(how: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)
    if how == "raise":
        raise KeyError("no such thing")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_first_failure_is_raised_with_its_rank(cluster: str) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        run(fail, "raise", **PLACED)
    (note,) = caught.value.__notes__
    assert note.startswith("raised by worker 1 of 2:\nray::Member.call()")
    assert "in fail" in note


def test_a_killed_worker_is_named(cluster: str) -> None:
    with pytest.raises(DeadNodeError, match="the actor of worker 1 ended: The actor died unexpectedly"):
        run(fail, "kill", **PLACED)


def kill_server(mark: str) -> None:
    import gangline

    store = gangline.create("dist_sync")
    if store.rank == 0:
        (server,) = (
            pid for pid in marked(mark) if "gangline.kvstore.parameter_server.server" in psutil.Process(pid).cmdline()
        )
        os.kill(server, signal.SIGKILL)
    store.init(0, torch.zeros(1))
    for _ in range(1000):
        store.push(0, torch.ones(1))
        store.pull(0, torch.zeros(1))
        time.sleep(0.1)


def test_a_killed_server_is_named(cluster: str) -> None:
    with pytest.raises(DeadNodeError, match="server 0"):
        run(kill_server, os.environ[MARK], **PLACED)


def train_with_checkpoints(folder: str) -> list[torch.Tensor]:
    """Train as `plain_loop`, from the last checkpoint; worker 1 is killed at step 3 of the first run."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
    model, saved, kill = network(), Path(folder, "saved.pt"), Path(folder, "kill")
    begin = 0
    if saved.exists():
        begin, state = torch.load(saved)
        model.load_state_dict(state)
    trainer = Trainer(model.parameters(), "sgd", {"learning_rate": 0.02}, "dist_sync")
    for step in range(begin, 6):
        if step == 3 and rank == 1 and kill.exists():
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        data, target = (part[own] for part in batch(step))
        trainer.zero_grad()
        torch.nn.functional.mse_loss(model(data), target).backward()
        trainer.step(len(data))
        if rank == 0:
            torch.save((step + 1, model.state_dict()), saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
    trainer.kvstore.close()
    return [*(one.detach() for one in model.parameters()), torch.tensor(float(begin))]


def test_a_job_with_a_killed_actor_starts_again_from_its_checkpoint(cluster: str, tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(6):
        optimizer.zero_grad()
        data, target = batch(step)
        torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    (tmp_path / "kill").touch()
    for *weights, begin in run(train_with_checkpoints, str(tmp_path), max_restarts=1, **PLACED):
        assert begin == 3
        assert_as_alone(weights, [one.detach() for one in model.parameters()])
    assert not (tmp_path / "kill").exists()


def test_resources_that_the_cluster_lacks_are_named(cluster: str) -> None:
    with pytest.raises(RuntimeError, match=r"did not place the job within 1 s: it needs {'CPU': 8}, {'CPU': 8}; the"):
        run(fail, "raise", servers=0, worker_resources={"CPU": 8}, timeout=1)


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_runs_in_each_worker(cluster: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import os, sys, time; rank = os.environ['RANK']; print('here', rank, flush=True)\n"
    text += f"sys.exit({code}) if rank == '1' else time.sleep({60 if code else 0})"
    assert ray_jobs.run(JobSpec((sys.executable, "-c", text), 2, 0), placement=Placement(**PLACED)) == code
    out, errors = capfd.readouterr()
    started = {"[worker 1] here 1"} if code else {"[worker 0] here 0", "[worker 1] here 1"}  # 0 may be stopped earlier
    assert started <= {*out.splitlines()}
    assert ("worker 1 (pid " in errors) == bool(code)


def test_a_failed_command_starts_again(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import os, sys; restart = os.environ['GANGLINE_RESTART']; print('start', restart); sys.exit(restart == '0')"
    assert ray_jobs.run(JobSpec((sys.executable, "-c", text), 1, 0), max_restarts=2, placement=Placement(**PLACED)) == 0
    out, errors = capfd.readouterr()
    assert [line for line in out.splitlines() if "start" in line] == ["[worker 0] start 0", "[worker 0] start 1"]
    assert "gangline: restart 1 of 2: all processes of the job start again" in errors


INTERRUPTED = """
import sys
from gangline.integrations import ray_jobs
from gangline.integrations.ray_members import Placement
from gangline.launcher.job import JobSpec
code = "import time; print('ready', flush=True); time.sleep(60)"
placement = Placement({"CPU": 0.6}, {"CPU": 0.2}, "SPREAD")
sys.exit(ray_jobs.run(JobSpec((sys.executable, "-c", code), 2, 1), address=sys.argv[1], placement=placement))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_processes(cluster: str, number: signal.Signals) -> None:
    with Launch([sys.executable, "-c", INTERRUPTED, cluster], cwd=ROOT) as job:
        job.hear("[worker 0] ready", "[worker 1] ready")
        job.process.send_signal(number)
        _, errors = job.process.communicate(timeout=60)
        assert job.process.returncode == 128 + number
        assert f"gangline: {number.name}; stopping all processes" in errors.decode()
    assert wait_until_gone(os.environ[MARK], "time.sleep(60)") == []


def train_loop(config: dict[str, str]) -> None:
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    assert torch.distributed.get_backend() == "gangline"
    own = slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None)
    torch.save(plain_loop(OPTIMIZERS["sgd"], "allreduce", own), Path(config["folder"], f"{rank}.pt"))
    if rank == 0 and config.get("fail"):
        raise KeyError("no such thing")


def test_ray_train_trains_over_a_store_as_one_process(cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='needs ray.train: pip install "ray[train]"')
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from gangline.integrations.ray_train import GanglineConfig

    def fit(**config: str) -> None:
        TorchTrainer(
            train_loop,
            train_loop_config={"folder": str(tmp_path), **config},
            torch_config=GanglineConfig(),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.6}),
            run_config=RunConfig(storage_path=str(tmp_path), name="run"),
        ).fit()

    fit()
    alone = plain_loop(OPTIMIZERS["sgd"], "local", slice(None))
    for rank in range(2):
        assert_as_alone(torch.load(tmp_path / f"{rank}.pt"), alone)
    with pytest.raises(Exception, match="no such thing"):
        fit(fail="yes")


def test_the_example_of_ray_tune_finds_the_better_rate(cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason='needs ray.tune: pip install "ray[tune]"')
    import sweep_ray_tune

    in_cluster(cluster)
    ray.cloudpickle.register_pickle_by_value(sweep_ray_tune)  # the nodes do not have the file
    best = sweep_ray_tune.main(rates=(0.1, 0.0001), epochs=2, cpus=0.5, storage=str(tmp_path))
    assert best == {"learning_rate": 0.1, "epochs": 2}

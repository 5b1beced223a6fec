"""Jobs of public issue threads in which other packages hang or give up: names, namespaces, restarts, start orders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import gangline
from gangline import Communicator, spawn
from gangline.launcher.job import free_ports
from tests.integrations.trainers import told
from tests.kvstore.parameter_server.processes import run_job
from tests.models.unequal_jobs import join
from tests.programs import environment, python, run, torchrun

pytestmark = pytest.mark.slow
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and the command unshare"
)

SUMS = """
import torch, gangline
torch.set_num_threads(1)
for store in ("allreduce", "dist_sync"):
    with gangline.create(store) as kv:
        kv.init("w", torch.zeros(16 << 20))
        kv.push("w", torch.full((16 << 20,), kv.rank + 1.0))
        out = torch.zeros(16 << 20)
        kv.pull("w", out)
        assert (out == 3).all(), out
"""
"""The stores "allreduce" and "dist_sync" sum 64 MiB."""
LAUNCH = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--", sys.executable, "-c", SUMS]


@needs_namespaces
@pytest.mark.parametrize("options", ["size=64m", "size=1m", "ro"])
def test_a_job_runs_whatever_dev_shm_allows(options: str) -> None:
    """NVIDIA/Megatron-LM#316, #878; nccl#290; pytorch#2244: containers have 64 MB of /dev/shm."""
    mount = f'mount -t tmpfs -o {options} none /dev/shm; exec "$@"'
    run(["unshare", "-m", "sh", "-ec", mount, "sh", *LAUNCH], code=0)


@needs_namespaces
def test_a_job_runs_on_a_host_whose_name_nothing_resolves() -> None:
    """strands-labs/robots#2600: torchrun gives up after a minute."""
    setup = 'hostname no-such-host; ip link set lo up; exec "$@"'
    run(["unshare", "-nu", "sh", "-ec", setup, "sh", *LAUNCH], code=0)


def test_a_job_runs_without_assertions_docstrings_and_a_language() -> None:
    """Python's -OO and the locale C, as minimal containers have it."""
    run(LAUNCH, code=0, PYTHONOPTIMIZE=2, LANG="C", LC_ALL="C", PYTHONUTF8=0)


CALLS = """
import os, sys, torch, torch.distributed as dist
from gangline import torch_backend
torch.set_num_threads(1)
dist.init_process_group("gangline")
rank, size = dist.get_rank(), dist.get_world_size()
for count in (4, 1 << 10, 4 << 20):
    values = torch.full((count,), rank + 1.0)
    dist.all_reduce(values)
    assert (values == size * (size + 1) / 2).all()
values = torch.full((3,), rank + 1.0)
if rank in (0, size - 1):
    dist.recv(values, 0) if rank else dist.send(values, size - 1)
    assert values.tolist() == [1, 1, 1]
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": other} for other in range(size)]
dist.destroy_process_group()
"""
"""Sums of 16 B to 16 MiB, a message from the first to the last rank, and objects."""


def ended(commands: Sequence[Sequence[object]], variables: Sequence[dict[str, object]]) -> None:
    """Run commands at once, each with its variables, and check that all end well."""
    with ExitStack() as stack:
        processes = []
        for command, given in zip(commands, variables, strict=True):
            words = [str(word) for word in command]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(words, env=environment(**given), **pipes)  # type: ignore[call-overload]
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            said, _ = process.communicate(timeout=100)
            assert process.returncode == 0, said


def test_nodes_of_torchrun_may_have_unequal_numbers_of_ranks(tmp_path: Path) -> None:
    """FlagScale#269; accelerate#327, #2780; espnet#3412; DeepSpeed#3409."""
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    place = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", *free_ports(1)]
    head = [sys.executable, "-m", "torch.distributed.run", *place]
    ended([[*head, "--node-rank", node, "--nproc-per-node", 2 - node, script] for node in range(2)], [{}, {}])


@needs_namespaces
def test_ranks_in_containers_of_one_host_name_communicate() -> None:
    """Rank 1 has its own process numbers and /dev/shm, as in a second container on the host's network."""
    [port] = free_ports(1)
    variables = [
        {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GANGLINE_TIMEOUT": 60}
        for rank in range(2)
    ]
    program = [sys.executable, "-c", CALLS]
    container = ["unshare", "-mpf", "--mount-proc", "sh", "-ec", 'mount -t tmpfs none /dev/shm; exec "$@"', "sh"]
    ended([program, [*container, *program]], variables)


RESTARTS = """
import os, signal, sys, torch
start, way = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), sys.argv[1]
torch.set_num_threads(1)
if way == "backend":
    import torch.distributed as dist
    from gangline import torch_backend
    dist.init_process_group("gangline")
    rank, values = dist.get_rank(), torch.ones(1)
    dist.all_reduce(values)
else:
    import gangline
    kv = gangline.create(way)
    rank, values = kv.rank, torch.zeros(1)
    kv.init("w", torch.zeros(1))
    kv.push("w", torch.ones(1))
    kv.pull("w", values)
assert values.item() == 2
if rank and start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if rank and start == 1:
    os._exit(3)
if start == 2:
    print(f"start {start} of {way}", flush=True)
    dist.destroy_process_group() if way == "backend" else kv.close()
else:
    dist.barrier() if way == "backend" else kv.barrier()
"""


@pytest.mark.parametrize("way", ["backend", "allreduce", "dist_sync"])
def test_ranks_meet_again_after_two_restarts_by_torchrun(way: str, tmp_path: Path) -> None:
    """pytorch#135712, #147064, #123678."""
    script = tmp_path / "restarts.py"
    script.write_text(RESTARTS)
    done = python(*torchrun("--max-restarts", 3, "--monitor-interval", 0.1, script, way), code=0)
    assert done.stdout.count(f"start 2 of {way}") == 2


def weights_to_a_rollout(comm: Communicator, path: str) -> list[float]:
    """Send weights from the first of two trainers, which reduce meanwhile, to a process without a default group."""
    from torch.distributed.distributed_c10d import _new_process_group_helper

    received = torch.zeros(2)
    if comm.rank < 2:
        trainers = comm.split(0)
        assert trainers is not None
        join(trainers, path, "gangline")
    else:
        comm.split(1)
    if comm.rank != 1:
        place = 2, min(comm.rank, 1), [], "gangline", dist.FileStore(f"{path}.rollout", 2)
        group, _ = _new_process_group_helper(*place, group_name="rollout", timeout=timedelta(seconds=60))
        dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    found = []
    for step in range(3):
        values = torch.full((2,), 1.0 + 2**step)
        if comm.rank < 2:
            dist.all_reduce(values)
        if comm.rank == 0:
            dist.broadcast(values, 0, group=group)
        if comm.rank == 2:
            dist.broadcast(received, 0, group=group)
            values = received
        found.append(values[0].item())
    comm.barrier()
    return found


def test_weights_reach_a_process_of_another_world(tmp_path: Path) -> None:
    """NovaSky-AI/SkyRL#789; vllm#11399, #5723: a second world made by torch's helper."""
    assert spawn(weights_to_a_rollout, 3, str(tmp_path / "store"), threads=1) == [[4.0, 6.0, 10.0]] * 3


def sparse_steps(optimizer: str) -> list[float]:
    """Train rows [1, 1, 3, 1] and [3, 9] of a table on two workers; the second has no samples in the second step."""
    table = nn.Embedding(10, 1, sparse=True)
    nn.init.zeros_(table.weight)
    trainer = gangline.Trainer(table.parameters(), optimizer, {"learning_rate": 1.0}, "dist_sync")
    rows = torch.tensor([[1, 1, 3, 1], [3, 9]][trainer.kvstore.rank])
    for step in range(2 if optimizer == "sgd" else 1):
        trainer.zero_grad()
        if step and trainer.kvstore.rank:
            trainer.step(0)
            continue
        table(rows).sum().backward()
        trainer.step(len(rows))
    trainer.kvstore.close()
    return [round(value, 4) for value in table.weight.flatten().tolist()]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_rows_of_negative_samples_are_trained_by_servers(optimizer: str) -> None:
    """apache/mxnet#21118: sparse gradients crash dist_sync."""
    expected = [0.0] * 10
    if optimizer == "sgd":  # the rows' gradients have weights 4 and 2, then 4 and 0
        expected[1], expected[3], expected[9] = -2 - 3, -1 - 1, -0.3333
    else:
        expected[1] = expected[3] = expected[9] = -1
    assert run_job(sparse_steps, 2, 1, optimizer) == [expected] * 2


ROLE = """
import torch, gangline
torch.set_num_threads(1)
kv = gangline.create("dist_sync")
kv.init("w", torch.zeros(2))
kv.push("w", torch.ones(2))
out = torch.zeros(2)
kv.pull("w", out)
assert out.tolist() == [2, 2], out
kv.close()
"""


def test_processes_of_a_tracker_may_start_in_any_order() -> None:
    """Workers come first, then the server, then the scheduler, and the root's address is a name."""
    counts = {"DMLC_NUM_WORKER": 2, "DMLC_NUM_SERVER": 1, "DMLC_PS_ROOT_PORT": free_ports(1)[0]}
    with ExitStack() as stack:
        processes = []
        for role, delay in (("worker", 0), ("worker", 2), ("server", 2), ("scheduler", 0)):
            variables = environment(**counts, DMLC_ROLE=role, DMLC_PS_ROOT_URI="localhost")
            processes.append(stack.enter_context(subprocess.Popen([sys.executable, "-c", ROLE], env=variables)))
            stack.callback(processes[-1].kill)
            time.sleep(delay)
        assert [process.wait(60) for process in processes] == [0] * 4


def local_steps(folder: str) -> str:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    plain: Any = DataLoader(torch.arange(1.0, 17.0)[:, None], 2)
    network = nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 1e-3), plain)
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as averaging:
            for x in gangline.balance(model, loader, loads=[3, 1]):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_local_steps_of_unequal_shares_are_refused(tmp_path: Path) -> None:
    """accelerate#1350: fast ranks would take larger steps."""
    pytest.importorskip("accelerate")
    for text in told(local_steps, tmp_path):
        assert "the optimizer has changed the weights of ranks 0, 1 differently" in text


def two_loaders(folder: str) -> str:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import CombinedLoader

    from gangline.integrations.lightning import Balance

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.layer(torch.cat([*batch.values()])).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data: Any = torch.arange(16.0)[:, None]
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, default_root_dir=folder,
        callbacks=[Balance([3, 1])], enable_model_summary=False, **plain,
    )  # fmt: skip
    try:
        trainer.fit(Network(), CombinedLoader({"labeled": DataLoader(data, 4), "unlabeled": DataLoader(data, 4)}))
    except ValueError as error:
        return str(error)
    return "no error"


def test_two_train_loaders_of_lightning_are_refused(tmp_path: Path) -> None:
    """Lightning#20404."""
    pytest.importorskip("lightning")
    assert told(two_loaders, tmp_path) == ["Balance: there is more than one train loader; expected one"] * 2

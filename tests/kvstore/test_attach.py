"""Fronts that take keys and an optimizer in a store: defaults, two fronts on one store, restarted workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gangline import Communicator, DistributedOptimizer, Module, cpu, create, spawn
from gangline.kvstore import Trainer
from gangline.kvstore.reducer import written_weights
from tests.collectives.ranks import in_threads
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(110)
JOB = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


# Which store


def test_a_store_of_one_process_in_a_job_of_several_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fronts() -> None:
        Trainer(nn.Linear(1, 1), "sgd", kvstore="local")
        DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), "local")
        for contexts in ([cpu(0), cpu(1)], [cpu(0)]):
            Module(nn.Linear(1, 1), nn.MSELoss(), context=contexts).init_optimizer("local")

    fronts()
    assert not caplog.messages
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    fronts()
    words = "uses a 'local' store, which serves this process alone, in a job of 3 workers"
    assert [words in text for text in caplog.messages] == [True] * 4
    assert [text.split()[1] for text in caplog.messages] == ["Trainer", "DistributedOptimizer", "Module", "Module"]


# Restarts

TWO = """\
net = torch.nn.Linear(1, 1, bias=False); kv = gangline.create("dist_sync")
two = [gangline.Trainer({name: net.weight}, "sgd", {"learning_rate": 1.0}, kvstore=kv) for name in "GD"]
for step in range(two[0].kept() or 0, 6):
    for tr in two: tr.keep(step)
    for tr in two:
        tr.zero_grad(); net(torch.ones(1, 1)).sum().backward()
        if rank and step == 3 and "GANGLINE_INCARNATION" not in os.environ: os.kill(os.getpid(), signal.SIGKILL)
        tr.step(1)
print("ended", flush=True)
"""
LATE = """\
kv = gangline.create("dist_sync"); kv.init("w", torch.zeros(1)); out = torch.zeros(1)
for step in range(BEGIN, 6):
    KEEP
    kv.pushpull("w", torch.ones(1), out)
    if step == 1: kv.init("late", torch.zeros(1))
    if rank and step == 3 and "GANGLINE_INCARNATION" not in os.environ: os.kill(os.getpid(), signal.SIGKILL)
    if step: kv.pushpull("late", torch.ones(1), out)
print("ended", flush=True)
"""
LATE_KEYS = "a loop that initialises keys after its first push ('late')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "what"),
    [
        (TWO, "training by a Trainer and a Trainer on one store"),
        (LATE.replace("BEGIN", "kv.first_step").replace("KEEP", ""), LATE_KEYS),
        (LATE.replace("BEGIN", "kv.kept() or 0").replace("KEEP", "kv.keep(step)"), LATE_KEYS),
    ],
)
def test_a_restarted_worker_that_cannot_continue_fails_the_job_by_name(code: str, what: str) -> None:
    head = "import os, signal, torch, gangline\nrank = int(os.environ['RANK'])\n"
    words = ("-n", "2", "-s", "1", "--restart-processes", "1")
    with launch(*words, "--", sys.executable, "-c", head + code) as run:
        status, out, errors = run.end(100)
    text = f"worker 1 was started again alone, and {re.escape(what)} cannot be continued by one worker"
    assert status
    assert out == []
    assert any(
        re.search(rf"worker 1\] RuntimeError: {text}; use gangline launch --max-restarts", one) for one in errors
    )
    assert any(re.search(rf"worker 0\].*DeadNodeError: {text}", one) for one in errors), errors


# Writes between steps


def _written_late(comm: Communicator, kind: str) -> tuple[list[float], str]:
    """Return the first column of the weights after steps without effect, and the error of the last of them."""
    torch.manual_seed(comm.rank)
    table = kind in ("rows", "other rows")
    net: nn.Module = nn.Embedding(4, 3, sparse=True) if table else nn.Linear(3, 4, bias=False)
    weight, data = net.weight, torch.tensor([0, 2]) if table else torch.ones(1, 3)
    assert isinstance(weight, nn.Parameter)
    with create("allreduce", communicator=comm) as kv:
        trainer = Trainer(net, "sgd", {"learning_rate": 0.0}, kv)
        assert trainer._written is not None
        trainer._written._defers = kind == "as on GPUs"
        for step in range(9):
            if step == 5:
                if kind == "swapped":  # the sum of all bits stays
                    weight.data.copy_(weight.data.flip(0).clone())
                    expected = weight[:, 0].tolist()
                else:
                    weight.data[1 if kind == "other rows" else slice(None)].fill_(7.0)
            trainer.zero_grad()
            net(data).sum().backward()
            try:
                trainer.step(1)
            except RuntimeError as error:
                return weight[:, 0].tolist(), str(error)
    return [float(kind != "swapped" or weight[:, 0].tolist() == expected), *weight[:, 0].tolist()], ""


def test_a_first_late_write_through_data_is_not_lost() -> None:
    for found, error in in_threads(2, _written_late, "filled"):
        assert (found, error) == ([1, 7, 7, 7, 7], "")
    for found, error in in_threads(2, _written_late, "swapped"):
        assert (found[0], error) == (1, "")
    for found, error in in_threads(2, _written_late, "other rows"):
        assert (found[2], error) == (7, "")
    for _, error in in_threads(2, _written_late, "as on GPUs"):
        assert error.startswith("parameter 'weight' was written through .data, and the store's weights replace")
    for _, error in in_threads(2, _written_late, "rows"):
        assert error.startswith("row 0 of parameter 'weight' was written through .data, and the store's weights")


def _bytes_summed(comm: Communicator, kind: str) -> list[int]:
    net = nn.Embedding(1000, 4, sparse=True) if kind == "table" else nn.Linear(128, 8, bias=False)
    counts, found = [0], []
    octets = written_weights.octets_of

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        counts[-1] += tensor.nbytes
        return octets(tensor)

    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as kv:
        patch.setattr(written_weights, "octets_of", counted)
        trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, kv)
        for _ in range(6):
            trainer.zero_grad()
            net(torch.tensor([1, 5]) if kind == "table" else torch.ones(1, 128)).sum().backward()
            counts.append(0)
            trainer.step(1)
            found.append(counts[-1])
    return found[2:]


@pytest.mark.parametrize(("kind", "expected"), [("dense", 2 * 4 * 1024), ("table", 2 * 4 * 4 * 2)])
def test_a_step_sums_each_weight_twice_and_of_a_table_the_rows_that_it_replaces(kind: str, expected: int) -> None:
    assert spawn(_bytes_summed, 2, kind, threads=1) == [[expected] * 4] * 2


# Two optimizers on one store


def _gan(comm: Communicator, shard: str | None, folder: str) -> list[float]:
    """Return the weights of two networks with a Trainer each, after steps in turn, and after loading of states."""
    with create("allreduce", communicator=comm) as kv:
        nets = [nn.Linear(1, 3, bias=False) for _ in range(2)]
        for net in nets:
            nn.init.ones_(net.weight)
        own = {"learning_rate": 0.5, "momentum": 0.5}, {"learning_rate": 0.01, "clip_global_norm": 1.0}
        two = [
            Trainer({name: net.weight}, optimizer, arguments, kv, shard=shard)
            for name, net, optimizer, arguments in zip("GD", nets, ("sgd", "adam"), own, strict=True)
        ]
        found = []
        for step in range(6):
            if step == 2:
                assert [one.learning_rate for one in two] == [0.5, 0.01]
                two[1].set_learning_rate(0.02)
            if step == 4:
                for name, one in zip("GD", two, strict=True):
                    one.save_states(f"{folder}/{name}.{kv.rank}")
                    kv.barrier()
                    one.load_states(f"{folder}/{name}.0")
            for net, one in zip(nets, two, strict=True):
                one.zero_grad()
                net(torch.full((1, 1), 1.0 + kv.rank)).sum().backward()
                one.step(1)
            found += [net.weight[0].item() for net in nets]
        with pytest.raises(
            RuntimeError, match=r"learning_rate is ambiguous: the store has 2 optimizers \(Trainer, Tra"
        ):
            kv.learning_rate  # noqa: B018
        return found


def alone(mean: float) -> list[float]:
    weights = [torch.ones(3) for _ in range(2)]
    own = torch.optim.SGD(weights[:1], 0.5, momentum=0.5), torch.optim.Adam(weights[1:], 0.01)
    found = []
    for step in range(6):
        if step == 2:
            own[1].param_groups[0]["lr"] = 0.02
        for weight, optimizer in zip(weights, own, strict=True):
            weight.grad = torch.full((3,), mean)
            if optimizer is own[1]:
                nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
        found += [float(weight[0]) for weight in weights]
    return found


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_two_trainers_of_several_workers_have_an_optimizer_each(shard: str | None, tmp_path: Path) -> None:
    first, second = in_threads(2, _gan, shard, str(tmp_path))
    assert first == second == pytest.approx(alone(1.5))


def _trainer_beside_an_optimizer(comm: Communicator) -> list[float]:
    with create("allreduce", communicator=comm) as kv:
        nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for net in nets:
            nn.init.zeros_(net.weight)
        trainer = Trainer({"G": nets[0].weight}, "sgd", {"learning_rate": 1.0}, kv)
        optimizer = DistributedOptimizer(torch.optim.SGD(nets[1].parameters(), 10.0), kv)
        with pytest.raises(ValueError, match=r"set_optimizer would change keys \['G', 0\] of a Trainer"):
            kv.set_optimizer("sgd")
        group = kv.set_optimizer(("sgd", {"learning_rate": 0.5}), keys=["own"])
        kv.init("own", torch.zeros(1))
        with pytest.raises(ValueError, match=r"keys \['own'\] have an optimizer of their own already"):
            kv.set_optimizer("sgd", keys=["own", "other"])
        for _ in range(3):
            for net, one in zip(nets, (trainer, optimizer), strict=True):
                one.zero_grad()
                net(torch.full((1, 1), 1.0 + kv.rank)).sum().backward()
            trainer.step(1)
            optimizer.step()
            kv.push("own", torch.ones(1))
        kv.pull("own", own := torch.zeros(1))
        optimizer.close()
        group.set_learning_rate(0.25)
        return [*(net.weight.item() for net in nets), own.item(), group.learning_rate, trainer.learning_rate]


def test_a_trainer_a_distributed_optimizer_and_keys_of_ones_own_share_a_store() -> None:
    assert in_threads(2, _trainer_beside_an_optimizer) == [[-4.5, -45, -3, 0.25, 1]] * 2


def _mixed(comm: Communicator) -> list[str]:
    found = []
    with create("allreduce", communicator=comm) as kv:
        kv.set_optimizer("sgd", keys=["a"])
        kv.init(["a", "b"], [torch.zeros(1)] * 2)
        for call in (
            lambda: kv.push(["a", "b"], [torch.ones(1)] * 2),
            lambda: kv.pushpull(["a", "b"], [torch.ones(1)] * 2),
            lambda: Trainer({"c": nn.Parameter(torch.ones(1))}, "sgd", None, kv, {"type": "fp16"}),
            lambda: Trainer({"d": nn.Parameter(torch.ones(1))}, "sgd", None, kv),
        ):
            try:
                call()
            except ValueError as error:
                found.append(str(error))
    return found


def test_what_keys_of_several_optimizers_cannot_share_is_refused() -> None:
    for found in in_threads(2, _mixed):
        *mixed, compressed = found
        assert (
            mixed
            == ["keys ['a', 'b'] of one call have different optimizers; expected a call for the keys of each optimizer"]
            * 2
        )
        assert compressed.startswith("the 'allreduce' store serves a Trainer with other compression, which is that of")

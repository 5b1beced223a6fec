"""Errors of `gangline.balance`: each reaches all ranks of a torch.distributed job, and none waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import gangline
from gangline import Communicator, spawn
from gangline.collectives.processes.spawning import Ranks
from tests.models.unequal_jobs import Listed, Numbers, Stream, balanced, epoch_of, flat, gathered, join


def refusal(call: Callable[[], object]) -> list[str]:
    """Return the error of a call on each rank."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test compares texts
        return [str(text) for text in gathered(f"{type(error).__name__}: {error}")]
    return [str(text) for text in gathered("no error")]


def check_refused(call: Callable[[], object], *expected: str) -> None:
    """Check that a call raises on every rank, and what the texts hold."""
    texts = refusal(call)
    for text in texts:
        assert "Error: " in text, texts
        for part in expected:
            assert part in text, texts


class FailsAt(Sampler[int]):
    def __init__(self, last: int) -> None:
        self._last = last

    def __iter__(self) -> Iterator[int]:
        yield from range(self._last)
        raise KeyError("no such shard")


def failing_collate(samples: list[Tensor]) -> Tensor:
    if dist.get_rank() == 0 and int(samples[0][0]) >= 16:
        raise ValueError(f"bad sample {int(samples[0][0])}")
    return torch.stack(samples)


def stream_of(make: Callable[[int], Any], batch_size: int | None = 4, **options: Any) -> Callable[[], object]:
    user: DataLoader[Any] = DataLoader(Stream(range(20), make), batch_size=batch_size)
    return lambda: list(balanced(user, **{"stream": "sharded", **options}))


class Wrapped:
    """A prefetcher or a wrapper around a DataLoader, under the name that its package gives it."""

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        setattr(self, name, loader)


def refusals(comm: Communicator, path: str, backend: str) -> None:
    join(comm, path, backend)
    rank = comm.rank
    data = Numbers(37)
    plain: DataLoader[Any] = DataLoader(data, batch_size=4)

    def of(loader: DataLoader[Any], **options: Any) -> Callable[[], object]:
        return lambda: balanced(loader, **options)

    check_refused(of(DataLoader(data, batch_size=None)), "batch_size=None", "expected a batch_size")
    items: DataLoader[Any] = DataLoader(data, batch_size=4, sampler=Listed([Path("sample")] * 8))
    check_refused(lambda: list(balanced(items)), "sends from rank 0 contains pathlib.", "GANGLINE_ALLOW_PICKLE=1")
    check_refused(of(plain, loads=[1, 2, 3]), "loads is [1, 2, 3]; expected a number above 0 for each of 2 ranks")
    check_refused(of(plain, loads=[1, 0]), "loads is [1, 0]", "above 0")
    check_refused(of(plain, loads=[1, float("nan")]), "loads is [1, nan]", "above 0")
    check_refused(of(plain, loads="fast"), "loads is 'fast'", "'auto'")
    check_refused(of(plain, loss_reduction="average"), "loss_reduction is 'average'", "'sum'")
    check_refused(of(plain, global_batch=1), "global_batch is 1;", "at least one sample for each of 2 ranks")
    check_refused(of(DataLoader(data, batch_sampler=Listed([[1]])), global_batch=4), "leave global_batch out")
    check_refused(of(plain, stream="replicated"), "leave stream out")
    wrong: Any = {"epoch": 3}
    check_refused(lambda: gangline.balance(plain, nn.Linear(1, 1)), "is a DataLoader; expected the", "(model, loader)")  # type: ignore[arg-type]
    check_refused(lambda: gangline.balance("net", plain), "balance() is a str; expected the network")  # type: ignore[arg-type]
    check_refused(of(plain, group="world"), "group is 'world'; expected a process group")
    check_refused(lambda: gangline.balance(nn.Linear(1, 1), data), "is a Numbers, a data set; expected a DataLoader")
    for name in ("loader", "_dataloader"):
        wrapped: Any = Wrapped(name, plain)
        check_refused(
            of(wrapped),
            f"the Wrapped wraps a DataLoader, whose batches it may read ahead; write balance(model, loader.{name})",
        )
    check_refused(lambda: balanced(plain).load_state_dict(wrong), "has no batch, samples, seed, split; expected what")

    check_refused(
        of(plain, max_share=[2, 3]), "max_share is [2, 3], together 5 samples; expected the global batch of 8 or"
    )
    check_refused(
        of(plain, max_share=[9]), "max_share is [9]; expected a maximum number of samples for each of 2 ranks"
    )
    loader = balanced(plain, loads=[1, 1], max_share=[100, 3])
    next(iter(loader))
    assert loader.shares == [5, 3]

    # Ranks that disagree, and arguments that only one rank finds invalid.
    check_refused(of(DataLoader(Numbers(37 + rank), batch_size=4)), "length of the data set is 37 on rank 0, but 38 on")
    check_refused(of(DataLoader(data, batch_size=4 + rank)), "global batch is 8 on rank 0, but 10 on rank 1")
    check_refused(of(DataLoader(data, batch_size=4, drop_last=bool(rank))), "drop_last is False on rank 0, but True on")
    check_refused(of(plain, loads=[3, 1 + rank]), "loads is [3, 1] on rank 0, but [3, 2] on rank 1")
    check_refused(of(DataLoader(data, batch_size=4, shuffle=bool(rank))), "sampler is SequentialSampler on rank 0")
    check_refused(of(DataLoader(data, 4, sampler=DistributedSampler(data, seed=rank))), "sampler's seed is 0 on rank 0")
    check_refused(of(plain, loads=[3, rank]), "loads is [3, 0]")
    check_refused(of(plain if rank else DataLoader(data, batch_size=None)), "batch_size=None")

    sampler: Any = DistributedSampler(data)
    loader = balanced(DataLoader(data, batch_size=4, sampler=sampler))
    loader.set_epoch(rank)
    check_refused(lambda: list(loader), "epoch is 0 on rank 0, but 1 on rank 1", "set_epoch() and load_state_dict()")
    loader.set_epoch(5)
    sampler.set_epoch(5 + rank)
    check_refused(lambda: list(loader), "sampler epoch is 5 on rank 0, but 6 on rank 1")
    sampler.set_epoch(5)
    assert sorted(flat(epoch_of(loader))) == list(range(37))

    model = nn.Linear(1, 1)
    first = gangline.balance(model, plain)
    check_refused(lambda: gangline.balance(model, plain), "balanced already", "write loader.evaluation(...)", "close()")
    check_refused(lambda: gangline.balance(nn.Sequential(model), plain), "Sequential is balanced already")
    first.close()

    # Errors of one rank in the middle of an epoch; the steps before are made, and the loader can be used again.
    loader = balanced(DataLoader(data, batch_size=4, sampler=FailsAt(20 + rank)))
    check_refused(lambda: list(loader), "no such shard")
    steps = iter(balanced(DataLoader(data, batch_size=4, collate_fn=failing_collate)))
    assert [len(next(steps)), len(next(steps))] == [2 + 4 * (not rank)] * 2
    texts = refusal(partial(next, steps))
    assert "bad sample 16" in texts[0]
    assert texts[1].startswith("RuntimeError: reading global batch 2 failed on rank 0: ValueError: bad sample 16")

    def counting(*values: float) -> Callable[[], object]:
        return lambda: list(balanced(plain, count=lambda batch: values[rank] if int(batch[0][0]) > 7 else 1))

    check_refused(counting(1, -3), "count= returned -3.0 on rank 1 for global batch 1", "0 or more")
    check_refused(counting(float("nan"), 1), "count= returned nan on rank 0 for global batch 1")
    check_refused(
        lambda: list(balanced(plain, count=lambda batch: batch[rank * 99].sum())), "index 99 is out of bounds"
    )
    assert list(balanced(plain, count=lambda batch: torch.tensor(3 * (1 - rank))))
    check_refused(
        lambda: list(balanced(plain, count=lambda batch: torch.ones(3))), "count= returned a tensor of shape (3,)"
    )
    check_refused(lambda: list(balanced(plain, count=lambda _: None)), "count= returned None; expected one number")

    # A thread that reads ahead of the loop.
    network = nn.Sequential(nn.Linear(1, 1))
    loader = gangline.balance(network, plain, loads=[3, 1])

    def train_what_a_thread_reads() -> None:
        with ThreadPoolExecutor(1, "prefetcher") as pool:
            batches = iter(loader)
            pool.submit(next, batches).result()
            network(torch.ones(2, 1)).sum().backward()

    check_refused(train_what_a_thread_reads, "is read in thread 'prefetcher_0'", "around the loader that balance()")
    loader.close()

    # A loop that trains a batch when it has read the next one.
    pairs: DataLoader[Any] = DataLoader(torch.arange(16.0).reshape(16, 1), batch_size=4)
    loader = gangline.balance(network, pairs, loads=[3, 1])
    check_refused(lambda: [network(batch.clone()) for batch, _ in pairwise(loader)], "itertools.pairwise")
    loader.close()
    loader = gangline.balance(network, pairs, loads=[3, 1])
    assert [network(batch).grad_fn is None for batch in islice(loader, 1, 2)] == [False]  # after one left out
    loader.close()

    # A gather of equal parts within a batch.
    loader = gangline.balance(network, pairs, loads=[3, 1])
    batch = next(iter(loader))
    gather = partial(dist.all_gather, [torch.empty_like(batch)] * 2, batch)
    if dist.get_backend() == "gangline":  # gloo ends the process
        group = dist.new_group()
        check_refused(partial(gather, group=group), "shares of [6, 2] samples", "by gangline.gather_rows")
    loader.close()

    # A layer that is replaced while a batch is current has no weight.
    network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    loader = gangline.balance(network, plain, loads=[3, 1])

    def replace_a_layer() -> None:
        for _ in loader:
            network[1] = nn.Linear(1, 1)
            network(torch.ones(2, 1)).sum().backward()
            torch.optim.SGD(network.parameters(), lr=1).step()

    check_refused(replace_a_layer, "got parameters within this epoch", "between epochs")

    # Streams
    check_refused(
        stream_of(int, stream=None), 'stream="sharded"', 'stream="replicated"', "Stream is an IterableDataset"
    )
    check_refused(stream_of(int, stream="each"), "stream is 'each'", 'stream="replicated"')
    check_refused(stream_of(int, batch_size=None), "global_batch=")
    check_refused(stream_of(int, batch_size=None, global_batch=4), "batch is of type int", "cannot be cut")
    unequal = stream_of(lambda n: {"a": torch.zeros(n), "b": [0, 1]}, batch_size=None, global_batch=4)
    check_refused(unequal, "no common length: {\"batch['a']\": 0, \"batch['b']\": 2}")
    ragged = stream_of(lambda n: [torch.zeros(2, 2 + n)], batch_size=None, global_batch=8)
    check_refused(ragged, "batch[0] has samples of shape", "pad samples", "pass lengths=")
    check_refused(stream_of(lambda n: torch.tensor(n), batch_size=None, global_batch=4), "a tensor of 0 dimensions")
    check_refused(stream_of(lambda n: 1 // (7 - n)), "division")
    shifted: DataLoader[Any] = DataLoader(Stream(range(rank, 20), int), batch_size=4)
    check_refused(lambda: list(balanced(shifted, stream="replicated")), "rank 1 read other samples", "the same seed")
    empty: DataLoader[Any] = DataLoader(Stream(range(0 if rank else 9), int), batch_size=4)
    check_refused(lambda: list(balanced(empty, stream="sharded")), "stream of rank 1 has no samples")
    resumed = balanced(DataLoader(Stream(range(20), int), batch_size=4), stream="sharded")
    next(iter(resumed))
    resumed.load_state_dict(resumed.state_dict())
    check_refused(lambda: list(resumed), 'behind 8 samples with stream="sharded"')
    resumed = balanced(DataLoader(Stream(range(20), int), batch_size=4), stream="replicated")
    next(iter(resumed))
    resumed.load_state_dict(resumed.state_dict())
    assert flat(epoch_of(resumed)) == list(range(8, 20))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gangline", pytest.param("gloo", marks=pytest.mark.slow)])
def test_errors_reach_all_ranks(backend: str, tmp_path: Path) -> None:
    spawn(refusals, 2, str(tmp_path / "store"), backend, threads=1)


def tensor_parallel(comm: Communicator, path: str) -> None:
    join(comm, path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def network() -> nn.Module:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return parallelize_module(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), mesh["tp"], plan)

    divided = fully_shard(network(), mesh=mesh["dp"])
    flat = FullyShardedDataParallel(nn.Linear(1, 1), mesh.get_group("dp"), device_id=torch.device("cpu"))
    for model in (divided, flat):
        loader = gangline.balance(model, DataLoader(Numbers(16), batch_size=4), loads=[3, 1])
        found = gathered([batch[:, 0].tolist() for batch in loader])
        assert found == [[[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]]] * 2 + [[[6, 7], [14, 15]]] * 2
        loader.close()
    everyone = dist.group.WORLD
    for model, text in (
        (divided, f"averages gradients over ranks {[comm.rank % 2, comm.rank % 2 + 2]}"),
        (flat, f"averages gradients over ranks {[comm.rank % 2, comm.rank % 2 + 2]}"),
        (network(), f"parameter '0.weight' is divided over ranks {[comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]}"),
    ):
        with pytest.raises(ValueError, match=r"group=mesh.get_group\('dp'\)") as error:
            gangline.balance(model, DataLoader(Numbers(16), batch_size=4), group=everyone)
        assert text in str(error.value)
    dist.destroy_process_group()


def test_ranks_that_share_layers_get_the_same_batches(tmp_path: Path) -> None:
    spawn(tensor_parallel, 4, str(tmp_path / "store"), threads=1)


def test_without_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        gangline.balance(nn.Linear(1, 1), DataLoader(Numbers(4)))


def late_parameters(comm: Communicator, path: str, backend: str) -> None:
    join(comm, path, backend)

    def trained(network: nn.Module, model: nn.Module, change: Callable[[], object]) -> None:
        with gangline.balance(model, DataLoader(Numbers(20), batch_size=4), loads=[3, 1]) as loader:
            for epoch in range(2):
                if epoch:
                    change()
                optimizer = torch.optim.SGD([one for one in network.parameters() if one.requires_grad], lr=1e-3)
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch.float()).mean().backward()
                    optimizer.step()

    def of(layers: int, change: Callable[[nn.Sequential], object]) -> Callable[[], object]:
        """Train with some layers frozen when the network is wrapped."""
        network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        network[:layers].requires_grad_(False)
        model = DistributedDataParallel(network)
        return lambda: trained(network, model, lambda: change(network))

    def unfreeze(network: nn.Module) -> None:
        network.requires_grad_(True)

    def set_old_gradient(network: nn.Sequential) -> None:
        network[0].weight.grad = torch.ones(2, 3)

    of(1, set_old_gradient)()  # a layer that stays frozen is not trained
    check_refused(of(1, unfreeze), "different gradients of 0.weight, 0.bias", "wrap the network again")
    check_refused(of(0, lambda network: network.append(nn.Linear(1, 1))), "different gradients of 2.weight, 2.bias")

    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = DistributedDataParallel(network, find_unused_parameters=True)
    network[0].requires_grad_(False)
    trained(network, model, lambda: unfreeze(network))  # averaged, as it was wrapped before it was frozen
    weights = gathered(network.state_dict()["0.weight"].tolist())
    assert weights[0] == weights[1]

    network[1].requires_grad_(False)
    model = DistributedDataParallel(network)
    unfreeze(network)
    check_refused(lambda: trained(network, model, lambda: None), "averages 2 parameters of Sequential, and 4 require")


def test_parameters_that_no_wrapper_averages(tmp_path: Path) -> None:
    spawn(late_parameters, 2, str(tmp_path / "store"), "gangline", threads=1)


def out_of_memory(comm: Communicator, path: str) -> str:
    join(comm, path, "gloo")
    model = DistributedDataParallel(nn.Linear(3, 1))
    loader = gangline.balance(model, DataLoader(Numbers(90), batch_size=4), loads=[3, 1])

    def train() -> None:
        with loader:
            for number, batch in enumerate(loader):
                if number == 1 and comm.rank == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                model(batch.float()).sum().backward()

    with pytest.raises(RuntimeError) as error:
        train()
    dist.destroy_process_group()
    return str(error.value)


def test_all_ranks_say_that_one_ran_out_of_memory_and_what_to_set(tmp_path: Path) -> None:
    first, second = spawn(out_of_memory, 2, str(tmp_path / "store"), threads=1)
    assert second == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert first == (
        "balance: rank 1 ended with an error in global batch 1: out of memory with a share of 2; limit the share of "
        "each rank, as by max_share=[8, 1], or call loader.skip() where the error is caught; see its output"
    )


def killed(comm: Communicator, path: str, backend: str) -> None:
    join(comm, path, backend)
    model = DistributedDataParallel(nn.Linear(3, 1))
    loader = gangline.balance(model, DataLoader(Numbers(90), batch_size=4))
    for number, batch in enumerate(loader):
        if number == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch.float()).sum().backward()


@pytest.mark.parametrize("backend", ["gloo", "gangline"])
def test_killed_rank_ends_the_others(backend: str, tmp_path: Path) -> None:
    with Ranks(killed, 3, (str(tmp_path / "store"), backend), threads=1) as ranks:
        errors = [str(outcome.error) for outcome in ranks.outcomes()]
    assert "None" not in errors
    assert backend == "gloo" or all("rank 1" in error for error in errors), errors

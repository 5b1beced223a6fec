"""Steps of `gangline.balance` that end early, fail or are skipped on one rank: all ranks conclude the same."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn
from tests.models.test_unequal_errors import check_refused, refusal
from tests.models.unequal_jobs import Numbers, balanced, epoch_of, flat, join


class Product(nn.Module):
    """x w v, with v fixed at 1 and some buffers, which DistributedDataParallel broadcasts before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(1).double()), nn.Parameter(torch.ones(1).double())
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.v


class Job:
    """Trains x = 1, 1, 2, 2, 3, 3 with a sample on each rank and learning rate 1, so weights are -1, -3, -6."""

    def __init__(self, **options: Any) -> None:
        self.model = DistributedDataParallel(Product(), **options)
        self.optimizer = torch.optim.SGD([self.model.module.w], lr=1)
        x = torch.tensor([1, 1, 2, 2, 3, 3]).double()
        self.loader = gangline.balance(self.model, DataLoader(TensorDataset(x), batch_size=1), loads=[1, 1])

    def train(self, x: Tensor) -> float:
        self.model.zero_grad()
        self.model(x).mean().backward()
        return self.step()

    def step(self) -> float:
        self.optimizer.step()
        return float(self.model.module.w.detach())

    def steps(self, before: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train an epoch and return the weights; ``before`` is called at the start of each step."""
        weights = []
        for number, (x,) in enumerate(self.loader):
            before(number)
            weights.append(self.train(x))
        return weights


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


@contextmanager
def skipping(job: Job) -> Iterator[list[Any]]:
    """Skip the batch if the block fails, and remove the hooks that it has added to the list."""
    hooks: list[Any] = []
    try:
        yield hooks
    except torch.OutOfMemoryError:
        for hook in hooks:
            hook.remove()
        job.loader.skip()


def skip_second(where: str, **options: Any) -> list[float]:
    """Train three steps, of which rank 1 fails in the second; return the weights."""
    job, weights = Job(**options), []
    module, rank = job.model.module, dist.get_rank()
    for number, (x,) in enumerate(job.loader):
        fails = rank == 1 and number == 1
        job.model.zero_grad()
        with skipping(job) as hooks:
            if fails and where == "before forward":
                fail()
            if fails and where == "in forward":
                hooks.append(module.register_forward_hook(fail))
            output = job.model(x).mean()
            if fails and where == "before backward":
                output.register_hook(fail)
            if fails and where == "in backward":
                hooks.append(module.w.register_hook(fail))
            output.backward()
        weights.append(job.step())
    assert job.loader._balance.split.caps == [None, 1]
    return weights


def micro_batches(where: str = "", failing: int = 1, **options: Any) -> list[float]:
    """Train three steps of two backward passes on rank 0 and one or two on rank 1, which fails in one step."""
    job, weights = Job(**options), []
    module, rank = job.model.module, dist.get_rank()
    for number, (x,) in enumerate(job.loader):
        count = 1 + (rank == 0 or number > 0)
        job.model.zero_grad()
        with skipping(job) as hooks:
            for k in range(count):
                with job.model.no_sync() if k < count - 1 else nullcontext():
                    if rank == 1 and number == failing and where == ("in first forward", "in last forward")[k]:
                        hooks.append(module.register_forward_hook(fail))
                    output = job.model(x).mean() / count
                    if rank == 1 and number == failing and where == ("before first", "before last")[k]:
                        fail()
                    output.backward()
        weights.append(job.step())
    return weights


def steps_of_one_rank(comm: Communicator, path: str, backend: str) -> None:
    join(comm, path, backend)
    rank = comm.rank

    exact, dropped = [-1.0, -3.0, -6.0], [-1.0, -1.0, -4.0]
    kinds: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}]
    places = ("before forward", "in forward", "before backward")
    for where, options in product(places, kinds) if backend == "gloo" else zip(places, kinds, strict=True):
        assert skip_second(where, **options) == exact, (where, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert skip_second("in backward") == skip_second("in backward", bucket_cap_mb=1e-5) == dropped
        assert skip_second("in forward", find_unused_parameters=True) == dropped
    assert "rank 1 skipped global batch 1" in str(caught[0].message)
    assert micro_batches() == exact
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for failing, options in product((1, 2), kinds if backend == "gloo" else kinds[:1]):
            for where in ("in first forward", "before first"):
                assert micro_batches(where, failing, **options) == exact, (where, failing, options)
            for where in ("in last forward", "before last"):
                weights = micro_batches(where, failing, **options)
                assert weights == (dropped if failing == 1 else [-1.0, -3.0, -3.0]), (where, failing, options)
    job = Job()
    check_refused(job.loader.skip, "this batch has none")
    job.loader.close()
    loader = gangline.balance(nn.Linear(1, 1), DataLoader(Numbers(8), batch_size=1))
    check_refused(lambda: [loader.skip() for _ in loader], "one network in DistributedDataParallel")

    # A step that a rank leaves out without skip() is an error on all.
    def leave_out() -> None:
        job = Job()
        for number, (x,) in enumerate(job.loader):
            if rank == 1 and number == 1:
                continue
            job.train(x)

    check_refused(leave_out, "rank 1 went on to the next batch without a backward in global batch 1", "loader.skip()")

    # A break ends the epoch on all ranks after the same batch; the next one begins anew.
    job = Job()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = []
        for (x,) in job.loader:
            weights.append(job.train(x))
            if rank == 0 and len(weights) == 2:
                break
    assert weights == [-1, -3]
    assert [str(warning.message) for warning in caught if "left the loop" in str(warning.message)] == (
        ["balance: rank 0 left the loop after global batch 1, so this rank ends its epoch there too; loader.stop() on "
         "any rank ends it on all"] * rank
    )  # fmt: skip
    assert job.loader.epoch == 0  # for state_dict, until the next one begins
    assert job.steps() == [-4, -6, -9]
    assert job.loader.epoch == 2

    def stop(step: int) -> None:
        if rank == 1 and step == 1:
            job.loader.stop()

    assert job.steps(stop) == [-10, -12]
    assert job.loader.epoch == 3
    assert job.steps() == [-13, -15, -18]

    # Before its backward a break is an error of the other ranks, which have the gradient already.
    def end(step: int) -> None:
        if rank == 0 and step == 1:
            raise KeyError

    texts = refusal(partial(Job().steps, end))
    assert "KeyError" in texts[0]
    assert "rank 0 left the loop without a backward in global batch 1, while rank 1 ran it" in texts[1]

    # An error in a `with` block is raised on the others where they iterate next.
    def with_error() -> None:
        with Job().loader as loader:
            for number, _ in enumerate(loader):
                if rank == 0 and number == 1:
                    raise KeyError("shard")
            list(loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = refusal(with_error)
    assert "KeyError" in texts[0]
    assert "rank 0 ended with an error" in texts[1]

    # A gradient that is not finite is named on all ranks.
    def not_finite(step: int) -> None:
        if rank == 1 and step == 1:
            with torch.no_grad():
                job.model.module.v.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_NAN_CHECK", "1")
        job = Job()
    check_refused(partial(job.steps, not_finite), "gradient of parameter 'w' is not finite on rank 1 in global batch 1")
    job.loader.close()
    check_refused(lambda: list(job.loader), "is closed")

    # Loaders that are dropped leave nothing behind.
    model = DistributedDataParallel(Product())
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        gangline.balance(model, DataLoader(Numbers(8), batch_size=1))
        assert not any((model._forward_hooks, model.module._forward_pre_hooks, model.module.w._backward_hooks))
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) == groups
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "gangline"])
def test_steps_of_one_rank(backend: str, tmp_path: Path) -> None:
    spawn(steps_of_one_rank, 2, str(tmp_path / "store"), backend, threads=1)


class Doubled(DataLoader[Any]):
    """Changes batches in an __iter__ of its own, as prefetchers that copy to a GPU and normalize do."""

    def __iter__(self) -> Any:
        return (2 * batch[:, 0] for batch in super().__iter__())


class MultiEpochs(DataLoader[Any]):
    """Keeps one iterator over all epochs, by a batch sampler without end, and counts the batches of an epoch itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._endless: Any = None

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        if self._endless is None:
            self._endless = self._forever()
        return (next(self._endless)[:, 0] for _ in range(len(self)))

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class Pipeline:
    """Yields batches, and is no DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.arange(begin, min(begin + 4, 37)) for begin in range(0, 37, 4))


def own_iterations(comm: Communicator, path: str) -> None:
    join(comm, path)
    data, everything = Numbers(37), list(range(37))
    cases: list[tuple[Any, list[int], int | None]] = [
        (Doubled(data, batch_size=4), [2 * number for number in everything], 5),
        (MultiEpochs(data, batch_size=4), everything, 5),
        (Pipeline(), everything, None),
        ([torch.arange(begin, min(begin + 4, 37)) for begin in range(0, 37, 4)], everything, None),
    ]
    for user, wanted, length in cases:
        name, size = type(user).__name__, None if hasattr(user, "batch_size") else 8
        check_refused(partial(balanced, user), name, 'stream="replicated"', "plain DataLoader")
        loader = balanced(user, stream="replicated", global_batch=size)
        for _ in range(2):
            assert flat(epoch_of(loader)) == wanted, name
        if length is not None:
            assert len(loader) == length
        else:
            with pytest.raises(TypeError, match="have no length"):
                len(loader)
    check_refused(
        partial(balanced, Pipeline(), stream="sharded"), "Pipeline is not a torch DataLoader", "global_batch="
    )
    dist.destroy_process_group()


def test_own_iterations(tmp_path: Path) -> None:
    spawn(own_iterations, 2, str(tmp_path / "store"), threads=1)

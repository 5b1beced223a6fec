"""`balance` and the loader that it returns: batches of unequal size for ranks of unequal speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from gangline.collectives.workload import check_work_load_list
from gangline.models.unequal_ranks.global_order import order_of
from gangline.models.unequal_ranks.gradient_scale import GradientScale
from gangline.models.unequal_ranks.measured_loads import MeasuredLoads
from gangline.models.unequal_ranks.rank_exchange import RankExchange, group_of
from gangline.models.unequal_ranks.rank_memory import Call, RankMemory
from gangline.models.unequal_ranks.rank_timer import RankTimer
from gangline.models.unequal_ranks.share_sampler import Share, ShareSampler, draw_seed
from gangline.models.unequal_ranks.split_controller import SplitController, checked_caps

LossReduction = Literal["mean", "sum", "normalized"]


class BalancedLoader:
    """DataLoader whose global batches are split over ranks by their loads; made by `balance`.

    Iterating is collective: every rank makes the same number of steps. Attributes that it does not have are those of
    the loader that it was made of.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        *,
        loads: Sequence[float] | Literal["auto"] = "auto",
        global_batch: int | None = None,
        count: Callable[[Any], float | Tensor] | None = None,
        loss_reduction: LossReduction = "mean",
        memory: Sequence[int] | Literal["auto"] | None = "auto",
        call: Call | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Split a loader; `balance` describes the arguments."""
        if loss_reduction not in ("mean", "sum", "normalized"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; expected 'mean', 'sum' or 'normalized'")
        self._exchange = RankExchange(group_of(model) if group is None else group)
        size = self._exchange.size
        given = [1.0] * size if loads == "auto" else check_work_load_list(loads, size)
        if not all(given):
            raise ValueError(f"loads is {list(loads)}; expected a number above 0 for each rank")
        order, self.global_batch = order_of(loader, self._exchange, global_batch)
        ahead = self._exchange.all_gather(_drawn_ahead(loader))
        self._exchange.check_same(
            {
                "the length of the data set": len(loader.dataset),  # type: ignore[arg-type]
                "the global batch": self.global_batch,
                "drop_last": loader.drop_last,
                "the sampler": type(loader.sampler).__name__,
                "loads": list(given) if loads != "auto" else "auto",
                "loss_reduction": loss_reduction,
                "memory": memory if memory is None or memory == "auto" else list(memory),
                "count": "given" if count is not None else "samples",
            }
        )
        self._loss_reduction, self._count = loss_reduction, count
        caps = None if memory is None or memory == "auto" else checked_caps(memory, size)
        self.controller = SplitController(given, max(ahead) + 2, caps)
        # The timer's hooks come before those that weight gradients, whose backward may wait for other ranks.
        self._measured = MeasuredLoads(
            self._exchange.rank,
            size,
            self._exchange.all_gather,
            RankTimer(model) if loads == "auto" else None,
            RankMemory(model, call) if memory == "auto" else None,
            given,
            caps,
        )
        self._is_memory_tried = False
        self._sampler = ShareSampler(order, self.controller, self._exchange.rank)
        self._user_loader = loader
        self._loader = _with_batches(loader, self._sampler)
        self._scale = GradientScale(model) if loss_reduction != "normalized" else None
        self.epoch = 0
        """Number of the epoch that comes next, or that is under way."""
        self._consumed = 0  # samples of all ranks that were handed out in this epoch
        self._resumed: dict[str, Any] | None = None
        self._share: Share | None = None
        self._weight: Callable[[], float] = lambda: 1.0

    @property
    def samples(self) -> int:
        """Samples of this rank in the current batch; 0 if the batch is one repeated sample without weight."""
        return 0 if self._share is None else self._share.counts[self._exchange.rank]

    @property
    def shares(self) -> list[int]:
        """Samples of each rank in the current batch; empty outside of batches."""
        return [] if self._share is None else list(self._share.counts)

    @property
    def weight(self) -> float:
        """Factor of this rank's gradient in the current batch; it may wait for the other ranks' counts."""
        return self._weight()

    @property
    def loads(self) -> list[float]:
        """Loads of all ranks, for the batches that are drawn next."""
        return self.controller.loads

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as a DistributedSampler's set_epoch does."""
        self.epoch = epoch
        loader = self._user_loader
        owners: list[Any] = [loader.sampler, loader.batch_sampler, loader.dataset]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective."""
        resumed, self._resumed = self._resumed, None
        seed = draw_seed(getattr(self._user_loader.sampler, "generator", None)) if resumed is None else resumed["seed"]
        starts = self._exchange.all_gather(
            {
                "seed": seed,
                "epoch": self.epoch,
                "sampler epoch": getattr(self._user_loader.sampler, "epoch", None),
                "skip": 0 if resumed is None else resumed["samples"],
            }
        )
        _check_starts(starts)
        self._begin_epoch()
        self._sampler.seed, self._sampler.skip = starts[0]["seed"], starts[0]["skip"]
        self._consumed = self._sampler.skip
        for batch, seconds in _timed(self._loader):
            self._begin_batch(self._sampler.drawn.popleft(), batch)
            self._measured.add_loading(seconds)
            yield batch
        self._end_batch()
        self.epoch += 1
        self._consumed = 0

    def _begin_epoch(self) -> None:
        """Look at speeds and memory while no batch is drawn."""
        changed = self._measured.begin_epoch()
        if not self._is_memory_tried:
            self._measured.try_memory(self._read, self.global_batch)
            self._is_memory_tried = changed = True
        if changed:
            self.controller.set_loads(self._measured.loads, self._measured.caps, None)

    def _read(self, samples: int) -> Any:
        """Return a batch of the data set, read without workers."""
        data = self._user_loader.dataset
        batch = [data[index] for index in range(min(samples, len(data)))]  # type: ignore[arg-type]
        return self._user_loader.collate_fn(batch)

    def _begin_batch(self, share: Share, batch: Any) -> None:
        self._end_batch()
        if self._measured.begin_batch(share.counts):
            self.controller.set_loads(self._measured.loads, self._measured.caps, share.number)
        self._share = share
        self._sampler.first = share.number + 1
        self._consumed += share.total
        self._weight = self._weight_of(share, batch)
        if self._scale is not None:
            self._scale.weight, self._scale.calls = self._weight, 0

    def _end_batch(self) -> None:
        self._share = None
        if self._scale is not None:
            self._scale.weight = None

    def _weight_of(self, share: Share, batch: Any) -> Callable[[], float]:
        size, samples = self._exchange.size, share.counts[self._exchange.rank]
        if self._loss_reduction == "sum":
            weight = float(size) if samples else 0.0
            return lambda: weight
        if self._count is None:
            weight = samples * size / share.total
            return lambda: weight
        total = self._exchange.start_sum(self._count(batch) if samples else 0)
        return partial(_ratio, total, size)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, seed and loads as plain data, for `load_state_dict` on any number of ranks."""
        return {
            "epoch": self.epoch,
            "samples": self._consumed,
            "seed": self._sampler.seed,
            "batch": self._sampler.first,
            "split": self._measured.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called: the next epoch begins behind the samples that were handed out."""
        self.set_epoch(state["epoch"])
        self._sampler.first = state["batch"]
        self._measured.load_state(state["split"])
        self.controller.set_loads(self._measured.loads, self._measured.caps, None)
        self._resumed = {"seed": state["seed"], "samples": state["samples"]}

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user_loader, name)

    def close(self) -> None:
        """Remove the hooks of the model."""
        self._measured.close()
        if self._scale is not None:
            self._scale.close()


def balance(
    model: nn.Module,
    loader: DataLoader[Any],
    *,
    loads: Sequence[float] | Literal["auto"] = "auto",
    global_batch: int | None = None,
    count: Callable[[Any], float | Tensor] | None = None,
    loss_reduction: LossReduction = "mean",
    memory: Sequence[int] | Literal["auto"] | None = "auto",
    call: Call | None = None,
    group: dist.ProcessGroup | None = None,
) -> BalancedLoader:
    """Split a loader's batches over the ranks of a job by their speed, with the gradient of one device.

        model = DistributedDataParallel(network)
        loader = gangline.balance(model, loader)
        for images, labels in loader: ...

    Ranks must average gradients, as DistributedDataParallel, FSDP2 and DeepSpeed do. Collective: all ranks call it.

    Args:
        model: module that the training loop calls, with its wrapper.
        loader: DataLoader, the same on all ranks. A DistributedSampler is replaced by its order without padding;
            samplers that know no ranks draw on rank 0 for all.
        loads: relative speed of each rank, such as [3, 1]; "auto" measures it.
        global_batch: samples of all ranks in a step; None: the world size times the loader's batch size.
        count: function of a batch that returns how much the mean of its loss counts, such as the number of labels that
            are not ignored; None: its samples.
        loss_reduction: "mean" if the loss is the mean over what ``count`` counts; "sum" if it is their sum;
            "normalized" if the loop itself divides by the count of all ranks, so that gradients stay as they are.
        memory: maximum number of samples of each rank; "auto" learns it, on GPUs and where the kernel limits the
            memory of a process: before the first batch from growing batches, later from peaks; None: no limits.
        call: runs a batch through the model, for the trial of its memory, such as
            ``lambda model, batch: model(batch["image"])``; None: derived from the batch and the signature of forward.
        group: the ranks that average gradients; None: those of DistributedDataParallel, else all.

    Raises:
        RuntimeError: if torch.distributed is not initialized, or the model is balanced already.
        ValueError: if an argument is invalid, or the loader cannot be cut.
        MismatchError: on all ranks, if their loaders or arguments differ.
    """
    return BalancedLoader(
        model,
        loader,
        loads=loads,
        global_batch=global_batch,
        count=count,
        loss_reduction=loss_reduction,
        memory=memory,
        call=call,
        group=group,
    )


def _timed(loader: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Return batches with the seconds that each took to load."""
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch, time.perf_counter() - began


def _ratio(total: Any, size: int) -> float:
    return float(total.own * size / total.wait()) if total.own else 0.0


def _check_starts(starts: list[dict[str, Any]]) -> None:
    for rank, start in enumerate(starts[1:], 1):
        for name in ("epoch", "sampler epoch", "skip"):
            if start[name] != starts[0][name]:
                raise RuntimeError(
                    f"balance: {name} is {starts[0][name]} on rank 0, but {start[name]} on rank {rank}; call "
                    "set_epoch() and load_state_dict() alike on all ranks"
                )


def _drawn_ahead(loader: DataLoader[Any]) -> int:
    """Return how many batches a DataLoader draws before they are needed."""
    return int(loader.num_workers * (loader.prefetch_factor or 0)) if loader.num_workers else 0


def _with_batches(loader: DataLoader[Any], sampler: ShareSampler) -> DataLoader[Any]:
    """Return a DataLoader with the settings of another one and other batches."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("the loader's data set is iterable")
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )

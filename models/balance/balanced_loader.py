"""Balanced loader, created by `balance`: batches of unequal size for ranks of unequal speed."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, IterableDataset

from gangline.kvstore.freed_memory import keep_freed_memory
from gangline.kvstore.group.worker_group import check_same
from gangline.kvstore.reducer.waits import waiting_for_ranks
from gangline.kvstore.replica_check import ReplicaCheck
from gangline.models.balance.gradient_weights import (
    GradientWeights,
    has_collectives,
    reduction_of,
    replicated,
)
from gangline.models.balance.iterable_batches import IterableBatches, Stream
from gangline.models.balance.loader_arguments import agreed_arguments, checked_networks
from gangline.models.balance.lockstep import EXIT_SECONDS, Lockstep, LossReduction
from gangline.models.balance.micro_batches import MicroBatches
from gangline.models.balance.process_end import last_error_teller, loader_of_iteration, open_locksteps
from gangline.models.balance.rank_balance import RankBalance, checked_caps
from gangline.models.balance.rank_exchange import RankExchange, group_of
from gangline.models.balanced_batch import BalancedBatch, BatchesOfNetworks
from gangline.models.batchnorm.distributed_batchnorm import warn_of_batchnorm
from gangline.models.data.accelerate_loaders import read_unequal
from gangline.models.data.loaders import copy_loader, sampler_of
from gangline.models.data.order import check_global_batch
from gangline.models.data.shares import ShareSampler
from gangline.models.ignored_labels import LabelWatch
from gangline.models.rank_timer import RankTimer

Trained = nn.Module | nn.Parameter | Iterable[nn.Parameter]
_REMEDY = "call gangline.convert_sync_batchnorm(network) before the network is wrapped"


class BalancedLoader:
    """Loader whose batches are split over the ranks of a job by their speed, with the gradient of one device.

        model = DistributedDataParallel(network)
        loader = gangline.balance(model, loader)
        for images, labels in loader: ...

    Ranks must average gradients, as DistributedDataParallel, FSDP2 and DeepSpeed do. Creating and iterating are
    collective: every rank makes the same number of steps. Other attributes are those of the wrapped loader.
    """

    _trains_as_read = True  # the loop trains each batch before it asks for the next
    _evaluation_type: Any = None  # set by the module of evaluation, in which `balance` is
    _sampler_type = ShareSampler
    _timer_type: Callable[..., RankTimer] = RankTimer
    _shared_exchange: RankExchange | None = None  # of the training that an evaluation is part of

    def __init__(
        self,
        model: Trained | Sequence[Trained] | None,
        loader: Any,
        *,
        loads: Sequence[float] | Literal["auto"] = "auto",
        global_batch: int | None = None,
        count: Callable[[Any], float | Tensor] | None = None,
        loss_reduction: LossReduction = "mean",
        max_share: Sequence[int] | Literal["auto"] | None = "auto",
        stream: Stream | None = None,
        group: dist.ProcessGroup | None = None,
        lengths: Any = None,
        padding: bool = True,
        accumulate: int | None = None,
        pool: int = 1,
        budget: float | None = None,
    ) -> None:
        """Split a loader's batches over the ranks.

        Args:
            model: network that the training loop calls, with its wrapper; a list of all networks that it trains, and of
                parameters outside of them, such as the weights of a loss; None: see `evaluation`.
            loader: DataLoader, the same on all ranks. A DistributedSampler is replaced by its order without padding;
                samplers that do not shard draw on rank 0 for all ranks. Other iterables of batches need ``stream``.
            loads: relative speed of each rank, such as [3, 1]; "auto" measures it.
            global_batch: samples of all ranks in a step; None: the world size times the loader's batch size.
            count: function from a batch to the divisor of its mean loss, such as the number of labels that are not
                ignored; None: number of samples. A global batch whose counts are all 0 has no gradient.
            loss_reduction: "mean" or "sum": reduction of the loss over what ``count`` counts; "normalized" if the loop
                itself divides by the count of all ranks, so that gradients are not rescaled.
            max_share: maximum number of samples of each rank; "auto": on GPUs a share grows only while measured peaks
                of memory predict that it fits; None: no limits.
            stream: required for an IterableDataset and other iterables: "sharded" if each rank reads different
                samples, "replicated" if all ranks read the same samples in the same order. Batches are concatenated and
                cut to shares. "sharded" is also for a data set, or a sampler, that has its rank's part of the samples.
            group: the ranks that average gradients; None: those of DistributedDataParallel or FSDP2, else all.
            lengths: cost of each sample by its index in the data set, such as its number of tokens: a sequence, or a
                function from an index to a number; for streams a function of a sample. Each global batch keeps its
                samples and is cut by cost: each rank gets samples of similar length. ``loads`` and ``max_share``
                are then of cost, not of samples.
            padding: True if the loader pads each share to its longest sample, which then costs as much as all others.
            accumulate: global batches of one update of the weights, which are read together. Means with ``count`` are
                then over all that the update counts, in a loop that divides each loss by ``accumulate`` as usual. With
                ``lengths`` they are sorted together; with loss_reduction="normalized" each then has a part of equal
                cost, else as many samples as before. None: accelerate's for its loaders with ``lengths``, without
                ``count`` of a mean; else 1.
            pool: form batches of similar lengths from so many global batches, in random order; 1: keep the order.
            budget: with stream="sharded" and ``lengths``, cost of a global batch: each rank fills its part of it.

        Raises:
            RuntimeError: if torch.distributed is not initialized, or a network is balanced already.
            TypeError: if the model is not a network, or the group not a process group.
            ValueError: if an argument is invalid, or the loader cannot be split.
            MismatchError: on all ranks, if their loaders or arguments differ.
        """
        networks = checked_networks(model, loader)
        self._exchange = self._shared_exchange or RankExchange(group_of(networks, group))
        self._networks, self._loss_reduction, self._count = networks, loss_reduction, count
        is_weighted = loss_reduction != "normalized"
        arguments = agreed_arguments(
            self._exchange,
            networks,
            loader,
            loads=loads,
            global_batch=global_batch,
            count=count,
            loss_reduction=loss_reduction,
            max_share=max_share,
            stream=stream,
            lengths=lengths,
            padding=padding,
            accumulate=accumulate,
            pool=pool,
            budget=budget,
        )
        self._order, self._arrangement, self._caps = arguments.order, arguments.arrangement, arguments.caps
        self._accumulate, total, minimum = arguments.accumulate, arguments.global_batch, arguments.minimum
        self._user_loader = loader = arguments.loader
        self._outer: Any = arguments.prepared  # accelerate's loader
        arrangement, ahead = self._arrangement, arguments.drawn_ahead + self._accumulate - 1  # read, not yet trained
        devices = [parameter.device for network in networks for parameter in network.parameters()]
        if torch.device("cpu") in devices:
            keep_freed_memory()
        self._trained = BatchesOfNetworks(networks, may_read_ahead=is_weighted and self._trains_as_read)
        timer = self._timer_type(networks) if loads == "auto" else None
        if timer is not None:
            self._trained.hooks += timer.hooks
        self._balance = RankBalance(
            self._exchange.rank,
            arguments.loads,
            timer,
            horizon=ahead + 1 + (self._outer is not None),  # accelerate reads one more
            device=devices[0] if devices and max_share == "auto" else None,
            caps=self._caps,
            minimum=minimum,
            by_cost=arrangement is not None,
        )
        self._loader = loader
        self._source: ShareSampler | IterableBatches
        if self._order is None:
            self._source = IterableBatches(loader, stream == "replicated", total, self._balance, arrangement)
            if arrangement is not None:  # samples are collated when they are cut
                sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
                sampler = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
                self._loader = copy_loader(loader, collate_fn=list, **sizes, **sampler)
        else:
            split = partial(getattr, self._balance, "split")  # a call less than by a lambda, in each step
            self._source = self._sampler_type(self._order, split, ahead, arrangement)
            # Out of order, batches would not match their shares, nor the other ranks' batches.
            self._loader = copy_loader(loader, batch_sampler=self._source, in_order=True)
        self._sized: Any = self._order or self._source  # knows the samples of a global batch
        self._steps = _Steps(weakref.proxy(self))  # no cycle: dropping the loader removes its hooks at once
        self._restore: Callable[[], Any] = lambda: None
        if self._outer is not None:
            self._restore = weakref.finalize(self, read_unequal(self._outer, self._steps, waiting_for_ranks))
        self._outer = self._steps if self._outer is None else self._outer
        self._watch = LabelWatch(is_needed=count is None and loss_reduction == "mean")
        reduction = reduction_of(networks) if is_weighted and self._trains_as_read else None
        self._weights = GradientWeights(networks, self._trained, reduction) if is_weighted else None
        self._drops = self._order is None and budget is None and getattr(loader, "drop_last", False)
        self._lockstep = Lockstep(
            self._exchange,
            self._balance,
            reduction,
            count,
            ReplicaCheck(partial(replicated, networks), self._exchange.all_gather),
            loss_reduction=loss_reduction,
            smallest=total if self._drops else 1,
            accumulate=self._accumulate,
            has_collectives=has_collectives(networks),
        )
        if self._shared_exchange is None:
            open_locksteps.add(self._lockstep)
        self._update: list[BalancedBatch] = []  # its batches that were trained
        self._is_ramped = False  # global_batch was set
        self._cuts_anew = False  # the rest of the epoch, because global_batch was set
        self._evaluation_loads: list[float] = []  # those that the last evaluation has found
        self.epoch = 0
        """Number of the current epoch, or of the next one between epochs."""
        self._first = 0  # number of the next global batch
        self._consumed = 0  # samples of all ranks that were handed out in this epoch
        self._skip = 0  # samples of the next epoch that were handed out before `load_state_dict`
        self._seed: int | None = None  # rank 0's; each epoch's shuffle adds the number of the epoch
        self._batch: BalancedBatch | None = None
        self.weight = 1.0
        """Factor of this rank's gradient in the current batch."""
        self._iterations = 0
        self._was_left = False  # the loop left the current epoch, which the next iteration ends
        self._is_closed = False
        self._warned_loads: list[float] | None = None  # with which BatchNorm was looked for

    def evaluation(self, loader: Any, **options: Any) -> BalancedLoader:
        """Split the batches of a DataLoader for evaluation, also in the loop that trains. Collective.

            with torch.no_grad():
                for images, labels in loader.evaluation(DataLoader(dataset, 64)):
                    correct += (model(images).argmax(1) == labels).sum()
            dist.all_reduce(correct)

        Each sample is read once, on one rank. Shares begin with those of the last evaluation, at first with those of
        the training, and follow the time of forward; iterate the same object again to keep what was measured too.
        Options are ``loads``, ``global_batch``, ``max_share``, ``lengths`` and ``padding`` of `balance`.
        """
        self._check_open()
        split: BalancedLoader = self._evaluation_type(self._networks, loader, training=self, **options)
        return split

    @property
    def samples(self) -> int:
        """Samples of this rank in the current batch; 0 if the batch only repeats a sample with weight 0."""
        return 0 if self._batch is None else self._batch.samples

    @property
    def shares(self) -> list[int]:
        """Samples of each rank in the current batch; empty outside of batches."""
        return [] if self._batch is None else list(self._batch.counts)

    @property
    def ends_update(self) -> bool:
        """True if the current batch is the last one of its update (``accumulate``)."""
        return self._batch is not None and self._batch.ends_update

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a step.

        All ranks may set another number, which holds from the next update of the weights on. Within an epoch it cannot
        be set if a sampler of the user's own draws the samples, ``accumulate`` or ``pool`` join batches, or accelerate,
        transformers or Lightning read batches ahead.
        """
        return int(self._sized.size)

    @global_batch.setter
    def global_batch(self, samples: int) -> None:
        check_global_batch(samples, self._exchange.size, 1)
        is_within = self._lockstep.is_open
        is_drawn = self._order is not None and not self._order.is_repeated
        is_read_ahead = is_drawn or self._outer is not self._steps or not self._trains_as_read
        joins_batches = self._arrangement is not None and self._arrangement.joins
        if (is_within and is_read_ahead) or (joins_batches and (is_within or self._skip)):
            raise RuntimeError(f"global_batch is set to {samples} within an epoch; expected this between two epochs")
        if self._caps is not None and self._arrangement is None:
            checked_caps(self._caps, self._exchange.size, samples)
        self._sized.resize(samples)
        self._is_ramped = True
        self._cuts_anew = is_within and self._order is not None
        self._lockstep.smallest = samples if self._drops else 1

    @property
    def loads(self) -> list[float]:
        """Loads of all ranks, for the batches that are drawn next."""
        return list(self._balance.split.loads)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as a DistributedSampler's set_epoch does."""
        self.epoch, self._was_left = epoch, False
        loader = self._user_loader
        names = ("batch_sampler", "dataset")
        owners = [loader, sampler_of(loader), *(getattr(loader, name, None) for name in names)]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective.

        A break or an error in the loop ends the epoch on all ranks, after the same batch. The next one shuffles anew.
        """
        iteration = self._batches()
        loader_of_iteration[iteration] = self
        return iteration

    def _batches(self) -> Generator[Any, None, None]:
        self._check_open()
        self._iterations += 1
        iteration = self._iterations
        self.epoch += self._was_left
        self._was_left = False
        self._lockstep.begin_epoch(self._first)
        skip, self._skip = self._skip, 0
        sampler = sampler_of(self._user_loader)
        if self._seed is None:
            generator = getattr(sampler, "generator", None)  # from which torch's RandomSampler draws its seed likewise
            device = "cpu" if generator is None else generator.device
            self._seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())
        start = {
            "epoch": self.epoch,
            "global batch": self.global_batch,
            "sampler epoch": sampler.epoch if isinstance(sampler, DistributedSampler) else None,
            "skip": skip,
        }
        seeds, starts = zip(*self._exchange.all_gather((self._seed, start)), strict=True)
        check_same(starts, "balance: call set_epoch() and load_state_dict(), and set global_batch, alike on all ranks")
        self._trained.bind_layers()
        if self._weights is not None:
            self._weights.add_new_parameters()
        self._balance.drop_time()  # of what ran between epochs
        self._seed, self._consumed = seeds[0], skip
        if self._arrangement is not None and self._arrangement.by_parts:  # an update that was begun is trained again
            self._consumed -= self._consumed % (self._accumulate * self.global_batch)
        timer = self._balance.timer
        self._was_left = True  # until its end
        self._cuts_anew = False
        batches: Any = iter(self._outer)
        try:
            while (batch := next(batches, self)) is not self:
                self._begin_batch(self._steps.read.popleft())
                if timer is not None:
                    timer.start()
                if is_watched := self._watch.left > 0:
                    self._watch.start()
                self._trained.data = batch
                try:
                    yield batch  # its weight stays after `next(iter(loader))` or a break, until the next batch
                finally:
                    if is_watched:
                        self._watch.stop()
                    if self._trained.parts is not None:
                        self._trained.end_parts()
                if self._iterations != iteration:
                    raise RuntimeError("a newer iteration over this loader has begun; only one at a time can go on")
                if timer is not None:
                    timer.pause()
                if self._outer is not self._steps and not self._lockstep.go_on():  # accelerate has read one ahead
                    break
                if self._cuts_anew and self.ends_update:
                    self._cuts_anew = False
                    batches.close()
                    batches = iter(self._outer)
        finally:
            if self._iterations == iteration:
                last_error_teller[:] = [self._lockstep.error_teller()]
                self._lockstep.leave()
        self._end_batch()
        if not self._lockstep.was_left:
            self.epoch += 1
            self._consumed, self._was_left = 0, False

    def _check_open(self) -> None:
        if self._is_closed or not self._exchange.close.alive:
            raise RuntimeError("the balanced loader is closed; call balance() again to go on")

    def stop(self) -> None:
        """End the epoch on all ranks after the current batch, or its update (``accumulate``); any rank may call it."""
        self._lockstep.is_stopping = True

    def skip(self) -> None:
        """Drop this rank's share of the current batch after its forward or backward has failed.

            try:
                loss_function(model(images), labels).backward()
            except torch.OutOfMemoryError:
                loader.skip()
            optimizer.step()  # on this rank too

        The gradient becomes that of the mean over the samples of the other ranks. If backward failed after some
        gradients, or gradients are accumulated, all ranks warn and drop the gradient instead. After an out-of-memory
        error the rank gets at most half of the samples from then on.

        Raises:
            RuntimeError: if the network is not in DistributedDataParallel, or has run backward in this batch already.
        """
        error = sys.exception()
        self._trained.end_parts()
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they hold the memory of the failed forward
        self._lockstep.skip(out_of_memory=isinstance(error, torch.OutOfMemoryError))

    def micro_batches(self, batch: Any, max_size: int | None = None, *, max_cost: float | None = None) -> MicroBatches:
        """Cut this rank's current batch to parts for backward passes, equally many on all ranks. Collective.

            for part in loader.micro_batches(batch, 4):
                loss_function(model(part.images), part.labels).backward()
            optimizer.step()

        The sum of the parts' gradients is that of the batch's loss, without a division in the loop (with
        ``accumulate=k`` it still divides by k). They are synchronized in the backward of the last part:
        DistributedDataParallel, FSDP and accelerate are switched within the loop. A rank with too few samples repeats
        some with weight 0; `samples`, which is the part's, is 0 then.

        Args:
            batch: what the loader has returned last, or its values on another device: nested tensors, arrays and lists
                with one entry for each sample, [samples, ...].
            max_size: maximum number of samples of a part; parts are nearly equal.
            max_cost: in its place, maximum of what ``lengths`` count: with padding, the number of samples times the
                longest of the batch, because a part keeps its padding; without ``lengths``, of what ``count`` counts. A
                sample that costs more is a part of its own. If BatchNorm needs two samples, so do parts.

        Raises:
            RuntimeError: if there is no current batch, or a part has no backward; on all ranks, if some do not call.
            ValueError: on all ranks, if a maximum is invalid, the batch is not the current one or cannot be cut, or the
                cost of its rows is not known; if loss_reduction is "normalized", as the loop then weights its loss.
        """
        if self._weights is None:
            raise ValueError(
                'micro_batches() weights the gradients of its parts, but loss_reduction is "normalized"; expected '
                '"mean" or "sum"'
            )
        self._trained.end_parts()
        if (whole := self._batch) is None or not self._trains_as_read:
            raise RuntimeError("micro_batches() has no batch to cut; call it in the loop over this loader")
        minimum, is_sum = self._balance.split.minimum, self._loss_reduction == "sum"
        parts = MicroBatches(self._trained, whole, batch, minimum, self._count, self._begin_part, is_sum=is_sum)
        with waiting_for_ranks():
            number = self._lockstep.most_parts(partial(parts.needed, self._trained.data, max_size, max_cost))
        parts.cut(number)
        return parts

    def _begin_part(self, part: BalancedBatch) -> None:
        self._batch, self.weight = part, part.share
        self._trained.begin_part(part)

    def mean(self, losses: float | Tensor | Sequence[float | Tensor]) -> float:
        """Return the mean of a loss over all samples of all ranks, or over all that ``count`` counts. Collective.

            losses.append(loss.detach())
            if loader.ends_update:
                print(loader.mean(losses))
                losses.clear()

        Args:
            losses: this rank's loss of the current batch, as it is reduced over the share, one number; or those of the
                last batches of the update, the current one last.

        Raises:
            ValueError: if a loss is not one number, there are more losses than batches of this update, or
                loss_reduction is "normalized", since the loop then divides its loss; RuntimeError on the other ranks.
            MismatchError: if the ranks have different numbers of losses.
        """
        given = list(losses) if isinstance(losses, Sequence) else [losses]
        batches, rank = self._update[-len(given) :] if given else [], self._exchange.rank

        def own_sum() -> tuple[float, int]:
            current, last = self._batch, self._update[-1] if self._update else None
            if current is not None and last is not None and current is not last and current.number == last.number:
                raise ValueError("mean() got the loss of a micro-batch; expected that of the batch, after their loop")
            if self._loss_reduction == "normalized":
                raise ValueError('mean() weights losses, but loss_reduction is "normalized"; expected "mean" or "sum"')
            if not 0 < len(given) == len(batches):
                raise ValueError(
                    f"mean() got {len(given)} losses, and this update has trained {len(self._update)} batches; "
                    "expected the loss of the current batch, or a list of those of the update's last batches"
                )
            is_sum = self._loss_reduction == "sum"
            return sum(batch.summed(loss, rank, is_sum) for loss, batch in zip(given, batches, strict=True)), len(given)

        with waiting_for_ranks():
            sums = self._exchange.all_gather_results(own_sum, "mean() of losses")
        check_same([{"the number of losses": length} for _, length in sums], "mean() of losses")
        return sum(summed for summed, _ in sums) / (sum(sum(batch.counted) for batch in batches) or 1.0)

    def _begin_batch(self, batch: BalancedBatch) -> None:
        self._balance.begin_batch(batch.cost, batch.samples)
        self._first = batch.number + 1
        self._consumed += sum(batch.counts)
        if self._exchange.rank == 0 and self._balance.split.loads is not self._warned_loads:
            self._warned_loads = self._balance.split.loads
            for network in self._networks:
                warn_of_batchnorm(network, self.loads, _REMEDY)
        self._batch, self.weight = batch, batch.share
        self._lockstep.begin_batch(batch)
        self._begin_training(batch)

    def _begin_training(self, batch: BalancedBatch) -> None:
        """Begin the batch that the loop trains next."""
        if self._update and self._update[-1].ends_update:
            self._update = []
        self._update.append(batch)
        self._trained.begin(batch)

    def _end_batch(self) -> None:
        self._batch = self._trained.data = None
        self._trained.begin(None)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, seed and loads as plain data, for `load_state_dict` on any number of ranks."""
        return {
            "epoch": self.epoch,
            "samples": self._consumed,
            "seed": self._seed,
            "batch": self._first,
            "global_batch": self.global_batch,
            "is_ramped": self._is_ramped,
            "random": {} if self._order is None else dict(self._order.random),
            "split": self._balance.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called: the next epoch skips the samples that were handed out.

        A `global_batch` that was set is set again.

        Raises:
            ValueError: if it is not what `state_dict` returned.
        """
        if missing := [name for name in ("epoch", "batch", "samples", "seed", "split") if name not in state]:
            raise ValueError(
                f"the state has no {', '.join(missing)}; expected what state_dict() of a balanced loader returned"
            )
        if state.get("is_ramped"):
            self.global_batch = state["global_batch"]
        saved, present = state.get("global_batch", self.global_batch), self.global_batch
        if self._arrangement is not None and self._arrangement.joins and state["samples"] and saved != present:
            raise ValueError(
                f"the epoch was left in the middle with a global batch of {saved} samples, and goes on with {present}, "
                f"but accumulate= and pool= form other batches of them; expected global_batch={saved}"
            )
        self.set_epoch(state["epoch"])
        self._first = state["batch"]
        self._balance.load_state(state["split"])
        if self._order is not None:
            self._order.random = state.get("random", {})
        self._seed, self._skip = state["seed"], state["samples"]

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user_loader, name)

    def __enter__(self) -> BalancedLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Close the loader; after an error the other ranks also raise an error in their next iteration."""
        if error is not None and not self._is_closed:
            self._lockstep.fail(error)
        self.close()

    def close(self) -> None:
        """Remove the hooks from the networks and destroy the loader's process group."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lockstep.leave()
        self._exchange.wait(EXIT_SECONDS)
        open_locksteps.discard(self._lockstep)
        self._restore()
        self._balance.drop_time()
        self._trained.close()
        if self._shared_exchange is None:
            self._exchange.close()


class _Steps:
    """The batches of this rank in lockstep with the other ranks; its other attributes are those of the DataLoader."""

    def __init__(self, owner: BalancedLoader) -> None:
        self._owner = owner
        self.read: deque[BalancedBatch] = deque()  # not yet handed out: accelerate reads one ahead

    def __iter__(self) -> Iterator[Any]:
        self.read.clear()
        owner = self._owner
        timer = owner._balance.timer
        source = owner._source
        loader: Iterable[Any] = owner._loader if timer is None else timer.timed(owner._loader)
        assert owner._seed is not None
        owner._outer.remainder = 0  # accelerate's gather_for_metrics has no repeated samples to cut off
        shares = source.shares(loader, owner._seed + owner.epoch, owner._consumed)
        for batch, data in owner._lockstep.batches(shares, source.read_ahead, owner._first):
            self.read.append(batch)
            yield data

    def __len__(self) -> int:
        return len(self._owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_owner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._owner._loader, name)

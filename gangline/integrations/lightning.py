"""Unequal batches in Lightning: one callback of the Trainer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gangline.integrations.queued_weights import QueuedWeights, check_options, check_sizes
from gangline.kvstore.reducer.waits import waiting_for_ranks
from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balance.evaluation import EvaluationLoader
from gangline.models.balance.gather_rows import gather_rows
from gangline.models.balanced_batch import batch_of_rows, share_of_mean
from gangline.models.data.loaders import copy_loader


class Balance(Callback):
    """Splits the training batches over the ranks by their speed, with the gradient of one device.

        trainer = Trainer(devices=2, strategy="ddp", callbacks=[Balance()])

    What backward brings to the parameters is multiplied by this rank's share of the batch, so the ranks' mean, which
    DDP and FSDP form, is the mean over the global batch. The train loader is replaced, and with ``evaluation`` those of
    validation and tests. With one rank the callback does nothing.
    """

    def __init__(
        self,
        loads: Sequence[float] | Literal["auto"] = "auto",
        *,
        count: Callable[[Any], float | Tensor] | None = None,
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        """Choose the split.

        Args:
            loads: relative speed of each rank, such as [3, 1]; "auto" measures it.
            count: function of a batch that returns how much the mean of its loss counts, such as the number of labels
                that are not ignored; None: its samples.
            evaluation: split the batches of validation and tests too, each sample once, by the speed of forward.
            **options: of `gangline.balance`, such as lengths; without ``count`` the batches of an update are then
                sorted together.

        Raises:
            TypeError: if there is no such option.
            ValueError: if an option is invalid.
        """
        self._options = {"loads": loads, "count": count, **options}
        check_options(self._options, "Balance()")
        self.loader: QueuedWeights | None = None
        """Balanced train loader of the current fit."""
        self._process: Any = None
        self._gather: Any = None
        self._reduce: Any = None
        self._batches: Any = None  # what Lightning iterates
        self._evaluates = evaluation
        self._evaluations: weakref.WeakSet[_Batches] = weakref.WeakSet()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the strategy's processing of loaders.

        Raises:
            ValueError: if the strategy does not give each rank a part of the data.
        """
        del pl_module
        if stage not in (("fit", "validate", "test") if self._evaluates else ("fit",)) or trainer.world_size == 1:
            return
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas")
        if replicas != trainer.world_size:
            raise ValueError(
                f"Balance: {type(trainer.strategy).__name__} has {replicas} parts of the data for {trainer.world_size} "
                "ranks; expected a strategy that gives each rank a part, such as 'ddp' or 'fsdp'"
            )
        check_sizes(self._options, trainer.world_size)
        strategy = trainer.strategy
        self._process, self._gather, self._reduce = strategy.process_dataloader, strategy.all_gather, strategy.reduce
        strategy.process_dataloader = partial(self._processed, trainer)
        strategy.all_gather = partial(self._gathered, trainer)
        strategy.reduce = self._reduced

    def _gathered(self, trainer: Trainer, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather as Lightning does; shares of unequal size, which cannot be stacked, as [1, rows, ...]."""
        if tensor.dim() and (trainer.training or self._evaluates):
            rows = len(tensor) if batch_of_rows(tensor).samples else 0
            with waiting_for_ranks():
                lengths = self._gather(torch.tensor(rows, device=tensor.device), group)
            if lengths.min() != lengths.max():
                with nullcontext() if sync_grads else torch.no_grad():
                    return gather_rows(tensor, group).unsqueeze(0)
        return self._gather(tensor, group, sync_grads)

    def _reduced(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does; the mean of a loss that a training step logs is over all samples."""
        if isinstance(tensor, Tensor) and not tensor.dim() and reduce_op in (None, "mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.double()  # Lightning rounds the mean of numbers of samples down
            elif self.loader is not None and self.loader.current is not None:
                tensor = share_of_mean(tensor)
        return self._reduce(tensor, group, reduce_op)

    def _processed(self, trainer: Trainer, loader: Any) -> Any:
        loader = self._process(loader)
        if not trainer.training:
            return self._for_evaluation(trainer, loader) if self._evaluates else loader
        if not isinstance(loader, DataLoader):
            raise ValueError(f"Balance: the train loader is a {type(loader).__name__}; expected a torch DataLoader")
        if self.loader is not None:
            if not self._batches.is_iterated:  # Lightning iterates loaders when it has processed all of them
                raise ValueError("Balance: there is more than one train loader; expected one")
            self.loader.close()  # loaded again, as between epochs or by a learning-rate finder
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=trainer.global_rank)
        options = self._options
        has_means = options["count"] is not None and options.get("loss_reduction", "mean") == "mean"
        if options.get("lengths") is not None and options.get("stream") != "sharded" and not has_means:
            options = {"accumulate": trainer.accumulate_grad_batches, **options}
        self.loader = QueuedWeights(trainer.model, _with_own_sampler(loader), **options)
        self._batches = _Batches(self.loader)
        return self._batches

    def _for_evaluation(self, trainer: Trainer, loader: Any) -> Any:
        batches = _Batches(EvaluationLoader([trainer.model], _with_own_sampler(loader), loads=self._options["loads"]))
        self._evaluations.add(batches)
        return batches

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End iterations that a limit of batches, such as that of the sanity check, has left open."""
        del trainer, pl_module
        for batches in self._evaluations:
            batches.leave()

    on_test_end = on_validation_end

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Use the weight of the batch that is trained now, which is not always the last one that was read."""
        del pl_module, batch, batch_idx
        if self.loader is not None and trainer._results is not None:
            trained = self.loader.next_weight()
            trainer._results.batch_size = round(trained.counted[trainer.global_rank])  # of what is logged

    def on_train_batch_end(self, *_: Any) -> None:
        """Forget the batch, so that means over an epoch have no weight of it."""
        if self.loader is not None:
            self.loader.current = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Send the other ranks the error that ends this one."""
        del trainer, pl_module
        if self.loader is not None:
            self.loader.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the strategy and close the loader."""
        del pl_module, stage
        if self._process is not None:
            trainer.strategy.process_dataloader, self._process = self._process, None
            trainer.strategy.all_gather, trainer.strategy.reduce = self._gather, self._reduce
        if self.loader is not None:
            self.loader.close()
        self.loader = None
        for batches in self._evaluations:
            batches.close()
        self._evaluations.clear()


class _Batches:
    """Balanced loader without its state, for Lightning to iterate.

    Lightning would save that state and load it also where it begins the next epoch, as after `max_steps`, so that the
    epoch began in its middle. Without it, a resumed run reads what it reads with a plain DataLoader.
    """

    def __init__(self, loader: BalancedLoader) -> None:
        self._loader = loader
        self._iteration: Callable[[], Any] = lambda: None
        self.is_iterated = False
        self.dataset, self.sampler, self.batch_sampler = loader.dataset, loader.sampler, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        self.is_iterated = True
        iteration = iter(self._loader)
        self._iteration = weakref.ref(iteration)
        return iteration

    def leave(self) -> None:
        """End the iteration."""
        if (iteration := self._iteration()) is not None:
            iteration.close()

    def close(self) -> None:
        """Close the loader."""
        self.leave()
        self._loader.close()

    def __len__(self) -> int:
        return len(self._loader)


def _with_own_sampler(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader with the user's own sampler in place of the one in which Lightning has wrapped it.

    Lightning's wrapper repeats samples so that all ranks have equally many.
    """
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler).__name__ != "DistributedSamplerWrapper":
        return loader
    own = sampler.dataset._sampler
    return copy_loader(loader, batch_size=loader.batch_size, sampler=own, drop_last=loader.drop_last)

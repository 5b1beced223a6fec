"""Evaluation on unequal ranks: each sample once, on one rank, by the speed of forward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from inspect import cleandoc, signature
from typing import Any, ParamSpec

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from gangline.kvstore.reducer.waits import waiting_for_ranks
from gangline.models.balance.balanced_loader import BalancedLoader as BalancedLoader
from gangline.models.balance.gradient_weights import wrapper_of
from gangline.models.balance.rank_exchange import group_of
from gangline.models.balanced_batch import BalancedBatch, evaluated
from gangline.models.data.shares import ShareSampler
from gangline.models.rank_timer import RankTimer

_P = ParamSpec("_P")
_OPTIONS = ["loads", "global_batch", "max_share", "lengths", "padding"]  # of `balance`


class EvaluationSampler(ShareSampler):
    """Batch sampler of one rank, whose share is never empty."""

    def _global_batches(self, seed: int, skip: int) -> Iterator[list[Any]]:
        return without_empty_shares(super()._global_batches(seed, skip), len(self._split().loads))


class EvaluationLoader(BalancedLoader):
    """Loader for evaluation, created by `BalancedLoader.evaluation`, or by `balance(None, loader)` without training."""

    _sampler_type = EvaluationSampler

    def __init__(
        self, model: Sequence[nn.Module] | None, loader: Any, *, training: BalancedLoader | None = None, **options: Any
    ) -> None:
        """Split over the ranks of ``training``, or of ``group``; the time in which ``model`` waits does not count."""
        known = _OPTIONS if training is not None else [*_OPTIONS, "group"]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"evaluation has no option {unknown[0]!r}; expected {', '.join(known)}")
        dataset = getattr(loader, "dataset", loader)
        is_known = isinstance(loader, DataLoader) or type(loader).__module__.startswith("accelerate.")
        if not is_known or isinstance(dataset, IterableDataset):
            what = f"{type(loader).__name__} of a {type(dataset).__name__}"
            raise ValueError(f"evaluation is of a {what}; expected a torch DataLoader over a map-style data set")
        networks = list(model or ())
        self._units = [unit for network in networks for unit in network.modules() if isinstance(unit, FSDPModule)]
        self._timer_type = lambda _: RankTimer(networks, has_backward=False)
        self._kept: list[float] = []
        options = {"max_share": None, "group": None, "loss_reduction": "normalized", **options}
        if training is not None:
            self._shared_exchange, self._kept = training._exchange, training._evaluation_loads
            options.setdefault("loads", training.loads if training._balance.timer is None else "auto")
        elif networks:
            options["group"] = group_of(networks, options["group"])
        super().__init__([], loader, **options)
        if training is not None and self._balance.timer is not None:
            self._balance.set_loads(self._kept or training.loads)

    def _batches(self) -> Generator[Any, None, None]:
        guard = register_optimizer_step_pre_hook(_check_step)
        with waiting_for_ranks():  # pauses the timers of training
            try:
                yield from super()._batches()
            finally:
                guard.remove()
                self._end_batch()
                for unit in self._units:  # a root stays whole after forward, and would keep old weights after a step
                    unit.reshard()

    def _begin_training(self, batch: BalancedBatch) -> None:
        evaluated[:] = [batch]
        self._kept[:] = self.loads  # here, after the same message on all ranks

    def _end_batch(self) -> None:
        self._batch = self._trained.data = None
        evaluated.clear()


def without_empty_shares(batches: Iterator[Any], ranks: int) -> Iterator[list[Any]]:
    """Return global batches of a sample or more for each rank, in the same order; ValueError if there are too few.

    A batch with fewer gets samples of the one before or, if these are too few for two batches, is joined to it.
    """
    before: list[Any] = []
    for batch in batches:
        samples, end = before + batch, min(len(before), len(before + batch) - ranks)
        if end >= ranks:
            yield samples[:end]
        before = samples[end:] if end >= ranks else samples
    if 0 < len(before) < ranks:
        raise ValueError(
            f"evaluation: there are {len(before)} samples for {ranks} ranks; expected one for each rank, or more; "
            "evaluate them on one rank, or on a group= of fewer ranks"
        )
    if before:
        yield before


def _check_step(optimizer: Optimizer, *_: object) -> None:
    if evaluated and (wrapper := wrapper_of([one for group in optimizer.param_groups for one in group["params"]])):
        raise RuntimeError(
            f"balance: the {type(optimizer).__name__} of the {wrapper} steps in a batch of evaluation, whose gradients "
            "have no weights; write gangline.balance(model, loader) for a loader that trains"
        )


BalancedLoader._evaluation_type = EvaluationLoader


def _creator(create: Callable[_P, BalancedLoader]) -> Callable[_P, BalancedLoader]:
    """Return the function that programs call: with a network it creates a loader that trains it."""
    of_evaluation: Any = EvaluationLoader

    def balance(*args: _P.args, **options: _P.kwargs) -> BalancedLoader:
        model = args[0] if args else options.get("model")
        return create(*args, **options) if model is not None else of_evaluation(*args, **options)

    balance.__doc__ = f"{cleandoc(BalancedLoader.__doc__ or '')}\n\n{cleandoc(BalancedLoader.__init__.__doc__ or '')}"
    balance.__qualname__ = "balance"
    setattr(balance, "__signature__", signature(create).replace(return_annotation=BalancedLoader))  # noqa: B010  for help()
    return balance


balance = _creator(BalancedLoader)

"""Unequal batches in the Trainer of Hugging Face transformers: one line before `train()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Literal, TypeVar

import torch
import transformers.trainer
from accelerate.utils import find_batch_size
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gangline.integrations.queued_weights import QueuedWeights
from gangline.models.balanced_batch import BalancedBatch

T = TypeVar("T", bound=transformers.Trainer)


def balance(trainer: T, *, loads: Sequence[float] | Literal["auto"] = "auto", **options: Any) -> T:
    """Split a Trainer's batches over the ranks by their speed, with the gradient of one device.

        trainer = balance(Trainer(model=model, args=args, train_dataset=dataset))
        trainer.train()

    Losses that are divided by num_items_in_batch are exact once the batches are cut. Losses that are means, over the
    labels that are not -100 or over samples, are weighted by what this rank's batch counts. With one rank nothing
    changes.

    Args:
        trainer: of transformers or of a class derived from it; it keeps its methods.
        loads: relative speed of each rank, such as [3, 1]; "auto" measures it.
        **options: of `gangline.balance`: memory, stream, group.

    Returns:
        The same trainer.

    Raises:
        TypeError: if it is no Trainer.
        ValueError: if an argument of the Trainer cannot be combined with unequal batches.
    """
    kind = type(trainer)
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"trainer is a {kind.__name__}; expected a transformers.Trainer")
    if isinstance(trainer, _Balanced):
        raise ValueError("the trainer is balanced already; call balance() once")
    for name in ("_prepare_for_training", "_run_epoch"):
        if not hasattr(kind, name):
            raise ValueError(
                f"transformers {transformers.__version__} has no Trainer.{name}; expected version 5.3 or later"
            )
    if not trainer.args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices is False, so each rank divides by its own number of tokens; leave it True"
        )
    if trainer.args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy is 'batch_rebalance', which makes equal batches of its own; expected 'random', "
            "'sequential' or 'group_by_length'"
        )
    parts = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if parts != 1:
        raise ValueError(f"{parts} ranks share each batch by tensor, context or sequence parallelism; expected 1")
    if trainer.args.world_size == 1:
        return trainer
    trainer.__class__ = type(f"Balanced{kind.__name__}", (_Balanced, kind), {})
    trainer._balance_options = {"loads": loads, **options}
    return trainer


_Base: Any = object


class _Balanced(_Base):
    """Methods that `balance` puts before those of a Trainer's class."""

    _balance_options: dict[str, Any]
    _balanced: QueuedWeights | None = None
    _current: BalancedBatch | None = None
    _divides_by_items: bool | None = None

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Replace the loader, now that the model has its wrapper."""
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._balanced is not None:
            self._balanced.close()
        self._balanced = QueuedWeights(
            model, loader, count=self._counted, loss_reduction="normalized", **self._balance_options
        )
        self.callback_handler.train_dataloader = self._balanced
        return model, self._balanced

    def _run_epoch(self: Any, *arguments: Any, **options: Any) -> Any:
        with _skipping():
            return super()._run_epoch(*arguments, **options)

    def get_batch_samples(self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Read the batches of a step; labels of a repeated sample are not counted."""
        return super().get_batch_samples(map(self._without_repeated_labels, epoch_iterator), num_batches, device)

    def training_step(self: Any, *arguments: Any, **options: Any) -> Any:
        """Train one batch with its weight."""
        self._current = self._balanced.next_weight()
        try:
            return super().training_step(*arguments, **options)
        finally:
            self._current = None

    def compute_loss(self: Any, *arguments: Any, **options: Any) -> Any:
        """Return the loss whose mean over ranks is that of the global batch."""
        if self._current is None:  # evaluation
            return super().compute_loss(*arguments, **options)
        items = options.get("num_items_in_batch")
        if items is not None and self._divides_by_items is None:
            model, inputs, *others = arguments
            before, buffers = _random_state(), [buffer.clone() for buffer in model.buffers()]
            with _Watch(items) as watch:
                result = super().compute_loss(model, copy(inputs), *others, **options)  # users take labels out of it
            self._divides_by_items = watch.was_used or self.args.torch_compile
            if self._divides_by_items:
                return _weighted(result, float(self._current.samples > 0))
            _random_state(before)  # the step begins again
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            transformers.trainer.logger.warning_once(
                f"The loss of {type(self.model).__name__} does not use num_items_in_batch; it is taken as a mean."
            )
        if items is not None and self._divides_by_items:
            return _weighted(super().compute_loss(*arguments, **options), float(self._current.samples > 0))
        self.args.average_tokens_across_devices = False  # else Trainer multiplies the mean by the number of ranks
        try:
            result = super().compute_loss(*arguments, **options)
        finally:
            self.args.average_tokens_across_devices = True
        return _weighted(result, self._current.share)

    def _counted(self: Any, batch: Any) -> int | Tensor:
        """Return how much a loss that is a mean counts: labels that are not -100, else samples."""
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return int(find_batch_size(batch) or 0)
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    def _without_repeated_labels(self: Any, batch: Any) -> Any:
        if not self._balanced.samples and isinstance(batch.get("labels"), Tensor):
            batch["labels"] = torch.full_like(batch["labels"], -100)
        return batch


def _weighted(result: Any, weight: float) -> Any:
    """Multiply a loss, or the loss of a pair with outputs; a loss without weight may be NaN."""
    if isinstance(result, tuple):
        return (_weighted(result[0], weight), *result[1:])
    return result * weight if weight else torch.nan_to_num(result) * 0.0


def _random_state(before: tuple[Tensor, Tensor | None] | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the states of random numbers on the CPU and the current GPU, after setting them to those of before."""
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if before is not None:
        torch.set_rng_state(before[0])
        if before[1] is not None:
            torch.cuda.set_rng_state(before[1])
    return torch.get_rng_state(), torch.cuda.get_rng_state() if uses_gpu else None


@contextmanager
def _skipping() -> Iterator[None]:
    """Make a resumed Trainer skip the batches of a balanced loader, which accelerate would take apart."""
    skip = transformers.trainer.skip_first_batches

    def skip_balanced(loader: Any, num_batches: int = 0) -> Any:
        if not isinstance(loader, QueuedWeights):
            return skip(loader, num_batches)
        loader.load_state_dict({**loader.state_dict(), "samples": num_batches * loader.global_batch})
        return loader

    transformers.trainer.skip_first_batches = skip_balanced
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = skip


class _Watch(TorchFunctionMode):
    """Notes if a tensor, or a copy of it, is an operand of arithmetic."""

    _COPIES = frozenset({"to", "float", "double", "long", "int", "type", "clone", "detach", "view", "expand", "cpu"})

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self._copies = [tensor]
        self.was_used = not isinstance(tensor, Tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(each is copy for each in (*args, *kwargs.values()) for copy in self._copies):
            name = getattr(func, "__name__", "")
            if name in self._COPIES:
                self._copies.append(result)
            elif isinstance(result, Tensor):
                self.was_used = True
        return result

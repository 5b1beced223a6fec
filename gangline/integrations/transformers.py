"""Unequal batches in the Trainer of Hugging Face transformers: one line before `train()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import transformers.trainer
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from transformers.data.data_collator import DataCollatorWithFlattening

from gangline.integrations.queued_weights import QueuedWeights, check_options, check_sizes
from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balance.evaluation import balance as balance_loader
from gangline.models.balanced_batch import BalancedBatch
from gangline.models.data.lengths import Lengths

T = TypeVar("T", bound=transformers.Trainer)


def balance(
    trainer: T, *, loads: Sequence[float] | Literal["auto"] = "auto", evaluation: bool = False, **options: Any
) -> T:
    """Split a Trainer's batches over the ranks by their speed, with the gradient of one device.

        trainer = balance(Trainer(model=model, args=args, train_dataset=dataset))
        trainer.train()

    Losses that are divided by num_items_in_batch are exact once the batches are cut. Losses that are means, over the
    labels that are not -100 or over samples, have their gradients weighted by what this rank's batch counts. With one
    rank nothing changes.

    Batches are cut by the lengths of their samples, if these are known as to the samplers of Trainer: from column
    ``length_column_name`` or the first input of the model; ``lengths=None`` cuts by number. The batches of an update
    are sorted together, if losses are divided by num_items_in_batch.

    Args:
        trainer: of transformers or of a class derived from it; it keeps its methods.
        loads: relative speed of each rank, such as [3, 1]; "auto" measures it.
        evaluation: split the batches of `evaluate` and `predict` too, by the speed of forward.
        **options: of `gangline.balance`, such as lengths, pool, max_share, stream and group; not count, global_batch or
            loss_reduction. With ``max_share``, which is of lengths if there are any, pass ``lengths`` too.

    Returns:
        The same trainer.

    Raises:
        TypeError: if it is no Trainer, or there is no such option.
        ValueError: if an option is invalid, or the Trainer or one of its arguments cannot be combined with unequal
            batches.
    """
    options = {"loads": loads, **options}
    kind = type(trainer)
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"trainer is a {kind.__name__}; expected a transformers.Trainer")
    if isinstance(trainer, _Balanced):
        raise ValueError("the trainer is balanced already; call balance() once")
    for name in ("_prepare_for_training", "_run_epoch", "_finalize_training"):
        if not hasattr(kind, name):
            raise ValueError(
                f"transformers {transformers.__version__} has no Trainer.{name}; expected version 5.3 or later"
            )
    if not trainer.args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices is False, so each rank divides by its own number of tokens; leave it True"
        )
    parts = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    if parts != 1:
        raise ValueError(f"{parts} ranks share each batch by tensor, context or sequence parallelism; expected 1")
    check_options(options, "balance() of a Trainer", _LEFT_OUT)
    if trainer.args.world_size == 1:
        return trainer
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size is True, so a rank that runs out of memory goes on with a batch size of its own; "
            "leave it out, and limit the samples of each rank, such as balance(trainer, max_share=[16, 4])"
        )
    if hasattr(kind, "_generate_and_score_completions"):
        raise ValueError(
            f"{kind.__name__} generates completions and takes equal parts of what the ranks gather, so it cannot train "
            "on unequal shares; train it without balance()"
        )
    batches = 1 if trainer.accelerator.split_batches else trainer.args.world_size
    check_sizes(options, trainer.args.world_size, trainer.args.train_batch_size * batches)
    _check_stream(trainer, options.get("stream"), options.get("lengths"))
    if "lengths" not in options and not isinstance(options.get("max_share"), list | tuple):
        options["lengths"] = _lengths_of(trainer)
    if options.get("lengths") is not None:
        if isinstance(trainer.train_dataset, Sized) and not callable(options["lengths"]):
            Lengths(options["lengths"], len(trainer.train_dataset))
        collator = trainer.data_collator
        is_flat = isinstance(collator, DataCollatorWithFlattening) or getattr(collator, "padding_free", False)
        divides = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None  # by num_items_in_batch
        is_sorted = divides and options.get("stream") != "sharded"  # else other batches would have other means
        together = trainer.args.gradient_accumulation_steps if is_sorted else 1
        options = {"padding": not is_flat, "accumulate": together, **options}
    if trainer.args.train_sampling_strategy == "batch_rebalance":  # which is what lengths do
        if options.get("lengths") is None:
            raise ValueError(
                "train_sampling_strategy is 'batch_rebalance', whose place balance() takes, but the lengths of samples "
                "are not known; pass balance(trainer, lengths=...)"
            )
        trainer.args.train_sampling_strategy = "random"
    trainer.__class__ = type(f"Balanced{kind.__name__}", (_Balanced, kind), {})
    trainer._balance_options, trainer._splits_evaluation = options, evaluation
    return trainer


_LEFT_OUT = {
    "count": "what a loss counts is known from the labels",
    "loss_reduction": "what a loss counts is known from the labels",
    "global_batch": "it is per_device_train_batch_size times the number of ranks",
}


def _lengths_of(trainer: transformers.Trainer) -> Any:
    """Return the lengths of the samples, from where the Trainer's own samplers take them; None: they are not known."""
    data: Any = trainer.train_dataset
    columns = getattr(data, "column_names", None) or ()
    if isinstance(data, IterableDataset):
        return None
    if trainer.args.length_column_name in columns:
        return data[trainer.args.length_column_name]
    name = (getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"])[0]
    if name in columns:
        lengths = [len(each) for each in data[name]]
    elif isinstance(data, list | tuple) and data and isinstance(data[0], Mapping) and name in data[0]:
        lengths = [len(sample[name]) for sample in data]
    else:
        return None
    return lengths if len(set(lengths)) > 1 else None


def _check_stream(trainer: transformers.Trainer, stream: str | None, lengths: Any) -> None:
    is_stream, kind = isinstance(trainer.train_dataset, IterableDataset), type(trainer.train_dataset).__name__
    if stream is not None and not is_stream and trainer.train_dataset is not None:
        raise ValueError(f"stream is {stream!r}, but the {kind} is not an IterableDataset; leave stream out")
    if not is_stream:
        return
    if trainer.accelerator.dispatch_batches is not False:
        raise ValueError(
            f"the {kind} is an IterableDataset, whose batches rank 0 would cut to equal parts; write "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}), and balance(trainer, '
            'stream="replicated") if all ranks read the same samples in the same order'
        )
    if stream is None:
        raise ValueError(
            f'stream is None, but the {kind} is an IterableDataset; write balance(trainer, stream="replicated") if all '
            'ranks read the same samples in the same order, or stream="sharded" if each rank reads samples of its own'
        )
    if lengths is not None and not callable(lengths):
        raise ValueError(
            "lengths of a stream are those of its samples; expected a function from a sample to a number, such as "
            'lambda sample: len(sample["input_ids"])'
        )


_trainings = count()  # the same on all ranks
_Base: Any = object


class _Balanced(_Base):
    """Methods that `balance` puts before those of a Trainer's class."""

    _balance_options: dict[str, Any]
    _balanced: QueuedWeights | None = None
    _splits_evaluation = False
    _evaluation: BalancedLoader | None = None
    _current: BalancedBatch | None = None
    _divides_by_items: bool | None = None

    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        """Train, and remove the hooks of the balanced loader. If a rank runs out of memory, all errors say so."""
        key = f"gangline/out of memory/{next(_trainings)}"
        try:
            return super().train(*arguments, **options)
        except RuntimeError as error:
            self._raise_out_of_memory(error, key)
            raise
        finally:
            if self._balanced is not None:
                self._balanced.close()
                self._balanced = None

    def _raise_out_of_memory(self: Any, error: RuntimeError, key: str) -> None:
        """Raise an error that names the rank whose memory was exhausted, if one told so under this key of the store."""
        store, current = dist.distributed_c10d._get_default_store(), self._balanced and self._balanced.current
        if should_reduce_batch_size(error) and current is not None:
            ranks, rank = self.args.world_size, self.args.process_index
            caps = [self._balanced.global_batch] * ranks
            caps[rank] = max(current.samples // 2, 1)
            store.set(
                key,
                f"rank {rank} ran out of memory with {current.samples} samples; limit the samples of each rank, as by "
                f"balance(trainer, max_share={caps}), or lower per_device_train_batch_size",
            )
        with suppress(dist.DistError):  # the store has ended with rank 0
            if store.check([key]):
                kind = torch.OutOfMemoryError if should_reduce_batch_size(error) else RuntimeError
                raise kind(store.get(key).decode()) from error

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Replace the loader, now that the model has its wrapper."""
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._balanced = QueuedWeights(model, loader, count=self._counted, **self._balance_options)
        self.callback_handler.train_dataloader = self._balanced
        return model, self._balanced

    def _run_epoch(self: Any, *arguments: Any, **options: Any) -> Any:
        with _skipping():
            return super()._run_epoch(*arguments, **options)

    def evaluation_loop(self: Any, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate, each sample once and on one rank."""
        if not self._splits_evaluation:
            return super().evaluation_loop(dataloader, *arguments, **options)
        if self._balanced is not None:
            self._evaluation = self._balanced.evaluation(dataloader)
        else:
            self._evaluation = balance_loader(None, dataloader, loads=self._balance_options["loads"])
        try:
            return super().evaluation_loop(self._evaluation, *arguments, **options)
        finally:
            self._evaluation.close()
            self._evaluation = None

    def prediction_step(self: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Return the loss of the global batch once for each sample, since Trainer repeats it equally on all ranks."""
        counted = None if self._evaluation is None else self._counted(inputs)
        loss, *others = super().prediction_step(model, inputs, *arguments, **options)
        if counted is None or loss is None:
            return loss, *others
        divisor = 1 if self._divides_by_items else counted
        weighted = torch.stack([loss * divisor if divisor else loss.new_zeros(()), loss.new_tensor(float(divisor))])
        summed, count = self.accelerator.gather(weighted[None]).sum(0)
        return (summed / count).repeat(self._evaluation.samples), *others

    def _finalize_training(self: Any, *arguments: Any) -> Any:
        """Average the losses since the last log step over ranks, as those that are logged."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*arguments)

    def get_batch_samples(self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Read the batches of a step; labels of a repeated sample are not counted."""
        return super().get_batch_samples(map(self._without_repeated_labels, epoch_iterator), num_batches, device)

    def training_step(self: Any, *arguments: Any, **options: Any) -> Any:
        """Train one batch with its weight; return the loss whose mean over ranks is that of the global batch."""
        self._current = self._balanced.next_weight()
        try:
            loss = super().training_step(*arguments, **options)
            weight = self._current.weight
            return loss * weight if weight else torch.zeros_like(loss)  # a loss without weight may be NaN
        finally:
            self._current = None

    def compute_loss(self: Any, *arguments: Any, **options: Any) -> Any:
        """Return the loss of a batch; the gradient is weighted if this is a mean."""
        items = options.get("num_items_in_batch")
        if items is None or (self._current is None and self._evaluation is None):  # a mean, or equal parts
            return super().compute_loss(*arguments, **options)
        of_mean = self._current
        if self._divides_by_items is not False and of_mean is not None:
            self._train(replace(of_mean, weight=float(of_mean.samples > 0)))
        if self._divides_by_items is None:
            model, inputs, *others = arguments
            before, buffers = _random_state(), [buffer.clone() for buffer in model.buffers()]
            with _Watch(items) as watch:
                result = super().compute_loss(model, copy(inputs), *others, **options)  # users take labels out of it
            self._divides_by_items = watch.was_used or self.args.torch_compile
            if self._divides_by_items:
                return result
            if of_mean is not None:
                self._train(of_mean)
            _random_state(before)  # the step begins again
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            transformers.trainer.logger.warning_once(
                f"The loss of {type(self.model).__name__} does not use num_items_in_batch; it is taken as a mean."
            )
        # Else Trainer multiplies the mean by the number of ranks.
        self.args.average_tokens_across_devices = self._divides_by_items
        try:
            return super().compute_loss(*arguments, **options)
        finally:
            self.args.average_tokens_across_devices = True

    def _train(self: Any, batch: BalancedBatch) -> None:
        self._current = batch
        self._balanced.train(batch)

    def _counted(self: Any, batch: Any) -> int | Tensor:
        """Return how much a loss that is a mean counts: labels that are not -100, else samples."""
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return next((len(part) for part in tree_leaves(batch) if isinstance(part, Tensor) and part.dim()), 0)
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    def _without_repeated_labels(self: Any, batch: Any) -> Any:
        for name in ("labels", "shift_labels"):
            if not self._balanced.samples and isinstance(batch.get(name), Tensor):
                batch[name] = torch.full_like(batch[name], -100)
        return batch


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

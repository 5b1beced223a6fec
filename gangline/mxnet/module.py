"""`mx.mod.Module` with MXNet's signatures, on `gangline.Module`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gangline.kvstore.context import Context, cpu
from gangline.kvstore.optimizer import files
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.models.module import Module as _Module
from gangline.mxnet import metric, nd
from gangline.mxnet.callback import BatchEndParam
from gangline.mxnet.init import Initializer, Uniform
from gangline.mxnet.io import DataBatch, DataDesc
from gangline.mxnet.lr_scheduler import LRScheduler
from gangline.mxnet.model import joined, load_checkpoint, parted

Params = Mapping[str, Tensor]
_RATE = (("learning_rate", 0.01),)


def BucketingModule(*_: Any, **__: Any) -> None:  # noqa: N802  MXNet's name
    """Refuse.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("BucketingModule does not exist: torch's networks take inputs of any length, use Module")


class Module:
    """A network on one or more contexts.

    Args:
        symbol: the network, a `torch.nn.Module`.
        data_names: names of its inputs.
        label_names: names of the labels.
        logger: logger of `fit`.
        context: a context or a list of them; the CPU by default.
        work_load_list: relative speed of each context.
        fixed_param_names: names of parameters that are not trained.
        state_names: refused: a torch module keeps its state.
        group2ctxs: refused: `gangline.Pipeline` divides a network.
        compression_params: gradient compression between the contexts and the store.
        loss: loss of (output, label); None: that of SoftmaxOutput, whose outputs are probabilities.
    """

    def __init__(
        self,
        symbol: nn.Module,
        data_names: Sequence[str] = ("data",),
        label_names: Sequence[str] | None = ("softmax_label",),
        logger: Any = logging,
        context: Context | Sequence[Context] | None = None,
        work_load_list: Sequence[float] | str | None = None,
        fixed_param_names: Sequence[str] | None = None,
        state_names: Any = None,
        group2ctxs: Any = None,
        compression_params: Mapping[str, Any] | None = None,
        *,
        loss: Any = None,
    ) -> None:
        if state_names or group2ctxs:
            raise ValueError(
                "state_names and group2ctxs have no meaning here: a torch module keeps its state, and "
                "gangline.Pipeline divides a network among contexts"
            )
        self.symbol, self.logger = symbol, logger
        self.data_names, self.label_names = list(data_names), list(label_names or ())
        self._is_softmax = loss is None
        self._module = _Module(
            symbol,
            nn.CrossEntropyLoss() if loss is None else loss,
            context=cpu() if context is None else context,
            work_load_list=work_load_list,
            fixed_param_names=fixed_param_names,
            compression_params=compression_params,
        )
        self.data_shapes: list[DataDesc] = []
        self.label_shapes: list[DataDesc] = []
        self.for_training = self.params_initialized = self.optimizer_initialized = False
        self._scheduler: LRScheduler | None = None
        self._updates = 0

    @property
    def binded(self) -> bool:
        """True after `bind`."""
        return self._module.bound.is_bound

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""
        return ["softmax_output" if self._is_softmax else "output"]

    def bind(
        self,
        data_shapes: Sequence[Any],
        label_shapes: Sequence[Any] | None = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        force_rebind: bool = False,
        shared_module: Any = None,
        grad_req: str = "write",
    ) -> None:
        """Create the replicas; shapes are pairs of names and shapes, such as ``provide_data`` of an iterator."""
        del force_rebind, shared_module  # replicas take batches of any size
        if self.binded:
            self.logger.warning("Already bound, ignoring bind()")
            return
        self.data_shapes = [DataDesc(*one[:2]) for one in data_shapes]
        self.label_shapes = [DataDesc(*one[:2]) for one in label_shapes or ()]
        self.for_training = for_training
        shapes = tuple(tuple(one.shape) for one in self.data_shapes)
        self._module.bind(
            shapes if len(shapes) > 1 else shapes[0],
            tuple(self.label_shapes[0].shape) if self.label_shapes else None,
            for_training,
            inputs_need_grad,
            grad_req,
        )

    # Parameters

    def init_params(
        self,
        initializer: Initializer | None = Uniform(0.01),  # noqa: B008  a constant
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        allow_missing: bool = False,
        force_init: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Set the parameters from those given, the others by the initializer.

        Raises:
            RuntimeError: if given parameters lack names, without ``allow_missing``.
        """
        if self.params_initialized and not force_init:
            return
        flags = {"allow_missing": allow_missing, "allow_extra": allow_extra, "force_init": True}
        self._module.init_params(initializer, arg_params, aux_params, **flags)
        self.params_initialized = True

    def get_params(self) -> tuple[dict[str, nd.NDArray], dict[str, nd.NDArray]]:
        """Return the parameters, and the buffers (MXNet's auxiliary states), by name."""
        state = {name: nd.wrap(one) for name, one in self._module.get_params().items()}
        parameters = {name: state.pop(name) for name, _ in self.symbol.named_parameters()}
        return parameters, state

    def set_params(
        self,
        arg_params: Params,
        aux_params: Params,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Replace parameters and buffers."""
        if force_init or not self.params_initialized:
            self._module.set_params(arg_params, aux_params, allow_missing=allow_missing, allow_extra=allow_extra)
            self.params_initialized = True

    def save_params(self, fname: str) -> None:
        """Write the parameters."""
        nd.save(fname, joined(*self.get_params()))

    def load_params(self, fname: str) -> None:
        """Replace the parameters by those of a file."""
        self.set_params(*parted(nd.load(fname)))

    # Optimizer

    def init_optimizer(
        self, kvstore: Any = "local", optimizer: Any = "sgd", optimizer_params: Any = _RATE, force_init: bool = False
    ) -> None:
        """Set store and optimizer; the gradient is the mean over the batches of all workers.

        Raises:
            ValueError: if ``rescale_grad`` is given, which would replace this mean.
        """
        if self.optimizer_initialized and not force_init:
            self.logger.warning("optimizer already initialized, ignoring...")
            return
        params = dict(optimizer_params)
        if "rescale_grad" in params:
            raise ValueError(
                f"rescale_grad is {params['rescale_grad']}; expected none: gradients are means over batches"
            )
        self._scheduler, self._updates = params.pop("lr_scheduler", None), 0
        if self._scheduler is not None:
            self._scheduler.base_lr = params.get("learning_rate", self._scheduler.base_lr)
        params.setdefault("learning_rate", 0.01 if self._scheduler is None else self._scheduler.base_lr)
        if params.get("wd"):
            params.setdefault("wd_mult", "mxnet")
        self._module.init_optimizer(kvstore, optimizer, params)
        self.optimizer_initialized = True

    def save_optimizer_states(self, fname: str) -> None:
        """Write the optimizer's state."""
        state = self._module.optimizer_state()
        files.save(Path(fname), state.tensors, {"updates": self._updates, **state.header()})

    def load_optimizer_states(self, fname: str) -> None:
        """Replace the optimizer's state by that of a file."""
        tensors, header = files.load(Path(fname))
        self._updates = header["updates"]
        binding = self._module._require_optimizer("load_optimizer_states()")
        binding.load_state(OptimizerState.from_parts(header, tensors))

    # Steps

    def forward(self, data_batch: Any, is_train: bool | None = None) -> None:
        """Run the network on a batch."""
        self._module.forward(*self._split(data_batch), is_train=self.for_training if is_train is None else is_train)

    def backward(self, out_grads: Any = None) -> None:
        """Compute the gradients."""
        grads = out_grads[0] if isinstance(out_grads, (list, tuple)) else out_grads
        self._module.backward(None if grads is None else _plain(grads))

    def forward_backward(self, data_batch: Any) -> None:
        """Run `forward` and `backward`."""
        self._module.forward_backward(*self._split(data_batch))

    def update(self) -> None:
        """Update the parameters."""
        self._updates += 1
        if self._scheduler is not None:
            self._module.set_learning_rate(self._scheduler(self._updates))
        self._module.update()

    def get_outputs(self, merge_multi_context: bool = True) -> list[Any]:
        """Return a list of the outputs: probabilities, or what the network returns if it has a loss of its own."""
        found = self._module.get_outputs(merge=merge_multi_context)
        if not merge_multi_context:
            return [[self._output(one) for one in found]]
        return [self._output(one) for one in (found if isinstance(found, (list, tuple)) else [found])]

    def get_input_grads(self, merge_multi_context: bool = True) -> list[Any]:
        """Return a list of the gradients of the inputs; with SoftmaxOutput's loss those of its sum over samples."""
        found = self._module.get_input_grads(merge=merge_multi_context)
        gradients = found if isinstance(found, (list, tuple)) else [found]
        return [nd.wrap(one * len(one) if self._is_softmax else one) for one in gradients]

    def update_metric(self, eval_metric: metric.EvalMetric, labels: Sequence[Tensor], pre_sliced: bool = False) -> None:
        """Count the last outputs in a metric."""
        del pre_sliced
        eval_metric.update(labels, self.get_outputs())

    def _output(self, output: Tensor) -> nd.NDArray:
        return nd.wrap(output.detach().softmax(1) if self._is_softmax else output.detach())

    def _split(self, batch: Any) -> tuple[Any, Any]:
        data = [_plain(one) for one in batch.data]
        labels = [_plain(one) for one in batch.label or ()]
        if self._is_softmax:
            labels = [one.long() for one in labels]
        return tuple(data) if len(data) > 1 else data[0], labels[0] if labels else None

    # Loops

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        eval_metric: Any = "acc",
        epoch_end_callback: Any = None,
        batch_end_callback: Any = None,
        kvstore: Any = "local",
        optimizer: Any = "sgd",
        optimizer_params: Any = _RATE,
        eval_end_callback: Any = None,
        eval_batch_end_callback: Any = None,
        initializer: Initializer | None = Uniform(0.01),  # noqa: B008  a constant
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        allow_missing: bool = False,
        force_rebind: bool = False,
        force_init: bool = False,
        begin_epoch: int = 0,
        num_epoch: int | None = None,
        validation_metric: Any = None,
    ) -> None:
        """Train on the batches of an iterator for ``num_epoch`` epochs."""
        if num_epoch is None:
            raise ValueError("num_epoch is None; expected the number of epochs")
        self.bind(train_data.provide_data, train_data.provide_label, force_rebind=force_rebind)
        self.init_params(initializer, arg_params, aux_params, allow_missing, force_init)
        self.init_optimizer(kvstore, optimizer, optimizer_params)
        eval_metric = metric.create(eval_metric)
        for epoch in range(begin_epoch, num_epoch):
            began = time.monotonic()
            eval_metric.reset()
            for nbatch, batch in enumerate(train_data):
                self.forward_backward(batch)
                self.update()
                self.update_metric(eval_metric, batch.label)
                _call(batch_end_callback, self._param(epoch, nbatch, eval_metric, locals()))
            for name, value in eval_metric.get_global_name_value():
                self.logger.info("Epoch[%d] Train-%s=%f", epoch, name, value)
            self.logger.info("Epoch[%d] Time cost=%.3f", epoch, time.monotonic() - began)
            _call(epoch_end_callback, epoch, self.symbol, *self.get_params())
            if eval_data is not None:
                scores = self.score(
                    eval_data,
                    validation_metric or eval_metric,
                    score_end_callback=eval_end_callback,
                    batch_end_callback=eval_batch_end_callback,
                    epoch=epoch,
                )
                for name, value in scores:
                    self.logger.info("Epoch[%d] Validation-%s=%f", epoch, name, value)
            train_data.reset()

    def _param(self, epoch: int, nbatch: int, eval_metric: Any, of_loop: dict[str, Any]) -> BatchEndParam:
        return BatchEndParam(epoch, nbatch, eval_metric, {**of_loop, "module": self._module})

    def score(
        self,
        eval_data: Any,
        eval_metric: Any,
        num_batch: int | None = None,
        batch_end_callback: Any = None,
        score_end_callback: Any = None,
        reset: bool = True,
        epoch: int = 0,
    ) -> list[tuple[str, float]]:
        """Return the metric of the batches of an iterator, samples that fill the last one up included, as in MXNet."""
        eval_metric = metric.create(eval_metric)
        eval_metric.reset()
        nbatch = -1
        for nbatch, batch in self._forwarded(eval_data, num_batch, reset):
            self.update_metric(eval_metric, batch.label or ())
            _call(batch_end_callback, self._param(epoch, nbatch, eval_metric, locals()))
        _call(score_end_callback, self._param(epoch, nbatch + 1, eval_metric, locals()))
        found: list[tuple[str, float]] = eval_metric.get_name_value()
        return found

    def iter_predict(
        self, eval_data: Any, num_batch: int | None = None, reset: bool = True
    ) -> Iterator[tuple[list[nd.NDArray], int, DataBatch]]:
        """Yield outputs without those of samples that fill a batch up, its number, and the batch."""
        for nbatch, batch in self._forwarded(eval_data, num_batch, reset):
            yield [out[: len(out) - (batch.pad or 0)] for out in self.get_outputs()], nbatch, batch

    def predict(
        self,
        eval_data: Any,
        num_batch: int | None = None,
        merge_batches: bool = True,
        reset: bool = True,
        always_output_list: bool = False,
    ) -> Any:
        """Return the outputs of all batches, joined; with ``merge_batches=False`` a list of those of each."""
        batches = [outs for outs, _, _ in self.iter_predict(eval_data, num_batch, reset)]
        if not merge_batches:
            return batches
        merged = [nd.wrap(torch.cat(parts)) for parts in zip(*batches, strict=True)]
        return merged if always_output_list or len(merged) != 1 else merged[0]

    def _forwarded(self, data: Any, num_batch: int | None, reset: bool) -> Iterator[tuple[int, DataBatch]]:
        if reset:
            data.reset()
        for number, batch in enumerate(data):
            if number == num_batch:
                return
            self.forward(batch, is_train=False)
            yield number, batch

    # Checkpoints

    def save_checkpoint(self, prefix: str, epoch: int, save_optimizer_states: bool = False) -> None:
        """Write ``prefix-0001.params``, and ``prefix-0001.states``."""
        self.save_params(f"{prefix}-{epoch:04d}.params")
        if save_optimizer_states:
            self.save_optimizer_states(f"{prefix}-{epoch:04d}.states")

    @staticmethod
    def load(prefix: str, epoch: int, load_optimizer_states: bool = False, **kwargs: Any) -> Module:
        """Return a module of ``symbol=network`` and other arguments with a checkpoint's weights.

        The optimizer's state is loaded by `load_optimizer_states`, after `init_optimizer`.
        """
        if load_optimizer_states:
            path = Path(f"{prefix}-{epoch:04d}.states")
            raise ValueError(
                f"load_optimizer_states is True; expected load_optimizer_states({str(path)!r}) after init_optimizer()"
            )
        module = Module(**kwargs)
        _, arg_params, aux_params = load_checkpoint(prefix, epoch)
        module.init_params(None, arg_params, aux_params)
        return module


def _plain(array: Any) -> Tensor:
    return array.detach().as_subclass(Tensor) if isinstance(array, Tensor) else nd.array(array).as_subclass(Tensor)


def _call(callbacks: Any, *arguments: Any) -> None:
    for one in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if one is not None:
            one(*arguments)

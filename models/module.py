"""Module: a network trained on one or several contexts with the result of training on one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from gangline.kvstore import KVStore
from gangline.kvstore.arguments import check_shard
from gangline.kvstore.compression import parse
from gangline.kvstore.context import Device, contexts, use_own_gpu
from gangline.kvstore.default_store import default_store, job_store
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.registry import IN_PROCESS
from gangline.kvstore.workload import check_work_load_list
from gangline.models.batchnorm.distributed_batchnorm import smallest_share, warn_of_batchnorm
from gangline.models.checkpoint import checkpoint
from gangline.models.data.batches import as_batch, num_samples, unpacked, unwrapped, zeros_of
from gangline.models.data.reader import Collate
from gangline.models.executor.context_balance import ContextBalance
from gangline.models.executor.executor import Executor
from gangline.models.initializer import InitializerSpec
from gangline.models.loop import evaluation
from gangline.models.loop.callbacks import BatchCallback
from gangline.models.loop.epochs import BatchCallbacks, EpochCallbacks, FitOptions, Resume
from gangline.models.loop.fit import fit
from gangline.models.loss.loss_scale import LossScale
from gangline.models.loss.summed_loss import Loss, Normalizer, SummedLoss
from gangline.models.metrics.metric import EvalMetric
from gangline.models.module_state import ModuleState, Params
from gangline.models.names import as_named_by, check_parameter_names, parameters_of
from gangline.models.optimizer_binding import NoOptimizer, StoreOptions, bind_optimizer, check_divided
from gangline.models.run_state import RunState
from gangline.models.workers import Workers


class Module(ModuleState):
    """A network trained on one or several contexts, with the result of training on one.

    Each context with a load holds a replica. A batch is split over the replicas by ``work_load_list``, their gradients
    are combined into the gradient of the whole batch, and the weights are updated once. The first replica is the user's
    network itself, moved to its context.

    Life cycle: `bind` (done by the first batch), `init_params` (optional), `init_optimizer`, then `forward`,
    `backward` and `update` in a loop. `fit`, `score` and `predict` are complete loops.

    The attributes ``bound`` (replicas and executor) and ``run_state`` serve gangline's own loops, checkpoints and
    reports, and may change without notice.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Loss = None,
        context: Device | Sequence[Device] = "auto",
        work_load_list: Sequence[float] | str | None = None,
        fixed_param_names: Sequence[str] | None = None,
        compression_params: Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
        loss_normalizer: Normalizer | None = None,
        logger: logging.Logger | None = None,
        autocast: torch.dtype | None = None,
        random: str = "context",
        shard: str | None = None,
        memory: Sequence[float] | str = "auto",
    ) -> None:
        """Configure the module; replicas are created at their first use.

        Args:
            network: network that takes a batch's data as one argument, or as several if the data is a tuple or dict.
            loss: torch loss, or function of (output, label); None: the network's output is the loss, one number (the
                mean over samples) or one number per sample.
            context: a context, a torch device, a string for `contexts`, or a list of these. With "parallel", the
                default store of `init_optimizer` and `fit` connects all processes of the job in the environment. If all
                contexts are GPUs and torch's current device is not among them, the first one becomes the current
                device.
            work_load_list: relative speed of each context, 0 or more; 0: idle; None: equal speeds. "auto" measures
                speeds during training, updates the split every epoch, and runs shares that do not fit into a context's
                memory in micro-steps; with context "parallel" it also measures the workers, unless
                GANGLINE_WORK_LOAD_LIST is set.
            fixed_param_names: names of parameters that are not trained.
            compression_params: gradient compression between replicas and store, such as ``{"type": "2bit",
                "threshold": 0.03}``; thresholds are in units of the mean over the global batch, see
                `KVStore.set_gradient_compression`.
            sync_batchnorm: compute batch statistics over all replicas, of all workers of the job.
            loss_normalizer: function from the label to the divisor of a custom loss; None: number of samples.
            logger: logger of `fit`; None: logger "gangline".
            autocast: torch.bfloat16 or torch.float16: dtype of forward under torch's autocast; parameters and gradients
                keep their dtype. With float16 the loss is scaled, and steps whose gradients overflow are skipped.
            random: "context": each context has its own random stream. "sample": dropout draws a mask per sample, so
                that results do not depend on the number, split and device type of contexts and synchronous workers; see
                `SampleDropout`.
            shard: "optimizer": shard the optimizer's state over the workers of an allreduce store, or the contexts of a
                device store, see `KVStore.set_optimizer`. "weights": also shard weights and gradients over the workers,
                as with `Trainer`; each worker must have one context, and calls that read or replace weights are
                collective. Checkpoints do not depend on it. None: no sharding.
            memory: relative memory of the workers, or contexts, or "auto", as for `KVStore.set_optimizer`.

        Raises:
            TypeError: if an argument has a wrong type.
            ValueError: if a context does not exist, loads are invalid, a name is unknown, or the loss cannot be split.
        """
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Module")
        self.contexts = contexts(context)
        use_own_gpu(self.contexts)
        self._job_store = job_store() if context == "parallel" else None
        logger = logger or logging.getLogger("gangline")
        balancer = None
        if isinstance(work_load_list, str):
            if work_load_list != "auto":
                raise ValueError(f"work_load_list is {work_load_list!r}; expected one number per context, or 'auto'")
            minimum = 1 if sync_batchnorm else smallest_share(network)
            balancer = ContextBalance(self.contexts, logger, minimum)
            work_load_list = balancer.loads
        loads = check_work_load_list(work_load_list, len(self.contexts))
        compression = parse(compression_params).params if compression_params is not None else None
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast is {autocast!r}; expected torch.bfloat16, torch.float16 or None")
        if random not in ("context", "sample"):
            raise ValueError(f"random is {random!r}; expected 'context' or 'sample'")
        check_shard(shard, or_weights=True)
        if shard == "weights":
            check_divided(len(self.contexts), balancer, compression, sync_batchnorm, autocast)
        measures_workers = self._job_store is not None and balancer is not None
        self._options = StoreOptions(len(self.contexts), measures_workers, compression, shard, memory)
        summed = SummedLoss(loss, loss_normalizer)
        executor = Executor(
            network,
            self.contexts,
            loads if balancer is None else [1] * len(self.contexts),
            check_parameter_names(network, fixed_param_names or ()),
            summed,
            sync_batchnorm=bool(sync_batchnorm),
            autocast=autocast,
            measure=balancer is not None,
            dropout_by_sample=random == "sample",
        )
        loss_scale = LossScale() if autocast is torch.float16 else None
        super().__init__(
            executor, summed, RunState(), loads=loads, load_balancer=balancer, loss_scale=loss_scale, logger=logger
        )
        self._for_training = True
        self.optimizer_request: tuple[Any, Any, Mapping[str, Any]] | None = None
        """Arguments of the last `init_optimizer`: (kvstore, optimizer, optimizer_params)."""

    def __repr__(self) -> str:
        """Show network class, contexts, loads, store and optimizer."""
        loads = ", ".join(f"{load:g}" for load in self.work_load_list)
        auto = " (auto)" if self.load_balancer is not None else ""
        optimizer = self.optimizer_request[1] if self.optimizer_request is not None else None
        name = optimizer if isinstance(optimizer, str) or optimizer is None else optimizer.__name__
        return (
            f"Module({type(self.network).__name__}, context=[{', '.join(map(str, self.contexts))}], "
            f"work_load_list=[{loads}]{auto}, kvstore={self.store_type!r}, optimizer={name!r})"
        )

    # -- binding and parameters ---------------------------------------------------------------------------------

    def bind(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        grad_req: str = "write",
    ) -> None:
        """Create the replicas before the first batch.

        Args:
            data_shapes: shape of a batch's data, such as ``(64, 1, 28, 28)``, or a tuple, list or dict of shapes.
            label_shapes: the same for labels.
            for_training: default of ``is_train`` in `forward`.
            inputs_need_grad: compute gradients of the inputs, for `get_input_grads`.
            grad_req: "write": several backwards before an `update` add up gradients, each of the mean over its own
                batch. "add": they give the gradient of the mean over all their batches, in which each valid element
                counts once.

        Raises:
            ValueError: if the batch sizes of the shapes differ, or ``grad_req`` is unknown.
        """
        if grad_req not in ("write", "add"):
            raise ValueError(f"grad_req is {grad_req!r}; expected 'write' or 'add'")
        if self.bound.is_bound:
            self.logger.warning("the module is bound already; bind() is ignored")
            return
        zeros = zeros_of(data_shapes, "data_shapes")
        size = num_samples(zeros, "data_shapes")
        if label_shapes is not None:
            labels = num_samples(zeros_of(label_shapes, "label_shapes"), "label_shapes")
            if labels != size:
                raise ValueError(f"data_shapes have a batch of {size}, but label_shapes one of {labels}")
        self._for_training = bool(for_training)
        self._inputs_need_grad = bool(inputs_need_grad)
        self.grad_req = grad_req
        self.bound.bind(zeros)

    # -- optimizer ----------------------------------------------------------------------------------------------

    def init_optimizer(
        self, kvstore: str | KVStore | None = "auto", optimizer: Any = "sgd", optimizer_params: Any = None
    ) -> None:
        """Set the store that sums gradients and the optimizer that updates weights, with fresh optimizer state.

        Collective with a store of several workers; rank 0's parameters and buffers are used.

        Args:
            kvstore: a store, the name of one, or None. "auto": the job's store in a job of several workers and with
                context "parallel", else "device" if all contexts are GPUs, else "local". A single context needs no
                store, and none is created for a name.
            optimizer: name or class from torch.optim, or a dict of these by patterns of names, or by functions of
                (name, parameter); see `OptimizerSpec.parse`.
            optimizer_params: its arguments, by torch's names or MXNet's.

        Raises:
            ValueError: if a store, optimizer, argument or parameter name is unknown, or ``kvstore`` is None with
                several contexts.
            TypeError: if an argument has a wrong type.
        """
        named = parameters_of(self.network)
        spec = OptimizerSpec.parse((optimizer, dict(optimizer_params or {})), named)
        store = self._resolve_store(kvstore)
        replicas, previous = self.bound.replicas, self._optimizer
        replicas.update_trained_parameters()
        spec.check_keys(named, replicas.first.parameters)
        if not replicas.first.parameters:
            raise ValueError("the network has no trained parameter")
        binding = bind_optimizer(replicas, store, spec, self._options, previous, self._pending_optimizer_state)
        try:
            self._join(binding.workers)
        except BaseException:
            if binding.store is not previous.store:
                binding.close()
            elif binding is not previous:
                binding.detach()
            raise
        self._pending_optimizer_state = None
        if binding is not previous:
            previous.detach()
        if binding.store is not previous.store:
            previous.close()
        if self._options.compression is not None and binding.store is None:
            self.logger.warning("a single context sends no gradients, so compression_params has no effect")
        self._set_optimizer(binding)
        self.optimizer_request = (kvstore, optimizer, dict(optimizer_params or {}))
        self.run_state.optimizer_set_by_fit = False

    def _begin_training(self) -> None:
        """Also train what requires gradients since `init_optimizer`; the others keep their state. Collective then."""
        if not self._unfrozen():
            return
        assert self.optimizer_request is not None
        state, rate, named = self.optimizer_state(), self.learning_rate, parameters_of(self.network)
        trained = {json.dumps(name) for name, parameter in named.items() if parameter.requires_grad}
        state = state.of_keys(lambda name: json.dumps(name) in trained)
        shapes = {name: shape for name, shape in state.shapes.items() if name in trained}
        self._pending_optimizer_state = replace(state, shapes=shapes)
        set_by_fit = self.run_state.optimizer_set_by_fit
        self.init_optimizer(*self.optimizer_request)
        self.run_state.optimizer_set_by_fit = set_by_fit
        self.set_learning_rate(rate)

    def _resolve_store(self, kvstore: str | KVStore | None) -> str | KVStore | None:
        """Return the store or its name; "auto" and names of single-process stores become the job's store, if any."""
        if self._job_store is None:
            if kvstore != "auto":
                return kvstore
            if (store := default_store()) != "device":
                return store
            return "device" if all(context.device_type == "gpu" for context in self.contexts) else "local"
        if kvstore in ("auto", "local", None):
            return self._job_store
        if kvstore in IN_PROCESS:
            raise ValueError(
                f"kvstore is {kvstore!r}, which does not leave this process, but context is 'parallel', all processes "
                f"of the job; leave kvstore out ({self._job_store!r} is used then), or name an allreduce or dist_* "
                "store"
            )
        return kvstore

    def _join(self, workers: Workers) -> None:
        """Join a job with these workers."""
        self.bound.join(workers)
        if workers.is_first and not self.bound.sync_batchnorm:
            remedy = (
                "pass sync_batchnorm=True to Module" if self._options.shard != "weights" else "normalize over features"
            )
            warn_of_batchnorm(self.network, [load for load in workers.loads if load], remedy)
        self._share_untrained(workers)

    # -- steps --------------------------------------------------------------------------------------------------

    def forward(self, data: Any, label: Any = None, is_train: bool | None = None) -> None:
        """Run the network on a batch, split over the contexts.

        Args:
            data: tensor, array, tuple or dict, with the batch on the first axis of each tensor; or an object with
                attributes ``data`` and ``label``, such as MXNet's DataBatch. In a job, this worker's share of the
                batch; None, or tensors of length 0, if it has no samples.
            label: labels, likewise; None: no loss is computed, unless the output is the loss.
            is_train: training mode with gradients, or evaluation mode without; None: ``for_training`` of `bind`.

        Raises:
            ValueError: if the batch sizes of data and label differ, or there are no samples.
        """
        train = self._for_training if is_train is None else is_train
        if train:
            self._begin_training()
        self._run(*unpacked(data, label), train=train)

    def forward_backward(self, data: Any, label: Any = None) -> None:
        """Run `forward` in training mode, then `backward`.

        With ``work_load_list="auto"`` a batch that does not fit into a context's memory is run again in micro-steps.
        """
        self._begin_training()
        self._run_both(*unpacked(data, label))

    def forward_backward_update(self, data: Any, label: Any = None) -> None:
        """Run a whole training step; gradients are pushed to the store while backward is still running.

        The store updates weights as their gradients arrive: if backward fails, some parameters may have been updated
        and others not. Store and replicas then have equal weights, and a note on the error says how many buckets had
        been pushed. With ``work_load_list="auto"`` a batch that does not fit into memory is run again in micro-steps;
        buckets that had been pushed count once.
        """
        self._begin_training()
        self._run_step(*unpacked(data, label))

    def update_metric(self, eval_metric: EvalMetric, labels: Any) -> None:
        """Update a metric with the last forward's outputs.

        Args:
            eval_metric: metric made by `gangline.models.metrics.metric.create`.
            labels: labels of the batch; a list of one is unwrapped, as in MXNet.
        """
        eval_metric.update(as_batch(unwrapped(labels), "labels"), self.get_outputs(), self)

    def begin_epoch(self) -> None:
        """Update the measured loads of contexts and workers from the last epoch's measurements.

        Collective if the loads of the workers are measured (GANGLINE_WORK_LOAD_LIST=auto).
        """
        if self.load_balancer is not None:
            self.load_balancer.begin_epoch()
        self.worker_balance.begin_epoch()

    # -- loops --------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        eval_metric: Any = "acc",
        *,
        num_epoch: int,
        batch_size: int | None = None,
        lengths: Any = None,
        padding: bool = True,
        collate_fn: Collate | None = None,
        shuffle: bool = True,
        seed: int = 0,
        begin_epoch: int = 0,
        kvstore: str | KVStore | None = "auto",
        optimizer: Any = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        batch_end_callback: BatchCallbacks = None,
        epoch_end_callback: EpochCallbacks = None,
        eval_end_callback: BatchCallbacks = None,
        validation_metric: Any = None,
        resume: Resume | None = None,
        accumulate: int = 1,
        lr_scheduler: Any = None,
        eval_frequency: Any = 1,
        initializer: InitializerSpec | None = None,
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        allow_missing: bool = False,
        force_init: bool = False,
        eval_batch_end_callback: BatchCallbacks = None,
        on_nan: str = "stop",
    ) -> str:
        """Train from ``begin_epoch`` to ``num_epoch``.

        Collective with a store of several workers, with the same arguments. Arrays and datasets hold the data of the
        whole job, and each worker reads its own share of each batch (loads: GANGLINE_WORK_LOAD_LIST, one number per
        worker, or "auto" to measure them); a DataLoader or iterable holds this worker's own batches, and an epoch ends
        when the last worker has no more of them. Callbacks are called on every worker; rank 0 logs and writes
        checkpoints. If the store was created here, a worker that fails leaves the job: the others get a DeadNodeError,
        and the job can be resumed from a checkpoint.

        A callback that returns True ends training after the current update or epoch, and so does a signal inside
        `stop_on`. In a job the request of one worker ends all of them after the same update: workers exchange requests
        about twice a second, at most 100 updates apart (with dist_async after every 100 updates, or at the end of an
        epoch if each worker has batches of its own). `Checkpoint` callbacks then save.

        If the program has not configured logging, progress is printed to stderr.

        Args:
            train_data: a tuple (data, label) of tensors, arrays or dicts of them, or a Dataset, both with
                ``batch_size``; or a DataLoader or another iterable of (data, label) batches, which is iterated once per
                epoch.
            eval_data: validation data, in the same forms.
            eval_metric: argument of `gangline.models.metrics.metric.create`.
            num_epoch: total number of epochs, including those of a resumed run.
            batch_size: number of samples in a batch over all contexts of all workers.
            lengths: cost of each sample of a Dataset by its index, such as its number of tokens: a sequence, or a
                function from an index. Workers then get parts of each batch in descending order of length, of equal
                cost / load; a worker's contexts share its padded part by samples. Loads "auto" follow measured cost per
                second, and leave no worker idle. One worker trains as without lengths.
            padding: with ``lengths``, True if a part costs its number of samples times its longest sample; False: the
                sum of lengths.
            collate_fn: function that joins a list of samples of a Dataset into (data, label), for eval_data too, such
                as one that pads texts; if reading processes call it, it must be importable. None: torch's default.
            shuffle: read arrays and datasets in a random order that depends on seed and epoch.
            seed: seed of the order and of the contexts' random streams.
            begin_epoch: number of the first epoch.
            kvstore: argument of `init_optimizer`. An optimizer that the user has set with `init_optimizer` is kept,
                with a warning if ``optimizer`` differs; one set by an earlier `fit` is replaced. A store that this
                module has created by the same name is kept.
            optimizer: argument of `init_optimizer`.
            optimizer_params: argument of `init_optimizer`; None: torch's defaults.
            batch_end_callback: one or several, called after each update with a `BatchEndParam`: index of the update's
                last batch, and this worker's share of that batch (None: no samples). A callback's ``close()`` is called
                at the end; its ``state()`` and ``load_state(state)``, of plain data, are used for checkpoints.
            epoch_end_callback: one or several, called after each epoch with (epoch, network, params, buffers); with
                ``shard="weights"`` the last two are empty except on rank 0. Callbacks that save are called last, after
                validation.
            eval_end_callback: one or several, called after each validation, such as `EarlyStopping`.
            validation_metric: metric for validation; None: ``eval_metric``.
            resume: a checkpoint prefix (its newest checkpoint), (prefix, epoch), or "auto": the newest checkpoint of
                this call's `Checkpoint` callbacks, or a new run if there is none. After a restart by `gangline launch
                --max-restarts` or torchrun, the newest checkpoint of the job's earlier starts takes precedence.
            accumulate: number of batches per update. The gradient is that of the mean over all their valid elements.
                The last update of an epoch may have fewer batches.
            lr_scheduler: learning rate of each update: argument of `schedule`, such as ("cosine", {"warmup_epochs":
                1}), or a function from an optimizer to a torch scheduler, which steps after each epoch
                (``TorchScheduler(function, "batch")``: after each update). None: constant, or set by callbacks.
            eval_frequency: number of epochs between validations, or (number, "batches"); the end is always validated.
            initializer: argument of `init_params`, which is called before training if this, ``arg_params`` or
                ``aux_params`` is given.
            arg_params: argument of `init_params`.
            aux_params: argument of `init_params`.
            allow_missing: argument of `init_params`.
            force_init: argument of `init_params`.
            eval_batch_end_callback: one or several, called after each batch of a validation.
            on_nan: "stop": a loss or a weight that is not finite ends training on all workers, and no checkpoint is
                saved. "continue": only log a warning.

        Returns:
            The reason for the end: "epochs" if all are done; "callback", or the ``reason`` attribute of the callback
            ("patience" of `EarlyStopping`); "diverged" if a loss or a weight was not finite; the name of the signal,
            such as "SIGTERM"; or "left" on a worker that has left an elastic job.

        Raises:
            TypeError: if an argument has a wrong type.
            ValueError: if an argument is invalid, or a checkpoint belongs to another run.
            MismatchError: if workers have different data, batch sizes, epochs or checkpoints.
            FileNotFoundError: if the checkpoint does not exist.
        """
        arguments = locals()
        options = FitOptions(**{option.name: arguments[option.name] for option in fields(FitOptions)})
        try:
            return fit(self, train_data, eval_data, eval_metric, options)
        finally:
            self._optimizer.release_parameters()

    def score(
        self,
        eval_data: Any,
        eval_metric: Any = "acc",
        *,
        batch_size: int | None = None,
        num_batch: int | None = None,
        batch_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
        score_end_callback: BatchCallback | Iterable[BatchCallback] | None = None,
        epoch: int = 0,
    ) -> list[tuple[str, float]]:
        """Evaluate a metric over data, in evaluation mode, and return a list of (name, value).

        Collective in a job, from `init_optimizer` on: the workers split arrays and datasets, and all return the value
        over all samples. ``batch_end_callback`` sees the worker's own samples.

        Args:
            eval_data: as for `fit`.
            eval_metric: argument of `gangline.models.metrics.metric.create`.
            batch_size: number of samples in a batch over all contexts of all workers, for arrays and datasets.
            num_batch: maximum number of batches.
            batch_end_callback: one or several, called after each batch.
            score_end_callback: one or several, called at the end.
            epoch: epoch passed to callbacks.
        """
        on_batch, at_end = evaluation.as_list(batch_end_callback), evaluation.as_list(score_end_callback)
        return evaluation.score(self, eval_data, eval_metric, batch_size, num_batch, on_batch, at_end, epoch)

    def predict(self, data: Any, *, batch_size: int | None = None, num_batch: int | None = None) -> Any:
        """Return the outputs for all samples, in order, on the host, in evaluation mode.

        Collective in a job, from `init_optimizer` on: the workers split arrays and datasets; rank 0 gets all outputs,
        the others None. From a DataLoader or iterable each worker gets the outputs of its own batches.

        Args:
            data: a tensor, array or dict of them, or the data of `fit`; labels are ignored.
            batch_size: number of samples in a batch over all contexts of all workers, for arrays and datasets.
            num_batch: maximum number of batches.

        Raises:
            ValueError: if there is no batch.
        """
        return evaluation.predict(self, data, batch_size, num_batch)

    def iter_predict(
        self, data: Any, *, batch_size: int | None = None, num_batch: int | None = None
    ) -> Iterator[tuple[Any, int, Any]]:
        """Yield (outputs, batch index, data) for each batch, in order; outputs are on the first context.

        In a job each worker gets its share of each batch, and skips batches in which it has no samples. Arguments are
        those of `predict`. With ``shard="weights"`` all workers must iterate to the end, or to the same ``num_batch``.
        """
        return evaluation.iter_predict(self, data, batch_size, num_batch)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        prefix: str | Path,
        epoch: int | str,
        *,
        network: nn.Module,
        load_optimizer_states: bool = False,
        **options: Any,
    ) -> Module:
        """Create a module with the parameters of a checkpoint.

        Args:
            prefix: as for `save_checkpoint`.
            epoch: as for `save_checkpoint`.
            network: network to load the parameters into; checkpoints contain no code.
            load_optimizer_states: make `init_optimizer` start from the checkpoint's optimizer state.
            options: further arguments of `Module`.

        Raises:
            FileNotFoundError: if the checkpoint does not exist.
            ValueError: if a file is damaged, or has extra names, other shapes, or no optimizer state.
            RuntimeError: if names are missing from it.
        """
        saved = checkpoint.read(prefix, epoch)
        module = cls(network, **options)
        if module.bound.lazy_parameters():
            network.load_state_dict(as_named_by(network, saved.params))  # gives lazy parameters their shapes
        with checkpoint.naming(saved.path):
            module.set_params(saved.params)
        module.run_state.metadata.update(saved.metadata)
        module._params_set = True
        if load_optimizer_states:
            module._pending_optimizer_state = saved.require_optimizer_state()
        return module

    # -- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads, and close the store if it was created here; the network keeps its weights.

        With ``shard="weights"`` a worker keeps its own shard only, and the network can no longer be used: call
        `get_params` or `save_params` first.
        """
        self._close_store()
        self._shares = []  # the last batch
        self.bound.close()

    def leave(self) -> None:
        """Leave the job if the store was created here, so that other workers do not wait for this one."""
        if self._optimizer.owns_store:
            self._close_store()

    def _close_store(self) -> None:
        self._optimizer.close()
        self._set_optimizer(NoOptimizer())
        self.bound.join(self.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

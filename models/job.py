"""The job: a network with its replicas, loss and optimizer, before any step is made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from gangline.collectives.compression import parse
from gangline.collectives.context import Context, contexts
from gangline.collectives.host_memory import keep_freed_memory
from gangline.collectives.workload import check_work_load_list
from gangline.kvstore import KVStore
from gangline.kvstore.default_store import job_store
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec, check_learning_rate
from gangline.kvstore.registry import IN_PROCESS
from gangline.models.data.batches import Batch, as_batch, map_tensors, num_samples, zeros_of
from gangline.models.executor.executor import Executor, Share, call_network
from gangline.models.load_balance.controller import LoadBalancer
from gangline.models.loss.accumulation import Weighting
from gangline.models.loss.loss_scale import LossScale
from gangline.models.loss.summed_loss import Loss, Normalizer, SummedLoss
from gangline.models.replicas import Replicas
from gangline.models.updates import Request, Updates
from gangline.models.workers import Workers


class Job:
    """What is trained, where and by what: a network with its replicas, loss and optimizer."""

    def __init__(
        self,
        network: nn.Module,
        loss: Loss = None,
        context: str | Context | Sequence[Context] = "auto",
        work_load_list: Sequence[float] | str | None = None,
        fixed_param_names: Sequence[str] | None = None,
        compression_params: Mapping[str, Any] | None = None,
        sync_batchnorm: bool = False,
        loss_normalizer: Normalizer | None = None,
        logger: logging.Logger | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Describe the job; replicas are made when they are first needed.

        Args:
            network: takes a batch's data, as one argument, or as several where the data is a tuple or dict.
            loss: a torch loss or a function of (output, label); None takes the network's output as the loss.
            context: one, a list, or words for `contexts`. "parallel" stands for all processes of the job that the
                environment tells of: the store "local", which `init_optimizer` and `fit` take unless told otherwise,
                is then the one that joins them, see `job_store`.
            work_load_list: one number >= 0 a context, in any unit; 0 leaves a context idle; None: equal loads. "auto"
                measures the contexts while they train, splits by their speed, looks again every epoch, and has a
                context whose share does not fit into its memory run it in micro-steps.
            fixed_param_names: parameters that are not trained.
            compression_params: how gradients travel to the store, such as ``{"type": "2bit", "threshold": 0.03}``, in
                units of the mean over the global batch; see `KVStore.set_gradient_compression`.
            sync_batchnorm: take batch statistics over all replicas.
            loss_normalizer: what a loss of one's own divides by, as a function of the label; else samples.
            logger: where fit logs; None: "gangline".
            autocast: torch.bfloat16 or torch.float16: forward computes in it where torch's autocast does, parameters
                and gradients stay as they are. With float16 the loss is scaled, and steps that overflow are skipped.

        Raises:
            TypeError: a wrong type.
            ValueError: contexts that are not there, bad loads, unknown names, a loss that cannot be split.
        """
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Module")
        self.network = network
        self.contexts = contexts(context)
        self._job_store = job_store() if context == "parallel" else None
        self.logger = logger or logging.getLogger("gangline")
        self.auto: LoadBalancer | None = None
        """What ``work_load_list="auto"`` has found out."""
        if isinstance(work_load_list, str):
            if work_load_list != "auto":
                raise ValueError(f"work_load_list is {work_load_list!r}; expected one number a context, or 'auto'")
            self.auto = LoadBalancer(self.contexts, self.logger)
            work_load_list = self.auto.loads
        self.work_load_list = check_work_load_list(work_load_list, len(self.contexts))
        self._compression = parse(compression_params).params if compression_params is not None else None
        self._sync_batchnorm = bool(sync_batchnorm)
        self._autocast = _checked_autocast(autocast)
        self.loss_scale = LossScale() if autocast is torch.float16 else None
        """Of float16's loss."""
        self.seed = 0
        self.loss = SummedLoss(loss, loss_normalizer)
        self._fixed = self._known_parameters(fixed_param_names or ())
        self._step = 0
        self._for_training = True
        self._inputs_need_grad = False
        self.grad_req = "write"
        """What backwards before an `update` add up to; see `bind`."""
        self._weighting = Weighting()
        self._replicas: Replicas | None = None
        self._passes: Executor | None = None
        self._updates: Updates | None = None
        self.optimizer_request: Request | None = None
        """What `init_optimizer` was last asked for."""
        self.optimizer_is_fits = False
        """Whether `fit` asked; what the user asked for himself stays."""
        self._pending_state: OptimizerState | None = None
        self.workers = Workers()
        """The job this one is a worker of, from `init_optimizer` on."""
        self._shares: list[Share] = []
        self._has_no_samples = False
        self._normalizer = 0.0
        self._input_factor = 1.0
        self._gradients_used = True

    def _known_parameters(self, names: Sequence[str]) -> list[str]:
        if isinstance(names, str):
            raise TypeError(f"fixed_param_names is {names!r}; expected a list of names")
        known = [name for name, _ in self.network.named_parameters()]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"fixed_param_names has {unknown}, which are no parameters; they are {known}")
        return list(names)

    def bind(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        grad_req: str = "write",
    ) -> None:
        """Make the replicas before the first batch comes.

        Args:
            data_shapes: the shape of a batch's data, such as ``(64, 1, 28, 28)``, or a tuple, list or dict of shapes.
            label_shapes: the same for labels.
            for_training: what ``forward`` does when ``is_train`` is not given.
            inputs_need_grad: whether ``get_input_grads`` will be asked.
            grad_req: "write": each backward's gradients are those of its own batch's mean, and what several of them
                before an ``update`` give is added. "add": several backwards before an ``update`` give the gradients of
                the mean over all their batches, each valid element counted once.

        Raises:
            ValueError: the batch sizes of the shapes differ, or an unknown ``grad_req``.
        """
        if grad_req not in ("write", "add"):
            raise ValueError(f"grad_req is {grad_req!r}; expected 'write' or 'add'")
        if self._replicas is not None:
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
        self._make_replicas(zeros)

    @property
    def binded(self) -> bool:
        """Whether the replicas are made (MXNet's spelling)."""
        return self._replicas is not None

    @property
    def has_lazy_parameters(self) -> bool:
        """Whether parameters have no shape before a batch has come."""
        return bool(self._lazy_parameters())

    def bind_to(self, data: Any) -> None:
        """Make the replicas for batches like ``data``."""
        self._make_replicas(as_batch(data, "data"))

    def _lazy_parameters(self) -> list[str]:
        return [
            name
            for name, parameter in self.network.named_parameters()
            if isinstance(parameter, nn.parameter.UninitializedParameter)
        ]

    @property
    def replicas(self) -> Replicas:
        """The replicas, made when they are first asked for."""
        return self._make_replicas(None)

    @property
    def passes(self) -> Executor:
        """What runs the replicas."""
        self._make_replicas(None)
        assert self._passes is not None
        return self._passes

    def _make_replicas(self, data: Batch | None) -> Replicas:
        if self._replicas is None:
            if any(context.device_type == "cpu" for context in self.contexts):
                keep_freed_memory()
            self._materialise(data)
            loads = self.work_load_list if self.auto is None else [1] * len(self.contexts)
            self._replicas = Replicas(self.network, self.contexts, loads, self._fixed)
            self._passes = Executor(
                self._replicas.all,
                self.loss,
                sync_batchnorm=self._sync_batchnorm,
                autocast=self._autocast,
                measure=self.auto is not None,
            )
        return self._replicas

    def _materialise(self, data: Batch | None) -> None:
        """Run the network once where it has lazy layers, which learn their shapes from data."""
        lazy = self._lazy_parameters()
        if not lazy:
            return
        if data is None:
            raise RuntimeError(f"parameters {lazy} have no shape yet; call bind(data_shapes) or forward() first")
        training = self.network.training
        self.network.eval()
        with torch.no_grad():
            inputs = map_tensors(lambda tensor: tensor[:1].cpu(), data)
            call_network(self.network.cpu(), inputs)
        self.network.train(training)

    def init_optimizer(
        self, kvstore: str | KVStore | None = "local", optimizer: Any = "sgd", optimizer_params: Any = None
    ) -> None:
        """Choose who sums gradients and updates weights; calling it again begins with fresh optimizer state.

        With a store of several workers all of them call it; rank 0's parameters and buffers win.

        Args:
            kvstore: a store's name, a store, or None. One context needs no store, and pays nothing for a name.
            optimizer: a name or a class of torch.optim; see `OptimizerSpec.parse`.
            optimizer_params: its arguments, by torch's names or MXNet's.

        Raises:
            ValueError: an unknown store, optimizer, argument or parameter name; None with several contexts.
            TypeError: a wrong type.
        """
        spec = OptimizerSpec.parse((optimizer, dict(optimizer_params or {})))
        store = self._joining(kvstore)
        replicas = self.replicas
        replicas.read_what_is_trained()
        spec.check_keys(name for name, _ in self.network.named_parameters())
        if not replicas.first.parameters:
            raise ValueError("the network has no parameter that is trained")
        own_store = self._updates.store if self._updates is not None else None
        updates = Updates(replicas, store, spec, own_store, self._compression, self._pending_state, len(self.contexts))
        try:
            self._join(updates.workers)
        except BaseException:
            updates.close()
            raise
        self._pending_state = None
        if self._updates is not None:
            self._updates.let_go()
            if updates.store is not own_store:
                self._updates.close()
        if self._compression is not None and updates.store is None:
            self.logger.warning("one context alone sends no gradients, so compression_params changes nothing")
        self._updates = updates
        self.optimizer_request = (kvstore, optimizer, dict(optimizer_params or {}))
        self.optimizer_is_fits = False

    @property
    def store_type(self) -> str | None:
        """The name of the store that sums and updates; None before `init_optimizer`, and for one context alone."""
        store = self._updates.store if self._updates is not None else None
        return store.type if store is not None else None

    def _joining(self, kvstore: str | KVStore | None) -> str | KVStore | None:
        """The store asked for; for context "parallel" one that joins the job's processes."""
        if self._job_store is None:
            return kvstore
        if kvstore in ("local", None):
            return self._job_store
        if kvstore in IN_PROCESS:
            raise ValueError(
                f"kvstore is {kvstore!r}, which does not leave this process, but context is 'parallel', all processes "
                f"of the job; leave kvstore out ({self._job_store!r} serves here), or name an allreduce or dist_* store"
            )
        return kvstore

    def _join(self, workers: Workers) -> None:
        """Be one of these workers."""
        if workers.count > 1 and self._sync_batchnorm:
            raise ValueError(
                f"sync_batchnorm=True joins batch statistics over the contexts of one worker, not over {workers.count} "
                "workers yet; leave it out, or use one worker with more contexts"
            )
        self.workers = workers
        self.passes.first_context = workers.first_context
        self.take_over_first()

    def take_over_first(self) -> None:
        """Give every worker's replicas what rank 0 has beside the store's keys: buffers, what is not trained."""
        if self.workers.count > 1:
            trained = self.replicas.first.parameters
            others = {name: tensor for name, tensor in self.replicas.state_dict().items() if name not in trained}
            self.replicas.load_state_dict(self.workers.agree_on_tensors(others))

    @property
    def optimizer_initialized(self) -> bool:
        """Whether `init_optimizer` was called."""
        return self._updates is not None

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate; RuntimeError before `init_optimizer`."""
        return self._needs_updates("learning_rate").learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next update on."""
        check_learning_rate(learning_rate)
        self._needs_updates("set_learning_rate()").set_learning_rate(learning_rate)

    def optimizer_state(self) -> OptimizerState:
        """A copy of the optimizer's state, on the host; RuntimeError before `init_optimizer`."""
        return self._needs_updates("optimizer_state()").state()

    def _needs_updates(self, call: str) -> Updates:
        if self._updates is None:
            raise RuntimeError(f"{call} came before init_optimizer(); call it first")
        return self._updates

    def compression_residuals(self) -> dict[str, torch.Tensor]:
        """What gradient compression has left out so far, on the host; see `KVStore.compression_residuals`."""
        return self._updates.compression_residuals() if self._updates is not None else {}

    @property
    def step(self) -> int:
        """Training batches run so far; the random streams of the contexts depend on it."""
        return self._step

    def close(self) -> None:
        """End the threads, and the store if it was made here; the network keeps its weights."""
        self._close_store()
        self._shares = []
        if self._passes is not None:
            self._passes.close()
        self._replicas = self._passes = None

    def leave(self) -> None:
        """Close the store, if it was made here: other workers then learn that they wait for this one in vain."""
        if self._updates is not None and self._updates.owns_store:
            self._close_store()

    def _close_store(self) -> None:
        if self._updates is not None:
            self._updates.close()
        self._updates = None
        self.workers = Workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_autocast(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is {dtype!r}; expected torch.bfloat16, torch.float16 or None")
    return dtype

"""Forward and backward passes over the replicas, in parallel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import TypeVar

import torch
from torch import nn

from gangline.kvstore.context import Context
from gangline.kvstore.freed_memory import keep_freed_memory
from gangline.models.batchnorm.distributed_batchnorm import Direction
from gangline.models.batchnorm.sync_batchnorm import JointBatchNorm, ThreadBarrier
from gangline.models.data.batches import Batch, call_network, evaluating, map_tensors, move, take, tensors_of
from gangline.models.elapsed_time import ElapsedTime, mark
from gangline.models.executor.device_threads import DeviceThreads
from gangline.models.loss.explanation import explain_forward, explain_loss
from gangline.models.loss.summed_loss import SummedLoss
from gangline.models.random_streams import generator_of, mixed_seed, stream
from gangline.models.replicas import Replica, Replicas
from gangline.models.sample_dropout import ReplicaDropout, SampleDropout
from gangline.models.workers import Workers

_log = logging.getLogger("gangline")
_random_state = methodcaller("get_state")
_T = TypeVar("_T")
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # host allocator, CUDA, cuBLAS and cuDNN
Root = tuple["Share", list[torch.Tensor], list[torch.Tensor | None]]
"""A share, the tensors its backward starts from, and their gradients (None: 1)."""


@dataclass
class Share:
    """Result of one replica's forward on its share of a batch."""

    replica: Replica
    samples: int
    inputs: Batch
    label: Batch | None  # labels of the share, on the context's device
    output: Batch
    loss: torch.Tensor | None  # loss summed over the share; None without a label
    count: float  # the share's part of the batch's normalizer

    @property
    def has_graph(self) -> bool:
        """True if backward can start from the loss."""
        return self.loss is not None and self.loss.requires_grad


class Executor:
    """A network bound to contexts: its replicas, each of which runs in its context's thread or on its device.

    Replicas and threads are created by `bind`, or when the replicas are first read, so that lazy layers can take their
    shapes from a batch.
    """

    def __init__(
        self,
        network: nn.Module,
        contexts: Sequence[Context],
        loads: Sequence[float],
        fixed: Sequence[str],
        loss: SummedLoss,
        *,
        sync_batchnorm: bool,
        autocast: torch.dtype | None,
        measure: bool,
        dropout_by_sample: bool,
    ) -> None:
        """Record the arguments of `Module`, with which `bind` creates the replicas; ``measure``: time each replica."""
        self.network, self.sync_batchnorm, self.dropout_by_sample = network, sync_batchnorm, dropout_by_sample
        self._contexts, self._loads, self._fixed = list(contexts), list(loads), list(fixed)
        self._loss, self._autocast, self._measure = loss, autocast, measure
        self._created: Replicas | None = None
        self._batchnorm: JointBatchNorm | None = None
        self._times: list[ElapsedTime] = []  # of each replica, if they are timed
        self.out_of_memory: list[int] = []
        """Indices of the contexts that may have run out of memory in the last failed pass."""
        self._workers = Workers()

    @property
    def is_bound(self) -> bool:
        """True if the replicas exist."""
        return self._created is not None

    @property
    def replicas(self) -> Replicas:
        """The replicas; RuntimeError while lazy parameters have no shape."""
        if self._created is None:
            self.bind(None)
        assert self._created is not None
        return self._created

    def lazy_parameters(self) -> list[str]:
        """Return the names of parameters that have no shape yet."""
        named = self.network.named_parameters()
        return [name for name, one in named if isinstance(one, nn.parameter.UninitializedParameter)]

    def bind(self, data: Batch | None) -> None:
        """Create replicas and threads, if they do not exist, for batches like ``data``."""
        if self._created is not None:
            return
        if any(context.device_type == "cpu" for context in self._contexts):
            keep_freed_memory()
        self._initialize_lazy_layers(data)
        replicas = Replicas(self.network, self._contexts, self._loads, self._fixed)
        contexts = [replica.context for replica in replicas.all]
        self._devices = [context.torch_device for context in contexts]
        self._networks = [replica.network for replica in replicas.all]
        self._generators = [*map(generator_of, {*self._devices})]
        self._shares_generator = len(self._generators) < len(contexts)
        self._has_replica_dropout = self._shares_generator and not self.dropout_by_sample
        self._draws_dropout = False  # by generators of the replicas
        if self.sync_batchnorm and len(contexts) > 1:
            self._batchnorm = JointBatchNorm(self._networks)
        # Whether it draws from a device's generator, which replicas must not share; None before the first run.
        self._is_random: bool | None = False if self._shares_generator else None
        # Timing also needs threads: a single backward call over all replicas has a single end.
        self._threads = DeviceThreads(contexts, always=self._batchnorm is not None or self._measure)
        self._created, self._replicas = replicas, replicas.all
        if self._measure:
            self.start_timers()

    def _initialize_lazy_layers(self, data: Batch | None) -> None:
        """Run lazy layers once on the batch's first sample, which gives their parameters shapes."""
        lazy = self.lazy_parameters()
        if not lazy:
            return
        if data is None:
            raise RuntimeError(f"parameters {lazy} have no shape yet; call bind(data_shapes) or forward() first")
        with evaluating([self.network]), torch.no_grad():
            call_network(self.network.cpu(), map_tensors(lambda tensor: tensor[:1].cpu(), data))

    def join(self, workers: Workers) -> None:
        """Join the steps of these workers. Collective among synchronous workers."""
        if workers.in_step:
            workers.check_same({"sync_batchnorm": self.sync_batchnorm}, "init_optimizer")
        device = None
        if self.sync_batchnorm and workers.count > 1:
            if not workers.in_step:
                raise ValueError(
                    f"sync_batchnorm=True needs {workers.count} workers in step, and those of an asynchronous store "
                    "are not; use an allreduce or dist_sync store, or leave sync_batchnorm out"
                )
            self._batchnorm = self._batchnorm or JointBatchNorm(self._networks)
            has_one_gpu = len(self._devices) == 1 and self._devices[0].type == "cuda" and workers.gathers_tensors
            device = self._devices[0] if all(workers.all_gather(has_one_gpu, "init_optimizer")) else None
        if self._batchnorm is not None:
            self._batchnorm.join(workers, device)
        self._workers = workers

    @property
    def joins_workers(self) -> bool:
        """True if batch statistics are synchronized over several workers."""
        return self.sync_batchnorm and self._workers.count > 1

    def forward(
        self,
        data: Batch,
        label: Batch | None,
        slices: Sequence[slice],
        *,
        train: bool,
        inputs_need_grad: bool,
        seed: tuple[int, ...],
        divisor: float | None = None,
        first_sample: int = 0,
    ) -> list[Share]:
        """Run the network on each replica's slice of the batch; replicas with an empty slice do not run.

        Without a label there is no loss, unless the output is the loss. With ``divisor`` of the loss, which needs
        `can_fuse_backward`, each replica runs backward at once. Random streams depend on ``seed`` (seed and step) and
        on the number of the batch's first sample within the global batch.
        """
        active = self.active_replicas(slices)

        def call(index: int) -> Share:
            part = slices[self._replicas[index].context_index]
            share = self._forward(index, data, label, part, first_sample, train, inputs_need_grad, seed)
            if divisor is not None and share.loss is not None and share.has_graph:
                torch.autograd.backward(share.loss / divisor)
            return share

        def monitored(index: int) -> Share:
            return self._monitored(partial(call, index), (index,), barrier, timed=train)

        calls = [(index, partial(monitored, index)) for index in active]
        self.out_of_memory.clear()
        joint = self._joint("forward", active) if train else contextlib.nullcontext()
        if train:
            self._start_training()
        with contextlib.nullcontext() if train else evaluating(self._networks), joint as barrier:
            before = [*map(_random_state, self._generators)] if train and self._is_random is False else ()
            shares = self._threads.run(calls)
            if not all(map(torch.equal, before, map(_random_state, self._generators))):
                if self._has_replica_dropout or self.dropout_by_sample or not self._shares_generator:
                    self._found_random(True)
                self._has_replica_dropout = self._shares_generator
                _log.warning(
                    "the network began to draw random numbers; from the next batch on each context has a stream of its "
                    "own"
                )
            elif train:
                self._has_replica_dropout = self._draws_dropout
        if divisor is not None:
            _check_loss_has_graph(shares)
        return shares

    def forward_without_samples(self) -> None:
        """Take part in the other workers' forward in training mode, if batch statistics are synchronized over them."""
        if self.joins_workers:
            self._start_training()
            with self._joint("forward", []):
                pass

    def active_replicas(self, slices: Sequence[slice]) -> list[int]:
        """Return the indices of the replicas whose slice has samples."""
        return [
            index
            for index, replica in enumerate(self._replicas)
            if slices[replica.context_index].stop > slices[replica.context_index].start
        ]

    @property
    def can_fuse_backward(self) -> bool:
        """True if replicas can run backward right after forward without a barrier, which saves a thread hand-over."""
        return self._threads.uses_threads and self._batchnorm is None and self._is_random is False

    def _joint(self, name: Direction, active: Sequence[int]) -> contextlib.AbstractContextManager[ThreadBarrier | None]:
        """Run a pass in the block, with a barrier if batch statistics are synchronized."""
        return contextlib.nullcontext() if self._batchnorm is None else self._batchnorm.running(name, active)

    def _forward(
        self,
        index: int,
        data: Batch,
        label: Batch | None,
        part: slice,
        first_sample: int,
        train: bool,
        inputs_need_grad: bool,
        seed: tuple[int, ...],
    ) -> Share:
        replica = self._replicas[index]
        device, samples = self._devices[index], part.stop - part.start
        host_label = None if label is None else take(label, part)
        inputs, moved_label = move(take(data, part), device), None if label is None else move(host_label, device)
        if inputs_need_grad:
            inputs = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), inputs)
        seeded = train and self._is_random is not False
        own_seed = *seed, self._workers.first_context + replica.context_index
        drew: list[bool] = []
        dropout: ReplicaDropout | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(train))
            if seeded:
                drew = stack.enter_context(stream(device, *own_seed))
            if train and self._has_replica_dropout:
                dropout = stack.enter_context(ReplicaDropout(mixed_seed(*own_seed), device))
            if train and self.dropout_by_sample:
                is_joint = self._workers.in_step or self._workers.is_elastic  # a batch is that of all workers
                rank = 0 if is_joint else self._workers.rank
                key = mixed_seed(*seed[:2], rank)  # micro-steps use the masks of their batch
                stack.enter_context(SampleDropout(key, first_sample + part.start, samples))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(device.type, self._autocast))
            try:
                output = call_network(replica.network, inputs)
            except Exception as error:
                explain_forward(error, replica.network, inputs)
                raise
            loss, count = None, 0.0
            if label is not None or self._loss.loss is None:
                try:
                    loss, count = self._loss.sum_and_count(output, moved_label, host_label, samples)
                except Exception as error:
                    explain_loss(error, self._loss.loss, output, moved_label, host_label)
                    raise
        if dropout is not None:
            self._draws_dropout |= dropout.has_drawn
        if seeded:
            self._found_random(drew[0])
        if train:
            replica.samples_seen += samples
        return Share(replica, samples, inputs, moved_label, output, loss, count)

    def _found_random(self, drew: bool) -> None:
        """Record whether a forward drew random numbers from the device's generator; dropout by sample draws none."""
        if drew and self.dropout_by_sample:
            raise RuntimeError(
                "the network draws random numbers other than by dropout, dropout1d, dropout2d or dropout3d (attention "
                "and recurrent layers have a dropout of their own), which random='sample' cannot give to each sample; "
                "use random='context'"
            )
        if drew and self._shares_generator:
            raise RuntimeError(
                "the network draws random numbers other than by dropout, from a generator that its contexts share; "
                "start a process for each context (gangline launch, context='parallel'), or draw by "
                "torch.nn.functional.dropout, neither checkpointed nor compiled"
            )
        self._is_random = bool(self._is_random) or drew

    def backward(self, shares: Sequence[Share], divisor: float) -> None:
        """Run backward from the losses of the shares, each divided by ``divisor``."""
        _check_loss_has_graph(shares)
        roots: list[Root] = [
            (share, [share.loss / divisor], [None]) for share in shares if share.loss is not None and share.has_graph
        ]
        if self._batchnorm is not None and roots:
            # A share without a loss of its own still contributed to the other replicas' batch statistics.
            for share in shares:
                outputs = [tensor for tensor in tensors_of(share.output) if tensor.requires_grad]
                if not share.has_graph and outputs:
                    roots.append((share, outputs, [torch.zeros_like(output) for output in outputs]))
        self._run_backward(roots)

    def backward_from(self, shares: Sequence[Share], out_grads: Batch) -> None:
        """Run backward from the outputs, given their gradients for the whole batch."""
        start = 0
        roots: list[Root] = []
        for share in shares:
            part = move(take(out_grads, slice(start, start + share.samples)), share.replica.context.torch_device)
            roots.append((share, tensors_of(share.output), list(tensors_of(part))))
            start += share.samples
        self._run_backward(roots)

    def _run_backward(self, roots: Sequence[Root]) -> None:
        active = [self._replicas.index(share.replica) for share, _, _ in roots]

        def run(indices: list[int], tensors: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
            backward = partial(torch.autograd.backward, tensors, grads) if tensors else lambda: None
            self._monitored(backward, indices, barrier)

        with self._joint("backward", active) as barrier:
            if self._threads.uses_threads:
                calls = [(index, partial(run, [index], *root[1:])) for index, root in zip(active, roots, strict=True)]
                self._threads.run(calls)
            else:  # one call over all replicas: distinct GPUs run in parallel without Python in between
                run(active, [t for _, ts, _ in roots for t in ts], [g for _, _, gs in roots for g in gs])

    def _start_training(self) -> None:
        """Switch all replicas to training mode.

        Submodules frozen with ``.eval()`` in the user's network are frozen in every replica.
        """
        first, *others = self._networks
        if not first.training:
            first.train()
        for other in others:
            for mine, theirs in zip(first.modules(), other.modules(), strict=True):
                theirs.training = mine.training

    def _monitored(
        self, call: Callable[[], _T], indices: Sequence[int], barrier: ThreadBarrier | None, *, timed: bool = True
    ) -> _T:
        """Run replicas, time each (without barrier waits), and record contexts that run out of memory."""
        measured = indices if self._times and timed else ()
        try:
            began = [*map(mark, map(self._devices.__getitem__, measured))]
            if barrier is None or self._batchnorm is None:
                result = call()
            else:
                with contextlib.ExitStack() as stack:
                    for index in indices:
                        stack.enter_context(self._batchnorm.section(barrier, index))
                    result = call()
            for index, begin in zip(measured, began, strict=True):
                self._times[index].add(begin, mark(self._devices[index]))
                if barrier is not None:  # where a GPU's stream is idle as well
                    self._times[index].on_host -= barrier.waited[index]
            return result
        except Exception as error:
            if is_out_of_memory(error):
                self.out_of_memory += [self._replicas[index].context_index for index in indices]
            raise

    def start_timers(self) -> None:
        """Start timing replicas; GPUs that share one backward call are timed until all of them have finished."""
        self._times = self._times or [ElapsedTime() for _ in self._replicas]

    def take_times(self) -> list[ElapsedTime]:
        """Return each replica's compute time since the last call; an empty list if replicas are not timed."""
        taken, self._times = self._times, [ElapsedTime() for _ in self._times]
        return taken

    def close(self) -> None:
        """Stop the threads and drop the replicas; the network keeps its weights."""
        if self._created is not None:
            self._threads.close()
        self._created, self._batchnorm, self._times = None, None, []


def _check_loss_has_graph(shares: Sequence[Share]) -> None:
    if not any(share.has_graph for share in shares) and any(share.count for share in shares):
        raise RuntimeError("the loss depends on no parameter that is trained; backward has nothing to do")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is an out-of-memory error of torch or Python."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)

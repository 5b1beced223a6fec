"""`Pipeline`: pipeline parallelism over several contexts, which run different micro-batches at once."""

from __future__ import annotations

import copy
import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from gangline.kvstore.context import Context, Device
from gangline.kvstore.context import contexts as contexts_of
from gangline.kvstore.workload import split_batch
from gangline.models.arguments import check_int
from gangline.models.data.batches import (
    Batch,
    as_batch,
    checked_batch,
    map_tensors,
    move,
    num_samples,
    take,
    tensors_of,
)
from gangline.models.loss.summed_loss import Loss, SummedLoss
from gangline.models.random_streams import mixed_seed
from gangline.models.sample_dropout import SampleDropout

Groups = Mapping[str, Device] | Sequence[Device] | Literal["auto"]
"""Contexts of a pipeline, by the names of layers or in order."""
MEASURED_RUNS = 3
BYTES_PER_PARAMETER_BYTE = 4
"""Memory of a layer's weights, gradients and two moments of the optimizer, in times its weights."""


@dataclass(frozen=True)
class _Replica:
    """A copy of the network whose stages lie on contexts of its own."""

    network: nn.Sequential
    contexts: list[Context]
    stages: list[list[tuple[int, nn.Module]]]
    """Layers of each stage, with their numbers."""


class Pipeline(nn.Module):
    """A chain of layers, cut into stages on several contexts. Its gradients are those of one device.

    `forward_backward` cuts a batch into micro-batches. Stages run different micro-batches at once, in the 1F1B
    schedule. Gradients add up to that of the mean over the batch, so any torch optimizer, or a `Trainer` over several
    such processes, updates the parameters afterwards. Layers that compute statistics of a batch, such as BatchNorm,
    compute those of a micro-batch; dropout is drawn by sample (see `SampleDropout`).

    Several groups of contexts are data parallel: each holds a copy of the network and computes a share of the batch.
    ``network`` is the first copy. Its weights are copied to the others before each batch, and its gradients are the
    sums.

    For example:

        pipeline = Pipeline(network, torch.nn.CrossEntropyLoss(), {"lstm1": gpu(0), "lstm2": gpu(1)}, micro_batches=8)
        optimizer = torch.optim.Adam(pipeline.parameters())
        for data, label in loader:
            optimizer.zero_grad()
            loss = pipeline.forward_backward(data, label)
            optimizer.step()
    """

    def __init__(
        self,
        network: nn.Sequential,
        loss: Loss,
        group2ctxs: Groups | Sequence[Groups] = "auto",
        *,
        work_load_list: Sequence[float] | None = None,
        micro_batches: int = 4,
        sample: Any = None,
        speeds: Sequence[float] | None = None,
        memory: Sequence[float | None] | None = None,
        seed: int = 0,
    ) -> None:
        """Cut the network into stages, and move each to its context.

        Args:
            network: the layers, in order; each takes the output of the one before it, a tensor or a tuple of them.
            loss: as for `Module`.
            group2ctxs: context of the layers by name: a layer that is not named is on the context of the layer before
                it. A list of contexts, or "auto", all of them: the layers are cut by their measured time, so that the
                slowest stage is as fast as possible. A list of such dicts or lists: a copy of the network on each.
            work_load_list: relative speed of each copy, by which it gets its part of a batch; None: equal parts.
            micro_batches: number of micro-batches of a copy's part; a smaller part has one for each sample.
            sample: data of a micro-batch, to measure the layers; required to cut by time.
            speeds: relative speed of each context; None: equal ones.
            memory: bytes of each context; None: the free memory of GPUs, and no limit for the host.
            seed: seed of the dropout.

        Raises:
            TypeError: if the network is not an `nn.Sequential`.
            ValueError: if a name is unknown, contexts go back and forth, there are fewer layers than contexts, or the
                loads do not fit the copies.
        """
        super().__init__()
        if not isinstance(network, nn.Sequential):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Sequential of its layers")
        check_int("micro_batches", micro_batches)
        self.network = network
        self.micro_batches = micro_batches
        self._loss, self._seed, self._step = SummedLoss(loss, None), seed, 0
        several = not isinstance(group2ctxs, str | Mapping) and any(
            isinstance(one, Mapping | list | tuple) for one in group2ctxs
        )
        groups: list[Any] = list(group2ctxs) if several else [group2ctxs]
        self._loads = list(work_load_list or [1.0] * len(groups))
        if len(self._loads) != len(groups):
            raise ValueError(
                f"work_load_list has {len(self._loads)} numbers; expected {len(groups)}, one for each copy"
            )
        networks = [network, *(copy.deepcopy(network) for _ in groups[1:])]
        names = list(network._modules)  # named_children() leaves out the second of two equal layers
        self._replicas: list[_Replica] = []
        for own, group in zip(networks, groups, strict=True):
            if isinstance(group, Mapping):
                begins, contexts = _cut_by_name(names, group)
            else:
                contexts = contexts_of("auto" if isinstance(group, str) else list(group))
                begins = self._cut_by_time(own, contexts, sample, speeds, memory)
            self._replicas.append(_placed(own, begins, contexts))
        self.contexts = [context for replica in self._replicas for context in replica.contexts]
        self.stages = [[names[number] for number, _ in stage] for replica in self._replicas for stage in replica.stages]
        """Names of the layers on each context."""
        self.idle: list[float] = []
        """Share of the last step in which each context waited for others."""

    def forward(self, data: Any) -> Any:
        """Return the output of the first copy for a batch, on its last context; the stages run one after another."""
        first = self._replicas[0]
        for stage, context in zip(first.stages, first.contexts, strict=True):
            data = move(data, context.torch_device)
            for _, layer in stage:
                data = layer(data)
        return data

    def forward_backward(self, data: Any, label: Any = None) -> torch.Tensor:
        """Run a batch forward and backward, and add the gradient of its mean loss to every ``.grad``.

        Args:
            data: the batch, with samples on the first axis.
            label: its labels.

        Returns:
            The mean loss, on the host.

        Raises:
            Exception: the first error of a stage, after all stages have stopped.
        """
        data, label = checked_batch(data, label)
        samples = num_samples(data, "data")
        divisor = self._loss.known_normalizer(label, samples)
        key = mixed_seed(self._seed, self._step)
        self._step += 1
        self._copy_to_replicas()
        parts = zip(self._replicas, split_batch(samples, self._loads), strict=True)
        steps = [
            _Step(self, replica, data, label, _micro_batches(part, self.micro_batches), key, divisor or 1.0)
            for replica, part in parts
            if part.stop > part.start
        ]
        earlier = [] if divisor else [(one, one.grad) for one in self.parameters()]
        for parameter, _ in earlier:
            parameter.grad = None
        _run_together([step.run for step in steps])
        errors = [error for step in steps for error in step.errors]
        if errors:
            raise errors[0]
        self._add_gradients()
        self.idle = [idle for step in steps for idle in step.idle]
        divisor = divisor or sum(count for step in steps for _, count in step.losses) or 1.0
        for parameter, gradient in earlier:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return torch.stack([loss.detach().cpu() for step in steps for loss, _ in step.losses]).sum() / divisor

    @torch.no_grad()
    def _copy_to_replicas(self) -> None:
        """Give the other copies the weights, buffers and modes of the first."""
        for replica in self._replicas[1:]:
            for one, other in zip(self.network.modules(), replica.network.modules(), strict=True):
                other.training = one.training
            for weight, theirs in zip(self.network.parameters(), replica.network.parameters(), strict=True):
                theirs.requires_grad_(weight.requires_grad).copy_(weight)
                theirs.grad = None
            for buffer, own in zip(self.network.buffers(), replica.network.buffers(), strict=True):
                own.copy_(buffer)

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Add the gradients of the other copies to those of the first."""
        for replica in self._replicas[1:]:
            for weight, theirs in zip(self.network.parameters(), replica.network.parameters(), strict=True):
                if theirs.grad is not None:
                    gradient = theirs.grad.to(weight.device)
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                    theirs.grad = None

    def _cut_by_time(
        self,
        network: nn.Sequential,
        contexts: Sequence[Context],
        sample: Any,
        speeds: Sequence[float] | None,
        memory: Sequence[float | None] | None,
    ) -> list[int]:
        count = len(contexts)
        if count == 1:
            return [0]
        if sample is None:
            raise ValueError("sample is None; expected the data of a micro-batch, to measure the layers with")
        for name, values in (("speeds", speeds), ("memory", memory)):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} numbers; expected {count}, one for each context")
        limits = memory or [
            float(torch.cuda.mem_get_info(context.torch_device)[0]) if context.device_type == "gpu" else None
            for context in contexts
        ]
        seconds, nbytes = measured_layers(network, sample, contexts[0], self.micro_batches)
        return cut(seconds, nbytes, speeds or [1.0] * count, limits)


@dataclass
class _Step:
    """One pass of a share of a batch through the stages of a copy of the network, each stage in a thread."""

    pipeline: Pipeline
    replica: _Replica
    data: Batch
    label: Batch | None
    slices: list[slice]
    """Micro-batches of the part."""
    key: int
    """Seed of the batch's dropout."""
    divisor: float
    """Number by which gradients of the summed loss are divided."""
    errors: list[BaseException] = field(default_factory=list)
    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    """Summed loss of each micro-batch, and the number to divide it by."""
    idle: list[float] = field(default_factory=list)
    """Share of the time in which each stage waited."""

    def __post_init__(self) -> None:
        count = len(self.replica.contexts)
        self._forward: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._backward: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._waited = [0.0] * count

    def run(self) -> None:
        """Run all stages, until they have ended."""
        began = time.perf_counter()
        _run_together([partial(self._run, stage) for stage in range(len(self.replica.contexts))])
        seconds = time.perf_counter() - began
        self.idle = [waited / seconds for waited in self._waited]

    def _run(self, stage: int) -> None:
        try:
            self._run_passes(stage)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            self.errors.append(error)
            for waiting in (*self._forward, *self._backward):
                waiting.put(None)

    def _run_passes(self, stage: int) -> None:
        contexts = self.replica.contexts
        last = len(contexts) - 1
        kept: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number, is_forward in one_forward_one_backward(stage, last + 1, len(self.slices)):
            if is_forward:
                received = take(self.data, self.slices[number]) if not stage else self._next(self._forward, stage)
                kept[number] = self._run_forward(stage, number, received)
            else:
                inputs, outputs = kept.pop(number)
                grads = self._next(self._backward, stage) if stage < last else [None] * len(outputs)
                pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
                if pairs:
                    torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
                if stage:
                    before = contexts[stage - 1].torch_device
                    self._backward[stage - 1].put(
                        [one.grad if one.grad is None else one.grad.to(before) for one in inputs]
                    )

    def _run_forward(self, stage: int, number: int, received: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run a micro-batch; return the tensors that gradients arrive at, and those that backward starts from."""
        pipeline, replica, part = self.pipeline, self.replica, self.slices[number]
        device = replica.contexts[stage].torch_device
        received = move(received, device)
        if stage:
            received = map_tensors(lambda one: one.detach().requires_grad_(one.is_floating_point()), received)
        samples = part.stop - part.start
        with torch.enable_grad():
            output: Any = received
            for layer_number, layer in replica.stages[stage]:
                key = mixed_seed(self.key, layer_number)  # the same however the layers are cut
                with SampleDropout(key, part.start, samples) if pipeline.training else nullcontext():
                    output = layer(output)
            if stage < len(replica.contexts) - 1:
                self._forward[stage + 1].put(map_tensors(lambda one: one.detach(), output))
                starts = [one for one in tensors_of(output) if one.is_floating_point()]
            else:
                own = take(self.label, part) if self.label is not None else None
                on_device = move(own, device) if own is not None else None
                loss, count = pipeline._loss.sum_and_count(output, on_device, own, samples)
                if loss is None:
                    raise pipeline._loss.error_without_loss(output)
                self.losses.append((loss, count))
                starts = [loss / self.divisor]
        inputs = [one for one in tensors_of(received) if one.is_floating_point()] if stage else []
        return inputs, starts

    def _next(self, queues: Sequence[queue.SimpleQueue[Any]], stage: int) -> Any:
        began = time.perf_counter()
        found = queues[stage].get()
        self._waited[stage] += time.perf_counter() - began
        if found is None:
            raise _StageFailed
        return found


def _run_together(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls at once, the first one in this thread."""
    threads = [threading.Thread(target=call) for call in calls[1:]]
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:
        thread.join()


class _StageFailed(Exception):  # noqa: N818  the error of the other stage is raised
    """Another stage has failed."""


def _placed(network: nn.Sequential, begins: Sequence[int], contexts: list[Context]) -> _Replica:
    """Cut a copy of the network into stages that begin at these layers, and move each to its context."""
    layers = list(enumerate(network))
    stages = [layers[begin:end] for begin, end in pairwise([*begins, len(layers)])]
    for stage, context in zip(stages, contexts, strict=True):
        for _, layer in stage:
            layer.to(context.torch_device)
    return _Replica(network, contexts, stages)


def _micro_batches(part: slice, most: int) -> list[slice]:
    """Return the micro-batches of a part of a batch, one sample each at least."""
    samples = part.stop - part.start
    count = min(most, samples)
    bounds = [part.start + samples * number // count for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _cut_by_name(names: Sequence[str], group2ctxs: Mapping[str, Device]) -> tuple[list[int], list[Context]]:
    """Return the first layer of each stage and its context."""
    unknown = [name for name in group2ctxs if name not in names]
    if unknown:
        raise ValueError(f"group2ctxs names {unknown}; expected names of layers: {list(names)}")
    if names[0] not in group2ctxs:
        raise ValueError(f"group2ctxs does not name the first layer, {names[0]!r}; expected its context")
    begins: list[int] = []
    found: list[Context] = []
    for index, name in enumerate(names):
        if name in group2ctxs:
            [context] = contexts_of(group2ctxs[name])
            if not found or context != found[-1]:
                if context in found:
                    raise ValueError(
                        f"group2ctxs has {context} again at layer {name!r}; expected the layers of a context to follow "
                        "one another"
                    )
                begins.append(index)
                found.append(context)
    return begins, found


def measured_layers(network: nn.Sequential, data: Any, context: Context, kept: int) -> tuple[list[float], list[float]]:
    """Return seconds and bytes of each layer for micro-batches, of which a stage keeps at most ``kept``.

    Copies are measured: the network and torch's generators are left as they are.

    Returns:
        Seconds of forward and backward of each layer, the median of three runs; and the bytes of its weights, gradients
        and two moments, and of its outputs.
    """
    device = context.torch_device
    received = move(as_batch(data, "sample"), device)
    seconds, nbytes = [], []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        for layer in network:
            own = copy.deepcopy(layer).to(device)
            times = []
            for _ in range(MEASURED_RUNS + 1):  # the first one allocates
                given = map_tensors(lambda one: one.detach().requires_grad_(one.is_floating_point()), received)
                began = time.perf_counter()
                output = own(given)
                starts = [one for one in tensors_of(output) if one.requires_grad]
                torch.autograd.backward(starts, [torch.ones_like(one) for one in starts])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - began)
            seconds.append(statistics.median(times[1:]))
            weights = sum(parameter.nbytes for parameter in own.parameters())
            outputs = sum(one.nbytes for one in tensors_of(output))
            nbytes.append(float(BYTES_PER_PARAMETER_BYTE * weights + kept * outputs))
            received = output
    return seconds, nbytes


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[int, bool]]:
    """Return the passes of a stage, (micro-batch, is_forward), in 1F1B order (PipeDream-Flush; Narayanan et al. 2021).

    A stage runs forward until the first gradient can come back, then forward and backward in turn, so it keeps the
    activations of at most ``stages - stage`` micro-batches.
    """
    ahead = min(stages - stage - 1, micro_batches)
    order = [(number, True) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [(number + ahead, True), (number, False)]
    return order + [(number, False) for number in range(micro_batches - ahead, micro_batches)]


def cut(
    seconds: Sequence[float],
    nbytes: Sequence[float],
    speeds: Sequence[float],
    memory: Sequence[float | None],
) -> list[int]:
    """Return the first layer of each stage such that the slowest stage is as fast as possible.

    The seconds are those of a layer's forward and backward on a device of speed 1. The memory of a device is in bytes;
    None: no limit.
    """
    layers, stages = len(seconds), len(speeds)
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds are {list(speeds)}; expected numbers above 0")
    if layers < stages:
        raise ValueError(f"there are {layers} layers for {stages} contexts; expected a layer for each")
    # cheapest[end]: slowest stage and begins of the first stages over the layers before ``end``; PipeDream's partition
    cheapest: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for speed, limit in zip(speeds, memory, strict=True):
        following: dict[int, tuple[float, list[int]]] = {}
        for begin, (slowest, begins) in cheapest.items():
            for end in range(begin + 1, layers + 1):
                if limit is not None and sum(nbytes[begin:end]) > limit:
                    break
                found = max(slowest, sum(seconds[begin:end]) / speed)
                if end not in following or found < following[end][0]:
                    following[end] = found, [*begins, begin]
        cheapest = following
    best = cheapest.get(layers)
    if best is None:
        short = sum(nbytes) - sum(math.inf if limit is None else limit for limit in memory)
        lacks = f"which is {_megabytes([short])} MB too little for all" if short > 0 else "enough for all"
        raise ValueError(
            f"the layers need {_megabytes(nbytes)} MB, in this order, and the contexts have {_megabytes(memory)}, "
            f"{lacks}: they cannot be divided such that each context has one layer or more and room for its own; use "
            "larger or fewer contexts, or smaller micro-batches"
        )
    return best[1]


def _megabytes(sizes: Sequence[float | None]) -> str:
    return ", ".join("enough" if size is None else f"{size / 1e6:.3g}" for size in sizes)

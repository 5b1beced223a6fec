"""`Pipeline`: a network whose layers lie on several contexts, which work at once on different micro-batches."""

from __future__ import annotations

import copy
import queue
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from gangline.collectives.context import Context, Device
from gangline.collectives.context import contexts as contexts_of
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
from gangline.models.pipelines.schedule import cut, one_forward_one_backward
from gangline.models.random_streams import mixed_seed
from gangline.models.sample_dropout import SampleDropout

_MEASURED_RUNS = 3
_BYTES_PER_PARAMETER_BYTE = 4
"""Memory of a layer's weights, gradients and two moments of the optimizer, in times its weights."""


class Pipeline(nn.Module):
    """A chain of layers, cut into stages on several contexts. Its gradients are those of one device.

    `forward_backward` cuts a batch into micro-batches. While a stage runs one of them, the stage before it runs the
    next one, in the order of 1F1B. Gradients add up to that of the mean over the batch, so any torch optimizer, or a
    `Trainer` over several such processes, updates the parameters afterwards. Layers that compute statistics of a batch,
    such as BatchNorm, compute those of a micro-batch; dropout is drawn by sample (see `SampleDropout`).

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
        group2ctxs: Mapping[str, Device] | Sequence[Device] | Literal["auto"] = "auto",
        *,
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
                slowest stage is as fast as possible.
            micro_batches: number of micro-batches of a batch; a smaller batch has one for each sample.
            sample: data of a micro-batch, to measure the layers with; needed to cut by time.
            speeds: relative speed of each context; None: equal ones.
            memory: bytes of each context; None: the free memory of GPUs, and no limit for the host.
            seed: seed of the dropout.

        Raises:
            TypeError: if the network is no `nn.Sequential`.
            ValueError: if a name is unknown, contexts go back and forth, or there are fewer layers than contexts.
        """
        super().__init__()
        if not isinstance(network, nn.Sequential):
            raise TypeError(f"network is a {type(network).__name__}; expected a torch.nn.Sequential of its layers")
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}; expected 1 or more")
        self.network = network
        self.micro_batches = micro_batches
        self._loss, self._seed, self._step = SummedLoss(loss, None), seed, 0
        names = [name for name, _ in network.named_children()]
        if isinstance(group2ctxs, Mapping):
            begins, self.contexts = _cut_by_name(names, group2ctxs)
        else:
            self.contexts = contexts_of("auto" if isinstance(group2ctxs, str) else list(group2ctxs))
            begins = self._cut_by_time(sample, speeds, memory)
        ends = [*begins[1:], len(names)]
        self.stages = [list(names[begin:end]) for begin, end in zip(begins, ends, strict=True)]
        """Names of the layers of each stage."""
        self._stages = [network[begin:end] for begin, end in zip(begins, ends, strict=True)]
        for stage, context in zip(self._stages, self.contexts, strict=True):
            stage.to(context.torch_device)
        self.idle: list[float] = []
        """Share of the last step in which each stage waited for others."""

    def forward(self, data: Any) -> Any:
        """Return the output for a batch, on the last context; the stages run one after another."""
        for stage, context in zip(self._stages, self.contexts, strict=True):
            data = stage(move(data, context.torch_device))
        return data

    def forward_backward(self, data: Any, label: Any = None) -> torch.Tensor:
        """Run a batch forward and backward, and add the gradient of its mean loss to every ``.grad``.

        Args:
            data: the batch; its first axis is the samples'.
            label: its labels.

        Returns:
            The mean loss, on the host.

        Raises:
            Exception: the first error of a stage, after all stages have stopped.
        """
        data, label = checked_batch(data, label)
        samples = num_samples(data, "data")
        count = min(self.micro_batches, samples)
        bounds = [samples * number // count for number in range(count + 1)]
        slices = [slice(begin, end) for begin, end in pairwise(bounds)]
        step = _Step(self, data, label, slices, mixed_seed(self._seed, self._step))
        self._step += 1
        earlier = [] if step.knows_divisor else [(one, one.grad) for one in self.parameters()]
        for parameter, _ in earlier:
            parameter.grad = None
        total, self.idle = step.run()
        for parameter, gradient in earlier:
            if parameter.grad is not None:
                parameter.grad.div_(step.divisor)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return total

    def _cut_by_time(
        self, sample: Any, speeds: Sequence[float] | None, memory: Sequence[float | None] | None
    ) -> list[int]:
        count = len(self.contexts)
        if count == 1:
            return [0]
        if sample is None:
            raise ValueError("sample is None; expected the data of a micro-batch, to measure the layers with")
        for name, values in (("speeds", speeds), ("memory", memory)):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} numbers; expected {count}, one for each context")
        limits = memory or [
            float(torch.cuda.mem_get_info(context.torch_device)[0]) if context.device_type == "gpu" else None
            for context in self.contexts
        ]
        seconds, nbytes = measured_layers(self.network, sample, self.contexts[0], self.micro_batches)
        return cut(seconds, nbytes, speeds or [1.0] * count, limits)


class _Step:
    """A batch on its way through the stages, each in a thread."""

    def __init__(self, pipeline: Pipeline, data: Batch, label: Batch | None, slices: list[slice], key: int) -> None:
        self._pipeline, self._data, self._label, self._slices, self._key = pipeline, data, label, slices, key
        count = len(pipeline.contexts)
        self._forward: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._backward: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(count)]
        self._errors: list[BaseException] = []
        self._waited = [0.0] * count
        self._losses: list[tuple[torch.Tensor, float]] = []
        known = pipeline._loss.known_normalizer(label, slices[-1].stop)
        self.knows_divisor = known is not None
        """Whether gradients are those of the mean; otherwise of the sum, to be divided by `divisor` after the step."""
        self.divisor = known or 1.0

    def run(self) -> tuple[torch.Tensor, list[float]]:
        """Run all stages; return the mean loss, and the share of time in which each stage waited."""
        began = time.perf_counter()
        count = len(self._pipeline.contexts)
        threads = [
            threading.Thread(target=self._run, args=(stage,), name=f"stage {stage}") for stage in range(1, count)
        ]
        for thread in threads:
            thread.start()
        self._run(0)
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        seconds = time.perf_counter() - began
        if not self.knows_divisor:
            self.divisor = sum(count for _, count in self._losses) or 1.0
        total = torch.stack([loss.detach().cpu() for loss, _ in self._losses]).sum() / self.divisor
        return total, [waited / seconds for waited in self._waited]

    def _run(self, stage: int) -> None:
        try:
            self._run_passes(stage)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            self._errors.append(error)
            for waiting in (*self._forward, *self._backward):
                waiting.put(None)

    def _run_passes(self, stage: int) -> None:
        """Run the passes of a stage."""
        pipeline, last = self._pipeline, len(self._pipeline.contexts) - 1
        kept: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number, is_forward in one_forward_one_backward(stage, last + 1, len(self._slices)):
            if is_forward:
                received = take(self._data, self._slices[number]) if not stage else self._next(self._forward, stage)
                kept[number] = self._run_forward(stage, number, received)
            else:
                inputs, outputs = kept.pop(number)
                grads = self._next(self._backward, stage) if stage < last else [None] * len(outputs)
                pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
                if pairs:
                    torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
                if stage:
                    self._backward[stage - 1].put(
                        [
                            one.grad.to(pipeline.contexts[stage - 1].torch_device) if one.grad is not None else None
                            for one in inputs
                        ]
                    )

    def _run_forward(self, stage: int, number: int, received: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run a micro-batch; return the tensors that gradients arrive at, and those that backward starts from."""
        pipeline, part = self._pipeline, self._slices[number]
        device = pipeline.contexts[stage].torch_device
        received = move(received, device)
        if stage:
            received = map_tensors(lambda one: one.detach().requires_grad_(one.is_floating_point()), received)
        samples = part.stop - part.start
        key = mixed_seed(self._key, stage)
        dropout = SampleDropout(key, part.start, samples) if pipeline.training else nullcontext()
        with torch.enable_grad(), dropout:
            output = pipeline._stages[stage](received)
            if stage < len(pipeline.contexts) - 1:
                self._forward[stage + 1].put(map_tensors(lambda one: one.detach(), output))
                starts = [one for one in tensors_of(output) if one.is_floating_point()]
            else:
                own = take(self._label, part) if self._label is not None else None
                on_device = move(own, device) if own is not None else None
                loss, count = pipeline._loss.sum_and_count(output, on_device, own, samples)
                if loss is None:
                    raise pipeline._loss.error_without_loss(output)
                self._losses.append((loss, count))
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


class _StageFailed(Exception):  # noqa: N818  the error of the other stage is raised
    """Another stage has failed."""


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
    """Return seconds and bytes of each layer, on copies: the network and torch's generators are left as they are.

    Args:
        network: the layers.
        data: a micro-batch.
        context: where to measure.
        kept: number of micro-batches whose activations a stage may keep.

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
            for _ in range(_MEASURED_RUNS + 1):  # the first one allocates
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
            nbytes.append(float(_BYTES_PER_PARAMETER_BYTE * weights + kept * outputs))
            received = output
    return seconds, nbytes

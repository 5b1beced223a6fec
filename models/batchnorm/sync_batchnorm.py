"""Synchronized batch normalization over the replicas of a module, or of all workers of a job.

The replicas of a worker exchange moments at a `ThreadBarrier`; a `WorkerRounds` joins the barriers of several workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gangline.collectives.engine import host_staging
from gangline.kvstore.group.remote_errors import error_name, error_text, make_error
from gangline.kvstore.group.serialization import dtype_named, name_of_dtype
from gangline.models.batchnorm.distributed_batchnorm import (
    Direction,
    DistributedBatchNorm,
    Moments,
    check_own_forward,
    combined,
    normalize,
    update_running_statistics,
)
from gangline.models.workers import Workers

State = Literal["in a layer", "finished", "without samples", "failed"]
Value = TypeVar("Value")


class JointBatchNorm:
    """Replicas of a network whose batch normalization layers share the statistics of the whole batch.

    They do so inside a section, wherever torch's layer would use batch statistics. Layers frozen with ``.eval()``
    are left alone, and a section leaves nothing behind on the network. Forward and backward of each replica run in a
    thread of its own, and the threads exchange moments and their gradients at a barrier.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Check that the layers can be synchronized: none overrides forward."""
        self.networks = list(networks)
        self._workers: Workers | None = None  # None: no other worker's replicas take part
        self._device: torch.device | None = None
        for network in self.networks:
            _layers(network)

    def join(self, workers: Workers, device: torch.device | None) -> None:
        """Synchronize with the replicas of these workers; ``device``: GPU that exchanges moments; None: the host."""
        self._workers, self._device = workers if workers.count > 1 else None, device

    @contextmanager
    def running(self, name: Direction, active: Sequence[int]) -> Iterator[ThreadBarrier | None]:
        """Return a context manager for a pass over the replicas with samples; its barrier is for their sections.

        Without a barrier, torch's own layers do. Collective if workers have joined, also for those without samples.
        """
        rounds = WorkerRounds(self._workers, name, self._device) if self._workers is not None else None
        if rounds is None:
            yield ThreadBarrier(active) if len(active) > 1 else None
        elif active:
            with rounds.running():
                yield ThreadBarrier(active, rounds=rounds)
        else:
            rounds.follow(self.follow)
            yield None
        if active:
            self._copy_to_idle(active)  # also after backward: recomputed layers update running statistics again

    @contextmanager
    def section(self, barrier: ThreadBarrier, index: int) -> Iterator[None]:
        """Return a context manager that synchronizes a replica's layers; enter it around its pass, in its thread.

        Autograd then uses the calling thread for GPUs too. Its own thread of a GPU is one for all replicas on it, which
        would wait for each other there.
        """
        replaced: list[_BatchNorm] = []
        try:
            for name, layer in _layers(self.networks[index]):
                layer.forward = _JointForward(layer, name, barrier, index)  # type: ignore[method-assign]
                replaced.append(layer)
            with torch.autograd.set_multithreading_enabled(False):
                yield
        except BaseException as error:
            barrier.abort(error)
            raise
        finally:
            for layer in replaced:
                del layer.forward
        barrier.leave(index)

    def follow(self, values: Sequence[Sequence[Any]]) -> None:
        """Update running statistics by a round of other workers, for a worker that has no samples in this batch."""
        _, direction, name, *_ = values[0]
        if direction == "forward":
            shares = _checked(values)
            for network in self.networks:
                layer = network.get_submodule(name)
                assert isinstance(layer, _BatchNorm)
                device = next((buffer.device for buffer in layer.buffers(recurse=False)), torch.device("cpu"))
                on_device = _from_host(shares, device)
                update_running_statistics(layer, *combined(on_device, device), sum(share.size for share in shares))

    def _copy_to_idle(self, active: Sequence[int]) -> None:
        """Copy running statistics to replicas without a share of a batch from a replica with a share."""
        for target in [network for index, network in enumerate(self.networks) if index not in active]:
            for (_, layer), (_, other) in zip(_layers(self.networks[active[0]]), _layers(target), strict=True):
                theirs = dict(other.named_buffers(recurse=False))
                for name, value in layer.named_buffers(recurse=False):
                    theirs[name].copy_(value)


def _layers(network: nn.Module) -> list[tuple[str, _BatchNorm]]:
    found = []
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, (nn.SyncBatchNorm, DistributedBatchNorm)):
            check_own_forward(name, layer, "or leave out sync_batchnorm")
            found.append((name, layer))
    return found


@dataclass(eq=False)
class _JointForward:
    """Replacement of a layer's ``forward`` inside a section."""

    layer: _BatchNorm
    name: str
    barrier: ThreadBarrier
    index: int

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        layer = self.layer
        if layer.training or (layer.running_mean is None and layer.running_var is None):  # torch then uses the batch
            return normalize(layer, input, self.exchange)
        return _BatchNorm.forward(layer, input)

    def exchange(self, direction: Direction, own: Moments) -> list[Moments]:
        """All-gather moments over the replicas in this layer."""
        call = self if direction == "forward" else self.layer.__dict__.get("forward")
        if not isinstance(call, _JointForward) or call.barrier.participants != self.barrier.participants:
            raise RuntimeError(
                f"batch normalization {self.name!r} has joint statistics of replicas {self.barrier.participants}; "
                "expected its backward in a section, with a barrier of all of these"
            )
        barrier, rounds, device = call.barrier, call.barrier.rounds, own.mean.device
        if rounds is not None:
            label = f"rank {rounds.rank}, replica {self.index}"
            given = _on_host(own) if rounds.device is None else own
            return _from_host(_checked(barrier.exchange(self.index, (label, direction, self.name, given))), device)
        ready = None
        if own.mean.is_cuda:  # other threads read the value on other streams
            ready = torch.cuda.current_stream(device).record_event()
        received = barrier.exchange(self.index, (str(self.index), direction, self.name, own, ready))
        for *_, event in received:
            if event is not None:
                torch.cuda.current_stream(event.device).wait_event(event)
        return _checked(received)


def _on_host(own: Moments) -> Moments:
    """Copy moments to the host; the caller waits once if they are on a GPU."""
    return Moments(own.size, *host_staging.flat_values(torch.cat([own.mean, own.squares])).chunk(2))


def _from_host(shares: Sequence[Moments], device: torch.device) -> list[Moments]:
    """Copy moments to a GPU in one asynchronous copy; return other values unchanged."""
    if device.type != "cuda" or not shares[0].mean.is_cpu:
        return list(shares)
    values = torch.cat([value for share in shares for value in (share.mean, share.squares)])
    on_device = torch.empty(values.shape, dtype=values.dtype, device=device)
    host_staging.copy_to_gpus(values, [on_device])
    return [
        Moments(share.size, *part.chunk(2)) for share, part in zip(shares, on_device.chunk(len(shares)), strict=True)
    ]


def _checked(received: Sequence[Sequence[Any]]) -> list[Moments]:
    """Return the moments of a round; RuntimeError if the replicas are in different layers."""
    if len({(direction, name) for _, direction, name, *_ in received}) > 1:
        calls = ", ".join(f"{label}: {direction} of {name!r}" for label, direction, name, *_ in received)
        raise RuntimeError(
            f"replicas are in different layers of batch normalization ({calls}); a network with synchronized batch "
            "statistics must call its layers in the same order on every share of a batch"
        )
    return [Moments(*moments) for _, _, _, moments, *_ in received]


class Aborted(RuntimeError):  # noqa: N818 - it reports no error of its own
    """Raised in waiting threads after another participant failed; that participant's error is the cause."""


class ThreadBarrier:
    """Barrier for a fixed set of participants, one thread each; the n-th `exchange` of each closes round n.

    A participant finishes with `leave`, or with `abort` on failure, so that no other blocks on it forever. A barrier
    serves one pass over a batch.
    """

    def __init__(self, participants: Iterable[int], *, rounds: WorkerRounds | None = None) -> None:
        """Create the barrier; ``rounds`` exchanges with the barriers of other workers, if any."""
        self.participants = sorted(set(participants))
        self.rounds = rounds
        self.waited = dict.fromkeys(self.participants, 0.0)
        """Seconds that each participant has waited for others."""
        self._condition = Condition()
        self._calls = dict.fromkeys(self.participants, 0)
        self._values: dict[int, Any] = {}  # of the open round
        self._result: list[Any] = []  # of the round closed last
        self._rounds = 0
        self._left: set[int] = set()
        self._mismatch = ""
        self._error: BaseException | None = None

    def exchange(self, index: int, value: Value) -> list[Value]:
        """All-gather one value per participant; return them in the order of workers and indices.

        If another participant has failed, or left after fewer calls, an error is raised.
        """
        with self._condition:
            self._calls[index] += 1
            call = self._calls[index]
            self._values[index] = value
            self._check_left()
            if len(self._values) == len(self.participants):
                self._result = [self._values[one] for one in self.participants]
                if self.rounds is not None:
                    began = time.perf_counter()
                    self._result = self.rounds.exchange(self._result)
                    self.waited[index] += time.perf_counter() - began
                self._values = {}
                self._rounds += 1
            self._condition.notify_all()
            self._wait_for(index, lambda: self._rounds >= call)
            return list(self._result)

    def leave(self, index: int) -> None:
        """Mark the participant as finished; participants that wait for another value from it get an error."""
        with self._condition:
            self._left.add(index)
            self._check_left()
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Raise `Aborted`, caused by ``error``, in all participants that wait now or later."""
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    def _wait_for(self, index: int, condition: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._condition.wait_for(lambda: condition() or self._mismatch or self._error is not None)
        self.waited[index] += time.perf_counter() - began
        if condition():  # even after an error: the outcome of a closed round must not depend on thread speed
            return
        if self._mismatch:
            raise RuntimeError(self._mismatch)
        raise Aborted(f"another replica failed with {type(self._error).__name__}: {self._error}") from self._error

    def _check_left(self) -> None:
        """Record a mismatch if participants wait for others that have left."""
        if self._left and self._values and not self._mismatch:
            ended = ", ".join(f"replica {index} after {self._calls[index]}" for index in sorted(self._left))
            waiting = ", ".join(f"replica {index} in call {self._calls[index]}" for index in sorted(self._values))
            self._mismatch = (
                "replicas called batch normalization a different number of times: "
                f"{ended} had ended when {waiting} waited; a network with synchronized batch statistics must call each "
                "layer equally often on every share of a batch"
            )


class WorkerRounds:
    """One pass over a batch on all workers: a round for each call of a layer, and one at the end.

    Every worker takes part in every round. If one fails, the next round raises its error on all others.
    """

    def __init__(self, workers: Workers, name: Direction, device: torch.device | None = None) -> None:
        """Begin a pass of synchronous workers; ``device``: GPU that exchanges the moments; None: the host does."""
        self.rank = workers.rank
        self.device = device
        self._workers, self._name = workers, name
        self._is_over = False

    def exchange(self, values: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return the values of all workers in rank order: label, direction, name of the layer and moments. Collective.

        If another worker has failed or finished the pass, an error is raised on all.
        """
        if self.device is None:
            return self._round("in a layer", list(values))
        ((label, direction, name, own),) = values
        kind = [own.size, len(own.mean), name_of_dtype(own.mean.dtype)]
        headers = self._round("in a layer", [[label, direction, name, [self.rank, *kind]]])
        return self._with_moments(headers, torch.cat([own.mean, own.squares]))

    def _with_moments(self, headers: list[Any], own: torch.Tensor | None = None) -> list[Any]:
        """Gather the moments on the GPUs if all headers name one layer; None: this worker has none. Collective."""
        if len({(direction, name) for _, direction, name, _ in headers}) > 1:
            return headers
        if own is None:
            _, _, channels, dtype = headers[0][-1]
            own = torch.zeros(2 * channels, dtype=dtype_named(dtype), device=self.device)
        gathered = self._workers.all_gather_tensor(own)
        return [
            [label, direction, name, Moments(size, *gathered[rank].chunk(2))]
            for label, direction, name, (rank, size, *_) in headers
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context manager for the whole pass of a worker with samples. Collective at its end."""
        with self._reporting_errors():
            yield
        self._round("finished", [])

    def follow(self, take: Callable[[list[Any]], None]) -> None:
        """Take part in a pass without samples; ``take`` receives the values of each round. Collective."""
        with self._reporting_errors():
            while values := self._round("without samples", []):
                take(values if self.device is None else self._with_moments(values))

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._is_over:  # else all workers already have an error
                self._round("failed", [error_name(error), error_text(error)])
            raise

    def _round(self, state: State, payload: list[Any]) -> list[Any]:
        self._is_over = True  # also after an error in the exchange itself
        received = self._workers.all_gather([state, payload], f"sync_batchnorm, {self._name}")
        for rank, (theirs, failure) in enumerate(received):
            if theirs == "failed" and state != "failed":
                error = make_error(*failure)
                error.add_note(f"Rank {rank} raised this error in {self._name}.")
                raise error
        states = {rank: theirs for rank, (theirs, _) in enumerate(received) if theirs != "without samples"}
        if {"in a layer", "finished"} <= set(states.values()):
            raise RuntimeError(
                "workers called batch normalization a different number of times: in this round "
                f"{', '.join(f'rank {rank} is {theirs}' for rank, theirs in states.items())}; a network with "
                "synchronized batch statistics must call each layer equally often on every share of a batch"
            )
        self._is_over = "in a layer" not in states.values()
        return [] if self._is_over else [value for _, values in received for value in values]

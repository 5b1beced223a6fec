"""Synchronized batch normalization over the replicas of a module, and over those of all workers of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gangline.collectives.engine import host_staging
from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm
from gangline.models.batchnorm.joint_statistics import (
    Direction,
    JointCall,
    Moments,
    check_own_forward,
    combined,
    normalize,
    update_running_statistics,
)
from gangline.models.batchnorm.thread_barrier import ThreadBarrier


class JointBatchNorm:
    """Replicas of a network whose batch normalization layers share the statistics of the whole batch.

    They do so inside a section, wherever torch's layer would use batch statistics. Layers frozen with ``.eval()``
    are left alone, and a section leaves nothing behind on the network. Forward and backward of each replica run in a
    thread of its own, and the threads exchange moments and their gradients at a barrier.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """Check that the layers can be synchronized.

        Raises:
            ValueError: if a layer is a subclass of torch's with a forward of its own.
        """
        self.networks = list(networks)
        for network in self.networks:
            _layers(network)

    @contextmanager
    def forward_section(
        self, barrier: ThreadBarrier, index: int, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Return a context manager that synchronizes a replica's layers; enter it around forward, in its thread.

        The barrier is that of all replicas that have samples in this batch, used for this forward alone.

        Raises:
            Aborted: if another replica failed.
            RuntimeError: if the replicas called different layers, or called them a different number of times.
            ValueError: if the whole batch has one value per channel.
        """
        replaced: list[_BatchNorm] = []
        try:
            barrier.begin(index, generator)
            if len(barrier.participants) > 1 or barrier.rounds is not None:  # torch's own do for a single replica
                for name, layer in _layers(self.networks[index]):
                    layer.forward = _JointForward(layer, name, barrier, index)  # type: ignore[method-assign]
                    replaced.append(layer)
            yield
        except BaseException as error:
            barrier.abort(error)
            raise
        finally:
            for layer in replaced:
                del layer.forward
        barrier.leave(index)

    @contextmanager
    def backward_section(
        self, barrier: ThreadBarrier, index: int, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Return the same for backward, with another barrier of the same participants.

        Autograd then uses the calling thread for GPUs too. Its own thread of a GPU is one for all replicas on it, which
        would wait for each other there.
        """
        with self.forward_section(barrier, index, generator), torch.autograd.set_multithreading_enabled(False):
            yield

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


def copy_statistics(source: nn.Module, targets: Iterable[nn.Module]) -> None:
    """Copy running statistics to replicas that had no share of a batch from one that had."""
    for target in targets:
        for (_, layer), (_, other) in zip(_layers(source), _layers(target), strict=True):
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
class _JointForward(JointCall):
    """Replacement of a layer's ``forward`` inside a section."""

    layer: _BatchNorm
    name: str
    barrier: ThreadBarrier
    index: int

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        layer = self.layer
        if layer.training or (layer.running_mean is None and layer.running_var is None):  # torch then uses the batch
            return normalize(layer, input, self)
        return _BatchNorm.forward(layer, input)

    def exchange(self, direction: Direction, own: Moments) -> list[Moments]:
        """All-gather moments over the replicas in this layer."""
        if direction == "forward":
            return self._exchange(direction, own)
        call = self.layer.__dict__.get("forward")
        if not isinstance(call, _JointForward) or call.barrier.participants != self.barrier.participants:
            raise RuntimeError(
                f"batch normalization {self.name!r} has joint statistics of replicas {self.barrier.participants}; "
                "expected its backward in a backward_section, with a barrier of all of these"
            )
        return call._exchange(direction, own)

    def _exchange(self, direction: Direction, own: Moments) -> list[Moments]:
        rounds, device = self.barrier.rounds, own.mean.device
        if rounds is not None:
            label = f"rank {rounds.rank}, replica {self.index}"
            given = _on_host(own) if rounds.device is None else own
            return _from_host(_checked(self.barrier.exchange(self.index, (label, direction, self.name, given))), device)
        ready = None
        if own.mean.is_cuda:  # other threads read the value on other streams
            ready = torch.cuda.current_stream(device).record_event()
        received = self.barrier.exchange(self.index, (str(self.index), direction, self.name, own, ready))
        for *_, event in received:
            if event is not None:
                torch.cuda.current_stream(event.device).wait_event(event)
        return _checked(received)


def _on_host(own: Moments) -> Moments:
    """Copy moments to the host, for which the caller waits once if they are on a GPU."""
    return Moments(own.size, *host_staging.flat_values(torch.cat([own.mean, own.squares])).chunk(2))


def _from_host(shares: Sequence[Moments], device: torch.device) -> list[Moments]:
    """Copy moments to a GPU in one copy, for which the caller does not wait; others are returned as they are."""
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

"""Replicas: one copy of the network per context, kept equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gangline.collectives.context import Context
from gangline.models.batchnorm.running_statistics import averaged, averaged_over
from gangline.models.workers import Workers


@dataclass(eq=False)
class Replica:
    """A copy of the network on one context."""

    number: int
    """The context's place in the module's list."""
    context: Context
    network: nn.Module
    parameters: dict[str, nn.Parameter]
    """The parameters that are trained."""
    samples_seen: int = 0
    """Training samples since running statistics were last averaged."""


class Replicas:
    """All replicas of a module; contexts without a load have none, and hold no memory."""

    def __init__(
        self,
        network: nn.Module,
        contexts: Sequence[Context],
        loads: Sequence[float],
        fixed: Iterable[str],
    ) -> None:
        """Place the network itself on the first context that has a load, and copies on the others."""
        for name in fixed:
            network.get_parameter(name).requires_grad_(False)
        self.all: list[Replica] = []
        for number, (context, load) in enumerate(zip(contexts, loads, strict=True)):
            if load:
                self.all.append(self._make(number, context, network))

    def _make(self, number: int, context: Context, network: nn.Module) -> Replica:
        own = (copy.deepcopy(network) if self.all else network).to(context.torch_device)
        parameters = {name: parameter for name, parameter in own.named_parameters() if parameter.requires_grad}
        return Replica(number, context, own, parameters)

    def read_what_is_trained(self) -> None:
        """Take over from the user's network which parameters are trained now."""
        trained = {name: parameter.requires_grad for name, parameter in self.first.network.named_parameters()}
        for replica in self.all:
            own = dict(replica.network.named_parameters())
            for name, parameter in own.items():
                parameter.requires_grad_(trained[name])
            replica.parameters = {name: parameter for name, parameter in own.items() if trained[name]}

    def snapshot(self) -> Callable[[], None]:
        """What drops the gradients, and puts back buffers and sample counts as they are now."""
        seen = [replica.samples_seen for replica in self.all]
        buffers = [(b, b.detach().clone()) for replica in self.all for b in replica.network.buffers()]

        @torch.no_grad()
        def put_back() -> None:
            for replica, count in zip(self.all, seen, strict=True):
                replica.samples_seen = count
            for buffer, value in buffers:
                buffer.copy_(value)
            self.clear_gradients()

        return put_back

    def set_gradients_aside(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Take the gradients off the parameters, for `add_gradients` to add them later."""
        parameters = [p for replica in self.all for p in replica.parameters.values() if p.grad is not None]
        kept = [(p, p.grad.detach().clone()) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return kept

    @torch.no_grad()
    def add_gradients(self, kept: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add gradients that were set aside to those there are now."""
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    @property
    def first(self) -> Replica:
        """The replica that holds the user's own network."""
        return self.all[0]

    def clear_gradients(self) -> None:
        """Forget all gradients, so that the next backward begins anew."""
        for replica in self.all:
            for parameter in replica.network.parameters():
                parameter.grad = None

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients there are."""
        for gradient in self.all_gradients():
            gradient.mul_(factor)

    def all_gradients(self) -> Iterator[torch.Tensor]:
        """Every gradient of every replica; of a sparse one its values."""
        for replica in self.all:
            for parameter in replica.parameters.values():
                if parameter.grad is not None:
                    yield parameter.grad if parameter.grad.layout == torch.strided else parameter.grad._values()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The first replica's gradients; parameters that nothing depended on are absent."""
        return {name: p.grad for name, p in self.first.parameters.items() if p.grad is not None}

    def weights(self, name: str) -> list[torch.Tensor]:
        """Parameter ``name`` of each replica."""
        return [replica.parameters[name].data for replica in self.all]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers on the host; buffers that differ (running statistics) averaged by samples seen."""
        state = {
            name: tensor.detach().cpu().clone()
            for name, tensor in self.first.network.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        return state | (averaged(self.own_buffers(), self.samples_seen) if len(self.all) > 1 else {})

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Give these values, by name, to every replica."""
        for replica in self.all:
            own = replica.network.state_dict()
            with torch.no_grad():
                for name, value in state.items():
                    own[name].copy_(value)

    def average_buffers(self, workers: Workers | None = None) -> None:
        """Give every replica, of all ``workers`` too, the average of the buffers that differ, and count samples anew.

        A collective of several workers.
        """
        if workers is not None and workers.count > 1:
            self.load_state_dict(averaged_over(workers, self.own_buffers(), self.samples_seen))
        elif len(self.all) > 1:
            self.load_state_dict(averaged(self.own_buffers(), self.samples_seen))
        for replica in self.all:
            replica.samples_seen = 0

    @property
    def samples_seen(self) -> list[int]:
        """How many samples each replica has trained on since running statistics were last averaged."""
        return [replica.samples_seen for replica in self.all]

    def own_buffers(self) -> dict[str, list[torch.Tensor]]:
        """Each buffer of the state dict, as every replica has it, on the host."""
        names = set(self.first.network.state_dict())
        per_replica = [dict(replica.network.named_buffers(remove_duplicate=False)) for replica in self.all]
        return {
            name: [buffers[name].detach().cpu().clone() for buffers in per_replica]
            for name in per_replica[0]
            if name in names
        }

    def set_own_buffers(self, values: dict[str, list[torch.Tensor]], samples_seen: Sequence[int]) -> None:
        """Put back what `own_buffers` returned, and the samples seen with them."""
        for place, replica in enumerate(self.all):
            buffers = dict(replica.network.named_buffers(remove_duplicate=False))
            for name, of_replicas in values.items():
                buffers[name].copy_(of_replicas[place])
            replica.samples_seen = samples_seen[place]

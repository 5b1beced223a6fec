"""Replicas: one copy of the network per context, kept equal, run side by side."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collectives.context import Context
from models.batch import Batch, map_tensors, move, take, tensors_of
from models.loss import SummedLoss
from models.random_streams import generator_of, stream
from models.side_by_side import SideBySide

_log = logging.getLogger("gangline")


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


@dataclass
class Share:
    """What one replica makes of its part of a batch."""

    replica: Replica
    samples: int
    inputs: Batch
    output: Batch
    loss: torch.Tensor | None
    """The loss as a sum over the share; None without a label."""
    count: float


class Replicas:
    """All replicas of a module; contexts without a load have none, and hold no memory."""

    def __init__(
        self,
        network: nn.Module,
        loss: SummedLoss,
        contexts: Sequence[Context],
        loads: Sequence[float],
        fixed: Iterable[str],
    ) -> None:
        """Place the network itself on the first context that has a load, and copies on the others."""
        for name in fixed:
            network.get_parameter(name).requires_grad_(False)
        self.all: list[Replica] = []
        self._loss = loss
        self._draws: bool | None = None  # whether the network draws random numbers; None until it was seen to run
        for number, (context, load) in enumerate(zip(contexts, loads, strict=True)):
            if load:
                self.all.append(self._make(number, context, network))
        self._side_by_side = SideBySide([replica.context for replica in self.all])

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

    @property
    def first(self) -> Replica:
        """The replica that holds the user's own network."""
        return self.all[0]

    def forward(
        self,
        data: Batch,
        label: Batch | None,
        slices: Sequence[slice],
        *,
        train: bool,
        inputs_need_grad: bool,
        seed: tuple[int, int],
    ) -> list[Share]:
        """Run the network on each replica's slice of the batch.

        Args:
            data: the batch, on the host or any device.
            label: its labels; None computes no loss, unless the output is the loss.
            slices: one a context; a replica whose slice is empty does not run.
            train: training mode, with gradients, or evaluation mode without.
            inputs_need_grad: keep what gradients of the inputs need.
            seed: (seed, step), for the random streams of the contexts.
        """
        places = [(place, r) for place, r in enumerate(self.all) if slices[r.number].stop > slices[r.number].start]

        def call(replica: Replica) -> Callable[[], Share]:
            part = slices[replica.number]
            label_part = take(label, part) if label is not None else None
            samples = part.stop - part.start
            return lambda: self._forward(replica, take(data, part), label_part, samples, train, inputs_need_grad, seed)

        calls = [(place, call(replica)) for place, replica in places]
        with self._mode(train):
            if not train or self._draws is not False:
                return self._side_by_side.run(calls, one_after_another=train)
            with self._watching_generators():
                return self._side_by_side.run(calls)

    @contextlib.contextmanager
    def _watching_generators(self) -> Iterator[None]:
        """Notice a network that draws random numbers now, though it drew none before."""
        generators = [generator_of(device) for device in {replica.context.torch_device for replica in self.all}]
        before = [generator.get_state() for generator in generators]
        yield
        if any(not torch.equal(was, g.get_state()) for was, g in zip(before, generators, strict=True)):
            self._draws = True
            _log.warning(
                "the network began to draw random numbers; from the next batch on each context has a stream of its own"
            )

    def _forward(
        self,
        replica: Replica,
        data: Batch,
        label: Batch | None,
        samples: int,
        train: bool,
        inputs_need_grad: bool,
        seed: tuple[int, int],
    ) -> Share:
        device = replica.context.torch_device
        inputs = move(data, device)
        if inputs_need_grad:
            inputs = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), inputs)
        seeded = train and self._draws is not False
        with torch.set_grad_enabled(train), self._stream(replica, seed) if seeded else contextlib.nullcontext():
            try:
                output = call_network(replica.network, inputs)
            except Exception as error:
                error.add_note(f"its share was {samples} of the batch's samples")
                raise
            loss, count = None, 0.0
            if label is not None or self._loss.loss is None:
                loss, count = self._loss.sum_and_count(
                    output, move(label, device) if label is not None else None, label, samples
                )
        if train:
            replica.samples_seen += samples
        return Share(replica, samples, inputs, output, loss, count)

    @contextlib.contextmanager
    def _stream(self, replica: Replica, seed: tuple[int, int]) -> Iterator[None]:
        """A random stream of the replica's own for this step; what draws from it is noticed."""
        with stream(replica.context.torch_device, *seed, replica.number) as drew:
            yield
        self._draws = bool(self._draws) or drew[0]

    def backward(self, shares: Sequence[Share], normalizer: float) -> None:
        """Add the gradients of the batch's loss, the sum over its normaliser, to those of each replica."""
        roots: list[tuple[Share, list[torch.Tensor], list[torch.Tensor | None]]] = [
            (share, [share.loss / normalizer], [None])
            for share in shares
            if share.loss is not None and share.loss.requires_grad
        ]
        if not roots and normalizer:
            raise RuntimeError("the loss depends on no parameter that is trained; backward has nothing to do")
        self._run_backward(roots)

    def backward_from(self, shares: Sequence[Share], out_grads: Batch) -> None:
        """Add the gradients that follow from those of the outputs, given for the whole batch."""
        start = 0
        roots: list[tuple[Share, list[torch.Tensor], list[torch.Tensor | None]]] = []
        for share in shares:
            part = move(take(out_grads, slice(start, start + share.samples)), share.replica.context.torch_device)
            roots.append((share, tensors_of(share.output), list(tensors_of(part))))
            start += share.samples
        self._run_backward(roots)

    def _run_backward(self, roots: Sequence[tuple[Share, list[torch.Tensor], list[torch.Tensor | None]]]) -> None:
        if not self._side_by_side.uses_threads:  # one call: distinct GPUs then run side by side
            if roots:
                torch.autograd.backward([t for _, ts, _ in roots for t in ts], [g for _, _, gs in roots for g in gs])
            return

        def call(tensors: list[torch.Tensor], grads: list[torch.Tensor | None]) -> Callable[[], None]:
            return lambda: torch.autograd.backward(tensors, grads)

        calls = [(self.all.index(share.replica), call(tensors, grads)) for share, tensors, grads in roots]
        # What a checkpointed layer computes again draws again, from the generator that CPU contexts share.
        self._side_by_side.run(calls, one_after_another=bool(self._draws))

    def clear_gradients(self) -> None:
        """Forget all gradients, so that the next backward begins anew."""
        for replica in self.all:
            for parameter in replica.network.parameters():
                parameter.grad = None

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        """The gradients by parameter, of the replicas that gave one; parameters that nobody touched are absent."""
        found: dict[str, list[torch.Tensor]] = {}
        for name in self.first.parameters:
            grads = [replica.parameters[name].grad for replica in self.all]
            present = [grad for grad in grads if grad is not None]
            if present:
                found[name] = present
        return found

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
        return state | self._averaged_buffers()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Give these values, by name, to every replica."""
        for replica in self.all:
            own = replica.network.state_dict()
            with torch.no_grad():
                for name, value in state.items():
                    own[name].copy_(value)

    def average_buffers(self) -> None:
        """Give every replica the average of the buffers that differ, and count samples anew."""
        if len(self.all) > 1:
            self.load_state_dict(self._averaged_buffers())
        for replica in self.all:
            replica.samples_seen = 0

    def _averaged_buffers(self) -> dict[str, torch.Tensor]:
        seen = [replica.samples_seen for replica in self.all]
        if len(self.all) == 1 or not any(seen):
            return {}
        averages = {}
        for name, values in self.own_buffers().items():
            if all(torch.equal(values[0], value) for value in values[1:]):
                continue
            if values[0].is_floating_point():
                total = torch.stack(
                    [value.double() * count for value, count in zip(values, seen, strict=True) if count]
                )
                averages[name] = (total.sum(0) / sum(seen)).to(values[0].dtype)
            else:
                averages[name] = values[max(range(len(seen)), key=seen.__getitem__)]
        return averages

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

    @contextlib.contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        """Have all replicas train or evaluate for a while.

        Which parts are frozen with ``.eval()`` is read off the user's network, and holds in every replica.
        """
        networks = [replica.network for replica in self.all]
        if train:
            if not networks[0].training:
                networks[0].train()
            for other in networks[1:]:
                for mine, theirs in zip(networks[0].modules(), other.modules(), strict=True):
                    theirs.training = mine.training
            yield
            return
        before = [(module, module.training) for network in networks for module in network.modules()]
        for network in networks:
            network.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.training = training

    def close(self) -> None:
        """End the threads."""
        self._side_by_side.close()


def call_network(network: nn.Module, inputs: Batch) -> Any:
    """Positional arguments from a tuple, keywords from a dict."""
    if isinstance(inputs, dict):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple) else network(inputs)

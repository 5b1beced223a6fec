"""Forward and backward over the replicas, side by side."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gangline.models.batchnorm.sync_batchnorm import Joined, copy_statistics
from gangline.models.data.batches import Batch, map_tensors, move, take, tensors_of
from gangline.models.executor.device_threads import DeviceThreads
from gangline.models.executor.thread_barrier import ThreadBarrier
from gangline.models.load_balance.memory_limits import is_out_of_memory
from gangline.models.loss.summed_loss import SummedLoss
from gangline.models.random_streams import generator_of, stream
from gangline.models.replicas import Replica

_log = logging.getLogger("gangline")
Root = tuple["Share", list[torch.Tensor], list[torch.Tensor | None]]
"""A share, the tensors its backward begins at, and their gradients (None: 1)."""


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
    """What the share adds to the batch's normaliser."""


class Executor:
    """Runs batches through the replicas of a module, each in its context's thread or on its device."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        loss: SummedLoss,
        *,
        sync_batchnorm: bool = False,
        autocast: torch.dtype | None = None,
        measure: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            replicas: all of the module's.
            loss: what is summed over a share.
            sync_batchnorm: join batch statistics over the replicas.
            autocast: the dtype that forward computes in where torch's autocast does; None: the network's own.
            measure: time each replica, for `laps`.

        Raises:
            ValueError: a layer's batch statistics cannot be joined.
        """
        self._replicas = list(replicas)
        self._loss = loss
        self._autocast = autocast
        self._draws: bool | None = None  # whether the network draws random numbers; None until it was seen to run
        contexts = [replica.context for replica in replicas]
        self._joined: Joined | None = None
        if sync_batchnorm and len(replicas) > 1:
            gpus = [context for context in contexts if context.device_type == "gpu"]
            by_graph = len(set(gpus)) < len(gpus)  # one thread of autograd's serves both replicas of such a GPU
            self._joined = Joined([replica.network for replica in replicas], "graph" if by_graph else "threads")
        # Threads, too, where each is to be measured: one backward call for all would end for all at once.
        self._side_by_side = DeviceThreads(contexts, alone=self._joined is not None or measure)
        self._clocks = [_Clock(replica) for replica in replicas] if measure else []
        self.out_of_memory: list[int] = []
        """Numbers of the contexts that ran out of memory, or may have, in the pass that failed last."""
        self.first_context = 0
        """The number, among the contexts of all workers, of this one's first: no two share a random stream."""

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
    ) -> list[Share]:
        """Run the network on each replica's slice of the batch.

        Args:
            data: the batch, on the host or any device.
            label: its labels; None computes no loss, unless the output is the loss.
            slices: one a context; a replica whose slice is empty does not run.
            train: training mode, with gradients, or evaluation mode without.
            inputs_need_grad: keep what gradients of the inputs need.
            seed: (seed, step), for the random streams of the contexts.
            divisor: have each replica go on to the `backward` of its share, where `can_go_on`; None: forward alone.
        """
        places = self.places(slices)
        in_turn = train and self._draws is not False
        meeting = self._meeting(places, in_turn) if train else None

        def call(place: int) -> Share:
            replica = self._replicas[place]
            part = slices[replica.number]
            label_part = take(label, part) if label is not None else None
            with self._noted([place], meeting, timed=train), self._joined_forward(meeting, place):
                share = self._forward(
                    replica, take(data, part), label_part, part.stop - part.start, train, inputs_need_grad, seed
                )
                if divisor is not None and share.loss is not None and share.loss.requires_grad:
                    torch.autograd.backward(share.loss / divisor)
                return share

        calls = [(place, partial(call, place)) for place in places]
        self.out_of_memory.clear()
        with self._mode(train):
            watch = train and self._draws is False
            with self._watching_generators() if watch else contextlib.nullcontext():
                shares = self._side_by_side.run(calls, one_after_another=in_turn and meeting is None)
        if train:
            self._tell_the_idle(places)
        if divisor is not None:
            _check_depends([share for share in shares if share.loss is not None and share.loss.requires_grad], shares)
        return shares

    def places(self, slices: Sequence[slice]) -> list[int]:
        """The places of the replicas whose slice holds samples."""
        return [p for p, r in enumerate(self._replicas) if slices[r.number].stop > slices[r.number].start]

    @property
    def can_go_on(self) -> bool:
        """Whether replicas need not meet between forward and backward; it saves waking their threads twice."""
        return self._side_by_side.uses_threads and self._joined is None and self._draws is False

    def _tell_the_idle(self, places: Sequence[int]) -> None:
        """Where batch statistics are joined, give the running ones to the replicas that had no share."""
        if self._joined is not None and len(places) < len(self._replicas):
            idle = [replica.network for place, replica in enumerate(self._replicas) if place not in places]
            copy_statistics(self._replicas[places[0]].network, idle)

    def _meeting(self, places: Sequence[int], in_turn: bool) -> ThreadBarrier | None:
        """Where the replicas with samples meet in this pass, if they have to."""
        return (
            ThreadBarrier(places, one_after_another=in_turn) if self._joined is not None and len(places) > 1 else None
        )

    def _joined_forward(self, meeting: ThreadBarrier | None, place: int) -> contextlib.AbstractContextManager[None]:
        if meeting is None or self._joined is None:
            return contextlib.nullcontext()
        return self._joined.forward_section(meeting, place, generator_of(self._replicas[place].context.torch_device))

    @contextlib.contextmanager
    def _watching_generators(self) -> Iterator[None]:
        """Notice a network that draws random numbers now, though it drew none before."""
        generators = [generator_of(device) for device in {replica.context.torch_device for replica in self._replicas}]
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
        seed: tuple[int, ...],
    ) -> Share:
        device = replica.context.torch_device
        inputs = move(data, device)
        if inputs_need_grad:
            inputs = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), inputs)
        seeded = train and self._draws is not False
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(train))
            if seeded:
                stack.enter_context(self._stream(replica, seed))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(device.type, self._autocast))
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
    def _stream(self, replica: Replica, seed: tuple[int, ...]) -> Iterator[None]:
        """A random stream of the replica's own for this step; what draws from it is noticed."""
        with stream(replica.context.torch_device, *seed, self.first_context + replica.number) as drew:
            yield
        self._draws = bool(self._draws) or drew[0]

    def backward(self, shares: Sequence[Share], divisor: float) -> None:
        """Add the gradients of the shares' losses, each divided by ``divisor``, to those of each replica."""
        roots: list[Root] = [
            (share, [share.loss / divisor], [None])
            for share in shares
            if share.loss is not None and share.loss.requires_grad
        ]
        _check_depends(roots, shares)
        if self._joined is not None and roots:  # what counts nothing itself has counted in the others' statistics
            own = {share.replica for share, _, _ in roots}
            for share in shares:
                outputs = [tensor for tensor in tensors_of(share.output) if tensor.requires_grad]
                if share.replica not in own and outputs:
                    roots.append((share, outputs, [torch.zeros_like(output) for output in outputs]))
        self._run_backward(roots)

    def backward_from(self, shares: Sequence[Share], out_grads: Batch) -> None:
        """Add the gradients that follow from those of the outputs, given for the whole batch."""
        start = 0
        roots: list[Root] = []
        for share in shares:
            part = move(take(out_grads, slice(start, start + share.samples)), share.replica.context.torch_device)
            roots.append((share, tensors_of(share.output), list(tensors_of(part))))
            start += share.samples
        self._run_backward(roots)

    def _run_backward(self, roots: Sequence[Root]) -> None:
        places = [self._replicas.index(share.replica) for share, _, _ in roots]
        in_turn = bool(self._draws)  # what a checkpointed layer computes again draws again, from a shared generator
        by_graph = self._joined is not None and self._joined.by == "graph"
        meeting = self._meeting(places, in_turn and not by_graph)
        if by_graph or not self._side_by_side.uses_threads:
            self._run_backward_at_once(roots, places, meeting)
        else:
            self._run_backward_in_threads(roots, places, meeting, in_turn)
        if places:
            self._tell_the_idle(places)  # a checkpointed layer runs, and counts, once more in backward

    def _run_backward_in_threads(
        self, roots: Sequence[Root], places: Sequence[int], meeting: ThreadBarrier | None, in_turn: bool
    ) -> None:

        def call(place: int, tensors: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
            with self._noted([place], meeting), self._joined_backward(meeting, place):
                torch.autograd.backward(tensors, grads)

        calls = [(place, partial(call, place, ts, gs)) for place, (_, ts, gs) in zip(places, roots, strict=True)]
        self._side_by_side.run(calls, one_after_another=in_turn and meeting is None)

    def _run_backward_at_once(
        self, roots: Sequence[Root], places: Sequence[int], meeting: ThreadBarrier | None
    ) -> None:
        """One call: the backward passes of distinct GPUs then run side by side with no Python in between."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._noted(places, meeting))
            for place in places:
                stack.enter_context(self._joined_backward(meeting, place))
            if roots:
                torch.autograd.backward([t for _, ts, _ in roots for t in ts], [g for _, _, gs in roots for g in gs])

    def _joined_backward(self, meeting: ThreadBarrier | None, place: int) -> contextlib.AbstractContextManager[None]:
        if meeting is None or self._joined is None:
            return contextlib.nullcontext()
        return self._joined.backward_section(meeting, place, generator_of(self._replicas[place].context.torch_device))

    @contextlib.contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        """Have all replicas train or evaluate for a while.

        Which parts are frozen with ``.eval()`` is read off the user's network, and holds in every replica.
        """
        networks = [replica.network for replica in self._replicas]
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

    @contextlib.contextmanager
    def _noted(self, places: Sequence[int], meeting: ThreadBarrier | None, *, timed: bool = True) -> Iterator[None]:
        """Note the seconds of what runs, less those it waits for other replicas, and who ran out of memory."""
        try:
            with contextlib.ExitStack() as stack:
                for place in places if self._clocks and timed else []:
                    stack.enter_context(self._clocks[place].running())
                    if meeting is not None:
                        stack.callback(self._clocks[place].forget, meeting, place)
                yield
        except Exception as error:
            if is_out_of_memory(error):
                self.out_of_memory += [self._replicas[place].number for place in places]
            raise

    def laps(self) -> list[Lap]:
        """What each replica has worked since this was last asked."""
        return [clock.lap() for clock in self._clocks]

    def close(self) -> None:
        """End the threads."""
        self._side_by_side.close()


def _check_depends(roots: Sequence[object], shares: Sequence[Share]) -> None:
    if not roots and any(share.count for share in shares):
        raise RuntimeError("the loss depends on no parameter that is trained; backward has nothing to do")


@dataclass
class Lap:
    """What a replica has worked: seconds of its thread on the host, or between events on its GPU's stream."""

    on_host: float
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]]

    def is_over(self) -> bool:
        """Whether the GPU has come to the end of it."""
        return all(bool(end.query()) for _, end in self.events)  # type: ignore[no-untyped-call]

    def seconds(self) -> float | None:
        """The sum, once it is over; None where nothing was done."""
        for begin, end in self.events:
            end.synchronize()
            self.on_host += begin.elapsed_time(end) / 1e3
        self.events = []
        return self.on_host if self.on_host > 0 else None


class _Clock:
    """Times a replica."""

    def __init__(self, replica: Replica) -> None:
        self._device = replica.context.torch_device
        self._lap = Lap(0.0, [])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self._device.type == "cuda":
            begin = self._event()
            yield
            self._lap.events.append((begin, self._event()))
        else:
            began = time.perf_counter()
            yield
            self._lap.on_host += time.perf_counter() - began

    def forget(self, meeting: ThreadBarrier, place: int) -> None:
        """Take off what was spent waiting for others; a GPU has then run dry about as long."""
        self._lap.on_host -= meeting.waited[place]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self) -> Lap:
        lap, self._lap = self._lap, Lap(0.0, [])
        return lap


def call_network(network: torch.nn.Module, inputs: Batch) -> Any:
    """Positional arguments from a tuple, keywords from a dict."""
    if isinstance(inputs, dict):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple) else network(inputs)

"""`LocalSteps`: workers behind slow links train alone for some steps, then average what their weights have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gangline.collectives.eager import run_eagerly
from gangline.collectives.errors import MismatchError
from gangline.collectives.work import Work
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.group.serialization import digest
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.reducer.distributed_optimizer import WrappedOptimizer
from gangline.kvstore.reducer.reducer import check_frozen

_OUTER = {
    "nesterov": ("sgd", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "sgd": ("sgd", {"lr": 1.0}),
}
_SPEEDS = "speeds of LocalSteps"
"""Key of an int64 tensor with a row for each worker: microseconds of a local step, and of the link in a cycle."""
_FIRST, _FEWEST, _MOST = 8, 20, 500
"""Local steps of the fastest worker in a cycle with ``every="auto"``: in the first two, and bounds of the others."""
_SPARE = 1.1  # time of a cycle over that of the link, with ``every="auto"``


@dataclass(eq=False)
class _Fragment:
    """Parameters that are sent together."""

    bucket: Bucket
    parameters: list[Tensor]
    end: int
    """Bytes that the link carries in a cycle before the fragment is sent."""
    base: Tensor
    """The store's weights that this worker has taken last, flat."""
    sent: Tensor
    """The worker's weights when they were sent last, flat."""
    weight_sent: float = 0.0
    """Weight of all local steps up to the last that was sent."""
    works: Sequence[Work] = ()
    """The store's calls, while it travels."""
    began: float = 0.0
    seconds: float = 0.0
    """Time that it travelled last; 0: it has not arrived yet, as far as this worker has noticed."""

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a flat copy of the parameters."""
        flat = self.bucket.empty(self.parameters[0].device)
        torch._foreach_copy_([*self.bucket.views(flat).values()], self.parameters)
        return flat

    def send(self, store: KVStore, weight_made: float) -> None:
        """Begin to average what was changed since the last time."""
        weight, self.weight_sent = weight_made - self.weight_sent, weight_made
        self.sent, self.began, self.seconds = self.read(), time.monotonic(), 0.0
        pushed = store.push_bucket(self.bucket, [self.base - self.sent], weight=weight, async_op=True)
        self.works = [pushed, store.pull_bucket(self.bucket, [self.base], async_op=True)]

    def look(self) -> None:
        """Notice whether it has arrived."""
        if not self.seconds and all(work.is_completed() for work in self.works):
            self.seconds = time.monotonic() - self.began

    @torch.no_grad()
    def merge(self) -> None:
        """Wait for the store's new weights, and add what was changed since sending."""
        for work in self.works:
            work.wait()
        self.look()
        flat = self.read().sub_(self.sent).add_(self.base)
        torch._foreach_copy_(self.parameters, [*self.bucket.views(flat).values()])
        self.sent, self.works = self.base, ()  # their memory is free


@run_eagerly
class LocalSteps(WrappedOptimizer):
    """Wraps a torch optimizer: each worker makes local steps, and now and then the workers average their changes.

    After ``every`` local steps, a worker sends the difference between the weights with which it began and its own. The
    store takes the mean of the workers' differences, weighted by their numbers of steps, as the gradient of an outer
    optimizer. This is for links on which gradients cannot be sent in each step. Training differs from that of one
    process: only the mean is exact.

    The weights are sent in fragments, one after the other in the course of ``every`` steps. While a fragment travels,
    training goes on. When the next one is sent, each parameter becomes the store's new weight plus what the worker has
    changed since sending, so that each local step counts once.

    The inner optimizer's state stays with the worker, and so do the model's buffers, such as the statistics of
    BatchNorm, until `synchronize` takes their mean. Creating it broadcasts rank 0's weights and buffers.

    Methods: Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025.

    Attributes:
        kvstore: the store, which averages and runs the outer optimizer.
        outer: the store's `OptimizerGroup`, with the outer learning rate.
        every: number of this worker's local steps in a cycle, in which each fragment is sent once.
        weight: weight of each following local step, 1 at first; a worker's weight in a mean is the sum over its steps.

    For example:

        optimizer = gangline.LocalSteps(model, torch.optim.AdamW(model.parameters()), every=50)
        for data, label in loader:  # batches of this worker; their number may differ between workers
            optimizer.zero_grad()
            loss_function(model(data), label).backward()
            optimizer.step()
        optimizer.synchronize()  # now all workers have the same weights
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        kvstore: str | KVStore = "auto",
        *,
        every: int | str,
        outer: Any = "nesterov",
        fragments: int = 4,
        compression: Mapping[str, Any] | None = None,
    ) -> None:
        """Put the optimizer's parameters into the store. Collective: all workers must call it.

        Args:
            model: the model, the same on all workers.
            optimizer: inner optimizer over parameters of the model.
            kvstore: a synchronous store, or the name of one to create; "auto": the store of the job, see `create`.
            every: number of local steps in a cycle; may differ between workers. "auto": chosen by measured speeds, so
                that a cycle takes all workers the same time, as little as the link allows.
            outer: "nesterov": learning rate 0.7 and momentum 0.9, as in DiLoCo; "sgd": the mean of the weights; or
                ``(name, arguments)`` as for `KVStore.set_optimizer`.
            fragments: number of parts of about equal bytes in which the weights are sent, at most ``every``. 1: all
                weights at once, and workers wait for the result.
            compression: as for `KVStore.set_gradient_compression`; None: no compression.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if an argument is out of range, a parameter is not the model's, or the store is asynchronous, or
                has keys or an optimizer that leave no place for this one.
            RuntimeError: if this worker was restarted alone, or the job is elastic.
            MismatchError: if the workers' models or options differ.
        """
        self._parameters = _trained(model, optimizer)
        spec = _parsed(outer, self._parameters)
        if every != "auto" and not _is_count(every):
            raise ValueError(f"every is {every!r}; expected a number of local steps, 1 or more, or 'auto'")
        if not _is_count(fragments):
            raise ValueError(f"fragments is {fragments!r}; expected 1 or more")
        if compression is not None and compression.get("type") == "2bit" and "threshold" not in compression:
            raise ValueError(
                "compression '2bit' has no threshold; expected one near the change of a weight in a cycle, such as "
                "{'type': '2bit', 'threshold': 0.01}: it sends -threshold, 0 or threshold, and keeps the rest"
            )
        self._model, self._all = model, dict(model.named_parameters())
        self._is_auto = every == "auto"
        self.every = self._next_every = _FIRST if isinstance(every, str) else every
        self._steps = self._next = 0  # steps in this cycle, number of the next fragment
        self._weight_made = 0.0  # of all local steps
        self._travelling: list[_Fragment] = []
        self._speeds: tuple[Tensor, Work] | None = None  # while they travel
        self._step_seconds: list[float] = []
        self._link_seconds = 0.0
        self._wrap(optimizer, kvstore)
        try:
            self._join_workers(spec, fragments, compression)
        except BaseException:  # raised again
            if isinstance(kvstore, str):
                self.kvstore.close()
            raise
        self._returned = time.monotonic()

    def _join_workers(self, spec: OptimizerSpec, fragments: int, compression: Mapping[str, Any] | None) -> None:
        store, names = self.kvstore, list(self._parameters)
        if store.is_async:
            raise ValueError(
                f"a {store.type!r} store applies each worker's difference alone, and no mean of them; expected a "
                "synchronous store, such as 'dist_sync' or 'allreduce'"
            )
        store.attach("LocalSteps", [_SPEEDS], None, compression=compression)
        group = store.attach("LocalSteps", names, spec, compression=compression)
        assert group is not None
        self.outer = group
        weights = [one.data for one in self._parameters.values()]
        store.broadcast(names, weights, weights)
        store.init(_SPEEDS, torch.zeros(store.num_workers, 2, dtype=torch.int64, device="cpu"))
        tensors = {**self._all, **dict(self._model.named_buffers())}
        rest = {name: one for name, one in tensors.items() if name not in self._parameters}
        layout = {name: f"{tuple(one.shape)} of {one.dtype}" for name, one in rest.items()}
        store.group.check_same({**layout, "every='auto'": self._is_auto, "fragments": fragments}, "LocalSteps")
        self._equalize(rest, is_mean=False)
        most = min([fragments, *store.group.all_gather(self.every, "LocalSteps")])
        buckets = [*plan([*zip(names, weights, strict=True)], -(-sum(one.nbytes for one in weights) // most))]
        sizes = [bucket.nbytes for bucket in buckets]
        self._bytes, self._waits = sum(sizes), most == 1 or len(buckets) == 1
        ends = accumulate([sizes[-1], *sizes[:-1]])  # so the link has a fragment's part of a cycle after it was sent
        self._fragments = []
        for bucket, end in zip(buckets, ends, strict=True):
            store.fuse(bucket)
            own: list[Tensor] = [self._parameters[str(name)] for name in bucket.keys]
            fragment = _Fragment(bucket, own, self._bytes if self._waits else end, weights[0], weights[0])
            fragment.base = fragment.read()
            self._fragments.append(fragment)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the inner optimizer's step, and send the fragments that are due.

        Raises:
            RuntimeError: if a parameter that was frozen before is trained now.
            GanglineError: if a worker or server is dead, late or makes a different call.
        """
        check_frozen(self._all, self._parameters, "LocalSteps")
        result = self._optimizer.step(closure)
        self._step_seconds.append(time.monotonic() - self._returned)
        for fragment in self._travelling:
            fragment.look()
        self._steps += 1
        self._weight_made += self._weight
        while self._steps * self._bytes >= self.every * self._fragments[self._next].end:
            if not self._waits:
                self._merge()
            self._send(self._fragments[self._next])
            self._next += 1
            if self._next == len(self._fragments):
                self._end_cycle()
        if self._waits:
            self._merge()
        self._returned = time.monotonic()
        return result

    def synchronize(self) -> None:
        """Wait until all workers call it, then send what was not sent: all get the same weights and buffers.

        Collective. Call it before evaluation and checkpoints, and at the end. A worker that runs out of data before
        the others calls it then; until all do, means are those of the others. Training may go on afterwards.

        Raises:
            MismatchError: if the workers' models have different buffers.
        """
        self._merge()
        self.kvstore.join()
        self._steps = self._next = 0
        for fragment in self._fragments:
            self._send(fragment)
        self._merge()
        self._equalize(dict(self._model.named_buffers()), is_mean=True)  # forward may have replaced them
        self._link_seconds, self._returned = 0.0, time.monotonic()

    def _send(self, fragment: _Fragment) -> None:
        fragment.send(self.kvstore, self._weight_made)
        self._travelling.append(fragment)

    def _merge(self) -> None:
        """Wait for all that travels."""
        travelling, self._travelling = self._travelling, []
        for fragment in travelling:
            fragment.merge()
            self._link_seconds += fragment.seconds
        if self._speeds is not None:
            (speeds, work), self._speeds = self._speeds, None
            work.wait()
            self._next_every = balanced_steps(speeds.tolist())[self.kvstore.rank]

    def _end_cycle(self) -> None:
        self._steps = self._next = 0
        if self._is_auto:
            self.every = self._next_every
            speeds = torch.zeros(self.kvstore.num_workers, 2, dtype=torch.int64, device="cpu")
            seconds = median(self._step_seconds), self._link_seconds
            speeds[self.kvstore.rank] = torch.tensor([max(1, round(1e6 * one)) for one in seconds], device="cpu")
            self._speeds = speeds, self.kvstore.pushpull(_SPEEDS, speeds, async_op=True)
        self._step_seconds.clear()
        self._link_seconds = 0.0

    def _equalize(self, tensors: Mapping[str, Tensor], *, is_mean: bool) -> None:
        """Give all workers rank 0's tensors where they differ, or the mean of those of floating-point numbers."""
        call, group = "buffers of LocalSteps", self.kvstore.group
        digests = group.all_gather({name: digest(one.detach()) for name, one in tensors.items()}, call)
        if odd := set().union(*digests) - set(digests[0]).intersection(*digests):
            raise MismatchError(f"only some workers have {sorted(odd)[0]!r}; expected the same buffers on all workers")
        own = {name: one.detach() for name, one in tensors.items() if len({of[name] for of in digests}) > 1}
        if own:
            gathered = group.all_gather(own, call) if is_mean else [group.broadcast(own, call)]
            for name, tensor in own.items():
                values = [of_worker[name] for of_worker in gathered]
                has_mean = is_mean and tensor.is_floating_point()
                tensor.copy_(torch.stack([one.double() for one in values]).mean(0) if has_mean else values[0])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as the inner optimizer does."""
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, which is this worker's own, and the outer one's, under "outer".

        Raises:
            RuntimeError: if local steps were not sent; call `synchronize` first.
        """
        if self._travelling or any(one.weight_sent != self._weight_made for one in self._fragments):
            raise RuntimeError("state_dict() came before this worker's last steps were sent; call synchronize() first")
        outer = self.kvstore.optimizer_state(group=self.outer)
        return {**self._optimizer.state_dict(), "outer": {"header": outer.header(), "tensors": outer.tensors}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this worker. Collective: all workers must call it.

        Load the model's weights before: rank 0's weights and outer state are used.
        """
        outer = OptimizerState.from_parts(**state_dict["outer"])
        self._merge()
        self._optimizer.load_state_dict(state_dict)
        self.kvstore.load_optimizer_state(outer, group=self.outer)
        names, weights = list(self._parameters), [one.data for one in self._parameters.values()]
        self.kvstore.assign(names, weights)
        self.kvstore.pull(names, weights)
        self._steps = self._next = 0
        for fragment in self._fragments:
            fragment.base, fragment.weight_sent = fragment.read(), self._weight_made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call `synchronize`, unless an error ends the loop."""
        if kind is None:
            self.synchronize()


def balanced_steps(speeds: Sequence[Sequence[int]]) -> list[int]:
    """Return each worker's number of local steps in a cycle that takes all the same time, as little as the link allows.

    Args:
        speeds: for each worker the time of a local step, 0 in `KVStore.join`, and the time that its fragments have
            travelled in a cycle, of which the shortest counts: the others have waited for late workers.
    """
    steps = [step for step, _ in speeds if step]
    link = min(time for step, time in speeds if step)
    cycle = max(min(max(_SPARE * link, _FEWEST * min(steps)), _MOST * min(steps)), max(steps))
    return [max(1, round(cycle / step)) if step else 1 for step, _ in speeds]


def _trained(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the trained parameters of an optimizer, by their names in the model and in its order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    stepped = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    of_model = [(name, one) for name, one in model.named_parameters() if stepped.pop(id(one), None) is not None]
    if stepped:
        shapes = [tuple(one.shape) for one in stepped.values()]
        raise ValueError(
            f"the optimizer has parameters that are not the model's, of shapes {shapes[:5]}; expected an optimizer "
            "over model.parameters()"
        )
    trained = {name: one for name, one in of_model if one.requires_grad}
    if not trained:
        raise ValueError("the optimizer has no parameters with requires_grad=True")
    if len(devices := {str(one.device) for one in trained.values()}) > 1:
        raise ValueError(f"the parameters are on {sorted(devices)}; expected one device per worker")
    return trained


def _parsed(outer: Any, parameters: Mapping[Any, Tensor]) -> OptimizerSpec:
    if isinstance(outer, str) and outer not in _OUTER:
        raise ValueError(f"outer is {outer!r}; expected one of {list(_OUTER)}, or (name, arguments) of an optimizer")
    spec = OptimizerSpec.parse(_OUTER[outer] if isinstance(outer, str) else outer, parameters)
    spec.check_keys(parameters, parameters)
    if spec.clip_global_norm is not None:
        raise ValueError("outer has clip_global_norm, for which all fragments would have to wait; expected clip_norm")
    return spec


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

"""Weights sharded over the workers by memory; a module's full weights exist only while it runs.

Like ZeRO stage 3 (Rajbhandari et al. 2020) and PyTorch's FSDP, but with unequal shards.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree

from gangline.collectives.eager import run_eagerly
from gangline.collectives.work import Work
from gangline.kvstore.allreduce.store import CopyResult, Owned, with_owners
from gangline.kvstore.interface import KVStore
from gangline.kvstore.reducer.waits import waiting_for_ranks

_MAX_PENDING_REDUCTIONS = 2  # maximum number of concurrent gradient reductions
_MAX_GRADIENT_GROUPS = 511
"""Maximum number of groups of gradients: one bit each in the header of a copy."""


@dataclass(eq=False)
class _Weight:
    """A parameter that one worker owns."""

    name: str
    parameter: nn.Parameter
    owner: int
    own: torch.Tensor | None
    """The full weight on its owner."""
    placeholder: torch.Tensor
    """One NaN, expanded to the weight's shape; replaces the weight on other workers."""
    gradient_value: torch.Tensor
    """The single element of `gradient_placeholder`."""
    gradient_placeholder: torch.Tensor
    """One NaN, expanded to the weight's shape; replaces the gradient on other workers."""
    full: torch.Tensor | None = None
    """The full weight while a group needs it."""
    users: int = 0
    """Number of groups in forward or backward that use the full weight."""
    version: int = 0
    """Number of updates."""
    mean: torch.Tensor | None = None
    """The gradient's mean over the workers, which is ``.grad`` on the owner after backward."""
    accumulated_mean: torch.Tensor | None = None
    """Accumulated mean of earlier backwards, to which the next mean is added."""


@dataclass(eq=False)
class _WeightGroup:
    """Weights that are copied from their owners together."""

    weights: list[_Weight]
    packed: int = 0
    """Number of packed tensors of these weights that backward has not unpacked yet."""
    is_used_by_backward: bool = False


@dataclass(frozen=True)
class _PackedWeight:
    """Placeholder that autograd keeps for a weight, or for a view of it."""

    group: _WeightGroup
    weight: _Weight
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _PackedTensor:
    """Another tensor that autograd keeps; with hooks, autograd itself checks no version."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Prefetch:
    """A copy of weights started before they are needed."""

    numbers: list[int]
    full: list[torch.Tensor]
    wait: Callable[[], CopyResult]


_Parts = list[tuple[_Weight, torch.Tensor]]
"""Weights, and this worker's gradients, which are reduced to the means in place."""


class _Parameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters; reading a parameter while the network runs copies it from its owner."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], use: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._use = use

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._use(parameter)
        return parameter


@run_eagerly
class ShardedWeights:
    """Shards the weights of a network and their gradients over the workers.

    A module's parameters are copied from their owners before its forward and dropped after it; backward copies them
    again where autograd needs them. All workers must run the same modules in the same order. The next copy is
    prefetched while a module runs, in the order of the last forward or backward, so a forward must not change weights
    of later modules. A wrong prefetch is dropped. Workers predict only from passes that all of them have run, so they
    make the same calls in the same order; if only some workers take another branch, all raise a MismatchError, as
    without prefetching.

    The order of gradients may depend on the number of samples, so with each copy in backward the workers agree on the
    gradients that all of them have, and reduce these to their owners. Outside a forward, a worker sees NaN in place of
    the weights and gradients that other workers own.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self, trained: Sequence[torch.Tensor], network: nn.Module, store: KVStore, memory: Sequence[float] | str
    ) -> None:
        """Shard the network's parameters by memory, with rank 0's values. Collective: all workers must call it."""
        names = {one: name for name, one in network.named_parameters() if one.is_floating_point() and one.numel()}
        self._updated = [one for one in trained if isinstance(one, nn.Parameter) and one in names]
        _check_networks(names, trained, self._updated, network, store)
        self._store = with_owners(store)
        self.owners = dict(zip(names, self._store.owners_of([one.data for one in names], memory), strict=True))
        """Rank of the owner of each parameter."""
        self._network = network
        self._frames: list[list[_WeightGroup]] = []  # groups that each running forward has copied
        self._saved_tensors_hooks: Any = None
        self._weight = 0.0
        self._is_syncing = self._is_sum = self._allows_state_dict = False
        self._reductions: list[tuple[Work, _Parts]] = []
        self._by_address: dict[int, tuple[_WeightGroup, _Weight]] = {}  # full weights of the modules that run now
        self._used_by_backward: list[_WeightGroup] = []
        self._read_in_backward: list[_WeightGroup] = []  # groups read by code, not by autograd
        self._copies: list[list[int]] = []  # of this forward or backward, in order, as numbers of weights
        self._graph_task = -1  # autograd's number of this backward; -1 in a forward
        self._has_followers = False
        self._passes: dict[tuple[bool, int], list[list[int]]] = {}  # copies by direction and first weight, of this step
        self._expected: dict[tuple[bool, int], list[list[int]]] = {}  # of earlier steps, the same on all workers
        self._next_copies: list[list[int]] = []  # copies still expected in this pass, in reverse order
        self._prefetch: _Prefetch | None = None
        self.seconds_waiting = 0.0
        """Seconds in calls that need other workers."""
        for one in names:
            one.data = one.data.contiguous()
        self._store.copy_from_owners("all weights", [one.data.view(-1) for one in names], [0] * len(names))
        self._weights = {one: self._divide(name, one) for one, name in names.items()}
        self._in_order = list(self._weights.values())
        self._numbers = {weight: number for number, weight in enumerate(self._in_order)}
        self._hooks: list[Any] = []
        for module in network.modules():
            if next(module.parameters(), None) is not None:
                self._watch(module)
        self._gradient_hooks: list[Any] = []
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        """Follow the gradients of the parameters that require one now."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []
        with_gradient = [weight for weight in self._weights.values() if weight.parameter.requires_grad]
        size = -(-len(with_gradient) // _MAX_GRADIENT_GROUPS) or 1
        self._gradient_groups = [with_gradient[begin : begin + size] for begin in range(0, len(with_gradient), size)]
        self._number_of_group = {one: number for number, group in enumerate(self._gradient_groups) for one in group}
        self._pending = [0] * len(self._gradient_groups)  # gradients of each group that are yet to arrive
        self._all_groups = (1 << len(self._gradient_groups)) - 1
        self._not_ready = self._all_groups  # bit i: group i is not to be reduced
        self._nodes = []  # gradient accumulators, which live only while referenced
        for weight in with_gradient:
            node: Any = torch.autograd.graph.get_gradient_edge(weight.parameter).node
            self._nodes.append(node)
            self._gradient_hooks.append(node.register_prehook(partial(self._keep_accumulated_mean, weight)))
            after = partial(self._on_gradient, weight)
            hook = weight.parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            self._gradient_hooks.append(hook)

    def train(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update these parameters from now on, whose ``requires_grad`` may have changed."""
        self._updated = [one for one in parameters if one in self._weights]
        self._watch_gradients()

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError(
            "the workers divide this network's weights, so it cannot be copied or pickled; copy model_state_dict() of "
            "the Trainer or DistributedOptimizer, or get_params() of the Module"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)

    def _divide(self, name: str, parameter: nn.Parameter) -> _Weight:
        owner, data = self.owners[parameter], parameter.data
        nothing = [torch.full((), torch.nan, dtype=data.dtype, device=data.device) for _ in range(2)]
        own = None
        if owner == self._store.rank:
            own = torch.empty_like(data).copy_(data)  # a separate storage, whose address identifies views
        weight = _Weight(
            name, parameter, owner, own, nothing[0].expand(data.shape), nothing[1], nothing[1].expand(data.shape)
        )
        parameter.data = weight.placeholder if own is None else own
        return weight

    def _watch(self, module: nn.Module) -> None:
        module._parameters = _Parameters(module._parameters, self._use)
        self._hooks += [
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            module.register_forward_hook(self._after_forward, always_call=True),
            module.register_state_dict_pre_hook(self._refuse_state_dict),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._refuse_state_dict),  # type: ignore[no-untyped-call]
        ]

    def _refuse_state_dict(self, *_: object) -> None:
        if not self._allows_state_dict:
            raise RuntimeError(
                "this worker has a part of the weights only, so the network's state_dict() and load_state_dict() are "
                "not available; call model_state_dict() and load_model_state_dict() of the Trainer or "
                "DistributedOptimizer, or get_params() and set_params() of the Module, on all workers"
            )

    # Forward

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if not self._frames:
            if torch._C._current_graph_task_id() == -1:
                self._end_backward()
                self._begin_pass(-1)
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # else those of a checkpoint, say
                self._saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                self._saved_tensors_hooks.__enter__()
        self._frames.append([])
        self._make_full(one for one in dict.values(module._parameters) if one is not None)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:  # noqa: ARG002  a hook's signature
        returned = {_address(one) for one in _pytree.tree_leaves(output) if isinstance(one, torch.Tensor)}
        for group in self._frames.pop():
            if self._frames and any(_address(weight.parameter) in returned for weight in group.weights):
                self._frames[-1].append(group)  # the calling module still uses them
                continue
            self._drop(group.weights)
            self._release(group)
        if not self._frames and self._saved_tensors_hooks is not None:
            self._saved_tensors_hooks.__exit__(None, None, None)
            self._saved_tensors_hooks = None

    def _drop(self, weights: Sequence[_Weight]) -> None:
        """Replace weights that other workers own by their placeholders."""
        assigned = []
        for weight in weights:
            assert weight.full is not None
            found = self._by_address.pop(_address(weight.full), None)
            if found is not None and _address(weight.parameter) != _address(weight.full):
                assigned.append(weight)
            if weight.own is None:
                weight.parameter.data = weight.placeholder
        if assigned and sys.exc_info()[0] is None:  # else the forward has failed, and its error is raised
            raise _assigned_in_forward(assigned[0])

    def _use(self, parameter: nn.Parameter) -> None:
        if self._frames:
            self._make_full([parameter])
        elif torch._C._current_graph_task_id() != -1:  # a checkpointed function is recomputed
            self._use_until_backward_ends(parameter)

    def _use_until_backward_ends(self, parameter: nn.Parameter) -> None:
        weight = self._weights.get(parameter)
        if weight is None or _address(parameter) in self._by_address:
            return
        group = _WeightGroup([weight], is_used_by_backward=True)
        self._use_full(group)
        self._used_by_backward.append(group)
        self._read_in_backward.append(group)

    def _make_full(self, parameters: Iterable[nn.Parameter]) -> None:
        weights = [self._weights[one] for one in dict.fromkeys(parameters) if one in self._weights]
        group = _WeightGroup([weight for weight in weights if _address(weight.parameter) not in self._by_address])
        if not group.weights:
            return
        for weight in group.weights:
            if weight.full is not None and _address(weight.full) in self._by_address:
                raise _assigned_in_forward(weight)
        self._use_full(group)
        self._frames[-1].append(group)

    def _use_full(self, group: _WeightGroup) -> None:
        """Point the parameters to the full weights."""
        self._take_assigned(group.weights)
        self._acquire(group)
        for weight in group.weights:
            assert weight.full is not None
            weight.parameter.data = weight.full
            self._by_address[_address(weight.full)] = group, weight

    def _take_assigned(self, weights: Sequence[_Weight]) -> None:
        """Take values that were assigned to the parameters' ``data``; the owner's values are used."""
        for weight in weights:
            data = weight.parameter.data
            known = weight.placeholder
            if (data.dtype, data.shape, data.device) != (known.dtype, known.shape, known.device):
                raise ValueError(
                    f"{weight.name} has become {data.dtype} of {tuple(data.shape)} on {data.device}; expected a weight "
                    "as it was when the DistributedOptimizer divided it"
                )
            if weight.own is not None and _address(data) != _address(weight.own):
                if self._prefetch is not None and self._numbers[weight] in self._prefetch.numbers:
                    raise RuntimeError(
                        f"{weight.name} was assigned while the network ran, and the other workers may have got its "
                        "former value; expected assignments between two passes"
                    )
                weight.parameter.data = weight.own.copy_(data)

    def _acquire(self, group: _WeightGroup) -> None:
        missing = [weight for weight in group.weights if not weight.users]
        if missing:
            task = torch._C._current_graph_task_id()
            if task not in (-1, self._graph_task):
                self._begin_pass(task)
            try:
                found = self._take_prefetch(missing)
                if found is None:
                    for weight in missing:
                        weight.full = _full(weight)
                    found = self._copy(missing, [weight.full for weight in missing if weight.full is not None])()
            except BaseException:
                self._forget_passes()
                raise
            if self._is_syncing:
                self._reduce_ready(found.missing, found.weight)
            if self._frames or task != -1:
                self._has_followers |= found.has_followers
                self._begin_next_copy(self._numbers_of(missing))
        for weight in group.weights:
            weight.users += 1

    def _copy(
        self, weights: Sequence[_Weight], full: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Callable[[], CopyResult]:
        names, owners, numbers = self._described(weights)
        tensors, missing, weight = [one.view(-1) for one in full], self._not_ready, self._weight
        with self._timed():
            return self._store.copy_from_owners(
                names, tensors, owners, missing, weight, numbers=numbers, async_op=async_op
            )

    # Prefetches

    def _begin_pass(self, graph_task: int) -> None:
        """Begin to record the copies of a forward or backward."""
        self._end_pass()
        self._graph_task, self._has_followers = graph_task, False

    def _end_pass(self) -> None:
        """Record the copies of a pass for later steps, unless some worker has not run the pass."""
        self._drop_prefetch()
        if self._copies and not self._has_followers:
            self._passes[self._graph_task != -1, self._copies[0][0]] = self._copies
        self._copies, self._next_copies = [], []

    def _forget_passes(self) -> None:
        """Forget this step's passes after an error, in which workers may have made different numbers of copies."""
        self._passes, self._copies, self._next_copies = {}, [], []

    def _begin_next_copy(self, numbers: list[int]) -> None:
        """Record a copy, and start the next one if it is known: at most one, so that memory holds two modules."""
        if not self._copies:
            self._next_copies = self._expected.get((self._graph_task != -1, numbers[0]), [])[::-1]
        self._copies.append(numbers)
        if self._next_copies and self._next_copies.pop() != numbers:
            self._next_copies = []
        if self._next_copies:
            weights = [self._in_order[number] for number in self._next_copies[-1]]
            self._take_assigned(weights)
            full = [_full(weight) for weight in weights]
            self._prefetch = _Prefetch(self._next_copies[-1], full, self._copy(weights, full, async_op=True))

    def _take_prefetch(self, weights: Sequence[_Weight]) -> CopyResult | None:
        """Return the result of the prefetch if it is of these weights; drop any other prefetch."""
        prefetch = self._prefetch
        result = self._drop_prefetch()
        if prefetch is None or prefetch.numbers != self._numbers_of(weights):
            return None
        for weight, full in zip(weights, prefetch.full, strict=True):
            weight.full = full
        return result

    def _drop_prefetch(self) -> CopyResult | None:
        """Wait for the prefetch, if any: its error is raised on all workers."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is None:
            return None
        with self._timed():
            return prefetch.wait()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        with waiting_for_ranks():
            yield
        self.seconds_waiting += time.perf_counter() - began

    def _numbers_of(self, weights: Sequence[_Weight]) -> list[int]:
        return [self._numbers[weight] for weight in weights]

    def _described(self, weights: Sequence[_Weight]) -> tuple[str, list[int], list[int]]:
        """Return names, owners and numbers of weights, for `AllReduceStore`."""
        return ", ".join(one.name for one in weights), [one.owner for one in weights], self._numbers_of(weights)

    def _release(self, group: _WeightGroup) -> None:
        for weight in group.weights:
            weight.users -= 1
            if not weight.users:
                weight.full = None

    # Backward

    def _pack(self, tensor: torch.Tensor) -> _PackedTensor | _PackedWeight:
        found = self._by_address.get(_address(tensor))
        if found is None:
            return _PackedTensor(tensor, tensor._version)
        group, weight = found
        group.packed += 1
        return _PackedWeight(
            group, weight, weight.version, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, packed: _PackedTensor | _PackedWeight) -> torch.Tensor:
        if isinstance(packed, _PackedTensor):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(packed.tensor.shape)} that backward needs was modified by an inplace "
                    f"operation: it is at version {packed.tensor._version}; expected version {packed.version}"
                )
            return packed.tensor
        group, weight = packed.group, packed.weight
        if weight.version != packed.version:
            raise RuntimeError(
                f"{weight.name}, which backward needs, was updated by step(); expected backward before it"
            )
        if not group.is_used_by_backward:
            group.is_used_by_backward = True
            self._used_by_backward.append(group)
            self._acquire(group)
        assert weight.full is not None
        found = weight.full.as_strided(packed.size, packed.stride, packed.offset)
        group.packed -= 1
        if group.packed <= 0:
            self._end_use(group)
        return found

    def _end_use(self, group: _WeightGroup) -> None:
        group.is_used_by_backward = False
        self._used_by_backward.remove(group)
        self._release(group)

    def _end_backward(self) -> None:
        """Drop the weights of a backward that did not unpack all that was packed."""
        while self._read_in_backward:
            self._drop(self._read_in_backward.pop().weights)
        for group in list(self._used_by_backward):
            self._end_use(group)

    def begin(self, _: Iterable[int], *, push_early: bool, weight: float | None = None, is_sum: bool = False) -> None:
        """Prepare for a backward, as `Reducer.begin`; ``is_sum``: sum gradients instead of averaging them."""
        self._is_syncing, self._is_sum, self._weight = push_early, is_sum, weight or 0.0
        self._pending = [len(group) for group in self._gradient_groups]
        self._not_ready = self._all_groups

    def _keep_accumulated_mean(self, weight: _Weight, _: object = None) -> None:
        """Move the mean of earlier backwards out of ``.grad`` before this one's gradient, unless it was reset."""
        parameter = weight.parameter
        if parameter.grad is None:
            weight.accumulated_mean = None
        elif not self._has_local_gradient(weight):
            weight.accumulated_mean, parameter.grad = weight.mean, None
        weight.mean = None

    def _on_gradient(self, weight: _Weight, _: torch.Tensor) -> None:
        if self._is_syncing:
            number = self._number_of_group[weight]
            self._pending[number] -= 1
            if not self._pending[number]:
                self._not_ready &= ~(1 << number)

    def _reduce_ready(self, not_ready: int, total: float) -> None:
        """Reduce the gradients of the groups that are ready on all workers."""
        ready = [number for number in range(len(self._gradient_groups)) if not not_ready >> number & 1]
        for number in ready:
            self._not_ready |= 1 << number
        self._reduce([weight for number in ready for weight in self._gradient_groups[number]], total)

    def _reduce(self, weights: Sequence[_Weight], total: float) -> None:
        if not total:  # no worker has samples
            for weight in weights:
                weight.mean = weight.parameter.grad = weight.accumulated_mean
        elif weights:
            parts = [(weight, self._take_weighted_gradient(weight, total)) for weight in weights]
            while len(self._reductions) >= _MAX_PENDING_REDUCTIONS:
                self._take_means()
            names, owners, numbers = self._described(weights)
            work = self._store.reduce_to_owners(names, [part.view(-1) for _, part in parts], owners, numbers=numbers)
            self._reductions.append((work, parts))

    def _take_weighted_gradient(self, weight: _Weight, total: float) -> torch.Tensor:
        """Remove ``.grad`` and return it, scaled by this worker's weight."""
        gradient, weight.parameter.grad = weight.parameter.grad, None
        if gradient is None or not self._weight:
            return _empty(weight).zero_()
        if gradient.is_sparse:
            raise ValueError(f"{weight.name} has a sparse gradient; expected a dense one (nn.Embedding(sparse=False))")
        gradient = gradient.detach().contiguous()
        return gradient if self._is_sum else gradient.mul_(self._weight / total)

    def _take_means(self) -> None:
        work, parts = self._reductions.pop(0)
        with self._timed():
            work.wait()
        self._set_means(parts)

    def _set_means(self, parts: _Parts) -> None:
        for weight, mean in parts:
            if weight.own is None:
                weight.gradient_value.fill_(torch.nan)  # zero_grad(set_to_none=False) fills it with 0
                weight.parameter.grad = weight.gradient_placeholder
            elif weight.accumulated_mean is None:
                weight.mean = weight.parameter.grad = mean
            else:
                weight.mean = weight.parameter.grad = weight.accumulated_mean.add_(mean)
            weight.accumulated_mean = None

    def finish(self, weight: float | None = None) -> None:
        """Reduce the gradients that were not reduced yet, and wait for all means. Collective.

        ``weight`` is that of this worker's gradients; None: there was no backward.
        """
        while self._reductions:
            self._take_means()
        self._end_backward()
        self._end_pass()
        if self._store.compresses:
            raise ValueError(
                f"the {self._store.type!r} store compresses, but gradients of divided weights are not compressed; "
                "expected a store without compression, or shard='optimizer'"
            )
        local = {one.name for one in self._weights.values() if self._has_local_gradient(one)}
        gathered = self._store.group.all_gather([weight, sorted(local)], "end of backward")
        for rank, (theirs, names) in enumerate(gathered):
            if names and theirs is None:
                raise RuntimeError(
                    f"worker {rank} has gradients of {', '.join(names[:3])} that were assigned, or computed before the "
                    "DistributedOptimizer was made; expected those of backward()"
                )
        self._expected.update(self._passes)
        self._passes = {}
        together = {name for _, names in gathered for name in names}
        left = [one for one in self._weights.values() if one.name in together]
        for one in left:
            if one.name not in local:
                self._keep_accumulated_mean(one)
        self._weight = weight or 0.0
        self._reduce(left, sum(theirs or 0.0 for theirs, _ in gathered))
        while self._reductions:
            self._take_means()
        self._is_syncing, self._not_ready = False, self._all_groups

    # Workers without samples

    def end_pass(self, error: Exception | None = None) -> None:
        """End a forward or backward; workers without samples call `follow` instead. Collective.

        With ``error``, all other workers raise a MismatchError with its text.
        """
        if error is None:
            self._drop_prefetch()
        else:
            self._forget_passes()
        self._store.end_following(error)

    def follow(self) -> None:
        """Take part in the other workers' copies and reductions until their `end_pass`. Collective."""
        self._drop_prefetch()
        self._store.follow_owners(self._copy_numbered, self._reduce_numbered)

    def _copy_numbered(self, numbers: Sequence[int]) -> Owned:
        weights = [self._in_order[number] for number in numbers]
        self._take_assigned(weights)
        return [_full(one).view(-1) for one in weights], [one.owner for one in weights]

    @contextmanager
    def _reduce_numbered(self, numbers: Sequence[int]) -> Iterator[Owned]:
        weights = [self._in_order[number] for number in numbers]
        for weight in weights:
            self._keep_accumulated_mean(weight)
        parts = [(weight, _empty(weight).zero_()) for weight in weights]
        yield [part.view(-1) for _, part in parts], [weight.owner for weight in weights]
        self._set_means(parts)

    def _has_local_gradient(self, weight: _Weight) -> bool:
        gradient = weight.parameter.grad
        return gradient is not None and gradient is not weight.mean and gradient is not weight.gradient_placeholder

    def before_update(self) -> None:
        """Prepare for an update of the owned weights, on all workers."""
        self._end_backward()
        self._take_assigned(list(self._weights.values()))
        for weight in self._weights.values():
            weight.version += weight.parameter.grad is not None
            if weight.own is not None:
                weight.parameter.data = weight.own

    def updated(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, by name."""
        return {self._weights[one].name: one for one in self._updated}

    def owned(self) -> dict[str, nn.Parameter]:
        """Return the updated parameters that this worker owns, by name."""
        return {name: one for name, one in self.updated().items() if self.owners[one] == self._store.rank}

    def forget_gradients(self) -> None:
        """Drop the means of earlier backwards, as `zero_grad` does with gradients."""
        for weight in self._weights.values():
            weight.accumulated_mean = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the optimizer's parameters by their common 2-norm, which is returned. Collective."""
        gradients = [one.grad for one in self.owned().values() if one.grad is not None]
        squares = sum(float(one.double().square().sum()) for one in gradients)
        norm = sum(self._store.group.all_gather(squares, "clip_grad_norm_")) ** 0.5
        for one in gradients:
            one.mul_(min(max_norm / (norm + 1e-6), 1.0))
        return torch.tensor(norm, dtype=self._updated[0].dtype, device="cpu")

    # Full weights

    @contextmanager
    def allow_state_dict(self) -> Iterator[None]:
        """Allow state_dict, with NaN for weights that other workers own, and load_state_dict in this context."""
        self._allows_state_dict = True
        try:
            yield
        finally:
            self._allows_state_dict = False

    def model_state_dict(self) -> dict[str, Any]:
        """Return the network's full state on the host at rank 0, an empty dict elsewhere. Collective."""
        self._drop_prefetch()
        with self.allow_state_dict():
            state = self._network.state_dict(keep_vars=True)
        found = {}
        for name, value in state.items():
            weight = self._weights.get(value) if isinstance(value, nn.Parameter) else None
            if weight is not None:
                self._take_assigned([weight])
                group = _WeightGroup([weight])
                self._acquire(group)
                value = weight.full
                self._release(group)
            if not self._store.rank:
                found[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        return found

    def load_model_state_dict(self, state: Mapping[str, Any], *, allow_missing: bool = False) -> None:
        """Load rank 0's ``state`` into the network; ``state`` is ignored on other ranks. Collective.

        With ``allow_missing``, names that rank 0's state lacks keep their values. ValueError, on all workers, if names
        or shapes differ from the network's.
        """
        with self.allow_state_dict():
            own = self._network.state_dict(keep_vars=True)
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        wrong: list[str] = []
        if not self._store.rank:
            shapes = {name: getattr(value, "shape", None) for name, value in state.items()}
            wrong = sorted(state.keys() - own.keys() if allow_missing else own.keys() ^ state.keys())
            wrong += [name for name, value in tensors.items() if name in state and shapes[name] != value.shape]
        names = [name for name in tensors if name in state]
        extra = {} if self._store.rank else {name: state[name] for name in own.keys() - tensors.keys() if name in state}
        wrong, names, extra = self._store.group.all_gather([wrong, names, extra], "load_model_state_dict")[0]
        if wrong:
            raise ValueError(f"the state does not fit the network; missing, unknown or of another shape: {wrong}")
        self._end_backward()
        for name, value in ((name, tensors[name]) for name in names):
            weight = self._weights.get(value) if isinstance(value, nn.Parameter) else None
            taken = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            if not self._store.rank:
                taken.copy_(state[name])
            self._store.copy_from_owners(name, [taken.view(-1)], [0])
            if weight is None:
                value.detach().copy_(taken)
            else:
                weight.version += 1
                if weight.own is not None:
                    weight.parameter.data = weight.own.copy_(taken)
        if extra:
            with self.allow_state_dict():
                self._network.load_state_dict(extra, strict=False)

    def close(self) -> None:
        """Remove the hooks; a network with sharded weights then raises an error if it is used."""
        for hook in [*self._hooks, *self._gradient_hooks]:
            hook.remove()
        if any(weight.own is None for weight in self._in_order):
            self._allows_state_dict = False
            for module in self._network.modules():
                if next(module.parameters(), None) is not None:
                    module.register_state_dict_pre_hook(_refuse_use)  # type: ignore[no-untyped-call]
                    module.register_forward_pre_hook(_refuse_use)
        self._nodes.clear()
        for module in self._network.modules():
            if isinstance(module._parameters, _Parameters):
                module._parameters = dict(module._parameters)


@run_eagerly
class NetworkState:
    """Access to the full state of a network with sharded weights."""

    _network: nn.Module | None
    """The network; None without ``shard="weights"``."""
    _sharded: ShardedWeights | None
    """The sharded weights; None with a single worker."""

    def model_state_dict(self) -> dict[str, Any]:
        """Return the network's full state on the host at rank 0, an empty dict elsewhere; for ``shard="weights"``.

        Collective: all workers must call it.

        Raises:
            RuntimeError: without ``shard="weights"``; use the network's state_dict instead.
        """
        if self._sharded is not None:
            return self._sharded.model_state_dict()
        state = self._whole_network().state_dict()
        return {name: one.to("cpu", copy=True) if isinstance(one, torch.Tensor) else one for name, one in state.items()}

    def load_model_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load rank 0's ``state`` into the network; ``state`` is ignored on other ranks; for ``shard="weights"``.

        Collective: all workers must call it.

        Raises:
            ValueError: on all workers, if rank 0's names or shapes differ from the network's.
            RuntimeError: without ``shard="weights"``; use the network's load_state_dict instead.
        """
        if self._sharded is not None:
            self._sharded.load_model_state_dict(state)
        else:
            self._whole_network().load_state_dict(state)

    def _whole_network(self) -> nn.Module:
        if self._network is None:
            raise RuntimeError(
                "this call is for shard='weights'; expected the network's own state_dict, load_state_dict"
            )
        return self._network


def _refuse_use(*_: object) -> NoReturn:
    raise RuntimeError(
        "the workers divided this network's weights, and after close() this worker has only the part that it owns; "
        "call model_state_dict() or the Module's get_params() before close(), and load the state into a new network"
    )


def is_divided(network: nn.Module) -> bool:
    """Return whether each worker has only the part of the weights that it owns."""
    return any(isinstance(module._parameters, _Parameters) for module in network.modules())


def _check_networks(
    names: Mapping[nn.Parameter, str],
    trained: Sequence[torch.Tensor],
    updated: Sequence[nn.Parameter],
    network: nn.Module,
    store: KVStore,
) -> None:
    """Check that all workers' networks are equal and not sharded yet. Collective; all workers raise an error."""
    wrong = None
    foreign = sum(one.numel() > 0 for one in trained) - len(updated)
    divided = [name for one, name in names.items() if one.untyped_storage().nbytes() < one.nbytes]
    if foreign:
        wrong = f"{foreign} of the optimizer's parameters are not in network, or hold no real numbers"
    elif divided or is_divided(network):
        wrong = "another optimizer divides, or has divided, the weights of this network; make it anew"
    what = 'shard="weights"'
    errors = store.group.all_gather(wrong, what)
    if any(errors):
        rank = next(rank for rank, error in enumerate(errors) if error)
        raise ValueError(f"{errors[rank]} (rank {rank})")
    used = set(updated)
    kinds = {True: "updated", False: "not updated"}
    store.group.check_same(
        {
            name: f"{tuple(one.shape)} of {one.dtype}, {kinds[one in used]}{'' if one.requires_grad else ', frozen'}"
            for one, name in names.items()
        },
        what,
    )


def _assigned_in_forward(weight: _Weight) -> RuntimeError:
    return RuntimeError(
        f"{weight.name}.data was assigned in a forward that had read it, and the other workers have its former value; "
        "expected assignments between two steps"
    )


def _full(weight: _Weight) -> torch.Tensor:
    """Return the tensor for the full weight: the owner's, which holds it, or memory for a copy."""
    return _empty(weight) if weight.own is None else weight.own


def _empty(weight: _Weight) -> torch.Tensor:
    return torch.empty(weight.placeholder.shape, dtype=weight.placeholder.dtype, device=weight.placeholder.device)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""Balanced batches: which batch the networks of a balanced loader train; their hooks and layers ask here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from gangline.collectives import hooks
from gangline.collectives.eager import run_eagerly

NOTHING_COUNTS = 2.0**-40
"""Weight of a share whose count is 0: a weight of 0 would lose gradients from other ranks' losses."""


@dataclass(frozen=True, eq=False)
class BalancedBatch:
    """A global batch and this rank's part in it.

    What reads the batches sets samples, cost and places of this rank; the ranks then exchange their numbers.
    """

    number: int = 0
    """Number of the global batch, counted from the start of the job."""
    counts: tuple[int, ...] = ()
    """Samples of each rank."""
    counted: tuple[float, ...] = ()
    """Divisor of each rank's mean loss."""
    samples: int = 1
    """Samples of this rank; 0 if its batch only repeats a sample with weight 0."""
    share: float = 1.0
    """Factor that makes the mean over ranks of their losses that of the global batch or, with ``accumulate`` and
    ``count``, that over the batches of the update too."""
    weight: float = 1.0
    """Factor of this rank's gradients at the parameters: the share, or 1 if the loop itself weights its loss."""
    group: dist.ProcessGroup | None = None
    """The ranks that average gradients; None: all."""
    cost: float = 0.0
    """Of this rank's samples: their number, or what ``lengths`` count."""
    costs: Sequence[float] | None = None
    """Of each of this rank's samples, with padding as much as the longest; None without ``lengths``."""
    places: Sequence[Any] = ()
    """With lengths: places in the global batch of the samples of each rank, as arrays; else empty."""
    total: float = 0.0
    """Cost of the global batch, without padding; 0: its number of samples."""
    agreed: float = 0.0
    """Number that must be the same on all ranks: samples of the global batch, or a checksum of them."""
    ends_update: bool = True
    """True if the optimizer steps after this batch."""
    scale: float = 1.0
    """Factor from this share to one of the global batch alone."""

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows of all ranks, in evaluation in the order of the samples if there is one for each."""
        if self not in evaluated or len(rows) != sum(map(len, self.places)):
            return rows
        return rows[torch.as_tensor(np.concatenate(self.places), device=rows.device).argsort()]

    def summed(self, loss: float | Tensor, rank: int, is_sum: bool) -> float:
        """Return the sum over what a rank's share counts of its loss, a mean or, with ``is_sum``, a sum over it."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"mean() got a tensor of shape {tuple(loss.shape)}; expected one number")
        if not self.samples or not self.counted[rank]:  # it is a mean over nothing
            return 0.0
        number = float(loss.detach() if isinstance(loss, Tensor) else loss)
        return number * (1.0 if is_sum else self.counted[rank])


_NO_BATCH = BalancedBatch()
evaluated: list[BalancedBatch] = []
"""The batch of evaluation that was handed out after the last one of training, if its loop has not ended."""
_all: weakref.WeakSet[BatchesOfNetworks] = weakref.WeakSet()
_of_layer: weakref.WeakKeyDictionary[nn.Module, weakref.ref[BatchesOfNetworks]] = weakref.WeakKeyDictionary()
of_parameter: Any = WeakTensorKeyDictionary()
"""Weak reference to the `BatchesOfNetworks` of each parameter whose gradients have weights."""


class BatchesOfNetworks:
    """The batch that the networks of one balanced loader train.

    A loop may read the next batch before backward, so gradients belong to the batch of the last forward. If it calls
    other methods than forward, they belong to the batch handed out last or, if none arrived before the loop asked for
    that one, to the batch before.
    """

    def __init__(self, networks: Sequence[nn.Module], *, may_read_ahead: bool) -> None:
        """Add hooks to the modules that the training loop calls, with their wrappers; `close` removes them.

        ``may_read_ahead``: the loop may ask for the next batch before backward, and `note_gradient` is called.
        """
        self.handed_out: BalancedBatch | None = None
        """None between batches."""
        self.data: Any = None
        """Data of the batch, as the loop got them."""
        self._left: Any = None  # data of the batch before, in which no network ran: perhaps the loop reads ahead
        self._trained: BalancedBatch | None = None  # whose gradients arrive
        self._with_gradient: BalancedBatch | None = None  # the last one
        self._is_pending = False  # no gradient has arrived since a forward in a batch
        self._is_in_step = not may_read_ahead  # gradients have arrived for the batch handed out last
        self._may_read_ahead = may_read_ahead
        self._reader = threading.current_thread()  # which began the batch
        self.has_begun = False
        """True if there has been a batch."""
        self.parts: Callable[[], Generator[Any] | None] | None = None
        """Returns the iteration over parts of a batch, if there is one."""
        self.networks = networks
        hook = _CallInForward(self._note_forward)
        self.hooks = [network.register_forward_pre_hook(hook, with_kwargs=True) for network in networks]
        """All hooks of the loader, which end with `close`."""
        self._remove = weakref.finalize(self, _remove, weakref.ref(self), self.hooks)
        self.bind_layers()
        _all.add(self)

    def bind_layers(self) -> None:
        """Make the layers of the networks ask here for their batch; they may be added between epochs."""
        _of_layer.update((layer, weakref.ref(self)) for network in self.networks for layer in network.modules())

    def close(self) -> None:
        """Remove the hooks."""
        self.begin(None)
        self._remove()
        _all.discard(self)

    def begin(self, batch: BalancedBatch | None) -> None:
        """Begin a batch, or end it with None."""
        before, self.handed_out = self.handed_out, batch
        self._reader = threading.current_thread()
        self.has_begun |= batch is not None
        if batch is not None:
            evaluated.clear()
        has_run = self._with_gradient is before or (self._is_pending and self._trained is before)
        self._left = self.data if self._may_read_ahead and batch and before and not has_run else None
        if not self._is_pending:
            is_read_ahead = before is not None and self._with_gradient is not before and not self._is_in_step
            self._trained = before if is_read_ahead else batch
        if batch is None:
            self._is_in_step = not self._may_read_ahead

    def begin_part(self, part: BalancedBatch) -> None:
        """Begin a part of the batch handed out last: the gradients that follow are of it."""
        self.handed_out = self._trained = part
        self._is_pending = False

    def end_parts(self) -> None:
        """End an iteration over parts that the loop has left, but keeps."""
        if self.parts is not None and (parts := self.parts()) is not None:
            parts.close()

    def _note_forward(self, _: object, *inputs: object) -> None:
        """Note that a network runs forward; not in a backward, which may run the forward of its batch again."""
        if self.handed_out is None or evaluated or not torch.is_grad_enabled() or _is_in_backward():
            return
        main = threading.main_thread()
        if self._reader is not main and threading.current_thread() is main:  # a checkpoint's forward may be in others
            raise RuntimeError(
                f"balance: the balanced loader is read in thread {self._reader.name!r}, as by a prefetcher around it, "
                "while the main thread trains, so batches would get the weights of others; put the prefetcher around "
                "the loader that balance() is given, and read the balanced loader in the loop"
            )
        if self._left is not None:
            left, self._left = self._left, None
            if _shares_tensor(inputs, left) and not _shares_tensor(inputs, self.data):
                raise RuntimeError(
                    "balance: the loop trains a batch when it has read the next one, as with itertools.pairwise or a "
                    "prefetcher around the balanced loader, so that its gradient would get the weight of that one; put "
                    "what reads ahead around the loader that balance() is given"
                )
        self._trained, self._is_pending = self.handed_out, True

    def note_gradient(self) -> BalancedBatch | None:
        """Return the batch of a gradient that arrives; None: it is of no batch."""
        self._is_pending = False
        self._with_gradient = self._trained
        self._is_in_step |= self._trained is self.handed_out is not None
        return self._trained

    @property
    def lacks_backward(self) -> bool:
        """True if a network has run forward in the current part, of which no gradient has arrived."""
        return self._is_pending and self._with_gradient is not self._trained

    @property
    def current(self) -> BalancedBatch | None:
        """The batch of a call in the loop, or in a backward."""
        return self._trained if self._is_pending or _is_in_backward() else self.handed_out


@run_eagerly
def batch_of_layer(layer: nn.Module) -> BalancedBatch:
    """Return the batch that a layer trains; one of weight 1 outside of balanced batches."""
    if evaluated:
        return evaluated[0]
    owner = _of_layer.get(layer, lambda: None)()
    return _one_of(_all if owner is None else [owner], f"a {type(layer).__name__} outside of their networks")


@run_eagerly
def batch_of_rows(rows: Tensor) -> BalancedBatch:
    """Return the batch whose forward computed these rows; one of weight 1 outside of balanced batches."""
    if evaluated:
        return evaluated[0]
    owners: Collection[BatchesOfNetworks] = [owner for owner in _all if owner.current is not None]
    if len(owners) > 1:
        owners = _owners_in_graph(rows) or owners
    return _one_of(owners, "rows that no balanced network computed")


def share_of_mean(value: Tensor) -> Tensor:
    """Return a rank's loss times its share of the batch: the mean of that over the ranks is over all samples."""
    batch = batch_of_rows(value)
    if batch.weight == 1.0 != batch.share and batch not in evaluated:  # the loop has weighted its loss
        return value
    return value * (batch.share * batch.scale) if batch.samples and batch.share else torch.zeros_like(value)


def _one_of(owners: Iterable[BatchesOfNetworks], what: str) -> BalancedBatch:
    batches = [batch for owner in owners if (batch := owner.current) is not None]
    if len({(batch.weight, batch.samples > 0, batch.group) for batch in batches}) > 1:
        raise RuntimeError(
            f"balance: {len(batches)} balanced loaders have a batch each, and for {what} it is not known which one "
            "is meant; use outputs of one balanced network, and close() loaders that are not read any more"
        )
    return batches[0] if batches else _NO_BATCH


def _owners_in_graph(rows: Tensor) -> set[BatchesOfNetworks]:
    """Return the owners of the parameters of which rows are computed."""
    nodes: list[Any] = [rows.grad_fn]
    seen, found = {None}, set()
    while nodes:
        if (node := nodes.pop()) in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # of a leaf
            found.add(of_parameter.get(node.variable, lambda: None)())
        nodes += [following for following, _ in node.next_functions]
    return found - {None}


def _explain_mismatch() -> str:
    """Return that shares are unequal, if a batch that is trained now has such shares."""
    batches = [batch for owner in list(_all) if (batch := owner.handed_out) is not None and len(set(batch.counts)) > 1]
    if not batches:
        return ""
    return (
        f"; balance() has cut the batch to shares of {list(batches[0].counts)} samples: gather their tensors by "
        "gangline.gather_rows, and cut them to equally many parts by loader.micro_batches"
    )


hooks.explain_mismatch = _explain_mismatch


def _shares_tensor(first: Any, second: Any) -> bool:
    """Return whether a tensor of one or more dimensions is in both, perhaps copied to another device."""
    others = list(_tensors(second))
    return any(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))
        for one in _tensors(first)
        for other in others
    )


def _tensors(data: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.layout is torch.strided:
            yield leaf
        elif isinstance(leaf, Mapping):  # of a class of its own, such as BatchEncoding
            yield from _tensors(dict(leaf))


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class WeakCall:
    """A hook that calls a bound method through a weak reference to its object; copies of it do nothing."""

    def __init__(self, method: Any = None) -> None:
        """Refer to the object of a method."""
        self._owner: Callable[[], Any] = lambda: None
        if method is not None:
            self._owner, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *arguments: Any) -> Any:
        """Call the method, if its object exists."""
        owner = self._owner()
        return None if owner is None else self._function(owner, *arguments)

    def __reduce__(self) -> tuple[type[WeakCall], tuple[()]]:
        return type(self), ()


@run_eagerly
class _CallInForward(WeakCall):
    def __call__(self, *arguments: Any) -> Any:
        return super().__call__(*arguments)


def _remove(owner: weakref.ref[BatchesOfNetworks], hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()
    for parameter in [parameter for parameter, of in of_parameter.items() if of is owner or of() is None]:
        del of_parameter[parameter]


def weighted(gradient: Tensor, weight: float) -> Tensor:
    """Return a gradient times a weight; zeros for weight 0, also if the gradient is NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)

"""Reducer of gradients alone: their weighted mean over the workers returns, and an optimizer outside uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch

from gangline.kvstore.allreduce.store import AllReduceStore
from gangline.kvstore.buckets import Slot
from gangline.kvstore.interface import KVStore
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.reducer.reducer import BucketState, Reducer, are_dense, places_of, rows_of
from gangline.kvstore.sparse import RowSparse, summed

_NOTHING = 1e-30
"""Weight of a worker without gradients: lost in the sum of other weights, and above 0, so that its flags count."""


class GradientReducer(Reducer):
    """Replaces the gradients of one replica by their weighted mean over the workers of a synchronous store.

    The store needs the parameters' keys and runs no optimizer. ``.grad`` becomes a view of a flat tensor per bucket, a
    sparse one the rows of all workers.
    Each bucket ends in a flag per key, above 0 in the mean if some worker has a gradient for the key; a key without one
    keeps the ``.grad`` that it has.
    """

    def __init__(self, parameters: Mapping[Key, torch.Tensor], store: KVStore) -> None:
        super().__init__([parameters], store)
        self._outside = store.outside if isinstance(store, AllReduceStore) else {}
        self._outside.update(parameters)
        self._keeps_hooks = True  # `begin` is called within a backward, where hooks cannot be added
        self._has_gradients = True
        self._means: dict[Key, torch.Tensor] = {}
        self._whole: set[int] = set()  # priorities of the buckets that this worker has pushed with all gradients

    @contextmanager
    def not_compared(self) -> Iterator[None]:
        """Do not compare the weights of this worker with those of the others for a while."""
        compared = dict(self._outside)
        self._outside.clear()
        yield
        self._outside.update(compared)

    def has_assigned(self) -> bool:
        """Return True if a ``.grad`` is not a mean of this reducer: backward made it, or the user assigned it."""
        return any(
            one.grad is not None and one.grad is not self._means.get(key) for key, one in self._parameters[0].items()
        )

    def finish(self, weight: float | None = None) -> None:
        """Push what was not pushed yet, and replace the gradients by the means. Collective.

        ``weight`` is that of this worker's gradients; None or 0: it has none in this step.
        """
        if self._store.compresses:
            raise ValueError(
                f"the {self._store.type!r} store compresses, but means of gradients are not compressed; expected a "
                "store without compression, or a gangline Trainer or Module"
            )
        self._has_gradients = bool(weight)
        try:
            super().finish(weight or _NOTHING)
        finally:
            self._has_gradients = True

    def _push_rows(self) -> dict[Key, torch.Tensor | None]:
        """Replace sparse gradients by their means; no weights are pulled."""
        weight = self._weight if self._has_gradients else 0
        for key, parameter in self._parameters[0].items():
            if key not in self.sparse_keys:
                continue
            own = rows_of(parameter.grad) if parameter.grad is not None and weight else None
            received = self._gather_rows([weight, [] if own is None else [own.indices, own.values]])
            total = sum(share for share, _ in received)
            rows = [
                RowSparse(found[0], found[1] * (share / total), parameter.shape) for share, found in received if found
            ]
            if rows:
                parameter.grad = self._means[key] = summed(rows, parameter.device).to_coo().coalesce()
        return {}

    def _add_buckets(self, keys: Sequence[Key], *, is_loose: bool) -> None:  # noqa: ARG002  inherited
        for bucket in self._plan(keys):
            flags = Slot(f"flags of {bucket.keys[0]!r}", torch.Size([len(bucket.keys)]), (1,), bucket.numel)
            extended = replace(bucket, slots=(*bucket.slots, flags), numel=bucket.numel + len(bucket.keys))
            device = self._parameters[0][keys[0]].device
            flat = extended.empty(device)
            self._store.init(flags.key, extended.views(flat)[flags.key])
            self._store.fuse(extended)
            self._add_state(extended, [], [flat], keys=bucket.keys)

    def _push(
        self,
        state: BucketState,
        indices: Iterable[int],  # noqa: ARG002  there is one replica
        keys: Sequence[Key],
        *,
        async_op: bool = False,
    ) -> None:
        keys = keys if self._has_gradients else []
        for event in state.events:
            torch.cuda.current_stream(event.device).wait_event(event)
        values = self._value(state, 0, keys)
        flag, present = state.bucket.keys[-1], set(keys)
        flags = state.gradient_views[0][flag]
        flags.copy_(_flags(tuple(key in present for key in state.keys), flags.dtype, flags.device))
        is_whole = bool(self._weight) and len(present) == len(state.keys)  # each flag of the mean is then above 0
        (self._whole.add if is_whole else self._whole.discard)(state.priority)
        self._push_values(state, [values], [*keys, flag], self._weight, async_op=async_op)

    def _reload(self) -> None:
        """Do nothing: the store has no weights here."""

    def _pull(self, state: BucketState) -> None:
        flat, views = state.gradients[0], state.gradient_views[0]
        assert flat is not None
        self._store.pull_bucket(state.bucket, [flat], state.priority)
        keys: Iterable[Key] = state.keys
        if state.priority not in self._whole:  # only the others know; on a GPU the host waits for the sum
            flags = views[state.bucket.keys[-1]].real.tolist()
            keys = [key for key, flag in zip(keys, flags, strict=True) if flag > 0]
        parameters, means = [*map(self._parameters[0].__getitem__, keys)], [*map(views.__getitem__, keys)]
        gradients = [parameter.grad for parameter in parameters]
        if are_dense(gradients) and places_of(gradients) == places_of(means):  # the push has set them
            self._means.update(zip(keys, gradients, strict=True))
            return
        for key, parameter, mean in zip(keys, parameters, means, strict=True):
            parameter.grad = self._means[key] = mean.detach()


@lru_cache(maxsize=1024)
def _flags(pattern: tuple[bool, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 1 or 0 for each key; kept, because a copy to a GPU has the host wait for what runs there."""
    return torch.tensor(pattern, dtype=dtype, device=device)

"""Reducer of one of several workers, all of which push the same keys in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gangline.kvstore import KVStore
from gangline.kvstore.buckets import BucketValue
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.sparse import RowSparse
from gangline.models.reducer.reducer import BucketState, Reducer, is_sparse
from gangline.models.replicas import Replica
from gangline.models.workers import Workers


@dataclass(frozen=True)
class ExpectedGradients:
    """Gradients that a backward will produce, agreed on by all workers."""

    on_any_worker: frozenset[str]
    """Names of parameters for which some worker will have a gradient."""
    on_replicas: dict[int, set[str]]
    """Names for this worker's replicas, by replica index."""


class WorkerReducer(Reducer):
    """Reducer whose pushes are the same, in the same order, on all workers in each step.

    The workers agree on which gradients any of them has, either before buckets are pushed or after backward; a worker
    pushes zeros for those it lacks. The buckets are those of rank 0's first backward that had gradients.
    """

    def __init__(self, replicas: Sequence[Replica], store: KVStore, workers: Workers) -> None:
        """Register hooks on the trained parameters."""
        super().__init__(replicas, store)
        self._workers = workers
        self._expected: ExpectedGradients | None = None
        self._agreed_sparse: dict[str, bool] = {}  # whether a parameter's gradients are sent as rows
        self._ready: set[BucketState] = set()
        self._push_lock = threading.Lock()

    def expect(self, expected: ExpectedGradients | None) -> None:
        """Set, before `begin`, the gradients that workers agreed on, so that buckets are pushed early; None: none."""
        self._expected = expected

    def begin(self, active: Iterable[int], *, push_early: bool) -> None:
        """Prepare for a backward; buckets are pushed early if `expect` was called with a value."""
        super().begin(active, push_early=push_early)
        self._ready = set()
        expected = self._expected
        for state in self._buckets:
            if expected is None:
                state.pending = {}
            elif state.pending or not (self._active or self._repeated.intersection(state.names)):
                pending = {index: expected.on_replicas[index] & names for index, names in state.pending.items()}
                state.pending = {index: names for index, names in pending.items() if names}
                if not state.pending:
                    self._ready.add(state)
        if expected is not None:
            self._push_in_order(expected)

    def _on_full(self, state: BucketState) -> None:
        assert self._expected is not None
        with self._lock:
            self._ready.add(state)
        self._push_in_order(self._expected)

    def _push_in_order(self, expected: ExpectedGradients, *, push_all: bool = False) -> None:
        """Push ready buckets up to the first that is not ready; with ``push_all``, all of them."""
        with self._push_lock:
            for state in self._buckets:
                names = [name for name in state.names if name in expected.on_any_worker]
                if state.push is not None or not names:
                    continue
                if state not in self._ready and not push_all:
                    return
                self._push(state, self._active, names, async_op=True)

    def _values(self, state: BucketState, indices: Sequence[int], names: Sequence[str]) -> list[BucketValue]:
        """Return the replicas' gradients, with zeros in the first one's for what only other workers have."""
        values = super()._values(state, indices or [0], names)
        if isinstance(values[0], torch.Tensor):
            return values  # a flat tensor holds zeros already
        own: dict[Key, torch.Tensor] = dict(values[0])
        for name in names:
            if not any(isinstance(value, torch.Tensor) or name in value for value in values):
                own[name] = torch.zeros_like(self._replicas[0].parameters[name])
        return [own, *values[1:]]

    def finish(self) -> None:
        """Push what was not pushed yet, and pull all weights into the replicas.

        Parameters for which no replica of any worker has a gradient are left alone.
        """
        expected = self._expected or self._agree_on_gradients()
        self._expected = None
        new = self._agree_on_new(expected)
        for state in self._buckets:
            state.pending = {}
            if state.push is None:
                self._make_dense(state.names)
        self._active = [
            index
            for index, replica in enumerate(self._replicas)
            if any(parameter.grad is not None for parameter in replica.parameters.values())
        ]
        self._push_in_order(expected, push_all=True)
        self._active = []
        self._exchange_unbucketed(
            [name for name in self._names if name in expected.on_any_worker and name not in self._bucket_of]
        )
        self._pull_buckets()
        if new is not None and not self._buckets:
            self._form_buckets(*new)

    @property
    def _names(self) -> list[str]:
        return list(self._replicas[0].parameters)

    def _agree_on_gradients(self) -> ExpectedGradients:
        """Exchange which gradients the workers have after backward."""
        own = [any(parameter.grad is not None for parameter in self._parameters(name)) for name in self._names]
        return ExpectedGradients(named_by_any(self._names, self._exchange(bytes(own))), {})

    def _exchange(self, value: Any) -> list[Any]:
        for state in self._buckets:
            if state.push is not None:
                state.push.wait()  # keeps the workers' collective calls in one order
        return self._workers.all_gather(value, "step")

    def _agree_on_new(self, expected: ExpectedGradients) -> tuple[list[str], set[str]] | None:
        """Fix bucket order and the dense or sparse format of parameters that have their first gradient. Collective.

        Returns:
            The order of dense parameters and the names excluded from buckets; None if there are no new parameters.
        """
        new = [name for name in self._names if name in expected.on_any_worker and name not in self._agreed_sparse]
        if not new:
            return None
        sparse = [name for name in new if any(is_sparse(p.grad) for p in self._parameters(name))]
        own = [list(self._arrivals), sparse, sorted(self._repeated_arrivals()), sorted(self._excluded())]
        received = self._exchange(own)
        orders, sparse_names, repeated, excluded = ([theirs[part] for theirs in received] for part in range(4))
        for name in new:
            self._agreed_sparse[name] = any(name in names for names in sparse_names)
        self._repeated |= {name for names in repeated for name in names}
        order = dict.fromkeys(name for names in orders for name in names)
        dense = [name for name in order if not self._agreed_sparse[name]]
        return dense, {name for names in excluded for name in names}

    def _make_dense(self, names: Iterable[str]) -> None:
        """Convert sparse gradients of parameters that workers agreed to send dense."""
        for name in names:
            for parameter in self._parameters(name):
                gradient = parameter.grad
                if gradient is not None and is_sparse(gradient):
                    parameter.grad = gradient.to_dense()

    def _exchange_unbucketed(self, names: Sequence[str]) -> None:
        sparse = [name for name in names if self._agreed_sparse[name]]
        dense = [name for name in names if not self._agreed_sparse[name]]
        rows = self._push_rows(sparse) if sparse else {}
        self._make_dense(dense)
        self._exchange_dense(dense, [self._dense_gradients(name) for name in dense])
        for name, numbers in rows.items():
            self._store.row_sparse_pull(name, self._weights(name), row_ids=numbers)

    def _push_rows(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Push gradients as rows; return the row numbers that any worker pushed, by name."""
        own = {name: self._row_gradients(name) for name in names}
        received = self._exchange({name: _rows_of(gradients) for name, gradients in own.items()})
        for name, gradients in own.items():
            self._store.push(name, gradients)
        return {
            name: torch.cat([theirs[name] for theirs in received]).to(gradients[0].device)
            for name, gradients in own.items()
        }

    def _dense_gradients(self, name: str) -> list[torch.Tensor]:
        parameters = self._parameters(name)
        if self._store.compresses:  # every replica must push, or residuals would be applied to other replicas
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return [p.grad for p in parameters if p.grad is not None] or [torch.zeros_like(parameters[0])]

    def _row_gradients(self, name: str) -> list[RowSparse]:
        """Return the gradients of a parameter as rows; without gradients, no rows."""
        found = [
            RowSparse.from_coo(p.grad) if is_sparse(p.grad) else RowSparse(_all_rows(p), p.grad, p.shape)
            for p in self._parameters(name)
            if p.grad is not None
        ]
        parameter = self._replicas[0].parameters[name].detach()
        return found or [RowSparse(_all_rows(parameter[:0]), parameter[:0], parameter.shape)]


def named_by_any(names: Sequence[str], received: Sequence[bytes]) -> frozenset[str]:
    """Return the names for which some worker sent a nonzero byte; each worker sends one byte per name."""
    return frozenset(name for name, flags in zip(names, zip(*received, strict=True), strict=True) if any(flags))


def _all_rows(table: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(table), device=table.device)


def _rows_of(gradients: Sequence[RowSparse]) -> torch.Tensor:
    rows: torch.Tensor = torch.unique(torch.cat([gradient.indices.cpu() for gradient in gradients]))
    return rows

"""The flow of gradients of one of several workers, who push the same keys in the same order."""

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
from gangline.models.reducer.reducer import Filling, Reducer, is_sparse
from gangline.models.replicas import Replica
from gangline.models.workers import Workers


@dataclass(frozen=True)
class Expected:
    """Which gradients a backward will give, where workers have agreed on it."""

    anywhere: frozenset[str]
    """The names that some worker will have."""
    here: dict[int, set[str]]
    """Those of this worker, by the replica's place."""


class WorkerReducer(Reducer):
    """A flow whose pushes are the same, in the same order, on all workers in each step.

    They agree on which gradients some worker has, before buckets leave or else when backward is over; what a worker has
    none of it sends zeros for. The buckets are those of rank 0's first backward that had gradients.
    """

    def __init__(self, replicas: Sequence[Replica], store: KVStore, workers: Workers) -> None:
        """Hook into the parameters that are trained."""
        super().__init__(replicas, store)
        self._workers = workers
        self._expected: Expected | None = None
        self._agreed_sparse: dict[str, bool] = {}  # whether a parameter's gradients travel by rows
        self._ready: set[Filling] = set()  # buckets that may leave
        self._door = threading.Lock()  # through which they leave one by one

    def expect(self, expected: Expected | None) -> None:
        """Be told, before `begin`, what workers have agreed on, which lets buckets leave early; None: nothing yet."""
        self._expected = expected

    def begin(self, places: Iterable[int], *, leave_early: bool) -> None:
        """Get ready for a backward; buckets leave early if `expect` was called for it."""
        super().begin(places, leave_early=leave_early)
        self._ready = set()
        expected = self._expected
        for filling in self._fillings:
            if expected is None:
                filling.awaited = {}
            elif filling.awaited or not (self._places or self._repeated.intersection(filling.names)):
                awaited = {place: expected.here[place] & names for place, names in filling.awaited.items()}
                filling.awaited = {place: names for place, names in awaited.items() if names}
                if not filling.awaited:
                    self._ready.add(filling)
        if expected is not None:
            self._leave_in_order(expected)

    def _filled(self, filling: Filling) -> None:
        assert self._expected is not None
        with self._lock:
            self._ready.add(filling)
        self._leave_in_order(self._expected)

    def _leave_in_order(self, expected: Expected, *, all_of_them: bool = False) -> None:
        """Have the buckets leave that are ready and have none before them that is not; or ``all_of_them``."""
        with self._door:
            for filling in self._fillings:
                going = [name for name in filling.names if name in expected.anywhere]
                if filling.left is not None or not going:
                    continue
                if filling not in self._ready and not all_of_them:
                    return
                self._leave(filling, self._places, going, async_op=True)

    def _values(self, filling: Filling, places: Sequence[int], names: Sequence[str]) -> list[BucketValue]:
        """What this worker's replicas have; the first one has zeros for what none has, and other workers do."""
        values = super()._values(filling, places or [0], names)
        if isinstance(values[0], torch.Tensor):
            return values  # it holds them already
        own: dict[Key, torch.Tensor] = dict(values[0])
        for name in names:
            if not any(isinstance(value, torch.Tensor) or name in value for value in values):
                own[name] = torch.zeros_like(self._replicas[0].parameters[name])
        return [own, *values[1:]]

    def finish(self) -> None:
        """Push what has not left, and pull all weights into the replicas.

        Parameters that no replica of any worker has a gradient for are left alone.
        """
        expected = self._expected or self._agreed_now()
        self._expected = None
        new = self._settle_new(expected)
        for filling in self._fillings:
            filling.awaited = {}
            if filling.left is None:
                self._make_dense(filling.names)
        self._places = [
            place
            for place, replica in enumerate(self._replicas)
            if any(parameter.grad is not None for parameter in replica.parameters.values())
        ]
        self._leave_in_order(expected, all_of_them=True)
        self._places = []
        self._move_apart([name for name in self._names if name in expected.anywhere and name not in self._home])
        self._pull_buckets()
        if new is not None and not self._fillings:
            self._form(*new)

    @property
    def _names(self) -> list[str]:
        return list(self._replicas[0].parameters)

    def _agreed_now(self) -> Expected:
        """What workers have, after their backwards."""
        own = [any(parameter.grad is not None for parameter in self._parameters(name)) for name in self._names]
        return Expected(named_by_any(self._names, self._exchange(bytes(own))), {})

    def _exchange(self, value: Any) -> list[Any]:
        for filling in self._fillings:
            if filling.left is not None:
                filling.left.wait()  # so that all workers' calls come in one order
        return self._workers.exchange(value)

    def _settle_new(self, expected: Expected) -> tuple[list[str], set[str]] | None:
        """Agree on how gradients travel that come for the first time: in which order, sparse or not, alone or not."""
        new = [name for name in self._names if name in expected.anywhere and name not in self._agreed_sparse]
        if not new:
            return None
        sparse = [name for name in new if any(is_sparse(p.grad) for p in self._parameters(name))]
        own = [list(self._arrivals), sparse, sorted(self._repeated_here()), sorted(self._lone_here())]
        everybody = self._exchange(own)
        orders, sparse_ones, repeated, lone = ([theirs[part] for theirs in everybody] for part in range(4))
        for name in new:
            self._agreed_sparse[name] = any(name in names for names in sparse_ones)
        self._repeated |= {name for names in repeated for name in names}
        order = dict.fromkeys(name for names in orders for name in names)
        return [name for name in order if not self._agreed_sparse[name]], {name for names in lone for name in names}

    def _make_dense(self, names: Iterable[str]) -> None:
        """Where workers have agreed on dense gradients."""
        for name in names:
            for parameter in self._parameters(name):
                gradient = parameter.grad
                if gradient is not None and is_sparse(gradient):
                    parameter.grad = gradient.to_dense()

    def _move_apart(self, names: Sequence[str]) -> None:
        sparse = [name for name in names if self._agreed_sparse[name]]
        dense = [name for name in names if not self._agreed_sparse[name]]
        rows = self._push_rows(sparse) if sparse else {}
        self._make_dense(dense)
        self._move_dense(dense, [self._dense_gradients(name) for name in dense])
        for name, numbers in rows.items():
            self._store.row_sparse_pull(name, self._weights(name), row_ids=numbers)

    def _push_rows(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Push rows; gives the numbers of those that any worker has pushed."""
        own = {name: self._row_gradients(name) for name in names}
        everybody = self._exchange({name: _rows_of(gradients) for name, gradients in own.items()})
        for name, gradients in own.items():
            self._store.push(name, gradients)
        return {
            name: torch.cat([theirs[name] for theirs in everybody]).to(gradients[0].device)
            for name, gradients in own.items()
        }

    def _dense_gradients(self, name: str) -> list[torch.Tensor]:
        parameters = self._parameters(name)
        if self._store.compresses:  # all must send, or residuals would change hands
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        return [p.grad for p in parameters if p.grad is not None] or [torch.zeros_like(parameters[0])]

    def _row_gradients(self, name: str) -> list[RowSparse]:
        """The gradients of a parameter that workers have agreed to send by rows; without any, no rows."""
        found = [
            RowSparse.from_coo(p.grad) if is_sparse(p.grad) else RowSparse(_all_rows(p), p.grad, p.shape)
            for p in self._parameters(name)
            if p.grad is not None
        ]
        parameter = self._replicas[0].parameters[name].detach()
        return found or [RowSparse(_all_rows(parameter[:0]), parameter[:0], parameter.shape)]


def named_by_any(names: Sequence[str], everybody: Sequence[bytes]) -> frozenset[str]:
    """Those of ``names`` for which some worker has a byte that is not 0, where each gives one a name."""
    return frozenset(name for name, flags in zip(names, zip(*everybody, strict=True), strict=True) if any(flags))


def _all_rows(table: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(table), device=table.device)


def _rows_of(gradients: Sequence[RowSparse]) -> torch.Tensor:
    rows: torch.Tensor = torch.unique(torch.cat([gradient.indices.cpu() for gradient in gradients]))
    return rows

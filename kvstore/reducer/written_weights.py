"""Parameters that somebody writes between two steps, by load_state_dict or weight clipping for example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from gangline.collectives import compiled_core
from gangline.collectives.engine import host_staging
from gangline.kvstore.interface import KVStore
from gangline.kvstore.reducer.reducer import Reducer
from gangline.kvstore.replica_check import octets_of

_CHECKED_STEPS = 3  # first steps, in which the host waits for GPUs to compare bits
_STEPS_PER_COPY = 8  # later steps whose comparisons on a GPU share a copy to the host
_WORDS = 64  # 8-byte words in a row of `_sums_of_bits`
_data_ptr, _version = methodcaller("data_ptr"), attrgetter("_version")
_Unit = tuple[Sequence[Any], torch.Tensor]  # keys, and the tensor that holds their parameters


class WrittenWeights:
    """Copies parameters that were written since `note` into their store, which would undo the writes else.

    Writes show in a parameter's address or version. Those through ``.data`` show only in the bits, which are summed
    before and after each step. On GPUs the host does not wait for these sums after the first steps, unless there were
    such writes in them: a later write is undone by its step, and a RuntimeError about eight steps later. Of a table
    with sparse gradients only the rows are summed that a step replaces; writes to these are a RuntimeError.

    The parameters are those of the first replica, with at least the reducer's keys. ``sums_bits``: whether to look for
    writes through ``.data``, because the store does not update the parameters in place.
    """

    def __init__(
        self, parameters: Mapping[Any, torch.Tensor], reducer: Reducer, store: KVStore, *, sums_bits: bool
    ) -> None:
        self._parameters, self._reducer, self._store = parameters, reducer, store
        self._sums_bits = sums_bits
        self._defers = any(parameter.is_cuda for parameter in parameters.values())
        self._flags: dict[torch.device, list[tuple[Sequence[Any], torch.Tensor]]] = {}
        """By device: keys, and whether their bits had changed, for the steps since the last copy."""
        self._copies: list[tuple[torch.cuda.Event | None, torch.Tensor, list[Sequence[Any]]]] = []
        self._row_sums: dict[Any, torch.Tensor] = {}
        self.steps = 0
        """Number of calls of `note`."""
        self.writes_data = False
        """True if somebody writes through ``.data``."""
        if sums_bits:
            reducer.before_rows, reducer.after_rows = self._check_rows, self._note_rows
        self.note()

    def note(self, *, after_step: bool = False) -> None:
        """Record the parameters' addresses, versions and bits, after the store's weights were pulled.

        ``after_step``: the reducer has done that, and nobody else since the last call.
        """
        self.steps += 1
        self._known = self._states()
        self._units = self._units_of_bits() if self._sums_bits else []
        self._sums = [_sums_of_bits(tensor) for _, tensor in self._units]
        if not after_step:
            self._row_sums.clear()
        if self._sums_bits:
            for key in self._reducer.sparse_keys - self._row_sums.keys():
                self._note_rows(key, None)

    def find(self) -> list[Any]:
        """Return the keys of the parameters that were written; RuntimeError if a write was lost."""
        states = self._states()
        if states == self._known and not self._units:
            return []
        written: set[Any] = set()
        changed: set[Any] = set()
        if states != self._known:
            for (key, parameter), before, now in zip(self._parameters.items(), self._known, states, strict=True):
                if before[0] != now[0]:
                    self._reducer.expect_moved(key)
                if before != now:
                    changed.add(key)
                    if before[1] != now[1] or not self._is_stored(key, parameter):
                        written.add(key)
        by_bits = self._with_changed_bits(changed)
        self.writes_data |= bool(by_bits)
        return [key for key in self._parameters if key in written or key in by_bits]

    def assign(self) -> list[Any]:
        """Copy the parameters that were written into the store, and return their keys. Collective if there are any."""
        written = self.find()
        if written:
            self._store.assign(written, [self._parameters[key] for key in written])
            self.note()
        return written

    def _states(self) -> list[tuple[int, int]]:
        """Return each parameter's address and version."""
        parameters = self._parameters.values()
        return [*zip(map(_data_ptr, parameters), map(_version, parameters), strict=True)]

    def _is_stored(self, key: Any, parameter: torch.Tensor) -> bool:
        """Return True if a parameter whose memory was replaced still has the store's value."""
        stored = self._reducer.view_of(key)
        if stored is None or stored.data_ptr() == parameter.data_ptr():
            self._store.pull(key, stored := parameter.detach().clone())
        is_alike = (stored.dtype, stored.device) == (parameter.dtype, parameter.device)
        return is_alike and torch.equal(stored, parameter)

    # Bits

    def _units_of_bits(self) -> list[_Unit]:
        """Return whole buckets, and the parameters outside of them.

        Without rounds the store's values may be newer, so that they do not tell which key of a bucket was written.
        """
        buckets = [] if self._store.is_async else self._reducer.flat_weights()
        covered = self._reducer.sparse_keys.union(*(keys for keys, _ in buckets))
        return buckets + [([key], one) for key, one in self._parameters.items() if key not in covered]

    def _with_changed_bits(self, changed: set[Any]) -> set[Any]:
        """Return the keys whose bits have changed, beside ``changed``, which show it otherwise."""
        sums = [_sums_of_bits(tensor) for _, tensor in self._units]
        pairs = [*zip(self._units, self._sums, sums, strict=True)]
        if self._defers and self.steps > _CHECKED_STEPS and not self.writes_data:
            self._raise_if_lost()
            for (of_unit, _), before, now in pairs:
                if before.shape == now.shape and changed.isdisjoint(of_unit):
                    self._flags.setdefault(now.device, []).append((of_unit, (before != now).any()))
            if self.steps % _STEPS_PER_COPY == 0:
                self._copy_flags()
            pairs = [one for one in pairs if not changed.isdisjoint(one[0][0])]
        keys = [key for unit, before, now in pairs if not torch.equal(before, now) for key in unit[0]]
        return {
            key
            for key in keys
            if key not in changed and (self._store.is_async or not self._is_stored(key, self._parameters[key]))
        }

    def _copy_flags(self) -> None:
        """Start the copies of the flags to the host, which does not wait for them."""
        for device, flags in self._flags.items():
            changed = torch.stack([flag for _, flag in flags])
            event = None
            if device.type == "cuda":
                on_host = host_staging.pinned_memory(len(flags), torch.bool)
                changed = on_host.copy_(changed, non_blocking=True)
                event = torch.cuda.current_stream(device).record_event()
            self._copies.append((event, changed, [of_unit for of_unit, _ in flags]))
        self._flags.clear()

    def _raise_if_lost(self) -> None:
        """Raise RuntimeError if the bits had changed before an earlier step whose comparison has been copied."""
        while self._copies:
            event, flags, units = self._copies[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            del self._copies[0]
            keys = [
                *dict.fromkeys(key for flag, unit in zip(flags.tolist(), units, strict=True) if flag for key in unit)
            ]
            if keys:
                self.writes_data = True  # the next ones are found in time
                raise RuntimeError(
                    _lost(f"one of the parameters {keys}" if len(keys) > 1 else f"parameter {keys[0]!r}")
                )

    # Tables with sparse gradients

    def _check_rows(self, key: Any, numbers: torch.Tensor | None) -> None:
        """Raise RuntimeError if rows that the store's are to replace were written since they were noted."""
        known = self._row_sums.get(key)
        if known is None:  # its gradient became sparse in this step
            return
        sums, rows = _sums_of_rows(self._parameters[key], numbers), numbers
        if rows is not None:
            known = known[rows.to(known.device)]
        if not torch.equal(known, sums):
            number = int((known != sums).flatten(1).any(1).nonzero()[0])
            raise RuntimeError(_lost(f"row {number if rows is None else int(rows[number])} of parameter {key!r}"))

    def _note_rows(self, key: Any, numbers: torch.Tensor | None) -> None:
        sums = _sums_of_rows(self._parameters[key], numbers)
        if numbers is None or key not in self._row_sums:
            self._row_sums[key] = sums if numbers is None else _sums_of_rows(self._parameters[key], None)
        else:
            self._row_sums[key].index_copy_(0, numbers.to(sums.device), sums)


def _lost(what: str) -> str:
    return (
        f"{what} was written through .data, and the store's weights replace that write; expected it in "
        "`with torch.no_grad():` on the parameter itself, on all workers, which every step notices"
    )


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums, int64, that change where values have changed or have changed places.

    The core reads a tensor once. Torch reads it twice, to sum 8-byte words by row and by column of a table; it takes 13
    times as long for 4-byte integers.
    """
    octets = octets_of(tensor)
    if octets.is_cpu and compiled_core.core is not None:
        return torch.tensor(compiled_core.core.checksum(octets.data_ptr(), octets.nbytes), device="cpu")
    words = octets[: octets.numel() // 8 * 8].view(torch.int64)
    table = words[: words.numel() // _WORDS * _WORDS].view(-1, _WORDS)
    parts = [table.sum(1), table.sum(0), words[table.numel() :]]
    if octets.numel() % 8:
        parts.append(octets[words.nbytes :].long())
    return torch.cat(parts)


def _sums_of_rows(table: torch.Tensor, numbers: torch.Tensor | None) -> torch.Tensor:
    """Return two sums of the bits of each of these rows, or of all, shape (rows, 2); one is weighted by position."""
    rows = table.detach() if numbers is None else table.detach()[numbers.to(table.device)]
    width = table.nbytes // max(len(table), 1)
    octets = octets_of(rows).view(len(rows), width)
    words = octets.view(torch.int64) if width % 8 == 0 else octets.long()
    position = torch.arange(1, words.shape[1] + 1, device=words.device)
    return torch.stack([words.sum(1), (words * position).sum(1)], 1)

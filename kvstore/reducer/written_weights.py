"""Parameters that somebody writes between two steps, by load_state_dict or weight clipping for example."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any

import torch

from gangline.kvstore.interface import KVStore
from gangline.kvstore.reducer.reducer import Reducer

_CHECKED_STEPS = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_data_ptr, _version = methodcaller("data_ptr"), attrgetter("_version")


class WrittenWeights:
    """Copies parameters that were written since `note` into their store.

    Writes show in a parameter's address or version. Those through ``.data`` show only in the bits, which are summed in
    the first steps, and in every step if there are such writes.

    Args:
        parameters: of the first replica, with at least the reducer's keys.
        reducer: the reducer that updates them.
        store: the store that holds them.
        sums_bits: whether to look for writes through ``.data``, because the store does not update the parameters in
            place.
    """

    def __init__(
        self, parameters: Mapping[Any, torch.Tensor], reducer: Reducer, store: KVStore, *, sums_bits: bool
    ) -> None:
        self._parameters, self._reducer, self._store = parameters, reducer, store
        self._may_sum_bits = sums_bits
        self.steps = 0
        """Number of calls of `note`."""
        self.writes_data = False
        """True if somebody writes through ``.data``."""
        self.note()

    def note(self) -> None:
        """Record the parameters' addresses, versions and bits, after the store's weights were pulled."""
        self._sums_bits = self._may_sum_bits and (self.steps < _CHECKED_STEPS or self.writes_data)
        self.steps += 1
        self._known = self._states()

    def find(self) -> list[Any]:
        """Return the keys of the parameters that were written."""
        states = self._states()
        if states == self._known:
            return []
        written = []
        for (key, parameter), before, now in zip(self._parameters.items(), self._known, states, strict=True):
            if before[0] != now[0]:
                self._reducer.expect_moved(key)
            if before[1:] != now[1:] or (before[0] != now[0] and not self._is_stored(key, parameter)):
                written.append(key)
                self.writes_data |= before[:2] == now[:2]
        return written

    def assign(self) -> list[Any]:
        """Copy the parameters that were written into the store, and return their keys. Collective if there are any."""
        written = self.find()
        if written:
            self._store.assign(written, [self._parameters[key] for key in written])
            self.note()
        return written

    def _is_stored(self, key: Any, parameter: torch.Tensor) -> bool:
        """Return True if a parameter whose memory was replaced still has the store's value."""
        stored = self._reducer.view_of(key)
        if stored is None:
            self._store.pull(key, stored := parameter.detach().clone())
        is_alike = (stored.dtype, stored.device) == (parameter.dtype, parameter.device)
        return is_alike and torch.equal(stored, parameter)

    def _states(self) -> list[tuple[int, int, int]]:
        """Return each parameter's address, its version, and in the first steps the sum of its bits."""
        parameters = self._parameters.values()
        sums = map(_sum_of_bits, parameters) if self._sums_bits else repeat(0, len(parameters))
        return [*zip(map(_data_ptr, parameters), map(_version, parameters), sums, strict=True)]


def _sum_of_bits(tensor: torch.Tensor) -> int:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return int(tensor.view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64))

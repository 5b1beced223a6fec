"""The `device` store: one process; each key is summed and updated on one of the devices, its owner."""

from __future__ import annotations

import torch

from kvstore.base import Pairs, register
from kvstore.local import LocalStore
from kvstore.optimizer_spec import Key


@register("device", "local_allreduce_device")
class DeviceStore(LocalStore):
    """Spreads the keys over the devices by bytes; sums, weights and updates stay there.

    A device is a place in the lists of tensors that come with a key, so CPU contexts, and one GPU listed twice,
    are spread over as distinct GPUs are. A key's owner is chosen when a list first comes for it, the largest keys
    of a call first, each for the device that owns the fewest bytes so far.

    On GPUs values travel from device to device, on streams of the store's own.
    """

    def __init__(self, name: str = "device") -> None:
        super().__init__(name)
        self._owners: dict[Key, int] = {}
        self._owned_bytes: list[int] = []

    def owner(self, key: Key) -> int | None:
        """The place of the key's owner in its lists of tensors; None until a list came."""
        return self._owners.get(key)

    def _first_home(self, value: torch.Tensor) -> torch.device:
        return value.device

    def _place(self, pairs: Pairs) -> None:
        new = {key: tensors for key, tensors in pairs if key not in self._owners}
        for key, tensors in sorted(new.items(), key=lambda pair: -pair[1][0].nbytes):
            if len(tensors) == 1:  # a bare tensor: the key goes where it is, and its owner stays open
                self._move(key, tensors[0].device)
                continue
            self._owned_bytes += [0] * (len(tensors) - len(self._owned_bytes))
            owner = min(range(len(tensors)), key=lambda place: self._owned_bytes[place])
            self._owners[key] = owner
            self._owned_bytes[owner] += tensors[owner].nbytes
            self._move(key, tensors[owner].device)

    def _move(self, key: Key, device: torch.device) -> None:
        entry = self._entries[key]
        if entry.stored.device == device:
            return
        entry.stored = entry.stored.to(device)
        if self._optimizer is not None:
            self._optimizer.add(key, entry.stored)

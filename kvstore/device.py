"""The `device` and `nccl` stores: one process; each key is reduced and updated on one of the devices, its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gangline.collectives.devices.device_group import require
from gangline.kvstore.arguments import Value, check_memory, free_memory, keys_of
from gangline.kvstore.buckets import Bucket
from gangline.kvstore.local import LocalStore
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.placement import place


class DeviceStore(LocalStore):
    """Store that balances the keys over the devices by bytes; each device holds its keys' weights and optimizer state.

    A device is a position in a key's list of tensors. CPU contexts, and a GPU that is listed twice, therefore count as
    distinct devices. A key's owner is chosen at the first call with a list of tensors: keys in descending size, each to
    the device that owns the fewest bytes so far; with ``shard="optimizer"`` the fewest for its memory.

    On GPUs values are copied from device to device, on the store's own streams.
    """

    def __init__(self, name: str = "device") -> None:
        super().__init__(name)
        self._owners: dict[Key, int] = {}
        self._owned_bytes: list[int] = []
        self._devices: list[torch.device] = []  # by position, as of the last call
        self._memory: Sequence[float] | str | None = None

    def owner(self, key: Key) -> int | None:
        """Return the position of the key's owner in its lists of tensors; None before the first list."""
        return self._owners.get(key)

    @property
    def owned_bytes(self) -> list[int]:
        """Bytes of the weights that each device updates, by position in the lists of tensors."""
        return list(self._owned_bytes)

    def _check_shard(self, shard: str | None, memory: Sequence[float] | str) -> None:
        self._memory = memory if shard is not None else None

    def _initial_device(self, value: torch.Tensor) -> torch.device:
        return value.device

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]], *, pulled: bool = False) -> None:
        if self._owners.keys() >= {*keys_of(pairs)}:
            return
        new = {key: values for key, values in pairs if key not in self._owners and len(values) > pulled}
        for key in [key for key, values in new.items() if len(values) == 1]:  # a single tensor: no owner is chosen
            device = new.pop(key)[0].device
            if self._entries[key].stored.device != device:
                self._move(key, device)
        for key, values in sorted(new.items(), key=lambda pair: -self._entries[pair[0]].stored.nbytes):
            if key in self._owners:  # decided just now, with another key of its bucket
                continue
            self._devices[: len(values)] = [value.device for value in values]
            together = next((bucket.keys for bucket in self._flats if key in bucket), [key])
            self._own(together, len(values))
            for one in together:
                self._move(one, values[self._owners[key]].device)

    def _own(self, keys: Sequence[Key], devices: int) -> None:
        """Assign the keys together to the position with the fewest owned bytes relative to its memory."""
        self._owned_bytes += [0] * (devices - len(self._owned_bytes))
        size = sum(self._entries[key].stored.nbytes for key in keys)
        memory = [1.0] * devices if self._memory is None else self._memory_of(devices)
        (owner,) = place([size], memory, self._owned_bytes)
        self._owners.update(dict.fromkeys(keys, owner))

    def _memory_of(self, devices: int) -> Sequence[float]:
        """Return the memory of each device, measured at the first call with "auto"."""
        assert self._memory is not None
        check_memory(self._memory, devices, "devices")
        if isinstance(self._memory, str):
            used = self._devices[:devices]
            free = {device: free_memory(device) for device in used}
            self._memory = [free[device] / used.count(device) for device in used]
        return self._memory

    def _device_of(self, bucket: Bucket) -> torch.device:
        if not self._devices:
            return self._entries[bucket.keys[0]].stored.device
        for key in bucket.keys:
            if key in self._owners:
                self._owned_bytes[self._owners.pop(key)] -= self._entries[key].stored.nbytes
        self._own(bucket.keys, len(self._devices))
        return self._devices[self._owners[bucket.keys[0]]]

    def _move(self, key: Key, device: torch.device) -> None:
        entry = self._entries[key]
        if entry.stored.device == device:
            return
        self._unfuse(key)
        self._entries[key] = entry = type(entry)(entry.stored.to(device))
        optimizer = self._optimizer_of(key)
        if optimizer is not None:
            optimizer.add(key, entry.stored)


class NcclStore(DeviceStore):
    """The `device` store with NCCL required.

    The first call with a list of tensors raises ValueError if NCCL does not support the devices (the host, or a GPU
    listed twice), and RuntimeError if NCCL is not installed.
    """

    def __init__(self, name: str = "nccl") -> None:
        super().__init__(name)
        self._checked: set[tuple[torch.device, ...]] = set()

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]], *, pulled: bool = False) -> None:
        for devices in {tuple(value.device for value in values) for _, values in pairs if len(values) > 1}:
            if devices not in self._checked:
                require(devices, "nccl")
                self._checked.add(devices)
        super()._place(pairs, pulled=pulled)

"""The `device` store: one process; each key is summed and updated on one of the devices, its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gangline.collectives.devices.device_group import require
from gangline.kvstore.arguments import Value
from gangline.kvstore.buckets import Bucket
from gangline.kvstore.local import LocalStore
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.registry import register


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
        self._devices: list[torch.device] = []  # of the places, as they last came

    def owner(self, key: Key) -> int | None:
        """The place of the key's owner in its lists of tensors; None until a list came."""
        return self._owners.get(key)

    def _first_home(self, value: torch.Tensor) -> torch.device:
        return value.device

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]]) -> None:
        new = {key: values for key, values in pairs if key not in self._owners}
        for key, values in sorted(new.items(), key=lambda pair: -self._entries[pair[0]].stored.nbytes):
            if len(values) == 1:  # a bare tensor: the key goes where it is, and its owner stays open
                self._move(key, values[0].device)
                continue
            if key in self._owners:  # with the bucket of another key
                continue
            self._devices[: len(values)] = [value.device for value in values]
            together = next((bucket.keys for bucket in self._flats if key in bucket), [key])
            self._own(together, len(values))
            for one in together:
                self._move(one, values[self._owners[key]].device)

    def _own(self, keys: Sequence[Key], places: int) -> None:
        """Give the keys, together, to the place that owns the fewest bytes."""
        self._owned_bytes += [0] * (places - len(self._owned_bytes))
        owner = min(range(places), key=lambda place: self._owned_bytes[place])
        self._owners.update(dict.fromkeys(keys, owner))
        self._owned_bytes[owner] += sum(self._entries[key].stored.nbytes for key in keys)

    def _home_of(self, bucket: Bucket) -> torch.device:
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
        entry.stored = entry.stored.to(device)
        if self._optimizer is not None:
            self._optimizer.add(key, entry.stored)


@register("nccl")
class NcclStore(DeviceStore):
    """The `device` store for GPUs that NCCL joins: an error where it cannot.

    Raises, when a list of tensors first comes: ValueError for devices that NCCL does not take (the host, a GPU twice);
    RuntimeError where it is not installed.
    """

    def __init__(self, name: str = "nccl") -> None:
        super().__init__(name)
        self._joined: set[tuple[torch.device, ...]] = set()

    def _place(self, pairs: Sequence[tuple[Key, Sequence[Value]]]) -> None:
        for places in {tuple(value.device for value in values) for _, values in pairs if len(values) > 1}:
            if places not in self._joined:
                require(places, "nccl")
                self._joined.add(places)
        super()._place(pairs)

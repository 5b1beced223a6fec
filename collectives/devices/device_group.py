"""`DeviceGroup`: collectives between the devices of one process, on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gangline.collectives.devices.backends import copies
from gangline.collectives.devices.backends.base import Backend, Transfer
from gangline.collectives.devices.backends.selection import open_backend
from gangline.collectives.engine import reduction
from gangline.collectives.engine.arguments import check_shape, check_tensor, check_written
from gangline.collectives.engine.host_staging import overlap
from gangline.collectives.thread_pool import ProcessLock

__all__ = ["DeviceGroup", "Transfer", "move", "reduce", "require"]


class HasDevice(Protocol):
    """Object with a device, such as a `Context`."""

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its tensors."""


class DeviceGroup:
    """Devices of one process that move and reduce tensors together.

    A position is an index into the list of devices. Every list of tensors has one tensor per position, on its device,
    all of one shape and dtype. Dtypes and ``op`` are those of `Communicator`: float16 and bfloat16 are combined in
    float32 and rounded once; NCCL rounds at each hop. Values are combined in the order of the positions, except by
    NCCL. All positions get the same bits. Tensors may have any strides and be empty; written ones must not be expanded.

    All ``cpu(i)`` are the host, yet distinct positions, and a GPU may occur several times. On GPUs a call returns
    before it is done: like torch's operations, it is enqueued on each device's current stream.

    Raises:
        ValueError: in all calls but `move`, if an operation or a root is unknown, or tensors do not fit the devices or
            each other.
        TypeError: in all calls but `move`, if a tensor is not dense, or its dtype is not supported by the operation.
    """

    def __init__(self, devices: Sequence[HasDevice | torch.device], implementation: str | None = None) -> None:
        """Open the backend for devices.

        Args:
            devices: at least one.
            implementation: "nccl", "peer_to_peer", "staged" or "copies"; None: the best one for these devices
                (`gangline.collectives.devices.backends.selection`). The environment variable GANGLINE_DEVICE_GROUP
                overrides it.

        Raises:
            ValueError: if there is no device, a GPU does not exist, or the implementation is unknown or cannot serve
                these devices.
            TypeError: if an entry is not a device.
            RuntimeError: if this machine lacks a requirement of the implementation; the message names it.
        """
        self.devices = tuple(_device(device) for device in devices)
        """Device of each position."""
        if not self.devices:
            raise ValueError("context is empty; expected at least one, such as [cpu(0)]")
        check_gpus([device.index for device in self.devices if device.type == "cuda"])
        self._backend = open_backend(self.devices, implementation)
        self._copies = copies.Copies(self.devices)
        self.implementation = self._backend.name
        """Name of the backend: "nccl", "peer_to_peer", "staged" or "copies"."""

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.devices)

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum") -> list[Tensor]:
        """Reduce tensors over all positions, in place.

        Args:
            tensors: one per position, any shape.
            op: "sum", "mean", "product", "min" or "max".

        Returns:
            ``tensors``.
        """
        self._check("tensors", tensors)
        _check_targets("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        if tensors[0].numel() and self.size > 1:
            self._backend_for(tensors[0]).all_reduce(tensors, op)
        return list(tensors)

    @torch.no_grad()
    def reduce(self, tensors: Sequence[Tensor], root: int = 0, op: str = "sum", out: Tensor | None = None) -> Tensor:
        """Reduce tensors over all positions to one of them.

        Args:
            tensors: one per position, any shape; only the root's is written, and only if ``out`` is None.
            root: position that gets the result.
            op: "sum", "mean", "product", "min" or "max".
            out: tensor for the result, on the root's device; None: ``tensors[root]``.

        Returns:
            The tensor that holds the result.
        """
        self._check("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        self._check_root(root)
        result = tensors[root] if out is None else out
        _check_on(self.devices[root], result, "out")
        check_shape("out", result, tensors[0].shape, tensors[0].dtype)
        _check_targets("out", [result])
        if result.numel():
            self._backend_for(result).move([(tensors, result, ())], op)
        return result

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Copy one position's tensor to all others.

        Args:
            tensors: one per position, any shape; all but the root's are overwritten.
            root: position whose tensor is copied.

        Returns:
            ``tensors``.
        """
        self._check("tensors", tensors)
        self._check_root(root)
        _check_targets("tensors", [tensor for position, tensor in enumerate(tensors) if position != root])
        if tensors[0].numel() and self.size > 1:
            self._backend_for(tensors[0]).move([((), tensors[root], tensors)])
        return list(tensors)

    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Gather every position's tensor at all positions.

        Args:
            tensors: one per position, any shape.
            outs: one per position, (size, *shape), row r from position r; None: new tensors.

        Returns:
            ``outs``.
        """
        self._check("tensors", tensors)
        results = self._prepare_outs(outs, (self.size, *tensors[0].shape), tensors[0].dtype)
        if tensors[0].numel():
            self._backend_for(tensors[0]).all_gather(tensors, results)
        return results

    @torch.no_grad()
    def reduce_scatter(
        self, tensors: Sequence[Tensor], op: str = "sum", outs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Reduce rows over all positions, and give each position one row.

        Args:
            tensors: one per position, (size, ...), with one row per position; not modified.
            op: "sum", "mean", "product", "min" or "max".
            outs: one per position, for its row; None: new tensors.

        Returns:
            ``outs``.
        """
        self._check("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        if not tensors[0].ndim or tensors[0].shape[0] != self.size:
            raise ValueError(f"tensors have shape {tuple(tensors[0].shape)}; expected ({self.size}, ...)")
        results = self._prepare_outs(outs, tensors[0].shape[1:], tensors[0].dtype)
        if tensors[0].numel():
            self._backend_for(tensors[0]).reduce_scatter(tensors, results, op)
        return results

    @torch.no_grad()
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Run many sums and copies at once: sum ``values`` and copy the sum, for each (values, total, outs).

        Args:
            transfers: values and outs hold one tensor per position, or are empty. ``total``, on one of the devices,
                gets the sum of the values, or is only copied if there are none; it may be one of the values. These
                tensors are not checked.
        """
        by_copies = [transfer for transfer in transfers if not self._backend.supports(transfer[1].dtype)]
        if len(by_copies) < len(transfers):
            self._backend.move([transfer for transfer in transfers if self._backend.supports(transfer[1].dtype)])
        self._copies.move(by_copies)

    def _backend_for(self, tensor: Tensor) -> Backend:
        return self._backend if self._backend.supports(tensor.dtype) else self._copies

    def _check(
        self, name: str, tensors: Sequence[Tensor], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Check that there is a tensor for each device; a shape or dtype of None is that of the first tensor."""
        if len(tensors) != self.size:
            raise ValueError(f"{name} has {len(tensors)} entries for {self.size} devices")
        for position, (tensor, device) in enumerate(zip(tensors, self.devices, strict=True)):
            _check_on(device, tensor, f"{name}[{position}]")
            shape, dtype = tensor.shape if shape is None else shape, dtype or tensor.dtype
            check_shape(f"{name}[{position}]", tensor, shape, dtype)

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < self.size:
            raise ValueError(f"root is {root!r}; expected a position from 0 to {self.size - 1}")

    def _prepare_outs(self, outs: Sequence[Tensor] | None, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        if outs is None:
            return [torch.empty(tuple(shape), dtype=dtype, device=device) for device in self.devices]
        self._check("outs", outs, shape, dtype)
        _check_targets("outs", outs)
        return list(outs)

    def __repr__(self) -> str:
        return f"<DeviceGroup {', '.join(map(str, self.devices))} by {self.implementation}>"


def reduce(values: Sequence[Tensor], out: Tensor) -> None:
    """Write ``values[0] + values[1] + ...`` into ``out``; see `move`."""
    move([(values, out, ())])


def move(transfers: Sequence[Transfer]) -> None:
    """Sum each (values, total, outs): write the sum of ``values`` into ``total``, and copy it into each of ``outs``.

    Transfers between several GPUs use a `DeviceGroup` of these, created once; all others are copies.

    Args:
        transfers: tensors of one shape and dtype each, any number of them on any devices. Values are added in the given
            order, so sums are bitwise reproducible; float16 and bfloat16 are added in float32 and rounded once. NCCL
            does neither. Without values ``total`` is only copied. A total may have any strides.
    """
    by_copies: list[Transfer] = []
    joined: dict[tuple[torch.device, ...], list[Transfer]] = {}
    for transfer in transfers:
        positions = _gpus_of(transfer) if transfer[1].is_cuda else None
        (by_copies if positions is None else joined.setdefault(positions, [])).append(transfer)
    copies.move(by_copies)
    for positions, some in joined.items():
        _group(positions).move(some)


def require(devices: Sequence[torch.device], implementation: str) -> None:
    """Make `move` use an implementation for these devices from now on.

    Raises:
        ValueError, RuntimeError: as `DeviceGroup`.
    """
    group = DeviceGroup(devices, implementation)
    with _lock:
        _groups[group.devices] = group


def _gpus_of(transfer: Transfer) -> tuple[torch.device, ...] | None:
    """Return the device of each value and out of a transfer between several GPUs; None for any other transfer."""
    values, total, outs = transfer
    lists = {tuple(tensor.device for tensor in tensors) for tensors in (values, outs) if tensors}
    if len(lists) != 1:
        return None
    [devices] = lists
    fits = len(devices) > 1 and total.device in devices and all(device.type == "cuda" for device in devices)
    return devices if fits else None


_groups: dict[tuple[torch.device, ...], DeviceGroup] = {}
_lock = ProcessLock()


def _group(devices: tuple[torch.device, ...]) -> DeviceGroup:
    with _lock:
        if devices not in _groups:
            _groups[devices] = DeviceGroup(devices)
        return _groups[devices]


def _device(device: object) -> torch.device:
    device = getattr(device, "torch_device", device)
    if not isinstance(device, torch.device):
        raise TypeError(f"a device is {device!r}; expected a Context, such as gpu(0), or a torch.device")

    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"a device is {device}; expected the CPU or a GPU")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def check_gpus(indices: Sequence[int]) -> None:
    """Raise ValueError if a GPU is not on this machine."""
    available = torch.cuda.device_count() if indices else 0
    missing = [f"gpu({index})" for index in indices if index >= available]
    if missing:
        there = ", ".join(f"gpu({index})" for index in range(available)) or "none"
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{', '.join(missing)} {are} not on this machine; the GPUs here: {there}")


def _check_on(device: torch.device, tensor: object, name: str) -> None:
    """Check that an argument is a dense tensor on a device."""
    if isinstance(tensor, Tensor) and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}")
    check_tensor(tensor, name)


def _check_targets(name: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors can be written and do not overlap."""
    for tensor in tensors:
        check_written(tensor, name)
    if overlap([], [tensor for tensor in tensors if tensor.is_contiguous()]):
        raise ValueError(f"two of {name} share memory; expected distinct tensors")

"""`DeviceGroup`: the collectives between the devices of one process, on lists of tensors.

How tensors move between devices is chosen by what is there (`gangline.collectives.devices.backends.choice`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gangline.collectives.context import Context, contexts, cpu, gpu
from gangline.collectives.devices.backends import copies
from gangline.collectives.devices.backends.base import Transfer
from gangline.collectives.devices.backends.choice import opened
from gangline.collectives.engine import reduction
from gangline.collectives.engine.arguments import check_written

__all__ = ["DeviceGroup", "Transfer", "broadcast", "move", "reduce", "require"]


class DeviceGroup:
    """The devices of one process, which move and reduce tensors together.

    A place is an index into the list of devices: every list of tensors has one for each place, on its device, all of
    one shape and dtype. Dtypes, ``op`` and what they mean are those of `Communicator`: float16 and bfloat16 are
    combined in float32 and rounded once, but by NCCL at each hop. All places hold the same bits afterwards; but by
    NCCL, values are combined in the order of the places. Tensors may have any strides and be empty; what is written
    must not be expanded.

    All ``cpu(i)`` are the host, yet places of their own, and a GPU may stand several times. On GPUs a call returns
    before it is done: it is ordered on each device's current stream, like any operation of torch.
    """

    def __init__(self, devices: Sequence[Context | torch.device], implementation: str | None = None) -> None:
        """Join devices.

        Args:
            devices: at least one.
            implementation: "nccl", "peer_to_peer", "staged" or "copies"; None: the best that serves. The environment's
                GANGLINE_DEVICE_GROUP goes before it.

        Raises:
            ValueError: no device, a GPU that is not there, or an implementation unknown or not for these devices.
            TypeError: something is no device.
            RuntimeError: this machine lacks what the implementation needs; the message says what.
        """
        self.devices = tuple(_device(device) for device in devices)
        """The device of each place."""
        contexts([cpu() if device.type == "cpu" else gpu(device.index) for device in self.devices])  # all are there
        self._backend = opened(self.devices, implementation)
        self.implementation = self._backend.name
        """How tensors move: "nccl", "peer_to_peer", "staged" or "copies"."""

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self.devices)

    @torch.no_grad()
    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum") -> list[Tensor]:
        """Reduce tensors over all places, in place.

        Args:
            tensors: one for each place, any shape.
            op: how elements are combined.

        Returns:
            ``tensors``.

        Raises:
            ValueError: an unknown ``op``, or tensors that do not fit the devices or each other.
            TypeError: no dense tensors, or a dtype or op that does not go together.
        """
        self._check("tensors", tensors)
        _check_targets("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        if tensors[0].numel() and self.size > 1:
            self._backend.all_reduce(tensors, op)
        return list(tensors)

    @torch.no_grad()
    def reduce(self, tensors: Sequence[Tensor], root: int = 0, op: str = "sum", out: Tensor | None = None) -> Tensor:
        """Reduce tensors over all places for one of them.

        Args:
            tensors: one for each place, any shape; left as they are, but for the root's where ``out`` is None.
            root: the place that gets the result.
            op: how elements are combined.
            out: where the result goes, on the root's device; None: into ``tensors[root]``.

        Returns:
            The tensor that holds the result.

        Raises:
            ValueError: an unknown ``op`` or root, or tensors that do not fit the devices or each other.
            TypeError: no dense tensors, or a dtype or op that does not go together.
        """
        self._check("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        self._check_root(root)
        result = tensors[root] if out is None else out
        _check_dense("out", result)
        _check_fits("out", result, self.devices[root], tensors[0].shape, tensors[0].dtype)
        _check_targets("out", [result])
        if result.numel():
            self._backend.move([(tensors, result, ())], op)
        return result

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
        """Make all places' tensors what one place's is.

        Args:
            tensors: one for each place, any shape; all but the root's are overwritten.
            root: whose values are taken.

        Returns:
            ``tensors``.

        Raises:
            ValueError: an unknown root, or tensors that do not fit the devices or each other.
            TypeError: no dense tensors, or a dtype that collectives do not take.
        """
        self._check("tensors", tensors)
        self._check_root(root)
        _check_targets("tensors", [tensor for place, tensor in enumerate(tensors) if place != root])
        if tensors[0].numel() and self.size > 1:
            self._backend.move([((), tensors[root], tensors)])
        return list(tensors)

    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Gather every place's tensor at all places.

        Args:
            tensors: one for each place, any shape.
            outs: for each place (size, *shape), row r from place r; None makes them.

        Returns:
            ``outs``.

        Raises:
            ValueError: tensors that do not fit the devices or each other.
            TypeError: no dense tensors, or a dtype that collectives do not take.
        """
        self._check("tensors", tensors)
        results = self._made_or_fitting(outs, (self.size, *tensors[0].shape), tensors[0].dtype)
        if tensors[0].numel():
            self._backend.all_gather(tensors, results)
        return results

    @torch.no_grad()
    def reduce_scatter(
        self, tensors: Sequence[Tensor], op: str = "sum", outs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Reduce rows over all places, and give each place one of them.

        Args:
            tensors: for each place (size, ...), a row for each place; left as they are.
            op: how elements are combined.
            outs: for each place where its row goes; None makes them.

        Returns:
            ``outs``.

        Raises:
            ValueError: no row for each place, an unknown ``op``, or tensors that do not fit the devices or each other.
            TypeError: no dense tensors, or a dtype or op that does not go together.
        """
        self._check("tensors", tensors)
        reduction.check(op, tensors[0].dtype)
        if not tensors[0].ndim or tensors[0].shape[0] != self.size:
            raise ValueError(f"tensors have shape {tuple(tensors[0].shape)}; expected ({self.size}, ...)")
        results = self._made_or_fitting(outs, tensors[0].shape[1:], tensors[0].dtype)
        if tensors[0].numel():
            self._backend.reduce_scatter(tensors, results, op)
        return results

    @torch.no_grad()
    def move(self, transfers: Sequence[Transfer]) -> None:
        """Many sums and copies at once: for each (values, total, outs) sum ``values`` and copy the sum out.

        Args:
            transfers: values and outs hold a tensor for each place, or nothing; ``total``, on one of the devices, gets
                the sum of the values, or is only copied where there are none, and is copied into each of the outs. It
                may be one of the values. Unlike those of the collectives, these tensors are taken as they come.
        """
        self._backend.move(transfers)

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size:
            raise ValueError(f"{name} has {len(tensors)} entries for {self.size} devices")
        for place, tensor in enumerate(tensors):
            _check_dense(f"{name}[{place}]", tensor)
            _check_fits(f"{name}[{place}]", tensor, self.devices[place], tensors[0].shape, tensors[0].dtype)

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < self.size:
            raise ValueError(f"root is {root!r}; expected a place from 0 to {self.size - 1}")

    def _made_or_fitting(self, outs: Sequence[Tensor] | None, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        if outs is None:
            return [torch.empty(tuple(shape), dtype=dtype, device=device) for device in self.devices]
        if len(outs) != self.size:
            raise ValueError(f"outs has {len(outs)} entries for {self.size} devices")
        for place, out in enumerate(outs):
            _check_dense(f"outs[{place}]", out)
            _check_fits(f"outs[{place}]", out, self.devices[place], shape, dtype)
        _check_targets("outs", outs)
        return list(outs)

    def __repr__(self) -> str:
        return f"<DeviceGroup {', '.join(map(str, self.devices))} by {self.implementation}>"


def reduce(values: Sequence[Tensor], out: Tensor) -> None:
    """Write ``values[0] + values[1] + ...`` into ``out``; see `move`."""
    move([(values, out, ())])


def broadcast(value: Tensor, outs: Sequence[Tensor]) -> None:
    """Copy ``value`` into each of ``outs``."""
    move([((), value, outs)])


def move(transfers: Sequence[Transfer]) -> None:
    """For each (values, total, outs): write the sum of ``values`` into ``total``, and copy that into each of ``outs``.

    What lies on several GPUs goes through the `DeviceGroup` of these, made when they first come; all else by copies.

    Args:
        transfers: tensors of one shape and dtype each, any number of them on any devices. Values are added in the order
            given, so that the sum has the same bits each time (but by NCCL); float16 and bfloat16 are added in float32
            and rounded once (likewise). Without values ``total`` is only copied. A total may have any strides.
    """
    by_copies: list[Transfer] = []
    joined: dict[tuple[torch.device, ...], list[Transfer]] = {}
    for transfer in transfers:
        places = _places(transfer) if transfer[1].is_cuda else None
        (by_copies if places is None else joined.setdefault(places, [])).append(transfer)
    copies.move(by_copies)
    for places, some in joined.items():
        _group(places).move(some)


def require(devices: Sequence[torch.device], implementation: str) -> None:
    """Have `move` join these devices by an implementation from now on.

    Raises:
        ValueError, RuntimeError: as `DeviceGroup`.
    """
    group = DeviceGroup(devices, implementation)
    with _lock:
        _groups[group.devices] = group


def _places(transfer: Transfer) -> tuple[torch.device, ...] | None:
    """The GPUs that a transfer is between, one for each of its values and outs; None where it is no such transfer."""
    values, total, outs = transfer
    lists = {tuple(tensor.device for tensor in tensors) for tensors in (values, outs) if tensors}
    if len(lists) != 1:
        return None
    [devices] = lists
    fits = len(devices) > 1 and total.device in devices and all(device.type == "cuda" for device in devices)
    return devices if fits else None


_groups: dict[tuple[torch.device, ...], DeviceGroup] = {}
_lock = threading.Lock()


def _group(devices: tuple[torch.device, ...]) -> DeviceGroup:
    with _lock:
        if devices not in _groups:
            _groups[devices] = DeviceGroup(devices)
        return _groups[devices]


def _device(device: object) -> torch.device:
    if isinstance(device, Context):
        return device.torch_device
    if not isinstance(device, torch.device):
        raise TypeError(f"a device is {device!r}; expected a Context, such as gpu(0), or a torch.device")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"a device is {device}; expected the CPU or a GPU")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _check_dense(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} is {tensor.layout}; expected a dense tensor")
    reduction.check_dtype(tensor.dtype)


def _check_fits(name: str, tensor: Tensor, device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}")
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {tuple(shape)} and {dtype}"
        )


def _check_targets(name: str, tensors: Sequence[Tensor]) -> None:
    """See that tensors can be written, and that none lies in another."""
    for tensor in tensors:
        check_written(tensor, name)
    spans = sorted(
        (tensor.get_device(), tensor.data_ptr(), tensor.nbytes)
        for tensor in tensors
        if tensor.is_contiguous() and tensor.numel()
    )
    for (device, begin, length), (next_device, next_begin, _) in pairwise(spans):
        if device == next_device and next_begin < begin + length:
            raise ValueError(f"two of {name} share memory; expected a tensor of its own for each place")

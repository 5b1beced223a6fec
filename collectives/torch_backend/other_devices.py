"""Backends of a process group for devices other than the CPU, as in ``"cpu:gangline,cuda:nccl"``."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from gangline.collectives.torch_backend.c10d import backend_names


class OtherDevices:
    """Backends of one process group for devices other than the CPU, created for the first tensor on each.

    torch does not register further backends for a group whose backend is written in Python, so they are kept here.
    """

    def __init__(self, group: ProcessGroup, store: Store, timeout: timedelta) -> None:
        self._of = weakref.ref(group)  # a reference cycle would keep the store's port open until it is collected
        self._rank, self._size = group.rank(), group.size()
        self._store = store
        self._timeout = timeout
        self._group: ProcessGroup | None = None
        self._backends: dict[str, Any] = {}

    def group(self, device: torch.device) -> ProcessGroup:
        """Return a group for tensors of a device; as `backend`."""
        self.backend(device)
        assert self._group is not None
        return self._group

    def backend(self, device: torch.device) -> Any:
        """Return the backend of a device; RuntimeError if the group has none."""
        if device.type not in self._backends:
            self._backends[device.type] = self._make(device.type)
        return self._backends[device.type]

    def devices(self) -> list[torch.device]:
        """Return the device types of the group, except the CPU."""
        return [torch.device(kind) for kind in backend_names(self._of()) if kind != "cpu"]

    def shutdown(self) -> None:
        """Shut down the backends."""
        if self._group is not None:
            self._group.shutdown()
        self._group = None

    def _make(self, kind: str) -> Any:
        name = backend_names(self._of()).get(kind, "gangline")
        rank, size = self._rank, self._size
        store = PrefixStore(f"other_devices/{kind}", self._store)
        backend: Any
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            made, backend = ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
        elif name == "gloo" and dist.is_gloo_available():
            made = ProcessGroup.BackendType.GLOO
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._timeout)
        else:
            raise RuntimeError(  # torch's class for it
                f"a tensor on {kind} was passed to a process group of backend {dist.get_backend_config(self._of())!r}; "
                f"expected tensors on the CPU, or a backend for {kind} that this torch has, as in "
                f"'cpu:gangline,{kind}:nccl' or 'cpu:gangline,{kind}:gloo'"
            )
        backend._set_sequence_number_for_group()  # as torch does for its own
        if self._group is None:
            self._group = ProcessGroup(self._store, rank, size)
            self._group._set_default_backend(made)
        self._group._register_backend(torch.device(kind), made, backend)
        return backend

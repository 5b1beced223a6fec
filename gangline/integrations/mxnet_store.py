"""MXNet's own Trainer over gangline: ``mx.kv.create("gangline")`` in a program of the real MXNet 1.9.

The environment has mxnet, which needs numpy below 1.24, beside torch and gangline (`pip install --no-deps gangline`).
MXNet's optimizer updates the weights; gangline sums the gradients over the processes, in the memory of the NDArrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mxnet.kvstore import KVStoreBase  # type: ignore[import-not-found, unused-ignore]
from torch.utils.dlpack import from_dlpack

from gangline.collectives.communicator import connect


@KVStoreBase.register  # type: ignore[untyped-decorator, unused-ignore]
class Gangline(KVStoreBase):  # type: ignore[misc, unused-ignore]
    """Store of MXNet whose processes are those of `gangline launch -s 0`, torchrun, mpirun or srun."""

    def __init__(self) -> None:
        self._comm = connect()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:  # noqa: ARG002  MXNet's
        """Copy rank 0's value to ``out`` of all ranks. Collective."""
        first, *others = _tensors(out)
        first.copy_(_tensors(value)[0])
        self._comm.broadcast(first)
        for other in others:
            other.copy_(first)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:  # noqa: ARG002  MXNet's
        """Write the sum of ``value`` over all ranks and their contexts to ``out`` (None: to ``value``). Collective."""
        values = _tensors(value)
        outs = values if out is None else _tensors(out)
        total = values[0] if out is None else outs[0].copy_(values[0])
        for other in values[1:]:
            total.add_(other)
        self._comm.all_reduce(total)
        for one in outs[1:]:
            one.copy_(total)

    @staticmethod
    def is_capable(capability: str) -> bool:  # noqa: ARG004  MXNet's
        """Return False: the optimizer runs in MXNet."""
        return False

    @property
    def type(self) -> str:
        """Name of the store."""
        return "gangline"

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._comm.rank

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return self._comm.size


def _tensors(arrays: Any) -> Sequence[torch.Tensor]:
    """Return NDArrays as tensors of the same memory, behind the operations that MXNet's engine has for them."""
    arrays = arrays if isinstance(arrays, (list, tuple)) else [arrays]
    return [from_dlpack(array.to_dlpack_for_write()) for array in arrays]

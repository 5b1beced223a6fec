"""Backend "gangline" of torchcomms, for CPU tensors: importing this file registers it.

torchcomms finds it by an entry point of your package, in pyproject.toml:

    [project.entry-points."torchcomms.backends"]
    gangline = "your_package.torchcomms_backend"

    comm = torchcomms.new_comm("gangline", torch.device("cpu"), name="main")
    comm.all_reduce(gradients, torchcomms.ReduceOp.SUM, async_op=False)

It was tested with a stand-in for torchcomms's Python interface, and not with the package, whose builds need CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gangline.collectives import environments
from gangline.collectives.torch_backend import GanglineProcessGroup
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous
from torchcomms._comms import TorchCommBackend, _is_backend_registered, register_backend

_SECONDS = 600.0
"""Time limit of a communicator whose options name none: torchcomms's default."""


@dataclass
class _Options:
    """Options of one call, under the names of torch.distributed's options."""

    asyncOp: bool  # noqa: N815
    rootRank: int = 0  # noqa: N815
    reduceOp: Any = None  # noqa: N815


class TorchCommGangline(TorchCommBackend):
    """Communicator of torchcomms whose calls run on a `GanglineProcessGroup`.

    Rank and size are TORCHCOMM_RANK and TORCHCOMM_SIZE, or those that the launcher set (torchrun, mpirun, srun). Ranks
    meet at the store of the options, or at MASTER_ADDR and MASTER_PORT. Tensors are torch tensors on the CPU. A call
    with ``async_op=True`` returns a work, whose ``wait()`` raises the call's error; otherwise the call raises it.

    Windows, batches of messages, and the operation PREMUL_SUM raise an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._opened: GanglineProcessGroup | None = None
        self._name = ""
        self._splits = 0

    @property
    def _group(self) -> GanglineProcessGroup:
        if self._opened is None:
            raise RuntimeError(f"the communicator {self._name!r} is not open; expected a call before finalize()")
        return self._opened

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Connect to the other ranks. Collective.

        Raises:
            ValueError: if the device is not the CPU.
            RuntimeError: if no launcher has set a rank and a size.
            StallError: if a rank does not arrive.
        """
        if device.type != "cpu":
            raise ValueError(f"backend gangline of torchcomms got device {device}; expected cpu, or another backend")
        rank, size = _rank_and_size()
        timeout = getattr(options, "timeout", None) or timedelta(seconds=_SECONDS)
        store = getattr(options, "store", None)
        if store is None:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        self._open(PrefixStore(f"torchcomms/{name}", store), rank, size, timeout, name)

    def _open(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._opened, self._name = GanglineProcessGroup(store, rank, size, timeout), name

    def finalize(self) -> None:
        """Finish pending calls and close the connections; idempotent."""
        if self._opened is not None:
            self._opened.shutdown()
            self._opened = None

    def get_rank(self) -> int:
        """Return this process's rank."""
        return int(self._group.rank())

    def get_size(self) -> int:
        """Return the number of ranks."""
        return int(self._group.size())

    def get_backend_name(self) -> str:
        """Return "gangline"."""
        return "gangline"

    def get_comm_name(self) -> str:
        """Return the communicator's name."""
        return self._name

    def split(self, ranks: Sequence[int], name: str, options: Any) -> TorchCommGangline | None:
        """Return a communicator of some ranks, numbered in their order in ``ranks``. Collective over all ranks.

        Args:
            ranks: ranks of the new communicator, with this one; empty: this rank is in none.
            name: name of the new communicator.
            options: options of torchcomms, with a ``timeout``.

        Raises:
            ValueError: if a rank is out of range, occurs twice, or this one is missing.
        """
        own, size = self.get_rank(), self.get_size()
        self._splits += 1
        if not ranks:
            return None
        if own not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
            raise ValueError(
                f"split got ranks {list(ranks)} on rank {own}; expected some of 0 to {size - 1}, each once"
            )
        made = TorchCommGangline()
        place = f"split {self._splits}/{','.join(map(str, ranks))}"
        timeout = getattr(options, "timeout", None) or timedelta(seconds=_SECONDS)
        made._open(PrefixStore(place, self._group.get_group_store()), ranks.index(own), len(ranks), timeout, name)
        made._set_device_and_options(torch.device("cpu"), options)
        return made

    # Calls: tensors, root and operation come as in torch.distributed's calls of similar names

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """Reduce a tensor in place on all ranks."""
        return _done(self._group.allreduce([tensor], _Options(async_op, reduceOp=_reduction(op))), async_op)

    def reduce(self, tensor: Tensor, root: int, op: Any, async_op: bool) -> Any:
        """Reduce a tensor in place at the root."""
        return _done(self._group.reduce([tensor], _Options(async_op, root, _reduction(op))), async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Any:
        """Copy the root's tensor to all ranks."""
        return _done(self._group.broadcast([tensor], _Options(async_op, root)), async_op)

    def all_gather(self, tensor_list: Sequence[Tensor], tensor: Tensor, async_op: bool) -> Any:
        """Gather all ranks' tensors, whose sizes may differ, into a list."""
        return _done(self._group.allgather([list(tensor_list)], [tensor], _Options(async_op)), async_op)

    all_gather_v = all_gather

    def all_gather_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:  # noqa: A002
        """Gather all ranks' tensors, of one size, into one tensor."""
        return _done(self._group.all_gather_single(output, input, _Options(async_op)), async_op)

    def reduce_scatter(self, output: Tensor, input_list: Sequence[Tensor], op: Any, async_op: bool) -> Any:
        """Reduce lists of tensors, whose sizes may differ; each rank gets the one at its rank."""
        options = _Options(async_op, reduceOp=_reduction(op))
        return _done(self._group.reduce_scatter([output], [list(input_list)], options), async_op)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:  # noqa: A002
        """Reduce tensors of one slice per rank; each rank gets its slice."""
        options = _Options(async_op, reduceOp=_reduction(op))
        return _done(self._group.reduce_scatter_single(output, input, options), async_op)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool) -> Any:
        """Send each rank one tensor of the list."""
        return _done(self._group.alltoall(list(outputs), list(inputs), _Options(async_op)), async_op)

    def all_to_all_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:  # noqa: A002
        """Send each rank one slice, of equal sizes along the first axis."""
        return self.all_to_all_v_single(output, input, (), (), async_op)

    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
    ) -> Any:
        """Send each rank one slice; the sizes are along the first axis."""
        sizes = list(output_split_sizes), list(input_split_sizes)
        return _done(self._group.all_to_all_single(output, input, *sizes, _Options(async_op)), async_op)

    def scatter(self, output: Tensor, input_list: Sequence[Tensor], root: int, async_op: bool) -> Any:
        """Send each rank one tensor of the root's list."""
        inputs = [list(input_list)] if root == self.get_rank() else []
        return _done(self._group.scatter([output], inputs, _Options(async_op, root)), async_op)

    def gather(self, output_list: Sequence[Tensor], input: Tensor, root: int, async_op: bool) -> Any:  # noqa: A002
        """Gather all ranks' tensors into the root's list."""
        outputs = [list(output_list)] if root == self.get_rank() else []
        return _done(self._group.gather(outputs, [input], _Options(async_op, root)), async_op)

    def send(self, tensor: Tensor, dst: int, async_op: bool) -> Any:
        """Send a tensor to a rank."""
        return _done(self._group.send([tensor], dst), async_op)

    def recv(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """Receive a tensor from a rank."""
        return _done(self._group.recv([tensor], src), async_op)

    def barrier(self, async_op: bool) -> Any:
        """Wait until all ranks have called it."""
        return _done(self._group.barrier(_Options(async_op)), async_op)


def _done(work: Any, async_op: bool) -> Any:
    """Return the work of an asynchronous call; wait for that of a synchronous one and return None."""
    if async_op:
        return work
    work.wait()
    return None


def _reduction(op: Any) -> Any:
    """Return torch.distributed's operation of the same name.

    Raises:
        ValueError: if there is none without a factor.
    """
    name = op.type.name
    if name == "PREMUL_SUM" or not hasattr(dist.ReduceOp, name):
        raise ValueError(f"ReduceOp.{name} is not supported by backend gangline; scale the tensor, then use SUM")
    return getattr(dist.ReduceOp, name)


def _rank_and_size() -> tuple[int, int]:
    try:
        return int(os.environ["TORCHCOMM_RANK"]), int(os.environ["TORCHCOMM_SIZE"])
    except KeyError:
        launcher = environments.find()
    if launcher is None:
        raise RuntimeError("no launcher has set a rank; expected TORCHCOMM_RANK and TORCHCOMM_SIZE, or torchrun")
    return launcher.rank(), launcher.size()


if not _is_backend_registered("gangline"):
    register_backend("gangline", TorchCommGangline)

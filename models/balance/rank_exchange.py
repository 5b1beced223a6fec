"""Rank exchange: small control messages between the ranks that average gradients."""

from __future__ import annotations

import ctypes
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives import torch_backend  # noqa: F401  registers the backend
from gangline.kvstore.group.objects import pack_object, unpack_object
from gangline.models.data.order import Exchange, T

CAUSE_SECONDS = 2.0  # from the last message of a rank that an error ends to the end of its process


class RankExchange(Exchange):
    """Collectives on plain data among the ranks of a process group, on the host, in the order of training steps.

    They use a separate process group, so that their order may differ from that of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Create a group of the ranks that average gradients; None: the default group. Collective."""
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group() before balance()"
            )
        self.group = group
        found = dist.group.WORLD if group is None else group
        assert found is not None
        self.rank, self.size = dist.get_rank(found), dist.get_world_size(found)
        ranks = None if found is dist.group.WORLD else dist.get_process_group_ranks(found)
        # gloo hands each message to a thread, which costs milliseconds where a rank has one core.
        self._group = dist.new_group(ranks, backend="gangline", use_local_synchronization=ranks is not None)
        self._store, self._key = dist.distributed_c10d._get_default_store(), f"gangline/ended/{self._group.group_name}"
        self.tell_cause = partial(_store_cause, weakref.ref(self._store), f"{self._key}/{self.rank}")
        """Store why this rank ends, for `causes` of the other ranks. Not collective; it holds no group and no store."""
        self._works: list[dist.Work] = []  # of the last message, if nothing has waited for it
        self.close = weakref.finalize(self, _destroy, self._group, self._works)
        """Destroy the process group; also called when this object is collected, and at the end of the process."""

    def all_gather(self, data: Any) -> list[Any]:
        """Return every rank's data in rank order. Collective.

        Raises:
            TypeError: on all ranks, if the data has a type that needs pickle and GANGLINE_ALLOW_PICKLE is not 1.
        """
        packed = torch.frombuffer(bytearray(pack_object(data)), dtype=torch.uint8)
        lengths = [int(length) for (length,) in self.gather([len(packed)])]
        padded = packed.new_zeros(max(lengths))
        padded[: len(packed)] = packed
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self._group)
        return [
            unpack_object(part[:length].numpy().tobytes(), f"what balance() sends from rank {rank}")
            for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
        ]

    def all_gather_results(self, call: Callable[[], T], doing: str) -> list[T]:
        """Run a function on every rank and return all results; ``doing`` names it in errors. Collective.

        An error on this rank is raised again; one on another rank as a RuntimeError with its traceback.
        """
        try:
            value = call()
        except Exception as error:
            self.all_gather_error(error)
            raise
        found = self.all_gather((value, ""))
        for rank, (_, failure) in enumerate(found):
            if failure:
                last = failure.strip().splitlines()[-1]
                remote = RuntimeError(f"{doing} failed on rank {rank}: {last}")
                remote.add_note(failure)
                raise remote
        return [value for value, _ in found]

    def all_gather_error(self, error: Exception) -> None:
        """Take part in `all_gather_results` with an error. Collective."""
        self.all_gather((None, "".join(traceback.format_exception(error))))

    def gather(self, numbers: Sequence[float], width: int = 1) -> list[list[float]]:
        """All-gather numbers, padded by zeros to a fixed ``width``, in rank order. Collective."""
        rows = self._rows(numbers, width)
        try:
            dist.all_reduce(rows, group=self._group)
        except RuntimeError as error:
            error.add_note(
                "balance: another rank ended, failed or evaluates alone in place of this step; see its output"
            )
            raise
        return cast(list[list[float]], rows.tolist())

    def start_gather(self, numbers: Sequence[float], width: int) -> tuple[dist.Work, Tensor]:
        """Start `gather`; return its work, and the rows that it fills."""
        rows = self._rows(numbers, width)
        work = dist.all_reduce(rows, group=self._group, async_op=True)
        assert work is not None
        self._works[:] = [work]
        return work, rows

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the other ranks to take the last message, so that `close` can destroy the group."""
        deadline = time.monotonic() + seconds
        while not all(work.is_completed() for work in self._works) and time.monotonic() < deadline:
            time.sleep(0.001)

    def causes(self, ranks: Sequence[int], seconds: float = CAUSE_SECONDS) -> str:
        """Return what these ranks have told, or tell within ``seconds``, after ": "; else "". Not collective."""
        keys = [f"{self._key}/{rank}" for rank in ranks]
        with suppress(RuntimeError):  # they have said nothing, or the store has ended
            self._store.wait(keys, timedelta(seconds=seconds))
            return f": {'; '.join(self._store.get(key).decode() for key in keys)}"
        return ""

    def _rows(self, numbers: Sequence[float], width: int) -> Tensor:
        rows = np.zeros((self.size, width))
        rows[self.rank, : len(numbers)] = numbers
        return torch.from_numpy(rows)


def _store_cause(store: weakref.ref[Store], key: str, cause: str) -> None:
    if (present := store()) is not None:
        with suppress(RuntimeError):  # its server has ended
            present.set(key, cause)


def _destroy(group: dist.ProcessGroup, works: list[dist.Work]) -> None:
    if all(work.is_completed() for work in works):
        with suppress(ValueError, AssertionError):  # if torch.distributed has ended before
            dist.destroy_process_group(group)
    else:  # the destructor would wait for the other ranks, which may wait for the end of this process
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def group_of(networks: Sequence[Module], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the ranks that average the gradients of networks; None: all ranks, in the default group.

    These are ``group``, or the group of DistributedDataParallel or FSDP1, or the mesh of FSDP2.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; expected a process group of torch.distributed with this rank, such as "
            "mesh.get_group('dp'), or None for the ranks of the network's wrapper"
        )
    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    groups: list[Any] = [
        network.process_group
        for network in networks
        if isinstance(network, wrappers) and not hasattr(network, "_inter_node_pg")  # FSDP1's hybrid has two groups
    ]
    if any(one is not groups[0] for one in groups):
        raise ValueError(
            "the networks are wrapped with different process groups, so their batches would have different ranks; "
            "expected one process group, or a balance() of each"
        )
    units = [unit for network in networks for unit in network.modules() if isinstance(unit, FSDPModule)]
    meshes: list[DeviceMesh] = [one.mesh_info.mesh for unit in units for one in parameter_groups(unit)]
    if group is None and groups:
        group = groups[0]
    everyone = set(range(dist.get_world_size())) if dist.is_initialized() else set()
    if group is None and meshes and _ranks_of(meshes[0]) != everyone and meshes[0].ndim == 1:
        group = meshes[0].get_group()
    ranks = everyone if group is None else set(dist.get_process_group_ranks(group))
    for averaged in [*map(_ranks_of, meshes), *(set(dist.get_process_group_ranks(one)) for one in groups)]:
        if averaged != ranks:
            raise ValueError(
                f"balance() has the group of ranks {sorted(ranks)}, but the network's wrapper averages gradients over "
                f"ranks {sorted(averaged)}; pass their process group, such as group=mesh.get_group('dp')"
            )
    own = set().union(*map(_ranks_of, meshes))
    for name, parameter in (pair for network in networks for pair in network.named_parameters()):
        if isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements):
            shared = (_ranks_of(parameter.device_mesh) - own - {dist.get_rank()}) & ranks
            if shared:
                raise ValueError(
                    f"parameter {name!r} is divided over ranks {sorted(shared | {dist.get_rank()})}, as in tensor "
                    "parallelism, and they need the same batches, but balance() has all of them in its group; pass the "
                    "group of the ranks that average gradients, such as group=mesh.get_group('dp')"
                )
    return group


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return the groups of parameters of an FSDP2 unit, from private names of torch."""
    state: Any = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())

"""`GanglineProcessGroup`: torch's process group over a `Communicator`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.communicators import open_communicator
from gangline.collectives.bootstrap.launcher_environment import LOOPBACK
from gangline.collectives.bootstrap.store_all_gather import StoreAllGather
from gangline.collectives.errors import GanglineError
from gangline.collectives.torch_backend.c10d import refusing_backend
from gangline.collectives.torch_backend.calls import GroupCollectives
from gangline.collectives.torch_backend.other_devices import OtherDevices
from gangline.collectives.transports.addresses import local_address

_Base: Any = ProcessGroup  # of whose methods torch's stubs tell another thing in each version


class GanglineProcessGroup(GroupCollectives, _Base):  # type: ignore[misc]
    """A torch process group whose collectives on CPU tensors are a `Communicator`'s; a collective of its ranks.

    Every method of torch's Python interface is this class's own, under each name that torch 2.11 to 2.15 call it by:
    one that was not would go, silently, to the backend that torch demands to be registered. That one refuses all.

    The calls of one group are matched by order on all ranks, whatever threads make them, as they are for gloo; they
    run one at a time, in a thread of the group, or in the caller's where nothing else is under way and the call is
    not asynchronous. Tensors belong to a call until it is over. They may be non-contiguous and empty, and of any dtype
    where they are only moved. The errors are gangline's: see `Communicator`.

    Args:
        store: what the group's ranks share, and nobody else uses.
        rank: this process's number in the group.
        size: the number of ranks.
        timeout: how long a call, or the beginning, may wait for other ranks.

    Raises:
        StallError: a rank did not come.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        _Base.__init__(self, rank, size)  # the form with a store makes no subclass's instance
        seconds = timeout.total_seconds()
        exchange = StoreAllGather(
            PrefixStore("gangline", store),
            rank,
            size,
            seconds,
            where="the process group",
            keeper="the process that keeps the process group's store",
        )
        communicator = open_communicator(rank, size, exchange, timeout=seconds, tcp_host=_own_address(store))
        GroupCollectives.__init__(self, communicator, OtherDevices(self, store, timeout))
        self._store = store
        self._timeout = timeout
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, refusing_backend(rank, size))
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    def name(self) -> str:
        """The backend's name, gangline."""
        return "gangline"

    getBackendName = name  # noqa: N815  by which torch's C++ asks

    def _get_backend_name(self) -> str:
        return "gangline"

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        return super()._get_backend(device) if device.type == "cpu" else self.other_devices.backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self.other_devices.devices()]

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,  # noqa: ARG002
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # noqa: ARG002
    ) -> GanglineProcessGroup | None:
        """A group of some ranks of this one; they alone need call it, and it is None on others.

        Raises:
            ValueError: a rank that is not there.
        """
        ranks = sorted(ranks)
        if not ranks or ranks != sorted(set(ranks) & set(range(self.size()))):
            raise ValueError(f"ranks are {ranks}; expected some of 0 to {self.size() - 1}, each once")
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{','.join(map(str, ranks))}"
        group = GanglineProcessGroup(
            PrefixStore(f"{name}/", self._store), ranks.index(self.rank()), len(ranks), timeout or self._timeout
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def merge_remote_group(self, *_: object, **__: object) -> NoReturn:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("merge_remote_group is not gangline's; make a group of all ranks by dist.init_process_group")

    def shutdown(self) -> None:
        """Finish what was begun, tell the others, and give everything back; a second call does nothing."""
        self._finish()
        self.communicator.close()
        self.other_devices.shutdown()

    def abort(self) -> None:
        """As `shutdown`, but what is under way fails, here and on all ranks, where it is not waited for."""
        self.communicator.abort(GanglineError(f"rank {self.rank()} aborted its process group"))
        self.shutdown()

    def _has_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, *_: object) -> NoReturn:
        raise ValueError("completion hooks are not gangline's; chain to Work.get_future() with then()")

    def _enable_collectives_timing(self) -> NoReturn:
        raise ValueError("timing of collectives is not gangline's; measure with torch.profiler")


def _own_address(store: Store) -> str:
    """Return the address of this host for other ranks; loopback unless the store is a TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return local_address(store.host) if isinstance(store, TCPStore) else LOOPBACK

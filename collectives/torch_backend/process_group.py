"""`GanglineProcessGroup`: torch's process group over a `Communicator`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.store_all_gather import StoreAllGather
from gangline.collectives.communicator import Communicator, open_communicator
from gangline.collectives.eager import run_eagerly
from gangline.collectives.environments.job_key import job_key
from gangline.collectives.errors import GanglineError, StallError
from gangline.collectives.torch_backend.c10d import backend, can_reconfigure, renumber
from gangline.collectives.torch_backend.calls import GroupCollectives
from gangline.collectives.torch_backend.other_devices import OtherDevices
from gangline.collectives.torch_backend.reconfigure import Handle, NotConnected, digest_of, meet, members
from gangline.collectives.torch_backend.work import FinishedWork
from gangline.collectives.transports.addresses import is_always_loopback, local_address, reachable_address

_Base: Any = ProcessGroup  # its stubs differ between versions of torch


@run_eagerly
class GanglineProcessGroup(GroupCollectives, _Base):  # type: ignore[misc]
    """A torch process group whose collectives on CPU tensors run on a `Communicator`. Collective over its ranks.

    The class defines every method of torch's Python interface, under each name that torch 2.11 to 2.15 use: torch would
    silently send a missing method to the required C++ backend, which raises on every call.

    Calls of one group are matched by order on all ranks, in any threads, as in gloo. They run one at a time, in a
    thread of the group, or in the caller if no other call is pending and the call is synchronous, or small: an
    asynchronous one then ends in ``wait``, or in the thread if its future was asked for. Tensors must not be
    used until their call is done. They may be non-contiguous or empty, and of any dtype if they are only moved. Errors
    are those of `Communicator`.

    Args:
        store: store shared by the group's ranks alone.
        rank: this process's rank in the group.
        size: number of ranks.
        timeout: time limit for a call, and for the start, to wait for other ranks.
        connects: connect to the other ranks now; False: `reconfigure` does it later.

    Raises:
        StallError: if a rank does not arrive.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, connects: bool = True) -> None:
        _Base.__init__(self, rank, size)  # the overload with a store does not construct subclasses
        self._group_store = self._store = store  # the latter has the keys of the present members alone
        self._timeout = timeout
        self._monitored_barriers = 0
        self._uuids: set[int] = set()
        connected = self._connect(store, rank, size, timeout) if connects else NotConnected(rank, size)
        self.communicator = cast(Communicator, connected)  # first, because rank() and size() read it
        GroupCollectives.__init__(self, self.communicator, OtherDevices(self, store, timeout))
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend(rank, size))
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)

    def _connect(self, store: Store, rank: int, size: int, limit: timedelta) -> Communicator:
        host = _tcp_host(store)
        exchange = StoreAllGather(
            PrefixStore("gangline", store),
            rank,
            size,
            limit.total_seconds(),
            where="the process group",
            server="the process that keeps the process group's store",
            key=None if is_always_loopback(host) else job_key(),
        )
        return open_communicator(
            rank,
            size,
            exchange,
            timeout=self._timeout.total_seconds(),
            tcp_host=partial(local_address, host) if host else reachable_address,
        )

    if can_reconfigure:

        def getRank(self) -> int:  # noqa: N802  torch's C++ calls it
            """Return this process's present rank."""
            return self.communicator.rank

        def getSize(self) -> int:  # noqa: N802
            """Return the present number of ranks."""
            return self.communicator.size

    def name(self) -> str:
        """Return the backend's name, "gangline"."""
        return "gangline"

    getBackendName = _get_backend_name = name  # noqa: N815  the former is called by torch's C++

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        return self if device.type == "cpu" else self.other_devices.backend(device)

    get_backend = _get_backend  # since torch 2.14

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self.other_devices.devices()]

    def get_group_store(self) -> Store:
        """Return the store that the group was created with."""
        return self._group_store

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait through the store until all ranks have called it; works even while ranks wait in a collective.

        Args:
            timeout: time limit; None: the group's.
            wait_all_ranks: name all late ranks instead of the first.

        Raises:
            StallError: on all ranks that call it, if another rank does not call it in time. The group stays usable.
        """
        limit = self._timeout if timeout is None else timeout
        self._monitored_barriers += 1
        store = PrefixStore(f"monitored_barrier/{self._monitored_barriers}", self._store)
        if self.rank() == 0:
            late = _late_ranks(store, range(1, self.size()), limit, wait_all_ranks)
            text = _monitored_text(late, limit)
            store.set("end", text)
        else:
            store.set(str(self.rank()), "")
            is_over = _arrives(store, "end", limit)
            text = store.get("end").decode() if is_over else f"rank 0 did not reach it in {_ms(limit)} ms"
            text = text and (
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {text}"  # gloo's words
            )
        if text:
            raise StallError(text)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,  # noqa: ARG002
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,  # noqa: ARG002
    ) -> GanglineProcessGroup | None:
        """Return a group of some of these ranks; None on the others, which need not call it.

        Raises:
            ValueError: if a rank is not in the group.
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

    @property
    def supports_reconfigure(self) -> bool:
        """Return whether this torch can change the members of a group: torch 2.14 and later."""
        return can_reconfigure

    @cached_property
    def _handle(self) -> Handle:
        return Handle.create(self.rank())

    def get_reconfigure_handle(self) -> str:
        """Return this process's handle, by which the members of `reconfigure` name it."""
        self._check_one_backend()
        return self._handle._replace(rank=self.rank()).encode()

    def reconfigure(self, opts: Any) -> Any:
        """Replace the members of this group, in place. Collective over the new members.

        They meet at the group's store. Until all have come, and if one does not, the group stays as it was. Then
        pending calls on the former members fail, as does the next call of a former member that is not among the new.

        Args:
            opts: torch's ReconfigureOptions: a ``uuid`` that was not used before; the ``handles`` of the new members,
                as a list in the order of their new ranks, or a set to keep their order; ``timeout`` of the meeting and
                of connecting, None for the group's. ``hints`` are ignored.

        Returns:
            The handle of a finished call.

        Raises:
            ValueError: if a handle is invalid or occurs twice, or this process's handle is missing.
            StallError: if a member does not call it in time; the message names it.
            DeadNodeError: if a member of this host has ended before it called it.
            MismatchError: if a member passes other handles.
            RuntimeError: if this process used the uuid before, or the group has backends for other devices.
        """
        self._check_one_backend()
        rank, handles = members(opts.handles, self._handle)
        if opts.uuid in self._uuids:
            raise GanglineError(f"reconfigure uuid {opts.uuid} was already used by this group; expected a new number")
        self._uuids.add(opts.uuid)
        limit = self._timeout if opts.timeout is None else opts.timeout
        store = PrefixStore(f"reconfigure/{opts.uuid}", self._group_store)
        global_rank = dist.get_rank() if dist.is_initialized() else self.rank()
        global_ranks = meet(store, rank, handles, global_rank, limit.total_seconds())
        store = PrefixStore(digest_of(handles), store)
        communicator = self._connect(store, rank, len(handles), limit)
        reason = GanglineError(
            f"rank {self.rank()} reconfigured the process group to {len(handles)} members during this call or before; "
            "expected calls to be awaited before reconfigure, and then calls of the new members only"
        )
        self._replace_communicator(communicator, reason)
        self._store, self._monitored_barriers = store, 0
        renumber(self, rank, global_ranks)
        return FinishedWork()

    def _check_one_backend(self) -> None:
        others = self.other_devices.devices() if self in dist.distributed_c10d._world.pg_backend_config else []
        if others:
            names = ", ".join(map(str, others))
            raise RuntimeError(f"reconfigure is not supported by a process group with another backend for {names}")

    def merge_remote_group(self, *_: object, **__: object) -> NoReturn:
        """Raise ValueError: not supported."""
        raise ValueError("merge_remote_group is not supported; make a group of all ranks by dist.init_process_group")

    def shutdown(self) -> None:
        """Finish pending calls, notify the other ranks, and release all resources; idempotent."""
        self._finish()
        self.communicator.close()
        self.other_devices.shutdown()

    def abort(self) -> None:
        """Fail pending calls on all ranks, then `shutdown`."""
        self.communicator.abort(GanglineError(f"rank {self.rank()} aborted its process group"))
        self.shutdown()

    def _has_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, *_: object) -> NoReturn:
        raise ValueError("completion hooks are not supported; chain to Work.get_future() with then()")

    def _enable_collectives_timing(self) -> NoReturn:
        raise ValueError("timing of collectives is not supported; measure with torch.profiler")


def _late_ranks(store: Store, ranks: Iterable[int], limit: timedelta, wait_all_ranks: bool) -> list[int]:
    """Return the ranks that have not called `monitored_barrier` in time; only the first unless ``wait_all_ranks``."""
    late = []
    end = time.monotonic() + limit.total_seconds()
    for rank in ranks:
        left = timedelta(seconds=max(end - time.monotonic(), 0.001))
        if not _arrives(store, str(rank), left):
            late.append(rank)
            if not wait_all_ranks:
                break
    return late


def _arrives(store: Store, key: str, limit: timedelta) -> bool:
    try:
        store.wait([key], limit)
    except RuntimeError:  # each store has its own error for a timeout
        return store.check([key])
    return True


def _monitored_text(late: list[int], limit: timedelta) -> str:
    """Return gloo's error text; empty if no rank is late."""
    ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
    own = "" if limit else "Rank 0 timed out in monitoredBarrier: "
    return f"{own}{ranks} failed to pass monitoredBarrier in {_ms(limit)} ms" if late else ""


def _ms(limit: timedelta) -> int:
    return round(limit.total_seconds() * 1_000)


def _tcp_host(store: Store) -> str:
    """Return the host of torch's TCP store; "" of another store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""

"""Private names of torch 2.11 to 2.15 that the backend needs."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter, _record_function_with_args_exit
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, distributed_c10d

has_dispatch_modes = _len_torch_dispatch_stack
"""Number of dispatch modes of this thread, such as FakeTensorMode."""
is_profiled = _profiler_enabled
"""True if a profiler records this thread."""
begin_range: Callable[..., object] = _record_function_with_args_enter
"""Begin a range of a profile, given its name and the tensors whose sizes it shows."""
end_range: Callable[[Any], None] = _record_function_with_args_exit
"""End a range of a profile, in any thread."""
can_reconfigure = hasattr(ProcessGroup, "reconfigure")
"""True since torch 2.14, which can change the members of a group."""


def backend(rank: int, size: int, *, refuses: bool = True) -> Any:
    """Return a C++ backend that moves nothing between ranks; by default it raises on every collective.

    torch requires a registered backend for the CPU, and sends it every call that a Python group lacks.
    """
    fake: Any = FakeProcessGroup  # torch's stub declares none of its options
    options = fake.Options()
    options.error_on_collective = refuses
    return fake._create_internal(rank, size, options)


def recording_group(rank: int, size: int, *, refuses: bool = True) -> ProcessGroup:
    """Return a C++ group whose calls go through torch's dispatcher, where dispatch modes see or handle them.

    With ``refuses`` it raises if no mode handles a call; else the call writes values that are to be overwritten.
    """
    constructor: Any = ProcessGroup  # its stub lacks the overload without a store
    group: ProcessGroup = constructor(rank, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend(rank, size, refuses=refuses))
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return group


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data, because FakeTensorMode traces the program."""
    return isinstance(tensor, FakeTensor)


def backend_names(group: ProcessGroup | None) -> dict[str, str]:
    """Return the backend names of a group by device type, known once the group exists."""
    words = dist.get_backend_config(group).split(",")
    return {kind: name for kind, _, name in (word.partition(":") for word in words)}


def renumber(group: ProcessGroup, rank: int, global_ranks: list[int]) -> None:
    """Update torch's tables of global ranks after the members of a group have changed.

    In the default group, rank and global rank are equal. If this process's global rank changes, the tables of its other
    groups are emptied: calls with global ranks of those raise ValueError, instead of naming another process. ``rank``
    is the new one of this process, ``global_ranks`` are those of the new members before the change.
    """
    tables: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    if group is dist.group.WORLD:
        if global_ranks[rank] != rank:
            tables.update({other: {} for other in tables})
        global_ranks = list(range(len(global_ranks)))
    if group in tables:
        tables[group] = {one: place for place, one in enumerate(global_ranks)} | {global_ranks[rank]: rank}
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()  # compiled functions contain the former rank and size as constants


def allow_monitored_barrier(cls: Any) -> None:
    """Make `torch.distributed.monitored_barrier` accept groups of a class; torch compares the name with gloo's."""
    original = distributed_c10d.monitored_barrier

    @wraps(original)
    def monitored_barrier(
        group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        ours: Any = dist.group.WORLD if group is None else group
        if not isinstance(ours, cls):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        ours.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


def name_groups_by_ranks() -> None:
    """Name groups of ``new_group(use_local_synchronization=True)`` by their ranks and a count of such groups.

    torch 2.11 to 2.15 name them by the count of all groups of the process. Ranks with different counts then wait for
    each other under different names until the timeout (pytorch issue 173608).
    """
    numbers: Counter[tuple[int, ...]] = Counter()

    def hash_ranks(ranks: list[int]) -> str:
        if not distributed_c10d._world.pg_names:  # a new job
            numbers.clear()
        numbers[tuple(ranks)] += 1
        text = f"{'_'.join(map(str, ranks))} {numbers[tuple(ranks)]}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    distributed_c10d._hash_ranks_to_str = hash_ranks


def rename_backends(rename: Callable[[str, int], str]) -> None:
    """Pass the backend and the rank of every new group through ``rename``, which replaces an earlier function.

    ``init_process_group``, ``new_group`` and ``DeviceMesh`` all create their groups by one function.
    """
    original = inspect.unwrap(distributed_c10d._new_process_group_helper)
    signature = inspect.signature(original)

    @wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = rename(str(bound.arguments["backend"]), bound.arguments["group_rank"])
        bound.arguments["backend"] = dist.Backend(backend)
        return original(*bound.args, **bound.kwargs)

    distributed_c10d._new_process_group_helper = create

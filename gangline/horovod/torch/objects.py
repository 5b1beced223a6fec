"""Parameters, optimizers and objects of any class from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gangline.horovod.torch.calls import (
    ProcessSet,
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    synchronize,
)
from gangline.kvstore.group.objects import pack_object, unpack_object


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors by the root's: a ``state_dict()``, ``named_parameters()`` or ``parameters()``."""
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = [one if isinstance(one, tuple) else (None, one) for one in pairs]
    for handle in [
        broadcast_async_(one, root_rank, name, process_set) for name, one in named if isinstance(one, Tensor)
    ]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Load the root's state into an optimizer; ``model`` is Horovod's argument, and not needed.

    Raises:
        ValueError: if it is LBFGS, whose state is not broadcast.
    """
    del model
    if isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
        raise ValueError("optimizer is LBFGS, whose state cannot be broadcast; load it from a file on each rank")
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank, "optimizer", process_set))


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object.

    Raises:
        TypeError: on all ranks, if it has a type that needs pickle and GANGLINE_ALLOW_PICKLE is not 1.
    """
    is_root = rank() == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = int(broadcast_(torch.tensor(len(data), device="cpu"), root_rank, name, process_set))
    received = broadcast_(data if is_root else data.new_empty(length), root_rank, name, process_set)
    return unpack_object(received.numpy().tobytes(), "the object of broadcast_object")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks.

    Raises:
        TypeError: on all ranks, if one has a type that needs pickle and GANGLINE_ALLOW_PICKLE is not 1.
    """
    data = _packed(obj)
    lengths = allgather(torch.tensor(len(data), device="cpu"), name, process_set).tolist()
    parts = allgather(data, name, process_set).split(lengths)
    return [
        unpack_object(part.numpy().tobytes(), f"the object of rank {other} in allgather_object")
        for other, part in enumerate(parts)
    ]


def _packed(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pack_object(obj)), dtype=torch.uint8)

"""What workers tell each other of the keys they initialise, and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgpack
import torch
from torch import Tensor

from gangline.collectives.errors import MismatchError
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.protocol import DTYPES
from gangline.kvstore.parameter_server.sharding import KeyLayout, ShardPlacement


def layout_of(key: Key, value: Tensor) -> KeyLayout:
    """A key's layout."""
    return KeyLayout(key, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.dtype.itemsize)


def empty(layout: KeyLayout) -> Tensor:
    """A tensor of a layout, on the host."""
    return torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))


def pack(layouts: Sequence[KeyLayout]) -> bytes:
    """Layouts as bytes."""
    return bytes(msgpack.packb([[one.key, one.dtype, list(one.shape), one.itemsize] for one in layouts]))


def new_keys(said: Sequence[bytes], known: Mapping[Key, Sequence[ShardPlacement]]) -> list[KeyLayout]:
    """The keys that nobody knew yet, in an order that all workers share.

    Args:
        said: what each worker has packed, in rank order.
        known: keys and their parts.

    Raises:
        MismatchError: workers give a key different layouts, or lists of different keys; the text is the same on all.
        TypeError: servers hold no such dtype.
        RuntimeError: a worker rests, who would not know the keys when it wakes.
    """
    resting = [rank for rank, packed in enumerate(said) if not packed]
    if resting:
        raise RuntimeError(f"init() came while worker {resting[0]} rests in join(); expected when all take part")
    _check_same_keys(said)
    new: dict[Key, tuple[int, KeyLayout]] = {}
    for rank, packed in enumerate(said):
        for key, dtype, shape, itemsize in msgpack.unpackb(packed):
            layout = KeyLayout(key, dtype, tuple(shape), itemsize)
            is_known = key in known
            first, other = (0, known[key][0].layout) if is_known else new.get(key, (rank, layout))
            if other != layout:
                said_here = f"{_words(layout)} on rank {rank}"
                raise MismatchError(f"key {key!r} has {_words(other)} on rank {first}, but {said_here}")
            if dtype not in DTYPES:
                raise TypeError(f"key {key!r} has dtype {dtype}; expected one of {', '.join(DTYPES)}")
            if not is_known:
                new.setdefault(key, (rank, layout))
    return [layout for _, layout in new.values()]


def _check_same_keys(said: Sequence[bytes]) -> None:
    """See that lists hold the same keys; single keys may come in another order on each worker."""
    lists = [(rank, {one[0] for one in msgpack.unpackb(packed)}) for rank, packed in enumerate(said)]
    for rank, keys in lists[1:]:
        first, expected = lists[0]
        differing = sorted(keys ^ expected, key=str)
        if differing and max(len(keys), len(expected)) > 1:
            here, missing = (first, rank) if differing[0] in expected else (rank, first)
            raise MismatchError(f"key {differing[0]!r} is initialised on rank {here}, but not on rank {missing}")


def _words(layout: KeyLayout) -> str:
    return f"shape {layout.shape} and dtype {layout.dtype}"

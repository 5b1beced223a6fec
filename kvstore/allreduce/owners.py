"""Owners of keys, in proportion to memory: each worker holds the optimizer's state of its own keys alone.

As the first stage of ZeRO (Rajbhandari and others, 2020), but with unequal parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gangline.kvstore.buckets import Bucket
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.placement import place


@dataclass(frozen=True)
class Run:
    """Elements of a flat tensor whose keys one worker owns."""

    begin: int
    end: int
    owner: int


class Owners:
    """The owner of each key; the same on all workers.

    The keys of the first call are divided in their order, so that a bucket has few runs. Later ones go to the worker
    that holds the least for its memory. A key has one owner, so a worker's part can miss its share by a key's size.

    Args:
        memory: relative memory of each worker, for the optimizer's state; 0: it owns nothing.
    """

    def __init__(self, memory: Sequence[float]) -> None:
        self._memory = list(memory)
        self._owners: dict[Key, int] = {}
        self.nbytes = [0] * len(self._memory)
        """Bytes of the weights that each worker owns; state is a multiple of it."""

    @property
    def count(self) -> int:
        """Number of keys that have an owner."""
        return len(self._owners)

    def assign(self, tensors: Iterable[tuple[Key, torch.Tensor]]) -> None:
        """Give each key that has none an owner."""
        new = [(key, tensor.nbytes) for key, tensor in tensors if key not in self._owners]
        if not new:
            return
        if not self._owners:
            whole, total = sum(size for _, size in new), sum(self._memory)
            ends = [whole * part / total for part in accumulate(self._memory)]
            begin = 0
            for key, size in new:
                middle = min(begin + size / 2, whole)
                owner = next(rank for rank, end in enumerate(ends) if middle <= end and self._memory[rank])
                self._owners[key] = owner
                self.nbytes[owner] += size
                begin += size
            return
        holders = place([size for _, size in new], self._memory, self.nbytes)
        self._owners.update(zip((key for key, _ in new), holders, strict=True))

    def of(self, key: Key) -> int:
        """Return the owner of a key that was assigned."""
        return self._owners[key]

    def runs(self, bucket: Bucket) -> list[Run]:
        """Return the parts of a bucket's flat tensor by owner, which cover all of it."""
        begins: list[tuple[int, int]] = []
        for slot in bucket.slots:
            owner = self.of(slot.key)
            if not begins or begins[-1][1] != owner:
                begins.append((slot.offset, owner))
        ends = [begin for begin, _ in begins[1:]] + [bucket.numel]
        return [Run(begin, end, owner) for (begin, owner), end in zip(begins, ends, strict=True)]

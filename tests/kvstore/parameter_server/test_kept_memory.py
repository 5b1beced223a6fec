"""Memory of a server that outlives its process: what a former process has made final, and nothing else, comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server.server.kept_memory import KeptMemory, Record
from gangline.kvstore.parameter_server.server.optimizer_shards import Optimizers, pack_group
from gangline.kvstore.parameter_server.server.shards import Shard, Slot
from tests.kvstore.keyed import check_same

pytestmark = pytest.mark.timeout(60)
NUMEL = 1000


@pytest.fixture
def memory() -> Iterator[Callable[[], KeptMemory]]:
    """Return a function that opens the memory as each start of a server does."""
    descriptor = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield lambda: KeptMemory(os.dup(descriptor))
    os.close(descriptor)


class Start:
    """One start of a server with a shard and an optimizer."""

    def __init__(self, kept: KeptMemory, optimizer: Any = ("adam", {"learning_rate": 0.1})) -> None:
        self.kept = kept
        if not kept.was_used:
            kept.set_optimizer(0, pack_group(0, None, OptimizerSpec.parse(optimizer)), [])
            kept.save_settings()
        optimizers = Optimizers(2)
        optimizers.set(kept.settings.optimizers[0][1])
        self.optimizers = optimizers.all[0]
        shards = kept.restore(optimizers.all, 2) if kept.was_used else []
        if not shards:
            offset = kept.pool.allocate(4 * NUMEL)
            stored = kept.pool.tensor_at(offset, 4 * NUMEL).view(torch.float32).fill_(1)
            shards = [Shard(3, "key", 0, NUMEL, [Slot(stored, offset)], True, 1)]
            kept.add(shards)
        self.shard = shards[0]

    def update(self, gradient: float, *, is_final: bool = True) -> None:
        if len(self.shard.slots) == 1:
            offset = self.kept.pool.allocate(4 * NUMEL)
            stored = self.kept.pool.tensor_at(offset, 4 * NUMEL).view(torch.float32)
            self.shard.slots.append(Slot(stored, offset))
        slot = next(slot for slot in self.shard.slots if slot is not self.shard.slot)
        self.kept.begin(self.shard, slot)
        self.shard.prepare(slot)
        self.optimizers.apply(self.shard, torch.full((NUMEL,), gradient), 1.0 + gradient)
        if is_final:
            number = self.shard.closed + 1
            self.kept.commit(self.shard, number, self.optimizers, slot)
            self.shard.publish(slot, number, None)
            self.shard.closed = number

    def state(self) -> dict[str, Tensor]:
        state = {name: tensor.clone() for name, tensor in self.optimizers.state_of(self.shard).items()}
        return {**state, "value": self.shard.flat.clone()}


@torch.no_grad()
def test_what_was_counted_handled_and_refused_comes_back(memory: Callable[[], KeptMemory]) -> None:
    first = Start(memory())
    for number in (1, 2, 5):
        first.kept.count(first.shard, 1, number)
    first.shard.problems[7] = "was bad"
    first.shard.rejected[0] = "was refused"
    first.kept.save(first.shard, 7, first.optimizers)
    first.kept.settings.handled[b"id"] = [4, 5]
    first.kept.settings.joined = [1]
    first.kept.save_settings()
    second = Start(memory())
    shard = second.shard
    assert (shard.closed, shard.pushed, shard.ahead) == (7, {1: 2}, {1: {5}})
    assert (shard.problems, shard.rejected) == ({7: "was bad"}, {0: "was refused"})
    assert (second.kept.settings.handled, second.kept.settings.joined) == ({b"id": [4, 5]}, [1])


@torch.no_grad()
def test_memory_of_an_interrupted_update_belongs_to_nobody(memory: Callable[[], KeptMemory]) -> None:
    first = Start(memory())
    first.update(0.5)
    first.update(0.25)
    first.update(1.0, is_final=False)
    (torn,) = (slot.offset for slot in first.shard.slots if slot is not first.shard.slot)
    memory()  # killed before it has restored anything
    second = Start(memory())
    assert second.kept.undone == 1
    assert [slot.offset for slot in second.shard.slots] == [first.shard.slot.offset]
    other = second.kept.pool.allocate(4 * NUMEL)
    assert other == torn  # it has another owner, though the shard has not changed
    third = Start(memory())
    assert third.kept.undone == 0
    assert [slot.offset for slot in third.shard.slots] == [first.shard.slot.offset]
    check_same(third.state(), second.state())


@torch.no_grad()
def test_removed_shards_free_their_memory(memory: Callable[[], KeptMemory]) -> None:
    first = Start(memory())
    first.update(0.5)
    used = first.kept.pool.in_use
    first.kept.remove([first.shard])
    assert first.kept.pool.in_use < used
    second = memory()
    assert second.restore(None, 2) == []
    assert second.pool.in_use <= first.kept.pool.in_use


def test_a_record_keeps_the_last_content_that_was_written_whole(memory: Callable[[], KeptMemory]) -> None:
    pool = memory().pool
    record = Record(pool, pool.allocate(64), is_new=True)
    assert record.read() == b""
    for content in (b"a", b"b" * 500, b"c", b"d" * 70_000, b"", b"e"):
        record.write(content)
        assert record.read() == Record(pool, record.offset, is_new=False).read() == content
    last, _ = record.ranges()[record.version % 2]
    pool.segment.bytes(last + 8, 1)[:] = b"x"
    with pytest.raises(OSError, match="whose checksum is wrong"):
        record.read()


def test_memory_of_something_else_is_refused() -> None:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(descriptor, b"something else" * 1000)
    with pytest.raises(OSError, match="the kept memory begins with 0x6e69"):
        KeptMemory(descriptor)


def test_a_process_that_is_killed_anywhere_leaves_a_whole_number_of_updates(memory: Callable[[], KeptMemory]) -> None:
    spec = ("sgd", {"learning_rate": 1.0, "momentum": 0.5})
    expected = Start(KeptMemory(os.memfd_create("gangline", os.MFD_ALLOW_SEALING)), spec)
    with torch.no_grad():
        for start in (Start(memory(), spec), expected):
            start.update(0.0)
    for microseconds in range(100, 4000, 300):
        child = os.fork()
        if not child:  # it only updates until it is killed
            torch.set_grad_enabled(False)
            start = Start(memory())
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
            while True:
                start.update(1.0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGALRM
        found = Start(memory())
        with torch.no_grad():
            for _ in range(found.shard.closed - expected.shard.closed):
                expected.update(1.0)
        check_same(found.state(), expected.state())

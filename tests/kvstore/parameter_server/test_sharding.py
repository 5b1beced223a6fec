"""Sharding and shared memory: shards cover each key once, evenly; allocations do not overlap."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gangline.collectives.transports.shm.segments import open_offered
from gangline.kvstore.compression.codec import typed
from gangline.kvstore.parameter_server import sharding
from gangline.kvstore.parameter_server.protocol import DENSE, Pull
from gangline.kvstore.parameter_server.pull import PullTargets
from gangline.kvstore.parameter_server.sharding import GRAIN, KeyLayout, Sharding, ShardPlacement
from gangline.kvstore.parameter_server.transport import unix_stream
from gangline.kvstore.parameter_server.transport.shared_memory import ALIGNMENT, SharedMemoryPool, aligned, region_of
from tests.kvstore.parameter_server import growth
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(60)


DTYPES = ("float16", "bfloat16", "float32", "float64", "int64", "uint8", "bool")
MIB = 1 << 20

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.tuples(st.integers(1, 5_000_000)),
    st.tuples(st.integers(1, 60_000), st.integers(1, 300)),
).map(tuple)


def layouts(dtypes: Sequence[str] = DTYPES) -> st.SearchStrategy[list[KeyLayout]]:
    kinds = st.lists(st.tuples(st.sampled_from(dtypes), SHAPES), min_size=1, max_size=12)
    return kinds.map(lambda pairs: [KeyLayout(f"key {n}", dtype, shape) for n, (dtype, shape) in enumerate(pairs)])


def key(numel: int, name: str = "k") -> KeyLayout:
    return KeyLayout(name, "float32", (numel,))


# Sharding


@given(layouts(), st.integers(1, 9), st.booleans())
def test_shards_hold_each_element_once(keys: list[KeyLayout], servers: int, whole: bool) -> None:
    sharding = Sharding(servers)
    placed = sharding.place(keys, whole=whole)
    assert list(placed) == [one.key for one in sorted(keys, key=lambda one: -one.nbytes)]
    numbers: list[int] = []
    loads = [0] * servers
    for layout in keys:
        shards = placed[layout.key]
        begin = 0
        for shard in shards:
            assert shard.layout is layout
            assert shard.begin == begin
            assert shard.begin % 64 == 0
            assert shard.begin % shard.width == shard.numel % shard.width == 0
            assert shard.width == layout.row  # rows of these keys are never split
            assert shard.is_whole == (len(shards) == 1)
            assert shard.shape == (layout.shape if shard.is_whole else (shard.numel,))
            begin += shard.numel
            loads[shard.server] += shard.nbytes
            numbers.append(shard.number)
        sizes = [shard.numel for shard in shards]
        assert max(sizes) - min(sizes) < 2 * GRAIN or whole
        assert max(shard.nbytes for shard in shards) <= 4 * MIB + layout.grain * layout.itemsize or whole
        assert begin == layout.numel
        assert len(shards) == 1 or not whole
        assert all(shard.numel for shard in shards) or layout.numel == 0
    assert sorted(numbers) == list(range(len(numbers)))
    assert sharding.loads == loads
    assert sum(loads) == sum(layout.nbytes for layout in keys)


@settings(max_examples=300)
@given(layouts(("float32", "bfloat16", "uint8")), st.integers(2, 8))
def test_servers_are_evenly_loaded(keys: list[KeyLayout], servers: int) -> None:
    sharding = Sharding(servers)
    sharding.place(keys)
    mean = sum(sharding.loads) / servers
    if mean >= 4 * MIB:
        assert max(sharding.loads) <= 1.1 * mean


def tables(keys: Sequence[KeyLayout], *, is_table: bool) -> list[KeyLayout]:
    return [replace(one, is_table=is_table) for one in keys]


@settings(max_examples=300)
@given(layouts(), st.lists(st.integers(1, 64), min_size=1, max_size=6), st.booleans())
def test_each_server_gets_its_share_of_memory(keys: list[KeyLayout], memory: list[int], is_table: bool) -> None:
    keys = tables(keys, is_table=is_table)
    sharding = Sharding(len(memory), memory)
    placed = sharding.place(keys)
    for layout in keys:
        shards = placed[layout.key]
        ends = [shard.begin + shard.numel for shard in shards]
        assert [shard.begin for shard in shards] == [0, *ends[:-1]]
        assert ends[-1] == layout.numel
        assert all(shard.begin % layout.grain == 0 for shard in shards)
        assert len(shards) <= len(memory) or not is_table
    total = sum(sharding.loads)
    assert total == sum(layout.nbytes for layout in keys)
    largest = max((shard.nbytes for shards in placed.values() for shard in shards), default=0)
    for load, own in zip(sharding.loads, memory, strict=True):
        part = own / sum(memory)
        assert abs(load - total * part) <= max(0.05 * total, largest, (len(memory) - 1) * part * largest)


@pytest.mark.parametrize("is_table", [False, True])
def test_a_large_model_is_placed_by_memory_within_a_percent(is_table: bool) -> None:
    keys = tables([key(5_000_000 + 1000 * n, name=f"k{n}") for n in range(40)], is_table=is_table)
    for memory in ([8, 24], [1, 1, 2], [3, 5, 7, 64]):
        sharding = Sharding(len(memory), memory)
        sharding.place(keys)
        shares = [load / sum(sharding.loads) for load in sharding.loads]
        assert shares == pytest.approx([own / sum(memory) for own in memory], abs=0.01)


@given(layouts(), st.integers(1, 5), st.booleans(), st.integers(1, 1 << 50))
def test_servers_of_equal_memory_get_what_they_got_without(
    keys: list[KeyLayout], servers: int, is_table: bool, memory: int
) -> None:
    keys = tables(keys, is_table=is_table)
    assert Sharding(servers, [memory] * servers).place(keys) == Sharding(servers).place(keys)


@pytest.mark.parametrize(
    ("layout", "servers", "expected"),
    [
        (key(0), 2, [(0, 0, 0)]),
        (key(GRAIN), 2, [(0, 0, GRAIN)]),
        (key(GRAIN + 1), 2, [(0, 0, GRAIN), (1, GRAIN, 1)]),
        (key(2 * GRAIN), 1, [(0, 0, 2 * GRAIN)]),
        (key(4 * GRAIN), 2, [(n % 2, n * GRAIN, GRAIN) for n in range(4)]),
    ],
)
def test_a_key_is_split(layout: KeyLayout, servers: int, expected: list[tuple[int, int, int]]) -> None:
    shards = Sharding(servers).place([layout])["k"]
    assert [(shard.server, shard.begin, shard.numel) for shard in shards] == expected


def test_a_removed_key_frees_its_load() -> None:
    sharding = Sharding(2)
    placed = sharding.place([key(1_000_000, name="large"), key(10, name="small")])
    before = list(sharding.loads)
    sharding.remove(placed["large"])
    assert sum(sharding.loads) == 40
    (shard,) = sharding.place([key(1_000_000, name="large")], whole=True)["large"]
    assert isinstance(shard, ShardPlacement)
    assert shard.is_whole
    assert shard.number > max(one.number for one in placed["large"])
    assert sum(sharding.loads) == sum(before)


# Memory


class Allocations(RuleBasedStateMachine):
    """Random allocations; each keeps its own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SharedMemoryPool()
        self.allocations: dict[int, tuple[int, int]] = {}
        self.count = 0

    @rule(nbytes=st.integers(0, 5000) | st.sampled_from([0, 63, 64, 65, 1 << 16, 300_001]))
    def allocate(self, nbytes: int) -> None:
        offset = self.pool.allocate(nbytes)
        assert offset % ALIGNMENT == 0
        assert offset not in self.allocations
        self.count = self.count % 250 + 1
        self.pool.tensor_at(offset, nbytes).fill_(self.count)
        self.allocations[offset] = nbytes, self.count

    @precondition(lambda self: self.allocations)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.allocations)))
        self.pool.free(offset)
        del self.allocations[offset]

    @invariant()
    def allocations_keep_their_bytes(self) -> None:
        assert self.pool.in_use == sum(max(ALIGNMENT, aligned(nbytes)) for nbytes, _ in self.allocations.values())
        for offset, (nbytes, value) in self.allocations.items():
            assert self.pool.tensor_at(offset, nbytes).numpy().tobytes() == bytes([value]) * nbytes

    def teardown(self) -> None:
        for offset in self.allocations:
            self.pool.free(offset)
        assert self.pool.in_use == 0
        assert self.pool.allocate(1 << 20) == 0  # free ranges are merged
        self.pool.close()


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_allocations_that_do_not_fit_is_refused_and_nothing_is_lost() -> None:
    pool = SharedMemoryPool()
    first = pool.allocate(100)
    with pytest.raises(MemoryError, match=r"bytes do not fit in \d+ bytes of shared memory"):
        pool.allocate(1 << 60)
    pool.free(first)
    with pytest.raises(KeyError):
        pool.free(first)
    assert pool.allocate(128) == first
    pool.close()
    pool.close()


def test_other_processes_read_the_segment_within_its_bounds() -> None:
    pool = SharedMemoryPool()
    offset = pool.allocate(800)
    view = typed(pool.tensor_at(offset, 800), torch.float64)
    view.copy_(torch.arange(100, dtype=torch.float64))
    segment = open_offered(pool.handle)
    seen = typed(region_of(segment, offset, 800), torch.float64)
    assert torch.equal(seen, torch.arange(100, dtype=torch.float64))
    for place, nbytes in ((1, 8), (32, 8), (segment.nbytes - 64, 65), (segment.nbytes, 1), (2**62, 8), (0, 2**62)):
        with pytest.raises(ValueError, match=rf"bytes {place} to {place + nbytes} are not an aligned range"):
            region_of(segment, place, nbytes)
    handle = pool.handle
    pool.close()
    with pytest.raises(OSError, match=r"."):
        open_offered(handle)
    del pool, view
    gc.collect()
    assert torch.equal(seen, torch.arange(100, dtype=torch.float64))  # existing mappings stay valid


def test_unaligned_bytes_are_copied_before_they_are_viewed() -> None:
    data = torch.zeros(17, dtype=torch.uint8)
    data[1:9] = torch.tensor([258], dtype=torch.int64).view(torch.uint8)
    assert typed(data[1:9], torch.int64).tolist() == [258]
    assert typed(data[1:9], torch.int64).data_ptr() % 8 == 0
    even = torch.zeros(2, dtype=torch.int64).view(torch.uint8)
    assert typed(even, torch.int64).data_ptr() == even.data_ptr()
    assert [aligned(nbytes) for nbytes in (0, 1, 64, 65, 128)] == [0, 64, 64, 128, 128]


def committed(pool: SharedMemoryPool) -> int:
    """Return the bytes of a pool's pages in memory."""
    return os.fstat(pool._descriptor).st_blocks * 512


def test_pages_that_are_not_needed_any_more_are_returned() -> None:
    pool = SharedMemoryPool()
    small = pool.allocate(MIB)
    large = pool.allocate(100 * MIB)
    for offset, nbytes in ((small, MIB), (large, 100 * MIB)):
        pool.tensor_at(offset, nbytes).fill_(7)
    pool.free(large)
    assert committed(pool) >= 101 * MIB  # it may be needed again soon
    for _ in range(2 * 1024):
        pool.free(pool.allocate(MIB))
    assert committed(pool) <= 67 * MIB
    pool.return_pages()
    assert committed(pool) <= 2 * MIB
    assert pool.tensor_at(small, MIB).eq(7).all()
    pool.close()


# Threads of a server


NUMEL = 1 << 24
"""Elements of a key of 64 MiB."""


@pytest.mark.parametrize(("servers", "threads"), [(1, 2), (4, 4)])
def test_a_large_key_uses_all_threads_of_all_servers_alike(
    servers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)))
    with Job(1, servers) as job, job.stores()[0] as kv:
        kv.init("large", torch.zeros(NUMEL))
        used: Counter[tuple[int, int]] = Counter()
        for index in range(servers):
            for shard in job.server()._rounds.shards.values():
                used[index, shard.thread] += shard.flat.nbytes
    bytes_by_thread = [used[index, thread] for index in range(servers) for thread in range(threads)]
    assert bytes_by_thread == [4 * NUMEL // (servers * threads)] * servers * threads


# Requests of pulls


def test_shards_share_messages_of_at_most_8_mib_and_larger_ones_are_requested_alone() -> None:
    sizes = {"large": 3_000_000, "a": 1_000_000, "b": 1_000_000, "c": 1_000_000, "d": 10}
    layouts = [KeyLayout(key, "float32", (numel,)) for key, numel in sizes.items()]
    placed = Sharding(1).place(layouts, whole=True)
    out, no_memory = torch.empty(0), Mock(side_effect=AssertionError("memory was read"))
    targets = PullTargets([(key, [out]) for key in sizes], placed, no_memory, None)
    messages = [request.message for request in targets.requests(dict.fromkeys(sizes, 7), "pull", 0)]
    numbers = {key: placed[key][0].number for key in sizes}
    groups = [["large"], ["a", "b"], ["c", "d"]]
    assert messages == [Pull(0, [(numbers[key], 7, DENSE, 0) for key in group], False, None) for group in groups]


# Many keys


MOST = 300
"""Frames that a message may have in this test: 65,536 otherwise, which takes too many keys."""


def test_calls_on_more_keys_than_a_message_has_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_stream, "_MAX_FRAMES", MOST)
    monkeypatch.setattr(sharding, "MAX_ENTRIES", MOST // 2, raising=False)
    keys = list(range(MOST + 100))
    values = [torch.full((1,), float(key)) for key in keys]
    outs = [torch.empty(1) for _ in keys]
    with Job(1) as job, job.stores(timeout=5)[0] as kv:
        kv.init(keys, values)
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "momentum": 0.5}))
        kv.push(keys, [torch.ones(1)] * len(keys))
        kv.pull(keys, outs)
        assert torch.cat(outs).equal(torch.cat(values) - 1)
        kv.load_optimizer_state(kv.optimizer_state())  # the momentum is 1
        kv.pushpull(keys, [torch.ones(1)] * len(keys), outs)
        assert torch.cat(outs).equal(torch.cat(values) - 2.5)


@pytest.mark.slow
def test_growth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["growth", "3,2"])
    growth.main()
    assert capsys.readouterr().out.startswith("3 workers, 2 keys: round ")

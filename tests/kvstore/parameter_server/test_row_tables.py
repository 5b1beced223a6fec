"""Row tables: what a call with few rows sends and works on does not depend on the size of the table."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gangline
from gangline import KVStore, kvstore
from gangline.kvstore import RowSparse
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import Define, Pull, Push
from gangline.kvstore.parameter_server.server.kept_memory import KeptMemory
from gangline.kvstore.parameter_server.server.optimizer_shards import pack_group
from gangline.kvstore.parameter_server.server.rounds import ShardRounds
from gangline.kvstore.parameter_server.server.shards import PushedValue, Shard, Slot
from gangline.kvstore.parameter_server.sharding import KeyLayout, Sharding
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.test_sparse import Elements

pytestmark = pytest.mark.timeout(60)
GIB = 1 << 30


def empty(shape: tuple[int, ...]) -> RowSparse:
    """A table of zeros."""
    return RowSparse([], torch.empty(0, *shape[1:]), shape)


def recorded(kv: DistStore) -> list[Request]:
    """Return a list to which the store's requests are added."""
    sent: list[Request] = []
    submit = kv._servers.submit

    def record(request: Request) -> None:
        sent.append(request)
        submit(request)

    kv._servers.submit = record  # type: ignore[method-assign]
    return sent


def sizes(request: Request) -> tuple[type, int, int, int]:
    """Return kind, server, entries and bytes of data of a request."""
    assert isinstance(request.message, (Push, Pull))
    nbytes = sum(entry[3] for entry in request.message.entries)
    return type(request.message), request.server, len(request.message.entries), nbytes


@pytest.mark.parametrize("width", [64, 77])
def test_few_rows_of_a_table_of_any_size_are_one_message_per_server(width: int) -> None:
    row = 8 + 4 * width
    with Job(1, 2) as job, job.stores()[0] as kv:
        for rows in (20_000, 300_000, 2 * GIB // (4 * width)):  # 2 GiB, of which the servers touch few pages
            table = empty((rows, width))
            kv.init(rows, table)
            sent = recorded(kv)
            ids = [0, 3, rows - 1]
            kv.push(rows, RowSparse(ids, torch.ones(3, width), table.shape))
            kv.row_sparse_pull(rows, table, row_ids=ids)
            kv.row_sparse_pull(rows, table, row_ids=[4, 0])
            assert table.values.tolist() == [[1.0] * width, [0.0] * width]
            kv.row_sparse_pull(rows, table, row_ids=[])
            begin, end = (shard.server for shard in kv._shards[rows])
            both = [(Push, begin, 1, 2 * row), (Push, end, 1, row), (Pull, begin, 1, 16), (Pull, end, 1, 8)]
            assert sorted(map(sizes, sent), key=str) == sorted([*both, (Pull, begin, 1, 16)], key=str)
        pools = [job.server()._pool for _ in range(2)]
        assert sum(os.fstat(pool._descriptor).st_blocks * 512 for pool in pools if pool is not None) < 64 << 20


@pytest.mark.parametrize("first", ["dense", "row-sparse"])
def test_rows_of_odd_width_travel_whole_and_only_shards_with_wanted_rows_are_asked(first: str) -> None:
    shape, ids = (60_000, 77), torch.arange(0, 6000, 200)
    with Job(1, 2) as job, job.stores()[0] as kv:
        kv.init("w", torch.zeros(shape) if first == "dense" else empty(shape))
        sent = recorded(kv)
        kv.push("w", RowSparse(ids, torch.ones(30, 77), shape))
        kv.row_sparse_pull("w", empty(shape), row_ids=ids)
    pushes, pulls = ([sizes(one) for one in sent if type(one.message) is kind] for kind in (Push, Pull))
    assert sum(nbytes for *_, nbytes in pushes) == 30 * (8 + 4 * 77)
    assert (len(pushes), len(pulls)) == (2, 1)  # the first tenth of the rows is on one server
    assert pulls[0][2:] == (1, 8 * 30)


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("row", [1, 64, 77, 768, 4097, 200_003])
def test_shards_begin_at_whole_rows_unless_these_are_very_wide(row: int, is_table: bool) -> None:
    layout = KeyLayout("w", "float32", (-(-(64 << 20) // (4 * row)), row), is_table)
    shards = Sharding(2).place([layout])["w"]
    is_whole = is_table or row < 200_000
    assert shards[0].width == (row if is_whole else 1)
    assert all(shard.begin % 64 == shard.begin % shards[0].width == 0 for shard in shards)
    assert len(shards) == 2 if is_table else len(shards) >= 16


def test_a_table_is_placed_for_all_workers_if_one_initialises_it_with_rows() -> None:
    shape = (40_000, 33)
    with Job(2, 2) as job:
        stores = job.stores()
        values: list[Any] = [torch.ones(shape), empty(shape)]  # rank 0's count
        job.each(stores, lambda kv: kv.init("w", values[kv.rank]))
        out = torch.empty(shape)
        for kv in stores:
            assert [(shard.server, shard.begin % 33) for shard in kv._shards["w"]] == [(0, 0), (1, 0)]
            kv.pull("w", out)
            assert out.unique().tolist() == [1.0]


SPECS: dict[str, Any] = {
    "none": None,
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.1, "weight_decay": 0.01}),
    "fused adam": ("adam", {"learning_rate": 0.1, "fused": True}),
    "clipped": ("sgd", {"learning_rate": 0.1, "clip_global_norm": 0.5}),
}


@pytest.mark.parametrize("first", ["dense", "some rows", "all rows"])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_state_of_tables_are_those_of_a_local_store(name: str, first: str) -> None:
    shape, generator = (9000, 77), torch.Generator().manual_seed(7)
    whole = torch.randn(shape, generator=generator)
    initial: Any = RowSparse(torch.arange(9000), whole, shape)
    if first != "all rows":
        initial = whole if first == "dense" else RowSparse([8999, 4, 4], whole[:3], shape)
    with Job(1, 2) as job, job.stores()[0] as kv, kvstore.create("local") as local:
        for store in (kv, local):
            store.init("w", initial)
            if SPECS[name] is not None:
                store.set_optimizer(SPECS[name])
        for step in range(5):
            ids = torch.randint(9000, (20,), generator=generator)
            gradient: Any = RowSparse(ids, torch.randn(20, 77, generator=generator), shape)
            if step == 2 or "fused" in name:  # torch's kernel rounds the last elements of a tensor of rows differently
                gradient = torch.randn(shape, generator=generator)
            outs = []
            for store in (kv, local):
                store.push("w", gradient)
                if name == "clipped":
                    store.update()
                outs.append(torch.empty(shape))
                store.pull("w", outs[-1])
                if step == 3 and SPECS[name] is not None:
                    store.load_optimizer_state(store.optimizer_state())
            if name == "clipped":
                torch.testing.assert_close(*outs)  # norms are summed by shard
            else:
                assert outs[0].equal(outs[1]), step


def test_embeddings_with_sparse_gradients_become_tables_of_a_trainer() -> None:
    def train(kv: KVStore) -> Tensor:
        torch.manual_seed(0)
        net = torch.nn.Embedding(40_000, 33, sparse=True)
        trainer = gangline.Trainer(net, "adam", {"learning_rate": 0.1}, kvstore=kv)
        for step in range(3):
            trainer.zero_grad()
            net(torch.tensor([step, 39_000, 7])).square().sum().backward()
            trainer.step(1)
        return net.weight.detach()

    with Job(1, 2) as job, job.stores()[0] as kv:
        weight = train(kv)
        assert [shard.width for shard in kv._shards["weight"]] == [33, 33]
    assert weight.equal(train(kvstore.create("local")))


# What a server works on

ROW_COUNT, WIDTH = 5000, 8


class OneShard:
    """A shard of a server whose work runs at once, perhaps with memory that outlives the server."""

    def __init__(self, spec: Any, *, is_sync: bool, is_kept: bool) -> None:
        pool: Any = SimpleNamespace(size=1, run=lambda thread, nbytes, work, then: (work(), then("")))
        pool.scratch = lambda thread, nbytes: torch.empty(nbytes, dtype=torch.uint8)
        self.rounds = ShardRounds(1, pool, self.add_slot, lambda *_: None, lambda *_: None)
        self.rounds.is_sync = is_sync
        self.kept = self.rounds.kept = (
            KeptMemory(os.memfd_create("gangline", os.MFD_ALLOW_SEALING)) if is_kept else None
        )
        self.shard = self.rounds.shards[1] = Shard(1, "w", 0, WIDTH, [self.new_slot()], False, 0)
        if spec is not None:
            packed = pack_group(0, None, OptimizerSpec.parse(spec))
            self.rounds.optimizers.set(packed)
            if self.kept is not None:
                self.kept.set_optimizer(0, packed, [])
        if self.kept is not None:
            self.kept.add([self.shard])

    def add_slot(self, shard: Shard) -> Slot:
        shard.slots.append(self.new_slot())
        return shard.slots[-1]

    def new_slot(self) -> Slot:
        nbytes = 4 * ROW_COUNT * WIDTH
        if self.kept is None:
            return Slot(torch.zeros(ROW_COUNT * WIDTH), 0)
        offset = self.kept.pool.allocate(nbytes)
        return Slot(self.kept.pool.tensor_at(offset, nbytes).view(torch.float32), offset)

    def push(self, value: Tensor | RowSparse) -> None:
        number = self.shard.closed + 1
        self.rounds.push(self.shard, 0, number, PushedValue(value, None, None), None)
        self.rounds.advance()
        assert (self.shard.closed, self.shard.problems) == (number, {})


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.parametrize("spec", [None, "sgd", ("sgd", {"momentum": 0.9}), "adam", "adagrad", "sparseadam"], ids=str)
def test_a_round_of_rows_works_on_its_rows_only(
    spec: Any, is_sync: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.kvstore.parameter_server.server.kept_memory._LOOP", 0)
    with torch.no_grad():
        one = OneShard(spec, is_sync=is_sync, is_kept=is_kept)
        part = RowSparse([17, 4000, 17], torch.ones(3, WIDTH), (ROW_COUNT, WIDTH))
        one.push(part)
        one.push(part)
        with Elements() as counted:
            one.push(part)
        assert 0 < counted.most <= 6 * WIDTH
        changed = one.shard.flat.view(-1, WIDTH).any(1).nonzero().view(-1)
        assert changed.tolist() == [17, 4000]
    if one.kept is not None and (spec is not None or not is_sync):  # else the first round replaced the whole shard
        ((_, copied),) = one.kept._undo_areas[0].ranges()
        assert copied < one.shard.flat.nbytes / 10


def test_the_sum_of_rows_replaces_that_of_the_round_before() -> None:
    with torch.no_grad():
        one = OneShard(None, is_sync=True, is_kept=False)
        generator = torch.Generator().manual_seed(3)
        for step in range(12):
            ids = torch.randperm(ROW_COUNT, generator=generator)[:4]
            part = RowSparse(ids, torch.ones(4, WIDTH), (ROW_COUNT, WIDTH))
            one.push(part.to_dense().view(-1) if step in (0, 5, 6) else part)
            assert one.shard.flat.view(-1, WIDTH).equal(part.to_dense())


def test_an_interrupted_update_of_rows_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.kvstore.parameter_server.server.kept_memory._LOOP", 0)
    with torch.no_grad():
        one = OneShard(("sgd", {"momentum": 0.9}), is_sync=True, is_kept=True)
        kept, shard = one.kept, one.shard
        assert kept is not None
        one.push(RowSparse([17, 4000], torch.ones(2, WIDTH), (ROW_COUNT, WIDTH)))
        optimizers = one.rounds.optimizers.all[0]
        (momentum,) = [state for state in optimizers.state_of(shard).values() if isinstance(state, Tensor)]
        before = shard.flat.clone(), momentum.clone()
        rows = torch.tensor([4000, 9, 4000])
        slot = next(slot for slot in shard.slots if slot is not shard.slot)
        kept.begin(shard, slot, rows)
        assert kept._undo_areas[0].ranges()[0][1] < shard.flat.nbytes / 10
        shard.prepare(slot)
        optimizers.apply(shard, RowSparse(rows.unique(), torch.ones(2, WIDTH), (ROW_COUNT, WIDTH)), None)
        assert not slot.flat.equal(before[0])
        assert not momentum.equal(before[1])
        assert kept._undo_areas[0].undo() == [slot.offset]
        assert shard.flat.equal(before[0])
        assert momentum.equal(before[1])


@pytest.mark.parametrize("call", ["init", "assign"])
def test_initial_values_of_a_large_shard_are_sent_in_pieces(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.kvstore.parameter_server.push._DEFINE_BYTES", 100_000)
    value = torch.randn(3000, 77)
    with Job(1) as job, job.stores()[0] as kv:
        sent = recorded(kv)
        kv.init("w", RowSparse(torch.arange(3000), value, value.shape) if call == "init" else empty((3000, 77)))
        if call == "assign":
            kv.assign("w", value)
        out = torch.empty(3000, 77)
        kv.pull("w", out)
        assert out.equal(value)
    nbytes = [one.nbytes for one in sent if isinstance(one.message, Define)]
    assert sum(nbytes) == value.nbytes
    assert max(nbytes) <= 100_000


def test_memory_that_was_used_before_is_cleared_for_a_table() -> None:
    with Job(1) as job, job.stores()[0] as kv:
        server = job.server()
        assert server._pool is not None
        offset = server._pool.allocate(3 << 20)
        server._pool.tensor_at(offset, 3 << 20).fill_(7)
        server._pool.free(offset)
        shape = (9000, 77)
        kv.init("w", empty(shape))
        out = torch.ones(shape)
        kv.pull("w", out)
        assert not out.any()

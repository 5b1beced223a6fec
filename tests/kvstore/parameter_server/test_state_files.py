"""Large optimizer state: each server writes and reads its own part, while the others go on."""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import kvstore
from gangline.collectives.errors import DeadNodeError, StallError
from gangline.kvstore import KVStore, RowSparse
from gangline.kvstore.optimizer import files, state_parts
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import OptimizerSpec
from gangline.kvstore.optimizer.state_parts import PartWriter, ShardState
from gangline.kvstore.parameter_server import store
from gangline.kvstore.parameter_server.server import state_files
from gangline.kvstore.parameter_server.server.optimizer_shards import ShardOptimizers
from gangline.kvstore.parameter_server.server.state_files import StateFiles
from gangline.kvstore.parameter_server.server.thread_pool import ThreadPool
from gangline.kvstore.parameter_server.transport.unix_stream import UnixStream
from tests import programs
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.test_optimizer_shards import first, gradient

pytestmark = pytest.mark.timeout(110)

SHAPES: dict[str | int, tuple[int, ...]] = {"small": (7, 5), 3: (700_003,), "a/b": (601, 700), "one": ()}
TABLE = (4001, 33)
ADAM = ("adam", {"learning_rate": 0.01, "amsgrad": True})
ADAFACTOR = ("adafactor", {"learning_rate": 0.01})
"""It has state that is not elementwise, and keeps keys whole."""
PATTERNS = ({"a/*": ADAFACTOR, "[!o]*": ADAM, "*": ("sgd", {"momentum": 0.5})}, {"rescale_grad": 0.5})


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make servers write state of any size, of which a step writes or reads little."""
    monkeypatch.setattr(store, "MAX_GATHERED", 0)
    monkeypatch.setattr(state_files, "_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(state_parts, "_PIECE", 100_000)


def begin(kv: KVStore, spec: Any, values: dict[str | int, Tensor] | None = None) -> None:
    """Initialise the keys, by default with their first values, and a table for optimizers of rows."""
    if spec[0] == "adam":
        kv.init("table", RowSparse(torch.arange(0), torch.empty(0, TABLE[1]), TABLE))
    for key, shape in SHAPES.items():
        kv.init(key, first(shape) if values is None else values[key])
    if values is not None and "table" in kv:
        kv.assign("table", values["table"])
    kv.set_optimizer(spec)


def step(kv: KVStore, number: int) -> None:
    for key, shape in SHAPES.items():
        kv.push(key, gradient(shape, kv.rank, number))
    if "table" in kv:
        rows = torch.arange(number, 500 * number, 7)  # others have no state yet
        kv.push("table", RowSparse(rows, gradient((len(rows), TABLE[1]), kv.rank, number), TABLE))


def weights(kv: KVStore) -> dict[str | int, Tensor]:
    found: dict[str | int, Tensor] = {key: torch.empty(shape) for key, shape in SHAPES.items()}
    if "table" in kv:
        found["table"] = torch.empty(TABLE)
    kv.pull(list(found), list(found.values()))
    return found


def saved(path: Path, spec: Any, servers: int = 2) -> tuple[dict[str | int, Tensor], dict[str | int, Tensor]]:
    """Train two steps, save, and train one more; return the weights before and after the last step."""
    with Job(1, servers) as job, job.stores()[0] as kv:
        begin(kv, spec)
        step(kv, 1)
        step(kv, 2)
        kv.save_optimizer_states(path)
        before = weights(kv)
        step(kv, 3)
        return before, weights(kv)


def go_on(kv: KVStore, path: Path, spec: Any, before: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
    """Begin with saved weights and state; return the weights after the third step."""
    begin(kv, spec, before)
    kv.load_optimizer_states(path)
    step(kv, 3)
    return weights(kv)


@pytest.mark.parametrize("spec", [ADAM, ADAFACTOR, PATTERNS], ids=["adam", "adafactor", "by pattern"])
def test_parts_of_two_servers_are_read_by_any_number_of_servers_and_by_a_local_store(tmp_path: Path, spec: Any) -> None:
    path = tmp_path / "new folder" / "states"
    before, after = saved(path, spec)
    assert len(parts_of(path)) == 2
    for servers in (1, 2, 3):
        with Job(1, servers) as job, job.stores()[0] as kv:
            assert_equal(go_on(kv, path, spec, before), after)
    if spec is not ADAM:  # rows of a local store's table get their state at the first push of any
        return
    with kvstore.create("local") as kv:
        begin(kv, spec, before)
        kv.load_optimizer_states(path)
        step(kv, 3)
        assert_equal(weights(kv), after)


def test_a_large_file_of_a_local_store_is_read_by_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "states"
    with kvstore.create("local") as kv:
        begin(kv, ADAM)
        step(kv, 1)
        kv.save_optimizer_states(path)
        before = weights(kv)
        step(kv, 3)
        after = weights(kv)
    with Job(1, 2) as job, job.stores()[0] as kv:
        assert_equal(go_on(kv, path, ADAM, before), after)
        flip(path, -8)
        with pytest.raises(ValueError, match="states is damaged: its checksum is wrong"):
            kv.load_optimizer_states(path)


def parts_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.*"))


def flip(path: Path, at: int) -> None:
    """Change a byte of a file, counted from its end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def assert_equal(got: dict[str | int, Tensor], expected: dict[str | int, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def test_a_save_replaces_the_parts_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "states"
    with Job(1, 2) as job, job.stores()[0] as kv:
        begin(kv, ADAM)
        step(kv, 1)
        kv.save_optimizer_states(path)
        former = parts_of(path)
        for name in ("00000000-0.part.tmp", "00000000.part_probe"):  # of processes that were killed
            (tmp_path / f"states.{name}").touch()
        kv.save_optimizer_states(path)
        assert len(parts_of(path)) == len(former) == 2
        assert not set(parts_of(path)) & set(former)
        monkeypatch.setattr(store, "MAX_GATHERED", 1 << 30)
        kv.save_optimizer_states(path)
        assert [one.name for one in tmp_path.iterdir()] == ["states"]


def test_memory_holds_little_of_a_part_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_parts, "_UNSYNCED", 1 << 20)
    sizes, sync = [0], os.fdatasync

    def counted(file: int) -> None:
        sync(file)
        sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", counted)
    state = torch.arange(2_500_000, dtype=torch.float32)
    writer = PartWriter(tmp_path / "part", [ShardState("key", 0, len(state), {"mean": state})])
    try:
        writer.write(0)
        writer.finish()
    finally:
        writer.close()
    sizes.append((tmp_path / "part").stat().st_size)
    assert max(map(operator.sub, sizes[1:], sizes)) <= (1 << 20) + 100_000  # of a piece
    read = state_parts.StateParts([tmp_path / "part"]).state_of("key", 0, state.shape)
    assert torch.equal(read["mean"], state)


@pytest.mark.parametrize(("number", "at"), [(0, -9), (1, -9), (1, 300)])
def test_a_damaged_part_changes_nothing(tmp_path: Path, number: int, at: int) -> None:
    path = tmp_path / "states"
    before, after = saved(path, ADAM)
    with Job(1, 2) as job, job.stores()[0] as kv:
        assert_equal(go_on(kv, path, ADAM, before), after)
        flip(parts_of(path)[number], at)
        with pytest.raises(ValueError, match=rf"{parts_of(path)[number].name} is damaged"):
            kv.load_optimizer_states(path)
        for key, value in before.items():
            kv.assign(key, value)
        step(kv, 4)
        changed = weights(kv)
    with Job(1, 1) as job, job.stores()[0] as kv:
        flip(parts_of(path)[number], at)
        assert_equal(go_on(kv, path, ADAM, before), after)
        for key, value in before.items():
            kv.assign(key, value)
        step(kv, 4)
        assert_equal(weights(kv), changed)


def test_a_part_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states"
    before, _ = saved(path, ADAM)
    first_part, second_part = parts_of(path)
    second_part.write_bytes(first_part.read_bytes())
    with Job(1) as job, job.stores()[0] as kv:
        begin(kv, ADAM, before)
        with pytest.raises(ValueError, match=rf"{second_part.name} is a copy of {first_part.name}"):
            kv.load_optimizer_states(path)


def test_parts_that_a_server_does_not_see_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "states"
    saved(path, ADAM)
    parts_of(path)[1].unlink()
    text = r"server \d on host .* does not see .*-1.part, which worker 0 sees: .* expected a path on a disk that"
    with Job(2, 2) as job:
        stores = job.stores()

        def load(kv: KVStore) -> None:
            begin(kv, ADAM)
            with pytest.raises(FileNotFoundError, match=text):
                kv.load_optimizer_states(path)

        job.each(stores, load)
    spec = OptimizerSpec.parse(ADAM)
    with pytest.raises(FileNotFoundError, match=r"server 1 on host .* does not see .*probe"):
        next(StateFiles(ThreadPool(), "server 1", id)._save([], ShardOptimizers(spec, 1), tmp_path, "part", "probe"))


def test_state_of_another_optimizer_or_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states"
    saved(path, ADAM)
    with Job(1) as job, job.stores()[0] as kv:
        kv.init("small", torch.zeros(7, 5))
        kv.set_optimizer(("sgd", {"learning_rate": 0.1}))
        with pytest.raises(ValueError, match="the state is of optimizer 'adam', but 'sgd' is set here"):
            kv.load_optimizer_states(path)
        kv.set_optimizer(ADAM)
        with pytest.raises(ValueError, match="the state has key 'table', which is unknown here"):
            kv.load_optimizer_states(path)


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_other_workers_are_answered_while_a_server_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    writes, goes_on = threading.Event(), threading.Event()
    write = PartWriter.write

    def held(writer: PartWriter, number: int) -> int:
        writes.set()
        assert goes_on.wait(60)
        return write(writer, number)

    monkeypatch.setattr(PartWriter, "write", held)
    with Job(2) as job:
        one, other = job.stores(name)
        job.each([one, other], lambda kv: begin(kv, ADAM))
        job.each([one, other], lambda kv: step(kv, 1))
        saving = job.later(lambda: one.save_optimizer_states(tmp_path / "states"))
        assert writes.wait(60)
        weights(other)
        assert not saving.done()
        goes_on.set()
        saving.result(60)
        job.each([one, other], lambda kv: step(kv, 2))


def test_a_save_that_does_not_go_on_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    with monkeypatch.context() as patched, Job(1) as job, job.stores(timeout=0.5)[0] as kv:
        patched.setattr(PartWriter, "write", lambda *_: goes_on.wait(60) and 0)
        begin(kv, ADAM)
        step(kv, 1)
        with pytest.raises(StallError, match=r"save of optimizer state: servers \[0\] have not gone on for 0.5 s"):
            kv.save_optimizer_states(tmp_path / "states")
        patched.undo()
        patched.setattr(store, "MAX_GATHERED", 0)
        goes_on.set()
        kv.save_optimizer_states(tmp_path / "states")  # waits until the first one has given up
        assert len(parts_of(tmp_path / "states")) == 1


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1) as job, job.stores()[0] as kv:
        begin(kv, ADAM)
        step(kv, 1)
        with monkeypatch.context() as patched:
            patched.setattr(PartWriter, "write", no_space)
            with pytest.raises(kvstore.errors.DiskFullError, match="cannot be written: its data have"):
                kv.save_optimizer_states(tmp_path / "states")
        assert not list(tmp_path.iterdir())
        kv.save_optimizer_states(tmp_path / "states")


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_on_one_server_leaves_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PartWriter.write

    def fails(writer: PartWriter, number: int) -> int:
        if "-0.part" in writer._file.name:
            no_space()
        time.sleep(0.1)
        return write(writer, number)

    monkeypatch.setattr(PartWriter, "write", fails)
    with Job(1, 2) as job, job.stores()[0] as kv:
        begin(kv, ADAM)
        step(kv, 1)
        with pytest.raises(kvstore.errors.DiskFullError, match=r"-0\.part cannot be written"):
            kv.save_optimizer_states(tmp_path / "states")
    assert not list(tmp_path.iterdir())


def test_a_save_that_ends_within_another_one_keeps_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state, tokens, save = tmp_path / "states", OptimizerState("sgd", 0.1, 0.1, {}, {}, {}), ["b" * 8], files.save

    def save_parts(token: str) -> None:
        with state_parts.saving(path, token):
            path.with_name(f"states.{token}-0.part").touch()
            state_parts.save_index(path, [f"states.{token}-0.part"], state)

    def save_twice(*arguments: Any) -> None:
        save(*arguments)
        if tokens:
            save_parts(tokens.pop())

    monkeypatch.setattr(files, "save", save_twice)
    save_parts("a" * 8)
    names = state_parts.load(path)[1]
    assert names == ["states.bbbbbbbb-0.part"]
    assert path.with_name(names[0]).exists()


@pytest.mark.parametrize("names", [("states", "states"), ("states-0", "states-1")])
def test_workers_may_save_at_the_same_time(tmp_path: Path, names: tuple[str, str]) -> None:
    with Job(2, 2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: begin(kv, ADAFACTOR))
        job.each(stores, lambda kv: step(kv, 1))
        for _ in range(5):
            job.each(stores, lambda kv: kv.save_optimizer_states(tmp_path / names[kv.rank]))
            found = [state_parts.load_whole(tmp_path / name).tensors for name in names]
            assert found[0]
            assert_equal({**found[0]}, {**found[1]})


def test_a_message_that_is_too_large_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1) as job, job.stores()[0] as kv:
        begin(kv, ADAM)
        step(kv, 1)
        weights(kv)
        job.gives_up = True
        for stream in streams_of(kv):
            stream.limit = 1 << 10
        with pytest.raises(DeadNodeError, match=r"cannot talk to server 0: received a message of .* at most 1024"):
            kv.optimizer_state()


def streams_of(kv: Any) -> Iterator[UnixStream]:
    for connection in kv._servers._connections:
        yield connection.channel._stream


PROGRAM = """
import operator
import os
import sys
import torch
import gangline
from gangline.kvstore.parameter_server import store

store.MAX_GATHERED = 0
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 2000), torch.nn.Linear(2000, 10))
if first:
    model.load_state_dict(torch.load(f"{path}.weights"))
trainer = gangline.Trainer(model, "adam", {"learning_rate": 0.01}, kvstore="dist_sync")
if first:
    trainer.load_states(path)
for step in range(first, last):
    trainer.zero_grad()
    model(torch.full((4, 64), step + 1.0)).square().sum().backward()
    trainer.step(4)
    if trainer.kvstore.rank == 0 and step == 1:
        trainer.save_states(path)
        torch.save(model.state_dict(), f"{path}.weights")
total = sum(float(weight.double().sum()) for weight in model.parameters())
print("weights", total.hex(), "servers", sum(load > 0 for load in trainer.kvstore._sharding.loads))
"""


@pytest.mark.slow
def test_a_job_resumes_with_other_servers_of_unequal_memory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(*options: object, first: int, last: int) -> list[list[str]]:
        words = [
            "-m",
            "gangline",
            "launch",
            "-n",
            2,
            *options,
            "--",
            sys.executable,
            program,
            tmp_path / "states",
            first,
            last,
        ]
        out = programs.python(*words, code=0).stdout
        return [line.split("weights ")[1].split() for line in out.splitlines() if "weights" in line]

    whole = run("-s", 2, first=0, last=4)
    for servers, memory in ((1, "1G"), (3, "1G,2G,4G")):
        again = run("-s", servers, "--server-memory", memory, first=2, last=4)
        assert [words[0] for words in again] == [words[0] for words in whole]
        assert {words[2] for words in again} == {str(servers)}

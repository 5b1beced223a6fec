"""Published versions and readers: whole versions only, whatever becomes of readers, workers and servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn

import gangline
from gangline import KVStore, Reader
from gangline.cli.launch import _print_address
from gangline.collectives.environments.job_key import JobKey, write_file
from gangline.collectives.errors import DeadNodeError, StallError
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import (
    MAX_PARTS,
    PART_BYTES,
    Attach,
    Attached,
    Detached,
    Part,
    Read,
    Versions,
    Want,
)
from gangline.kvstore.parameter_server.store import DistStore
from tests.hosts import Hosts, obstacle
from tests.kvstore.parameter_server.in_process import LIMIT, Job, RawClient
from tests.programs import environment
from tests.random_kills import processes

pytestmark = pytest.mark.timeout(110)

SHAPES = {"whole": (5, 3), "split": (3000, 1000), 7: (), "empty": (0, 4)}
"""Of keys; "split" has shards on both servers."""


class Versioned:
    """Job of two stores in this process whose keys hold the sum of all pushes; worker 0 publishes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.address = job.address.removeprefix("tcp://")
        self.stores = job.stores()
        self.server = job.server()
        self.pushed = 0
        values = [torch.zeros(shape) for shape in SHAPES.values()]
        job.each(self.stores, lambda kv: kv.init([*SHAPES], values))

    def push(self, ranks: Sequence[int] = (0, 1)) -> None:
        """Push the number of this round, so that each value becomes twice that."""
        self.pushed += 0 in ranks
        values = [torch.full(shape, float(self.pushed)) for shape in SHAPES.values()]
        self.job.each([self.stores[rank] for rank in ranks], lambda kv: kv.push([*SHAPES], values, async_op=True))

    def publish(self, version: int, **extra: Tensor) -> None:
        self.push()
        self.stores[0].publish(version, extra)

    def __enter__(self) -> Versioned:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.each(self.stores, DistStore.close)


@pytest.fixture
def versioned() -> Iterator[Versioned]:
    with Job(2, servers=2) as job, Versioned(job) as versioned:
        yield versioned


def tensors() -> dict[Any, Tensor]:
    return {key: torch.full(shape, -1.0) for key, shape in SHAPES.items()}


def targets(kind: str) -> dict[Any, Tensor]:
    """Return tensors of which the last one cannot be written."""
    out = tensors()
    whole = out.pop("whole")
    made = {
        "meta": lambda one: one.to("meta"),
        "sparse": Tensor.to_sparse,
        "expanded": lambda one: one[:1].expand(one.shape),
    }
    return {**out, "whole": made[kind](whole)}


def pulled(reader: Reader, *arguments: Any, **options: Any) -> tuple[int, set[float]]:
    """Pull; return the version and the values."""
    out = tensors()
    version = reader.pull(out, *arguments, **options)
    return version, {one for tensor in out.values() for one in tensor.unique().tolist()}


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TRANSPORT", "tcp")


@pytest.mark.usefixtures("over_tcp")
def test_readers_pull_over_tcp(versioned: Versioned) -> None:
    with Reader(f"tcp://{versioned.address}", timeout=LIMIT) as reader:
        for version in range(3):
            versioned.publish(version)
            assert pulled(reader, reader.version) == (version, {2.0 * (version + 1)})
    while len(versioned.server._readers):
        time.sleep(0.01)


def test_readers_get_the_values_after_worker_0_s_last_push(versioned: Versioned) -> None:
    versioned.publish(3)
    with Reader(versioned.address, timeout=LIMIT) as reader:
        assert pulled(reader) == (3, {2.0})
        waiting = versioned.job.later(lambda: pulled(reader, 3))
        versioned.push()
        versioned.push([0])
        versioned.stores[0].publish(4)
        time.sleep(0.1)
        assert not waiting.done()
        versioned.push([1])
        assert waiting.result(LIMIT) == (4, {6.0})
        versioned.push()
        assert pulled(reader) == (4, {6.0})  # it was not published
        for version in (5, 6, 7):
            versioned.publish(version)
        with Reader(versioned.address, timeout=LIMIT) as late:
            assert pulled(late, newer_than=6) == (7, {14.0})
            assert late.version == 7


def test_a_version_is_whole_though_shards_of_a_key_have_been_joined_since(versioned: Versioned) -> None:
    versioned.publish(0)
    versioned.job.each(versioned.stores, lambda kv: kv.set_optimizer(("adafactor", {"learning_rate": 0.1})))
    versioned.job.each(versioned.stores, lambda kv: kv.init("more", torch.full((3000, 1000), 9.0)))  # in their memory
    with Reader(versioned.address, timeout=LIMIT) as reader:
        assert pulled(reader) == (0, {2.0})


def test_values_that_changed_without_a_push_and_further_tensors_are_published(versioned: Versioned) -> None:
    versioned.publish(0, mean=torch.tensor([0.5], dtype=torch.float64))
    ones = [torch.ones(shape) for shape in SHAPES.values()]
    versioned.job.each(versioned.stores, lambda kv: kv.assign([*SHAPES], ones))
    versioned.stores[0].publish(1, {"mean": torch._neg_view(torch.tensor([-1.5], dtype=torch.float64))})
    with Reader(versioned.address, timeout=LIMIT) as reader:
        out = {**tensors(), "mean": torch.zeros(1, dtype=torch.float64)}
        assert reader.pull(out, newer_than=0) == 1
        assert {one for tensor in out.values() for one in tensor.unique().tolist()} == {1.0, 1.5}
        versioned.stores[0].publish(2)
        some = {"whole": torch.zeros(3, 5).t(), 7: torch.zeros(())}
        assert reader.pull(some, newer_than=1) == 2
        assert torch.equal(some["whole"], torch.ones(5, 3))


def test_a_module_gets_parameters_and_the_buffers_that_were_published() -> None:
    torch.manual_seed(0)
    network, other = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    network(torch.randn(8, 3))
    names, values = zip(*network.named_parameters(), strict=True)
    with Job(1) as job:
        [kv] = job.stores()
        kv.init(list(names), list(values))
        kv.publish(0, dict(network.named_buffers()))
        with Reader(kv.address, timeout=LIMIT) as reader:
            assert reader.pull(other) == 0
        kv.close()
    pairs = zip(network.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(one.requires_grad and one.grad_fn is None for one in other.parameters())


def test_only_values_that_have_changed_are_sent(versioned: Versioned) -> None:
    versioned.publish(0)
    sent = []
    send = versioned.server._readers._send_part
    versioned.server._readers._send_part = lambda reader, read: (sent.append(read.item), send(reader, read))  # type: ignore[method-assign, assignment]
    with Reader(versioned.address, timeout=LIMIT) as reader:
        pulled(reader)
        versioned.stores[0].publish(1)  # of the same rounds
        before = len(sent)
        assert pulled(reader, 0) == (1, {2.0})
    assert before > 4
    assert sent[before:] == [0]
    counters = versioned.server.status()["counters"]
    assert counters["version"] == 1
    assert counters["read_bytes"] > 4 * 3000 * 1000 // 3


WRONG: dict[str, tuple[Callable[[Versioned, Reader], object], type[Exception], str]] = {
    "another rank": (lambda job, _: job.stores[1].publish(9), RuntimeError, "called on worker 1; expected on worker 0"),
    "no int": (lambda job, _: job.stores[0].publish(1.0), TypeError, "version is 1.0; expected an int"),
    "negative": (lambda job, _: job.stores[0].publish(-1), ValueError, "version is -1; expected 0 or more"),
    "not above": (lambda job, _: job.stores[0].publish(5), ValueError, "version 5 was published after version 5"),
    "extra key": (
        lambda job, _: job.stores[0].publish(6, {"whole": torch.ones(1)}),
        ValueError,
        "extra has key 'whole', which the store holds",
    ),
    "extra list": (lambda job, _: job.stores[0].publish(6, {"x": [1]}), TypeError, "extra has 'x': a list"),
    "no tensors": (lambda _, reader: reader.pull([1]), TypeError, "pull() got a list; expected a torch.nn.Module"),
    "no tensor": (lambda _, reader: reader.pull({"whole": 1}), TypeError, "pull() got a int for key 'whole'"),
    "key": (lambda _, reader: reader.pull({"hole": torch.ones(1)}), KeyError, "version 5 has no 'hole'; it has '"),
    "shape": (
        lambda _, reader: reader.pull({"whole": torch.ones(3, 5)}),
        ValueError,
        "the tensor for 'whole' has shape (3, 5) and dtype float32; in version 5 it has shape (5, 3) and dtype",
    ),
    "dtype": (
        lambda _, reader: reader.pull({"whole": torch.ones(5, 3).double()}),
        ValueError,
        "the tensor for 'whole' has shape (5, 3) and dtype float64; in version 5",
    ),
    "newer": (lambda _, reader: reader.pull(tensors(), "5"), ValueError, "newer_than is '5'; expected a version"),
    "large": (lambda _, reader: reader.pull(tensors(), 1 << 70), ValueError, "expected a version, or None"),
    "meta": (lambda _, reader: reader.pull(targets("meta")), ValueError, "is on meta, torch.strided; expected a dense"),
    "sparse": (lambda _, reader: reader.pull(targets("sparse")), ValueError, "torch.sparse_coo; expected a dense"),
    "expanded": (lambda _, reader: reader.pull(targets("expanded")), ValueError, "is expanded; expected a dense"),
    "none newer": (
        lambda _, reader: reader.pull(tensors(), 5, timeout=0.2),
        StallError,
        "pull() has waited 0.2 s for a version after 5 of the job at 127.0.0.1:",
    ),
}


def test_wrong_uses_are_errors_that_change_nothing(versioned: Versioned) -> None:
    versioned.publish(5)
    with Reader(versioned.address, timeout=LIMIT) as reader:
        for call, kind, text in WRONG.values():
            with pytest.raises(kind, match=re.escape(text)):
                call(versioned, reader)
        assert pulled(reader) == (5, {2.0})
    with pytest.raises(RuntimeError, match="this reader is closed"):
        reader.pull(tensors())
    reader.close()


@pytest.mark.parametrize("name", ["local", "device", "dist_async"])
def test_stores_without_rounds_on_servers_publish_nothing(name: str) -> None:
    def check(kv: KVStore, text: str) -> None:
        kv.init("a", torch.ones(2))
        with pytest.raises(RuntimeError, match=text):
            kv.publish(0)

    if name != "dist_async":
        check(gangline.create(name), f"a '{name}' store has no servers that keep version 0 for readers")
        assert gangline.create(name).address == ""
        return
    with Job(1) as job:
        check(job.stores(name)[0], "a 'dist_async' store has no rounds of all workers to publish")


def test_a_push_that_waits_for_update_cannot_be_published() -> None:
    with Job(1) as job:
        [kv] = job.stores()
        kv.init("a", torch.zeros(2))
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "clip_global_norm": 1.0}))
        kv.push("a", torch.tensor([3.0, 4.0]))
        with pytest.raises(RuntimeError, match="call update"):
            kv.publish(0)
        kv.update()
        kv.publish(0)
        out = {"a": torch.zeros(2)}
        with Reader(job.address.removeprefix("tcp://"), timeout=LIMIT) as reader:
            reader.pull(out)
        torch.testing.assert_close(out["a"], torch.tensor([-0.6, -0.8]))


def test_addresses_without_a_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, text in (("127.0.0.1", "expected HOST:PORT"), ("h:0", "expected HOST:PORT"), ("a:1x", "HOST:PORT")):
        with pytest.raises(ValueError, match=text):
            Reader(address)
    with pytest.raises(ValueError, match="DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT name none"):
        Reader()
    with pytest.raises(StallError, match=r"no job answers at 127\.0\.0\.1:1024; expected the address that `gangline"):
        Reader("127.0.0.1:1024", timeout=0.2)
    with pytest.raises(FileNotFoundError, match=r"nothing.*Reader\(key=\) cannot be read"):
        Reader("127.0.0.1:1024", key="nothing")
    monkeypatch.delenv("GANGLINE_JOB_KEY_FILE", raising=False)
    with pytest.raises(RuntimeError, match=r"192.0.2.1 can be reached from other machines.*gangline key new"):
        Reader("192.0.2.1:9", timeout=0.2)


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_the_job_ends_a_pull(failed: bool) -> None:
    with Job(2) as job:
        stores = job.stores()
        job.each(stores, lambda kv: kv.init("a", torch.ones(2)))
        reader = Reader(stores[0].address, timeout=LIMIT)
        out = {"a": torch.zeros(2)}
        if failed:
            waiting = job.later(partial(reader.pull, out))
            stores[1]._scheduler.leave("ended with an error: a bug")
            with pytest.raises(DeadNodeError, match=r"has failed.*worker 1 ended with an error: a bug"):
                waiting.result(LIMIT)
        else:
            stores[0].publish(3)
            stores[0].publish(4)
            job.each(stores, DistStore.close)
            assert reader.pull(out, 3) == 4  # servers wait for a moment
            with pytest.raises(
                EOFError, match=r"the job has ended; its last version is 4 .*waited for a version after 4"
            ):
                reader.pull(out, 4)
        with pytest.raises((EOFError, DeadNodeError)):
            reader.pull(out)
        reader.close()
        with suppress(DeadNodeError):
            job.each(stores, DistStore.close)


# Readers that do not follow the rules, by single messages


def attach(versioned: Versioned, identity: bytes = b"") -> RawClient:
    with RawClient(versioned.job.address) as scheduler:
        answer = scheduler.request(Attach("raw"))
        assert isinstance(answer, Attached)
    client = RawClient(answer.servers[versioned.server._scheduler.rank], identity)
    client.send(Attach("raw"))
    newest = versioned.stores[0]._version
    assert client.request(Want(1, newest, 0)) == Versions(1, [one for one in (newest - 1, newest) if one >= 0])
    return client


def test_parts_of_a_version_that_was_replaced_are_refused(versioned: Versioned) -> None:
    for version in range(3):
        versioned.publish(version)
    with attach(versioned) as reader:
        reader.send(Read(1, 0, 0, 0))
        part, [data] = reader.receive()
        assert part == Part(1, 0, 0, len(data))
        split = next(item for item, one in enumerate(msgpack.unpackb(data), 1) if one[2] == "split")
        reader.send(Read(1, split, PART_BYTES, 1))
        part, [data] = reader.receive()
        assert len(data) == PART_BYTES
        assert torch.frombuffer(bytearray(data), dtype=torch.float32).unique().tolist() == [4.0]
        versioned.publish(3)
        assert reader.request(Want(2, 3, 2)) == Versions(2, [2, 3])
        assert reader.request(Read(1, split, 2 * PART_BYTES, 2)) == Versions(0, [2, 3])
        answer = reader.request(Read(3, 99, 0, 3))
        assert isinstance(answer, Detached)
        assert "asks for byte 0 of item 99, which version 3 lacks" in answer.text
    assert len(versioned.server._readers) == 0


def test_a_reader_that_does_not_receive_is_dropped_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "0.5")
    with Job(2, servers=2) as job, Versioned(job) as versioned:
        versioned.publish(0)
        many, stopped = attach(versioned, b"many"), attach(versioned, b"stopped")
        items = versioned.server._rounds.published.versions[0].items
        largest = max(range(len(items)), key=lambda item: len(items[item]))
        for _ in range(MAX_PARTS):
            stopped.send(Read(0, largest, 0, 0))
        for _ in range(MAX_PARTS + 1):
            many.send(Read(0, largest, 0, 0))
        while len(versioned.server._readers):
            time.sleep(0.01)
        texts = [f"it asks for more than {MAX_PARTS} parts", "it has not received 8 parts of a version within 0.5 s"]
        assert all(any(text in line for line in caplog.messages) for text in texts)
        for client, text in zip((many, stopped), texts, strict=True):
            client.wait_until_closed()
            told = [protocol.unpack(bytes(one[0])) for one in client._received]
            if not isinstance(told[-1], Detached):  # its connection was full
                client.reconnect()
                told = [client.request(Attach("raw"))]
            assert isinstance(told[-1], Detached)
            assert text in told[-1].text
            client.close()
        with Reader(versioned.address, timeout=LIMIT) as reader:
            assert pulled(reader) == (0, {2.0})


def test_a_dropped_reader_attaches_again(versioned: Versioned, caplog: pytest.LogCaptureFixture) -> None:
    versioned.publish(0)
    with Reader(versioned.address, timeout=LIMIT) as reader:
        assert pulled(reader) == (0, {2.0})
        [session] = versioned.server._readers._readers.values()
        versioned.server._readers._drop(session, "a test")
        versioned.publish(1)
        assert pulled(reader, 0) == (1, {4.0})
    assert any("has dropped reader" in line and line.endswith("it attaches again") for line in caplog.messages)


# Processes

TRAIN = """\
import hashlib, os, sys, time, torch, gangline
torch.set_num_threads(1)
from pathlib import Path
folder, steps, publishes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "publishes"
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(32, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3000))
rank, data = int(os.environ["RANK"]), torch.randn(64, 32)
def digest(values):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in values)).hexdigest()
def publish(kv, step, values):
    if rank == 0 and publishes:
        Path(folder / f"{step}.sum").write_text(digest(values))
        kv.publish(step)
    Path(folder / f"step-{rank}.new").write_text(str(step))
    os.replace(folder / f"step-{rank}.new", folder / f"step-{rank}")
    time.sleep(0.03)
if sys.argv[4] == "fit":
    module = gangline.Module(network, torch.nn.CrossEntropyLoss())
    def end_batch(param):
        publish(module.store, 2 * param.epoch + param.nbatch, module.get_params().values())
    module.fit(
        (data, torch.arange(64)), num_epoch=steps // 2, batch_size=32, kvstore="dist_sync", optimizer="adam",
        optimizer_params={"learning_rate": 0.01}, batch_end_callback=end_batch,
    )
    print("weights", digest(module.get_params().values()), flush=True)
    module.close()
    sys.exit()
trainer = gangline.Trainer(network, "adam", {"lr": 0.01}, "dist_sync")
for step in range((trainer.kept() or [0])[0], steps):
    trainer.keep([step])
    own = data[rank::2] * (1 + step / 10)
    trainer.zero_grad()
    trainer.backward(network(own).square().mean(), len(own))
    trainer.step(len(own))
    publish(trainer.kvstore, step, network.parameters())
print("weights", digest(network.parameters()), flush=True)
trainer.kvstore.close()
"""
READ = """\
import hashlib, sys, torch, gangline
torch.set_num_threads(1)
network = torch.nn.Sequential(torch.nn.Linear(32, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3000))
with gangline.Reader(sys.argv[1], timeout=60) as reader:
    try:
        while True:
            version = reader.pull(network, newer_than=reader.version)
            values = b"".join(one.detach().numpy().tobytes() for one in network.parameters())
            print(version, hashlib.sha256(values).hexdigest(), flush=True)
    except EOFError as end:
        print("end", end, flush=True)
"""


HOST = """\
import sys, time, torch, gangline
from pathlib import Path
role, folder = sys.argv[1], Path(sys.argv[2])
if role == "worker":
    kv = gangline.create("dist_sync")
    kv.init("a", torch.arange(300000.0))
    kv.publish(7)
    while not (folder / "read").exists():
        time.sleep(0.01)
    kv.close()
    sys.exit()
for key in ("other", None, "key"):
    try:
        with gangline.Reader(sys.argv[3], key=key and folder / key, timeout=20) as reader:
            out = {"a": torch.zeros(300000)}
            print(reader.pull(out), torch.equal(out["a"], torch.arange(300000.0)))
    except RuntimeError as error:
        print(type(error).__name__, error)
(folder / "read").touch()
"""


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_reader_on_another_host_needs_the_key(tmp_path: Path) -> None:
    write_file(JobKey.new(), tmp_path / "key")
    write_file(JobKey.new(), tmp_path / "other")
    with Hosts(2) as hosts:
        job = {"DMLC_PS_ROOT_URI": hosts.addresses[0], "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "1"}
        job |= {"DMLC_NUM_SERVER": "1", "GANGLINE_JOB_KEY_FILE": str(tmp_path / "key")}
        for role in ("scheduler", "server"):
            command = [sys.executable, "-m", f"gangline.kvstore.parameter_server.{role}"]
            hosts.start(0, command, {**environment(), **job, "DMLC_ROLE": role})
        program = [sys.executable, "-c", HOST]
        worker = hosts.start(0, [*program, "worker", str(tmp_path)], {**environment(), **job, "DMLC_ROLE": "worker"})
        address = f"{hosts.addresses[0]}:9091"
        other, none, key = hosts.run(1, [*program, "reader", str(tmp_path), address], environment()).splitlines()
        assert worker.wait(30) == 0
    assert re.match(r"ProtocolError reader of .*, scheduler: .* does not admit this process's key", other)
    assert re.match(r"RuntimeError address .* can be reached from other machines", none)
    assert key == "7 True"


@pytest.mark.parametrize(
    ("host", "knows_key", "shown"),
    [
        ("127.0.0.1", False, "127.0.0.1:80"),
        ("10.0.0.1", True, "10.0.0.1:80, with the key of GANGLINE_JOB_KEY_FILE"),
        ("fd00::1", False, "[fd00::1]:80; they need a key: set GANGLINE_JOB_KEY_FILE before the job starts"),
    ],
)
def test_the_launcher_prints_the_address(
    host: str, knows_key: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_address({"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "80"}, knows_key=knows_key)
    assert capsys.readouterr() == ("", f"gangline: readers attach at {shown}\n")


class Readers:
    """Reader processes; a context manager."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder = address, folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", READ, self._address]
        with open(self._folder / f"reader-{len(self.running)}", "wb") as out:
            self.running.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment()))
        return self.running[-1]

    def lines(self, number: int) -> list[str]:
        return (self._folder / f"reader-{number}").read_text().splitlines()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.running:
            one.send_signal(signal.SIGCONT)
            one.kill()
            one.wait()


def train(folder: Path, loop: str, steps: int, publishes: bool, kills: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "2", "--restart-processes", str(2 * kills)]
    words += ["--", sys.executable, "-c", TRAIN, str(folder), str(steps), "publishes" if publishes else "alone", loop]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def step_of(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return int((folder / "step-0").read_text())
    return -1


def wait_for(condition: Callable[[], object], job: subprocess.Popen[str]) -> None:
    while not condition():
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)


def weights_of(job: subprocess.Popen[str]) -> set[str]:
    out, errors = job.communicate(timeout=80)
    assert job.returncode == 0, out + errors
    return {line.partition("] ")[2] for line in out.splitlines() if "weights" in line}


@cache
def alone(loop: str, steps: int) -> set[str]:
    """Return the lines of weights of a job without readers and kills."""
    with TemporaryDirectory() as folder:
        return weights_of(train(Path(folder), loop, steps, publishes=False, kills=1))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("loop", ["Trainer", "fit"])
@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
def test_versions_are_whole_whatever_dies_and_change_no_weights(role: str, loop: str, tmp_path: Path) -> None:
    steps, kills = 150, 2
    job = train(tmp_path, loop, steps, publishes=True, kills=kills)
    assert job.stderr is not None
    while not (found := re.search(r"readers attach at (\S+)", job.stderr.readline())):
        assert job.poll() is None
    with Readers(found[1], tmp_path) as readers:
        stopped, killed = readers.start(), readers.start()
        wait_for(lambda: len(readers.lines(0)) > 1 and len(readers.lines(1)) > 1, job)
        first = step_of(tmp_path)
        assert first < steps - 50
        stopped.send_signal(signal.SIGSTOP)
        killed.kill()
        late = readers.start()
        for number in range(kills):
            wait_for(lambda number=number: step_of(tmp_path) >= first + 10 * (number + 1), job)
            running = processes(job.pid)[role]
            os.kill(running[number % len(running)], signal.SIGKILL)
        wait_for(lambda: step_of(tmp_path) >= first + 35, job)
        stopped.send_signal(signal.SIGCONT)
        assert weights_of(job) == alone(loop, steps)
        assert [stopped.wait(30), late.wait(30)] == [0, 0]
        for reader in range(3):
            lines = [line for line in readers.lines(reader) if re.fullmatch(r"\d+ \w{64}", line)]
            versions = [int(line.split()[0]) for line in lines]
            assert versions == sorted(set(versions))
            for line in lines:
                version, digest = line.split()
                assert digest == (tmp_path / f"{version}.sum").read_text(), version
            if reader != 1:
                assert versions[-1] == steps - 1
                assert f"end the job has ended; its last version is {steps - 1} " in readers.lines(reader)[-1]

"""Optimizers on servers: same values and state as a local store with the same sums, for split and whole keys."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gangline import kvstore
from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.server import optimizer_shards
from gangline.kvstore.parameter_server.transport.unix_stream import UnixStream
from tests.kvstore.parameter_server.cases import check
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(110)

SHAPES = {"small": (7, 5), "vector": (700_003,), "matrix": (601, 700), "one": ()}
"""Some keys are split; the matrix also inside rows."""

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "nadam": {"learning_rate": 0.01},
    "adagrad": {"learning_rate": 0.1},
    "adadelta": {"learning_rate": 1.0},
    "rmsprop": {"learning_rate": 0.01, "momentum": 0.5, "centered": True},
    "rprop": {"learning_rate": 0.01},
    "asgd": {"learning_rate": 0.1},
}


def gradient(shape: Sequence[int], rank: int, step: int) -> Tensor:
    """Return whole numbers, whose sums are exact."""
    numel = torch.Size(shape).numel()
    return (((torch.arange(numel) * (2 * step + 3) + 5 * rank) % 31) - 15).float().view(shape)


def first(shape: Sequence[int]) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 13 / 8 - 0.5).view(shape)


class Both:
    """A dist store and a local store that gets the sums of all workers."""

    def __init__(self, kv: KVStore, shapes: dict[str, tuple[int, ...]], spec: Any) -> None:
        self.kv = kv
        self.local = kvstore.create("local")
        self.shapes = shapes
        self.steps = 0
        for store in (kv, self.local):
            missing = [key for key in shapes if key not in store]
            store.init(missing, [first(shapes[key]) for key in missing])
        for key, shape in shapes.items():
            kv.assign(key, first(shape))
        for store in (kv, self.local):
            store.set_optimizer(spec)

    def step(self) -> None:
        self.steps += 1
        keys, ranks = list(self.shapes), range(self.kv.num_workers)
        self.kv.push(keys, [gradient(shape, self.kv.rank, self.steps) for shape in self.shapes.values()])
        of_ranks = [[gradient(shape, rank, self.steps) for rank in ranks] for shape in self.shapes.values()]
        self.local.push(keys, of_ranks)

    def agree(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        for key, shape in self.shapes.items():
            got, expected = torch.empty(shape), torch.empty(shape)
            self.kv.pull(key, got)
            self.local.pull(key, expected)
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)

    def states_agree(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        got, expected = self.kv.optimizer_state(), self.local.optimizer_state()
        assert got.header() == expected.header()
        torch.testing.assert_close(dict(got.tensors), dict(expected.tensors), rtol=rtol, atol=atol)


def elementwise_optimizers(kv: KVStore) -> None:
    for name, arguments in ELEMENTWISE.items():
        both = Both(kv, SHAPES, (name, arguments))
        for _ in range(3):
            both.step()
        both.agree()
        both.states_agree()


def states_come_back(kv: KVStore) -> None:
    """A saved state, loaded from rank 0's file, continues as before."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "states")
        for spec in (("sgd", {"learning_rate": 0.1, "momentum": 0.9}), ("adam", {"learning_rate": 0.01})):
            both = Both(kv, SHAPES, spec)
            for _ in range(2):
                both.step()
            kv.save_optimizer_states(path)
            saved = {key: torch.empty(shape) for key, shape in SHAPES.items()}
            kv.pull(list(saved), list(saved.values()))
            for _ in range(2):  # undone by loading below
                kv.push(list(SHAPES), [gradient(shape, 0, 9) for shape in SHAPES.values()])
            for key, value in saved.items():
                kv.assign(key, value)
            kv.load_optimizer_states(path if kv.rank == 0 else "/there/is/no/such/file")
            both.step()
            both.agree()
            both.states_agree()
            both.local.save_optimizer_states(path)  # files of local stores are compatible
            kv.load_optimizer_states(path)
            both.step()
            both.agree()
    with pytest.raises((FileNotFoundError, MismatchError), match="/nowhere/at/all is not there"):
        kv.load_optimizer_states("/nowhere/at/all")


def wrong_states_are_refused_alike(kv: KVStore) -> list[str]:
    both = Both(kv, SHAPES, ("sgd", {"learning_rate": 0.5, "momentum": 0.5}))
    both.step()
    texts = []
    with tempfile.TemporaryDirectory() as name:
        folder = kv.exchange(name.encode())[0].decode()  # rank 0's file is read
        path = Path(name, "states")
        for key, shape, spec, is_torn in (
            ("small", (7, 5), ("adam", {"learning_rate": 0.5}), False),
            ("stranger", (3,), ("sgd", {"momentum": 0.5}), False),
            ("small", (5, 7), ("sgd", {"momentum": 0.5}), False),
            ("small", (7, 5), ("sgd", {"momentum": 0.5}), True),
        ):
            store = kvstore.create("local")
            store.init(key, torch.zeros(shape))
            store.set_optimizer(spec)
            store.push(key, torch.ones(shape))
            store.save_optimizer_states(path)
            if is_torn:
                path.write_bytes(path.read_bytes()[:-7])
            with pytest.raises(ValueError, match=r".") as raised:
                kv.load_optimizer_states(path)
            texts.append(str(raised.value).replace(folder, ""))
    both.step()  # as if nothing had been asked for
    both.agree(0, 0)
    return texts


def refused_arguments(kv: KVStore) -> list[str]:
    texts = []
    for spec in (("sdg", {}), ("sgd", {"momentun": 1}), ("lbfgs", {})):
        with pytest.raises(ValueError, match="optimizer") as raised:
            kv.set_optimizer(spec)
        texts.append(str(raised.value))
    with pytest.raises(ValueError, match="servers run no others"):
        kv.set_optimizer(OwnOptimizer)
    return texts


class OwnOptimizer(torch.optim.SGD):
    """Class that servers do not run."""


@pytest.mark.slow
def test_elementwise_optimizers_on_keys_that_are_cut() -> None:
    check("dist_sync", 2, 2, [refused_arguments, elementwise_optimizers])


@pytest.mark.slow
def test_states_are_saved_and_loaded() -> None:
    check("dist_sync", 2, 2, [states_come_back, wrong_states_are_refused_alike])


@pytest.mark.slow
def test_states_are_saved_and_loaded_over_collectives() -> None:
    check("allreduce", 2, 0, [states_come_back])


def adafactor(kv: KVStore) -> None:
    both = Both(kv, SHAPES, ("sgd", {"learning_rate": 0.5}))  # split at first
    both.step()
    both = Both(kv, SHAPES, ("adafactor", {"learning_rate": 0.01}))
    for _ in range(3):
        both.step()
        both.agree()
    both.states_agree()
    kv.init("late", torch.zeros(700_000))
    kv.push("late", torch.ones(700_000))
    kv.pull("late", torch.empty(700_000))


def muon(kv: KVStore) -> None:
    both = Both(kv, {"matrix": (601, 700), "small": (7, 5)}, ("muon", {"learning_rate": 0.01}))
    for _ in range(2):
        both.step()
    both.agree(1e-2, 1e-3)  # it iterates in bfloat16
    both.states_agree()


def muon_refuses_vectors(kv: KVStore) -> str:
    kv.init("vector", torch.zeros(9))
    with pytest.raises(ValueError, match="'vector'") as raised:
        kv.set_optimizer(("muon", {}))
    return str(raised.value)


@pytest.mark.slow
def test_optimizers_of_whole_tensors() -> None:
    check("dist_sync", 2, 2, [adafactor])
    check("dist_sync", 2, 2, [muon, muon_refuses_vectors])


def test_a_state_beyond_the_limit_of_a_message_is_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_SHARD", 18 << 20)
    monkeypatch.setattr(UnixStream.__init__, "__defaults__", (None, 18 << 20))
    monkeypatch.setattr(optimizer_shards, "_PART_BYTES", 1 << 20)
    with Job(1) as job, job.stores(timeout=20)[0] as kv:
        both = Both(kv, {"large": (5 << 20,), **SHAPES}, ("adam", {"learning_rate": 0.01}))
        both.step()
        both.states_agree()
        kv.push("small", first(SHAPES["small"]))
        kv.load_optimizer_state(both.local.optimizer_state())
        both.states_agree()
        with pytest.raises(ValueError, match="'large' has 20971520 bytes in one shard; a message holds 18874368"):
            kv.set_optimizer(("adafactor", {"learning_rate": 0.01}))  # keeps keys whole


def test_a_state_of_a_shard_beyond_the_limit_of_a_message_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_shards, "MAX_SHARD", 1 << 20)
    with Job(1) as job, job.stores()[0] as kv:
        Both(kv, {"matrix": (601, 700)}, ("muon", {"learning_rate": 0.01})).step()
        text = "the optimizer state of key 'matrix' has 1682800 bytes in one shard; a message holds 1048576"
        with pytest.raises(ValueError, match=text):
            kv.optimizer_state()

"""Tests of the stores of one process: values, keys, devices, updaters, asynchronous calls, create and register."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from importlib import import_module
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Communicator, Work
from gangline.kvstore import KVStore, Trainer, create, register
from gangline.kvstore import registry as stores
from gangline.kvstore.buckets import plan
from gangline.kvstore.default_store import default_store, job_store
from gangline.kvstore.local import LocalStore
from gangline.kvstore.parameter_server.store import DistStore
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import Event, on_simulated_gpu, simulated_gpus
from tests.kvstore.keyed import LIMIT, ranked

NAMES = ["local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device"]


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(shape, 99).to(dtype)
    kv.pull(key, out)
    return out


# -- init, push, pull -------------------------------------------------------------------------------------------------


def test_the_sum_is_added_in_the_order_of_the_devices(kv: KVStore) -> None:
    values = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    kv.init("w", torch.zeros(1))
    kv.push("w", values)
    assert pulled(kv, "w", (1,)).item() == 1.0
    kv.push("w", [values[index] for index in (0, 2, 1, 3)])
    assert pulled(kv, "w", (1,)).item() == 2.0


def test_no_keys_are_nothing_to_do(kv: KVStore) -> None:
    kv.init("w", ranked(1))
    kv.init([], [])
    kv.push([], [])
    kv.pull([], [])
    kv.pushpull([], [])
    assert torch.equal(pulled(kv, "w"), ranked(1))


def test_any_str_or_int_is_a_key(kv: KVStore) -> None:
    keys = ["", "a.b/c", "ключ", 0, -1, 2**70]
    kv.init(keys, [ranked(index) for index in range(len(keys))])
    for index, key in enumerate(keys):
        assert torch.equal(pulled(kv, key), ranked(index))


# -- async ------------------------------------------------------------------------------------------------------------


class Gate:
    """Updater that blocks at the key "gate" until it is opened, and records the order of the other keys."""

    def __init__(self, kv: KVStore) -> None:
        self.order: list[Any] = []
        self._reached, self._opened = threading.Event(), threading.Event()
        kv.init("gate", torch.zeros(1))
        kv.set_updater(self._update)
        self.work = kv.push("gate", torch.zeros(1), async_op=True)
        assert self._reached.wait(LIMIT)

    def open(self) -> None:
        self._opened.set()

    def _update(self, key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "gate":
            self._reached.set()
            assert self._opened.wait(LIMIT)
        else:
            self.order.append(key)
            stored.copy_(summed)


def test_async_pushes_are_running_until_they_are_done_higher_priorities_first(kv: KVStore) -> None:
    priorities = {"a": 0, "b": 3, "c": -2, "d": 3, "e": 7}
    kv.init(list(priorities), [torch.zeros(2, 3)] * 5)
    gate = Gate(kv)
    works = [kv.push(key, ranked(1), priority=priority, async_op=True) for key, priority in priorities.items()]
    assert not any(work.is_completed() or work.exception() for work in [gate.work, *works])
    with pytest.raises(TimeoutError, match="push of key 'a' is still running"):
        works[0].wait(0)
    gate.open()
    for work in works:
        work.wait(LIMIT)
        assert work.is_completed()
    assert gate.order == ["e", "b", "d", "a", "c"]


def test_an_error_of_the_updater_reaches_the_caller_and_the_store_stays_usable(
    kv: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    error = ArithmeticError("no update today")

    def updater(key: Any, summed: torch.Tensor, stored: torch.Tensor) -> None:
        if key == "bad":
            raise error
        stored.add_(summed)

    kv.init(["w", "bad"], [torch.zeros(2, 3)] * 2)
    kv.set_updater(updater)
    with pytest.raises(ArithmeticError, match="no update today"):
        kv.push("bad", ranked(1))
    assert not caplog.records
    kv.push("bad", ranked(1), async_op=True)  # nobody waits for it
    assert torch.equal(pulled(kv, "bad"), torch.zeros(2, 3))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gangline", logging.ERROR)
    assert "push of key 'bad'" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    work = kv.push("bad", ranked(1), async_op=True)
    with pytest.raises(ArithmeticError, match="no update today"):
        work.wait(LIMIT)
    assert work.exception() is error
    kv.push("w", ranked(1))
    kv.push("w", ranked(2), async_op=True).wait(LIMIT)
    assert torch.equal(pulled(kv, "w"), ranked(1) + ranked(2))
    assert torch.equal(pulled(kv, "bad"), torch.zeros(2, 3))


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_with_section_closes_the_store_whatever_happens(name: str) -> None:
    with create(name) as kv, create() as default:
        assert (kv.type, default.type) == (name, "local")
        kv.init("w", ranked(1))
    with pytest.raises(RuntimeError, match=f"the '{name}' store is closed"):
        kv.push("w", ranked(1))
    kv.close()  # again: it does nothing
    with pytest.raises(ZeroDivisionError, match="inside"), create(name) as other:
        raise ZeroDivisionError("inside")
    with pytest.raises(RuntimeError, match="closed"):
        other.init("w", ranked(1))


def test_a_store_of_one_process_is_a_job_of_one_worker(kv: KVStore) -> None:
    assert (kv.rank, kv.num_workers) == (0, 1)
    assert kv.dead_nodes() == []
    assert kv.num_dead_nodes() == kv.num_dead_nodes(timeout=0.5) == 0
    kv.barrier()


# -- create and register ----------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate the registry for one test."""
    monkeypatch.setattr(stores, "_registered", dict(stores._registered))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Local",
        "dist_",
        "loca",
        "local ",
        "no_such_store",
        "dist_sync_async",
        "dist_sync_sync",
        "dist_sync_p3",
        "sync",
    ],
)
def test_an_unknown_name_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match=f"no store named {name!r}") as caught:
        create(name)
    assert all(repr(known) in str(caught.value) for known in NAMES)


def test_a_name_that_is_no_str_and_an_unknown_option_are_refused() -> None:
    for wrong in (None, 3, True, ["local"], LocalStore):
        with pytest.raises(TypeError, match=f"{re.escape(repr(wrong))}.*expected a str"):
            create(wrong)  # type: ignore[arg-type]
    for name in NAMES:
        with pytest.raises(TypeError, match="colour"):
            create(name, colour="red")


def test_a_third_partys_store_is_made_by_each_of_its_names(registry: None) -> None:
    @register("doubling", "twofold")
    class Doubling(LocalStore):
        """Third-party store that pushes multiples of its values; has an option."""

        def __init__(self, name: str, factor: int = 2) -> None:
            super().__init__(name)
            self.factor = factor

        def _push(self, pairs: Any, priority: int, async_op: bool) -> Work:
            return super()._push([(k, [v * self.factor for v in values]) for k, values in pairs], priority, async_op)

    for name in ("doubling", "twofold"):
        with create(name) as kv:
            assert type(kv) is Doubling
            assert kv.type == name
            kv.init("w", torch.zeros(2, 3))
            kv.push("w", [ranked(0), ranked(1)])
            assert torch.equal(pulled(kv, "w"), (ranked(0) + ranked(1)) * 2)
    with create("doubling", factor=5) as kv:
        kv.init("w", torch.zeros(2, 3))
        kv.push("w", ranked(1))
        assert torch.equal(pulled(kv, "w"), ranked(1) * 5)
    with pytest.raises(ValueError, match="'twofold'"):
        create("no_such_store")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_taken_is_refused_and_its_store_stays(registry: None, name: str) -> None:
    with pytest.raises(ValueError, match=f"a store named '{name}' is registered already: (Local|Device)Store"):
        register("quite_new", name)
    with pytest.raises(ValueError, match="no store named 'quite_new'"):
        create("quite_new")
    with create(name) as kv:
        assert type(kv).__name__ in ("LocalStore", "DeviceStore")


def test_register_refuses_invalid_names_and_stores(registry: None) -> None:
    with pytest.raises(ValueError, match="got no name"):
        register()
    with pytest.raises(TypeError, match="a store's name is 3; expected a str"):
        register(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no subclass of KVStore"):
        register("an_int")(int)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="no subclass of KVStore"):
        register("a_function")(lambda name: None)  # type: ignore[type-var]
    for name in ("an_int", "a_function"):
        with pytest.raises(ValueError, match=f"no store named '{name}'"):
            create(name)


@pytest.mark.slow
def test_a_store_is_imported_when_it_is_created() -> None:
    code = (
        "import sys\n"
        "from gangline.kvstore.registry import IN_PROCESS, create\n"
        "for name in IN_PROCESS:\n"
        "    create(name).close()\n"
        "print([name for name in sys.modules if name.startswith('gangline.kvstore.parameter_server')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_built_in_name_has_a_store() -> None:
    for place in stores._BUILT_IN.values():
        module, _, name = place.partition(":")
        assert issubclass(getattr(import_module(f"gangline.kvstore.{module}"), name), KVStore)


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_host_waits_once_for_each_gpu_in_a_push_to_the_local_store_and_never_in_a_pull(
    is_fused: bool, memory_format: torch.memory_format
) -> None:
    keys, like = list(range(3)), torch.ones(2, 3, 4, 5).to(memory_format=memory_format)
    with simulated_gpus(), create("local") as kv:
        tensors = [(key, torch.zeros_like(like)) for key in keys]
        (bucket,) = plan(tensors, 1 << 20)
        kv.init(keys, [tensor for _, tensor in tensors])
        if is_fused:
            kv.fuse(bucket)

        def push(value: float) -> None:
            kv.push(keys, [[on_simulated_gpu(like * (value + key), card) for card in range(2)] for key in keys])

        push(1.0)
        assert Event.waits == 2
        outs = [[on_simulated_gpu(torch.zeros_like(like), card) for card in range(2)] for _ in keys]
        kv.pull(keys, outs)
        flat = on_simulated_gpu(torch.zeros(bucket.numel))
        kv.pull_bucket(bucket, [flat])
        assert Event.waits == 2
        push(5.0)  # the GPUs have not read the pulled values yet
        for key, of_key in zip(keys, outs, strict=True):
            assert all(out.host().equal(like * 2 * (1 + key)) for out in of_key)
        assert bucket.views(flat.host())[2].equal(like * 6)


# -- names of MXNet and its calls, and the store chosen for the job in the environment --------------------------------


WORDS = [("dist", *others) for others in (("sync",), ("async",), ("device",), ("sync", "device"), ("async", "device"))]


@pytest.mark.parametrize("words", WORDS)
def test_the_words_of_a_store_may_have_any_order(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(DistStore, "__init__", lambda _, name: made.append(name))
    names = ["_".join(order) for order in permutations(words)]
    for name in names:
        store = create(name)
        store.type = name
        assert store.is_async == ("async" in words)
    assert made == names


def test_mxnets_calls_of_a_store() -> None:
    with create("local") as kv:
        kv.init("w", torch.zeros(2))
        kv._set_updater(lambda key, summed, stored: stored.sub_(summed))
        kv.push("w", torch.ones(2))
        kv._barrier()
        kv.pull("w", out := torch.empty(2), 0, False)
        assert out.tolist() == [-1, -1]
        kv.pull("w", out, ignore_sparse=True)


def test_gluons_loop_of_one_worker() -> None:
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    trainer = Trainer([weight, other], "sgd", {"learning_rate": 1.0}, "local", {"type": "fp16"}, False)
    assert trainer.kvstore.compresses
    (weight.sum() + other.sum()).backward()  # type: ignore[no-untyped-call]
    trainer.allreduce_grads()
    weight.grad.clamp_(max=0.5)  # type: ignore[union-attr]
    trainer.update(1, ignore_stale_grad=True)
    assert (weight.tolist(), other.tolist()) == ([-0.5, -0.5], [-1, -1])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    trainer.step(1, ignore_stale_grad=True)  # that of ``other`` is the last step's
    assert (weight.tolist(), other.tolist()) == ([-2, -2], [-1, -1])


def gluons_arguments(comm: Communicator) -> list[str]:
    found = []
    with create("allreduce", communicator=comm) as kv:
        weight = nn.Parameter(torch.zeros(2))
        for update_on_kvstore in (False, True):
            try:
                trainer = Trainer([weight], "sgd", {}, kv, update_on_kvstore=update_on_kvstore)
            except ValueError as error:
                found.append(str(error))
        calls: list[Any] = [trainer.allreduce_grads, lambda: trainer.update(1)]
        for call in calls:
            with pytest.raises(RuntimeError) as caught:
                call()
            found.append(str(caught.value))
    return found


def test_what_needs_gradients_on_the_workers_names_the_replacement() -> None:
    for found in in_threads(2, gluons_arguments):
        assert [text.partition(" the store updates")[0] for text in found] == [
            "update_on_kvstore is False, but",
            "allreduce_grads() is for one worker:",
            "update() is for one worker:",
        ]
        assert all("gangline.DistributedOptimizer" in text and "clip_global_norm" in text for text in found)


# The store of a job


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ROLE = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9000", "DMLC_NUM_WORKER": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1"}


@pytest.mark.parametrize(
    ("environment", "store"),
    [
        ({}, "device"),
        (PLACE, "allreduce"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"} | PLACE, "allreduce"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "2"}, "dist_sync"),
        (ROLE | PLACE | {"DMLC_NUM_SERVER": "0"}, "allreduce"),
        (PLACE | {"WORLD_SIZE": "1"}, "device"),
        (ROLE | {"DMLC_NUM_SERVER": "1"}, "dist_sync"),
        (ROLE | {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}, "device"),
        (ROLE | {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1", "DMLC_ROLE": "server"}, "dist_sync"),
        (ROLE | {"DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1", "GANGLINE_ELASTIC": "1:4"}, "dist_sync"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "5000"}, "allreduce"),
        (SLURM | {"SLURM_STEP_ID": "0"}, "allreduce"),
        (SLURM, "device"),  # in the job's batch script
        (SLURM | PLACE, "allreduce"),  # torchrun in it
    ],
)
def test_processes_of_one_job_are_joined_by_default(environment: dict[str, str], store: str) -> None:
    assert default_store(environment) == store
    assert store == "device" or job_store(environment) == store


def test_without_a_job_the_error_says_how_to_start_one() -> None:
    with pytest.raises(RuntimeError, match="there is none in the environment; start the program with `gangline launch"):
        job_store({})


def test_an_invalid_rank_is_named() -> None:
    with pytest.raises(ValueError, match="RANK"):
        job_store(PLACE | {"RANK": "five"})

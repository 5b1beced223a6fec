"""Contexts, and the words that name them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from gangline import Context, contexts, cpu, gpu
from gangline.collectives.environments import local_rank
from gangline.kvstore.context import use_own_gpu


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_a_context_is_a_frozen_value_that_prints_as_it_is_written() -> None:
    for make, kind in ((cpu, "cpu"), (gpu, "gpu")):
        assert make() == make(0) == Context(kind, 0)
        assert (make(2).device_type, make(2).device_id) == (kind, 2)
        assert str(make(2)) == repr(make(2)) == f"{make(2)}" == f"{kind}(2)"
    assert [cpu(index).torch_device for index in (0, 7)] == [torch.device("cpu")] * 2
    assert [gpu(index).torch_device for index in (0, 3)] == [torch.device("cuda", 0), torch.device("cuda", 3)]
    assert {cpu(0), cpu(1), gpu(0), gpu(1), cpu(0), gpu(1)} == {gpu(1), gpu(0), cpu(1), cpu(0)}
    assert len({cpu(0), cpu(1), gpu(0), gpu(1)}) == 4
    with pytest.raises(FrozenInstanceError):
        cpu(1).device_id = 2


@pytest.mark.parametrize(
    ("kind", "number", "error", "text"),
    [
        *(("cpu", number, TypeError, f"device_id is {number!r}; expected an int") for number in (True, 1.0, "1", None)),
        ("gpu", -1, ValueError, "device_id is -1; expected 0 or more"),
        *((kind, 0, ValueError, f"device_type is {kind!r}; expected 'cpu' or 'gpu'") for kind in ("CPU", "cuda", None)),
    ],
)
def test_a_context_of_no_device_is_refused(kind: Any, number: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        {"cpu": cpu, "gpu": gpu}.get(kind, lambda index: Context(kind, index))(number)


# The words of contexts()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu", [cpu(0)]),
        ("cpu(12), cpu(1) ,cpu(12)", [cpu(12), cpu(1), cpu(12)]),
        ("cpu(5),0,gpu(1)", [cpu(5), gpu(0), gpu(1)]),
        ("auto", [gpu(0)]),
        ("multi-gpu", [gpu(0), gpu(1)]),
        ("cuda:0,cuda:1", [gpu(0), gpu(1)]),
        (torch.device("cpu"), [cpu(0)]),
        (torch.device("cuda:1"), [gpu(1)]),
        (cpu(4), [cpu(4)]),
        ([cpu(1), cpu(0), cpu(1)], [cpu(1), cpu(0), cpu(1)]),
        (["cuda:0", "cpu", torch.device("cuda", 1), cpu(1)], [gpu(0), cpu(0), gpu(1), cpu(1)]),
        (("gpu(0)", "1"), [gpu(0), gpu(1)]),
    ],
    ids=repr,
)
def test_words_and_devices_name_contexts_in_their_order(spec: Any, expected: list[Context]) -> None:
    found = contexts(spec)
    assert found == expected
    found.append(cpu(9))  # a new list
    assert contexts(spec) == expected


def test_auto_is_the_host_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", "1")  # of a worker in a job
    assert contexts("auto") == contexts() == contexts("parallel") == [cpu(0)]
    with pytest.raises(ValueError, match=r"'multi-gpu'.*no GPU"):
        contexts("multi-gpu")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "5"}, 1),  # of four GPUs
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, 1),  # torchrun in a step of Slurm
        ({"SLURM_LOCALID": "2", "SLURM_PROCID": "6", "SLURM_STEP_ID": "0"}, 2),
        ({"LOCAL_RANK": ""}, 0),
        ({}, 0),
    ],
)
def test_the_rank_on_the_host_selects_the_gpu(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for words in ("auto", "gpu", "parallel", "cuda", torch.device("cuda")):
        assert contexts(words) == [gpu(expected)]
    assert contexts("gpu(0)") == contexts("0") == contexts("cuda:0") == [gpu(0)]


def test_a_rank_on_the_host_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_LOCALID is 'one'; expected a whole number, at least 0"):
        local_rank({"SLURM_LOCALID": "one", "SLURM_PROCID": "6", "SLURM_STEP_ID": "0"})


HERE = "not on this machine; the GPUs here: gpu(0), gpu(1)"
CULPRITS = {"": "", ",cpu(0)": "", "cpu(0),cuda:x": "cuda:x", "cpu(0),auto": "auto"}
CULPRITS |= {words: words for words in ("tpu(0)", "-1", "cpu(0) cpu(1)", "1.5", "CPU(0)")}
OTHER_TYPES = (3, None, [0], ["cpu(0),cpu(1)"], [[cpu(0)]], {cpu(0)})


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("spec", "error", "texts"),
    [
        ("cpu(0), 2", ValueError, [f"gpu(2) is {HERE}"]),
        ([gpu(2)], ValueError, [f"gpu(2) is {HERE}"]),
        ("4,cpu(0),gpu(2)", ValueError, [f"gpu(4), gpu(2) are {HERE}"]),
        ([], ValueError, ["context is empty; expected at least one"]),
        *((spec, TypeError, [repr(spec), "expected a Context"]) for spec in OTHER_TYPES),
        *(
            (words, ValueError, [f"{words!r}, of which {culprit!r} names no device", "'cpu(0),cpu(1)'"])
            for words, culprit in CULPRITS.items()
        ),
    ],
    ids=repr,
)
def test_what_names_no_device_of_this_machine_is_refused(spec: Any, error: type[Exception], texts: list[str]) -> None:
    with pytest.raises(error) as caught:
        contexts(spec)
    assert all(text in str(caught.value) for text in texts), caught.value


@pytest.mark.parametrize(
    ("given", "chosen"),
    [([gpu(1), gpu(2)], [1]), ([gpu(2), gpu(0)], []), ([gpu(1), cpu(0)], []), ([cpu(0)], [])],
    ids=str,
)
def test_gpus_of_a_process_become_its_current_ones(
    monkeypatch: pytest.MonkeyPatch, given: list[Context], chosen: list[int]
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    use_own_gpu(given)
    assert found == chosen

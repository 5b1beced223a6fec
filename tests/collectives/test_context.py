"""Contexts, and the words that name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from gangline import Context, contexts, cpu, gpu, num_gpus
from gangline.collectives.environments import local_rank

ABSENT = num_gpus()
"""Number of the first GPU that the machine lacks."""


# -- Context ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "kind"), [(cpu, "cpu"), (gpu, "gpu")])
def test_a_context_knows_its_type_and_number_and_prints_as_it_is_written(
    make: Callable[..., Context], kind: str
) -> None:
    assert (make().device_type, make().device_id) == (kind, 0)
    assert (make(2).device_type, make(2).device_id) == (kind, 2)
    assert make(2) == Context(kind, 2)
    assert str(make(2)) == repr(make(2)) == f"{kind}(2)"
    assert f"{make()}" == f"{kind}(0)"


def test_every_cpu_is_the_host_and_a_gpu_is_torchs_of_the_same_number() -> None:
    assert [cpu(index).torch_device for index in (0, 1, 7)] == [torch.device("cpu")] * 3
    assert [gpu(index).torch_device for index in (0, 3)] == [torch.device("cuda", 0), torch.device("cuda", 3)]


def test_equal_contexts_are_one_key_and_distinct_ones_are_several() -> None:
    assert hash(cpu(1)) == hash(Context("cpu", 1))
    assert {cpu(0), cpu(1), gpu(0), gpu(1), cpu(0), gpu(1)} == {gpu(1), gpu(0), cpu(1), cpu(0)}
    assert len({cpu(0): 0, cpu(1): 1, gpu(0): 2, gpu(1): 3}) == 4
    assert cpu(0) != cpu(1)
    assert cpu(0) != gpu(0)


def test_a_context_is_frozen() -> None:
    context = cpu(1)
    with pytest.raises(FrozenInstanceError):
        context.device_id = 2  # type: ignore[misc]
    assert context == cpu(1)


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


# -- the words of contexts() ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cpu", [cpu(0)]),
        ("cpu(12), cpu(1) ,cpu(12)", [cpu(12), cpu(1), cpu(12)]),
    ],
)
def test_words_name_contexts_in_their_order(words: str, expected: list[Context]) -> None:
    assert contexts(words) == expected


def test_contexts_are_a_new_list() -> None:
    given = [cpu(1), cpu(0), cpu(1)]
    found = contexts(given)
    found.append(cpu(9))
    assert given == [cpu(1), cpu(0), cpu(1)]
    assert contexts((cpu(2), cpu(1))) == [cpu(2), cpu(1)]
    assert contexts(cpu(4)) == [cpu(4)]


def test_auto_is_the_first_gpu_or_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert contexts("auto") == contexts() == ([gpu(0)] if num_gpus() else [cpu(0)])
    for rank in range(3):  # of a worker in a job
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert contexts("auto") == ([gpu(rank % num_gpus())] if num_gpus() else [cpu(0)])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_RANK": "5"}, 2),
        ({"MPI_LOCALRANKID": "1", "PMI_RANK": "5"}, 1),
        ({"SLURM_LOCALID": "2", "SLURM_PROCID": "6", "SLURM_STEP_ID": "0"}, 2),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, 1),  # torchrun in a step of Slurm
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


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (torch.device("cpu"), [cpu(0)]),
        ("cuda:1", [gpu(1)]),
        ("cuda:0,cuda:1", [gpu(0), gpu(1)]),
        (torch.device("cuda:1"), [gpu(1)]),
        (["cpu", "cpu"], [cpu(0), cpu(0)]),
        (["cuda:0", "cpu"], [gpu(0), cpu(0)]),
        ([torch.device("cuda", 1), cpu(1)], [gpu(1), cpu(1)]),
        (("gpu(0)", "1"), [gpu(0), gpu(1)]),
    ],
    ids=repr,
)
def test_devices_as_torch_names_them(spec: Any, expected: list[Context], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert contexts(spec) == expected


def test_numbers_and_words_name_the_existing_gpus() -> None:
    there = [gpu(index) for index in range(num_gpus())]
    for words in (",".join(str(one.device_id) for one in there), ",".join(str(one) for one in there)):
        assert contexts(f"cpu(5),{words}".rstrip(",")) == [cpu(5), *there]


def test_multi_gpu_is_every_gpu_and_an_error_without_one() -> None:
    if num_gpus():
        assert contexts("multi-gpu") == [gpu(index) for index in range(num_gpus())]
    else:
        with pytest.raises(ValueError, match=r"'multi-gpu'.*no GPU"):
            contexts("multi-gpu")


@pytest.mark.parametrize(
    "spec",
    [f"cpu(0), {ABSENT}", f"cpu(0),gpu({ABSENT}),cpu(1)", gpu(ABSENT), [gpu(ABSENT)]],
    ids=str,
)
def test_a_missing_gpu_is_an_error_that_lists_existing_ones(spec: Any) -> None:
    there = ", ".join(f"gpu({index})" for index in range(ABSENT)) or "none"
    with pytest.raises(ValueError, match="gpu") as caught:
        contexts(spec)
    assert f"gpu({ABSENT}) is not on this machine" in str(caught.value)
    assert str(caught.value).endswith(f": {there}")
    assert "cpu(0)" not in str(caught.value)


def test_every_missing_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="not on this machine") as caught:
        contexts(f"{ABSENT + 2},cpu(0),gpu({ABSENT})")
    assert str(caught.value).startswith(f"gpu({ABSENT + 2}), gpu({ABSENT}) are")


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("", ""),
        ("tpu(0)", "tpu(0)"),
        ("cpu(0),cuda:x", "cuda:x"),
        (",cpu(0)", ""),
        ("-1", "-1"),
        ("cpu(0) cpu(1)", "cpu(0) cpu(1)"),
        ("cpu()", "cpu()"),
        ("1.5", "1.5"),
        ("CPU(0)", "CPU(0)"),
        ("cpu(0),auto", "auto"),
        ("cpu(0)x", "cpu(0)x"),
    ],
)
def test_words_that_name_no_device_are_refused(words: str, culprit: str) -> None:
    with pytest.raises(ValueError, match="names no device") as caught:
        contexts(words)
    assert f"{words!r}, of which {culprit!r} names no device" in str(caught.value)
    assert "'cpu(0),cpu(1)'" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        *((spec, ValueError, "context is empty; expected at least one") for spec in ([], ())),
        *((spec, TypeError, repr(spec)) for spec in (3, None, [0], ["cpu(0),cpu(1)"], [[cpu(0)]], {cpu(0)})),
    ],
    ids=repr,
)
def test_empty_lists_and_other_types_are_refused(spec: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"expected (at least one|a Context)") as caught:
        contexts(spec)
    assert text in str(caught.value)

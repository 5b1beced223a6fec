"""Process groups whose members change in place: `torch.distributed._reconfigure`, which torch has since 2.14."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from gangline.collectives.errors import DeadNodeError, GanglineError
from gangline.collectives.torch_backend import GanglineProcessGroup
from tests.collectives.processes import Processes, Rank, run_until_one_fails

pytestmark = pytest.mark.skipif(
    not hasattr(ProcessGroup, "reconfigure"), reason=f"torch {torch.__version__} cannot reconfigure; expected 2.14"
)
c10d: Any = dist  # the stubs of torch 2.13 lack its functions for this

NEWCOMER = 3
"""Process that joins after the others have worked."""
CASES: dict[str, Callable[[Member], None]] = {}


class Member:
    """One process, which keeps one group object under all ranks that it gets."""

    def __init__(self, number: int, path: str) -> None:
        self.number, self.path = number, path
        self.texts = dist.FileStore(f"{path}.texts", -1)
        self.texts.set_timeout(timedelta(seconds=40))  # of a process whose case fails, the others do not hear

    def join(self, world_size: int) -> None:
        c10d.init_process_group(
            "gangline",
            store=dist.FileStore(self.path, -1),
            rank=self.number,
            world_size=world_size,
            timeout=timedelta(seconds=40),
            enable_reconfigure=True,
        )
        self.group = dist.group.WORLD
        assert isinstance(self.group, GanglineProcessGroup)
        assert c10d._supports_reconfigure()

    def handles(self, numbers: Sequence[int], place: str = "", group: Any = None) -> list[str]:
        """Return the handles of processes, maybe of an earlier time at the same place."""
        self.texts.set(f"{place}{self.number}", c10d._get_reconfigure_handle(group))
        return [self.texts.get(f"{place}{number}").decode() for number in numbers]

    def meet(self, place: str, numbers: Sequence[int]) -> None:
        self.texts.set(f"{place} {self.number}", "")
        self.texts.wait([f"{place} {number}" for number in numbers])

    def change(self, uuid: int, numbers: Sequence[int]) -> None:
        """Make processes the members, and check what they compute together."""
        if self.number in numbers:
            c10d._reconfigure(uuid, self.handles(numbers)).wait()
            self.check(numbers)

    def check(self, numbers: Sequence[int]) -> None:
        rank, size = numbers.index(self.number), len(numbers)
        assert dist.group.WORLD is self.group
        assert [dist.get_rank(), dist.get_world_size()] == [rank, size]
        assert dist.get_process_group_ranks(None) == list(range(size))
        rows = torch.empty(size, dtype=torch.int64)
        dist.all_gather_single(rows, torch.tensor([self.number]))
        assert rows.tolist() == list(numbers)
        tensor = torch.tensor([float(self.number)])
        dist.broadcast(tensor, src=size - 1)
        assert tensor.item() == numbers[-1]
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(self.number))).sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(sum(numbers) / size)
        dist.monitored_barrier(timeout=timedelta(seconds=30))


def of(*numbers: int) -> Callable[[Callable[[Member], None]], Callable[[Member], None]]:
    """Decorator: make a function a case of some of the processes."""

    def add(function: Callable[[Member], None]) -> Callable[[Member], None]:
        CASES[function.__name__] = lambda member: function(member) if member.number in numbers else None
        return function

    return add


@of(0, 1, 2)
def calls_before_the_first_reconfigure_are_errors(member: Member) -> None:
    member.join(3)
    for call in (dist.barrier, partial(dist.all_reduce, torch.ones(2)), partial(dist.broadcast, torch.ones(2), 0)):
        with pytest.raises(GanglineError, match="has no members yet"):
            call()
    member.change(1, [0, 1, 2])


@of(0, 1, 2)
def wrong_arguments_are_errors_that_leave_the_group_as_it_was(member: Member) -> None:
    handles = member.handles([0, 1, 2])
    own = handles[member.number]
    for wrong, text in (
        (["gloo:0:-1:0:", own], "handle 'gloo:0:-1:0:' is invalid; expected one that get_reconfigure_handle"),
        (["gangline:[1]", own], r"handle 'gangline:\[1\]' is invalid"),
        ([one for one in handles if one != own], "not among the 2 handles"),
        ([], "not among the 0 handles"),
        ([own, own], "the 2 handles name 1 processes"),
    ):
        with pytest.raises(ValueError, match=text):
            c10d._reconfigure(2, wrong)
    with pytest.raises(RuntimeError, match="uuid 1 was already used"):
        c10d._reconfigure(1, handles)
    with pytest.raises(GanglineError, match="same uuid and other handles"):
        c10d._reconfigure(3, handles[member.number :] + handles[: member.number])
    member.check([0, 1, 2])


@of(0, 1, 2)
def a_missing_member_is_named_and_does_not_wait_when_it_comes(member: Member) -> None:
    handles = member.handles([0, 1, 2])
    pid = handles[2].split(", ")[2].rstrip("]")
    if member.number == 2:
        member.meet("others gave up", [0, 1, 2])
        with pytest.raises(GanglineError, match=r"rank 0 of 3 .* gave up reconfigure: rank 2 of 3 .* within 0.5 s"):
            c10d._reconfigure(4, handles)
    else:  # the one that gives up first tells the other
        text = rf"rank 2 of 3 \(process {pid}, rank 2 before\) did not call reconfigure within 0.5 s"
        with pytest.raises(GanglineError, match=text):
            c10d._reconfigure(4, handles, timeout=timedelta(seconds=0.5))
        member.meet("others gave up", [0, 1])
    member.check([0, 1, 2])


@of(0, 1, 2)
def groups_keep_or_lose_their_table_of_global_ranks(member: Member) -> None:
    group = dist.new_group([0, 2])
    if member.number != 1:
        c10d._reconfigure(5, member.handles([2, 0], "sub", group), group).wait()
        assert dist.get_rank(group) == (1 if member.number == 0 else 0)
        tensor = torch.tensor([member.number])
        dist.broadcast(tensor, src=2, group=group)
        assert tensor.item() == 2
    member.change(6, [2, 1, 0])
    if member.number != 1:
        with pytest.raises(ValueError, match="not part of group"):
            dist.broadcast(torch.ones(1), src=2, group=group)
        dist.destroy_process_group(group)
    member.change(7, [0, 1, 2])


@of(0, 1, 2)
def pending_calls_and_those_of_a_member_left_out_fail(member: Member) -> None:
    values, error = torch.ones(100_000), "reconfigured the process group to 2 members"
    if member.number == 1:
        member.meet("pending", [0, 1, 2])
        member.change(8, [1, 0])
        return
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    member.meet("pending", [0, 1, 2])
    member.change(8, [1, 0])
    with pytest.raises(GanglineError, match=error):
        work.wait()
    if member.number == 2:
        with pytest.raises(GanglineError, match=error):
            dist.all_reduce(values)


@of(0, 1, 2)
def a_member_left_out_comes_back(member: Member) -> None:
    member.change(9, [0, 1, 2])
    member.group.abort()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    member.change(10, [0, 1, 2])


@of(0, 1, 2)
def the_others_go_on_when_a_member_has_died(member: Member) -> None:
    handles = member.handles([0, 1, 2])
    if member.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DeadNodeError, match="rank 2"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(GanglineError, match=r"rank 2 of 3 \(process \d+, rank 2 before\) ended before it called"):
        c10d._reconfigure(11, handles)
    member.change(12, [0, 1])


@of(0, 1, NEWCOMER)
def a_new_process_joins(member: Member) -> None:
    if member.number == NEWCOMER:
        member.texts.wait(["newcomer"], timedelta(seconds=60))
        member.join(4)
    member.texts.set("newcomer", "")
    member.change(13, [NEWCOMER, 0, 1])


@of(0, 1, NEWCOMER)
def a_set_of_handles_keeps_the_order_of_ranks(member: Member) -> None:
    handles = member.handles([1, 0, NEWCOMER], "now")
    c10d._reconfigure(14, set(handles)).wait()
    member.check([NEWCOMER, 0, 1])


@of(0, 1, NEWCOMER)
def compiled_functions_use_the_present_size(member: Member) -> None:
    warnings.simplefilter("ignore")

    def function(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size() + dist.get_rank()

    compiled = torch.compile(function, backend="aot_eager")
    for uuid, numbers in ((15, [1, 0]), (16, [0, 1, NEWCOMER])):
        if member.number in numbers:
            member.change(uuid, numbers)
            assert compiled(torch.ones(3)).tolist() == [1.0 + numbers.index(member.number)] * 3


@of(0, 1, NEWCOMER)
def many_changes_leave_nothing_behind(member: Member) -> None:
    found = []
    for uuid in range(20, 32, 3):
        member.change(uuid, [1, NEWCOMER])
        member.change(uuid + 1, [0, 1])
        member.change(uuid + 2, [NEWCOMER, 1, 0])
        gc.collect()
        found.append([len(os.listdir("/proc/self/fd")), threading.active_count()])
    assert found[-1] <= found[1], found


def run_cases(rank: Rank, path: str) -> None:
    warnings.filterwarnings("ignore", message=".*monitored_barrier")
    member = Member(rank.rank, path)
    outcomes = run_until_one_fails((name, partial(function, member)) for name, function in CASES.items())
    if not any(outcomes.values()):
        dist.destroy_process_group()
    rank.tell(outcomes)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the outcomes of all cases on each process that lives to the end."""
    path = tmp_path_factory.mktemp("reconfigure") / "store"
    with Processes(run_cases, 4, str(path), limit=240) as processes:
        return [processes.heard(number) for number in (0, 1, NEWCOMER)]


@pytest.mark.timeout(300)  # the first one runs all cases
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: list[dict[str, str]]) -> None:
    for number, of_process in zip((0, 1, NEWCOMER), outcomes, strict=True):
        assert of_process.get(name, "not reached") == "", f"process {number}"


def test_a_group_with_another_backend_refuses() -> None:
    c10d.init_process_group("cpu:gangline,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for call in (c10d._get_reconfigure_handle, partial(c10d._reconfigure, 1, [])):
            with pytest.raises(RuntimeError, match="another backend for cuda"):
                call()
    finally:
        dist.destroy_process_group()

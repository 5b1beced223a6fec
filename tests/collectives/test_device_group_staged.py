"""Pipeline through host memory: its schedule has all necessary waits; every allowed order gives the same result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from gangline.collectives.devices.backends import staged
from gangline.collectives.devices.backends.pipeline import Buffer, Piece, PipelineStep, plan
from gangline.collectives.devices.backends.staged import StagedWork, Workspace, cut


def all_reduce(positions: int, pieces: int) -> list[Piece]:
    """Return a plan in which each piece is combined by the next position, for all."""
    return [
        Piece(owner := number % positions, others := tuple({*range(positions)} - {owner}), others, combines=True)
        for number in range(pieces)
    ]


SITUATIONS = {
    "all_reduce_2": all_reduce(2, 9),
    "all_reduce_4": all_reduce(4, 10),
    "one_piece": all_reduce(3, 1),
    "to_one_owner": [Piece(1, (0, 2), (), combines=True) for _ in range(9)],
    "from_one_owner": [Piece(0, (), (1, 2), combines=False) for _ in range(9)],
    "near_and_far": [Piece(0, (2,), (2,), combines=True) for _ in range(6)],
    "all_near": [Piece(0, (), (), combines=True) for _ in range(3)],
    "mixed": [*all_reduce(3, 5), Piece(2, (), (0,), combines=False), Piece(1, (0, 2), (), combines=True)] * 2,
    "nothing": [],
}
situations = pytest.mark.parametrize("name", SITUATIONS)
depths = pytest.mark.parametrize("depth", [1, 2, 4])


def before(steps: Sequence[PipelineStep]) -> list[set[int]]:
    """Return the steps that are complete when each step begins: by the order of its stream and by its waits."""
    found: list[set[int]] = []
    last: dict[tuple[int, str], int] = {}
    for number, step in enumerate(steps):
        direct = {*step.waits, *([last[step.stream]] if step.stream in last else [])}
        found.append(direct.union(*(found[one] for one in direct)))
        last[step.stream] = number
    return found


@situations
@depths
def test_accesses_to_a_buffer_are_ordered_if_one_writes(name: str, depth: int) -> None:
    steps = plan(SITUATIONS[name], depth)
    done = before(steps)
    users: dict[Buffer, list[int]] = {}
    for number, step in enumerate(steps):
        assert all(one < number for one in step.waits)
        for buffer in dict.fromkeys((*step.reads, *step.writes)):
            for other in users.setdefault(buffer, []):
                if buffer in step.writes or buffer in steps[other].writes:
                    assert other in done[number], (steps[other], step)
            users[buffer].append(number)


@situations
@depths
def test_a_step_reads_data_of_its_own_piece(name: str, depth: int) -> None:
    steps = plan(SITUATIONS[name], depth)
    written: dict[Buffer, int] = {}
    for step in steps:
        for buffer in step.reads:
            if buffer.kind != "tensor":
                assert written[buffer] == step.piece
        written.update(dict.fromkeys(step.writes, step.piece))


@situations
def test_each_contribution_and_result_crosses_the_host_once(name: str) -> None:
    pieces = SITUATIONS[name]
    counts = Counter(step.kind for step in plan(pieces))
    assert counts["send"] == counts["receive"] == sum(len(piece.sources) for piece in pieces)
    assert counts["combine"] == sum(piece.combines for piece in pieces)
    assert counts["return"] == sum(bool(piece.targets) for piece in pieces)
    assert counts["fetch"] == sum(len(piece.targets) for piece in pieces)


def test_no_more_host_buffers_than_slots() -> None:
    steps = plan(all_reduce(4, 100), depth=3)
    buffers = {buffer for step in steps for buffer in step.writes}
    assert len({buffer for buffer in buffers if buffer.kind == "host"}) == 4 * 3
    assert len({buffer.slot for buffer in buffers if buffer.kind == "result"}) == 3


def test_pieces_follow_each_other_without_waiting_for_the_end_of_the_first() -> None:
    steps = plan(all_reduce(2, 8))
    started = {(step.kind, step.piece): number for number, step in enumerate(steps)}
    assert started["send", 3] < started["return", 1] < started["send", 5]
    done = before(steps)
    for later in (1, 2):  # the first ones: buffers are free, and streams idle
        for earlier in range(later):
            assert not done[started["send", later]] & {
                started[kind, earlier] for kind in ("receive", "return", "fetch")
            }


@pytest.mark.parametrize("seed", range(8))
def test_any_order_allowed_by_the_plan_gives_the_same_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "PIECE", 64)
    positions, count = 3, 200
    tensors = [torch.arange(count, dtype=torch.float32) * 7 + position for position in range(positions)]
    works = []
    for number, part in enumerate(cut(tensors[0], 1)):
        owner, pieces = number % positions, [tensor[part] for tensor in tensors]
        others = tuple({*range(positions)} - {owner})
        outs = {position: pieces[position] for position in others}
        works.append(StagedWork(Piece(owner, others, others, combines=True), pieces, pieces[owner], outs))
    assert len(works) == 13
    run_in_some_order(works, random.Random(seed))
    expected = torch.arange(count) * 21.0 + 3
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def run_in_some_order(works: Sequence[StagedWork], chance: random.Random) -> None:
    """Run the steps in a random order that streams of any speed could produce."""
    steps = plan([work.piece for work in works], depth=2)
    workspace = Workspace([torch.device("cpu")] * 3)
    workspace.make(steps)
    lanes: dict[tuple[int, str], list[int]] = {}
    for number, step in enumerate(steps):
        lanes.setdefault(step.stream, []).append(number)
    done: set[int] = set()
    while any(lanes.values()):
        ready = [lane for lane in lanes.values() if lane and done.issuperset(steps[lane[0]].waits)]
        number = chance.choice(ready).pop(0)
        workspace.do(steps[number], works[steps[number].piece], "sum")
        done.add(number)

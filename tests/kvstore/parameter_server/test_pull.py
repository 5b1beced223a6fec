"""Requests of pulls."""

from __future__ import annotations

import torch

from gangline.collectives.transports.shm.segments import Segment
from gangline.kvstore.parameter_server.protocol import DENSE, Pull
from gangline.kvstore.parameter_server.pull import PullTargets, ShardTarget
from gangline.kvstore.parameter_server.sharding import KeyLayout, Sharding


def no_memory(server: int) -> Segment:
    raise AssertionError(f"memory of server {server} was read")


def test_shards_share_messages_of_at_most_8_mib_and_larger_ones_are_requested_alone() -> None:
    sizes = {"large": 3_000_000, "a": 1_000_000, "b": 1_000_000, "c": 1_000_000, "d": 10}
    layouts = [KeyLayout(key, "float32", (numel,)) for key, numel in sizes.items()]
    placed = Sharding(1).place(layouts, whole=True)
    out = torch.empty(0)
    targets = PullTargets([ShardTarget(placed[key][0], [out]) for key in sizes], no_memory, None)
    messages = [request.message for request in targets.requests(dict.fromkeys(sizes, 7), "pull", 0)]
    numbers = {key: placed[key][0].number for key in sizes}
    groups = [["large"], ["a", "b"], ["c", "d"]]
    assert messages == [Pull(0, [[numbers[key], 7, DENSE, 0] for key in group], False, None) for group in groups]

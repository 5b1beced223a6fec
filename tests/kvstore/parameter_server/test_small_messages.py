"""Python calls of a push and pull of a small key: they are most of its time."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from gangline import kvstore
from tests.kvstore.parameter_server.processes import run_job

STEPS = 200
MOST_CALLS = 380
"""Calls of Python and C functions, without those of the poller, whose number depends on how long the server takes."""


def count_calls() -> int:
    """Return the fewest calls of a push and pull in the worker's thread: acknowledgements arrive with some of them."""
    calls = [0] * 2 * STEPS

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call") and not frame.f_code.co_filename.endswith("poller.py"):
            calls[step] += 1

    with kvstore.create("dist_sync") as kv:
        kv.init("a", torch.zeros(1024))
        given, out = torch.ones(1024), torch.empty(1024)
        for step in range(2 * STEPS):
            if step == STEPS:
                sys.setprofile(count)
            kv.push("a", given)
            kv.pull("a", out)
        sys.setprofile(None)
        assert out.unique().tolist() == [1.0]
    return min(calls[STEPS:])


def test_a_push_and_pull_of_a_small_key_makes_few_calls() -> None:
    (calls,) = run_job(count_calls, 1, 1)
    assert 100 < calls < MOST_CALLS

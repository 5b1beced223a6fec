"""Calls on more keys than a message has room for, and the measurement of many workers and keys."""

from __future__ import annotations

import sys

import pytest
import torch

from gangline.kvstore.parameter_server import sharding
from gangline.kvstore.parameter_server.transport import unix_stream
from tests.kvstore.parameter_server import growth
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(60)


MOST = 300
"""Frames that a message may have in this test: 65,536 otherwise, which takes too many keys."""


def test_calls_on_more_keys_than_a_message_has_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_stream, "_MAX_FRAMES", MOST)
    monkeypatch.setattr(sharding, "MAX_ENTRIES", MOST // 2, raising=False)
    keys = list(range(MOST + 100))
    values = [torch.full((1,), float(key)) for key in keys]
    outs = [torch.empty(1) for _ in keys]
    with Job(1) as job, job.stores(timeout=5)[0] as kv:
        kv.init(keys, values)
        kv.set_optimizer(("sgd", {"learning_rate": 1.0, "momentum": 0.5}))
        kv.push(keys, [torch.ones(1)] * len(keys))
        kv.pull(keys, outs)
        assert torch.cat(outs).equal(torch.cat(values) - 1)
        kv.load_optimizer_state(kv.optimizer_state())  # the momentum is 1
        kv.pushpull(keys, [torch.ones(1)] * len(keys), outs)
        assert torch.cat(outs).equal(torch.cat(values) - 2.5)


@pytest.mark.slow
def test_growth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["growth", "3,2"])
    growth.main()
    assert capsys.readouterr().out.startswith("3 workers, 2 keys: round ")

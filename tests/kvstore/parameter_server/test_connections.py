"""Connections between workers and servers that break or are cut while nothing else is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.kvstore.parameter_server.faults import proxied_streams
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(60)


def test_a_lost_push_is_repeated_while_its_worker_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = proxied_streams(monkeypatch)
    with Job(2) as job:
        first, second = stores = job.stores(timeout=10)
        out = torch.empty(3)
        job.at_once(*[lambda kv=kv: kv.init("key", torch.zeros(3)) for kv in stores])  # type: ignore[misc]
        for proxy in proxies:
            proxy.break_at_next_byte()
        first.push("key", torch.ones(3))  # lost with the connection; worker 0 makes no further call
        second.pushpull("key", torch.full((3,), 4.0), out)
        assert out.tolist() == [5, 5, 5]
        for kv in stores:
            kv.close()

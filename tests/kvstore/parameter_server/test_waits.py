"""Workers that wait for each other in different ways: in collectives, for rounds, for acknowledgements.

GANGLINE_TIMEOUT is 1800: a test that hangs ends by pytest's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gangline import kvstore
from gangline.collectives.errors import MismatchError
from gangline.collectives.processes.spawning import Ranks
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.kvstore import KVStore
from gangline.kvstore.parameter_server.server import sessions
from tests.collectives.processes import Bare
from tests.kvstore.parameter_server import processes
from tests.kvstore.parameter_server.cases import run
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)
NUMEL = 20_000


def epochs_of_different_length() -> list[Any]:
    """Train two epochs, of 12 batches on rank 0 and 4 on rank 1, that end with an exchange."""
    with kvstore.create("dist_async", max_staleness=4) as kv:
        kv.init("a", torch.zeros(8))
        out = torch.empty(8)
        told = []
        for _ in range(2):
            for _ in range(4 if kv.rank else 12):
                kv.pushpull("a", torch.ones(8), out=out)
            told.append(kv.exchange(bytes([kv.rank])))
        kv.pull("a", out)
        return [told, out.tolist()]


def test_a_worker_at_the_end_of_its_epoch_does_not_count_as_the_slowest() -> None:
    assert run_job(epochs_of_different_length, 2, 1) == [[[[b"\0", b"\1"]] * 2, [32.0] * 8]] * 2


class _SmallBacklog(Bare):
    """Process that withholds acknowledgements beyond two rounds if it becomes a server."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **more: object) -> None:
        super().__init__(rank, size, exchange, **more)
        sessions._BACKLOG_BYTES = 0


def pushes_before_and_after_a_barrier() -> list[float]:
    """Push eight rounds, before the barrier on rank 0 and after it on rank 1."""
    with kvstore.create("dist_sync") as kv:
        kv.init("a", torch.zeros(NUMEL))
        if kv.rank == 1:
            kv.barrier()
        for step in range(8):
            kv.push("a", torch.full((NUMEL,), 10.0**kv.rank * (step + 1)))
        if kv.rank == 0:
            kv.barrier()
        out = torch.empty(NUMEL)
        kv.pull("a", out)
        found: list[float] = out.unique().tolist()
        return found


def test_a_barrier_does_not_wait_for_withheld_acknowledgements() -> None:
    play = pushes_before_and_after_a_barrier
    with Ranks(processes._play, 1 + 1 + 2, (2, 1, play, ()), opener=_SmallBacklog) as ranks:
        assert ranks.results()[2:] == [[88.0]] * 2


CALLS: list[tuple[str, Callable[[KVStore], object]]] = [
    ("pull of key 'a'", lambda kv: kv.pull("a", torch.empty(NUMEL))),
    ("pull of key 'a'", lambda kv: kv.pull("a", torch.empty(NUMEL), async_op=True).wait()),
    ("set_optimizer", lambda kv: kv.set_optimizer("sgd")),
]


def barrier_against(kv: KVStore) -> list[str]:
    """Call a barrier on rank 0, which has not pushed, while rank 1 waits for its push; then go on."""
    texts = []
    kv.init("a", torch.zeros(NUMEL))
    out = torch.empty(NUMEL)
    for _, call in CALLS:
        kv.pushpull("a", torch.ones(NUMEL), out=out)
        if kv.rank == 1:
            kv.push("a", torch.ones(NUMEL))
        with pytest.raises(MismatchError) as raised:
            call(kv) if kv.rank else kv.barrier()
        if kv.rank == 0:
            kv.push("a", torch.ones(NUMEL))
        kv.barrier()
        kv.pull("a", out)
        assert out.unique().tolist() == [2.0]
        texts.append(str(raised.value))
    return texts


def pull_across_a_barrier(kv: KVStore) -> list[float]:
    """Rank 1 waits for its pull only after the barrier; rank 0 pushes after it: no error."""
    kv.init("b", torch.zeros(NUMEL))
    out = torch.empty(NUMEL)
    if kv.rank == 1:
        kv.push("b", torch.ones(NUMEL))
        pending = kv.pull("b", out, async_op=True)
        connection = kv._servers._connections[0]  # type: ignore[attr-defined]
        while not any(request.blocked for request in list(connection.pending.values())):
            pass
        kv.barrier()
        pending.wait()
    else:
        kv.barrier()
        kv.push("b", torch.ones(NUMEL))
        kv.pull("b", out)
    found: list[float] = out.unique().tolist()
    return found


def test_a_barrier_is_an_error_of_both_only_against_a_call_that_cannot_go_on_without_a_push() -> None:
    (first, pulled), (second, other) = run("dist_sync", 2, 1, [barrier_against, pull_across_a_barrier])
    for (name, _), text, other_text in zip(CALLS, first, second, strict=True):
        words = f"{name} waits for a push of key 'a' by rank 0, which is in barrier"
        assert text.startswith(f"rank 1 of 2: {words}")
        assert other_text.startswith(f"rank 1: {words}")
    assert pulled == other == [2.0]

"""Servers that are killed and started again: weights stay bit-equal, every push counts once, nothing stays behind."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gangline import KVStore, kvstore
from gangline.collectives.processes.spawning import Outcome, Ranks
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.server import server
from gangline.kvstore.parameter_server.store import DistStore
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.kvstore.restart_variables import KEPT_MEMORY
from gangline.kvstore.sparse import RowSparse
from gangline.launcher.job import free_ports
from tests.collectives.processes import Bare
from tests.kvstore.parameter_server import digits
from tests.kvstore.parameter_server.processes import join_job

pytestmark = pytest.mark.timeout(110)

WORKERS = 2
SHAPES = {"small": (7, 5), "large": (300, 401), "vector": (1_200_007,)}
"""In the message; in shared memory or a frame of its own; split into shards."""
TABLE = (30_000, 77)
"""An update of some of its rows is undone row by row."""
PORT = "TEST_SERVER_PORT"
"""Port that all processes of the server bind; not set: any free one."""
LIMITS = {**digits.LIMITS, "GANGLINE_HEARTBEAT_LIMIT": "10", "GANGLINE_RESTART_LIMIT": "30"}


def play(
    place: Bare,
    roles: Sequence[str],
    starts: int,
    memory: str,
    over: str,
    body: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """Run the role of a rank: 0 is the scheduler; then the starts of ``roles[0]``, in turn; then the other roles.

    Returns:
        Of a server whether it was needed; of a worker the result of the body.
    """
    own = join_job(place, WORKERS, len(roles) - WORKERS)
    pids = [int(pid) for pid in place.exchange(str(os.getpid()).encode())]
    if own is not None:
        own.run()
        return None
    role, number = roles[max(0, place.rank - starts)].split()
    os.environ.update({"DMLC_ROLE": role, f"DMLC_{role.upper()}_ID": number})
    if place.rank <= starts:
        os.environ["GANGLINE_INCARNATION"] = str(place.rank - 1)
        if memory:
            os.environ[KEPT_MEMORY] = str(os.open(memory, os.O_RDWR))
        if place.rank > 1:
            with suppress(ProcessLookupError):
                select.select([os.pidfd_open(pids[place.rank - 1])], [], [])
        if Path(over).exists():
            return False
    if role == "worker":
        return body(*arguments)
    bind, port = Listener._bind, int(os.environ.get(PORT, 0))
    with patch.object(Listener, "_bind", lambda self, host, _, key: bind(self, host, port, key)):
        server.main()
    Path(over).touch()
    return True


def run(
    tmp_path: Path,
    kills: Sequence[str],
    body: Callable[..., Any],
    *arguments: Any,
    victim: str = "server 0",
    servers: int = 1,
    keeps: bool = False,
    **more: str,
) -> list[Any]:
    """Run a job in which a process is killed at these points, one after the other; return the results of the workers.

    Args:
        tmp_path: folder of the test.
        kills: points and numbers of events; the last start of the process is not killed. None: no restarts.
        body: runs in the workers.
        arguments: of the body.
        victim: process that is killed.
        servers: number of servers.
        keeps: whether a worker that is killed has memory in which it keeps its state.
        more: environment variables.
    """
    starts = len(kills) + 1
    script = "; ".join(f"{victim}.{start} kill at {point}" for start, point in enumerate(kills))
    environment = {**LIMITS, "GANGLINE_FAULT": script, "GANGLINE_RESTART_PROCESSES": str(len(kills)), **more}
    names = [f"server {rank}" for rank in range(servers)] + [f"worker {rank}" for rank in range(WORKERS)]
    roles = [victim, *(name for name in names if name != victim)]
    is_kept = bool(kills) and ("server" in victim or keeps)
    memory = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if is_kept else None
    path = "" if memory is None else f"/proc/{os.getpid()}/fd/{memory}"
    over = str(tmp_path / f"over-{time.monotonic_ns()}")
    with patch.dict(os.environ, environment):
        ranks = Ranks(play, starts + len(roles), (roles, starts, path, over, body, arguments), opener=Bare)
        try:
            ended: list[Outcome] = ranks.outcomes()
        finally:
            ranks.close()
            if memory is not None:
                os.close(memory)
    killed, last = ended[1:starts], dict(zip(roles, ended[starts:], strict=True))
    assert [outcome.error for outcome in (ended[0], *last.values())] == [None] * (1 + len(roles))
    assert ["was killed by SIGKILL" in str(outcome.error) for outcome in killed] == [True] * len(kills)
    assert last[names[0]].value is True
    return [last[f"worker {rank}"].value for rank in range(WORKERS)]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def sync_with(kv: KVStore) -> dict[str, Tensor]:
    """Define the keys and return the tensors to pull into."""
    kv.init(
        list(SHAPES), [torch.arange(torch.Size(shape).numel()).view(shape) % 13 / 8 - 0.5 for shape in SHAPES.values()]
    )
    return {key: torch.empty(shape) for key, shape in SHAPES.items()}


def train(spec: Any, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train; return weights and optimizer state."""
    with kvstore.create("dist_sync") as kv:
        outs = sync_with(kv)
        kv.init("table", RowSparse([], torch.empty(0, *TABLE[1:]), TABLE))
        outs["table"] = torch.empty(TABLE)
        kv.set_optimizer(spec)
        for step in range(steps):
            own: dict[str, Any] = {**gradients(kv.rank, step)}
            own["table"] = RowSparse([5 * step, 7 + kv.rank, 7], own["vector"][:231].view(3, 77), TABLE)
            if step == steps // 2:
                kv.set_learning_rate(kv.learning_rate / 2)
            if step % 3 == 0 and not kv.updates_wait:
                kv.pushpull(list(own), list(own.values()), list(outs.values()))
            else:
                for key, value in own.items():
                    kv.push(key, value, async_op=step % 3 == 1)
                if step % 3 == 1 and not kv.updates_wait:
                    kv.pull(list(outs), list(outs.values()))
            if kv.updates_wait:
                kv.update()
        kv.barrier()
        kv.pull(list(outs), list(outs.values()))
        state: OptimizerState = kv.optimizer_state()
        return outs, state.tensors


SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
ADAM = ("adam", {"learning_rate": 0.01})
PATTERNS = {"small": ("adafactor", {"lr": 0.01}), "table": ("adagrad", {"lr": 0.1}), "*": SGD}
CLIPPED = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "clip_global_norm": 1.0})


def check_equal(tmp_path: Path, kills: Sequence[str], body: Callable[..., Any], *arguments: Any, **more: Any) -> None:
    """Check that all tensors are bit-equal to those of an undisturbed run."""
    expected = run(tmp_path, [], body, *arguments, **more)
    found = run(tmp_path, kills, body, *arguments, **more)
    for one, other in zip(found, expected, strict=True):
        for own, undisturbed in zip(one, other, strict=True):
            assert own.keys() == undisturbed.keys()
            assert [name for name, tensor in own.items() if not torch.equal(tensor, undisturbed[name])] == []


INSIDE_AN_UPDATE = ["update 9", "close 7"]
TWENTY = ["push-taken 30", "update 35", "close 33", "ack 9", "values 13", "pull 6"] * 4
POINTS = [
    *("hello 2", "define 1", "ack 1", "command 1"),
    *("push-taken 1", "push-taken 8", "update 1", "update 12", "close 3", "close 14"),
    *("ack 2", "ack 5", "values 1", "values 4", "pull 2", "values 3"),
]


@pytest.mark.parametrize(
    ("spec", "kills", "steps", "transport"),
    [
        pytest.param(ADAM, INSIDE_AN_UPDATE, 8, "auto", id="adam, inside an update", marks=pytest.mark.slow),
        pytest.param(SGD, INSIDE_AN_UPDATE, 8, "auto", id="sgd, inside an update", marks=pytest.mark.slow),
        pytest.param(PATTERNS, INSIDE_AN_UPDATE, 8, "auto", id="by pattern, inside an update", marks=pytest.mark.slow),
        *(
            pytest.param(spec, TWENTY[:20], 200, "auto", id=f"{spec[0]}, twenty times", marks=pytest.mark.slow)
            for spec in (SGD, ADAM)
        ),
        *(
            pytest.param(
                spec, POINTS[at : at + 4], 14, transport, id=f"{spec[0]} {at} {transport}", marks=pytest.mark.slow
            )
            for spec in (ADAM, CLIPPED)
            for transport in ("auto", "ipc", "tcp")
            for at in range(0, len(POINTS), 4)
        ),
    ],
)
def test_killed_servers_change_no_bit(tmp_path: Path, spec: Any, kills: list[str], steps: int, transport: str) -> None:
    check_equal(tmp_path, kills, train, spec, steps, GANGLINE_TRANSPORT=transport)


def groups(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train groups of keys with an optimizer each; return weights and state."""
    with kvstore.create("dist_sync") as kv:
        outs = sync_with(kv)
        both = kv.set_optimizer(ADAM, keys=["small", "vector"]), kv.set_optimizer(SGD, keys=["large"])
        for step in range(steps):
            own = gradients(kv.rank, step)
            for group in both:
                keys = sorted(group.keys or ())
                kv.pushpull(keys, [own[key] for key in keys], [outs[key] for key in keys])
            both[step % 2].set_learning_rate(0.05 / (1 + step))
        return outs, {**kv.optimizer_state(group=both[0]).tensors, **kv.optimizer_state(group=both[1]).tensors}


@pytest.mark.slow
def test_killed_servers_change_no_bit_of_groups_with_an_optimizer_each(tmp_path: Path) -> None:
    check_equal(tmp_path, INSIDE_AN_UPDATE, groups, 8)


def commands(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Call everything that servers must remember, between pushes; return weights and state."""
    with kvstore.create("dist_sync") as kv:
        outs = sync_with(kv)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.set_optimizer(CLIPPED)
        for step in range(steps):
            own = gradients(kv.rank, step)
            kv.push(list(own), list(own.values()))
            if step == 1:
                kv.drop_updates()
            elif step != 3:
                kv.update()
            if step == 2:
                kv.set_optimizer(ADAM)
            if step == 4:
                kv.load_optimizer_state(kv.optimizer_state())
                kv.set_gradient_compression(None)
            kv.pull(list(outs), list(outs.values()))
        kv.assign(list(outs), [value / 2 for value in outs.values()])
        if kv.rank == 0:  # which rank 1 does not wait for
            kv.join()
        own = gradients(1, steps)
        if kv.rank == 1:
            kv.push(list(own), list(own.values()))
            kv.join()
        kv.pushpull(list(own), list(own.values()), list(outs.values()))
        return outs, kv.optimizer_state().tensors


_COMMANDS = [f"{point} {number}" for number in (1, 2, 3, 4, 5) for point in ("result", "command", "update", "close")]


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        (["result 4", "update 13"], 3),
        *(pytest.param(_COMMANDS[at : at + 5], 7, marks=pytest.mark.slow) for at in range(0, len(_COMMANDS), 5)),
    ],
)
def test_a_server_killed_after_a_command_does_not_run_it_again(tmp_path: Path, kills: list[str], steps: int) -> None:
    check_equal(tmp_path, kills, commands, steps)


def one_pulls(steps: int) -> tuple[dict[str, Tensor]]:
    """Pull on rank 0 only, while rank 1 waits in a barrier behind its push."""
    with kvstore.create("dist_sync") as kv:
        outs = sync_with(kv)
        kv.set_optimizer(SGD)
        for step in range(steps):
            own = gradients(kv.rank, step)
            kv.push(list(own), list(own.values()))
            if kv.rank == 0:
                kv.pull(list(outs), list(outs.values()))
            kv.barrier()
        kv.pull(list(outs), list(outs.values()))
        return (outs,)


@pytest.mark.slow
def test_a_push_that_is_yet_to_be_repeated_is_not_taken_for_a_forgotten_one(tmp_path: Path) -> None:
    check_equal(tmp_path, ["update 4", "pull 2", "push-taken 3", "update 5"], one_pulls, 6)


STEPS = 13
"""Of two workers: a float64 holds 26 base-4 digits."""


def count(name: str, spec: Any, max_staleness: int | None = None) -> dict[Key, list[int]]:
    """Push a digit of its own in each step; return the digits of the sums."""
    with DistStore(name, max_staleness=max_staleness) as kv:
        outs = digits.init(kv)
        if spec is not None:
            kv.set_optimizer(spec)
        digits.train(kv, outs, STEPS)
        kv.pull(list(outs), list(outs.values()))  # after which the server has applied this worker's pushes
        return digits.sums(kv, outs)


ADDING = ("sgd", {"learning_rate": 1.0})
EIGHT = ["push-taken 6", "update 8", "close 7", "ack 2", "values 3", "pull 2", "update 1", "close 1"]


@pytest.mark.parametrize(
    ("spec", "transport", "max_staleness", "kills"),
    [
        (ADDING, "auto", None, ["update 15", "push-taken 12"]),
        *(
            pytest.param(spec, transport, max_staleness, EIGHT, marks=pytest.mark.slow)
            for spec in (None, ADDING)
            for transport in ("auto", "tcp")
            for max_staleness in (None, 3)
        ),
    ],
)
def test_an_async_push_counts_once_though_servers_are_killed(
    tmp_path: Path, spec: Any, transport: str, max_staleness: int | None, kills: list[str]
) -> None:
    arguments = "dist_async", spec, max_staleness
    every_push = digits.every_push(STEPS, WORKERS)
    assert run(tmp_path, kills, count, *arguments, GANGLINE_TRANSPORT=transport) == [every_push] * WORKERS


def rated() -> Tensor:
    """Set the learning rate on rank 0 before a push of rank 1."""
    with kvstore.create("dist_async") as kv:
        out = torch.zeros(4)
        kv.init("w", out)
        kv.set_optimizer(ADDING)
        kv.push("w", torch.ones(4))
        kv.barrier()
        kv.set_learning_rate(4.0 if kv.rank == 0 else 1000.0)
        kv.barrier()
        if kv.rank == 1:
            kv.push("w", torch.ones(4))
            kv.pull("w", out)
        kv.barrier()
        kv.pull("w", out)
        return out


@pytest.mark.slow
def test_a_restarted_server_has_the_learning_rate_of_an_async_store(tmp_path: Path) -> None:
    for weight in run(tmp_path, [f"update {WORKERS + 1}"], rated):
        assert weight.tolist() == [-WORKERS - 4.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kills", [["push-taken 12"], EIGHT], ids=len)
def test_a_server_may_get_the_port_of_its_former_process(tmp_path: Path, kills: list[str]) -> None:
    more = {"GANGLINE_TRANSPORT": "tcp", PORT: str(*free_ports(1))}
    every_push = digits.every_push(STEPS, WORKERS)
    assert run(tmp_path, kills, count, "dist_async", ADDING, **more) == [every_push] * WORKERS

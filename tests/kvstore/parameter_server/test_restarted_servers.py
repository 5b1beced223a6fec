"""Servers that are killed and started again: weights stay bit-equal, every push counts once, nothing stays behind."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gangline import KVStore, RowSparse, kvstore
from gangline.collectives.environments.restart import KEPT_MEMORY
from gangline.collectives.processes.spawning import Outcome, Ranks
from gangline.kvstore.optimizer.keyed import OptimizerState
from gangline.kvstore.parameter_server.environment import from_environment
from gangline.kvstore.parameter_server.server import server
from gangline.kvstore.parameter_server.transport.listener import Listener
from gangline.launcher.job import free_ports
from tests.kvstore.parameter_server.processes import RoleProcess, join_job
from tests.kvstore.parameter_server.test_restarted_scheduler import LOOP
from tests.kvstore.test_launch import launch
from tests.scripted_faults import script_processes

pytestmark = pytest.mark.timeout(110)

WORKERS = 2
SHAPES = {"small": (7, 5), "large": (300, 401), "vector": (1_200_007,)}
"""In the message; in shared memory or a frame of its own; split into shards."""
PORT = "TEST_SERVER_PORT"
"""Port that all processes of the server bind; not set: any free one."""
LIMITS = {
    "GANGLINE_TIMEOUT": "60",
    "GANGLINE_HEARTBEAT": "0.2",
    "GANGLINE_HEARTBEAT_LIMIT": "10",
    "GANGLINE_RESTART_LIMIT": "30",
}


def play(
    place: RoleProcess, starts: int, memory: str, over: str, body: Callable[..., Any], arguments: Sequence[Any]
) -> Any:
    """Run the role of a rank: 0 is the scheduler; then the starts of server 0, each after the one before; then workers.

    Returns:
        True of a server whether it was needed; of a worker the result of the body.
    """
    own = join_job(place, WORKERS, 1)
    pids = [int(pid) for pid in place.exchange(str(os.getpid()).encode())]
    if own is not None:
        own.run()
        return None
    if place.rank <= starts:
        os.environ.update(DMLC_ROLE="server", DMLC_SERVER_ID="0", GANGLINE_INCARNATION=str(place.rank - 1))
        if memory:
            os.environ[KEPT_MEMORY] = str(os.open(memory, os.O_RDWR))
        if place.rank > 1:
            with suppress(ProcessLookupError):
                select.select([os.pidfd_open(pids[place.rank - 1])], [], [])
        if Path(over).exists():
            return False
        bind, port = Listener._bind, int(os.environ.get(PORT, 0))
        with patch.object(Listener, "_bind", lambda self, host, _, key: bind(self, host, port, key)):
            server.serve(from_environment())
        Path(over).touch()
        return True
    os.environ.update(DMLC_ROLE="worker", DMLC_WORKER_ID=str(place.rank - 1 - starts))
    return body(*arguments)


def run(tmp_path: Path, kills: Sequence[str], body: Callable[..., Any], *arguments: Any, **more: str) -> list[Any]:
    """Run a job whose server is killed at these points, one after the other; return the results of the workers.

    Args:
        tmp_path: folder of the test.
        kills: points and numbers of events; the last start of the server is not killed. None: no restarts.
        body: runs in the workers.
        arguments: of the body.
        more: environment variables.
    """
    starts = len(kills) + 1
    script = "; ".join(f"server 0.{start} kill at {point}" for start, point in enumerate(kills))
    environment = {**LIMITS, "GANGLINE_FAULT": script, "GANGLINE_RESTART_PROCESSES": str(len(kills)), **more}
    memory = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if kills else None
    path = "" if memory is None else f"/proc/{os.getpid()}/fd/{memory}"
    over = tmp_path / f"over-{time.monotonic_ns()}"
    with patch.dict(os.environ, environment):
        ranks = Ranks(play, 1 + starts + WORKERS, (starts, path, str(over), body, arguments), opener=RoleProcess)
        try:
            ended: list[Outcome] = ranks.outcomes()
        finally:
            ranks.close()
            if memory is not None:
                os.close(memory)
    servers, workers = ended[1 : 1 + starts], ended[1 + starts :]
    errors = [outcome.error for outcome in [ended[0], servers[-1], *workers]]
    assert errors == [None] * len(errors)
    assert ["was killed by SIGKILL" in str(outcome.error) for outcome in servers[:-1]] == [True] * len(kills)
    assert servers[-1].value is True
    return [outcome.value for outcome in workers]


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
        kv.set_optimizer(spec)
        for step in range(steps):
            own = gradients(kv.rank, step)
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
CLIPPED = ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "clip_global_norm": 1.0})


def check_equal(tmp_path: Path, kills: Sequence[str], body: Callable[..., Any], *arguments: Any, **more: str) -> None:
    """Check that all tensors are bit-equal to those of an undisturbed run."""
    expected = run(tmp_path, [], body, *arguments, **more)
    found = run(tmp_path, kills, body, *arguments, **more)
    for one, other in zip(found, expected, strict=True):
        for own, undisturbed in zip(one, other, strict=True):
            assert own.keys() == undisturbed.keys()
            assert [name for name, tensor in own.items() if not torch.equal(tensor, undisturbed[name])] == []


INSIDE_AN_UPDATE = ["update 9", "close 7"]
TWENTY = ["push-taken 30", "update 35", "close 33", "ack 9", "values 13", "pull 6", "done 5"] * 3
POINTS = [
    *("hello 2", "define 1", "ack 1", "command 1"),
    *("push-taken 1", "push-taken 8", "update 1", "update 12", "close 3", "close 14"),
    *("ack 2", "ack 5", "values 1", "values 4", "pull 2", "done 2"),
]


@pytest.mark.parametrize(
    ("spec", "kills", "steps", "transport"),
    [
        pytest.param(ADAM, INSIDE_AN_UPDATE, 8, "auto", id="adam, inside an update"),
        pytest.param(SGD, INSIDE_AN_UPDATE, 8, "auto", id="sgd, inside an update", marks=pytest.mark.slow),
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


ROWS, PUSHES = 20, 20
"""Pushes of a row of the table add base-4 digits to it: one each, or the row shows which is lost or counted twice."""


def count(name: str, steps: int, spec: Any, max_staleness: int | None = None) -> dict[str, Tensor]:
    """Push a digit of its own in each step, some of them row-sparse; return the tables."""
    with kvstore.create(name, max_staleness=max_staleness) as kv:
        out = torch.zeros(ROWS, 8192, dtype=torch.float64)
        small = torch.zeros(ROWS, 3, dtype=torch.float64)
        kv.init(["table", "small"], [out, small])
        if spec is not None:
            kv.set_optimizer(spec)
        for step in range(steps):
            row, digit = divmod(WORKERS * step + kv.rank, PUSHES)
            for key, value in (("table", out), ("small", small)):
                values = torch.full((1, value.shape[1]), -(4.0**digit), dtype=torch.float64)
                rows = RowSparse([row], values, value.shape)
                kv.push(key, rows if step % 2 else rows.to_dense(), async_op=step % 5 == 1, priority=step)
            if step % 4 == 0:
                kv.pull(["table", "small"], [out, small])
        kv.barrier()
        kv.pull(["table", "small"], [out, small])
        assert out.min(1).values.equal(out.max(1).values)
        return {"table": out[:, :3].clone(), "small": small.clone()}


def every_push(steps: int) -> Tensor:
    """Return the table in which each push counts once."""
    sums = [
        sum(4.0**digit for digit in range(min(max(WORKERS * steps - PUSHES * row, 0), PUSHES))) for row in range(ROWS)
    ]
    return torch.tensor(sums, dtype=torch.float64)[:, None].expand(ROWS, 3)


ADDING = ("sgd", {"learning_rate": 1.0})
TWENTY_ASYNC = ["push-taken 21", "update 25", "close 23", "ack 7", "values 4", "pull 5", "update 1", "close 1"] * 3


@pytest.mark.parametrize(
    ("spec", "transport", "max_staleness", "kills", "steps"),
    [
        (ADDING, "auto", None, ["update 15", "push-taken 12"], 30),
        *(
            pytest.param(spec, transport, max_staleness, TWENTY_ASYNC[:20], 200, marks=pytest.mark.slow)
            for spec in (None, ADDING)
            for transport in ("auto", "tcp")
            for max_staleness in (None, 3)
        ),
    ],
)
def test_an_async_push_counts_once_though_servers_are_killed(
    tmp_path: Path, spec: Any, transport: str, max_staleness: int | None, kills: list[str], steps: int
) -> None:
    arguments = "dist_async", steps, spec, max_staleness
    for tables in run(tmp_path, kills, count, *arguments, GANGLINE_TRANSPORT=transport):
        for table in tables.values():
            assert torch.equal(table if spec else -table, every_push(steps))


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


def test_a_restarted_server_has_the_learning_rate_of_an_async_store(tmp_path: Path) -> None:
    for weight in run(tmp_path, [f"update {WORKERS + 1}"], rated):
        assert weight.tolist() == [-WORKERS - 4.0] * 4


@pytest.mark.parametrize("kills", [["push-taken 12"], pytest.param(TWENTY_ASYNC[:20], marks=pytest.mark.slow)], ids=len)
def test_a_server_may_get_the_port_of_its_former_process(tmp_path: Path, kills: list[str]) -> None:
    more = {"GANGLINE_TRANSPORT": "tcp", PORT: str(*free_ports(1))}
    for tables in run(tmp_path, kills, count, "dist_async", 200, ADDING, None, **more):
        for table in tables.values():
            assert torch.equal(table, every_push(200))


@pytest.mark.slow
def test_the_launcher_keeps_the_memory_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for script in ("", "server 0 kill at update 9; server 1 kill at values 5; server 0.1 kill at close 6"):
        script_processes(monkeypatch, script)
        words = ("-n", "2", "-s", "2", "--restart-processes", "3", "--", sys.executable, "-c", LOOP, "dist_sync")
        with launch(*words) as job:
            status, out, errors = job.end(100)
        assert status == 0
        assert sum("it starts again" in line for line in errors) == script.count("kill")
        found += [line.partition("] ")[2] for line in out]
    assert len(found) == 4
    assert len(set(found)) == 1

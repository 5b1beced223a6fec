"""What takes part in the parameter server's bench: gangline's jobs and its peers', and the calls that are measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.bench.hosts import Hosts
    from gangline.bench.jobs import Job

PUSH, PUSH_PULL, PUSHPULL = "push", "push+pull", "pushpull"
"""The calls that are measured."""
ITEM = 4
"""Bytes of a float32."""
_TRANSPORTS = ("auto", "tcp")
_STORES = ("dist_sync", "dist_async", "dist_device_sync", "dist_device_async")
_SERVING = "from gangline.kvstore.parameter_server.roles import serve_if_assigned; serve_if_assigned()"
_COMPRESSIONS: Mapping[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.5},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
}


@dataclass(frozen=True)
class Case:
    """What is to be measured."""

    sizes: Sequence[int]
    """Of the key, in bytes."""
    workers: int = 2
    servers: int = 1
    store: str = "dist_sync"
    transport: str = "auto"
    pushpull: bool = False
    compression: str | None = None
    peers: Sequence[str] = ()
    hosts: int = 1
    rate: str | None = None
    check: bool = True
    runs: int = 3
    run_seconds: float = 0.2
    """About how long a run takes."""

    def __post_init__(self) -> None:
        from gangline.bench.hosts import obstacle

        for name, value, expected in (
            ("--store", self.store, _STORES),
            ("--transport", self.transport, _TRANSPORTS),
            ("--compression", self.compression, (None, *_COMPRESSIONS)),
            ("--hosts", self.hosts, (1, 2)),
        ):
            if value not in expected:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(str, expected))}")
        if min(self.sizes) < ITEM:
            raise ValueError(f"-b is {min(self.sizes)}; expected {ITEM} bytes or more, those of one float32")
        if self.rate is not None and self.hosts == 1:
            raise ValueError(f"--rate is {self.rate}, but there is no link; expected --hosts 2 with it")
        if self.hosts > 1 and (why := obstacle()) is not None:
            raise RuntimeError(f"--hosts {self.hosts}: {why}")


@dataclass(frozen=True)
class Side:
    """What takes part: a way of calling a job's store."""

    who: str
    """Gangline, or the peer's short name."""
    job: Job
    call: str
    compression: str | None = None

    @property
    def name(self) -> str:
        """Under which it is prepared."""
        return self.call


def own_sides(stack: ExitStack, case: Case, hosts: Hosts | None) -> list[Side]:
    """Gangline's sides, each compression in a job of its own, which ends with ``stack``.

    Raises:
        JobError: a job did not start.
    """
    calls: dict[str | None, list[str]] = {None: _calls(case)}
    if case.compression is not None:
        calls[None].insert(0, PUSH)
        calls |= {case.compression: [PUSH], f"{case.compression}, pulls fp16": [PUSH_PULL]}
    sides = []
    for compression, of_job in calls.items():
        job = _job(stack, case, compression, hosts)
        sides += [Side("gangline", job, call, compression) for call in of_job]
    return sides


def _calls(case: Case) -> list[str]:
    return [PUSH_PULL, *([PUSHPULL] if case.pushpull else [])]


def _job(stack: ExitStack, case: Case, compression: str | None, hosts: Hosts | None) -> Job:
    from gangline.bench.job_processes import Plan
    from gangline.bench.jobs import Job
    from gangline.kvstore.launch.job import cores

    env = {"BENCH_STORE": case.store}
    if compression is not None:
        name, _, pulls = compression.partition(", pulls ")
        params = {**_COMPRESSIONS[name], **({"pull_type": pulls} if pulls else {})}
        env["BENCH_COMPRESSION"] = json.dumps(params)
    if case.transport == "tcp" or hosts is not None:  # processes of two namespaces could still share memory
        env["GANGLINE_TRANSPORT"] = "tcp"
    if hosts is not None:
        env["GANGLINE_INSECURE"] = "1"  # the namespaces are ours alone
    plan = Plan(
        "gangline_ps",
        case.workers,
        case.servers,
        env=env,
        threads=max(1, cores() // case.workers),
        interpreter=Path(sys.executable),  # as users have it, and peers
        serving=_SERVING,
    )
    return stack.enter_context(Job(plan, hosts))


def peer_sides(stack: ExitStack, peer: str, case: Case) -> list[Side]:
    """A peer's sides, one for each of its settings; none where it cannot be started, with a line that says why."""
    from gangline.bench.job_processes import Plan
    from gangline.bench.jobs import Job, JobError
    from gangline.bench.peers.installed import interpreter

    if case.hosts > 1 or case.store != "dist_sync":
        print(f"skipping {peer}: it is measured with dist_sync on one host only")
        return []
    sides = []
    for threads in ("1", "2"):
        setting = f"OMP_NUM_THREADS={threads}"
        say(f"starting {peer} with {setting}")
        plan = Plan(
            f"{peer}_ps",
            case.workers,
            case.servers,
            setting=setting,
            env={"BENCH_STORE": case.store, "OMP_NUM_THREADS": threads, "DMLC_NODE_HOST": "127.0.0.1"},
            interpreter=interpreter(peer),
            serving=f"import {peer}",
        )
        try:
            job = stack.enter_context(Job(plan))
        except JobError as error:
            print(f"skipping {peer}: {error}")
            return []
        sides += [Side(peer, job, call) for call in _calls(case)]
    return sides


def say(progress: str) -> None:
    """Tell the user, who waits, what is being done."""
    print(progress, file=sys.stderr, flush=True)

"""Causes of slow training that are built into jobs, and the verdicts of `gangline advise` on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gangline.launcher.job import free_ports
from gangline.status.query import statuses
from tests.hosts import Hosts
from tests.programs import ROOT, environment, python, torchrun

SCRIPT = str(ROOT / "tests" / "cli" / "training_with_causes.py")
Verdict = tuple[str | None, str | None]
"""Cause and process of the first finding; None: there is nothing to gain."""


def advise(*arguments: str, **variables: object) -> dict[str, Any]:
    done = python("-m", "gangline", "advise", "--json", *arguments, code=0, **variables)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first(found: dict[str, Any], ignored: str = "cores") -> Verdict:
    """Return cause and process of the first finding, without that of busy cores, which other programs may cause."""
    findings = [finding for finding in found["findings"] if finding["cause"] != ignored]
    return (findings[0]["cause"], findings[0]["process"]) if findings else (None, None)


def advise_ranks(**variables: object) -> dict[str, Any]:
    return advise("--", sys.executable, *torchrun(SCRIPT), **variables)


def in_ranks(cause: str) -> Verdict:
    return first(advise_ranks(CAUSE=cause))


def without_cause() -> Verdict:
    """Return the verdict on a job without a cause; that of busy cores explains all others.

    Its steps compute for long enough that the exchange is no cause even if other programs use the cores.
    """
    found = advise_ranks(CAUSE="none", BATCH=1024)
    cores = any(finding["cause"] == "cores" for finding in found["findings"])
    return (None, None) if cores else first(found)


def tiny_batch() -> Verdict:
    return first(advise_ranks(WIDTH=64, BATCH=8, STEPS=400))


def train(*options: str) -> Verdict:
    return first(advise("--", sys.executable, "-m", "gangline", "train", *options))


def oversubscribed_cores() -> Verdict:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        return first(advise_ranks(STEPS=200), ignored="")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def dist_sync(*options: str) -> Verdict:
    network = ["--network", "wide_mlp", "--batch-size", "64", "--num-epochs", "3"]
    words = [sys.executable, "-m", "gangline", "train", *network, "--kv-store", "dist_sync", *options]
    return first(advise("--", sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--", *words))


def slow_server() -> Verdict:
    is_over = threading.Event()

    def slow_down() -> None:
        """Stop the job's server for four fifths of the time."""
        while not is_over.is_set():
            servers = [one.process for one in statuses(is_wanted=lambda name, _: name == "server 0")]
            with suppress(ProcessLookupError):
                for _ in range(50):
                    for signal_, seconds in ((signal.SIGSTOP, 0.008), (signal.SIGCONT, 0.002)):
                        for process in servers:
                            os.kill(process, signal_)
                        time.sleep(seconds)

    slowing = threading.Thread(target=slow_down)
    slowing.start()
    try:
        return dist_sync()
    finally:
        is_over.set()
        slowing.join()


def slow_link() -> Verdict:
    with Hosts(2, rate="100mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        port = free_ports(1)[0]
        own = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": port, "WORLD_SIZE": 2, "GANGLINE_INSECURE": 1}
        processes = [
            hosts.start(rank, [sys.executable, SCRIPT], environment(RANK=rank, GANGLINE_TIMELINE=path, **own))
            for rank in range(2)
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        return first(advise(str(path)))


SMALL = ("--network", "mlp", "--batch-size", "32", "--cpus", "2", "--num-epochs", "2")
_UNEVEN = ("--network", "lenet", "--batch-size", "256", "--cpus", "2", "--num-epochs", "4", "--work-load-list", "5,1")
CAUSES: dict[str, tuple[Callable[[], Verdict], set[Verdict]]] = {
    "none": (without_cause, {(None, None)}),
    "input of one rank": (partial(in_ranks, "input"), {("input", "rank 1")}),
    "forward of one rank": (partial(in_ranks, "forward"), {("forward", "rank 1")}),
    "backward of one rank": (partial(in_ranks, "backward"), {("backward", "rank 1")}),
    "uneven data": (partial(in_ranks, "uneven data"), {("compute", "rank 1")}),
    "a rank that stands still": (partial(in_ranks, "pause"), {("pause", "rank 1")}),
    "input of all ranks": (partial(in_ranks, "every input"), {("input", "")}),
    "tiny batch": (tiny_batch, {("small steps", ""), ("communication", "")}),
    "small steps of two contexts": (partial(train, *SMALL), {("small steps", "")}),
    "a slow context": (partial(train, *_UNEVEN), {("compute", "cpu(0)")}),
    "oversubscribed cores": (oversubscribed_cores, {("cores", "")}),
    "compression that does not pay": (partial(dist_sync, "--gc-type", "topk"), {("compression", "")}),
    "a server on a slow host": (slow_server, {("server", "server 0")}),
    "a slow link": (slow_link, {("communication", "")}),
}
"""Function that runs a job with each cause, and the verdicts that name it."""

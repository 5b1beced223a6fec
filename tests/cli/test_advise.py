"""`gangline advise`: causes that are built into a training job, and the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.driver.hosts import Hosts, obstacle
from gangline.collectives.liveness.status_query import statuses
from gangline.kvstore.launch.job import free_ports
from tests.kvstore.test_launch import ROOT

pytestmark = pytest.mark.timeout(120)

SCRIPT = str(ROOT / "tests" / "cli" / "training_with_causes.py")
CAUSES = ["none", "input", "forward", "backward", "uneven data", "pause", "every input"]
VERDICTS = {  # cause, process
    "none": (None, None),
    "input": ("input", "rank 1"),
    "forward": ("forward", "rank 1"),
    "backward": ("backward", "rank 1"),
    "uneven data": ("compute", "rank 1"),
    "pause": ("pause", "rank 1"),
    "every input": ("input", ""),
}


def environment(**variables: object) -> dict[str, str]:
    words = {name: str(value) for name, value in variables.items()}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **words}


def advise(*arguments: str, **variables: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "gangline", "advise", "--json", *arguments]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first(found: dict[str, Any], ignored: str = "cores") -> tuple[str | None, str | None]:
    """Return cause and process of the first finding, without that of busy cores, which other tests may cause."""
    findings = [finding for finding in found["findings"] if finding["cause"] != ignored]
    return (findings[0]["cause"], findings[0]["process"]) if findings else (None, None)


def torchrun(**variables: object) -> dict[str, Any]:
    ranks = ("torchrun", "--nproc-per-node", "2", "--master-port", str(free_ports(1)[0]), SCRIPT)
    return advise("--", sys.executable, "-m", "torch.distributed.run", *ranks[1:], **variables)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_verdict_names_the_cause_and_the_process(cause: str) -> None:
    assert first(torchrun(CAUSE=cause)) == VERDICTS[cause]


@pytest.mark.slow
def test_a_tiny_batch_is_named() -> None:
    assert first(torchrun(WIDTH=64, BATCH=8, STEPS=400))[0] in ("small steps", "communication")


@pytest.mark.slow
def test_contexts_of_one_process_with_too_little_work_are_named(tmp_path: Path) -> None:
    job = ["--network", "mlp", "--batch-size", "32", "--cpus", "2", "--num-epochs", "2"]
    assert first(advise("--", sys.executable, "-m", "gangline", "train", *job)) == ("small steps", "")


@pytest.mark.slow
def test_a_slow_context_is_named() -> None:
    job = ["--network", "lenet", "--batch-size", "256", "--cpus", "2", "--num-epochs", "4", "--work-load-list", "5,1"]
    assert first(advise("--", sys.executable, "-m", "gangline", "train", *job)) == ("compute", "cpu(0)")


@pytest.mark.slow
def test_oversubscribed_cores_are_named() -> None:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert first(torchrun(STEPS=200), ignored="") == ("cores", "")
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def dist_sync(*options: str) -> list[str]:
    network = ["--network", "wide_mlp", "--batch-size", "64", "--num-epochs", "3"]
    train = [sys.executable, "-m", "gangline", "train", *network, "--kv-store", "dist_sync", *options]
    return ["--", sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--", *train]


@pytest.mark.slow
def test_compression_that_does_not_pay_is_named() -> None:
    assert first(advise(*dist_sync("--gc-type", "topk"))) == ("compression", "")


@pytest.mark.slow
def test_a_server_on_a_slow_host_is_named() -> None:
    is_over = threading.Event()

    def slow_down() -> None:
        """Let the job's server run for a fifth of the time."""
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
        assert first(advise(*dist_sync())) == ("server", "server 0")
    finally:
        is_over.set()
        slowing.join()


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Hosts(2, rate="100mbit") as hosts:
        port = free_ports(1)[0]
        own = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": port, "WORLD_SIZE": 2, "GANGLINE_INSECURE": 1}
        processes = [
            hosts.start(rank, [sys.executable, SCRIPT], environment(RANK=rank, GANGLINE_TIMELINE=path, **own))
            for rank in range(2)
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    found = advise(str(path))
    assert first(found) == ("communication", "")
    assert "MB/s" in found["verdict"]


def test_a_command_without_a_timeline_is_an_error() -> None:
    command = [sys.executable, "-m", "gangline", "advise", "--", "true"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "wrote no timeline" in done.stderr


def test_a_file_that_is_no_timeline_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{")
    command = [sys.executable, "-m", "gangline", "advise", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is no timeline" in done.stderr

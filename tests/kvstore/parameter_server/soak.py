"""Soak of a scheduler, a server and two workers: exact sums, flat memory and descriptors, a fault every few seconds.

`make soak` runs it; `python -m tests.kvstore.parameter_server.soak --minutes 2` runs a shorter one.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

import gangline
from tests import scripted_faults

NUMEL = 300_000
"""Elements of the key, in shared memory and in more than one shard."""
RATE = 20
"""Rounds a second."""
FAULT_SECONDS = 10
SAMPLE_SECONDS = 2.0
GROWTH = 1.05
"""Memory of the last fifth of the run relative to the second fifth."""
KINDS = (
    "server 0 kill at close",
    "worker 0 break at push-sent",
    "worker 1 kill at push-sent",
    "server 0 stop for 1 s at push-taken",
    "worker 1 repeat at push-sent",
    "server 0 kill at update",
    "worker 1 stop for 1 s at values",
    "worker 0 kill at values",
    "server 0 break at values",
    "worker 0 swap at push-sent",
)
"""Faults in turn; their event number is that of about the round in which they are due."""

ROLES = {"scheduler": "scheduler", "server": "server", "soak": "worker"}
"""Roles by a word of the module that a process runs."""


def script(seconds: float) -> tuple[str, int]:
    """Return the script of a run, and the number of its faults.

    Events are counted from the start of a process, so each fault names the process that runs then.
    """
    faults = []
    started = dict.fromkeys(
        ("server 0", "worker 0", "worker 1"), (0, 0)
    )  # process -> starts before, round of the start
    for number in range(int(seconds // FAULT_SECONDS) - 1):
        now = (number + 1) * FAULT_SECONDS * RATE
        kind = KINDS[number % len(KINDS)]
        process = " ".join(kind.split()[:2])
        again, begin = started[process]
        per_round = 2 if process == "server 0" and "at close" not in kind and "at update" not in kind else 1
        faults.append(f"{kind.replace(process, f'{process}.{again}')} {per_round * (now - begin)}")
        if " kill " in kind:
            started[process] = again + 1, now
    return "; ".join(faults), len(faults)


def gradient(rank: int, step: int) -> int:
    """Return a number whose sums show a push that is lost or counted twice."""
    return 1 + (5 * step + 3 * rank) % 7


def work(rounds: int) -> None:
    """Train as one worker, and check every value that is pulled."""
    torch.set_num_threads(1)
    longest = 0.0
    with gangline.create("dist_sync") as kv:
        out = torch.zeros(NUMEL, dtype=torch.float64)
        kv.init("sum", out)
        kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
        first = kv.first_step
        expected = -sum(gradient(rank, step) for rank in range(kv.num_workers) for step in range(first))
        began, own = time.monotonic(), torch.empty_like(out)
        for step in range(first, rounds):
            time.sleep(max(0.0, began + (step - first) / RATE - time.monotonic()))
            asked = time.monotonic()
            kv.pushpull("sum", own.fill_(gradient(kv.rank, step)), out)
            longest = max(longest, time.monotonic() - asked)
            expected -= sum(gradient(rank, step) for rank in range(kv.num_workers))
            if out.min().item() != expected or out.max().item() != expected:
                raise SystemExit(f"round {step} gave {out.unique().tolist()[:5]}; expected {expected}")
        kv.barrier()
        print(f"worker {kv.rank} ends with {expected}; its longest round took {longest:.2f} s", flush=True)


def usage(mark: bytes) -> dict[str, tuple[int, int]]:
    """Return resident bytes without mapped files, and descriptors, by role, of processes with this environment."""
    found: dict[str, tuple[int, int]] = {}
    for child in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, ValueError, IndexError):
            if mark not in Path(f"/proc/{child}/environ").read_bytes():
                continue
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            module = words[2].split(".") if words[1] == "-m" else []
            role = next((role for word, role in ROLES.items() if word in module), None)
            if role is not None:
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                size = sum(int(size) << 10 for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", rollup, re.M))
                descriptors = len(os.listdir(f"/proc/{child}/fd"))
                before = found.get(role, (0, 0))
                found[role] = before[0] + size, before[1] + descriptors
    return found


def main() -> int:
    """Run the job and print what was seen; return 0 if everything is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the run")
    parser.add_argument("--work", type=int, metavar="ROUNDS", help="be a worker (for internal use)")
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    seconds = 60 * options.minutes
    text, count = script(seconds)
    command = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", "1", "--restart-processes", str(count + 1)]
    command += ["--", sys.executable, "-m", "tests.kvstore.parameter_server.soak", "--work", str(int(seconds * RATE))]
    mark = f"GANGLINE_SOAK={os.getpid()}"
    environment = {**os.environ, **scripted_faults.variables(text), **dict([mark.split("=")])}
    before = set(os.listdir("/dev/shm"))
    output = Path(f"/tmp/gangline-soak-{os.getpid()}.log")
    samples: list[dict[str, tuple[int, int]]] = []
    with output.open("wb") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while job.poll() is None:
                time.sleep(SAMPLE_SECONDS)
                samples.append(usage(mark.encode()))
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
            job.wait()
    lines = output.read_text(errors="replace").splitlines()
    happened = Counter(
        " ".join(found[1].split())
        for line in lines
        if (found := re.search(r"GANGLINE_FAULT: \S+ (?:[\d.]+ )?(.*?) at", line))
    )
    print(f"{sum(happened.values())} of {count} faults happened: {dict(happened)}")
    print(*[line for line in lines if " ends with " in line], sep="\n")
    is_flat = True
    fifth = max(1, len(samples) // 5)
    for role in ROLES.values():
        parts = [[one[role] for one in part if role in one] for part in (samples[fifth : 2 * fifth], samples[-fifth:])]
        early, late = (statistics.median(size for size, _ in part) for part in parts)
        opened, open_late = (statistics.median(descriptors for _, descriptors in part) for part in parts)
        is_flat &= late <= GROWTH * early and open_late <= opened
        print(
            f"all of role {role}: {early / 2**20:.1f} MiB, at the end {late / 2**20:.1f} MiB ({late / early:.3f}); "
            f"{opened:g} descriptors, at the end {open_late:g}"
        )
    left = sorted(set(os.listdir("/dev/shm")) - before)
    print(f"exit code {job.returncode}; left behind: {left or 'nothing'}; output: {output}")
    return int(bool(job.returncode or left or not is_flat or sum(happened.values()) < 0.9 * count))


if __name__ == "__main__":
    sys.exit(main())

"""`gangline bench unequal-hosts`: measured loads of workers beside fixed splits, in a job of `gangline launch`.

Two hosts, which are network namespaces, each run a sshd; host 0 has one slot, host 1 two. Each worker has a CPU quota
of a cgroup. The workers hold a Module with a store for each split, and train an epoch of each in turn.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gangline.bench.driver import hosts
from gangline.bench.driver.harness import in_turn, say
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import RankGroup
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.unequal.slow_process import QuotaProcess, can_set_quota
from gangline.bench.workload.options import Json, Runs
from gangline.kvstore.workload import split_batch
from gangline.usage_error import UsageError
from tests.clusters import sshd

_SLOTS = (1, 2)  # of the hosts
_NEIGHBOUR = 0.2  # of its part of the batch by which the first worker has less or more in a neighbouring split


def unequal_hosts(
    quotas: Annotated[str, typer.Option(help="Part of a core's time for each worker, with commas.")] = "0.9,0.3,0.3",
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, over all workers.", min=3)] = 60,
    batches: Annotated[int, typer.Option(help="Batches in an epoch.", min=2)] = 10,
    runs: Runs = 5,
    json: Json = None,
) -> None:
    """Measure an epoch with "auto" beside the equal split, the split by the quotas and its neighbours, in turn."""
    check_outputs(json)
    if (why := obstacle()) is not None:
        raise UsageError(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are removed
    publish(measure(_parsed(quotas), batch_size, batches, runs), json)


def obstacle() -> str | None:
    """Return why this bench cannot run here, or None."""
    quota = None if can_set_quota() else "this user cannot make cgroups with CPU quotas; run as root"
    return hosts.obstacle() or sshd.missing() or quota


def measure(quotas: Sequence[float], batch_size: int, batches: int, runs: int) -> list[Row]:
    """Measure the epochs of each split; the first row is that of "auto".

    Args:
        quotas: part of a core's time for each worker.
        batch_size: samples over all workers.
        batches: in an epoch.
        runs: epochs of each split that are measured, after three others.
    """
    fixed = {_listed(split): split for split in (*_splits(batch_size, quotas), _counts(batch_size, [1] * len(quotas)))}
    equal = list(fixed)[-1]
    with job("auto", quotas) as group:
        options = {"batch_size": batch_size, "batches": batches}
        for name in ("auto", *fixed):
            say(f"settling: {name}")
            group.prepare({**options, "loads": None if name == "auto" else name.replace(":", ",")}, name)
        say(f"measuring, {runs} runs each, in turn")
        seconds = in_turn({name: partial(group.seconds, 1, name, 0) for name in ("auto", *fixed)}, runs)
        reports = {name: group.report(name) for name in seconds}
    best = min(fixed, key=lambda name: statistics.median(seconds[name]))
    return [
        {
            "who": "auto" if name == "auto" else "equal split" if name == equal else "fixed split",
            "quotas": _listed(quotas),
            "batch_size": batch_size,
            "batches": batches,
            "split": _listed(_counts(batch_size, reports[name][0]["loads"])),
            "seconds": statistics.median(of_split),
            "first_epoch_s": max(report["epochs"][0] for report in reports[name]),
            "epoch_to_best": statistics.median(own / other for own, other in zip(of_split, seconds[best], strict=True)),
            "error": deviation(reports[name][0]["weights"], reports[equal][0]["weights"]),
            **spread(of_split),
        }
        for name, of_split in seconds.items()
    ]


@contextmanager
def job(loads: str, quotas: Sequence[float]) -> Iterator[RankGroup]:
    """Launch a job over two hosts, and set the quotas of its workers when all have joined.

    Args:
        loads: the value of --work-load-list.
        quotas: part of a core's time for each worker.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-")))
        created = stack.enter_context(hosts.Hosts(len(_SLOTS)))
        servers = {
            f"node{index}": stack.enter_context(sshd.Sshd(folder / name, address, ("ip", "netns", "exec", name)))
            for index, (name, address) in enumerate(zip(created.names, created.addresses, strict=True))
        }
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"node{index} slots={slots}\n" for index, slots in enumerate(_SLOTS)))
        words = ["--launcher", "ssh", "--ssh", sshd.ssh_command(folder, servers), "--hostfile", str(hostfile)]
        words += ["-s", "0", "--env", "PYTHONPATH", "--work-load-list", loads]
        candidate = Candidate(
            str(Path(__file__).with_name("host_program")),
            ranks=sum(_SLOTS),
            launcher=(sys.executable, "-m", "gangline", "launch", *words, "--"),
        )
        group = stack.enter_context(RankGroup(candidate, created))
        for pid, quota in zip(group.rank_pids(), quotas, strict=True):
            limited = QuotaProcess(pid)
            stack.callback(limited.close)
            limited.slow_down(1 / quota)
        yield group


def deviation(weights: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]]) -> float:
    """Return the largest absolute difference of two networks' weights."""
    return max(
        abs(own - other) for name, values in expected.items() for own, other in zip(weights[name], values, strict=True)
    )


def _splits(batch_size: int, quotas: Sequence[float]) -> Iterator[list[int]]:
    """Yield the split by the quotas, and those in which the first worker has less and more."""
    for factor in (1, 1 - _NEIGHBOUR, 1 + _NEIGHBOUR):
        yield _counts(batch_size, [quotas[0] * factor, *quotas[1:]])


def _counts(batch_size: int, loads: Sequence[float]) -> list[int]:
    return [part.stop - part.start for part in split_batch(batch_size, loads)]


def _listed(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)


def _parsed(quotas: str) -> list[float]:
    try:
        found = [float(word) for word in quotas.split(",")]
    except ValueError:
        found = []
    if len(found) != sum(_SLOTS) or not all(0.1 <= quota < 1 for quota in found):
        raise UsageError(
            f"--quotas is {quotas!r}; expected {sum(_SLOTS)} numbers from 0.1 to below 1, such as 0.9,0.3,0.3"
        )
    return found

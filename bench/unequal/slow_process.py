"""Slow processes: a real limit of a process's CPU time, by a cgroup's quota or by competing processes on its core."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from gangline.collectives.processes.parent_death import die_with_parent

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_PERIOD = 10_000  # microseconds: several periods are in a training step
_MOST_SHARES, _MOST_WEIGHT = 262_144, 10_000  # of a cgroup, in version 1 and 2
_NICE_STEP = 1.25  # ratio of CPU time between two nice levels


class QuotaProcess:
    """A process in a cgroup of its own that has a CPU quota; versions 1 and 2."""

    name = "cgroup quota"

    def __init__(self, pid: int) -> None:
        """Move a process into a new cgroup without a quota."""
        self._root = _V1 if (_V1 / "cpu.cfs_quota_us").is_file() else _V2
        self._pid = pid
        self._group = self._root / f"gangline-{os.getpid()}-{pid}"
        self._group.mkdir()
        # The quota must be the limit, not the load of other processes.
        name, weight = ("cpu.shares", _MOST_SHARES) if self._root == _V1 else ("cpu.weight", _MOST_WEIGHT)
        (self._group / name).write_text(str(weight))
        (self._group / "cgroup.procs").write_text(str(pid))

    def slow_down(self, factor: float) -> None:
        """Set the quota to one part in ``factor`` of a core."""
        quota = round(_PERIOD / factor)
        if self._root == _V1:
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota if factor > 1 else -1))
        else:
            (self._group / "cpu.max").write_text(f"{quota if factor > 1 else 'max'} {_PERIOD}")

    def close(self) -> None:
        """Move the process out and remove the cgroup."""
        if Path(f"/proc/{self._pid}").exists():
            (self._root / "cgroup.procs").write_text(str(self._pid))
        self._group.rmdir()


class CrowdedProcess:
    """A process that shares its core with busy processes."""

    name = "competing processes"

    def __init__(self, core: int) -> None:
        """Start with no other process; the slow process must be pinned to this core."""
        self._core = core
        self._others: list[subprocess.Popen[bytes]] = []

    def slow_down(self, factor: float) -> None:
        """Start processes whose weight is ``factor`` - 1 times that of the slow one."""
        self.close()
        count = math.ceil(factor - 1)
        for _ in range(count):
            nice = round(-math.log((factor - 1) / count, _NICE_STEP))
            self._others.append(
                subprocess.Popen(
                    [sys.executable, "-c", "while True: pass"],
                    preexec_fn=partial(_begin_competing, os.getpid(), self._core, nice),
                )
            )

    def close(self) -> None:
        """End the other processes."""
        for other in self._others:
            other.kill()
            other.wait()
        self._others = []


SlowProcess = QuotaProcess | CrowdedProcess
"""A process that can be slowed down by a factor."""


def slow_process(pid: int, core: int) -> SlowProcess:
    """Return a process, pinned to a core, that can be slowed down, by a quota if this user may set one."""
    return QuotaProcess(pid) if can_set_quota() else CrowdedProcess(core)


def can_set_quota() -> bool:
    """Return True if this user may create cgroups with CPU quotas."""
    if (_V1 / "cpu.cfs_quota_us").is_file():
        return os.access(_V1 / "cgroup.procs", os.W_OK)
    control = _V2 / "cgroup.subtree_control"
    return control.is_file() and "cpu" in control.read_text().split() and os.access(_V2 / "cgroup.procs", os.W_OK)


def _begin_competing(parent: int, core: int, nice: int) -> None:
    die_with_parent(parent, 9)
    os.sched_setaffinity(0, {core})
    os.nice(nice)

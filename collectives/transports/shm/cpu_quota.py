"""CPU quotas of cgroups, version 1 and 2, as containers have them: fewer cores than a process may run on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_quotas(mount: Path = _MOUNT, own: Path = _OWN) -> dict[str, float]:
    """Return the quotas that bound this process, in cores, by the folders of their cgroups; those of parents count."""
    quotas = {}
    with suppress(OSError):  # a kernel without cgroups
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = PurePosixPath(path)
            for one in (group, *group.parents):  # a container sees its own group as the root
                folder = mount / ("cpu" if controllers else "") / str(one).lstrip("/")
                with suppress(OSError, ValueError):  # no quota: no file, or "max"
                    quota, period = _read(folder)
                    if quota > 0:  # -1: no quota
                        quotas[str(folder)] = quota / period
    return quotas


def are_enough(quotas: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the quotas leave a core to each process; ``quotas`` has the `cpu_quotas` of each."""
    processes = Counter(group for of_process in quotas for group in of_process)
    return all(of_process[group] >= processes[group] for of_process in quotas for group in of_process)


def _read(folder: Path) -> tuple[int, int]:
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = (
            (folder / "cpu.cfs_quota_us").read_text(),
            (folder / "cpu.cfs_period_us").read_text(),
        )
    return int(quota), int(period)

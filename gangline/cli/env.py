"""`gangline env`: describe this installation and machine for a bug report."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gangline.cli.options import JsonFile, write_json
from gangline.cli.variables import VARIABLES

_CORE = ("gangline", "torch", "numpy", "msgpack", "pyzmq", "safetensors", "torchmetrics")
_OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "nccl4py", "pynccl", "s3fs", "tensorboard", "matplotlib")


def env(json: JsonFile = None) -> None:
    """Show versions, devices, shared memory, limits and the launcher, for a bug report."""
    report = _report()
    write_json(json, report)
    if json is not None:
        return
    for section, values in report.items():
        print(section)
        for name, value in values.items():
            print(f"  {name}: {value}")


def _report() -> dict[str, dict[str, Any]]:
    import platform
    import resource

    import psutil
    import torch

    from gangline.collectives.devices.inventory import device_table

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _CORE},
            "torch built for CUDA": torch.version.cuda or "no",
            "NCCL of torch": _nccl_version(),
        },
        "extras": {name: _version(name) for name in _OPTIONAL},
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": len(psutil.Process().cpu_affinity()),
            "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        },
        "devices": {row.context: row.name for row in device_table()},
        "shared memory": {
            "memfd_create": _problem_of_memfd() or "works",
            "cross-memory attach": _problem_of_cma() or "works",
            **_size_of_dev_shm(),
        },
        "limits": {"open files": _limit(descriptors), "locked memory (bytes)": _limit(locked)},
        "launcher": _launcher(),
        "variables": {one.name: os.environ[one.name] for one in VARIABLES if one.name in os.environ} or {"set": "none"},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _limit(bounds: tuple[int, int]) -> str:
    return " of ".join("unlimited" if bound < 0 else str(bound) for bound in bounds)


def _problem_of_memfd() -> str:
    try:
        os.close(os.memfd_create("gangline-env", os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def _problem_of_cma() -> str:
    """Return why a child of this process cannot read this process's memory; "" if it can."""
    import ctypes
    import subprocess
    import sys

    buffer = ctypes.create_string_buffer(b"gangline")
    code = (
        "from gangline.collectives.transports.shm.cma import may_read; "
        f"print(may_read({os.getpid()}, {ctypes.addressof(buffer)}, b'gangline'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    return "" if done.stdout.strip() == "True" else "refused by the kernel (see /proc/sys/kernel/yama/ptrace_scope)"


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available():
        return "not used"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _size_of_dev_shm() -> dict[str, str]:
    import psutil

    folder = "/dev/shm"  # noqa: S108  only its size is read
    return {folder: f"{psutil.disk_usage(folder).total / 2**20:.0f} MiB" if Path(folder).is_dir() else "none"}


def _launcher() -> dict[str, Any]:
    from gangline.collectives.bootstrap.launcher_environment import from_environment

    if "DMLC_ROLE" in os.environ:
        return {"found": f"gangline launch or a DMLC tracker, role {os.environ['DMLC_ROLE']}"}
    try:
        rank = from_environment(os.environ)
    except RuntimeError:
        return {"found": "none"}
    except ValueError as error:
        return {"found": f"incomplete: {error}"}
    return {"found": f"rank {rank.rank} of {rank.size}", "rank 0": f"{rank.host}:{rank.port}"}

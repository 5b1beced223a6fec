"""Topology of this host: the CPUs that a job may use, and the NUMA nodes of GPUs, read from sysfs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations
from pathlib import Path

from gangline.launcher.binding import LOCALHOST, NCCL_MEMCPY, Cpu, Gpu, Host

_SYS = Path("/sys")
_QUERY = "import json; from gangline.launcher.topology import pci_addresses; print(json.dumps(pci_addresses()))"


def read_host(
    gpus: Sequence[int],
    variables: Mapping[str, str],
    addresses: Sequence[str | None] = (),
    *,
    address: str = LOCALHOST,
    slots: int | None = None,
    root: Path = _SYS,
) -> Host:
    """Return this host; for ``address`` and ``slots`` see `Host`. ``root`` is the mount point of sysfs.

    ``gpus`` are indices of GPUs for workers among those visible to this process; empty: workers see all. ``addresses``
    has the PCI address of each visible GPU, as of `gpu_addresses`; empty: not read.
    """
    nodes = [numa_node(where, root) for where in addresses]
    names = _visible_names(gpus, variables.get("CUDA_VISIBLE_DEVICES"))
    found = [Gpu(name, nodes[gpu] if gpu < len(nodes) else None) for gpu, name in zip(gpus, names, strict=True)]
    needs_memcpy = NCCL_MEMCPY not in variables and len(set(names)) != 1 and _lacks_peer_access()
    return Host(address, read_cpus(os.sched_getaffinity(0), root), tuple(found), slots, needs_memcpy)


def read_cpus(allowed: Collection[int], root: Path = _SYS) -> tuple[Cpu, ...]:
    """Return the CPUs with these numbers; a CPU unknown to sysfs is a separate core on node 0."""
    return tuple(_cpu(number, root / "devices" / "system" / "cpu" / f"cpu{number}") for number in sorted(allowed))


def numa_node(address: str | None, root: Path = _SYS) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:3b:00.0"; None if unknown."""
    file = root / "bus" / "pci" / "devices" / (address or "none") / "numa_node"
    node = int(file.read_text()) if file.is_file() else -1
    return node if node >= 0 else None  # the kernel writes -1 for an unknown node


def gpu_addresses() -> list[str | None]:
    """Return the PCI address of each GPU that torch sees, in torch's order; None without NVML.

    The query runs in a subprocess, because torch starts threads.
    """
    asked = subprocess.run([sys.executable, "-c", _QUERY], stdout=subprocess.PIPE, check=True, text=True)  # noqa: S603
    found: list[str | None] = json.loads(asked.stdout)
    return found


def pci_addresses() -> list[str | None]:
    """Return the PCI address of each GPU that torch sees as sysfs writes it, "0000:3b:00.0"; None without NVML."""
    import pynvml
    import torch

    found: list[str | None] = []
    for index in range(torch.cuda.device_count()):
        try:  # by UUID, since NVML numbers all GPUs
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            found.append(pynvml.nvmlDeviceGetPciInfo(handle).busId.lower()[-len("0000:3b:00.0") :])
        except pynvml.NVMLError:
            found.append(None)
    return found


def _lacks_peer_access() -> bool:
    """Return whether a GPU of this host cannot access the memory of another one; False without NVML.

    GPUs hidden from workers count too: NCCL uses `NCCL_MEMCPY` only between GPUs without access.
    """
    import pynvml as nvml  # which makes no CUDA context

    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return any(
            nvml.nvmlDeviceGetP2PStatus(one, other, access) != nvml.NVML_P2P_STATUS_OK
            for one, other in permutations(gpus, 2)
            for access in (0, nvml.NVML_P2P_CAPS_INDEX_WRITE)  # nvidia-ml-py 13.615: NVML_P2P_CAPS_INDEX_READ is (0,)
        )
    except nvml.NVMLError:
        return False


def _cpu(number: int, folder: Path) -> Cpu:
    siblings = folder / "topology" / "thread_siblings_list"
    core = int(siblings.read_text().replace("-", ",").split(",")[0]) if siblings.is_file() else number
    node = next(iter(sorted(folder.glob("node[0-9]*"))), None)
    return Cpu(number, core, int(node.name.removeprefix("node")) if node is not None else 0)


def _visible_names(gpus: Sequence[int], visible: str | None) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for GPUs, given as indices among the visible GPUs."""
    if visible is None:
        return [str(gpu) for gpu in gpus]
    available = [name.strip() for name in visible.split(",") if name.strip()]
    beyond = [gpu for gpu in gpus if gpu >= len(available)]
    if beyond:
        raise ValueError(
            f"GPU {beyond[0]} is not there: CUDA_VISIBLE_DEVICES is {visible!r}, so the GPUs are "
            f"{', '.join(map(str, range(len(available)))) or 'none'}"
        )
    return [available[gpu] for gpu in gpus]

"""`gangline devices`: the devices a user can pick from."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class Device:
    """A row of the table; memory in bytes, None where it is not known or does not apply."""

    context: str
    name: str
    memory_free: int
    memory_total: int
    compute_capability: str | None = None
    display: bool | None = None
    """Whether a monitor hangs on it, whose desktop shares its memory and time."""
    peers: dict[str, str] | None = None
    """The other GPUs, each with the nearest link to it."""


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the devices to train on, with their memory and links."""
    rows = device_table()
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("context", "name", "memory free", "memory total", "capability", "display", "peer links")
    for row in rows:
        display = "" if row.display is None else "yes" if row.display else "no"
        links = ", ".join(f"{peer} {link}" for peer, link in (row.peers or {}).items())
        free, total = f"{row.memory_free / 2**30:.1f} GiB", f"{row.memory_total / 2**30:.1f} GiB"
        table.add_row(row.context, row.name, free, total, row.compute_capability or "", display, links)
    Console().print(table)


def device_table() -> list[Device]:
    """The host, then every GPU that torch sees, in torch's order."""
    import torch

    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return [_host(), *gpus]


def _host() -> Device:
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    memory, info = Path("/proc/meminfo"), Path("/proc/cpuinfo")
    if memory.is_file():  # free pages leave out what the kernel would give back
        fields = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    models = info.read_text().partition("model name")[2].partition("\n")[0] if info.is_file() else ""
    name = models.lstrip("\t :") or platform.processor() or platform.machine()
    return Device("cpu(0)", f"{name}, {os.cpu_count()} cores", free, total)


def _gpu(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    handle = _nvml_handle(index)
    return Device(
        f"gpu({index})",
        properties.name,
        free,
        total,
        f"{properties.major}.{properties.minor}",
        _display(handle),
        {f"gpu({peer})": _link(handle, index, peer) for peer in range(torch.cuda.device_count()) if peer != index},
    )


def _nvml_handle(index: int) -> Any:
    """NVML's handle of torch's GPU, found by UUID, for NVML numbers all GPUs of the machine; None without NVML."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except pynvml.NVMLError:
        return None


def _display(handle: Any) -> bool | None:
    import pynvml

    try:
        return None if handle is None else bool(pynvml.nvmlDeviceGetDisplayMode(handle))
    except pynvml.NVMLError:
        return None


def _link(handle: Any, index: int, peer: int) -> str:
    """NVLink with its lanes, or how far the PCIe path goes."""
    import pynvml
    import torch

    other = _nvml_handle(peer)
    if handle is None or other is None:
        return "P2P" if torch.cuda.can_device_access_peer(index, peer) else "host"
    lanes = sum(_leads_to(handle, lane, other) for lane in range(pynvml.NVML_NVLINK_MAX_LINKS))
    if lanes:
        return f"NV{lanes}"
    try:
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)
    except pynvml.NVMLError:
        return "unknown"
    return _PCIE.get(level, "unknown")


def _leads_to(handle: Any, lane: int, other: Any) -> bool:
    """Whether an active NVLink lane ends at the other GPU, or at a switch, which reaches every GPU."""
    import pynvml

    try:
        if not pynvml.nvmlDeviceGetNvLinkState(handle, lane):
            return False
        if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, lane) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return True
        remote = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, lane)
        return bool(remote.busId == pynvml.nvmlDeviceGetPciInfo(other).busId)
    except pynvml.NVMLError:  # no such lane
        return False


# NVML's topology levels, in the words of `nvidia-smi topo`.
_PCIE = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

"""Table of the devices of this machine: name, memory, compute capability and links."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from gangline.doctor.gpu_links import read_links


@dataclass(frozen=True)
class Device:
    """Row of the table; memory in bytes, None if a value is unknown or does not apply."""

    context: str
    name: str
    memory_free: int
    memory_total: int
    compute_capability: str | None = None
    peers: dict[str, str] | None = None
    """The other GPUs, each with the nearest link to it."""
    peers_gb_per_s: dict[str, float] | None = None
    """Estimated GB/s of the link to each other GPU, in each direction."""
    numa_node: int | None = None


def device_table() -> list[Device]:
    """Return rows for the host and every GPU that torch sees, in torch's order."""
    import torch

    memory, info = psutil.virtual_memory(), Path("/proc/cpuinfo")  # psutil has no CPU name
    models = info.read_text().partition("model name")[2].partition("\n")[0] if info.is_file() else ""
    name = models.lstrip("\t :") or platform.processor() or platform.machine()
    rows = [Device("cpu(0)", f"{name}, {os.cpu_count()} cores", memory.available, memory.total)]
    matrix = read_links()
    for index, (links, node) in enumerate(zip(matrix.links, matrix.numa_nodes, strict=True)):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        peers = {f"gpu({peer})": str(link) for peer, link in enumerate(links) if peer != index}
        speeds = {f"gpu({peer})": link.gb_per_s for peer, link in enumerate(links) if peer != index}
        rows.append(Device(f"gpu({index})", properties.name, free, total, capability, peers, speeds, node))
    return rows

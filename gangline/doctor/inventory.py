"""Table of the devices of this machine: name, memory, compute capability and links."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Device:
    """Row of the table; memory in bytes, None if a value is unknown or does not apply."""

    context: str
    name: str
    memory_free: int
    memory_total: int
    compute_capability: str | None = None
    peers: dict[str, str] | None = None
    """The other GPUs: "P2P" if this one reads their memory, "host" if copies go through the host's."""


def device_table() -> list[Device]:
    """Return rows for the host and every GPU that torch sees, in torch's order."""
    import torch

    memory, info = psutil.virtual_memory(), Path("/proc/cpuinfo")  # psutil has no CPU name
    models = info.read_text().partition("model name")[2].partition("\n")[0] if info.is_file() else ""
    name = models.lstrip("\t :") or platform.processor() or platform.machine()
    rows = [Device("cpu(0)", f"{name}, {os.cpu_count()} cores", memory.available, memory.total)]
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        peers = {
            f"gpu({peer})": "P2P" if torch.cuda.can_device_access_peer(index, peer) else "host"
            for peer in range(count)
            if peer != index
        }
        rows.append(Device(f"gpu({index})", properties.name, free, total, capability, peers))
    return rows

"""Table of the devices of this machine: name, memory, compute capability and links."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from gangline.doctor.gpu_links import LinkMatrix, read_links


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
    matrix = read_links()
    return [_host(), *(_gpu(matrix, index) for index in range(len(matrix)))]


def _host() -> Device:
    memory, info = psutil.virtual_memory(), Path("/proc/cpuinfo")  # psutil has no CPU name
    models = info.read_text().partition("model name")[2].partition("\n")[0] if info.is_file() else ""
    name = models.lstrip("\t :") or platform.processor() or platform.machine()
    return Device("cpu(0)", f"{name}, {os.cpu_count()} cores", memory.available, memory.total)


def _gpu(links: LinkMatrix, index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    peers = {f"gpu({peer})": links.links[index][peer] for peer in range(len(links)) if peer != index}
    return Device(
        f"gpu({index})",
        properties.name,
        free,
        total,
        f"{properties.major}.{properties.minor}",
        {peer: str(link) for peer, link in peers.items()},
        {peer: link.gb_per_s for peer, link in peers.items()},
        links.numa_nodes[index],
    )

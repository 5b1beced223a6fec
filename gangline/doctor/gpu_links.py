"""Links between the GPUs of this machine: a matrix, read through NVML.

A link's bandwidth is an estimate from the hardware's own data: the number of NVLinks times their speed, or the PCIe
bandwidth of the slower GPU times a factor that falls with the length of the path (a rule of thumb: rely on its order,
not on its value). It is the bandwidth of one direction; all links are full duplex.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gangline.launcher.topology import nvml_handle


class LinkKind(Enum):
    """Kind of the link between two GPUs, from near to far; PCIe in the terms of `nvidia-smi topo`."""

    SAME = ("X", 0.0)
    NVLINK = ("NVLINK", 0.0)
    NVSWITCH = ("NVSWITCH", 0.0)
    BOARD = ("same board", 0.85)
    PIX = ("PIX", 0.8)  # one switch
    PXB = ("PXB", 0.75)  # several switches
    PHB = ("PHB", 0.7)  # a host bridge
    NODE = ("NODE", 0.65)  # host bridges of one NUMA node
    SYS = ("SYS", 0.5)  # the link between CPU sockets
    PEER = ("P2P", 0.5)  # one reads the other's memory; NVML does not say how
    HOST = ("host", 0.3)  # the host's memory
    UNKNOWN = ("unknown", 0.3)

    def __init__(self, short: str, pcie_share: float) -> None:
        self.short, self.pcie_share = short, pcie_share
        """Share of the PCIe bandwidth that the path leaves."""
        self.distance = len(type(self).__members__)


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two GPUs."""

    kind: LinkKind
    gb_per_s: float
    """Estimated GB/s (1e9 bytes) in each direction; infinite from a GPU to itself."""
    lanes: int = 0
    """Number of NVLinks: between these two alone, or to the switch, where a GPU's links serve all its peers."""

    def __str__(self) -> str:
        return f"NV{self.lanes}" if self.lanes else self.kind.short


SELF = Link(LinkKind.SAME, math.inf)


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Link between each two GPUs, by torch's indices: ``links[a][b]``, equal to ``links[b][a]``; `SELF` if a is b."""

    links: tuple[tuple[Link, ...], ...] = ()
    numa_nodes: tuple[int | None, ...] = ()
    """NUMA node of the host memory nearest to each GPU; None if unknown."""

    def __len__(self) -> int:
        return len(self.links)


def nvlink(lanes: int, lane_gb_per_s: float = 25.0, *, switched: bool = False) -> Link:
    """Return a link of ``lanes`` NVLinks, direct or through a switch; the default speed is that of NVLink 2 to 4."""
    return Link(LinkKind.NVSWITCH if switched else LinkKind.NVLINK, lanes * lane_gb_per_s, lanes)


def pcie(kind: LinkKind, generation: int, width: int) -> Link:
    """Return a PCIe link; generation (from 1) and width (in lanes) are those of the slower GPU."""
    lane = _PCIE_LANE[min(max(generation, 1), len(_PCIE_LANE)) - 1]
    return Link(kind, round(lane * width * kind.pcie_share, 1))


def read_links() -> LinkMatrix:
    """Return the links between all GPUs that torch sees; empty if there are none.

    Where NVML is not available, the links only tell whether torch reports peer access.
    """
    import torch

    size = torch.cuda.device_count()
    handles = [nvml_handle(index) for index in range(size)]
    if size and None not in handles:
        import pynvml

        return links_by_nvml(pynvml, handles)
    rows = [[_link_by_torch(a, b) for b in range(size)] for a in range(size)]
    rows = [
        [max(rows[a][b], rows[b][a], key=lambda link: link.kind.distance) for b in range(size)] for a in range(size)
    ]
    return LinkMatrix(tuple(map(tuple, rows)), (None,) * size)


def links_by_nvml(nvml: Any, handles: Sequence[Any]) -> LinkMatrix:
    """Return the links between the GPUs with these handles, read from NVML (the module pynvml)."""
    addresses = [nvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
    remotes = [_remote_counts(nvml, handle) for handle in handles]
    speeds = [_lane_speed(nvml, handle) for handle in handles]
    buses = [_bus(nvml, handle) for handle in handles]

    def link(a: int, b: int) -> Link:
        if a == b:
            return SELF
        if lanes := min(remotes[a][addresses[b]], remotes[b][addresses[a]]):
            return nvlink(lanes, min(speeds[a], speeds[b]))
        if lanes := min(remotes[a][_SWITCH], remotes[b][_SWITCH]):
            return nvlink(lanes, min(speeds[a], speeds[b]), switched=True)
        try:
            kind = _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]), LinkKind.UNKNOWN)
        except nvml.NVMLError:
            kind = LinkKind.UNKNOWN
        return min((pcie(kind, *buses[index]) for index in (a, b)), key=lambda path: path.gb_per_s)

    half = {(a, b): link(a, b) for b in range(len(handles)) for a in range(b + 1)}
    return LinkMatrix(
        tuple(tuple(half[min(a, b), max(a, b)] for b in range(len(handles))) for a in range(len(handles))),
        tuple(_numa_node(nvml, handle) for handle in handles),
    )


def _remote_counts(nvml: Any, handle: Any) -> Counter[str]:
    """Return the number of active NVLinks to each PCI address, or to a switch."""
    found: Counter[str] = Counter()
    for lane in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, lane):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, lane) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                found[_SWITCH] += 1
            else:
                found[nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, lane).busId] += 1
        except nvml.NVMLError:  # no such link
            continue
    return found


def _lane_speed(nvml: Any, handle: Any) -> float:
    """Return the GB/s of an NVLink in each direction."""
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    except nvml.NVMLError:
        return 25.0
    known = field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal > 0
    return field.value.uiVal / 1000 if known else 25.0


def _bus(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return the PCIe generation and width that the GPU and its slot allow; idle GPUs run at less."""
    try:
        return nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return 3, 16


def _numa_node(nvml: Any, handle: Any) -> int | None:
    try:
        (nodes,) = nvml.nvmlDeviceGetMemoryAffinity(handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)
    except nvml.NVMLError:
        return None
    return nodes.bit_length() - 1 if nodes.bit_count() == 1 else None


def _link_by_torch(a: int, b: int) -> Link:
    import torch

    if a == b:
        return SELF
    return pcie(LinkKind.PEER if torch.cuda.can_device_access_peer(a, b) else LinkKind.HOST, 3, 16)


_SWITCH = "switch"
_LEVELS = {0: LinkKind.BOARD, 10: LinkKind.PIX, 20: LinkKind.PXB, 30: LinkKind.PHB, 40: LinkKind.NODE, 50: LinkKind.SYS}
"""NVML's topology levels."""
_PCIE_LANE = (0.25, 0.5, 0.985, 1.97, 3.94, 7.56)
"""GB/s of a PCIe lane in each direction, from generation 1."""

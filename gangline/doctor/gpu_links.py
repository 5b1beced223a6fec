"""Links between the GPUs of this machine: a matrix, read through NVML.

A link's bandwidth is an estimate from the hardware's own data: the number of NVLinks times their speed, or the PCIe
bandwidth of the slower GPU times a factor that falls with the length of the path (a rule of thumb: rely on its order,
not on its value). It is the bandwidth of one direction; all links are full duplex.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gangline.launcher.topology import nvml_handle


class LinkKind(Enum):
    """Kind of the link between two GPUs: its name, as in `nvidia-smi topo`, and what share of PCIe the path leaves."""

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


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two GPUs."""

    kind: LinkKind
    gb_per_s: float
    """Estimated GB/s (1e9 bytes) in each direction; infinite from a GPU to itself."""
    lanes: int = 0
    """Number of NVLinks: between these two alone, or to the switch, where a GPU's links serve all its peers."""

    def __str__(self) -> str:
        return f"NV{self.lanes}" if self.lanes else self.kind.value[0]


SELF = Link(LinkKind.SAME, math.inf)
_LANE_SPEED = 25.0  # that of NVLink 2 to 4


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Link between each two GPUs, by torch's indices: ``links[a][b]``, equal to ``links[b][a]``; `SELF` if a is b."""

    links: tuple[tuple[Link, ...], ...] = ()
    numa_nodes: tuple[int | None, ...] = ()
    """NUMA node of the host memory nearest to each GPU; None if unknown."""

    def __len__(self) -> int:
        return len(self.links)


def nvlink(lanes: int, lane_gb_per_s: float = _LANE_SPEED, *, switched: bool = False) -> Link:
    """Return a link of ``lanes`` NVLinks, direct or through a switch."""
    return Link(LinkKind.NVSWITCH if switched else LinkKind.NVLINK, lanes * lane_gb_per_s, lanes)


def pcie(kind: LinkKind, generation: int, width: int) -> Link:
    """Return a PCIe link; generation (from 1) and width (in lanes) are those of the slower GPU."""
    lane = _PCIE_LANE[min(max(generation, 1), len(_PCIE_LANE)) - 1]
    return Link(kind, round(lane * width * kind.value[1], 1))


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

    def link(a: int, b: int) -> Link:
        has_access = all(torch.cuda.can_device_access_peer(*pair) for pair in ((a, b), (b, a)))
        return pcie(LinkKind.PEER if has_access else LinkKind.HOST, 3, 16)

    return LinkMatrix(_both_ways(size, link), (None,) * size)


def links_by_nvml(nvml: Any, handles: Sequence[Any]) -> LinkMatrix:
    """Return the links between the GPUs with these handles, read from NVML (the module pynvml)."""

    def answer(default: Any, query: str, *arguments: Any) -> Any:
        """Return what a query gives, or the default where the GPU or its driver does not support it."""
        with suppress(nvml.NVMLError):
            return getattr(nvml, f"nvmlDeviceGet{query}")(*arguments)
        return default

    def remote(handle: Any, lane: int) -> str:
        """Return the PCI address to which an active NVLink leads, or that of a switch; "" if there is none."""
        if not answer(0, "NvLinkState", handle, lane):
            return ""
        if answer(None, "NvLinkRemoteDeviceType", handle, lane) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        address = answer(None, "NvLinkRemotePciInfo", handle, lane)
        return address.busId if address else ""

    def lane_speed(handle: Any) -> float:
        """Return the GB/s of an NVLink in each direction."""
        field, *_ = answer([None], "FieldValues", handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
        is_known = field and field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal > 0
        return field.value.uiVal / 1000 if is_known else _LANE_SPEED

    addresses = [nvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
    remotes = [Counter(remote(handle, lane) for lane in range(nvml.NVML_NVLINK_MAX_LINKS)) for handle in handles]
    speeds = [lane_speed(handle) for handle in handles]
    buses = [  # what the GPU and its slot allow; idle GPUs run at less
        (answer(3, "MaxPcieLinkGeneration", handle), answer(16, "MaxPcieLinkWidth", handle)) for handle in handles
    ]
    nodes = [answer([0], "MemoryAffinity", handle, 1, nvml.NVML_AFFINITY_SCOPE_NODE)[0] for handle in handles]

    def link(a: int, b: int) -> Link:
        for at_a, at_b in ((addresses[b], addresses[a]), (_SWITCH, _SWITCH)):
            if lanes := min(remotes[a][at_a], remotes[b][at_b]):
                return nvlink(lanes, min(speeds[a], speeds[b]), switched=at_a == _SWITCH)
        kind = _LEVELS.get(answer(None, "TopologyCommonAncestor", handles[a], handles[b]), LinkKind.UNKNOWN)
        return min((pcie(kind, *buses[index]) for index in (a, b)), key=lambda path: path.gb_per_s)

    return LinkMatrix(
        _both_ways(len(handles), link),
        tuple(node.bit_length() - 1 if node.bit_count() == 1 else None for node in nodes),
    )


def _both_ways(size: int, link: Callable[[int, int], Link]) -> tuple[tuple[Link, ...], ...]:
    """Return the link between each two GPUs, found for the lower index and the higher one."""
    half = {(a, b): link(a, b) for b in range(size) for a in range(b)}
    return tuple(tuple(half.get((min(a, b), max(a, b)), SELF) for b in range(size)) for a in range(size))


_SWITCH = "switch"
_LEVELS = {0: LinkKind.BOARD, 10: LinkKind.PIX, 20: LinkKind.PXB, 30: LinkKind.PHB, 40: LinkKind.NODE, 50: LinkKind.SYS}
"""NVML's topology levels."""
_PCIE_LANE = (0.25, 0.5, 0.985, 1.97, 3.94, 7.56)
"""GB/s of a PCIe lane in each direction, from generation 1."""

"""Links between the GPUs of this machine: a matrix, read through NVML, and its table.

A link's bandwidth is an estimate from the hardware's own data: the number of NVLinks times their speed, or the PCIe
bandwidth of the slower GPU times a factor that falls with the length of the path (a rule of thumb: rely on its order,
not on its value). It is the bandwidth of one direction; all links are full duplex.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class LinkKind(IntEnum):
    """Kind of the link between two GPUs, from near to far; PCIe in the terms of `nvidia-smi topo`."""

    SAME = 0
    NVLINK = 1
    NVSWITCH = 2
    BOARD = 3
    PIX = 4
    PXB = 5
    PHB = 6
    NODE = 7
    SYS = 8
    PEER = 9
    HOST = 10
    UNKNOWN = 11


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two GPUs."""

    kind: LinkKind
    gb_per_s: float
    """Estimated GB/s (1e9 bytes) in each direction; infinite from a GPU to itself."""
    lanes: int = 0
    """Number of NVLinks: between these two alone, or to the switch, where a GPU's links serve all its peers."""

    def __str__(self) -> str:
        return f"NV{self.lanes}" if self.lanes else _SHORT[self.kind]


SELF = Link(LinkKind.SAME, math.inf)


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """Link between each two GPUs: ``links[a][b]``, equal to ``links[b][a]``, with `SELF` where a is b.

    Raises:
        ValueError: if the fields have different lengths, or the links are not symmetric.
    """

    gpus: tuple[int, ...] = ()
    """GPUs by torch's index. A GPU may occur twice, with `SELF` between the two."""
    links: tuple[tuple[Link, ...], ...] = ()
    numa_nodes: tuple[int | None, ...] = ()
    """NUMA node of the host memory nearest to each GPU; None if unknown."""

    def __post_init__(self) -> None:
        size = len(self.gpus)
        if not size == len(self.links) == len(self.numa_nodes) or any(len(row) != size for row in self.links):
            raise ValueError(
                f"a matrix for {size} GPUs has {len(self.numa_nodes)} NUMA nodes and rows of "
                f"{[len(row) for row in self.links]} links; expected {size} of each"
            )
        for a, row in enumerate(self.links):
            for b, link in enumerate(row):
                if link != self.links[b][a]:
                    raise ValueError(f"links[{a}][{b}] is {link}, links[{b}][{a}] {self.links[b][a]}; expected one")
                if (link.kind is LinkKind.SAME) != (self.gpus[a] == self.gpus[b]):
                    raise ValueError(f"links[{a}][{b}] is {link} from gpu({self.gpus[a]}) to gpu({self.gpus[b]})")

    def __len__(self) -> int:
        return len(self.gpus)

    def select(self, indices: Sequence[int]) -> LinkMatrix:
        """Return the matrix of the GPUs at these indices, in this order; an index may occur twice."""
        return LinkMatrix(
            tuple(self.gpus[index] for index in indices),
            tuple(tuple(self.links[a][b] for b in indices) for a in indices),
            tuple(self.numa_nodes[index] for index in indices),
        )


def nvlink(lanes: int, lane_gb_per_s: float = 25.0, *, switched: bool = False) -> Link:
    """Return a link of ``lanes`` NVLinks, direct or through a switch; the default speed is that of NVLink 2 to 4."""
    return Link(LinkKind.NVSWITCH if switched else LinkKind.NVLINK, lanes * lane_gb_per_s, lanes)


def pcie(kind: LinkKind, generation: int, width: int) -> Link:
    """Return a PCIe link; generation (from 1) and width (in lanes) are those of the slower GPU."""
    lane = _PCIE_LANE[min(max(generation, 1), len(_PCIE_LANE)) - 1]
    return Link(kind, round(lane * width * _PCIE_SHARE[kind], 1))


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
    rows = [[max(rows[a][b], rows[b][a], key=lambda link: link.kind) for b in range(size)] for a in range(size)]
    return LinkMatrix(tuple(range(size)), tuple(map(tuple, rows)), (None,) * size)


def nvml_handle(index: int) -> Any:
    """Return NVML's handle of torch's GPU, looked up by UUID, since NVML numbers all GPUs; None without NVML."""
    import pynvml
    import torch

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except pynvml.NVMLError:
        return None


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
        tuple(range(len(handles))),
        tuple(tuple(half[min(a, b), max(a, b)] for b in range(len(handles))) for a in range(len(handles))),
        tuple(_numa_node(nvml, handle) for handle in handles),
    )


def matrix_table(matrix: LinkMatrix) -> str:
    """Return the matrix as text in the layout of `nvidia-smi topo -m`, with a legend; "" for fewer than two GPUs."""
    if len(matrix) < 2:
        return ""
    names = [f"gpu({gpu})" for gpu in matrix.gpus]
    nodes = ["" if node is None else str(node) for node in matrix.numa_nodes]
    lines = [["", *names, "NUMA node"]]
    lines += [[name, *map(str, row), node] for name, row, node in zip(names, matrix.links, nodes, strict=True)]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    text = ["".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    links = sorted({link for row in matrix.links for link in row}, key=lambda link: (link.kind, -link.lanes))
    width = max(len(str(link)) for link in links)
    return "\n".join([*text, "", *(f"  {link!s:<{width}}  {_meaning(link)}" for link in links)])


def _meaning(link: Link) -> str:
    words = _MEANING[link.kind].format(lanes=f"{link.lanes} NVLink{'s' if link.lanes > 1 else ''}")
    return words if math.isinf(link.gb_per_s) else f"{words}, about {link.gb_per_s:.0f} GB/s each way"


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
_PCIE_SHARE = {
    LinkKind.BOARD: 0.85,
    LinkKind.PIX: 0.8,
    LinkKind.PXB: 0.75,
    LinkKind.PHB: 0.7,
    LinkKind.NODE: 0.65,
    LinkKind.SYS: 0.5,
    LinkKind.PEER: 0.5,
    LinkKind.HOST: 0.3,
    LinkKind.UNKNOWN: 0.3,
}
_SHORT = {kind: kind.name for kind in LinkKind} | {
    LinkKind.SAME: "X",
    LinkKind.BOARD: "same board",
    LinkKind.PEER: "P2P",
    LinkKind.HOST: "host",
    LinkKind.UNKNOWN: "unknown",
}
_MEANING = {
    LinkKind.SAME: "the GPU itself",
    LinkKind.NVLINK: "{lanes} between the two",
    LinkKind.NVSWITCH: "{lanes} of each to a switch",
    LinkKind.BOARD: "PCIe on one board",
    LinkKind.PIX: "PCIe through one switch",
    LinkKind.PXB: "PCIe through several switches",
    LinkKind.PHB: "PCIe through a host bridge",
    LinkKind.NODE: "PCIe through host bridges of one NUMA node",
    LinkKind.SYS: "PCIe and the link between CPU sockets",
    LinkKind.PEER: "one reads the other's memory; NVML does not say how",
    LinkKind.HOST: "through the host's memory",
    LinkKind.UNKNOWN: "NVML does not say",
}

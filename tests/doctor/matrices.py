"""Link matrices of known machines, in the notation of `nvidia-smi topo -m`, and recorded NVML answers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gangline.doctor.gpu_links import SELF, Link, LinkKind, LinkMatrix, nvlink, pcie


def matrix(rows: str, nodes: Sequence[int | None]) -> LinkMatrix:
    """Parse the rows of a matrix, without the headings."""
    words = [row.split() for row in rows.strip().splitlines()]

    def link(word: str) -> Link:
        if word == "X":
            return SELF
        lanes = word.removeprefix("NV")
        return nvlink(int(lanes)) if lanes != word else pcie(LinkKind[word], 3, 16)

    links = tuple(tuple(map(link, row)) for row in words)
    return LinkMatrix(links, tuple(nodes))


CUBE_MESH = matrix(  # DGX-1 with 8 V100, EC2 p3.16xlarge: 6 NVLinks per GPU, two fully connected quads
    """
    X   NV1 NV1 NV2 NV2 SYS SYS SYS
    NV1 X   NV2 NV1 SYS NV2 SYS SYS
    NV1 NV2 X   NV2 SYS SYS NV1 SYS
    NV2 NV1 NV2 X   SYS SYS SYS NV1
    NV2 SYS SYS SYS X   NV1 NV1 NV2
    SYS NV2 SYS SYS NV1 X   NV2 NV1
    SYS SYS NV1 SYS NV1 NV2 X   NV2
    SYS SYS SYS NV1 NV2 NV1 NV2 X
    """,
    (0, 0, 0, 0, 1, 1, 1, 1),
)
BRIDGE = matrix("X NV4 \n NV4 X", (0, 0))  # 2 A40 joined by a bridge
NONE = LinkMatrix()


class NVMLError(Exception):
    """Stands in for pynvml's class of the same name."""


class RecordedNVML:
    """Recorded NVML answers of a machine with pynvml's interface; a handle is a GPU's index.

    Args:
        lanes: for each GPU, the remote end of each NVLink: a GPU, "switch", "cpu", or None if the link is down.
        levels: NVML's topology level between any two GPUs.
        speed: of an NVLink, in MB/s; 0 if the driver does not report it.
        nodes: for each GPU, a bit mask of its NUMA nodes.
    """

    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_AFFINITY_SCOPE_NODE = 0
    NVML_SUCCESS = 0
    NVMLError = NVMLError

    def __init__(
        self,
        lanes: Sequence[Sequence[int | str | None]],
        levels: Sequence[Sequence[int]],
        speed: int,
        nodes: Sequence[int],
    ) -> None:
        self.lanes, self.levels, self.speed, self.nodes = lanes, levels, speed, nodes

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{gpu + 6:02X}:00.0")

    def nvmlDeviceGetNvLinkState(self, gpu: int, lane: int) -> int:  # noqa: N802
        if lane >= len(self.lanes[gpu]):
            raise NVMLError("Invalid Argument")
        return int(self.lanes[gpu][lane] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, lane: int) -> int:  # noqa: N802
        return {"cpu": 1, "switch": 2}.get(str(self.lanes[gpu][lane]), 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, lane: int) -> Any:  # noqa: N802
        far = self.lanes[gpu][lane]
        return SimpleNamespace(busId="00000004:04:00.0") if far == "cpu" else self.nvmlDeviceGetPciInfo(int(far or 0))

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> Any:  # noqa: N802
        assert fields == [self.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        return [SimpleNamespace(nvmlReturn=0 if self.speed else 3, value=SimpleNamespace(uiVal=self.speed))]

    def nvmlDeviceGetTopologyCommonAncestor(self, gpu: int, other: int) -> int:  # noqa: N802
        return self.levels[gpu][other]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:  # noqa: N802
        return 16 if gpu else 8

    def nvmlDeviceGetMemoryAffinity(self, gpu: int, size: int, scope: int) -> list[int]:  # noqa: N802
        assert (size, scope) == (1, self.NVML_AFFINITY_SCOPE_NODE)
        return [self.nodes[gpu]]

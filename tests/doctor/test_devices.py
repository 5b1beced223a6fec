"""Link matrix: read from recorded NVML answers, checked, and shown by `gangline env`."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gangline.cli.env import show_devices
from gangline.doctor.gpu_links import Link, LinkKind, LinkMatrix, links_by_nvml, nvlink, pcie, read_links
from gangline.doctor.inventory import device_table
from tests.doctor.matrices import BRIDGE, CUBE_MESH, NONE, NVMLError, RecordedNVML

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what is shown where there is no GPU; here is one")
SYS, PHB = 50, 30


def lanes_of(machine: LinkMatrix) -> list[list[int | str | None]]:
    return [[peer for peer, link in enumerate(row) for _ in range(link.lanes)] for row in machine.links]


def levels(size: int, level: int) -> list[list[int]]:
    return [[0 if a == b else level for b in range(size)] for a in range(size)]


class TestNVML:
    def test_nvlinks_between_pairs_are_counted_and_other_pairs_use_pcie(self) -> None:
        nvml = RecordedNVML(lanes_of(CUBE_MESH), levels(8, SYS), 25_000, [1] * 4 + [2] * 4)
        found = links_by_nvml(nvml, range(8))
        narrow = pcie(LinkKind.SYS, 3, 8)  # GPU 0's slot is
        assert found.links[0][5] == found.links[7][0] == narrow
        assert found.links[0][4] == CUBE_MESH.links[0][4] == nvlink(2)
        assert found.links[1:4] == tuple(
            tuple(narrow if link.kind is LinkKind.SYS and not peer else link for peer, link in enumerate(row))
            for row in CUBE_MESH.links[1:4]
        )
        assert found.numa_nodes == (0, 0, 0, 0, 1, 1, 1, 1)

    @pytest.mark.parametrize(
        ("lanes", "level", "speed", "expected"),
        [
            pytest.param([["switch"] * 18] * 8, SYS, 25_000, nvlink(18, switched=True), id="a switch serves all"),
            pytest.param([[1, 1, None, 1], [0, 0, None, None]], PHB, 14_062, nvlink(2, 14.062), id="one is down"),
            pytest.param([["cpu"] * 3, ["cpu"] * 3], SYS, 25_000, pcie(LinkKind.SYS, 3, 8), id="those to a CPU"),
            pytest.param(lanes_of(BRIDGE), PHB, 0, nvlink(4), id="of an unknown speed"),
        ],
    )
    def test_nvlinks(self, lanes: list[list[Any]], level: int, speed: int, expected: Link) -> None:
        size = len(lanes)
        found = links_by_nvml(RecordedNVML(lanes, levels(size, level), speed, [1] * size), range(size))
        assert {found.links[a][b] for a in range(size) for b in range(size) if a != b} == {expected}
        assert found.numa_nodes == (0,) * size

    @pytest.mark.parametrize(
        ("level", "kind"),
        [
            (0, LinkKind.BOARD),
            (10, LinkKind.PIX),
            (20, LinkKind.PXB),
            (30, LinkKind.PHB),
            (40, LinkKind.NODE),
            (50, LinkKind.SYS),
            (60, LinkKind.UNKNOWN),
        ],
    )
    def test_each_level_has_its_kind(self, level: int, kind: LinkKind) -> None:
        nvml = RecordedNVML([[], [], []], levels(3, level), 0, [0] * 3)
        assert links_by_nvml(nvml, range(3)).links[1][2] == pcie(kind, 3, 16)

    @pytest.mark.parametrize(("nodes", "expected"), [(0b1000, 3), (0b11, None), (0, None)])
    def test_a_single_numa_node_is_known(self, nodes: int, expected: int | None) -> None:
        assert links_by_nvml(RecordedNVML([[]], levels(1, SYS), 0, [nodes]), [0]).numa_nodes == (expected,)

    def test_unsupported_nvml_queries_are_left_out(self) -> None:
        class Old(RecordedNVML):
            def refuse(self, *arguments: object) -> None:
                raise NVMLError("Not Supported")

            nvmlDeviceGetFieldValues = nvmlDeviceGetTopologyCommonAncestor = refuse  # noqa: N815
            nvmlDeviceGetMaxPcieLinkGeneration = nvmlDeviceGetMemoryAffinity = refuse  # noqa: N815

        found = links_by_nvml(Old([[1], [0], []], levels(3, PHB), 25_000, [1] * 3), range(3))
        assert found.links[0][1] == nvlink(1)
        assert found.links[1][2] == pcie(LinkKind.UNKNOWN, 3, 16)
        assert found.numa_nodes == (None, None, None)

    @WITHOUT_GPU
    def test_without_a_gpu_the_matrix_is_empty(self) -> None:
        assert read_links() == NONE
        assert len(read_links()) == 0


class TestMatrix:
    @pytest.mark.parametrize(("generation", "ratio"), [(3, 1), (4, 2), (5, 4), (6, 7.7), (9, 7.7)])
    def test_each_known_pcie_generation_doubles_the_bandwidth(self, generation: int, ratio: float) -> None:
        assert pcie(LinkKind.PIX, generation, 16).gb_per_s == pytest.approx(12.6 * ratio, rel=0.01)


class TestShown:
    @pytest.fixture
    def _two_gpus_unknown_to_nvml(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """GPUs as torch reports them; no machine has them, so NVML does not find them."""
        properties = SimpleNamespace(name="Recorded", major=8, minor=6, uuid="0-1-2-3-4")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index << 30, 8 << 30))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one < other)

    @pytest.mark.usefixtures("_two_gpus_unknown_to_nvml")
    def test_links_are_in_the_table_and_in_json(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        show_devices(device_table())
        lines = capsys.readouterr().out.splitlines()
        assert ["gpu(1) host" in line for line in lines if "gpu(0) " in line] == [True, False]
        assert ["gpu(0) host" in line for line in lines if "gpu(1) " in line] == [False, True]
        _, first, second = map(asdict, device_table())
        assert (first["context"], first["peers"], first["numa_node"]) == ("gpu(0)", {"gpu(1)": "host"}, None)
        assert second["peers_gb_per_s"] == {"gpu(0)": 4.7}
        assert second["memory_free"] == 1 << 30

    @pytest.mark.usefixtures("_two_gpus_unknown_to_nvml")
    def test_a_link_unknown_to_nvml_is_as_fast_as_its_slower_direction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert read_links().links[0][1].kind is LinkKind.HOST
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
        assert read_links().links[0][1].kind is LinkKind.PEER

    @WITHOUT_GPU
    def test_without_a_gpu_only_the_host_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        (host,) = device_table()
        assert host.context == "cpu(0)"
        show_devices([host])
        assert capsys.readouterr().out.splitlines()[-1].startswith("└")
        names = ["context", "name", "memory_free", "memory_total"]
        assert [name for name, value in asdict(host).items() if value is not None] == names

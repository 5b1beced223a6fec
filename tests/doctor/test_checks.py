"""Checks of the links between hosts, made of network namespaces, and what is concluded from measurements."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from gangline.doctor import gpus, links
from gangline.doctor.finding import Check, Outcome, Status, findings_of, run
from gangline.doctor.job import job
from gangline.doctor.links import LinkReport, findings_of_links, reach, rounds_of_pairs
from gangline.doctor.this_host import finding_of_nccl
from tests.collectives.firewall import drop_tcp
from tests.collectives.processes import Processes, Rank
from tests.hosts import Hosts, bind_mount, enter, obstacle

HOSTS = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
PORT = 29511
SHAPE = "qdisc add dev eth0 root tbf rate 200mbit burst 128kb latency 50ms"


# Jobs on several hosts


def _check(
    rank: Rank, namespaces: list[str], address: str, limit: float, hosts_files: list[str], checks: list[str]
) -> None:
    enter(namespaces[rank.rank])
    if hosts_files:
        bind_mount(Path(hosts_files[rank.rank]), Path("/etc/hosts"))
    links.CONNECT_SECONDS, links.SEND_SECONDS = 0.5, 0.1
    os.environ |= {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(PORT),
        "GANGLINE_INSECURE": "1",
    }
    rank.tell(job(limit, checks))
    rank.hear()  # rank 0 serves the store until all have ended


def checked(
    hosts: Hosts,
    limit: float = 20,
    *,
    ranks_per_host: int = 1,
    address: str = "",
    hosts_files: Sequence[str] = (),
    checks: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run `job` with ranks on all hosts in turn, and return what it gave on each rank."""
    namespaces = hosts.names * ranks_per_host
    address = address or hosts.addresses[0]
    with Processes(_check, len(namespaces), namespaces, address, limit, hosts_files, checks) as ranks:
        found: list[dict[str, Any]] = ranks.all_heard()
        for rank in range(len(found)):
            ranks.say(rank, "end")
    return found


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found["findings"]}


@HOSTS
def test_hosts_that_reach_each_other_are_measured_and_reduce() -> None:
    with Hosts(2) as hosts:
        found = checked(hosts, ranks_per_host=2, checks=["ports"])
    assert found == [found[0]] * 4
    assert found[0]["has_joined"]
    of_hosts = [one for one in found[0]["findings"] if one["host"]]
    assert [(one["name"], one["host"].split("#")[-1]) for one in of_hosts] == [("ports", "0"), ("ports", "1")]
    lines = by_name(found[0])
    # on a busy machine one direction of the link may be measured as slow
    assert {name: one["status"] for name, one in lines.items() if not name.startswith("link")} == {
        "ports": "ok",
        "rendezvous": "ok",
        "clocks": "ok",
        "all-reduce of the job": "ok",
    }
    assert lines["rendezvous"]["measured"] == "4 ranks on 2 hosts"
    assert lines["all-reduce of the job"]["measured"].startswith("right by ")
    assert [(one["source"], one["target"], one["problem"]) for one in found[0]["links"]] == [(0, 1, ""), (1, 0, "")]
    assert all(one["bytes_per_s"] > 0 and one["latency"] > 0 for one in found[0]["links"])


@pytest.mark.slow
@HOSTS
def test_a_slow_link_is_named() -> None:
    with Hosts(2) as hosts:
        hosts.run(1, ["tc", *SHAPE.split()])
        found = checked(hosts)
    names = {one["from"] for one in found[0]["links"]}
    slow = [one for one in found[0]["findings"] if one["status"] == "slow"]
    assert len(names) == 2
    assert [one["name"] for one in slow] == [f"link {found[0]['links'][1]['from']} to {found[0]['links'][1]['to']}"]
    assert found[0]["links"][1]["source"] == 1
    assert 10e6 < found[0]["links"][1]["bytes_per_s"] < 25e6
    assert "where other links carry" in slow[0]["measured"]
    assert "ethtool" in slow[0]["remedy"]
    assert by_name(found[0])["all-reduce of the job"]["status"] == "ok"


@HOSTS
def test_a_firewall_that_drops_all_but_rank_0s_port_is_named() -> None:
    with Hosts(2) as hosts:
        drop_tcp(hosts, 1, but=PORT)
        found = checked(hosts)
    assert found[0] == found[1]
    broken = [one for one in found[0]["findings"] if one["status"] == "broken"]
    assert [one["name"].split("#")[-1] for one in broken] == ["1", "0"]
    for one, address in zip(broken, reversed(hosts.addresses), strict=True):
        assert one["measured"].startswith(f"timed out: {address}:")
        assert "a firewall drops it" in one["remedy"]
        assert "net.ipv4.ip_local_port_range" in one["remedy"]
    assert by_name(found[0])["all-reduce of the job"]["status"] == "skipped"


@HOSTS
def test_an_address_of_another_host_than_rank_0s_is_named_by_both_ranks() -> None:
    with Hosts(2) as hosts:
        first, second = checked(hosts, 1, address=hosts.addresses[1])
    assert first["findings"][0]["name"] == "rank 0 to itself"
    assert first["findings"][0]["measured"].startswith("this host does not have the address; ")
    assert second["findings"][0]["measured"].startswith(f"refused: {hosts.addresses[1]}:{PORT}")
    assert "nothing listens there" in second["findings"][0]["remedy"]


@pytest.mark.slow
@HOSTS
def test_a_name_that_rank_0_resolves_to_loopback_stands_for_its_address(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        for rank, address in enumerate(("127.0.1.1", hosts.addresses[0])):
            (tmp_path / f"hosts{rank}").write_text(f"127.0.0.1 localhost\n{address} node0.cluster\n")
        first, _ = checked(
            hosts, address="node0.cluster", hosts_files=[str(tmp_path / f"hosts{rank}") for rank in range(2)]
        )
    assert [one for one in first["findings"] if one["status"] == "broken"] == []
    assert [link["address"] for link in first["links"]] == hosts.addresses[::-1]


@pytest.mark.slow
@HOSTS
def test_an_unknown_name_of_rank_0_is_named(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        for rank, line in enumerate((f"{hosts.addresses[0]} node0.cluster", "")):
            (tmp_path / f"hosts{rank}").write_text(f"127.0.0.1 localhost\n{line}\n")
        _, second = checked(
            hosts, 1, address="node0.cluster", hosts_files=[str(tmp_path / f"hosts{rank}") for rank in range(2)]
        )
    assert second["findings"][0]["measured"].startswith("unknown name: node0.cluster")
    assert "/etc/hosts" in second["findings"][0]["remedy"]


def test_an_address_outside_this_host_needs_a_key_or_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGLINE_INSECURE", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "192.0.2.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    (finding,) = job(1)["findings"]
    assert (finding["name"], finding["status"]) == ("job key", "broken")
    assert "GANGLINE_INSECURE=1" in finding["remedy"]


# Links


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_rounds_use_each_host_once_and_each_link_once(count: int) -> None:
    rounds = rounds_of_pairs(count)
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(set(hosts)) == len(hosts)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(permutations(range(count), 2))


def test_a_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = reach(LinkReport(0, 1, "127.0.0.1"), port)
    (finding,) = findings_of_links([link], ["a", "b"])
    assert (finding.status, finding.name) == (Status.BROKEN, "link a to b")
    assert finding.measured == f"refused: 127.0.0.1:{port}"


def reports(rates: dict[tuple[int, int], float], skews: dict[int, float] | None = None) -> list[LinkReport]:
    return [
        LinkReport(source, target, "10.0.0.1", bytes_per_s=rate, latency=50e-6, skew=(skews or {}).get(target, 0.0))
        for (source, target), rate in rates.items()
    ]


def test_a_link_is_compared_with_the_others_and_with_ethernet() -> None:
    rates = dict.fromkeys(permutations(range(3), 2), 1.2e9)
    names = ["a", "b", "c"]
    assert [one.status for one in findings_of_links(reports(rates), names)] == [Status.OK, Status.OK]
    slow, clocks = findings_of_links(reports({**rates, (2, 0): 1.1e8}), names)
    assert (slow.status, slow.name) == (Status.SLOW, "link c to a")
    assert slow.measured == "110.0 MB/s, where other links carry 1200 MB/s"
    assert clocks.measured == "at most 0.0 ms apart"
    first, second, _ = findings_of_links(reports(dict.fromkeys([(0, 1), (1, 0)], 12e6)), names[:2])
    assert first.measured == "12.0 MB/s, less than Gigabit Ethernet carries: gradients of 100 MB take 8 s"
    assert second.name == "link b to a"


def test_a_link_with_late_answers_is_slow() -> None:
    links_of_three = reports(dict.fromkeys(permutations(range(3), 2), 1.2e9))
    links_of_three[0].latency = 2e-3
    slow, _ = findings_of_links(links_of_three, ["a", "b", "c"])
    assert (slow.status, slow.measured) == (Status.SLOW, "a round trip takes 2.0 ms, on other links 0.1 ms")


def test_a_clock_that_differs_is_a_warning() -> None:
    rates = dict.fromkeys(permutations(range(3), 2), 1.2e9)
    *_, clocks = findings_of_links(reports(rates, {1: 0.1, 2: -3.5}), ["a", "b", "c"])
    assert (clocks.status, clocks.measured) == (Status.WARN, "c is 3.5 s behind a")
    assert "time server" in clocks.remedy


# Processes of checks


def test_a_check_that_dies_is_broken_with_its_last_words() -> None:
    checks = [Check("one", "host", "no_such_function"), Check("two", "host", "clock")]
    died, lived = run(checks, 60)
    (finding,) = findings_of(checks[0], died)
    assert (finding.status, finding.name) == (Status.BROKEN, "one")
    assert finding.measured.startswith("exited with code 1: AttributeError: ")
    assert finding.remedy == "run it alone: gangline -v check --only one"
    assert [one.name for one in findings_of(checks[1], lived)] == ["clock"]


# GPUs


@pytest.mark.slow
def test_collectives_of_torch_between_processes() -> None:
    result = gpus.nccl(60, "gloo", 2)
    assert (result["ranks"], result["wrong"]) == (2, [])
    assert result["gb_per_s"] > 0


@pytest.mark.parametrize(
    ("seconds", "is_equal", "has_access", "status", "words"),
    [
        (0.01, True, True, Status.OK, "6.7 GB/s peer to peer"),
        (0.04, True, True, Status.SLOW, "1.7 GB/s peer to peer"),
        (0.01, True, False, Status.SLOW, "6.7 GB/s, no peer-to-peer access"),
        (0.01, False, True, Status.BROKEN, "the copy has other bytes"),
    ],
)
def test_a_copy_between_gpus(seconds: float, is_equal: bool, has_access: bool, status: Status, words: str) -> None:
    finding = gpus.finding_of_copy("gpu(0) to gpu(1)", seconds, is_equal, has_access)
    assert (finding.status, finding.measured) == (status, words)
    assert ("IOMMU" in finding.remedy) == (status != Status.OK)


def reduced(gb_per_s: float, wrong: tuple[int, ...] = ()) -> Outcome:
    return Outcome({"ranks": 2, "gb_per_s": gb_per_s, "wrong": list(wrong), "lacks_peers": False}, "")


LATE = Outcome(None, "did not end within 30 s", is_late=True)


@pytest.mark.parametrize(
    ("outcomes", "status", "words"),
    [
        ({"": Outcome({"ranks": 1}, "")}, Status.SKIPPED, "1 GPU; it needs two"),
        ({"": reduced(10.0)}, Status.OK, "2 GPUs reduce at 10.0 GB/s"),
        (
            {"": reduced(1.9), "NCCL_SHM_USE_CUDA_MEMCPY=1": reduced(12.5)},
            Status.SLOW,
            "export NCCL_SHM_USE_CUDA_MEMCPY=1: with it 12.5 GB/s",
        ),
        (
            {"": LATE, "NCCL_P2P_DISABLE=1": reduced(5.0)},
            Status.BROKEN,
            "export NCCL_P2P_DISABLE=1: with it NCCL reduces at 5.0 GB/s",
        ),
        ({"": reduced(9.0, (1,)), "NCCL_P2P_DISABLE=1": LATE}, Status.BROKEN, "`ulimit -l unlimited`"),
    ],
)
def test_the_setting_with_which_nccl_works_is_named(outcomes: dict[str, Outcome], status: Status, words: str) -> None:
    finding = finding_of_nccl(outcomes)
    assert finding.status == status
    assert words in f"{finding.measured} {finding.remedy}"


def test_two_nccl_libraries_are_a_warning() -> None:
    assert gpus.finding_of_libraries(22_809, 22_809).status == Status.OK
    finding = gpus.finding_of_libraries(22_809, 22_105)
    assert finding.status == Status.WARN
    assert "torch uses 22809, cupy 22105" in finding.measured


@pytest.mark.gpu
def test_gpus_of_this_machine_are_healthy() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch sees none here")
    findings = gpus.gpus()
    count = torch.cuda.device_count()
    libraries = [one for one in findings if one.name == "NCCL library"]  # only where cupy is installed
    assert len(findings) - len(libraries) == count + count * (count - 1)
    assert not [one for one in findings if one.status == Status.BROKEN]
    result = gpus.nccl(60)
    assert result["ranks"] == count
    assert not result.get("wrong")

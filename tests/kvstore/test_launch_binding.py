"""Binding of workers to hosts, GPUs, cores and threads, and the topology that it is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline import num_gpus
from gangline.cli.env import ranges, show_job
from gangline.cli.main import main
from gangline.launcher.binding import Binding, Cpu, Gpu, Host, bind
from gangline.launcher.topology import gpu_addresses, numa_node, read_cpus, read_host
from tests.kvstore.test_launch import launch
from tests.programs import python

TWO_SOCKETS = tuple(Cpu(number, number, number // 4) for number in range(8))
"""Four cores on each of two NUMA nodes."""
HYPERTHREADS = tuple(Cpu(number, number % 4) for number in range(8))
"""CPUs 0 and 4 are one core, 1 and 5, and so on."""


def host(*nodes: int | None, cpus: tuple[Cpu, ...] = TWO_SOCKETS, **options: Any) -> Host:
    """Return a host with a GPU on each of the given NUMA nodes."""
    return Host(cpus=cpus, gpus=tuple(Gpu(str(index), node) for index, node in enumerate(nodes)), **options)


def gpus(bindings: list[Binding]) -> list[str | None]:
    return [binding.environment().get("CUDA_VISIBLE_DEVICES") for binding in bindings]


def cpus(bindings: list[Binding]) -> list[str]:
    return [ranges(binding.cpus) for binding in bindings]


@pytest.mark.parametrize(
    ("workers", "own_gpus", "own_cpus", "threads"),
    [
        (1, ["0,1,2,3"], ["4-7"], 4),
        (2, ["0,2", "1,3"], ["4-7", "0-3"], 4),
        (3, ["0,3", "1", "2"], ["4-5", "0-3", "6-7"], 2),
        (4, ["0", "1", "2", "3"], ["4-5", "0-1", "6-7", "2-3"], 2),
    ],
)
def test_each_worker_has_its_own_gpus_and_cores_of_their_numa_node(
    workers: int, own_gpus: list[str], own_cpus: list[str], threads: int
) -> None:
    found = bind([host(1, 0, 1, 0)], workers)
    assert gpus(found) == own_gpus
    assert cpus(found) == own_cpus
    assert {binding.threads for binding in found} == {threads}


@pytest.mark.parametrize(
    ("nodes", "own"),
    [
        ((None, None), ["0-3", "4-7"]),
        ((0, 0), ["0-1", "2-3"]),
        ((0, None), ["0-3", "4-7"]),
        ((7, 7), ["0-3", "4-7"]),  # a node without CPUs that the job may use
        ((0, 0, 0, 0, 1), ["0", "1", "2", "3", "4-7"]),
        ((0, 0, 0, 0, 0), ["0", "1-2", "3", "4-5", "6-7"]),  # more workers than cores on the node
    ],
)
def test_cores_are_divided_where_nodes_are_unknown_or_have_too_few(
    nodes: tuple[int | None, ...], own: list[str]
) -> None:
    assert cpus(bind([host(*nodes)], len(nodes))) == own


@pytest.mark.parametrize(
    ("workers", "own", "threads"),
    [
        (1, ["0-7"], 4),
        (2, ["0-1,4-5", "2-3,6-7"], 2),
        (3, ["0,4", "1,5", "2-3,6-7"], 1),
        (8, ["0", "4", "1", "5", "2", "6", "3", "7"], 1),
        (9, [""] * 9, 1),  # fewer CPUs than workers
    ],
)
def test_hardware_threads_of_a_core_stay_together(workers: int, own: list[str], threads: int) -> None:
    found = bind([Host(cpus=HYPERTHREADS)], workers)
    assert cpus(found) == own
    assert {binding.threads for binding in found} == {threads}
    assert gpus(found) == [None] * workers


def test_hosts_are_filled_in_turn_up_to_their_slots_and_gpus() -> None:
    hosts = [host(0, slots=2), Host("n2", slots=0), host(0, 0, slots=1), Host("n4")]
    found = bind(hosts, 4)
    assert [(one.node_rank, one.local_rank, one.local_size) for one in found] == [
        (0, 0, 1),
        (2, 0, 1),
        (3, 0, 2),
        (3, 1, 2),
    ]
    assert [one.rank for one in found] == [0, 1, 2, 3]
    assert gpus(found) == ["0", "0,1", None, None]


def test_workers_beyond_the_gpus_are_an_error_unless_they_may_be_idle() -> None:
    hosts = [host(0, 1), Host("n2", slots=1)]
    expected = (
        r"^5 workers for 127.0.0.1 \(GPUs: 0, 1\), n2 \(slots: 1\): each worker needs a GPU and a slot of its own; "
        r"start at most 3 workers, name a GPU twice to share it \(--gpus 0,0\), or leave the other 2 out by "
        r"--idle-surplus$"
    )
    with pytest.raises(ValueError, match=expected):
        bind(hosts, 5)
    assert bind(hosts, 5, idle_surplus=True) == bind(hosts, 3)
    with pytest.raises(ValueError, match="a job has no hosts"):
        bind([], 1)


def test_a_gpu_that_is_named_twice_is_shared() -> None:
    shared = Host(gpus=(Gpu("3"), Gpu("3")))
    assert gpus(bind([shared], 2)) == ["3", "3"]
    assert gpus(bind([shared], 1)) == ["3"]


# Topology


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Return a folder with files as the kernel lays them out: two nodes, hardware threads, two GPUs."""
    for number in range(4):
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology.parent / f"node{number % 2}").mkdir()
        (topology / "thread_siblings_list").write_text(["0,2\n", "1,3\n"][number % 2])
    for address, node in (("0000:3b:00.0", "1\n"), ("0000:af:00.0", "-1\n")):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node)
    return tmp_path


def test_cores_and_nodes_are_read_from_sysfs(sysfs: Path) -> None:
    assert read_cpus({3, 0, 1}, sysfs) == (Cpu(0, 0, 0), Cpu(1, 1, 1), Cpu(3, 1, 1))
    assert read_cpus({64}, sysfs) == (Cpu(64, 64, 0),)
    addresses = ["0000:3b:00.0", "0000:af:00.0", "0000:00:00.0", None]
    assert [numa_node(address, sysfs) for address in addresses] == [1, None, None, None]


def test_gpus_are_numbered_within_those_that_the_launcher_may_see(sysfs: Path) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-77"}
    found = read_host([0, 2], visible, [None, None, "0000:3b:00.0"], root=sysfs)
    assert found.gpus == (Gpu("4"), Gpu("GPU-77", 1))
    assert read_host([1], {}).gpus == (Gpu("1"),)
    with pytest.raises(ValueError, match=r"GPU 2 is not there: CUDA_VISIBLE_DEVICES is '4,5', so the GPUs are 0, 1"):
        read_host([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_the_cpus_of_this_host_are_those_of_this_process() -> None:
    found = read_host([], os.environ)
    assert {cpu.number for cpu in found.cpus} == os.sched_getaffinity(0)
    assert (found.address, found.gpus, found.capacity) == ("127.0.0.1", (), None)


# Commands


def test_the_table_of_a_job_names_each_workers_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    show_job([host(1, 0), Host("n2", slots=1)], 4, idle_surplus=True)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "0 127.0.0.1 0 0 1 4-7 4" in lines
    assert "1 127.0.0.1 1 1 0 0-3 4" in lines
    assert "2 n2 0 any any any" in lines
    assert lines[-1] == "worker 3 is not started: it has no GPU or slot"


def test_a_surplus_worker_is_refused_or_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["gangline", "launch", "-n", "3", "-s", "0", "--gpus", "0,1", "--dry-run", "--work-load-list", "3,1,1"]
    for words, code in ((command, 2), ([*command, "--idle-surplus"], 0)):
        monkeypatch.setattr(sys, "argv", [*words, "true"])
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == code
        if code:
            assert "or leave the other 1 out by --idle-surplus" in capsys.readouterr().err
    out, err = capsys.readouterr()
    assert err == "gangline: worker 2 is not started: there is a GPU for 2 of 3 workers\n"
    assert [line.count("WORLD_SIZE=2 ") for line in out.splitlines()] == [2, 2]  # also LOCAL_WORLD_SIZE
    assert out.count("GANGLINE_WORK_LOAD_LIST=3,1 ") == 2


def test_workers_run_on_the_cores_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = [sys.executable, "-m", "gangline", "env", "-n", "2", "--json", "-"]
    table = json.loads(subprocess.run(asked, capture_output=True, check=True, timeout=50).stdout)
    show = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']]))"
    with launch("-n", "2", "-s", "0", "--", sys.executable, "-c", show) as run:
        code, out, _ = run.end(50)
    assert code == 0
    shown = dict(line.split("] ", 1) for line in out)
    own = sorted(os.sched_getaffinity(0))
    for row in table:
        cores, threads = json.loads(shown[f"[worker {row['rank']}"])
        assert cores == (row["cpus"] or own)
        assert threads == str(row["threads"])
    if len(own) > 1:
        assert not set(table[0]["cpus"]) & set(table[1]["cpus"])


NVML = """
#include <cstdlib>
extern "C" {
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(index + 1L); return 0; }
int nvmlDeviceGetP2PStatus(void *one, void *other, int access, int *status) {
    if (one == other || access > 1) return 2;
    *status = std::atoi(std::getenv("P2P_STATUS"));
    return 0;
}
}
"""
"""Driver library of a host with two GPUs, whose peer access has the status of a variable: 0, or why there is none."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    library = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    words = ["g++", "-shared", "-fPIC", "-x", "c++", "-o", str(library), "-"]
    subprocess.run(words, input=NVML, text=True, check=True)
    return str(library.parent)


@pytest.mark.parametrize(
    ("status", "options", "variables", "shown"),
    [
        ("1", ["-n", "2"], {}, ["1", "1"]),
        pytest.param("1", ["-n", "2"], {"NCCL_SHM_USE_CUDA_MEMCPY": "0"}, ["0", "0"], marks=pytest.mark.slow),
        pytest.param("1", ["-n", "1"], {}, ["None"], marks=pytest.mark.slow),
        ("0", ["-n", "2"], {}, ["None", "None"]),
    ],
)
def test_nccl_of_several_workers_copies_by_engines_where_gpus_lack_peer_access(
    driver: str, status: str, options: list[str], variables: dict[str, str], shown: list[str]
) -> None:
    show = "import os; print(os.environ.get('NCCL_SHM_USE_CUDA_MEMCPY'))"
    words = ("-m", "gangline", "launch", *options, "-s", "0", "--", sys.executable, "-c", show)
    done = python(*words, code=0, LD_LIBRARY_PATH=driver, P2P_STATUS=status, **variables)
    assert sorted(done.stdout.splitlines()) == [f"[worker {rank}] {one}" for rank, one in enumerate(shown)]
    assert done.stderr.count("NCCL_SHM_USE_CUDA_MEMCPY=1 is set") == ("1" in shown)


@pytest.mark.slow
def test_workers_that_share_one_gpu_need_no_copies_of_nccl(driver: str) -> None:
    words = ("-m", "gangline", "launch", "-n", "2", "-s", "0", "--dry-run", "--gpus")
    for gpus, count in (("0,0", 0), ("0,1", 2)):
        done = python(*words, gpus, "true", code=0, LD_LIBRARY_PATH=driver, P2P_STATUS="1")
        assert done.stdout.count("NCCL_SHM_USE_CUDA_MEMCPY=1") == count


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() == 0, reason="needs a GPU")
def test_addresses_of_gpus_are_those_of_sysfs() -> None:
    addresses = gpu_addresses()
    assert len(addresses) == num_gpus()
    assert all(address is None or Path("/sys/bus/pci/devices", address).is_dir() for address in addresses)

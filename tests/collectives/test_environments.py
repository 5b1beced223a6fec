"""Launcher environments: rank, size and address from the variables of each launcher, alone and nested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gangline.collectives import environments
from gangline.collectives.bootstrap.launcher_environment import RankInfo, find_rank_info
from gangline.collectives.environments import registry

ROOT = Path(__file__).parents[2]

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "3405643777"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_STEP_NUM_NODES": "5",
}

MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-77@1", "GANGLINE_SIZE": "3", "MASTER_ADDR": "n1"}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "GANGLINE_SIZE": "4", "HOSTNAME": "my-job-2"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-23_mycluster_1",
}
DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.9",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "3",
    "DMLC_NUM_SERVER": "1",
}
ADDRESS = {"MASTER_ADDR": "n1", "MASTER_PORT": "5000"}


def rank_info(variables: Mapping[str, str]) -> RankInfo:
    return find_rank_info(None, None, None, variables)


def without(variables: Mapping[str, str], missing: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name != missing}


# Variables of launchers


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (1, 4, "10.1.2.3", 29500)),
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, (1, 4, "127.0.0.1", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, (1, 4, "10.1.2.3", 29500)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, (1, 4, "127.0.0.1", 29500)),  # all ranks are on this host: no network
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, "127.0.0.1", 0)),
        (OPEN_MPI | ADDRESS, (2, 4, "n1", 5000)),
        (SLURM | ADDRESS, (3, 8, "n1", 5000)),
        (MPICH | {"MASTER_PORT": "5000"}, (1, 2, "127.0.0.1", 5000)),
        (MPICH | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "5000"}, (1, 2, "n1", 5000)),
        (MVAPICH | ADDRESS, (5, 6, "n1", 5000)),
        (PET, (1, 2, "job-node-0-0.job", 29400)),
        (PET | ADDRESS, (1, 2, "n1", 5000)),
        (KUBERNETES, (2, 4, "my-job-0.my-job", 29500)),
        (KUBERNETES | {"GANGLINE_SERVICE": "svc"}, (2, 4, "my-job-0.svc", 29500)),
        (SKYPILOT | {"MASTER_PORT": "5000"}, (1, 2, "10.0.0.4", 5000)),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, (0, 1, "127.0.0.1", 0)),
        (DMLC | ADDRESS | {"DMLC_WORKER_ID": "2"}, (2, 3, "n1", 5000)),
    ],
)
def test_rank_and_size_are_those_of_the_launcher(
    environment: Mapping[str, str], place: tuple[int, int, str, int]
) -> None:
    assert rank_info(environment) == place


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        *(
            ({"SLURM_STEP_NODELIST": nodes}, host)
            for nodes, host in (
                ("gpu[07-09,12],cpu1", "gpu07"),
                ("cpu1,gpu[07-09]", "cpu1"),
                ("rack[1-2]gpu[3-4]", "rack1gpu3"),
                ("node", "node"),
            )
        ),
        ({"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"}, "10.0.0.9"),  # the launching host
    ],
)
def test_ranks_of_srun_connect_to_the_first_host_of_their_step(changes: dict[str, str], host: str) -> None:
    variables = {name: value for name, value in (SLURM | changes).items() if value}
    assert rank_info(variables)[:3] == (3, 8, host)


INCOMPLETE = [
    *((TORCHRUN, name) for name in TORCHRUN),
    (MVAPICH, "MV2_COMM_WORLD_SIZE"),
    (MPICH, "PMI_SIZE"),
    (PET, "PET_NNODES"),
    (SKYPILOT, "SKYPILOT_NUM_NODES"),
    (DMLC | {"DMLC_WORKER_ID": "0"}, "DMLC_NUM_WORKER"),
    (DMLC, "DMLC_WORKER_ID"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    (SLURM, "SLURM_NTASKS"),
]
"""Variables of launchers, and the one of them that is not set."""


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        *((without(found, name), ValueError, rf"{name}( or \w+)? is not set") for found, name in INCOMPLETE),
        (TORCHRUN | {"RANK": "one"}, ValueError, "RANK is 'one'; expected a whole number, at least 0"),
        (TORCHRUN | {"RANK": "-1"}, ValueError, "RANK is '-1'; expected a whole number, at least 0"),
        (TORCHRUN | {"RANK": "4"}, ValueError, "rank is 4; expected 0 to 3, because the size is 4"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ValueError, "WORLD_SIZE is '0'; expected a whole number, at least 1"),
        (TORCHRUN | {"WORLD_SIZE": "4.0"}, ValueError, "WORLD_SIZE is '4.0'; expected"),
        (TORCHRUN | {"MASTER_PORT": "http"}, ValueError, "MASTER_PORT is 'http'; expected a whole number, 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, ValueError, "MASTER_PORT is '65536'; expected"),
        (TORCHRUN | {"MASTER_PORT": "0"}, ValueError, "MASTER_PORT is '0'; expected"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ValueError, "^MASTER_ADDR is not set"),  # several machines
        (KUBERNETES | {"HOSTNAME": "node-7"}, ValueError, "^MASTER_ADDR is not set"),  # a host's name, not the job's
        (ADDRESS, RuntimeError, r"torchrun, mpirun or srun, .* gangline\.spawn"),
        (
            {"JOB_COMPLETION_INDEX": "2"},
            RuntimeError,
            "JOB_COMPLETION_INDEX is set, but GANGLINE_SIZE, the number of processes, is not",
        ),
        ({"PMIX_RANK": "0"}, RuntimeError, "PMIX_RANK is set, but GANGLINE_SIZE"),
        ({"SLURM_PROCID": "0"}, RuntimeError, "this is a batch script or a shell of Slurm, not a task of srun"),
    ],
)
def test_variables_that_describe_no_rank_are_refused_by_name(
    variables: Mapping[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rank_info(variables)


def test_arguments_override_the_environment() -> None:
    assert find_rank_info(0, 2, "localhost:77", TORCHRUN) == (0, 2, "127.0.0.1", 77)
    assert find_rank_info(0, 2, "[fd00::7]:77", {}) == (0, 2, "fd00::7", 77)
    assert find_rank_info(0, None, None, TORCHRUN) == (0, 4, "10.1.2.3", 29500)
    assert find_rank_info(None, 9, "n1:77", TORCHRUN) == (1, 9, "n1", 77)
    assert find_rank_info(0, 1, None, {}) == (0, 1, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("rank", "size", "address", "error", "text"),
    [
        (2, 2, "localhost:77", ValueError, "rank is 2; expected 0 to 1"),
        (-1, 2, "localhost:77", ValueError, "rank is -1; expected 0 to 1"),
        (0, 0, "localhost:77", ValueError, "size is 0; expected at least 1"),
        (True, 2, "localhost:77", TypeError, "rank is True; expected an int"),
        (0, 2.0, "localhost:77", TypeError, "size is 2.0; expected an int"),
        (0, 2, "localhost", ValueError, "address is 'localhost'; expected HOST:PORT"),
        (0, 2, "localhost:0", ValueError, "address is 'localhost:0'; expected HOST:PORT"),
        (0, 2, None, ValueError, "MASTER_ADDR is not set"),
        (0, None, "localhost:77", RuntimeError, "no launcher has set"),
    ],
)
def test_arguments_are_checked(rank: Any, size: Any, address: str | None, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        find_rank_info(rank, size, address, {})


# Several launchers, one within the other


HYDRA_IN_SLURM = MPICH | SLURM | {"SLURM_PROCID": "0", "MASTER_PORT": "5000"}
"""Slurm's variables are those of the task in which srun started Hydra's proxy."""


@pytest.mark.parametrize(
    ("variables", "names", "rank", "local_rank"),
    [
        (SLURM | {"SLURM_LOCALID": "0"} | TORCHRUN | {"LOCAL_RANK": "1"}, ["torchrun", "Slurm"], 1, 1),
        (SLURM | {"SLURM_LOCALID": "2"} | TORCHRUN, ["torchrun", "Slurm"], 1, 2),  # RANK set by hand in a step
        (SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ["Open MPI", "Slurm"], 2, 1),
        (HYDRA_IN_SLURM, ["MPICH or", "Slurm", "PMI"], 1, 1),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, ["Slurm", "PMI"], 3, 0),  # srun --mpi=pmi2
        (KUBERNETES | PET, ["Kubeflow", "Kubernetes"], 1, 0),
        (KUBERNETES | TORCHRUN | {"LOCAL_RANK": "1"}, ["torchrun", "Kubernetes"], 1, 1),
        (SKYPILOT | OPEN_MPI, ["Open MPI", "SkyPilot"], 2, 0),
        (DMLC | TORCHRUN, ["torchrun", "MXNet"], 1, 0),
        (DMLC | {"DMLC_WORKER_ID": "0"} | KUBERNETES, ["MXNet", "Kubernetes"], 0, 0),
    ],
)
def test_the_innermost_launcher_counts(variables: dict[str, str], names: list[str], rank: int, local_rank: int) -> None:
    found = environments.all_found(variables)
    assert len(found) == len(names)
    assert all(one.name.startswith(name) for one, name in zip(found, names, strict=True)), found
    assert found[0].rank() == rank
    assert environments.local_rank(variables) == local_rank


@pytest.mark.parametrize(
    "variables",
    [
        {},
        without(SLURM, "SLURM_STEP_ID"),  # a batch script
        SLURM | {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "my-job-2"},  # each pod may work for itself
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"},
        DMLC | {"DMLC_NUM_SERVER": "0"},  # neither servers nor a rank
        {"LOCAL_RANK": "0"},
    ],
)
def test_a_process_that_is_no_rank_is_not_taken_for_one(variables: dict[str, str]) -> None:
    assert environments.find(variables) is None
    assert (environments.local_rank(variables), environments.local_size(variables)) == (0, 1)


@pytest.mark.parametrize(
    ("variables", "sizes", "nodes"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}, 2, 1),
        (MVAPICH, 2, None),
        (MPICH, 2, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1,3", "SLURM_NODEID": "1"}, 2, 1),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1,3", "SLURM_NODEID": "3"}, 3, 3),
        (PET, 1, 1),
        (KUBERNETES, 1, 2),
        (SKYPILOT, 1, 1),
    ],
)
def test_sizes_and_numbers_of_hosts_are_those_of_the_launcher(
    variables: dict[str, str], sizes: int, nodes: int | None
) -> None:
    launcher = environments.find(variables)
    assert (launcher.local_size(), launcher.node_rank()) == (sizes, nodes)
    assert environments.local_size(variables) == sizes


def test_ports_come_from_the_job() -> None:
    mpi = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # on one machine
    assert rank_info(mpi).host == "127.0.0.1"
    assert 16384 <= rank_info(mpi).port < 32768
    assert rank_info(mpi | {"OMPI_COMM_WORLD_RANK": "0"}).port == rank_info(mpi).port
    intel = MPICH | {"I_MPI_HYDRA_UUID": "3e2a0000-fee8"}
    for variables, other in (
        (mpi, {"PMIX_NAMESPACE": "3405643778"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (intel, {"I_MPI_HYDRA_UUID": "3e2a0000-fee9"}),
        (PMIX, {"PMIX_NAMESPACE": "prterun-n1-78@1"}),
        (SKYPILOT, {"SKYPILOT_TASK_ID": "sky-2026-11-23_mycluster_2"}),
    ):
        assert rank_info(variables).port != rank_info(variables | other).port


# Environments of others


class Flux(environments.LauncherEnvironment):
    """A launcher that gangline does not know."""

    name = "Flux"
    rank_names = ("FLUX_TASK_RANK",)
    size_names = ("FLUX_JOB_SIZE",)
    local_rank_names = ("FLUX_TASK_LOCAL_ID",)

    def host(self) -> str | None:
        return self.variables.get("MY_FIRST_HOST")


FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}


def test_a_registered_environment_comes_before_engines_and_after_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_own", [])
    assert environments.register(Flux) is Flux
    variables = FLUX | SLURM | {"MY_FIRST_HOST": "n7", "MASTER_PORT": "5000"}
    assert rank_info(variables) == (1, 2, "n7", 5000)
    assert environments.local_rank(variables) == 1
    assert rank_info(variables | TORCHRUN)[:2] == (1, 4)
    with pytest.raises(ValueError, match="named 'Flux' is registered already"):
        environments.register(Flux)


def test_only_named_environments_are_registered() -> None:
    with pytest.raises(TypeError, match=r"the argument of register\(\) is <class 'int'>; expected a subclass"):
        environments.register(int)
    with pytest.raises(ValueError, match="has no name"):
        environments.register(type("Nameless", (environments.LauncherEnvironment,), {}))


SHOW = """
import json, os
from gangline.collectives import environments
found = environments.all_found()
first = found[0]
line = [[one.name.split(" (")[0] for one in found], first.rank(), first.size(), environments.local_rank()]
os.write(1, (json.dumps([*line, environments.local_size()]) + chr(10)).encode())
"""


def shown(command: list[str], variables: Mapping[str, str] = os.environ) -> list[Any]:
    """Run a launcher's command with the program `SHOW`; return what its ranks print, by rank."""
    environment = {**variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line[1])


PLUGIN = """
from gangline.collectives import environments

class Grid(environments.LauncherEnvironment):
    name = "Grid (GRID_TASK)"
    rank_names = ("GRID_TASK",)
    size_names = ("GRID_TASKS",)
"""


def install(folder: Path, package: str, entry_point: str) -> Path:
    """Write what pip installs of a package with an entry point; return the file of entry points."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[gangline.environments]\ngrid = {entry_point}\n")
    return info / "entry_points.txt"


def test_an_installed_package_adds_an_environment_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "gangline_grid.py").write_text(PLUGIN)
    install(tmp_path, "gangline_grid", "gangline_grid:Grid")
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{SHOW}"
    grid = {**os.environ, "GRID_TASK": "4", "GRID_TASKS": "7"}
    assert shown([sys.executable, "-c", program], grid) == [[["Grid"], 4, 7, 0, 1]]
    nested = grid | SLURM | {"LOCAL_RANK": "3"} | TORCHRUN
    names = [["torchrun, gangline launch or by hand", "Grid", "Slurm"], 1, 4, 3, 1]
    assert shown([sys.executable, "-c", program], nested) == [names]


def test_a_broken_entry_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points = install(tmp_path, "broken", "gangline_nowhere:Grid")
    monkeypatch.syspath_prepend(tmp_path)
    registry._of_entry_points.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"grid = gangline_nowhere:Grid of broken .* cannot be imported"):
            environments.find({})
        assert environments.find(TORCHRUN) is not None  # not needed for it
        entry_points.write_text("[gangline.environments]\ngrid = json:dumps\n")
        with pytest.raises(TypeError, match=r"json:dumps of broken .* expected a subclass of .*\.LauncherEnvironment"):
            environments.find({})
    finally:
        registry._of_entry_points.cache_clear()


# Launchers that are installed here


@pytest.mark.slow
def test_ranks_of_torchrun_within_open_mpi_are_torchruns() -> None:
    mpirun = _found(shutil.which("mpirun.openmpi"), "apt-get install openmpi-bin")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--oversubscribe", "--bind-to", "none"]
    program = [sys.executable, "-c", SHOW]
    ranks = shown([mpirun, "-n", "2", *options, *program], {**os.environ, **as_root})
    assert ranks == [[["Open MPI"], rank, 2, rank, 2] for rank in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    ranks = shown([mpirun, "-n", "1", *options, *torchrun, *program], {**os.environ, **as_root})
    assert ranks == [[["torchrun, gangline launch or by hand", "Open MPI"], rank, 2, rank, 2] for rank in range(2)]


@pytest.mark.parametrize(("peer", "command"), [("mpich", "mpiexec"), ("impi", "mpiexec.hydra")])
def test_ranks_of_hydra_are_found(peer: str, command: str) -> None:
    mpiexec = _found(shutil.which(command, path=str(ROOT / ".peers" / peer / "bin")), "make peers")
    ranks = shown([mpiexec, "-n", "2", sys.executable, "-c", SHOW])
    assert ranks == [[["MPICH or Intel MPI", "PMI"], rank, 2, rank, 2] for rank in range(2)]


def _found(path: str | None, remedy: str) -> str:
    if path is None:
        pytest.skip(f"it is not installed: {remedy}")
    return path

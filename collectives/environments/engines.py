"""The launchers that gangline knows: torchrun, DMLC trackers, MPI, Slurm, Kubernetes and SkyPilot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from gangline.collectives.environments.environment import LauncherEnvironment, port_from

_RESERVED_STEP = 0xFFFFFFF0
"""First id of Slurm's own steps: batch script, interactive shell, external processes."""
_KUBERNETES_PORT = 29500
"""Port of rank 0 in its pod, which has a separate address; torchrun's default."""


def _engine(name: str, **variables: str) -> type[LauncherEnvironment]:
    """Return the environment of a launcher; if its ranks are numbers of hosts, it starts one process on each.

    ``variables`` are names for `LauncherEnvironment`'s attribute NAME_names, separated by spaces.
    """
    names = {f"{kind}_names": tuple(words.split()) for kind, words in variables.items()}
    is_alone = variables.get("node_rank") == variables["rank"]
    attributes = {"__module__": __name__, "name": name, "is_alone_on_host": is_alone, **names}
    return cast("type[LauncherEnvironment]", type(name, (LauncherEnvironment,), attributes))


class Dmlc(LauncherEnvironment):
    """DMLC_* variables of MXNet's launcher: a job with a scheduler and servers.

    The scheduler assigns a rank to a worker without DMLC_WORKER_ID.
    """

    name = "MXNet's launcher or by hand (DMLC_*)"
    rank_names = ("DMLC_WORKER_ID",)
    size_names = ("DMLC_NUM_WORKER",)

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the process has a role in a job with servers, or a rank."""
        has_role = "DMLC_ROLE" in variables or "DMLC_PS_ROOT_URI" in variables
        return has_role and (variables.get("DMLC_NUM_SERVER") != "0" or "DMLC_WORKER_ID" in variables)

    def rank(self) -> int:  # noqa: D102  inherited
        if "DMLC_WORKER_ID" not in self.variables:
            raise ValueError(
                "DMLC_WORKER_ID is not set, so the scheduler assigns this worker's rank; for collectives set it to a "
                "number from 0 on each worker, with MASTER_ADDR and MASTER_PORT, the address of worker 0"
            )
        return super().rank()

    @classmethod
    def has_servers(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the process has a role in a job with servers."""
        return cls.detect(variables) and variables.get("DMLC_NUM_SERVER") != "0"


class Slurm(LauncherEnvironment):
    """Tasks of a step of Slurm, which srun starts."""

    name = "Slurm (SLURM_PROCID)"
    rank_names = ("SLURM_PROCID",)
    size_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank_names = ("SLURM_LOCALID",)
    node_rank_names = ("SLURM_NODEID",)

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True in a task of srun; a batch script and an interactive shell have a SLURM_PROCID, but no task."""
        step = variables.get("SLURM_STEP_ID", "")
        return "SLURM_PROCID" in variables and step.isdecimal() and int(step) < _RESERVED_STEP

    def local_size(self) -> int | None:
        """Return this host's entry of SLURM_STEP_TASKS_PER_NODE, such as "2(x3),1"."""
        words, node = self.variables.get("SLURM_STEP_TASKS_PER_NODE", ""), self.node_rank()
        counts: list[int] = []
        for word in words.split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
            counts += [int(match[1])] * int(match[2] or 1) if match is not None else []
        return counts[node] if node is not None and node < len(counts) else None

    def host(self) -> str | None:
        """Return the first host of the step, where Slurm starts task 0: gpu07 of "gpu[07-09,12],cpu1"."""
        hosts = self.variables.get("SLURM_STEP_NODELIST") or self.variables.get("SLURM_JOB_NODELIST")
        if not hosts:
            return self.variables.get("SLURM_LAUNCH_NODE_IPADDR")
        first = re.match(r"(?:[^,\[]|\[[^]]*\])+", hosts)  # up to a comma outside brackets
        return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group()) if first is not None else None

    def port(self) -> int | None:  # noqa: D102  inherited
        return port_from(self.variables.get("SLURM_JOB_ID"), self.variables.get("SLURM_STEP_ID"))

    def is_on_one_host(self, size: int) -> bool:  # noqa: D102  inherited
        nodes = self.variables.get("SLURM_STEP_NUM_NODES", self.variables.get("SLURM_NNODES"))
        return nodes == "1" or super().is_on_one_host(size)


class Kubernetes(LauncherEnvironment):
    """An indexed Job of Kubernetes with a headless Service, one process a pod.

    Kubernetes sets JOB_COMPLETION_INDEX, but not the number of pods: set GANGLINE_SIZE to the Job's completions.
    Without it, each pod works for itself. GANGLINE_SERVICE names the Service (the pods' subdomain) if its name is not
    that of the Job.
    """

    name = "Kubernetes indexed Job (JOB_COMPLETION_INDEX, GANGLINE_SIZE)"
    rank_names = node_rank_names = ("JOB_COMPLETION_INDEX",)
    size_names = ("GANGLINE_SIZE",)
    required_names = ("JOB_COMPLETION_INDEX", "GANGLINE_SIZE")
    is_alone_on_host = True

    def host(self) -> str | None:
        """Return the name of pod 0, JOB-0.SERVICE; the host name of this pod is JOB-INDEX."""
        job, dash, index = self.variables.get("HOSTNAME", "").rpartition("-")
        if not dash or index != self.variables["JOB_COMPLETION_INDEX"]:
            return None
        return f"{job}-0.{self.variables.get('GANGLINE_SERVICE') or job}"

    def port(self) -> int | None:  # noqa: D102  inherited
        return _KUBERNETES_PORT


Torchrun = _engine(  # or Ray Train, Kubeflow
    "torchrun, gangline launch or by hand (RANK, WORLD_SIZE)",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK NODE_RANK",
)
_PMI = {
    "size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID PMI_LOCAL_RANK",
    "local_size": "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
}

BY_HAND: tuple[type[LauncherEnvironment], ...] = (Torchrun, Dmlc)
"""Environments that may be set by hand: these come before all others."""
ENGINES: tuple[type[LauncherEnvironment], ...] = (
    _engine(  # mpirun starts its daemons by srun, so its ranks have variables of Slurm
        "Open MPI (OMPI_COMM_WORLD_RANK)",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    ),
    _engine(
        "MVAPICH (MV2_COMM_WORLD_RANK)",
        rank="MV2_COMM_WORLD_RANK MVP_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE MVP_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE MVP_COMM_WORLD_LOCAL_SIZE",
    ),
    _engine(  # Hydra, which starts its proxies by srun in a job of Slurm; srun sets PMI's variables but MPI_LOCALRANKID
        "MPICH or Intel MPI (PMI_RANK, MPI_LOCALRANKID)",
        rank="PMI_RANK",
        required="PMI_RANK MPI_LOCALRANKID",
        job="I_MPI_HYDRA_UUID",  # MPICH does not number its jobs
        **_PMI,
    ),
    Slurm,
    _engine("PMI (PMI_RANK, PMI_SIZE)", rank="PMI_RANK", **_PMI),  # such as the process manager of Cray systems
    _engine(  # prterun and prun set no size; what another PMIx program starts has no GANGLINE_SIZE and is not a rank
        "PMIx (PMIX_RANK, GANGLINE_SIZE)",
        rank="PMIX_RANK",
        size="GANGLINE_SIZE",
        required="PMIX_RANK GANGLINE_SIZE",
        job="PMIX_NAMESPACE",
    ),
    # The others number hosts: a launcher within a host comes before them.
    _engine(  # Kubeflow Trainer configures torchrun by them; here the program was started without it, once in each pod
        "Kubeflow (PET_NODE_RANK, PET_NNODES)",
        rank="PET_NODE_RANK",
        size="PET_NNODES",
        node_rank="PET_NODE_RANK",
        required="PET_NODE_RANK",
        host="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
    ),
    _engine(
        "SkyPilot (SKYPILOT_NODE_RANK)",
        rank="SKYPILOT_NODE_RANK",
        size="SKYPILOT_NUM_NODES",
        node_rank="SKYPILOT_NODE_RANK",
        host="SKYPILOT_NODE_IPS",
        job="SKYPILOT_TASK_ID",
    ),
    Kubernetes,
)
"""Environments of engines, the innermost first."""

"""The launchers that gangline knows: torchrun, DMLC trackers, MPI, Slurm, Kubernetes and SkyPilot."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gangline.collectives.environments.environment import LauncherEnvironment, number, port_from

_RESERVED_STEP = 0xFFFFFFF0
"""First id of Slurm's own steps: batch script, interactive shell, external processes."""
_KUBERNETES_PORT = 29500
"""Port of rank 0 in its pod, which has a separate address; torchrun's default."""


class Torchrun(LauncherEnvironment):
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: torchrun, gangline launch, Ray Train, Kubeflow, or set by hand."""

    name = "torchrun, gangline launch or by hand (RANK, WORLD_SIZE)"
    rank_names = ("RANK",)
    size_names = ("WORLD_SIZE",)
    local_rank_names = ("LOCAL_RANK",)
    local_size_names = ("LOCAL_WORLD_SIZE",)
    node_rank_names = ("GROUP_RANK", "NODE_RANK")


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

    def size(self) -> int:  # noqa: D102  inherited
        if "DMLC_NUM_WORKER" not in self.variables:
            raise ValueError("DMLC_NUM_WORKER is not set; expected the number of workers, as gangline launch sets it")
        return super().size()

    @classmethod
    def has_servers(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the process has a role in a job with servers."""
        return cls.detect(variables) and variables.get("DMLC_NUM_SERVER") != "0"


class OpenMpi(LauncherEnvironment):
    """Open MPI's mpirun."""

    name = "Open MPI (OMPI_COMM_WORLD_RANK)"
    rank_names = ("OMPI_COMM_WORLD_RANK",)
    size_names = ("OMPI_COMM_WORLD_SIZE",)
    local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK",)
    local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    job_names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class Mvapich(LauncherEnvironment):
    """MVAPICH's mpirun_rsh and mpiexec."""

    name = "MVAPICH (MV2_COMM_WORLD_RANK)"
    rank_names = ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK")
    size_names = ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE")
    local_rank_names = ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK")
    local_size_names = ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE")


class Pmi(LauncherEnvironment):
    """A process manager that speaks PMI, such as that of Cray systems."""

    name = "PMI (PMI_RANK, PMI_SIZE)"
    rank_names = ("PMI_RANK",)
    size_names = ("PMI_SIZE",)
    local_rank_names = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_size_names = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


class Mpich(Pmi):
    """Hydra, the mpiexec of MPICH and Intel MPI, which sets MPI_LOCALRANKID beside PMI's variables; srun does not.

    Within a Slurm job Hydra starts its proxies by srun, so that its ranks have SLURM_PROCID of their proxy.
    """

    name = "MPICH or Intel MPI (PMI_RANK, MPI_LOCALRANKID)"
    job_names = ("I_MPI_HYDRA_UUID",)  # MPICH does not number its jobs

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:  # noqa: D102  inherited
        return "MPI_LOCALRANKID" in variables and super().detect(variables)


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


class Pmix(LauncherEnvironment):
    """PMIx's prterun and prun, which set no number of processes: GANGLINE_SIZE gives it.

    A process that another PMIx program starts has no GANGLINE_SIZE and is not a rank.
    """

    name = "PMIx (PMIX_RANK, GANGLINE_SIZE)"
    rank_names = ("PMIX_RANK",)
    size_names = ("GANGLINE_SIZE",)
    required_names = ("PMIX_RANK", "GANGLINE_SIZE")
    job_names = ("PMIX_NAMESPACE",)


class Pet(LauncherEnvironment):
    """PET_* variables, by which Kubeflow Trainer configures torchrun; here the program was started without torchrun.

    Each pod then runs one process.
    """

    name = "Kubeflow (PET_NODE_RANK, PET_NNODES)"
    rank_names = node_rank_names = ("PET_NODE_RANK",)
    size_names = ("PET_NNODES",)
    required_names = ("PET_NODE_RANK",)
    is_alone_on_host = True

    def host(self) -> str | None:  # noqa: D102  inherited
        return self.variables.get("PET_MASTER_ADDR")

    def port(self) -> int | None:  # noqa: D102  inherited
        name = "PET_MASTER_PORT"
        return number(self.variables, name, 1, 65535) if self.variables.get(name) else None


class SkyPilot(LauncherEnvironment):
    """A SkyPilot task, whose command runs once on each node."""

    name = "SkyPilot (SKYPILOT_NODE_RANK)"
    rank_names = node_rank_names = ("SKYPILOT_NODE_RANK",)
    size_names = ("SKYPILOT_NUM_NODES",)
    is_alone_on_host = True
    job_names = ("SKYPILOT_TASK_ID",)

    def host(self) -> str | None:
        """Return the first of SKYPILOT_NODE_IPS, which has one address a line."""
        return next(iter(self.variables.get("SKYPILOT_NODE_IPS", "").split()), None)


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


BY_HAND: tuple[type[LauncherEnvironment], ...] = (Torchrun, Dmlc)
"""Environments that may be set by hand: these come before all others."""
ENGINES: tuple[type[LauncherEnvironment], ...] = (
    OpenMpi,  # mpirun starts its daemons by srun, so its ranks have variables of Slurm
    Mvapich,
    Mpich,
    Slurm,
    Pmi,  # srun sets PMI's variables too
    Pmix,
    Pet,  # the others number hosts: a launcher within a host comes before them
    SkyPilot,
    Kubernetes,
)
"""Environments of engines, the innermost first."""

"""Installed peers, their interpreters, and the settings in which they and gangline are tried."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import gangline
from gangline.bench.driver.harness import say
from gangline.bench.driver.hosts import Hosts
from gangline.bench.driver.processes import Candidate
from gangline.bench.driver.rank_group import GroupError, RankGroup
from gangline.usage_error import UsageError

_ROOT = Path(gangline.__file__).resolve().parent.parent

PEERS = ("mxnet", "torch", "ddp", "gloo", "mpi")
"""torch is plain torch code, ddp torch's DistributedDataParallel, gloo torch.distributed, mpi the fastest of Open MPI,
MPICH and Intel MPI. MXNet and each MPI have their own virtual environments."""
_OF_BENCH = {
    "backend": ("gloo", "mpi"),
    "kvstore": ("mxnet", "torch"),
    "parameter_server": ("mxnet",),
    "ranks": ("gloo", "mpi"),
    "training": ("mxnet", "torch", "ddp"),
}
"""The peers of each folder of bench/peers; an MPI has its program in ranks/ for both benches."""


def available_peers(names: str, bench: str, *, on_gpus: bool = False, among: Sequence[str] = PEERS) -> list[str]:
    """Return the peers that can run here; report on stderr why each of the others is skipped.

    Args:
        names: value of ``--peers``, with commas, such as "mxnet,torch"; empty: none.
        bench: folder of bench/peers.
        on_gpus: the bench runs on GPUs.
        among: the peers that the bench can measure.

    Raises:
        ValueError: if a name is unknown.
    """
    found = []
    for name in dict.fromkeys(word.strip() for word in names.split(",") if word.strip()):
        if name not in PEERS:
            raise UsageError(f"--peers has {name!r}; expected names out of {', '.join(PEERS)}")
        reason = _why_not(name, bench, on_gpus) if name in among else "it is not measured with --workers"
        if reason is None:
            found.append(name)
        else:
            say(f"skipping {name}: {reason}")
    return found


def interpreter(peer: str) -> Path | None:
    """Return the Python that a peer needs; None: this one."""
    return _python_of("mxnet") if peer == "mxnet" else None


def _why_not(peer: str, bench: str, on_gpus: bool) -> str | None:
    if peer not in _OF_BENCH[bench]:
        return f"it does not take part in the {bench} bench"
    if on_gpus and peer != "torch":
        return "it is measured on CPU contexts only; leave --gpus out"
    if peer == "mpi" and not _mpi(1):
        return (
            "none of .peers/mpi, .peers/mpich and .peers/impi exists; install them with `make peers` (Open MPI after "
            "`apt-get install openmpi-bin libopenmpi-dev`)"
        )
    python = interpreter(peer)
    if python is not None and not python.exists():
        return f"{python} does not exist; install it with `make peers`"
    return None


def single_process(who: str, bench: str, stores: Sequence[str] = ()) -> list[Candidate]:
    """Return the settings in which a program of one process is tried.

    Args:
        who: a peer's name, or "gangline".
        bench: folder of bench/peers.
        stores: kinds of MXNet's store to try with each setting; empty: the bench names the store.
    """
    cores = os.cpu_count() or 1
    environments = [{"OMP_NUM_THREADS": str(threads)} for threads in _powers_of_two(cores)]
    options: list[dict[str, str]] = [{}]
    if who == "mxnet":
        options = [{"store": store} for store in stores] or [{}]
        environments = [
            {"MXNET_CPU_WORKER_NTHREADS": str(workers), "OMP_NUM_THREADS": str(threads)}
            for workers in (1, 2, 4)
            for threads in (1, 2)
        ]
    return [
        _named(Candidate(f"{bench}/{who}", env=env, options=more, interpreter=interpreter(who)))
        for env in environments
        for more in options
    ]


def ddp(ranks: int) -> list[Candidate]:
    """Return the settings in which DDP is tried with ``ranks`` ranks."""
    cores = os.cpu_count() or 1
    threads = [count for count in _powers_of_two(cores) if count * 2 <= max(cores, 2)]
    named = [_named(Candidate("training/torch", ranks, env={"OMP_NUM_THREADS": str(count)})) for count in threads]
    return [replace(candidate, env={**candidate.env, "BENCH_BACKEND": "gloo"}) for candidate in named]


def collective_ranks(who: str, ranks: int, bench: str = "ranks") -> list[Candidate]:
    """Return the settings in which ranks of a collective are tried.

    Args:
        who: "gangline", "gloo" or "mpi".
        ranks: number of ranks; with fewer cores than ranks, no rank is bound to a core.
        bench: folder of bench/peers.
    """
    if who == "mpi":
        return _mpi(ranks)
    if who == "gangline":
        threads = max(1, (os.cpu_count() or 1) // ranks)
        return [Candidate(f"{bench}/gangline", ranks, env={"OMP_NUM_THREADS": str(threads)})]
    return [_named(Candidate(f"{bench}/gloo", ranks, env={"OMP_NUM_THREADS": "1"}))]


def peer_groups(
    stack: ExitStack, peer: str, ranks: int, bench: str = "ranks", hosts: Hosts | None = None
) -> list[RankGroup]:
    """Start a peer's groups, one per setting; none, with the reason on stderr, if the peer cannot be started."""
    if hosts is not None and peer != "gloo":
        say(f"skipping {peer}: it is measured on one host only")
        return []
    interface = {} if hosts is None else {"GLOO_SOCKET_IFNAME": "eth0"}
    candidates = [replace(each, env={**each.env, **interface}) for each in collective_ranks(peer, ranks, bench)]
    return started(stack, peer, candidates, hosts)


def started(
    stack: ExitStack, peer: str, candidates: Sequence[Candidate], hosts: Hosts | None = None
) -> list[RankGroup]:
    """Start a peer's groups; none, with the reason on stderr, if the peer cannot be started."""
    say(f"starting {peer}, {candidates[0].ranks} ranks")
    try:
        return [stack.enter_context(RankGroup(candidate, hosts)) for candidate in candidates]
    except GroupError as error:
        say(f"skipping {peer}: {error}")
        return []


def _mpi(ranks: int) -> list[Candidate]:
    """Return the installed ones of Open MPI, MPICH and Intel MPI, with and without binding to cores.

    With more ranks than cores, Intel MPI is tried with and without yielding the core in waits.
    """
    found, file = [], "ranks/mpi"
    crowded = ranks > (os.cpu_count() or 1)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpich = _python_of("mpich").with_name("mpiexec")
    for name, launcher, options, env in (
        ("mpi", shutil.which("mpirun.openmpi"), ["--oversubscribe", "--bind-to"], as_root),
        ("mpich", str(mpich) if mpich.exists() else None, ["-bind-to"], {}),
    ):
        if (python := _python_of(name)).exists() and launcher is not None:
            for binding in ("none",) if crowded else ("none", "core"):
                setting, command = f"{options[-1]} {binding}", [launcher, "-n", "{size}", *options, binding]
                found.append(Candidate(file, ranks, env=env, setting=setting, interpreter=python, launcher=command))
    python = _python_of("impi")
    mpiexec = python.with_name("mpiexec.hydra")
    if python.exists() and mpiexec.exists():
        pinned = [{"I_MPI_PIN": "0"}, {"I_MPI_PIN": "1"}]
        yielding = [{"I_MPI_PIN": "0", "I_MPI_THREAD_YIELD": way} for way in ("0", "2")]
        for variables in yielding if crowded else pinned:
            candidate = _named(Candidate(file, ranks, env={"I_MPI_FABRICS": "shm", **variables}, interpreter=python))
            found.append(replace(candidate, launcher=[str(mpiexec), "-n", "{size}"]))
    return found


def _python_of(environment: str) -> Path:
    """Return the interpreter of a virtual environment of `make peers`."""
    return _ROOT / ".peers" / environment / "bin" / "python"


def _named(candidate: Candidate) -> Candidate:
    """Return the candidate with its environment and options as its setting."""
    words = {**candidate.env, **candidate.options}
    return replace(candidate, setting=" ".join(f"{name}={value}" for name, value in words.items()))


def _powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most``."""
    return sorted({*(1 << bit for bit in range(most.bit_length())), most})

"""Which peers there are, where their interpreters lie, and in which settings they, and gangline, are tried."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import gangline
from gangline.bench.gangs import Way
from gangline.bench.sides import Setting

_ROOT = Path(gangline.__file__).resolve().parent.parent

PEERS = ("mxnet", "torch", "ddp", "gloo", "mpi")
"""torch is what one writes by hand in torch, ddp torch's DistributedDataParallel, gloo torch.distributed; mpi is the
better of Open MPI and MPICH. MXNet and each MPI have their own environments."""


def chosen(words: str, bench: str, on_gpus: bool) -> list[str]:
    """The peers of ``--peers`` that can run here; each of the others gets a line that says why not.

    Args:
        words: names with commas, such as "mxnet,torch"; empty: none.
        bench: what is measured: a peer has part in it if it has a file for it.
        on_gpus: the bench runs on GPUs.

    Raises:
        ValueError: a name is unknown.
    """
    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers has {name!r}; expected names out of {', '.join(PEERS)}")
    reasons = {name: _why_not(name, bench, on_gpus) for name in names}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"skipping {name}: {reason}")
    return [name for name, reason in reasons.items() if reason is None]


def interpreter(peer: str) -> Path | None:
    """The Python that a peer needs; None: ours."""
    return _ROOT / ".peers" / "mxnet" / "bin" / "python" if peer == "mxnet" else None


def _why_not(peer: str, bench: str, on_gpus: bool) -> str | None:
    if not Path(__file__).with_name(f"{peer}_{bench}.py").exists():
        return f"it has no part in the {bench} bench"
    if on_gpus and peer != "torch":
        return "it is measured on CPU contexts only; leave --gpus out"
    if peer == "mpi" and not _mpi_ways(1):
        return (
            "neither .peers/mpi nor .peers/mpich is there; install them with `make peers` (Open MPI after "
            "`apt-get install openmpi-bin libopenmpi-dev`)"
        )
    python = interpreter(peer)
    if python is not None and not python.exists():
        return f"{python} is not there; install it with `make peers`"
    return None


def settings(who: str, stores: Sequence[str] = ()) -> list[Setting]:
    """In which settings a side is tried; gangline in those that a plain torch loop has.

    Args:
        who: a peer's name, or "gangline".
        stores: kinds of MXNet's store to try each setting with; none: the bench itself says which.
    """
    cores = os.cpu_count() or 1
    if who == "mxnet":
        kinds = [{"store": store} for store in stores] or [{}]
        return [
            Setting({"MXNET_CPU_WORKER_NTHREADS": str(workers), "OMP_NUM_THREADS": str(threads)}, kind)
            for workers in (1, 2, 4)
            for threads in (1, 2)
            for kind in kinds
        ]
    if who == "ddp":
        return [
            Setting({"OMP_NUM_THREADS": str(threads)}) for threads in _powers(cores) if threads * 2 <= max(cores, 2)
        ]
    return [Setting({"OMP_NUM_THREADS": str(threads)}) for threads in _powers(cores)]


def ways(who: str, ranks: int) -> list[Way]:
    """In which ways a gang of ranks is tried.

    Args:
        who: "gangline", "gloo" or "mpi".
        ranks: how many there are: with fewer cores than ranks none is bound to a core.
    """
    if who == "mpi":
        return _mpi_ways(ranks)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    if who == "gangline":
        return [Way("gangline_collectives", env=threads)]
    return [Way("gloo_collectives", "OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"})]


def _mpi_ways(ranks: int) -> list[Way]:
    """Open MPI and MPICH, as far as they are there, bound to cores and not."""
    found = []
    bindings = ("none", "core") if ranks <= (os.cpu_count() or 1) else ("none",)
    python = _ROOT / ".peers" / "mpi" / "bin" / "python"
    mpirun = shutil.which("mpirun.openmpi")
    if python.exists() and mpirun is not None:
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        for binding in bindings:
            launcher = [mpirun, "-n", "{size}", "--oversubscribe", "--bind-to", binding]
            found.append(Way("mpi_collectives", f"--bind-to {binding}", as_root, python, launcher))
    python, mpiexec = (_ROOT / ".peers" / "mpich" / "bin" / name for name in ("python", "mpiexec"))
    if python.exists() and mpiexec.exists():
        for binding in bindings:
            launcher = [str(mpiexec), "-n", "{size}", "-bind-to", binding]
            found.append(Way("mpi_collectives", f"-bind-to {binding}", {}, python, launcher))
    return found


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({*(1 << bit for bit in range(most.bit_length())), most})

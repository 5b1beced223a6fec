"""Checks of the GPUs: copies from the host and between each two, and NCCL between processes."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from importlib import import_module
from itertools import permutations
from typing import Any

import torch
from torch import distributed

from gangline.collectives.communicator import Communicator
from gangline.collectives.devices.backends import nccl_bindings
from gangline.collectives.processes.spawning import spawn
from gangline.doctor.finding import Finding, Status

_COPIED = 64 << 20
_ELEMENTS = 8 << 20
_CALLS = 5
_LEAST_RATE = 2.5e9
"""Bytes per second between GPUs with peer-to-peer access, below which they are slow: a third of PCIe 3.0 x16's."""
_WITHOUT_PEERS = (
    "copies go through host memory. GeForce cards have no peer-to-peer access; else disable IOMMU and ACS "
    "(`iommu=pt` on the kernel's command line, ACS in the BIOS) or, in a virtual machine, pass them through together"
)


def gpus() -> list[Finding]:
    """Check that each GPU computes and copies, and each two GPUs copy to each other."""
    if not torch.cuda.is_available():
        return [_no_gpu()]
    count = torch.cuda.device_count()
    copies = (_peer_copy(a, b) for a, b in permutations(range(count), 2))
    return [*map(_host_copy, range(count)), *copies, *_nccl_libraries()]


def _nccl_libraries() -> list[Finding]:
    """Check that cupy, which makes gangline's calls of NCCL, loads the library of torch."""
    if nccl_bindings.unavailable_reason("cupy"):
        return []
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    of_torch, of_cupy = major * 10_000 + minor * 100 + patch, import_module("cupy.cuda.nccl").get_version()
    return [finding_of_libraries(of_torch, of_cupy)]


def finding_of_libraries(of_torch: int, of_cupy: int) -> Finding:
    """Return the finding for the versions of NCCL that torch and cupy have loaded, as NCCL_VERSION_CODE."""
    if of_torch == of_cupy:
        return Finding(Status.OK, "NCCL library", f"torch and cupy use {of_torch}")
    remedy = (
        "install the cupy for the CUDA of torch (gangline[cuda13] or gangline[cuda12]), and one nvidia-nccl package"
    )
    return Finding(Status.WARN, "NCCL library", f"torch uses {of_torch}, cupy {of_cupy}", remedy)


def _no_gpu() -> Finding:
    if torch.version.cuda is None:
        remedy = "install a CUDA build of torch"
        return Finding(Status.WARN, "GPUs", "this machine has some, but torch is built without CUDA", remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    remedy = f"`nvidia-smi` shows whether the driver works; it must support CUDA {torch.version.cuda}"
    if hidden is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {hidden!r}; {remedy}"
    return Finding(Status.WARN, "GPUs", "this machine has some, but torch sees none", remedy)


def _host_copy(index: int) -> Finding:
    name, device = f"gpu({index})", torch.device("cuda", index)
    try:
        source = torch.arange(_COPIED // 4, dtype=torch.int32, device="cpu").pin_memory()
        seconds, is_equal = timed_copy(source, device)
    except RuntimeError as error:
        remedy = "pinned memory needs `ulimit -l unlimited` and free host memory; see `nvidia-smi` for other programs"
        return Finding(Status.BROKEN, name, str(error).splitlines()[0], remedy)
    if not is_equal:
        return Finding(Status.BROKEN, name, "a copy from the host has other bytes", "replace the card or its riser")
    return Finding(Status.OK, name, f"{torch.cuda.get_device_properties(index).name}, {_rate(seconds)} from the host")


def _peer_copy(a: int, b: int) -> Finding:
    source = torch.arange(_COPIED // 4, dtype=torch.int32, device=torch.device("cuda", a))
    seconds, is_equal = timed_copy(source, torch.device("cuda", b))
    return finding_of_copy(f"gpu({a}) to gpu({b})", seconds, is_equal, torch.cuda.can_device_access_peer(a, b))


def timed_copy(source: torch.Tensor, device: torch.device) -> tuple[float, bool]:
    """Copy a tensor to a device and back; return the seconds of the first copy, and whether the bytes are the same."""
    target = torch.empty_like(source, device=device)
    target.copy_(source)  # the first copy sets up the link
    _synchronize(source, target)
    begin = time.perf_counter()
    target.copy_(source)
    _synchronize(source, target)
    return time.perf_counter() - begin, torch.equal(target.cpu(), source.cpu())


def _synchronize(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def finding_of_copy(name: str, seconds: float, is_equal: bool, has_access: bool) -> Finding:
    """Return the finding for a copy between two GPUs."""
    if not is_equal:
        remedy = (
            "an IOMMU or ACS redirects the copies: disable them (`iommu=pt`, ACS in the BIOS); until then "
            "NCCL_P2P_DISABLE=1 and GANGLINE_DEVICE_GROUP=staged"
        )
        return Finding(Status.BROKEN, name, "the copy has other bytes", remedy)
    if not has_access:
        return Finding(Status.SLOW, name, f"{_rate(seconds)}, no peer-to-peer access", _WITHOUT_PEERS)
    if _COPIED / seconds < _LEAST_RATE:
        remedy = "see `nvidia-smi topo -m`, the width of the slots (`nvidia-smi -q -d PCIE`), IOMMU and ACS"
        return Finding(Status.SLOW, name, f"{_rate(seconds)} peer to peer", remedy)
    return Finding(Status.OK, name, f"{_rate(seconds)} peer to peer")


def nccl(seconds: float, backend: str = "nccl", ranks: int | None = None) -> dict[str, Any]:
    """Reduce over all GPUs by NCCL, a process each; return ``ranks``, and if above 1 the rate and what was wrong.

    A backend of torch.distributed other than "nccl" reduces on the CPU.
    """
    count = torch.cuda.device_count() if ranks is None else ranks
    if count < 2:
        return {"ranks": count}
    lacks_peers = backend == "nccl" and not all(
        torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(count), 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        results = spawn(_reduce, count, backend, f"file://{folder}/store", seconds, threads=1)
    slowest = max(taken for taken, _ in results)
    return {
        "ranks": count,
        "gb_per_s": 4 * _ELEMENTS / 1e9 / slowest,
        "wrong": [rank for rank, (_, is_right) in enumerate(results) if not is_right],
        "lacks_peers": lacks_peers,
    }


def _reduce(comm: Communicator, backend: str, store: str, seconds: float) -> tuple[float, bool]:
    device = torch.device("cuda", comm.rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    distributed.init_process_group(backend, init_method=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    try:
        tensor = torch.full((_ELEMENTS,), float(comm.rank + 1), device=device)
        distributed.all_reduce(tensor)
        is_right = bool((tensor == comm.size * (comm.size + 1) / 2).all())
        begin = time.perf_counter()
        for _ in range(_CALLS):
            distributed.all_reduce(tensor)
        _synchronize(tensor)
        return (time.perf_counter() - begin) / _CALLS, is_right
    finally:
        distributed.destroy_process_group()


def _rate(seconds: float) -> str:
    return f"{_COPIED / 1e9 / max(seconds, 1e-9):.1f} GB/s"

"""All checks of this host: which there are, and how they are run. This module imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from gangline.doctor.finding import Check, Finding, Outcome, Status, findings_of, run

_SIDE_BY_SIDE = (
    Check("shared-memory", "host", "shared_memory"),
    Check("dev-shm", "host", "dev_shm"),
    Check("tmpdir", "host", "temporary_folder"),
    Check("cross-memory-attach", "host", "cross_memory_attach"),
    Check("limits", "host", "limits"),
    Check("host-name", "host", "host_name", "the name server does not answer: check /etc/resolv.conf and /etc/hosts"),
    Check("ports", "host", "ports"),
    Check("clock", "host", "clock"),
    Check("two-ranks", "two_ranks", "two_ranks", "`py-spy dump` on a rank shows its position; try --timeout 120"),
)
_GPUS = Check(
    "gpus",
    "gpus",
    "gpus",
    "a GPU does not answer: see `dmesg | grep -i xid` and `nvidia-smi`; another program may hold it",
)
_NCCL = Check("nccl", "gpus", "nccl")
CHECKS = (*_SIDE_BY_SIDE, _GPUS, _NCCL)

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Files of the drivers of NVIDIA, of NVIDIA under Windows' WSL, and of AMD."""
_SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_SHM_USE_CUDA_MEMCPY": "1"},
    {"NCCL_SHM_DISABLE": "1"},
)
"""Environments in which NCCL is tried; all but the first only if that one fails or lacks peer-to-peer access."""
HOST_STEPS = 2 + len(_SETTINGS)
"""Longest time of `check_host`, in deadlines of a check."""
_FASTER = 1.3
"""A setting that is faster than none by this factor is named."""
_NAME = "NCCL between GPUs"


def check_host(names: Collection[str], seconds: float) -> list[Finding]:
    """Run checks of this host by name, each with a deadline, and return their findings."""
    chosen = [check for check in _SIDE_BY_SIDE if check.name in names]
    outcomes = zip(chosen, run(chosen, seconds), strict=True)
    findings = [finding for check, outcome in outcomes for finding in findings_of(check, outcome)]
    if not {_GPUS.name, _NCCL.name}.isdisjoint(names) and not any(map(Path.exists, _GPU_DRIVERS)):
        return [*findings, Finding(Status.SKIPPED, "GPUs", "this machine has none")]
    if _GPUS.name in names:  # alone: it measures
        findings += findings_of(_GPUS, *run([_GPUS], seconds))
    if _NCCL.name in names:
        of_settings: dict[str, Outcome] = {}
        for setting in _SETTINGS:
            (outcome,) = run([_NCCL], seconds, {"seconds": seconds / 2}, setting)
            of_settings[" ".join(f"{name}={value}" for name, value in setting.items())] = outcome
            if not outcome.problem and not outcome.value.get("wrong") and not outcome.value.get("lacks_peers"):
                break
        findings.append(finding_of_nccl(of_settings))
    return findings


def finding_of_nccl(outcomes: Mapping[str, Outcome]) -> Finding:
    """Return the finding for what `nccl` gave in each setting; the first is the one without any."""
    first = outcomes[""]
    if not first.problem and first.value["ranks"] < 2:
        return Finding(Status.SKIPPED, _NAME, f"{first.value['ranks'] or 'no'} GPU; it needs two")
    rates = {
        setting: one.value["gb_per_s"]
        for setting, one in outcomes.items()
        if not one.problem and not one.value["wrong"]
    }
    best = max(rates, key=rates.__getitem__, default=None)
    if "" not in rates:
        what = first.problem or f"the sum is wrong on ranks {first.value['wrong']}"
        remedy = (
            f"export {best}: with it NCCL reduces at {rates[best]:.1f} GB/s; "
            "the cause is IOMMU, ACS or a limit of the container"
            if best
            else "NCCL_DEBUG=INFO shows where it stops; check `ulimit -l unlimited`, /dev/shm, IOMMU and ACS. "
            "GANGLINE_DEVICE_GROUP=staged does without NCCL"
        )
        return Finding(Status.BROKEN, _NAME, what, remedy)
    measured = f"{first.value['ranks']} GPUs reduce at {rates['']:.1f} GB/s"
    if best and rates[best] > _FASTER * rates[""]:
        return Finding(Status.SLOW, _NAME, measured, f"export {best}: with it {rates[best]:.1f} GB/s")
    return Finding(Status.OK, _NAME, measured)

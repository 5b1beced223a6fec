"""Choice of the backend that moves tensors between the devices of one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

import torch

from gangline.collectives.devices.backends.base import Backend
from gangline.collectives.devices.backends.copies import Copies
from gangline.collectives.devices.backends.nccl import Nccl
from gangline.collectives.devices.backends.peer_to_peer import PeerToPeer
from gangline.collectives.devices.backends.staged import Staged

_log = logging.getLogger("gangline")

VARIABLE = "GANGLINE_DEVICE_GROUP"
"""Environment variable that forces an implementation."""

Devices = Sequence[torch.device]

_BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (Nccl, PeerToPeer, Staged, Copies)}


def open_backend(devices: Devices, wanted: str | None = None) -> Backend:
    """Return the backend that GANGLINE_DEVICE_GROUP names, else ``wanted``, else `choose`; log each choice once."""
    name, source = (os.environ[VARIABLE], VARIABLE) if os.environ.get(VARIABLE) else (wanted, "implementation")
    if name is None:
        name, reason = choose(devices)
    else:
        check(name, devices, source)
        reason = f"set by {source}"
    _log_once(tuple(devices), name, reason)
    return _BACKENDS[name](devices)


def choose(devices: Devices) -> tuple[str, str]:
    """Return the name of the best implementation, and the reason.

    GPUs with peer access use NCCL, else peer-to-peer kernels. GPUs without it, or on which it fails a trial, are staged
    through the host, where NCCL's own path is several times slower. Copies serve the rest: CPU contexts, a GPU with the
    host, and GPUs for which no library is installed.
    """
    if any(device.type != "cuda" for device in devices):
        return "copies", "not all devices are GPUs"
    if len(devices) == 1:
        return "copies", "there is one device"
    without_access = no_peer_access(devices)
    if without_access:
        return "staged", without_access
    without_kernels = PeerToPeer.unavailable_reason(devices)
    failed = "" if without_kernels else PeerToPeer.trial_failure(devices)
    if failed:  # NCCL would hang or give wrong sums as well
        return "staged", failed
    without_nccl = Nccl.unsupported_reason(devices) or Nccl.unavailable_reason(devices)
    if not without_nccl:
        return "nccl", "the GPUs are distinct and have peer access"
    if without_kernels:
        return "copies", f"{without_nccl}; {without_kernels}"
    return "peer_to_peer", without_nccl


def check(name: str, devices: Devices, source: str) -> None:
    """Check that an implementation, which ``source`` names, can serve devices on this machine.

    Raises:
        ValueError: if the name is unknown, or the implementation cannot serve such devices.
        RuntimeError: if the machine lacks a requirement.
    """
    if name not in _BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected one of {', '.join(_BACKENDS)}")
    backend = _BACKENDS[name]
    if reason := backend.unsupported_reason(devices):
        raise ValueError(f"{source} is {name!r}, but {reason}; expected copies for these devices")
    if reason := backend.unavailable_reason(devices) or backend.trial_failure(devices):
        raise RuntimeError(f"{source} is {name!r}, but {reason}")


def no_peer_access(devices: Devices) -> str:
    """Return which GPUs have no peer access according to the driver; "" if all have."""
    for one, other in permutations(dict.fromkeys(devices), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"gpu({one.index}) has no peer access to gpu({other.index})"
    return ""


@lru_cache(maxsize=256)
def _log_once(devices: tuple[torch.device, ...], name: str, reason: str) -> None:
    level = logging.INFO if any(device.type == "cuda" for device in devices) else logging.DEBUG
    _log.log(level, "tensors move between %s by %s: %s", ", ".join(map(str, devices)), name, reason)

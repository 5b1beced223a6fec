"""Which way tensors move between the devices of one process: what serves them best, or what the user names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gangline.collectives.devices.backends import nccl, peer_to_peer, staged
from gangline.collectives.devices.backends.base import Backend
from gangline.collectives.devices.backends.copies import Copies

_log = logging.getLogger("gangline")

VARIABLE = "GANGLINE_DEVICE_GROUP"
"""The environment variable that names an implementation by force."""

Devices = Sequence[torch.device]

_BACKENDS: dict[str, type[Backend]] = {
    one.name: one for one in (nccl.Nccl, peer_to_peer.PeerToPeer, staged.Staged, Copies)
}
_UNFIT: dict[str, Callable[[Devices], str]] = {
    "nccl": nccl.unfit,
    "peer_to_peer": peer_to_peer.unfit,
    "staged": staged.unfit,
}


class Machine(Protocol):
    """What a choice must know of a machine; each answer is what is wrong, or ""."""

    def missing(self, name: str, devices: Devices) -> str:
        """What an implementation needs and does not find."""

    def unlinked(self, devices: Devices) -> str:
        """Which GPUs have no peer access, by the driver's word."""

    def unproven(self, devices: Devices) -> str:
        """Which GPUs have no peer access, by trial."""


class ThisMachine:
    """The machine that the process runs on."""

    def missing(self, name: str, devices: Devices) -> str:  # noqa: D102  as Machine's, and so below
        return {"nccl": nccl.missing, "peer_to_peer": peer_to_peer.missing}[name](devices)

    def unlinked(self, devices: Devices) -> str:  # noqa: D102
        for one in devices:
            for other in devices:
                if one != other and not torch.cuda.can_device_access_peer(one, other):
                    return f"gpu({one.index}) has no peer access to gpu({other.index})"
        return ""

    def unproven(self, devices: Devices) -> str:  # noqa: D102
        return peer_to_peer.unproven(devices)


def opened(devices: Devices, wanted: str | None = None) -> Backend:
    """The implementation for these devices, ready; said once for each set of devices, with the reason.

    Args:
        devices: of each place.
        wanted: its name; None: `choose`. The environment's GANGLINE_DEVICE_GROUP goes before it.

    Raises:
        ValueError: an unknown name, or one of an implementation that is not for such devices.
        RuntimeError: this machine lacks what the implementation needs.
    """
    machine = ThisMachine()
    name, source = (os.environ[VARIABLE], VARIABLE) if os.environ.get(VARIABLE) else (wanted, "implementation")
    if name is None:
        name, reason = choose(devices, machine)
    else:
        check(name, devices, machine, source)
        reason = f"{source} says so"
    _say(devices, name, reason)
    return _BACKENDS[name](devices)


def choose(devices: Devices, machine: Machine) -> tuple[str, str]:
    """The name of the best implementation, and why it is that one.

    GPUs that reach each other are joined by NCCL, else by peer-to-peer kernels; those that do not, through the host,
    where NCCL's own way is several times slower. Copies do the rest: the host's contexts, a GPU beside the host, and
    GPUs for which nothing is installed.
    """
    if any(device.type != "cuda" for device in devices):
        return "copies", "not all devices are GPUs"
    if len(devices) == 1:
        return "copies", "there is one device"
    unlinked = machine.unlinked(devices)
    if unlinked:
        return "staged", unlinked
    without_nccl = nccl.unfit(devices) or machine.missing("nccl", devices)
    if not without_nccl:
        return "nccl", "the GPUs are distinct and reach each other"
    without_peers = machine.missing("peer_to_peer", devices)
    if without_peers:
        return "copies", f"{without_nccl}; {without_peers}"
    unproven = machine.unproven(devices)
    if unproven:
        return "staged", f"{without_nccl}; {unproven}"
    return "peer_to_peer", without_nccl


def check(name: str, devices: Devices, machine: Machine, source: str) -> None:
    """See that an implementation serves devices.

    Args:
        name: of the implementation.
        devices: of each place.
        machine: what is there.
        source: who named it, for the message.

    Raises:
        ValueError: it is unknown, or not for such devices.
        RuntimeError: the machine lacks what it needs.
    """
    if name not in _BACKENDS:
        raise ValueError(f"{source} is {name!r}; expected one of {', '.join(_BACKENDS)}")
    if name == "copies":
        return
    unfit = _UNFIT[name](devices)
    if unfit:
        raise ValueError(f"{source} is {name!r}, but {unfit}; expected copies for these devices")
    if name == "staged":
        return
    lack = machine.missing(name, devices) or (machine.unproven(devices) if name == "peer_to_peer" else "")
    if lack:
        raise RuntimeError(f"{source} is {name!r}, but {lack}")


_said: set[tuple[tuple[torch.device, ...], str]] = set()


def _say(devices: Devices, name: str, reason: str) -> None:
    known = (tuple(devices), name)
    if known not in _said:
        _said.add(known)
        level = logging.INFO if any(device.type == "cuda" for device in devices) else logging.DEBUG
        _log.log(level, "tensors move between %s by %s: %s", ", ".join(map(str, devices)), name, reason)

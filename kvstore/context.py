"""Contexts: the devices that hold replicas, and the strings that name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gangline.collectives.devices.device_group import check_gpus
from gangline.collectives.environments import local_rank

_ONE = re.compile(r"(cpu|gpu)\((\d+)\)|(cpu|cuda):(\d+)|(\d+)")


@dataclass(frozen=True, slots=True)
class Context:
    """A device that holds a replica: ``cpu(i)`` or ``gpu(i)``.

    All ``cpu(i)`` are the host's memory, yet distinct contexts: ``[cpu(0), cpu(1)]`` makes two replicas.
    """

    device_type: str
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu"):
            raise ValueError(f"device_type is {self.device_type!r}; expected 'cpu' or 'gpu'")
        if isinstance(self.device_id, bool) or not isinstance(self.device_id, int):
            raise TypeError(f"device_id is {self.device_id!r}; expected an int")
        if self.device_id < 0:
            raise ValueError(f"device_id is {self.device_id}; expected 0 or more")

    @property
    def torch_device(self) -> torch.device:
        """The torch device of this context's tensors."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", self.device_id)

    def __str__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    __repr__ = __str__


Device = str | Context | torch.device
"""Name of a device: a context, a torch device, or a string such as "gpu(0)" or "cuda:0"."""


def cpu(device_id: int = 0) -> Context:
    """Return a context on the host."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return the context of the GPU with torch's index ``device_id``."""
    return Context("gpu", device_id)


def use_own_gpu(contexts: Sequence[Context]) -> None:
    """Make the first context torch's current device, if all contexts are GPUs and none of them is current."""
    gpus = [context.device_id for context in contexts if context.device_type == "gpu"]
    if gpus and len(gpus) == len(contexts) and torch.cuda.current_device() not in gpus:
        torch.cuda.set_device(gpus[0])


def num_gpus() -> int:
    """Return the number of GPUs that this process can see."""
    return torch.cuda.device_count()


def contexts(spec: Device | Sequence[Device] = "auto") -> list[Context]:
    """Return the contexts that ``spec`` names, after checking that this machine has them.

    Args:
        spec: a context, a torch device or a string, or a sequence of them. Strings: ``"0,2"`` (GPUs),
            ``"gpu(0),cpu(0)"``, ``"cuda:0"``, ``"gpu"`` (``gpu(0)``; in a job the GPU with this process's rank on the
            host), ``"multi-gpu"`` (every GPU), ``"auto"`` (``"gpu"`` if there is one, else ``"cpu"``) or ``"parallel"``
            (the same as "auto", for one of several processes of a job).

    Raises:
        ValueError: if a string cannot be parsed, the list is empty, or a GPU does not exist.
        TypeError: if ``spec`` has another type.
    """
    if isinstance(spec, str):
        found = _parse(spec)
    elif isinstance(spec, (list, tuple)):
        found = [_one(each, spec) for each in spec]
    else:
        found = [_one(spec, spec)]
    if not found:
        raise ValueError("context is empty; expected at least one, such as [cpu(0)]")
    check_gpus([one.device_id for one in found if one.device_type == "gpu"])
    return found


def _one(device: object, spec: object) -> Context:
    """Return the context of one device of the list ``spec``."""
    if isinstance(device, Context):
        return device
    if isinstance(device, (str, torch.device)):
        found = _parse(str(device))
        if len(found) == 1:
            return found[0]
    raise TypeError(
        f"context is {spec!r}; expected a Context, a torch device, a list of them, or words such as 'gpu(0),gpu(2)'"
    )


def _parse(words: str) -> list[Context]:
    if words in ("auto", "parallel"):
        return _parse("gpu") if num_gpus() else [cpu()]
    if words == "multi-gpu":
        if not num_gpus():
            raise ValueError("context is 'multi-gpu', but this machine has no GPU; expected 'auto' or 'cpu(0),cpu(1)'")
        return [gpu(index) for index in range(num_gpus())]
    found = []
    for word in words.split(","):
        name = word.strip()
        match = _ONE.fullmatch(name)
        if match is not None:
            kind = "cpu" if "cpu" in (match[1], match[3]) else "gpu"
            found.append(Context(kind, int(match[2] or match[4] or match[5])))
        elif name == "cpu":
            found.append(cpu())
        elif name in ("gpu", "cuda"):
            found.append(gpu(local_rank() % max(1, num_gpus())))
        else:
            raise ValueError(
                f"context is {words!r}, of which {name!r} names no device; expected '0,2', 'gpu(0),gpu(2)', 'cuda:0', "
                "'cpu(0),cpu(1)', 'auto', 'cpu', 'gpu', 'multi-gpu' or 'parallel'"
            )
    return found

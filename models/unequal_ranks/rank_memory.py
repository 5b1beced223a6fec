"""Rank memory: the number of samples that fit into the memory of this rank."""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
import os
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree

from gangline.collectives import environments
from gangline.models.executor.executor import is_out_of_memory
from gangline.models.unequal_ranks.rank_timer import inner_module

_log = logging.getLogger("gangline")
_OPTIMIZER_STATE = 2  # bytes of optimizer state per byte of parameters: two moments, as in Adam
_MARGIN = 0.05  # part of the room that is left free: buffers of communication, fragmentation
_LEAST_MARGIN = 16 << 20
_FATAL_MARGIN = 0.2  # the same where the process would be killed
_EXTRAPOLATED = 0.9  # part of the room for samples that were not tried which is counted on
_BISECTIONS = 4
_OF_TRIED = 0.85  # part of the largest size of the trial that is used: repeated steps fragment the memory
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_MAPPED_BLOCK = 1 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60

Call = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory, and readings of its use."""

    name: str
    limit: int
    """Bytes."""
    in_use: Callable[[], int]
    """Returns bytes in use."""
    peak: Callable[[], int]
    """Returns the maximum of bytes in use so far."""
    ends_process: bool = False
    """The process is killed beyond the limit; otherwise the allocation fails."""
    of_addresses: bool = False
    """Memory that was freed and not given back to the system counts."""


class RankMemory:
    """The maximum share of this rank, learnt before the first batch and from the peaks of training steps."""

    def __init__(self, model: nn.Module, call: Call | None = None) -> None:
        """Set the module; its device does not change any more.

        Args:
            model: the module that the training loop calls, with its wrapper if it has one.
            call: runs a batch through a module; None: derived from the batch and the signature of ``forward``.
        """
        self._model = inner_module(model)
        self._call = call or call_with_batch
        parameter = next(self._model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self.memory: MemoryLimit | None = None
        """The limit that is closest, once `try_batch` has read it; None: none is below the machine's memory."""
        self._tried = 0  # samples of the largest step that succeeded
        self._failed: int | None = None  # samples of the smallest step that did not fit
        self._fixed = self._margin = 0  # bytes: without samples, and to be left free
        self._tried_peak = 0
        self._per_sample = 0.0
        self._measured: tuple[int, int] | None = None  # (samples, peak) of the largest training step

    def max_samples(self) -> int | None:
        """Return the number of samples that fit; None: no limit is known."""
        if self.memory is None or (self._failed is None and self._per_sample <= 0):
            return None
        fits = math.inf
        if self._per_sample > 0:
            room = self.memory.limit - self._expected(self._tried)
            fits = self._tried + max(0.0, _EXTRAPOLATED * room / self._per_sample)
        if self._failed is not None:
            fits = min(fits, math.ceil(_OF_TRIED * self._tried))
        return max(math.floor(fits), self._measured[0] if self._measured is not None else 0)

    def try_batch(self, read: Callable[[], Any], samples: int) -> None:
        """Read this process's limits; run forward and backward on growing parts of a batch, until one does not fit.

        No gradient is accumulated; buffers and random states are restored. A module that needs other ranks is not
        run. One that cannot be called with the batch leaves the limit open, with a warning.

        Args:
            read: returns the batch: tensors, or nested containers of them, with the batch on the first axis.
            samples: number of samples in the batch.
        """
        self.memory = tightest_limit(self._device)
        if self.memory is None:
            return
        if self.memory.of_addresses:
            _give_back_large_blocks()
        self._fixed = self.memory.in_use()
        part = _FATAL_MARGIN if self.memory.ends_process else _MARGIN
        self._margin = max(_LEAST_MARGIN, int(part * (self.memory.limit - self._fixed)))
        waits = (FSDPModule, nn.SyncBatchNorm)
        if samples < 1 or any(isinstance(module, waits) for module in self._model.modules()):
            return
        held = 0 if self.memory.ends_process else self._margin
        with _preserved(self._model, self._device), _reserved(self._model, held):
            if self.memory.ends_process:
                _reset_resident_peak()
            self._fixed = self._tried_peak = self.memory.in_use()
            try:
                batch = read()
            except Exception as error:  # noqa: BLE001  the user's data set raises any type; training raises it again
                self._warn(error)
                self._fixed -= held
                return
            sizes = sorted({min(2**power, samples) for power in range(samples.bit_length() + 1)})
            for size in sizes:
                if not self._fits(batch, samples, size):
                    break
            for _ in range(_BISECTIONS):
                if self._failed is None or self._failed - self._tried < 2:
                    break
                self._fits(batch, samples, (self._tried + self._failed) // 2)
        self._fixed -= held

    def record_step(self, samples: int) -> None:
        """Learn from the peak of the training steps so far; call it after a step of so many samples."""
        if self.memory is None or samples < 1:
            return
        peak = self.memory.peak()
        self._tried = max(self._tried, samples)
        if self._failed is not None and self._failed <= samples:
            self._failed = None  # it fits after all
        if self._per_sample <= 0:
            self._per_sample = max(0.0, (peak - self._fixed) / samples)
        elif self._measured is not None and samples > self._measured[0] and peak > self._measured[1]:
            self._per_sample = (peak - self._measured[1]) / (samples - self._measured[0])
            self._fixed = round(peak - self._per_sample * samples)
        else:
            # The peak belongs to the largest step; a part of it that the line lacks does not depend on the samples.
            largest = max(samples, self._measured[0] if self._measured else 0)
            self._fixed += max(0, round(peak - self._fixed - self._per_sample * largest))
        if self._measured is None or samples > self._measured[0]:
            self._measured = samples, peak

    def _expected(self, samples: int) -> float:
        """Return the expected peak with so many samples, and the margin."""
        return self._fixed + self._per_sample * samples + self._margin

    def _fits(self, batch: Any, whole: int, size: int) -> bool:
        """Run ``size`` samples; return False if they do not fit."""
        assert self.memory is not None
        if self.memory.ends_process and self._expected(size) > self.memory.limit:
            self._failed = size
            return False
        try:
            part = samples_of(batch, size, whole, self._device)
            self._forward_backward(part)
        except Exception as error:  # noqa: BLE001  errors of the user's module are of any type
            if not is_out_of_memory(error):
                if self._tried == 0 and size < whole:  # such as batch normalization of one value
                    return True
                self._warn(error)
                return False
            self._failed = size
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # outside the handler: the exception's frames hold tensors
        if self._failed == size:
            return False
        peak = self.memory.peak()
        self._per_sample = max(0, peak - self._tried_peak) / (size - self._tried)
        self._fixed = round(peak - self._per_sample * size)
        self._tried, self._tried_peak = size, peak
        return True

    @staticmethod
    def _warn(error: Exception) -> None:
        _log.warning(
            "balance: the memory of this rank is not known before training: calling the model with a batch failed "
            "with %s: %s; pass call=, such as lambda model, batch: model(batch[0]), or memory=None",
            type(error).__name__,
            error,
        )

    def _forward_backward(self, part: Any) -> None:
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            output = self._call(self._model, part)
            tensors = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            sums = [tensor.float().sum() for tensor in tensors if tensor.requires_grad]
            if sums and parameters:
                # grad() and not backward(): no gradient is accumulated, so no hook of a wrapper runs.
                torch.autograd.grad(torch.stack(sums).sum(), parameters, allow_unused=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def tightest_limit(device: torch.device) -> MemoryLimit | None:
    """Return the limit with the least room: of the GPU, or on the host one that is below the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return MemoryLimit(
            str(device),
            free + torch.cuda.memory_reserved(device),
            lambda: torch.cuda.memory_allocated(device),
            lambda: torch.cuda.max_memory_allocated(device),
        )
    if device.type != "cpu":
        return None
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in (_address_space(), _data(), *_cgroup_limits()) if limit.limit < machine]
    return min(limits, key=lambda limit: limit.limit - limit.in_use(), default=None)


def _address_space() -> MemoryLimit:
    return MemoryLimit(
        "RLIMIT_AS",
        _soft_limit(resource.RLIMIT_AS),
        lambda: _status("VmSize"),
        lambda: _status("VmPeak"),
        of_addresses=True,
    )


def _data() -> MemoryLimit:
    """Return the limit of private memory, whose peak Linux does not count: it grows with the address space."""
    return MemoryLimit(
        "RLIMIT_DATA",
        _soft_limit(resource.RLIMIT_DATA),
        lambda: _status("VmData"),
        lambda: _status("VmData") + _status("VmPeak") - _status("VmSize"),
        of_addresses=True,
    )


def _give_back_large_blocks() -> None:
    """Let glibc give tensors back to the system when they are freed.

    By default its heap keeps blocks up to the largest one freed so far (mallopt(3), M_MMAP_THRESHOLD, up to 32 MiB).
    The heap then grows over repeated steps of one size, because small blocks lie between the large ones.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BLOCK)


def _soft_limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return soft if soft != resource.RLIM_INFINITY else _UNLIMITED


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no field {field}; pass memory=None")


def _cgroup_limits() -> Iterator[MemoryLimit]:
    """Yield the limits of this process's memory cgroups, versions 1 and 2.

    The processes of a cgroup share its limit: each rank of the job on this host has an equal part.
    """
    ranks = environments.local_size()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            mounts, files, cache = [_CGROUPS / "memory"], ("limit_in_bytes", "usage_in_bytes"), "total_inactive_file"
        elif not controllers:
            mounts, files, cache = [_CGROUPS, _CGROUPS / "unified"], ("max", "current"), "inactive_file"
        else:
            continue
        for mount in mounts:
            yield from _limits_up(mount, mount / path.lstrip("/"), files, cache, ranks)


def _limits_up(mount: Path, folder: Path, files: tuple[str, str], cache: str, ranks: int) -> Iterator[MemoryLimit]:
    """Yield the limits of a cgroup and of those above it."""
    limit_file, usage_file = (f"memory.{name}" for name in files)
    for cgroup in (folder, *folder.parents):
        if (cgroup / limit_file).is_file() and (text := (cgroup / limit_file).read_text().strip()) != "max":
            # The cgroup counts pages that a forked process copies, which are in its VmRSS before; but all processes'.
            of_group = partial(_usage, cgroup, usage_file, cache)
            in_use = of_group if ranks == 1 else partial(_status, "VmRSS")
            limit = min(int(text), _UNLIMITED)
            yield MemoryLimit(
                str(cgroup),
                limit if ranks == 1 else in_use() + (limit - of_group()) // ranks,
                in_use,
                partial(_peak_above, in_use),
                ends_process=True,
            )
        if cgroup == mount:
            return


def _peak_above(in_use: Callable[[], int]) -> int:
    return in_use() + _status("VmHWM") - _status("VmRSS")


def _reset_resident_peak() -> None:
    """Set this process's VmHWM to its VmRSS."""
    with suppress(OSError):  # a sandbox may forbid it; then the peak so far hides smaller ones
        Path("/proc/self/clear_refs").write_text("5")


def _usage(cgroup: Path, usage_file: str, cache: str) -> int:
    """Return the bytes that a cgroup uses, without cached files that the kernel can drop."""
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int((cgroup / usage_file).read_text()) - int(stat.get(cache, 0))


@contextmanager
def _preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random states after the block."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _reserved(model: nn.Module, more: int) -> Iterator[None]:
    """Hold as much memory as the optimizer's state will need, and so many bytes more."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = _OPTIMIZER_STATE * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    try:
        held = torch.ones(size + more, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        held = torch.empty(0)
    yield
    del held


def samples_of(batch: Any, size: int, whole: int, device: torch.device) -> Any:
    """Return the first ``size`` samples of a batch of ``whole`` on a device; what has no such axis stays whole."""
    if isinstance(batch, torch.Tensor):
        return (batch[:size] if batch.dim() and len(batch) == whole else batch).to(device)
    if isinstance(batch, Mapping):
        return {name: samples_of(part, size, whole, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(samples_of(part, size, whole, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == whole and not any(isinstance(part, (torch.Tensor, Mapping, list, tuple)) for part in batch):
            return batch[:size]
        return type(batch)(samples_of(part, size, whole, device) for part in batch)
    return batch


def call_with_batch(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch as training loops do: a mapping as keywords, inputs of a tuple without the labels."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if isinstance(batch, Mapping):
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return model(**{name: part for name, part in batch.items() if takes_all or name in names})
    if isinstance(batch, (list, tuple)):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = sum(
            parameter.kind in positional and parameter.default is inspect.Parameter.empty for parameter in parameters
        )
        return model(*batch[: max(1, required)])
    return model(batch)

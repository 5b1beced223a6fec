"""Replica check: ranks compare numbers of their weights, in messages that they send anyway."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gangline.collectives.eager import run_eagerly
from gangline.collectives.errors import MismatchError, name_ranks

_FIRST_STEPS = 8  # are compared, whatever the interval
_VALUES = 64  # of each parameter, whose updates are compared
_TOLERANCE = 0.05  # relative; unequal GPUs round differently, and updates that are not averaged have nothing in common
_KIND = 1 << 32  # `number_of_weights` is a hash of the kind of device times this, plus a hash of the bits
_WRITTEN = "a rank alone writes weights; or its memory flips bits. GANGLINE_REPLICA_CHECK=0 leaves out this check"
_REASONS = (
    "so the replicas drift apart. The ranks must average gradients before the step. Likely reasons: the network is not "
    "in DistributedDataParallel or another wrapper, and the loop does not average its gradients; the loop calls the "
    "network past its wrapper, such as model.module(x); the step follows a backward within no_sync(); the optimizer "
    f"steps in a hook within backward; each rank adds noise of its own; {_WRITTEN}"
)
_REASONS_OF_STORES = (
    "so the replicas drift apart. Likely reasons: the ranks have begun with unlike weights; an optimizer of torch steps "
    f"beside gangline's, or in a hook within backward; {_WRITTEN}"
)
AllGather = Callable[[Any], Sequence[Any]]
"""Returns every rank's plain data."""


def check_interval() -> int:
    """Return GANGLINE_REPLICA_CHECK: steps from one check of replicas to the next, 64 by default; 0: none."""
    text = os.environ.get("GANGLINE_REPLICA_CHECK") or "64"
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"GANGLINE_REPLICA_CHECK is {text!r}; expected a number of steps, such as 64, or 0 for none")
    return int(text)


def is_due(step: int, interval: int) -> bool:
    """Return whether replicas are compared after this step, counted from 1."""
    return interval > 0 and (step <= _FIRST_STEPS or step % interval == 0)


def number_of_weights(weights: Iterable[Tensor]) -> float:
    """Return a number that changes if one bit of the weights flips, and with the kind of device; exact in float64."""
    given = [*weights]
    bits = _hash(_sums_of_bits(given), 4)
    return float(_hash(sorted({_kind_of(one.device) for one in given}), 2) * _KIND + bits) if given else 0.0


def compare_weights(
    numbers: Sequence[float],
    weights: Callable[[], Mapping[Any, Tensor]],
    all_gather: AllGather,
    where: str,
    reasons: str = _REASONS_OF_STORES,
) -> None:
    """Raise MismatchError, on all ranks, if those with one kind of device have different weights.

    Other ranks may round differently. Only if there is a difference, another message finds the first parameter.

    Args:
        numbers: `number_of_weights` of each rank; 0: none to compare.
        weights: returns this rank's weights by name.
        all_gather: the message.
        where: beginning of the text of the error.
        reasons: its end.
    """
    if len({number for number in numbers if number}) == len({number // _KIND for number in numbers if number}):
        return
    kinds = [number // _KIND for number in numbers]
    of_kinds = [{rank: numbers[rank] for rank, own in enumerate(kinds) if own == kind} for kind in set(kinds) - {0}]
    differing = next(of_kind for of_kind in of_kinds if len({*of_kind.values()}) > 1)
    own = weights()
    found = all_gather([[name, number] for name, number in zip(own, _sums_of_bits(own.values()), strict=True)])
    name = _first_parameter([found[rank] for rank in differing], lambda entries: len(set(entries)) > 1)
    raise MismatchError(f"{where} the weights{_of_odd(differing, 0.0)} differ, first of parameter {name}, {reasons}")


@run_eagerly
class ReplicaCheck:
    """Compares this rank's weights with those of the other ranks: their updates in some steps, their bits in epochs.

    An update is the difference of some values of each parameter to those at the last compared step.
    """

    def __init__(self, chosen: Callable[[], dict[str, Tensor]], all_gather: AllGather) -> None:
        """Add a hook to all optimizers; it goes with this object.

        ``chosen`` returns the parameters that are equal on all ranks.
        """
        self._chosen, self._all_gather, self._interval = chosen, all_gather, check_interval()
        self._steps, self._has_stepped, self._has_trained = 0, False, False
        self._thread = threading.get_ident()  # a thread that reads ahead sees weights within a step
        if self._interval:
            self._read()
            weakref.finalize(self, register_optimizer_step_post_hook(partial(_note_step, weakref.ref(self))).remove)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note whether the optimizer has updated a compared parameter."""
        if not self._has_stepped:
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._has_stepped = any(id(parameter) in self._ids for parameter in stepped)
            self._has_trained |= self._has_stepped

    def updates(self) -> tuple[float, float]:
        """Return a projection of the updates since the last compared step, and their norm; NaN: none to compare."""
        self._steps += self._has_stepped
        due = self._has_stepped and is_due(self._steps, self._interval) and threading.get_ident() == self._thread
        self._has_stepped = False
        if not due:
            return math.nan, math.nan
        ids, before = self._ids, self._values
        self._read()
        if ids != self._ids or before.shape != self._values.shape:
            return math.nan, math.nan
        self._changes = self._values - before
        return _measured(self._changes)

    def compare_updates(self, rows: Sequence[Sequence[float]], where: str) -> None:
        """Raise MismatchError, on all ranks, if their `updates` differ; ``where`` begins its text."""
        if not _differ(rows):
            return
        parts = torch.split(self._changes, self._sizes)
        found = self._all_gather([[name, *_measured(part)] for name, part in zip(self._known, parts, strict=True)])
        name = _first_parameter(found, lambda entries: _differ([entry[1:] for entry in entries]))
        odd = _of_odd({rank: row[0] for rank, row in enumerate(rows)}, _TOLERANCE * max(row[1] for row in rows))
        shown = ", ".join(f"{row[0]:.3g}" for row in rows)
        raise MismatchError(
            f"{where} the optimizer has changed the weights{odd} differently (projections of the updates: {shown}), "
            f"first those of parameter {name}, {_REASONS}"
        )

    def weights(self) -> float:
        """Return `number_of_weights`; 0 before the first step of an optimizer. New parameters are left out once."""
        if not self._has_trained or threading.get_ident() != self._thread:
            return 0.0
        chosen = self._chosen()
        self._compared = {name: one for name, one in chosen.items() if id(one) in self._ids}
        if len(self._compared) < len(chosen):
            self._read()
        _wait_for_gpus(self._compared.values())
        return number_of_weights(self._compared.values())

    def compare_weights(self, numbers: Sequence[float], where: str) -> None:
        """Raise MismatchError, on all ranks, if their weights differ; see `compare_weights`."""
        compare_weights(numbers, lambda: self._compared, self._all_gather, where, _REASONS)

    def _read(self) -> None:
        self._known = self._chosen()
        self._ids = frozenset(map(id, self._known.values()))
        _wait_for_gpus(self._known.values())
        values = [one.detach().reshape(-1)[:: max(1, one.numel() // _VALUES)] for one in self._known.values()]
        self._sizes = [*map(len, values)]
        joined = [torch.cat([one for one in values if one.device == device]) for device in _devices(values)]
        if len(joined) > 1:
            joined = [torch.cat([one.cpu() for one in values])]
        self._values = joined[0].cpu().double() if joined else torch.zeros(0, dtype=torch.float64, device="cpu")


@run_eagerly
def _note_step(check: weakref.ref[ReplicaCheck], optimizer: Optimizer, *_: Any) -> None:
    if (found := check()) is not None:
        found.note_step(optimizer)


def octets_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, contiguous and aligned; a copy if they are not."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    return octets if octets.storage_offset() % 8 == 0 else octets.clone()


def _sums_of_bits(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sum of the 8-byte words of each tensor, modulo 2 ** 64."""
    sums = []
    for octets in map(octets_of, tensors):
        whole = octets.numel() // 8 * 8
        total = octets[:whole].view(torch.int64).sum()
        sums.append(total if whole == octets.numel() else total + octets[whole:].sum())
    on_host = {device: iter(torch.stack([s for s in sums if s.device == device]).tolist()) for device in _devices(sums)}
    return [next(on_host[one.device]) for one in sums]


def _devices(tensors: Iterable[Tensor]) -> set[torch.device]:
    return {tensor.device for tensor in tensors}


def _wait_for_gpus(tensors: Iterable[Tensor]) -> None:
    """Wait for the steps of optimizers, which may run on another stream than the current one."""
    for device in _devices(tensors):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _hash(values: Sequence[Any], octets: int) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=octets).digest(), "little")


def _kind_of(device: torch.device) -> str:
    """Return what the last bits of arithmetic depend on."""
    name = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}" if device.type == "cpu" else ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    return f"{device.type} {name} {torch.__version__}"


def _measured(changes: Tensor) -> tuple[float, float]:
    return float(changes @ torch.arange(len(changes), device="cpu").double().cos()), float(changes.norm())


def _differ(rows: Sequence[Sequence[float]]) -> bool:
    """Return whether projections, each with the norm of the updates, differ."""
    numbers = [row[0] for row in rows]
    if not all(math.isfinite(number) for row in rows for number in row):
        return False
    return max(numbers) - min(numbers) > _TOLERANCE * max(row[1] for row in rows)


def _first_parameter(found: Sequence[Sequence[Sequence[Any]]], differ: Callable[[Any], bool]) -> str:
    """Return the name of the first parameter whose entries, (name, *numbers) on each rank, differ."""
    each = ([tuple(entry) for entry in entries] for entries in zip(*found, strict=False))
    return next((repr(entries[0][0]) for entries in each if differ(entries)), "unknown")


def _of_odd(numbers: Mapping[int, float], tolerance: float) -> str:
    """Return " of rank 1", of the ranks whose numbers are not those of the majority, or of all without a majority."""
    alike = [{rank for rank, each in numbers.items() if abs(each - own) <= tolerance} for own in numbers.values()]
    majority = max(alike, key=len)
    odd = numbers.keys() - majority if 2 * len(majority) > len(numbers) else {}
    return f" of {name_ranks(odd or numbers.keys())}"

"""Replica check: ranks compare numbers of their weights, in messages that they send anyway."""

from __future__ import annotations

import math
import os
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
_REASONS = (
    "so the replicas drift apart. The ranks must average gradients before the step. Likely reasons: the network is not "
    "in DistributedDataParallel or another wrapper, and the loop does not average its gradients; the loop calls the "
    "network past its wrapper, such as model.module(x); the step follows a backward within no_sync(); the optimizer "
    "steps in a hook within backward; each rank adds noise of its own, or begins with weights of its own; a rank alone "
    "writes weights; or its memory flips bits. GANGLINE_REPLICA_CHECK=0 leaves out this check"
)
_Row = Sequence[float]  # a number, and the scale of its tolerance


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
    return float(_hash(sorted({*map(_kind_of, given)}), 2) * _KIND + _hash(_sums_of_bits(given), 4)) if given else 0.0


def compare_weights(
    numbers: Sequence[float], weights: Mapping[Any, Tensor], all_gather: Callable[[Any], Sequence[Any]], where: str
) -> None:
    """Raise MismatchError, on all ranks, if those with one kind of device have different weights.

    ``numbers`` are the `number_of_weights` of each rank, 0 for none. Only if they differ, the ranks ``all_gather`` once
    more, to find the first parameter. ``where`` begins the text of the error.
    """
    for kind in sorted({number // _KIND for number in numbers if number}):
        rows = {rank: (number, 0.0) for rank, number in enumerate(numbers) if number // _KIND == kind}
        if _differ(rows.values()):
            entries = [[*pair, 0.0] for pair in zip(weights, _sums_of_bits([*weights.values()]), strict=True)]
            raise _mismatch(f"{where} the weights of", "differ", rows, all_gather(entries))


@run_eagerly
class ReplicaCheck:
    """Compares this rank's weights with those of the other ranks: their updates in some steps, their bits in epochs.

    An update is the difference of some values of each parameter to those that were read last.
    """

    def __init__(self, chosen: Callable[[], dict[str, Tensor]], all_gather: Callable[[Any], Sequence[Any]]) -> None:
        """Add a hook to all optimizers, which goes with this object; ``chosen`` returns what is equal on all ranks."""
        self._chosen, self._all_gather, self._interval = chosen, all_gather, check_interval()
        self._steps, self._has_stepped, self._has_trained = 0, False, False
        self._compared: dict[str, Tensor] = {}
        if self._interval:
            self._read()
            weakref.finalize(self, register_optimizer_step_post_hook(partial(_note_step, weakref.ref(self))).remove)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note whether the optimizer has updated a compared parameter."""
        if not self._has_stepped:
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._has_stepped = any(id(parameter) in self._ids for parameter in stepped)
            self._has_trained |= self._has_stepped

    def updates(self) -> _Row:
        """Return a projection of the updates since the last compared step, and their norm; NaN: none to compare."""
        if not self._has_stepped:
            return math.nan, math.nan
        self._steps, self._has_stepped = self._steps + 1, False
        if self._steps <= _FIRST_STEPS or not self._steps % self._interval:
            ids, before = self._ids, self._values
            self._read()
            if ids == self._ids and before.shape == self._values.shape:
                self._changes = self._values - before
                return _measured(self._changes)
        return math.nan, math.nan

    def compare_updates(self, rows: Sequence[_Row], where: str) -> None:
        """Raise MismatchError, on all ranks, if their `updates` differ; ``where`` begins its text."""
        if _differ(rows):
            parts = torch.split(self._changes, self._sizes)
            found = self._all_gather([[name, *_measured(part)] for name, part in zip(self._known, parts, strict=True)])
            text = f"differently (projections of the updates: {', '.join(f'{row[0]:.3g}' for row in rows)})"
            raise _mismatch(f"{where} the optimizer has changed the weights of", text, dict(enumerate(rows)), found)

    def weights(self) -> float:
        """Return `number_of_weights`; 0 before the first step of an optimizer. New parameters are left out once."""
        if not self._has_trained:
            return 0.0
        known = self._known
        self._read()
        self._compared = {name: one for name, one in self._known.items() if known.get(name) is one}
        return number_of_weights(self._compared.values())

    def compare_weights(self, numbers: Sequence[float], where: str) -> None:
        """Raise MismatchError, on all ranks, if their `weights` differ; see `compare_weights`."""
        compare_weights(numbers, self._compared, self._all_gather, where)

    def _read(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a step may run on another stream
            torch.cuda.synchronize()
        self._known = self._chosen()
        self._ids = frozenset(map(id, self._known.values()))
        values = [one.detach().reshape(-1)[:: max(1, one.numel() // _VALUES)] for one in self._known.values()]
        self._sizes = [*map(len, values)]
        joined = torch.cat([one.to(values[0].device) for one in values]) if values else torch.zeros(0, device="cpu")
        self._values = joined.cpu().double()


@run_eagerly
def _note_step(check: weakref.ref[ReplicaCheck], optimizer: Optimizer, *_: Any) -> None:
    if (found := check()) is not None:
        found.note_step(optimizer)


def _measured(changes: Tensor) -> _Row:
    return float(changes @ torch.arange(len(changes), device="cpu").double().cos()), float(changes.norm())


def _differ(rows: Iterable[_Row]) -> bool:
    numbers, scales = zip(*rows, strict=True)
    is_known = all(map(math.isfinite, (*numbers, *scales)))
    return is_known and max(numbers) - min(numbers) > _TOLERANCE * max(scales)


def _mismatch(before: str, after: str, rows: Mapping[int, _Row], found: Sequence[Sequence[Any]]) -> MismatchError:
    """Return the error of ranks whose rows differ; ``found`` has (name, *row) of each parameter, by rank."""
    near = _TOLERANCE * max(scale for _, scale in rows.values())
    alike = [{rank for rank, row in rows.items() if abs(row[0] - own) <= near} for own, _ in rows.values()]
    majority = max(alike, key=len)
    odd = rows.keys() - majority if 2 * len(majority) > len(rows) else set()
    each = zip(*(found[rank] for rank in rows), strict=False)
    name = next((repr(entries[0][0]) for entries in each if _differ([entry[1:] for entry in entries])), "unknown")
    ranks = name_ranks(odd or rows.keys())
    return MismatchError(f"{before} {ranks} {after}, first those of parameter {name}, {_REASONS}")


def octets_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, contiguous and aligned; a copy if they are not."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    return octets if octets.storage_offset() % 8 == 0 else octets.clone()


def _sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return the sum of each tensor's words of 8 bytes; each device sends its sums to the host at once."""
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for place, tensor in enumerate(tensors):
        octets = octets_of(tensor)
        whole = octets.numel() // 8 * 8
        by_device.setdefault(tensor.device, {})[place] = octets[:whole].view(torch.int64).sum() + octets[whole:].sum()
    found: dict[int, int] = {}
    for sums in by_device.values():
        found |= zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    return [found[place] for place in range(len(tensors))]


def _hash(values: Iterable[Any], octets: int) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=octets).digest(), "little")


def _kind_of(tensor: Tensor) -> str:
    """Return what the last bits of arithmetic depend on."""
    device = tensor.device
    name = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else name}, torch {torch.__version__}"

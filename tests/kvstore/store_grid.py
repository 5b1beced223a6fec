"""Grid of store calls: one table of axes, cells that combine them, and a reference that is a plain dictionary.

Each cell makes three rounds of one call on keys of its own, with other calls in between. Every result has the bits of
the reference, whose sums are exact; or all workers raise an error that `Walk.refusal` names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gangline.kvstore import RowSparse
from gangline.kvstore.registry import IN_PROCESS

Cell = dict[str, Any]
"""One value of each axis, and the cell's number."""
MANY = 9
"""Keys of a list that is long enough to be moved jointly."""
SHAPES = {"0-d": (), "empty": (0,), "no columns": (3, 0), "one": (1,), "odd": (5,), "matrix": (2, 3)}
SHAPES |= {"not small": (70, 100), "split": (220, 300)}
AXES: dict[str, Sequence[Any]] = {
    "call": "push, pushpull, one by one, weighted, lacking, bucket, bucket of dicts, bucket apart, weighted bucket",
    "keys": "one, list of one, two, many, repeated",
    "devices": (1, 2, 3, 4, "mixed"),
    "shape": (*SHAPES, "mixed"),
    "dtype": "float32, float64, float16, bfloat16, float32, integer, bool, complex64, float64, bfloat16, integer",
    "value": "tensor, transposed, gaps, expanded, parameter, array, array with gaps, backwards, foreign bytes, "
    "read-only, rows",
    "out": "tensor, transposed, gaps, expanded, parameter, array with gaps, read-only, None, the value, another value, "
    "rows",
    "update": "none, updater, sgd, momentum, nesterov, adam, adagrad, clip_gradient, clip_norm, clip_global_norm",
    "compression": "none, 2bit, fp16, none, topk, bf16 with feedback, none, fp16 both ways",
    "order": "in order, async, async by priority",
    "init": "list, one by one, broadcast, async, rows",
    "between": "nothing, one key, other keys, assign, learning rate, save and load, exchange, join, refused, "
    "optimizer again, row pull",
}
"""The axes, in text separated by commas; a value that is repeated is drawn more often."""
AXES = {name: values.split(", ") if isinstance(values, str) else values for name, values in AXES.items()}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
ORDER = 11
"""Prime number: at least as large as the longest axis."""
ROUNDS = 3
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.5}),
    "momentum": ("sgd", {"lr": 0.5, "momentum": 0.75, "weight_decay": 0.25}),
    "nesterov": ("nag", {"lr": 0.5, "momentum": 0.5}),
    "adam": ("adam", {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.01, "weight_decay": 0.01}),
    "adagrad": ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.01}),
    "clip_gradient": ("sgd", {"lr": 0.5, "clip_gradient": 1.5, "rescale_grad": 0.5}),
    "clip_norm": ("sgd", {"lr": 0.5, "momentum": 0.5, "clip_norm": 2.0}),
    "clip_global_norm": ("sgd", {"lr": 0.5, "momentum": 0.5, "clip_global_norm": 2.0}),
}
COMPRESSIONS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "2bit": {"type": "2bit", "threshold": 1.5},
    "fp16": {"type": "fp16"},
    "topk": {"type": "topk", "ratio": 0.3},
    "bf16 with feedback": {"type": "bf16", "error_feedback": True},
    "fp16 both ways": {"type": "fp16", "pull_type": "fp16"},
}


@dataclass(frozen=True)
class Job:
    """Store of some workers and servers."""

    store: str
    workers: int = 1
    servers: int = 0

    @property
    def is_async(self) -> bool:
        return "async" in self.store

    @property
    def is_alone(self) -> bool:
        return self.store in IN_PROCESS

    @property
    def is_dist(self) -> bool:
        return self.servers > 0


def cells(strength: int) -> Iterator[Cell]:
    """Yield cells in which any ``strength`` axes have all combinations of their values.

    They are an orthogonal array: polynomials of a degree below ``strength`` over a prime field, each evaluated at all
    points and at infinity (Bush, Orthogonal Arrays of Index Unity, 1952).
    """
    for number, (first, *others) in enumerate(product(range(ORDER), repeat=strength)):
        levels = [first]
        for x in range(ORDER):
            level = first
            for one in others:
                level = level * x + one
            levels.append(level % ORDER)
        yield made(number, levels)


def made(number: int, levels: Sequence[int]) -> Cell:
    """Return the cell with these places in the axes."""
    cell = {"number": number} | {
        name: of_axis[level % len(of_axis)] for (name, of_axis), level in zip(AXES.items(), levels, strict=True)
    }
    dtype = INTEGERS[number % len(INTEGERS)] if cell["dtype"] == "integer" else cell["dtype"]
    return cell | {"dtype": getattr(torch, dtype)}


def text_of(cell: Cell) -> str:
    return ", ".join(f"{name} {str(value)!r}" for name, value in cell.items())


# Values


@lru_cache(maxsize=64)
def _repeated(numel: int, dtype: torch.dtype) -> Tensor:
    low = -2 if dtype.is_signed else 0
    return (torch.arange(7) % 5 * 2 % 5 + low).to(dtype).repeat(numel // 7 + 2)


def numbers(shape: Sequence[int], dtype: torch.dtype, *seed: int) -> Tensor:
    """Return whole numbers from -2 to 2, or 0 to 4, that differ by seed: their sums are exact in every dtype."""
    numel = math.prod(shape)
    first = sum(factor * one for factor, one in zip((1, 2, 3, 7, 11), seed, strict=False)) % 7
    return _repeated(numel, dtype)[first : first + numel].reshape(tuple(shape)).clone()


def with_gaps(value: Tensor) -> Tensor:
    """Return a view of every other element of a larger tensor."""
    if not value.dim():
        return torch.full((3,), 77).to(value.dtype).index_put_((torch.tensor(1),), value)[1]
    larger = torch.full((*value.shape[:-1], 2 * value.shape[-1]), 77).to(value.dtype)
    larger[..., ::2] = value
    return larger[..., ::2]


def transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT if value.dim() > 1 else value.clone()


def array_of(make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Callable[[Tensor], Any]:
    """Return what makes an array, or a tensor of a dtype that numpy lacks."""
    return lambda value: value.clone() if value.dtype == torch.bfloat16 else make(value.numpy().copy())


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def backwards(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array


def array_with_gaps(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not array.ndim:
        return array
    larger = np.full((*array.shape[:-1], 2 * array.shape[-1]), 77).astype(array.dtype)
    larger[..., ::2] = array
    return larger[..., ::2]


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": Tensor.clone,
    "transposed": transposed,
    "gaps": with_gaps,
    "expanded": lambda value: (
        (value.flatten()[:1].clone() if value.numel() else value.new_zeros(1))
        .reshape([1] * value.dim())
        .expand(value.shape)
    ),
    "parameter": lambda value: nn.Parameter(value.clone(), value.is_floating_point() or value.is_complex()),
    "array": array_of(lambda array: array),
    "array with gaps": array_of(array_with_gaps),
    "backwards": array_of(backwards),
    "foreign bytes": array_of(lambda array: array.astype(array.dtype.newbyteorder(">"))),
    "read-only": array_of(read_only),
}
"""Forms of a value and of an output."""


def values_of(form: Any) -> Tensor:
    return form.detach() if isinstance(form, Tensor) else torch.from_numpy(form)


def is_writable(form: Any) -> bool:
    """Return whether a store can write into a form: see `numpy_arrays.shared` and `KVStore.pull`."""
    if isinstance(form, RowSparse) or (isinstance(form, Tensor) and form.layout == torch.sparse_coo):
        return False
    if isinstance(form, Tensor):
        is_expanded = any(not stride and size > 1 for stride, size in zip(form.stride(), form.shape, strict=True))
        return not (is_expanded and form.numel())
    return form.flags.writeable and form.dtype.isnative and not any(stride < 0 for stride in form.strides)


def memory_of(form: Any) -> list[bytes]:
    """Return all bytes of the memory that a form is in, those around a view too."""
    if isinstance(form, RowSparse):
        return [*memory_of(form.indices), *memory_of(form.values)]
    if isinstance(form, Tensor) and form.layout == torch.sparse_coo:
        return [*memory_of(form._indices()), *memory_of(form._values())]
    if isinstance(form, Tensor):
        return [torch.empty(0, dtype=torch.uint8).set_(form.untyped_storage()).numpy().tobytes()]
    return [(form if form.base is None else form.base).tobytes()]


def fill(form: Any, value: float) -> None:
    (form.detach() if isinstance(form, Tensor) else form)[...] = value


@dataclass
class Plain:
    """Value that a device pushes, as the reference takes it."""

    dense: Tensor
    rows: list[int] | None = None
    """Row numbers of a row-sparse value."""


# The reference


@dataclass
class Reference:
    """Weights by key: sums over devices and workers, and a step of a plain torch optimizer."""

    job: Job
    update: str
    compression: str
    values: dict[Any, Tensor] = field(default_factory=dict)
    history: dict[Any, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Values that a worker of an async store may pull: those after each worker's part of the last round."""
    residuals: dict[Any, Tensor] = field(default_factory=dict)
    optimizers: dict[Any, torch.optim.Optimizer] = field(default_factory=dict)
    pending: dict[Any, tuple[Tensor, list[int] | None]] = field(default_factory=dict)
    rate: float = 0.0
    factors: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """lr_mult and wd_mult."""
    halved: set[Any] = field(default_factory=set)
    """Keys of an optimizer with half the learning rate."""

    def push(
        self,
        key: Any,
        of_ranks: Sequence[Sequence[Plain]],
        weights: Sequence[float] | None = None,
        joined: int | None = None,
    ) -> None:
        """Take the values of each rank's devices; none of a rank that has no value for the key.

        With compression an allreduce store takes zeros for them, so that residuals are sent, except of a rank that is
        ``joined``.
        """
        ranks = range(len(of_ranks))
        is_pushed = all(of_ranks[rank] and (weights is None or weights[rank]) for rank in ranks)
        self.history[key] = [] if is_pushed else [self.values[key].clone()]
        for together in [[rank] for rank in ranks] if self.job.is_async else [ranks]:
            part = {rank: of_ranks[rank] for rank in together}
            of_part = None if weights is None else {rank: weights[rank] for rank in together}
            total = self._total(key, part, of_part, joined)
            if total is not None:
                self._apply(key, total.to(self.values[key].dtype), _rows(part, weights))
                self.history[key].append(self.values[key].clone())

    def _total(
        self, key: Any, part: dict[int, Sequence[Plain]], weights: dict[int, float] | None, joined: int | None
    ) -> Tensor | None:
        job, sums = self.job, []
        parts = {rank: values for rank, values in part.items() if values and (weights is None or weights[rank])}
        is_dense = {rank: any(value.rows is None for value in values) for rank, values in parts.items()}
        for rank, values in parts.items():
            factor = 1.0 if weights is None or job.is_alone else weights[rank] / sum(weights.values())
            if job.is_alone:  # each device is a sender
                sums += [
                    wide(value.dense) if value.rows is not None else self._sent(value.dense, (key, device))
                    for device, value in enumerate(values)
                ]
                continue
            total = sum(wide(value.dense) for value in values).to(values[0].dense.dtype)
            if not (any(is_dense.values()) if job.store == "allreduce" else is_dense[rank]):
                sums.append(wide(total) * factor)
            elif job.is_dist and weights is not None:  # codecs see a worker's part of the mean
                sums.append(self._sent(total / job.workers, (key, rank)) * job.workers * factor)
            else:
                sums.append(self._sent(total if factor == 1 else total * factor, (key, rank)))
        if job.store == "allreduce" and any(is_dense.values()):  # these send their residuals
            zeros = torch.zeros_like(self.values[key])
            sums += [self._sent(zeros, (key, rank)) for rank in part if rank not in parts and rank != joined]
        if not sums:
            return None
        total = sum(sums[1:], sums[0])
        return total != 0 if self.values[key].dtype == torch.bool else total

    def _sent(self, dense: Tensor, sender: Any) -> Tensor:
        """Return what a codec makes of a value, by its formula."""
        kind = self.compression
        if kind == "none" or not dense.is_floating_point():
            return wide(dense)
        if kind in ("fp16", "fp16 both ways"):
            return wide(dense.float().half())
        total = self.residuals.get(sender, torch.zeros_like(dense)) + dense
        if kind == "2bit":
            sent = ((total >= 1.5).to(dense.dtype) - (total <= -1.5).to(dense.dtype)) * 1.5
        elif kind == "topk":
            sent = torch.zeros_like(total)
            for piece, into in zip(self.pieces(sender[0], total), self.pieces(sender[0], sent), strict=True):
                largest = piece.abs().sort(descending=True, stable=True).indices[: math.ceil(piece.numel() * 3 / 10)]
                into[largest] = piece[largest]
        else:
            sent = total.float().bfloat16().to(dense.dtype)
        self.residuals[sender] = total - sent
        return wide(sent)

    def pieces(self, key: Any, value: Tensor) -> Sequence[Tensor]:
        """Return the parts of a key's flat value that are encoded by themselves."""
        return value.view(-1).split(self.splits.get(key) or [value.numel()])

    splits: dict[Any, list[int]] = field(default_factory=dict)
    """Elements of the shards of split keys."""

    def _apply(self, key: Any, total: Tensor, rows: list[int] | None) -> None:
        value = self.values[key]
        if self.update == "none":
            self.values[key] = (
                total if not self.job.is_async else value | total if value.dtype == torch.bool else value + total
            )
        elif self.update == "updater":
            updater(key, total, value)
        elif self.update == "clip_global_norm":
            self.pending[key] = total, rows
        else:
            self._step([key], [total], [rows])

    def end_updates(self) -> None:
        if self.pending:
            gradients, rows = zip(*self.pending.values(), strict=True)
            self._step([*self.pending], gradients, rows)
            self.pending.clear()

    def _step(self, keys: Sequence[Any], gradients: Sequence[Tensor], rows: Sequence[list[int] | None]) -> None:
        """Make a step of each key's optimizer; a row-sparse gradient changes nothing of other rows."""
        _name, arguments = OPTIMIZERS[self.update]
        weights = [self.values[key] for key in keys]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient * arguments.get("rescale_grad", 1.0)
            if "clip_gradient" in arguments:
                weight.grad.clamp_(-arguments["clip_gradient"], arguments["clip_gradient"])
            if "clip_norm" in arguments:
                nn.utils.clip_grad_norm_([weight], arguments["clip_norm"])
        if "clip_global_norm" in arguments:
            nn.utils.clip_grad_norm_(weights, arguments["clip_global_norm"])
        for key, weight, named in zip(keys, weights, rows, strict=True):
            optimizer = self.optimizers.get(key) or self._optimizer(key)
            optimizer.param_groups[0]["lr"] = self.rate * self.factors[key][0] / (1 + (key in self.halved))
            before = {state: one.clone() for state, one in self._by_row(optimizer, weight)} if named is not None else {}
            optimizer.step()
            for state, one in self._by_row(optimizer, weight) if named is not None else ():
                others = torch.ones(len(one), dtype=torch.bool)
                others[named] = False
                one[others] = before[state][others] if state in before else 0

    def _optimizer(self, key: Any) -> torch.optim.Optimizer:
        name, arguments = OPTIMIZERS[self.update]
        arguments = {one: value for one, value in arguments.items() if not one.startswith(("clip", "rescale"))}
        if "weight_decay" in arguments:
            arguments["weight_decay"] *= self.factors[key][1]
        if name == "nag":
            arguments["nesterov"] = True
        kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
        self.optimizers[key] = kinds.get(name, torch.optim.SGD)([self.values[key]], **arguments)
        return self.optimizers[key]

    @staticmethod
    def _by_row(optimizer: torch.optim.Optimizer, weight: Tensor) -> list[tuple[str, Tensor]]:
        state = optimizer.state.get(weight, {})
        return [
            ("", weight),
            *((name, one) for name, one in state.items() if getattr(one, "shape", None) == weight.shape),
        ]


def _rows(part: dict[int, Sequence[Plain]], weights: Sequence[float] | None) -> list[int] | None:
    """Return the rows of a round, or None if a worker that counts has a dense value."""
    values = [value for rank, of_rank in part.items() if weights is None or weights[rank] for value in of_rank]
    rows = [value.rows for value in values if value.rows is not None]
    return [row for of_value in rows for row in of_value] if len(rows) == len(values) else None


def wide(value: Tensor) -> Tensor:
    return value.to(
        torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else torch.int64
    )


def updater(key: Any, summed: RowSparse | Tensor, stored: Tensor) -> None:
    """Subtract, or toggle bools; and change the sum, which an updater may."""
    total = summed.to_dense() if isinstance(summed, RowSparse) else summed
    stored.logical_xor_(total) if stored.dtype == torch.bool else stored.sub_(total)
    (summed.values if isinstance(summed, RowSparse) else summed).zero_()

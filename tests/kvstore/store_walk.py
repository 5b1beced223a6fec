"""Walks of cells of `store_grid` on a store, whose every result is compared with the reference."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore, RowSparse
from gangline.kvstore.buckets import Bucket, plan
from gangline.kvstore.optimizer.group import OptimizerGroup
from tests.kvstore.keyed import LIMIT
from tests.kvstore.store_grid import (
    COMPRESSIONS,
    FORMS,
    MANY,
    OPTIMIZERS,
    ROUNDS,
    SHAPES,
    Cell,
    Job,
    Plain,
    Reference,
    fill,
    is_writable,
    memory_of,
    numbers,
    text_of,
    updater,
    values_of,
)


@dataclass
class Refusal:
    """Documented error of a call."""

    kind: type[Exception]
    words: str
    after_push: bool = False
    """True if the push before it counts."""


class Walk:
    """Cells on one store, beside the reference."""

    def __init__(self, kv: KVStore, job: Job, folder: str) -> None:
        self.kv, self.job, self.folder = kv, job, folder
        self.reference = Reference(job, "none", "none")
        self.last = job.workers - 1
        self.groups: list[OptimizerGroup] = []
        self.bucket: Bucket | None = None
        self.flats: list[Tensor] = []
        """A bucket that was pulled, by device."""

    # Settings

    def set_up(self, group: Sequence[Cell]) -> None:
        """Set the optimizer or updater and the compression of a group of cells."""
        kv, update, compression = self.kv, group[0]["update"], group[0]["compression"]
        if update == "updater" and self.job.is_dist:
            self.refused(lambda: kv.set_updater(updater), Refusal(ValueError, "takes no updater; use set_optimizer"))
            update = "none"
        if update == "clip_global_norm" and self.job.is_async:
            self.refused(lambda: kv.set_optimizer(OPTIMIZERS[update]), Refusal(ValueError, "expected a sync store"))
            update = "sgd"
        params = COMPRESSIONS[compression]
        if compression == "fp16 both ways" and not self.job.is_dist:
            refusal = Refusal(ValueError, "pull_type is 'fp16', but")
            self.refused(lambda: kv.set_gradient_compression(params), refusal)
            compression, params = "fp16", COMPRESSIONS["fp16"]
        self.reference = reference = Reference(self.job, update, compression)
        # with two optimizers a rate that no step has used forbids join()
        refuses_join = self.job.store == "allreduce" and any(cell["between"] == "join" for cell in group)
        for cell in group:
            first, second, *others = (*self.keys(cell), None, None)
            others = [*others, *self.other_keys(cell)]
            reference.factors |= dict.fromkeys(others, (1.0, 1.0)) | {first: (2.0, 1.0), second: (1.0, 0.0)}
            if has_own_group(cell) and not refuses_join:
                reference.halved |= {key for key in (first, second, *others) if key is not None}
        self.groups = []
        kv.set_gradient_compression(params)
        if update == "updater":
            kv.set_updater(updater)
        elif update != "none":
            self.set_optimizer()

    def set_optimizer(self) -> None:
        """Set an optimizer for all keys, and once another one of half the learning rate for a group of them."""
        name, arguments = OPTIMIZERS[self.reference.update]
        factors = {key: both for key, both in self.reference.factors.items() if key is not None}
        spec = arguments | {"lr_mult": {key: lr for key, (lr, _) in factors.items() if lr != 1}}
        if "weight_decay" in arguments:
            spec["wd_mult"] = {key: wd for key, (_, wd) in factors.items() if wd != 1}
        is_new = not self.groups
        self.groups = [self.kv.set_optimizer((name, spec)), *self.groups[1:]]
        if is_new and self.reference.halved:
            half = spec | {"lr": spec["lr"] / 2}
            self.groups.append(self.kv.set_optimizer((name, half), keys=self.reference.halved))
        self.reference.optimizers = {
            key: one for key, one in self.reference.optimizers.items() if key in self.reference.halved
        }
        self.reference.rate = arguments["lr"]
        if not is_new:
            self.set_rate(arguments["lr"])

    def set_rate(self, rate: float) -> None:
        self.reference.rate = rate
        for group, of_group in zip(self.groups, (rate, rate / 2), strict=False):
            if not self.kv.rank:
                group.set_learning_rate(of_group)
        self.meet()

    def refused(self, call: Callable[[], Any], refusal: Refusal) -> None:
        """Make a call that all workers must refuse."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  checked
            self.check_refusal(error, refusal)
        else:
            raise AssertionError(f"not refused: expected {refusal}")

    def check_refusal(self, error: Exception, refusal: Refusal) -> None:
        everywhere = self.job.store == "allreduce" and self.job.workers > 1
        kinds = (refusal.kind, MismatchError) if everywhere else (refusal.kind,)
        if type(error) not in kinds or refusal.words not in str(error):
            raise error

    # Keys and values

    def keys(self, cell: Cell) -> list[Any]:
        count = {"two": 2, "many": MANY, "repeated": 2}.get(cell["keys"], 1)
        number = cell["number"]
        return [1000 * number + i if number % 2 else f"{number}.{i}" for i in range(count)]

    def other_keys(self, cell: Cell) -> list[Any]:
        return [f"{cell['number']} other {i}" for i in range(MANY + 2)] if cell["between"] == "other keys" else []

    def shape(self, cell: Cell, i: int) -> tuple[int, ...]:
        if cell["shape"] == "mixed":
            return [*SHAPES.values()][i % len(SHAPES)]
        return SHAPES[cell["shape"] if i < 2 or cell["shape"] != "split" else "matrix"]

    def plain(self, cell: Cell, i: int, rank: int, round_: int, device: int) -> tuple[Plain, RowSparse | None]:
        """Return a device's value of key i, and the rows of it if it is row-sparse."""
        shape, rank = self.shape(cell, i), 0 if self.job.is_async else rank
        seed = (cell["number"], round_, rank, device, i)
        has_rows = cell["value"] == "rows" or (cell["init"] == "rows" and round_ == 1)
        is_sparse = has_rows and shape and not cell["call"].endswith(("bucket", "apart"))
        if not is_sparse or (cell["number"] % 3 == 0 and (rank + device) % 2):
            value = numbers(shape, cell["dtype"], *seed)
            return Plain(FORMS["expanded"](value).clone() if cell["value"] == "expanded" else value), None
        ids = [(rank + round_) % shape[0], shape[0] - 1, (rank + round_) % shape[0]] if shape[0] else []
        if rank and rank == self.last and round_ == 1:
            ids = []  # a worker without rows
        values = numbers((len(ids), *shape[1:]), cell["dtype"], *seed)
        dense = torch.zeros(shape, dtype=cell["dtype"])
        for row, one in zip(ids, values, strict=True):
            dense[row] += one
        return Plain(dense, ids), RowSparse(ids, values, shape)

    # A cell

    def walk(self, cell: Cell) -> None:
        keys, reference = self.keys(cell), self.reference
        if self.job.is_dist and cell["dtype"].is_complex:
            self.refused(lambda: self.init(cell, keys), Refusal(TypeError, "has dtype complex64; expected one of"))
            return
        self.init(cell, keys)
        if self.job.is_dist:
            for key in keys:
                shards = [shard.numel for shard in self.kv._shards[key]]  # type: ignore[attr-defined]
                reference.splits |= {key: shards} if len(shards) > 1 else {}
        self.bucket = None
        if "bucket" in cell["call"]:
            keys = keys if cell["shape"] != "mixed" else keys[: len(SHAPES)]
            (self.bucket,) = plan([(key, reference.values[key]) for key in keys], 1 << 30)
            if cell["call"] != "bucket apart":
                flat = self.bucket.empty(torch.device("cpu")) if cell["number"] % 2 else None
                if self.fits(cell) or self.job.is_dist:
                    self.kv.fuse(self.bucket, flat)
                else:
                    self.refused(lambda: self.kv.fuse(self.bucket, flat), Refusal(ValueError, "does not fit optimizer"))
        for round_ in range(ROUNDS):
            self.round(cell, keys, round_)
            if round_ < ROUNDS - 1:
                self.between(cell, keys, round_)

    def init(self, cell: Cell, keys: Sequence[Any]) -> None:
        kv, way = self.kv, cell["init"]
        of_rank = [[numbers(self.shape(cell, i), cell["dtype"], i, r) for i in range(len(keys))] for r in (0, kv.rank)]
        values: list[Any] = [one.clone() for one in of_rank[1]]
        if way == "rows":
            for i, value in enumerate(values):
                if value.dim():
                    values[i] = RowSparse(range(len(value)), value, value.shape)
        if way == "one by one":
            for key, value in zip(keys, values, strict=True):
                kv.init(key, FORMS["backwards"](value))
        elif way == "broadcast":
            outs = [[FORMS["gaps"](value), value] for value in values]
            kv.broadcast(keys, values, outs)
            for of_key, expected in zip(outs, of_rank[0], strict=True):
                assert all(torch.equal(out, expected) for out in of_key), "broadcast"
        else:
            kv.init(keys, values, async_op=way == "async").wait()
        for key, value in zip(keys, of_rank[0], strict=True):
            self.reference.values[key] = value
        for form in values:
            fill(form, 1) if isinstance(form, Tensor) else form.values.fill_(1)  # the store has its own
        self.meet()

    def round(self, cell: Cell, keys: Sequence[Any], round_: int, absent: int | None = None) -> None:
        """Make the cell's call, and check what it does; ``absent``: a rank that is in join()."""
        call, reference, rank = cell["call"], self.reference, self.kv.rank
        repeats = cell["keys"] == "repeated" and self.bucket is None and call != "one by one"
        positions = [*range(len(keys)), *([0] if repeats else [])]
        devices = [cell["devices"] if cell["devices"] != "mixed" else 1 + i % 3 for i in positions]
        if call in ("bucket", "bucket apart", "weighted bucket"):
            devices = [devices[0]] * len(positions)
        lacks = call in ("lacking", "bucket of dicts") and round_ in (0, 2) and not self.keeps_step
        made = [
            [
                []
                if of_rank == absent or (lacks and not of_rank and not place)
                else [self.plain(cell, i, of_rank, round_, device + 5 * place) for device in range(count)]
                for of_rank in range(self.job.workers)
            ]
            for place, (i, count) in enumerate(zip(positions, devices, strict=True))
        ]
        weights = self.weights(cell, round_, absent)
        self.flats = []
        if rank != absent:
            values = [[self.form(cell, *one, device) for device, one in enumerate(of[rank])] for of in made]
            outs = self.outs(cell, [self.shape(cell, i) for i in positions], devices, values)
            before = {id(one): memory_of(one) for of in [*values, *outs] for one in of}
            refusal = self.refusal(
                cell, values, outs, is_pushed=any(of for of_key in made for of in of_key) and weights != [0.0]
            )
            try:
                self.call(cell, [keys[i] for i in positions], values, outs, weights and weights[rank], round_)
            except Exception as error:
                if refusal is None:
                    raise
                self.check_refusal(error, refusal)
                may_write = cell["order"] != "in order" or call == "one by one"
                self.check_values(values, outs if may_write else [], before)
                self.was_refused = not refusal.after_push
                if self.was_refused:
                    self.check_stored(cell, keys)
                    return
                outs = []
            else:
                self.was_refused = False
                assert refusal is None, f"not refused: expected {refusal}"
                self.check_values(values, outs, before)
        for key in keys:
            pushed = [
                [one for at, i in enumerate(positions) if keys[i] == key for one, _ in made[at][of_rank]]
                for of_rank in range(self.job.workers)
            ]
            reference.push(key, pushed, weights, absent)
        reference.end_updates()
        if rank != absent:
            for i, of in zip(positions, outs, strict=bool(outs)):
                for out in of:
                    self.check_out(cell, keys[i], out, before[id(out)])
            for flat in self.flats:
                assert self.bucket is not None
                for key, view in self.bucket.views(flat).items():
                    assert self.same(cell, view, self.expected(cell, key)), f"key {key!r} of a bucket: {_shown(view)}"
            self.check_stored(cell, keys)

    @property
    def keeps_step(self) -> bool:
        """True if all workers must push as often: their residuals, and updates in any order, are then the same."""
        return self.job.is_async and self.reference.compression in ("2bit", "topk", "bf16 with feedback")

    def drop_residuals(self) -> None:
        self.kv.set_gradient_compression(COMPRESSIONS[self.reference.compression])
        self.reference.residuals.clear()

    def weights(self, cell: Cell, round_: int, absent: int | None) -> list[float] | None:
        if cell["call"] not in ("weighted", "lacking", "weighted bucket"):
            return None
        weights = [1.0, 3.0, 4.0][: self.job.workers]
        if absent is not None:
            weights[absent] = 0.0
        elif cell["call"] != "weighted" and round_ == 2 and not self.keeps_step:
            weights[-1] = 0.0
        return weights

    def form(self, cell: Cell, plain: Plain, rows: RowSparse | None, device: int) -> Any:
        if rows is not None:
            return rows if device % 2 == 0 or self.bucket is not None else rows.to_coo()
        form = "tensor" if cell["value"] == "rows" else cell["value"]
        made = FORMS[form](plain.dense)
        return FORMS["tensor"](plain.dense) if self.bucket is not None and not isinstance(made, Tensor) else made

    def outs(
        self, cell: Cell, shapes: Sequence[tuple[int, ...]], devices: Sequence[int], values: list[list[Any]]
    ) -> list[list[Any]]:
        out, dtype = cell["out"], cell["dtype"]
        if self.bucket is not None:
            return []
        if out in ("None", "the value", "another value"):
            values = [one or [torch.zeros(shape, dtype=dtype)] for shape, one in zip(shapes, values, strict=True)]
            if out == "another value" and len({*shapes}) == 1 and len(shapes) > 1:
                return values[1:] + values[:1]
            return values if out != "another value" else [of[1:] + of[:1] for of in values]
        if out != "rows":
            return [
                [FORMS[out](torch.full(shape, 9).to(dtype)) for _ in range(count)]
                for shape, count in zip(shapes, devices, strict=True)
            ]
        rows = [torch.empty(0, *shape[1:], dtype=dtype) for shape in shapes]
        return [
            [
                RowSparse([], rows[at], shape) if shape and not d % 2 else torch.full(shape, 9).to(dtype)
                for d in range(n)
            ]
            for at, (shape, n) in enumerate(zip(shapes, devices, strict=True))
        ]

    def refusal(
        self, cell: Cell, values: Sequence[Sequence[Any]], outs: Sequence[Sequence[Any]], *, is_pushed: bool
    ) -> Refusal | None:
        """Return the error of a round, or None."""
        call, update = cell["call"], self.reference.update
        is_number = cell["dtype"].is_floating_point or cell["dtype"].is_complex
        is_pushpull = call == "pushpull" and cell["out"] != "rows"
        if call in ("weighted", "lacking", "weighted bucket") and not is_number:
            return Refusal(ValueError, "which has no weighted mean")
        unwritable = [one for of in outs for one in of if not is_writable(one)] if cell["out"] != "rows" else []
        if unwritable and is_pushpull:
            return Refusal(ValueError, "key ")
        if is_pushpull and update == "clip_global_norm":
            return Refusal(ValueError, "pushpull() would pull before the update")
        if is_pushed and not self.fits(cell):
            return Refusal(ValueError, f"does not fit optimizer '{OPTIMIZERS[update][0]}'")
        if unwritable:
            return Refusal(ValueError, "key ", after_push=True)
        if outs and cell["out"] == "rows" and any(not one.shape for of in outs for one in of):
            return Refusal(ValueError, "has no axes", after_push=True)
        return None

    def fits(self, cell: Cell) -> bool:
        """Return whether the optimizer, if any, supports the dtype."""
        update, dtype = self.reference.update, cell["dtype"]
        return update not in OPTIMIZERS or dtype.is_floating_point or (dtype.is_complex and update != "clip_gradient")

    def call(
        self, cell: Cell, keys: list[Any], values: list[Any], outs: list[Any], weight: float | None, round_: int
    ) -> None:
        kv, call, works = self.kv, cell["call"], []
        options: dict[str, Any] = {"async_op": cell["order"] != "in order"}
        if cell["order"] == "async by priority":
            options["priority"] = (cell["number"] + round_) % 5 - 2
        row_ids = [[one[0].shape[0] - 1, 0] * bool(one[0].shape[0]) if one[0].shape else [] for one in outs]

        def given(many: Sequence[Any]) -> Any:
            many = [one[0] if isinstance(one, list) and len(one) == 1 and round_ % 2 == 0 else one for one in many]
            given = many[0] if cell["keys"] == "one" else many
            return tuple(given) if cell["number"] % 3 == 0 and isinstance(given, list) else given

        def pull() -> None:
            if kv.updates_wait:
                kv.update()
            if self.bucket is not None:
                pass
            elif cell["out"] == "rows":
                ids = row_ids[0] if cell["keys"] == "one" else row_ids
                works.append(kv.row_sparse_pull(given(keys), given(outs), row_ids=ids, **options))
            elif call == "one by one":
                works.extend(kv.pull(key, out, **options) for key, out in zip(keys, outs, strict=True))
            else:
                works.append(kv.pull(given(keys), given(outs), **options))

        try:
            if call == "pushpull" and cell["out"] != "rows":
                into = () if cell["out"] == "None" else (given(outs),)
                works.append(kv.pushpull(given(keys), given(values), *into, **options))
                return
            if self.bucket is not None:
                works.append(self.push_bucket(cell, keys, values, weight, options))
            elif call == "one by one":
                pairs = reversed([*zip(keys, values, strict=True)])
                works.extend(kv.push(key, value, **options) for key, value in pairs)
            elif call in ("weighted", "lacking"):
                works.append(kv.push_weighted(given(keys), given([one or None for one in values]), weight, **options))
            else:
                works.append(kv.push(given(keys), given(values), **options))
            pull()
        finally:
            errors = [error for work in works if (error := _finished(work)) is not None]
            if errors:
                raise errors[0]

    def push_bucket(
        self, cell: Cell, keys: list[Any], values: list[Any], weight: float | None, options: dict[str, Any]
    ) -> Any:
        bucket = self.bucket
        if cell["call"] == "bucket of dicts":
            present = [key for key, of in zip(keys, values, strict=True) if of]
            count = max([len(of) for of in values])
            pairs = [*zip(keys, values, strict=True)]
            dicts = [{key: of[device] for key, of in pairs if device < len(of)} for device in range(count)]
            return self.kv.push_bucket(bucket, dicts or [{}], present, **options)
        flats = [bucket.empty(torch.device("cpu")) for _ in values[0]]
        for device, flat in enumerate(flats):
            for key, view in bucket.views(flat).items():
                view.copy_(values[keys.index(key)][device].detach())
        work = self.kv.push_bucket(bucket, flats, weight=weight, **options)
        if _finished(work) is None and not self.kv.updates_wait:
            self.kv.pull_bucket(bucket, flats, **options).wait()
            self.flats = flats
        return work

    # Checks

    def expected(self, cell: Cell, key: Any, *, is_pulled: bool = True) -> list[Tensor]:
        """Return the values that a key may have."""
        values = [self.reference.values[key], *self.reference.history[key]]
        if is_pulled and self.reference.compression == "fp16 both ways" and cell["dtype"].is_floating_point:
            return [value.float().half().to(value.dtype) for value in values]
        return values

    def same(self, cell: Cell, found: Tensor, expected: Sequence[Tensor]) -> bool:
        """Compare bits, but where norms are summed in another order, or a mean is taken of compressed values."""
        is_mean = "weighted" in cell["call"] or cell["call"] == "lacking"
        is_rounded = self.job.is_dist and is_mean and self.reference.compression != "none"
        if found.is_floating_point() or found.is_complex():
            eps = torch.finfo(found.dtype).eps
            if self.reference.update in ("clip_norm", "clip_global_norm") or is_rounded:
                near = [torch.isclose(found, one, rtol=32 * eps, atol=32 * eps) for one in expected]
                return bool(torch.stack(near).any(0).all())
        return bool(torch.stack([found == one for one in expected]).any(0).all())

    @staticmethod
    def check_values(
        values: Sequence[Sequence[Any]], outs: Sequence[Sequence[Any]], before: dict[int, list[bytes]]
    ) -> None:
        """Check that no value has changed that is not an output."""
        written = {id(one) for of in outs for one in of}
        for one in (one for of in values for one in of if id(one) not in written):
            assert memory_of(one) == before[id(one)], "a value has changed"

    def check_out(self, cell: Cell, key: Any, out: Any, before: list[bytes]) -> None:
        if cell["out"] == "rows":
            self.check_rows(cell, key, out)
            return
        found, expected = values_of(out), self.expected(cell, key)
        assert found.dtype == expected[0].dtype, f"key {key!r}: {found.dtype}"
        assert self.same(cell, found, expected), (
            f"key {key!r} was pulled as {_shown(found)}; expected {_shown(expected[0])}"
        )
        if cell["out"] in ("gaps", "array with gaps"):
            fill(out, 9)
            assert memory_of(out) == before, f"key {key!r}: memory around the output was written"

    def check_rows(self, cell: Cell, key: Any, out: Any) -> None:
        count = out.shape[0]
        rows = sorted({count - 1, 0}) if count else []
        expected = [one[rows] for one in self.expected(cell, key, is_pulled=False)]
        if isinstance(out, RowSparse):
            assert out.indices.tolist() == rows, f"key {key!r} has rows {out.indices.tolist()}"
            found = out.values
        else:
            others = torch.ones(count, dtype=torch.bool)
            others[rows] = False
            assert bool((out[others] == torch.full((), 9).to(out.dtype)).all()), f"key {key!r}: other rows were written"
            found = out[rows]
        assert self.same(cell, found, expected), f"rows of {key!r} are {_shown(found)}; expected {_shown(expected[0])}"

    def check_stored(self, cell: Cell, keys: Sequence[Any]) -> None:
        self.meet()
        outs = [torch.full_like(self.reference.values[key], 9) for key in keys]
        self.kv.pull([*keys], outs)
        for key, out in zip(keys, outs, strict=True):
            expected = self.expected(cell, key)[:1]
            assert self.same(cell, out, expected), (
                f"key {key!r} is stored as {_shown(out)}; expected {_shown(expected[0])}"
            )
        self.meet()

    def meet(self) -> None:
        if self.job.is_async:  # others' pushes are in what is pulled
            self.kv.barrier()

    # Between two rounds

    def between(self, cell: Cell, keys: Sequence[Any], round_: int) -> None:
        kv, reference, update, rank = self.kv, self.reference, self.reference.update, self.kv.rank
        fits = self.fits(cell)
        what = cell["between"]
        if self.bucket in getattr(kv, "_flats", ()) and not round_:  # other buckets take the memory of this one
            for half in filter(None, ([(key, reference.values[key]) for key in keys[i::2]] for i in (1, 0))):
                kv.fuse(next(plan(half, 1 << 30)))
        if what == "one key" and fits:
            self.push(cell, [(keys[0], 0)], round_)
        elif what == "other keys" and fits:
            others = self.other_keys(cell)
            if not round_:
                self.init(cell, others)
            self.push(cell, [(key, i) for i, key in enumerate(others)], round_)
            self.check_stored(cell, others)
        elif what == "assign":
            values = [numbers(self.shape(cell, i), cell["dtype"], 17, i, round_) for i in range(len(keys))]
            kv.assign(keys, [one + one if rank else one.clone() for one in values])
            for key, value in zip(keys, values, strict=True):
                reference.values[key].copy_(value)
                reference.history[key] = []
        elif what == "learning rate" and update in OPTIMIZERS:
            self.meet()
            self.set_rate(reference.rate / 2)
        elif what == "learning rate":
            self.refused(lambda: kv.set_learning_rate(0.5), Refusal(RuntimeError, "set_optimizer"))
        elif what == "save and load" and update not in OPTIMIZERS:
            path = f"{self.folder}/states"
            self.refused(lambda: kv.save_optimizer_states(path), Refusal(RuntimeError, "set_optimizer"))
        elif what == "save and load" and fits:
            self.save_and_load(cell, keys, round_)
        elif what == "exchange":
            assert kv.exchange(bytes([rank, round_])) == [bytes([one, round_]) for one in range(self.job.workers)]
        elif what == "join" and not self.was_refused:
            self.join(cell, keys, round_)
        elif what == "refused" and fits:
            self.refuse(cell, keys, round_)
        elif what == "optimizer again":
            self.drop_residuals()
            if update in OPTIMIZERS:
                self.set_optimizer()
        elif what == "row pull" and self.shape(cell, 0):
            out = RowSparse([], torch.empty(0, *self.shape(cell, 0)[1:], dtype=cell["dtype"]), self.shape(cell, 0))
            ids = [out.shape[0] - 1, 0] if out.shape[0] else []
            kv.row_sparse_pull(keys[0], out, row_ids=torch.tensor(ids))
            self.check_rows(cell, keys[0], out)
        self.meet()

    def push(self, cell: Cell, keys: Sequence[tuple[Any, int]], round_: int, ranks: Iterable[int] = (0, 1, 2)) -> None:
        """Push dense values of some keys, and check nothing."""
        ranks = [rank for rank in ranks if rank < self.job.workers]
        of = [
            [
                numbers(self.shape(cell, i), cell["dtype"], 23, 0 if self.job.is_async else rank, i, round_)
                for rank in range(self.job.workers)
            ]
            for _, i in keys
        ]
        if self.kv.rank in ranks:
            self.kv.push([key for key, _ in keys], [one[self.kv.rank] for one in of])
        for (key, _), values in zip(keys, of, strict=True):
            self.reference.push(key, [[Plain(value)] if rank in ranks else [] for rank, value in enumerate(values)])
        if self.kv.updates_wait:
            self.kv.update()
        self.reference.end_updates()

    def join(self, cell: Cell, keys: Sequence[Any], round_: int) -> None:
        """Make a round while the last rank has joined."""
        if self.job.workers > 1:
            self.round(cell, keys, 10 + round_, self.last)
        assert self.kv.join() in range(self.job.workers)
        if self.keeps_step:
            self.drop_residuals()
        self.check_stored(cell, keys)

    def refuse(self, cell: Cell, keys: Sequence[Any], round_: int) -> None:
        """Push a wrong shape on the last rank."""
        if self.job.is_dist and self.reference.update == "clip_global_norm":
            return
        bad = self.kv.rank == self.last
        value = numbers((7, 7) if bad else self.shape(cell, 0), cell["dtype"], 29, round_)

        def push() -> None:
            self.kv.push(keys[0], value)
            self.kv.pull(keys[0], value)

        if bad or not self.job.is_async:
            words = "has shape" if bad or self.job.store == "allreduce" else "was refused"
            self.refused(push, Refusal(ValueError if bad else MismatchError, words))
        else:
            push()
        if self.job.is_async:
            self.reference.push(
                keys[0],
                [
                    [Plain(numbers(self.shape(cell, 0), cell["dtype"], 29, round_))] if rank != self.last else []
                    for rank in range(self.job.workers)
                ],
            )
        if (
            self.job.is_dist and self.kv.compresses
        ):  # the others' gradients are lost with the round, not their residuals
            self.drop_residuals()
        self.check_stored(cell, keys)

    def save_and_load(self, cell: Cell, keys: Sequence[Any], round_: int) -> None:
        """Save weights, residuals and the optimizer's state, push, and load them."""
        group = self.groups[keys[0] in self.reference.halved]
        kv, path = self.kv, Path(self.folder, f"states of {'all' if self.job.is_alone else self.job}")
        values = [value.clone() for value in (self.reference.values[key] for key in keys)]
        residuals = kv.compression_residuals()
        if not kv.rank:
            group.save_optimizer_states(path)
        kv.barrier()
        kv.push([*keys], [torch.ones_like(value) for value in values])
        if kv.updates_wait:
            kv.update()
        kv.assign([*keys], values)
        group.load_optimizer_states(path)
        if kv.compresses:
            kv.load_compression_residuals(residuals)
        self.meet()


def _finished(work: Any) -> BaseException | None:
    """Wait for a call and return its error."""
    with suppress(Exception):
        work.wait(LIMIT)
    return cast("BaseException | None", work.exception())


def has_own_group(cell: Cell) -> bool:
    """Return whether the cell's keys are in the group with the other optimizer."""
    return bool(cell["number"] % 3 == 1 and cell["between"] != "optimizer again")


def _shown(value: Tensor) -> str:
    return f"{value.flatten()[:6].tolist()} of {tuple(value.shape)}, {value.dtype}"


def groups(chosen: Iterable[Cell], job: Job) -> list[list[list[Cell]]]:
    """Return cells for each start of a job, those of equal settings together.

    A parameter server cannot go back to no optimizer, and takes none once it holds integers.
    """
    found: dict[Any, list[Cell]] = defaultdict(list)
    for cell in chosen:
        found[cell["update"], cell["compression"]].append(cell)
    if not job.is_dist:
        return [[*found.values()]]
    plain = [group for (update, _), group in found.items() if update in ("none", "updater")]
    updated = [group for (update, _), group in found.items() if update not in ("none", "updater")]
    floats = [[cell for cell in group if cell["dtype"].is_floating_point] for group in updated]
    others = [[cell for cell in group if not cell["dtype"].is_floating_point] for group in updated[-1:]]
    return [plain, [group for group in floats + others if group]]


def walk_group(kv: KVStore, job: Job, group: Sequence[Cell], folder: str) -> str:
    """Walk cells and return what is wrong in the first that fails; "" if none does."""
    walk = Walk(kv, job, folder)
    try:
        walk.set_up(group)
    except Exception:  # noqa: BLE001  reported
        return f"setting of {text_of(group[0])}:\n{traceback.format_exc()}"
    for cell in group:
        problem = ""
        try:
            walk.walk(cell)
        except Exception:  # noqa: BLE001  reported
            problem = f"{job}, cell {text_of(cell)}:\n{traceback.format_exc()}"
        try:
            told = kv.exchange(problem.encode())
        except Exception:  # noqa: BLE001  reported
            return problem or traceback.format_exc()
        if any(told):
            return "\n".join(f"rank {rank}: {one.decode()}" for rank, one in enumerate(told) if one)
    return ""

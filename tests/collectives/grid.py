"""The grid of collective calls: its axes, every rank's input, the expected result in plain torch, and one cell's check.

Inputs are such that sums and products are exact in any order of the ranks, and wrong without any contribution or with
one too many. So every algorithm, transport and number of ranks must give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES, OPS
from gangline.collectives.communicator import Communicator
from gangline.collectives.schedule.schedule import Reduce
from gangline.collectives.work import Work
from tests.collectives.ranks import HALVES, same

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
COLLECTIVES = (*REDUCING, "broadcast", "all_gather", "all_to_all", "gather", "scatter")
CALLS = (*COLLECTIVES, "all_to_all_uneven", "send_recv", "messages", "barrier")
IN_PLACE = ("all_reduce", "reduce", "broadcast")
ALIASES = ("same", "ahead", "behind", "crossed")
OUTS = ("none", "out", "itself", "expanded", *ALIASES)
"""Result: none given, other memory (also of an expanded input), the input itself, or memory that overlaps the input."""
MEMORIES = ("plain", "strided", "odd", "lazy", "mixed", "leaf")
"""Contiguous; transposed with gaps; from an odd address on; negated or conjugated when read; each on some ranks;
contiguous, of a tensor that requires a gradient."""
_PERIOD = 10_007  # of the values of large tensors; no number of ranks divides it


class Cell(NamedTuple):
    """A call that all ranks make."""

    call: str
    count: int
    """Elements of a tensor, or of each row if the call has a row for each rank."""
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    root: int = 0
    out: str = "none"
    memory: str = "plain"
    async_op: bool = False
    kind: str = "exact"
    """Values: "exact"; "special", with NaN and infinities; "rough", whose sums are rounded in an order of their own."""


def ops_of(call: str, dtype: torch.dtype) -> tuple[str, ...]:
    if call not in REDUCING:
        return ("sum",)
    if dtype.is_complex:
        return ("sum", "mean", "product")
    return OPS if dtype.is_floating_point else tuple(op for op in OPS if op != "mean")


def outs_of(call: str) -> tuple[str, ...]:
    match call:
        case "all_reduce" | "reduce":
            return OUTS
        case "broadcast" | "barrier":
            return ("none",)
        case "all_gather" | "gather" | "reduce_scatter":
            return ("none", "out", "expanded", *ALIASES)
        case "all_to_all":
            return OUTS
        case "scatter" | "all_to_all_uneven":
            return ("out", *ALIASES)
    return ("out", "expanded") if call == "send_recv" else ("out",)  # a message must not be written before it is sent


def roots_of(call: str, size: int) -> tuple[int, ...]:
    return tuple(sorted({0, size // 2, size - 1})) if call in ROOTED else (0,)


def is_valid(cell: Cell) -> bool:
    is_fraction = cell.dtype.is_floating_point or cell.dtype.is_complex
    return not (
        (cell.memory == "odd" and cell.dtype.is_complex)  # torch's complex kernels end in a segmentation fault there
        or (cell.memory in ("lazy", "mixed", "leaf") and not is_fraction)
        or (cell.memory in ("strided", "mixed") and cell.out in (*ALIASES, "expanded"))
        or (cell.kind == "special" and cell.op == "product" and cell.dtype.is_complex)
    )


def drawn(random: Random, call: str, count: int, size: int, **fixed: Any) -> Cell:
    """Return a cell with random values on all axes but those given."""
    while True:
        dtype = fixed.get("dtype", random.choice(DTYPES))
        cell = Cell(
            call,
            count,
            dtype,
            random.choice(ops_of(call, dtype)),
            random.choice(roots_of(call, size)),
            random.choice(outs_of(call)),
            random.choice(MEMORIES),
            random.random() < 0.3,
            random.choice(("exact", "exact", "special", "rough")),
        )._replace(**fixed)
        if is_valid(cell):
            return cell


# Inputs


def values(count: int, rank: int, dtype: torch.dtype, op: str = "sum", kind: str = "exact") -> Tensor:
    """Return a rank's values, none of which leaves a sum or product as it was."""
    if dtype.is_complex:
        real = values(2 * count, rank, dtype.to_real(), op, kind).view(count, 2)
        if op == "product" and kind == "exact":  # real or imaginary, so that all products are exact
            real[torch.arange(count), torch.arange(count) * (rank + 1) % 2] = 0
        return torch.view_as_complex(real)
    if count > _PERIOD:
        return values(_PERIOD, rank, dtype, op, kind).repeat(-(-count // _PERIOD))[:count]
    draw = torch.Generator().manual_seed(1009 * rank + count)
    if dtype == torch.bool:  # mostly what a single contribution changes
        return (torch.rand(count, generator=draw) < 0.15) ^ (op in ("product", "min"))
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        numbers = torch.randint(limits.min, limits.max, (count,), generator=draw, dtype=torch.int64)
        return (numbers | (op == "product")).to(dtype)  # odd factors can be divided by
    if kind == "rough":
        numbers = torch.randn(count, generator=draw, dtype=torch.float64)
        return (1 + numbers / 16 if op == "product" else numbers * 10.0 ** (rank % 3)).to(dtype)
    signs = 1 - 2 * torch.randint(2, (count,), generator=draw)
    if op == "product":  # powers of two whose product has a small exponent
        found = torch.tensor([1.0, 2, 4] if rank % 2 else [1.0, 0.5, 0.25])[
            torch.randint(3, (count,), generator=draw)
        ] * torch.where(signs == 1, 1, -1)
        found[found == 1] = -1
    elif op == "mean" and dtype == torch.float16:  # whose sum is above the dtype's largest number
        found = torch.randint(400, 1024, (count,), generator=draw) * 64.0
    else:
        limit = {torch.float16: 120, torch.bfloat16: 15, torch.float32: 1 << 19}.get(dtype, 1 << 48)
        found = (torch.randint(1, limit, (count,), generator=draw) * signs).double()
    if kind == "special":
        odd = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(3, (count,), generator=draw)]
        found = torch.where(torch.rand(count, generator=draw) < 0.1, odd, found)
    return found.to(dtype)


def lengths(count: int, rank: int, size: int) -> list[int]:
    """Return the elements that a rank sends to each rank in an uneven all-to-all."""
    return [count * ((rank + 2 * to) % 3) for to in range(size)]


@lru_cache(maxsize=128)
def _inputs(
    call: str, count: int, dtype: torch.dtype, op: str, kind: str, is_expanded: bool, size: int
) -> list[Tensor]:
    def given(rank: int) -> Tensor:
        shape = (2, count // 2) if count % 2 == 0 else (count,) if count > 1 or dtype.is_floating_point else ()
        if call in ("reduce_scatter", "all_to_all", "scatter", "messages"):
            shape = (size, *shape)
        elif call == "all_to_all_uneven":
            shape = (sum(lengths(count, rank, size)),)
        if is_expanded:
            return values(1, rank, dtype, op, kind)[0].expand(shape)
        return values(math.prod(shape), rank, dtype, op, kind).view(shape)

    return [given(rank) for rank in range(size)]


def inputs_of(cell: Cell, size: int) -> list[Tensor]:
    """Return every rank's input, which must not be changed."""
    op = cell.op if cell.call in REDUCING else "sum"
    return _inputs(cell.call, cell.count, cell.dtype, op, cell.kind, cell.out == "expanded", size)


# The reference


def combined(rows: Sequence[Tensor], op: str) -> Tensor:
    """Reduce tensors without rounding in between."""
    stack = torch.stack([*rows])
    if stack.is_complex() and op != "product":
        return torch.view_as_complex(combined([torch.view_as_real(row) for row in rows], op))
    wide = stack.to(torch.complex128) if stack.is_complex() else stack.double() if stack.is_floating_point() else stack
    function: Any = {"sum": torch.sum, "mean": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    return function[op](wide, dim=0).to(stack.dtype)


def reference(cell: Cell, inputs: Sequence[Tensor], rank: int) -> Tensor | None:
    """Return the result of a rank; None if it has none."""
    match cell.call:
        case "all_reduce" | "reduce":
            return combined(inputs, cell.op) if cell.call == "all_reduce" or rank == cell.root else None
        case "reduce_scatter":
            return combined([rows[rank] for rows in inputs], cell.op)
        case "broadcast":
            return inputs[cell.root]
        case "all_gather" | "gather":
            return torch.stack([*inputs]) if cell.call == "all_gather" or rank == cell.root else None
        case "scatter":
            return inputs[cell.root][rank]
        case "all_to_all" | "messages":
            return torch.stack([rows[rank] for rows in inputs])
        case "all_to_all_uneven":
            size = len(inputs)
            return torch.cat(
                [each.split(lengths(cell.count, source, size))[rank] for source, each in enumerate(inputs)]
            )
        case "send_recv":
            return inputs[rank - 1]
    return None


# One cell


def call(comm: Communicator, cell: Cell, tensor: Tensor, out: Tensor | None) -> Any:
    """Make the call of a cell; return what it returns, for messages the result."""
    rank, size, later = comm.rank, comm.size, cell.async_op
    match cell.call:
        case "all_reduce" | "reduce_scatter":
            return getattr(comm, cell.call)(tensor, cell.op, out, async_op=later)
        case "reduce":
            return comm.reduce(tensor, cell.root, cell.op, out, async_op=later)
        case "broadcast":
            return comm.broadcast(tensor, cell.root, async_op=later)
        case "all_gather" | "all_to_all":
            return getattr(comm, cell.call)(tensor, out, async_op=later)
        case "gather":
            return comm.gather(tensor, cell.root, out, async_op=later)
        case "barrier":
            return comm.barrier(async_op=later)
    assert out is not None
    match cell.call:
        case "scatter":
            given = tensor if rank == cell.root or rank % 2 else None  # ignored elsewhere
            return comm.scatter(given, out, cell.root, async_op=later)
        case "all_to_all_uneven":
            taken = [lengths(cell.count, source, size)[rank] for source in range(size)]
            comm.all_to_all_uneven(tensor.split(lengths(cell.count, rank, size)), out.split(taken))
        case "send_recv" if size == 1:
            out.data.copy_(tensor)
        case "send_recv":
            sent = comm.send(tensor, (rank + 1) % size, cell.count % 5, async_op=True)
            received = comm.recv(out, (rank - 1) % size, cell.count % 5, async_op=later)
            _finish([sent, received])
        case _:  # a message to each other rank; those of a tag in their order
            out.data[rank].copy_(tensor[rank])
            others = [(rank + shift) % size for shift in range(1, size)]
            sends = [comm.send(tensor[to], to, to % 3, async_op=True) for to in others]
            _finish([comm.recv(out.data[source], source, rank % 3, async_op=later) for source in others] + sends)
    return out


def _finish(works: Iterable[object]) -> None:
    for work in works:
        if isinstance(work, Work):
            work.wait()


def _layout(cell: Cell, rank: int) -> str:
    of_ranks = ("lazy", "strided", "plain" if cell.dtype.is_complex else "odd")
    return of_ranks[rank % 3] if cell.memory == "mixed" else cell.memory


def _views(cell: Cell, given: Sequence[int], taken: Sequence[int], rank: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the result of a cell as views of memory for twice the elements of both, and 16 more."""
    layout = _layout(cell, rank)
    is_strided = layout == "strided"

    def view(offset: int, shape: Sequence[int]) -> Tensor:
        if layout == "lazy":
            return (torch.conj if cell.dtype.is_complex else torch._neg_view)(
                memory[offset:][: math.prod(shape)].view(shape)
            )
        if not is_strided:
            return memory[offset : offset + math.prod(shape)].view(shape)
        strides = [2 * math.prod(shape[:axis]) for axis in range(len(shape))]
        return memory.as_strided(shape, strides, memory.storage_offset() + offset)

    elements = math.prod(given), math.prod(taken)
    begin, end = 8, 8 + elements[0] * (2 if is_strided else 1)
    if cell.out == "expanded":
        return memory[7].expand(given), view(end + 1, taken)
    if cell.out not in ALIASES:
        tensor = view(begin, given)
        return tensor, tensor if cell.out == "itself" or (cell.call in IN_PLACE and cell.out == "none") else view(
            end + 1, taken
        )
    is_row = elements[0] != elements[1] and cell.call != "all_to_all_uneven"
    place = {"same": 0, "ahead": 1, "behind": -1, "crossed": min(elements) // 2 + 1}[cell.out]
    if is_row:  # the smaller one is a row of the other, or is moved out of it
        rows = max(elements) // max(1, min(elements))
        place = (rank + 1) % max(1, rows) * min(elements) if cell.out == "crossed" else rank * min(elements) + place
    first, second = (begin + place, begin) if is_row and elements[0] < elements[1] else (begin, begin + place)
    return view(first, given), view(second, taken)


def check(
    comm: Communicator,
    cell: Cell,
    way: str = "",
    place: Callable[[Tensor], Tensor] | None = None,
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    make: Callable[[Communicator, Cell, Tensor, Tensor | None], Any] = call,
) -> Tensor | None:
    """Make the call of a cell and check its result, that no other memory has changed, and that all ranks agree.

    Args:
        comm: communicator of all ranks.
        cell: the call.
        way: text for errors.
        place: function that moves a tensor to the device of the call.
        read: function that moves it back.
        make: function that makes the call and returns what it returns.

    Returns:
        The result.
    """
    inputs = inputs_of(cell, comm.size)
    own, want = inputs[comm.rank], reference(cell, inputs, comm.rank)
    name = f"{comm} {way}: {cell}"
    taken = own.shape if want is None else want.shape
    is_odd = _layout(cell, comm.rank) == "odd"
    space = bytearray(b"\1" * (cell.dtype.itemsize * (2 * (own.numel() + math.prod(taken)) + 16) + is_odd))
    memory = torch.frombuffer(space, dtype=cell.dtype, offset=int(is_odd))
    tensor, out = _views(cell, own.shape, taken, comm.rank, memory)
    if cell.out != "expanded":
        tensor.copy_(own)
    elif own.numel():
        memory[7] = own.flatten()[0]
    should_be = memory.clone()
    if cell.memory == "leaf" and cell.out != "expanded":
        tensor, out = tensor.requires_grad_(), out.requires_grad_()
    result = {"none": None, "itself": tensor}.get(cell.out, out if place is None else place(out))
    if place is not None:
        tensor = place(tensor)
    try:
        got = make(comm, cell, tensor, result)
        if isinstance(got, Work):
            got.wait()
            got = got.result
    except Exception as error:
        error.add_note(name)
        raise
    written = tensor if cell.call in IN_PLACE and result is None else result
    assert (got is None) == (want is None), name
    assert got is None or written is None or got is written, f"{name}: returned another tensor"
    if want is not None and got is not None:
        assert got.grad_fn is None, name
        found = read(got)
        is_fraction = cell.dtype.is_floating_point or cell.dtype.is_complex
        if cell.kind == "rough" and cell.call in REDUCING and cell.op not in ("min", "max") and is_fraction:
            rows = [each[comm.rank] for each in inputs] if cell.call == "reduce_scatter" else inputs
            near(found, rows, cell.op, name)
            root = cell.root if cell.call == "reduce" else None
            is_product = cell.dtype.is_complex and cell.op == "product"
            plan = comm._engine.plan(cell.call, own.numel() * own.itemsize, root)
            sums = [] if plan is None else [step for step in plan.steps if isinstance(step, Reduce)]
            is_at_once = plan is None or (bool(sums) and all(len(step.ranks) == comm.size for step in sums))
            if place is None and not is_product and is_at_once:
                same(found, in_order(rows, cell.op), f"{name}: in the order of ranks, rounded once")
            want = found
        equal(found, want, name)
        if written is not None and place is None:
            _views(cell, own.shape, taken, comm.rank, should_be)[1].copy_(want)
        if cell.call == "all_reduce" and want is found:
            for row in read(comm.all_gather(got)):  # type: ignore[arg-type]
                same(row, found, f"{name}: two ranks")
    if place is None:
        equal(memory, should_be, f"{name}: memory")
    elif got is not tensor:
        equal(read(tensor), own, f"{name}: its input")
    return got


def equal(got: Tensor, want: Tensor, name: str) -> None:
    """Check that tensors have the same bits; NaN may have any, and zeros any sign where values are equal."""
    if got.shape != want.shape or not torch.allclose(got, want, rtol=0, atol=0, equal_nan=True):
        same(got, want, name)


def in_order(rows: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in the order of the ranks; 16-bit floats are reduced in float32 and rounded once."""
    if rows[0].is_complex():
        return torch.view_as_complex(in_order([torch.view_as_real(row) for row in rows], op))
    wide = [row.float() if row.dtype in HALVES else row for row in rows]
    total = reduce(torch.mul if op == "product" else torch.add, wide)
    return (total / len(rows) if op == "mean" else total).to(rows[0].dtype)


def near(got: Tensor, rows: Sequence[Tensor], op: str, name: str) -> None:
    """Check that the error is at most one rounding per rank: (p - 1) eps sum|x|, and one eps more for a mean."""
    wide = torch.complex128 if got.is_complex() else torch.float64
    exact = torch.stack([row.to(wide) for row in rows])
    size, eps = len(rows), torch.finfo(got.dtype).eps
    if op == "product":
        want, bound = exact.prod(0), exact.abs().prod(0) * 3 * size * eps
    else:
        divisor = size if op == "mean" else 1
        want, bound = exact.sum(0) / divisor, exact.abs().sum(0) * size * eps / divisor
    bad = ((got.to(wide) - want).abs() > bound).flatten().nonzero().flatten()
    assert not len(bad), f"{name}: {len(bad)} elements are too far off, the first is {bad[:1]}"


def walk(comm: Communicator, way: str, cells: Iterable[Cell]) -> None:
    """Check cells of ranks that communicate in a way, which errors name."""
    for cell in cells:
        check(comm, cell, way)

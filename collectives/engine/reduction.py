"""Reduction operations on tensors: combine in rank order and round once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES


class ReductionOp(NamedTuple):
    """Functions that combine two values of a reduction, and the dtypes they are for."""

    torch_function: Callable[..., Tensor]
    needs_fractions: bool = False
    needs_order: bool = False


OPERATIONS = {
    "sum": ReductionOp(torch.add),
    "mean": ReductionOp(torch.add, needs_fractions=True),
    "product": ReductionOp(torch.mul),
    "min": ReductionOp(torch.minimum, needs_order=True),
    "max": ReductionOp(torch.maximum, needs_order=True),
}
"""Reduction operations by name; the names are those of `call_signature.OPS`. A mean is a sum that is then divided."""

HALVES = (torch.float16, torch.bfloat16)


def check(op: str, dtype: torch.dtype) -> None:
    """Check that a reduction exists and is defined for a dtype that collectives accept (`check_dtype`).

    Raises:
        ValueError: if the operation is unknown.
        TypeError: if the operation is "mean" of integers or bools, or "min" or "max" of complex numbers.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPERATIONS)}")
    if OPERATIONS[op].needs_fractions and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"the mean of {dtype} is not a {dtype}; use op 'sum' and divide, or convert to a floating-point dtype first"
        )
    if OPERATIONS[op].needs_order and dtype.is_complex:
        raise TypeError(f"op is {op!r}, but {dtype} has no order; expected sum, mean or product")


def check_dtype(dtype: torch.dtype) -> None:
    """Check that collectives accept a dtype.

    Raises:
        TypeError: if they do not.
    """
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"a tensor of {dtype} was given; expected one of {names}")


def as_sent(own: Tensor, op: str) -> Tensor:
    """Return a rank's values in the dtype of partial results: float32 for a mean of float16.

    A partial sum above 65,504 would overflow float16 before the division. Other dtypes have enough range.
    """
    return own.float() if op == "mean" and own.dtype == torch.float16 else own


def combine(values: Sequence[Tensor], op: str, out: Tensor, divisor: int = 1) -> None:
    """Combine tensors of equal length from first to last into ``out``.

    float16 and bfloat16 are combined in float32 and rounded once. Integers wrap around. For bool, "sum" is a logical
    or and "product" a logical and.

    Args:
        values: one or more 1-d tensors of one dtype.
        op: a name in `OPERATIONS`.
        out: 1-d tensor for the result; may be one of ``values``.
        divisor: divisor of the result, applied before rounding.
    """
    function = OPERATIONS[op].torch_function
    if out.is_complex() and op != "product":  # by parts: torch.add multiplies complex numbers by 1, and inf * 0 is NaN
        values, out = [torch.view_as_real(value) for value in values], torch.view_as_real(out)
    if out.dtype in HALVES:
        partial = values[0].float()
        for value in values[1:]:
            function(partial, value, out=partial)
        out.copy_(partial.div_(divisor) if divisor != 1 else partial)
        return
    if len(values) == 1:
        out.copy_(values[0])
    elif len(values) == 2:
        function(values[0], values[1], out=out)
    else:
        partial = function(values[0], values[1])
        for value in values[2:-1]:
            function(partial, value, out=partial)
        function(partial, values[-1], out=out)  # written last, because ``out`` may be one of the values
    if divisor != 1:
        out.div_(divisor)

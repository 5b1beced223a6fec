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
    """Combine tensors of one shape and dtype from first to last into ``out``, which may be one of them.

    float16 and bfloat16 are combined in float32 and rounded once, after the division. Integers wrap around. For bool,
    "sum" is a logical or and "product" a logical and. Tensors on other devices are copied to that of ``out``, one at a
    time.
    """
    function = OPERATIONS[op].torch_function
    if out.is_complex() and op != "product" and not out.is_conj():
        # by parts: torch.add multiplies complex numbers by 1, and inf * 0 is NaN
        values, out = [torch.view_as_real(value.resolve_conj()) for value in values], torch.view_as_real(out)
    if len(values) == 1 and divisor == 1:
        out.copy_(values[0])
        return
    total = _on_device_of(out, values[0])
    is_widened = out.dtype in HALVES and (len(values) > 2 or divisor != 1)  # one operation on halves rounds once
    if is_widened:
        total = partial = last = total.float()
    else:  # only the last operation writes to ``out`` if another one would overwrite a value that is still needed
        is_needed = any(value.data_ptr() == out.data_ptr() for value in values[2:])
        partial, last = torch.empty_like(out) if is_needed else out, out
    for number, value in enumerate(values[1:], 2):
        result = last if number == len(values) else partial
        function(total, _on_device_of(out, value), out=result)
        total = result
    if divisor != 1:
        torch.div(total, divisor, out=last)
    if is_widened:
        out.copy_(last)


def _on_device_of(out: Tensor, value: Tensor) -> Tensor:
    return value if value.device == out.device else value.to(out.device, non_blocking=value.is_cuda and out.is_cuda)

"""What a reduction does to tensors: the operations, in the order of the ranks, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gangline.collectives.call_signature import DTYPES, OPS

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
HALVES = (torch.float16, torch.bfloat16)


def check(op: str, dtype: torch.dtype) -> None:
    """See that an operation is there for a dtype.

    Raises:
        ValueError: an unknown operation.
        TypeError: a dtype that collectives do not take, or a mean of what cannot be divided.
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(OPS)}")
    check_dtype(dtype)
    if op == "mean" and not dtype.is_floating_point:
        raise TypeError(
            f"the mean of {dtype} is no {dtype}; sum, and divide, or convert to a floating-point dtype first"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """See that collectives take a dtype.

    Raises:
        TypeError: they do not.
    """
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"a tensor of {dtype} was given; expected one of {names}")


def combine(values: Sequence[Tensor], op: str, out: Tensor, divisor: int = 1) -> None:
    """Combine equally long tensors from the first to the last into ``out``.

    float16 and bfloat16 are combined in float32 and rounded once. Integers wrap around; of bools, the sum is "or" and
    the product "and".

    Args:
        values: at least one 1-d tensor, of one dtype.
        op: one of `OPS`.
        out: where the result goes; it may be one of ``values``.
        divisor: what the result is divided by before it is rounded; 1 leaves it alone.
    """
    function = _FUNCTIONS[op]
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
        function(partial, values[-1], out=out)  # only now: out may be one of the values
    if divisor != 1:
        out.div_(divisor)

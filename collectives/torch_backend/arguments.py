"""Arguments of process-group calls in the forms of torch's several overloads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from gangline.collectives.torch_backend.operations import Op, op_of

Tensors = Tensor | Sequence[Tensor]
Operation = ReduceOp | ReduceOp.RedOpType


def exactly(tensors: Tensors, count: int) -> list[Tensor]:
    """Return a tensor, or a list of tensors, as a list of ``count``.

    Raises:
        ValueError: if there are more or fewer.
    """
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != count:
        raise ValueError(f"{len(found)} tensors were given; expected {count}, because a rank has one device")
    return found


def one_list(lists: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the one list of tensors inside torch's list of one list per device; empty if a rank passes none.

    Raises:
        ValueError: if there are several lists.
    """
    if any(isinstance(one, Tensor) for one in lists):
        return [one for one in lists if isinstance(one, Tensor)]
    found = [list(one) for one in lists]
    if len(found) > 1:
        raise ValueError(f"{len(found)} lists of tensors were given; expected one, because a rank has one device")
    return found[0] if found else []


def pairs_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each output with its input.

    Raises:
        ValueError: if the lengths differ.
    """
    if len(outputs) != len(inputs):
        raise ValueError(f"{len(outputs)} outputs were given for {len(inputs)} inputs; expected one for each")
    return list(zip(outputs, inputs, strict=True))


def op_in(opts: object, op: Operation | None = None) -> Op:
    """Return the reduction given by the options or an argument; the sum if neither gives one."""
    given: Any = getattr(opts, "reduceOp", opts) if op is None else op
    return op_of(ReduceOp.SUM if given is None or type(given) is int else given)  # an int is a root, an enum may be one


def root_in(opts: object, root: int) -> int:
    """Return the root given by the options or an argument."""
    return opts if type(opts) is int else getattr(opts, "rootRank", root)


def first_tensor(values: Iterable[object]) -> Tensor | None:
    """Return the first tensor in a call's arguments."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)) and (found := first_tensor(value)) is not None:
            return found
    return None


def inputs_of(arguments: Iterable[object]) -> list[Tensor]:
    """Return the tensors that a call reads: its last argument that is a tensor or a list of tensors."""
    found: list[Tensor] = []
    for value in arguments:
        if isinstance(value, Tensor):
            found = [value]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            found = list(value)
    return found

"""Call signature: a collective call as one integer, which ranks compare to detect mismatches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

import torch


class Ranks(Enum):
    """The ranks whose tensor a collective reads, or that get its result."""

    NONE = auto()
    ALL = auto()
    ROOT = auto()
    OTHERS = auto()
    """All but the root."""

    def include(self, *, is_root: bool) -> bool:
        """Return whether the root, or another rank, is one of them."""
        return self is Ranks.ALL or (self is Ranks.ROOT and is_root) or (self is Ranks.OTHERS and not is_root)


class Collective(NamedTuple):
    """Rule of a collective: what it does with its tensors. Checks, signature, staging and chunks follow from it."""

    name: str
    reads: Ranks = Ranks.NONE
    writes: Ranks = Ranks.NONE
    in_rows: bool = False
    """True if the tensor has a leading axis with a row for each rank."""
    out_rows: bool = False
    """True if the result has one."""
    has_op: bool = False
    has_root: bool = False


TABLE = (
    Collective("all_reduce", Ranks.ALL, Ranks.ALL, has_op=True),
    Collective("reduce", Ranks.ALL, Ranks.ROOT, has_op=True, has_root=True),
    Collective("broadcast", Ranks.ROOT, Ranks.OTHERS, has_root=True),
    Collective("all_gather", Ranks.ALL, Ranks.ALL, out_rows=True),
    Collective("reduce_scatter", Ranks.ALL, Ranks.ALL, in_rows=True, has_op=True),
    Collective("all_to_all", Ranks.ALL, Ranks.ALL, in_rows=True, out_rows=True),
    Collective("gather", Ranks.ALL, Ranks.ROOT, out_rows=True, has_root=True),
    Collective("scatter", Ranks.ROOT, Ranks.ALL, in_rows=True, has_root=True),
    Collective("barrier"),
    Collective("send"),
    Collective("recv"),
    Collective("all_to_all_uneven"),
)
"""All collectives, and other calls that have a signature. core.c has the same table."""
COLLECTIVES = tuple(rule.name for rule in TABLE)
OPS = ("sum", "mean", "product", "min", "max")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

_ROOTS = 1 << 12  # number of values of a root, including None
_COUNTS = 1 << 40


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Signature of a collective call. All ranks of a communicator must make the same calls in the same order."""

    collective: str
    count: int = 0
    """Number of elements of the tensor, or of one row if the tensor has a row for each rank."""
    dtype: torch.dtype = torch.uint8
    op: str | None = None
    root: int | None = None

    @property
    def code(self) -> int:
        """The signature as an integer below 2**63.

        Raises:
            ValueError: if the root or the number of elements is too large.
        """
        root = 0 if self.root is None else self.root + 1
        if root >= _ROOTS:
            raise ValueError(f"root is {self.root}; {self.collective} supports roots below {_ROOTS - 1}")
        if self.count >= _COUNTS:
            raise ValueError(f"{self.collective} was given {self.count} elements; it supports fewer than {_COUNTS}")
        op = 0 if self.op is None else OPS.index(self.op) + 1
        code = COLLECTIVES.index(self.collective)
        code = code * 16 + DTYPES.index(self.dtype)
        code = code * 8 + op
        return (code * _ROOTS + root) * _COUNTS + self.count

    @classmethod
    def from_code(cls, code: int) -> CallSignature:
        """Return the signature of an integer.

        Raises:
            ValueError: if the integer is not the code of a signature.
        """
        rest, count = divmod(code, _COUNTS)
        rest, root = divmod(rest, _ROOTS)
        rest, op = divmod(rest, 8)
        collective, dtype = divmod(rest, 16)
        if not (0 <= collective < len(COLLECTIVES) and dtype < len(DTYPES) and op <= len(OPS)):
            raise ValueError(f"{code} is not the code of a collective call")
        return cls(
            COLLECTIVES[collective], count, DTYPES[dtype], OPS[op - 1] if op else None, root - 1 if root else None
        )

    def __str__(self) -> str:
        if self.collective == "barrier":
            return "barrier()"
        if self.collective == "all_to_all_uneven":
            return f"all_to_all_uneven({str(self.dtype).removeprefix('torch.')})"
        texts = [f"{self.count} x {str(self.dtype).removeprefix('torch.')}"]
        texts += [self.op] if self.op is not None else []
        texts += [f"root {self.root}"] if self.root is not None else []
        return f"{self.collective}({', '.join(texts)})"


@lru_cache(maxsize=4096)
def encode_signature(collective: str, count: int, dtype: torch.dtype, op: str | None, root: int | None) -> int:
    """Return the code of a call; cached, because training repeats the same calls."""
    return CallSignature(collective, count, dtype, op, root).code


_SIZES = [dtype.itemsize for dtype in DTYPES] + [0] * (16 - len(DTYPES))
_COUNT_BITS = _COUNTS - 1
_DTYPE_SHIFT = (_ROOTS * _COUNTS * 8).bit_length() - 1


def nbytes_of(code: int) -> int:
    """Return the bytes of the tensor, or of one row, of a call."""
    return (code & _COUNT_BITS) * _SIZES[code >> _DTYPE_SHIFT & 15]

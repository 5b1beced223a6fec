"""A collective call as one number, so that ranks can tell each other cheaply what they are at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "empty",
    "split",
    "send",
    "recv",
)
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
)

_ROOTS = 1 << 12  # ranks that a root can be, with one more for "none"
_COUNTS = 1 << 40


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What a rank asks for: all ranks of a communicator must ask for the same, in the same order."""

    collective: str
    count: int = 0
    """Elements of the tensor (of one row's tensor where it has a row a rank)."""
    dtype: torch.dtype = torch.uint8
    op: str | None = None
    root: int | None = None

    @property
    def code(self) -> int:
        """The call as a number below 2**63."""
        root = 0 if self.root is None else self.root + 1
        op = 0 if self.op is None else OPS.index(self.op) + 1
        code = COLLECTIVES.index(self.collective)
        code = code * 16 + DTYPES.index(self.dtype)
        code = code * 8 + op
        return (code * _ROOTS + root) * _COUNTS + self.count

    @classmethod
    def from_code(cls, code: int) -> CallSignature:
        """The call that a number stands for.

        Raises:
            ValueError: it stands for none.
        """
        rest, count = divmod(code, _COUNTS)
        rest, root = divmod(rest, _ROOTS)
        rest, op = divmod(rest, 8)
        collective, dtype = divmod(rest, 16)
        if not (0 <= collective < len(COLLECTIVES) and dtype < len(DTYPES) and op <= len(OPS)):
            raise ValueError(f"{code} is no collective call")
        return cls(
            COLLECTIVES[collective], count, DTYPES[dtype], OPS[op - 1] if op else None, root - 1 if root else None
        )

    def __str__(self) -> str:
        if self.collective in ("barrier", "split"):
            return f"{self.collective}()"
        words = [f"{self.count} x {str(self.dtype).removeprefix('torch.')}"]
        words += [self.op] if self.op is not None else []
        words += [f"root {self.root}"] if self.root is not None else []
        return f"{self.collective}({', '.join(words)})"


@lru_cache(maxsize=4096)
def encode_signature(collective: str, count: int, dtype: torch.dtype, op: str | None, root: int | None) -> int:
    """The number of a call; remembered, for training makes the same calls again and again."""
    return CallSignature(collective, count, dtype, op, root).code

"""Row-sparse values: some rows of a table, which travel without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class RowSparse:
    """Rows of a tensor of ``shape``; the rows not named are zero.

    Attributes:
        indices: int64, (n,): which rows; one may come several times, and then counts as the sum.
        values: (n, *shape[1:]): the rows, on the indices' device.
        shape: of the whole tensor.
    """

    def __init__(self, indices: Any, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Check that the parts fit together; nothing is copied where indices are int64 already.

        Raises:
            TypeError: values are no dense tensor, or indices no integers.
            ValueError: shapes or devices do not fit, or an index is outside the table (looked at on the host only).
        """
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided:
            raise TypeError(f"the values of a RowSparse are {_described(values)}; expected a dense tensor")
        self.shape = torch.Size(shape)
        self.indices = checked_rows(indices, self.shape, "a RowSparse")
        self.values = values.detach()
        if self.indices.dim() != 1 or self.values.shape != (len(self.indices), *self.shape[1:]):
            raise ValueError(
                f"a RowSparse of shape {tuple(self.shape)} has indices of shape {tuple(self.indices.shape)} and values "
                f"of shape {tuple(values.shape)}; expected (n,) and (n, {', '.join(map(str, self.shape[1:]))})"
            )
        if self.indices.device != values.device:
            raise ValueError(f"a RowSparse has indices on {self.indices.device}, but values on {values.device}")

    @classmethod
    def from_coo(cls, tensor: torch.Tensor) -> RowSparse:
        """The rows of a torch.sparse_coo tensor, such as the gradient of ``nn.Embedding(sparse=True)``.

        Raises:
            ValueError: single elements are sparse in it, not rows.
        """
        if tensor.sparse_dim() != 1:
            raise ValueError(
                f"a sparse tensor of shape {tuple(tensor.shape)} has {tensor.sparse_dim()} sparse axes; "
                "expected 1 (whole rows), or a dense tensor"
            )
        tensor = tensor.detach()
        return cls(tensor._indices()[0], tensor._values(), tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The values' dtype."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The values' device."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return self.indices.nbytes + self.values.nbytes

    def to(self, device: torch.device) -> RowSparse:
        """The same rows on ``device``; itself where it lies there."""
        if device == self.device:
            return self
        fast = self.values.is_cuda and device.type == "cuda"
        return RowSparse(
            self.indices.to(device, non_blocking=fast), self.values.to(device, non_blocking=fast), self.shape
        )

    def to_dense(self) -> torch.Tensor:
        """The whole tensor."""
        rows = summed([self], self.device)
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return whole.index_copy_(0, rows.indices, rows.values)

    def to_coo(self) -> torch.Tensor:
        """The same as a torch.sparse_coo tensor."""
        return torch.sparse_coo_tensor(self.indices[None], self.values, self.shape, check_invariants=False)

    def __repr__(self) -> str:
        return f"RowSparse({len(self.indices)} rows of {tuple(self.shape)}, {self.dtype}, {self.device})"


def summed(parts: Sequence[RowSparse], device: torch.device) -> RowSparse:
    """The sum as distinct rows in ascending order, on ``device``.

    Rows are added in the order of the parts; float16 and bfloat16 in float32, and rounded once.
    """
    parts = [part.to(device) for part in parts]
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values.to(wide) for part in parts])
    if values.is_cuda:  # there coalesce keeps the order, and index_add_ does not; on the host it is the other way round
        total = RowSparse(indices, values, parts[0].shape).to_coo().coalesce()
        rows, sums = total.indices()[0], total.values()
    else:
        rows, inverse = torch.unique(indices, return_inverse=True)
        sums = torch.zeros(len(rows), *values.shape[1:], dtype=wide).index_add_(0, inverse, values)
    return RowSparse(rows, sums.to(dtype), parts[0].shape)


def give_rows(whole: torch.Tensor, out: torch.Tensor | RowSparse, row_ids: torch.Tensor) -> None:
    """Have ``out`` hold the rows named of ``whole``: a `RowSparse` these alone, a tensor these beside its others."""
    ids = torch.unique(row_ids.to(whole.device))  # ascending
    rows = RowSparse(ids, whole.index_select(0, ids), whole.shape).to(out.device)
    if isinstance(out, RowSparse):
        out.indices, out.values = rows.indices, rows.values
    else:
        out.index_copy_(0, rows.indices, rows.values)


def checked_rows(row_ids: Any, shape: torch.Size, what: str) -> torch.Tensor:
    """Row numbers as an int64 tensor of whatever shape they have.

    Raises:
        TypeError: they are no integers.
        ValueError: the table has no rows to name, or one is outside it (looked at on the host only).
    """
    if isinstance(row_ids, np.ndarray) and row_ids.dtype.kind in "iu":
        row_ids = row_ids.astype(np.int64)  # a copy, in torch's byte order
    ids = row_ids if isinstance(row_ids, torch.Tensor) else torch.tensor(row_ids)
    if ids.dtype not in _INTEGERS and ids.numel():
        raise TypeError(f"{what} has row numbers of {ids.dtype}; expected integers")
    ids = ids.detach().to(torch.int64)
    if not shape:
        raise ValueError(f"{what} has no axes; expected a tensor with rows")
    if ids.numel() and not ids.is_cuda:
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= shape[0]:
            outside = low if low < 0 else high
            raise ValueError(
                f"{what} names row {outside}; expected 0 to {shape[0] - 1}, as its shape is {tuple(shape)}"
            )
    return ids


def _described(value: Any) -> str:
    return f"a tensor of layout {value.layout}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"

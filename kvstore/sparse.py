"""Row-sparse values: some rows of a table, sent and updated without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from gangline.collectives.engine.host_staging import copies_on_host, copy_to_gpus

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@final
class RowSparse:
    """Row-sparse value: some rows of a table; all other rows are zero.

    `KVStore.push` takes it like a tensor, and only its rows are sent and updated. `KVStore.row_sparse_pull` fills one
    with the requested rows.

    Attributes:
        indices: row numbers, int64, shape (n,). A row may occur several times; its values are added then.
        values: the rows, shape (n, *shape[1:]), of any dtype, on the device of ``indices``.
        shape: shape of the whole table.

    For example:

        gradient = gangline.RowSparse([5, 2], torch.ones(2, 16), shape=(1000, 16))
        kv.push("embedding", gradient)  # sends two rows of 16 numbers
    """

    def __init__(self, indices: Any, values: torch.Tensor, shape: Sequence[int]) -> None:
        """Check that the parts fit together; int64 indices and the values are not copied.

        Args:
            indices: integers, shape (n,): a tensor, an array or a list.
            values: dense tensor of shape (n, *shape[1:]).
            shape: shape of the whole table, at least one axis.

        Raises:
            TypeError: if the values are not a dense tensor, or the indices are not integers.
            ValueError: if shapes or devices do not fit together, or an index is outside the table (checked for
                indices on the host only).
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
        """Return the rows of a torch.sparse_coo tensor, such as the gradient of ``nn.Embedding(sparse=True)``.

        Raises:
            ValueError: if more than the first axis is sparse.
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
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the indices and the values."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Size of indices and values in bytes."""
        return self.indices.nbytes + self.values.nbytes

    def to(self, device: torch.device) -> RowSparse:
        """Return the same rows on ``device``; the object itself if it is there already.

        A copy from a GPU blocks the host once; a copy to a GPU does not block it.
        """
        if device == self.device:
            return self
        indices, values = self.indices, self.values
        if device.type == "cpu":
            indices, values = copies_on_host([indices, values])
        elif values.is_cuda:
            indices, values = indices.to(device, non_blocking=True), values.to(device, non_blocking=True)
        else:
            indices, values = torch.empty_like(indices, device=device), torch.empty_like(values, device=device)
            copy_to_gpus(self.indices, [indices])
            copy_to_gpus(self.values, [values])
        return RowSparse(indices, values, self.shape)

    def to_dense(self) -> torch.Tensor:
        """Return the whole table as a dense tensor."""
        rows = summed([self], self.device)
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return whole.index_copy_(0, rows.indices, rows.values)

    def to_coo(self) -> torch.Tensor:
        """Return the rows as an uncoalesced torch.sparse_coo tensor."""
        return torch.sparse_coo_tensor(
            self.indices[None], self.values, self.shape, device=self.device, check_invariants=False
        )

    def __repr__(self) -> str:
        return f"RowSparse({len(self.indices)} rows of {tuple(self.shape)}, {self.dtype}, {self.device})"


def summed(parts: Sequence[RowSparse], device: torch.device) -> RowSparse:
    """Return the sum as distinct rows in ascending order, on ``device``.

    Rows are added in the order of ``parts``; float16 and bfloat16 are added in float32 and rounded once.
    """
    parts = [part.to(device) for part in parts]
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values.to(wide) for part in parts])
    if values.is_cuda:  # only coalesce keeps the order on CUDA, and only index_add_ on the host
        total = RowSparse(indices, values, parts[0].shape).to_coo().coalesce()
        rows, sums = total.indices()[0], total.values()
    else:
        rows, inverse = torch.unique(indices, return_inverse=True)
        sums = torch.zeros(len(rows), *values.shape[1:], dtype=wide, device="cpu").index_add_(0, inverse, values)
    return RowSparse(rows, sums.to(dtype), parts[0].shape)


def copy_rows(whole: torch.Tensor, out: torch.Tensor | RowSparse, row_ids: torch.Tensor) -> None:
    """Copy rows of ``whole`` into ``out``: replace the content of a `RowSparse`, write only these rows of a tensor."""
    ids = torch.unique(row_ids.to(whole.device))  # ascending
    write_rows(out, RowSparse(ids, whole.index_select(0, ids), whole.shape))


def write_rows(out: torch.Tensor | RowSparse, rows: RowSparse) -> None:
    """Replace the content of a `RowSparse` by these rows, or write them into a tensor; on any device."""
    rows = rows.to(out.device)
    if isinstance(out, RowSparse):
        out.indices, out.values = rows.indices, rows.values
    else:
        out.index_copy_(0, rows.indices, rows.values)


def of_gradient(gradient: torch.Tensor) -> torch.Tensor | RowSparse:
    """Return a dense gradient without its graph, and a sparse one as rows without duplicates."""
    if gradient.layout == torch.strided:
        return gradient.detach()
    return summed([RowSparse.from_coo(gradient)], gradient.device)


def checked_rows(row_ids: Any, shape: torch.Size, what: str) -> torch.Tensor:
    """Return row numbers as an int64 tensor of their own shape.

    Args:
        row_ids: whole numbers of any shape: a tensor, an array or nested lists; MXNet passes float32.
        shape: shape of the table.
        what: name of the value in error messages.

    Raises:
        TypeError: if they are not whole numbers.
        ValueError: if the table has no axes, or a row number is outside it (checked on the host only).
    """
    if isinstance(row_ids, np.ndarray) and row_ids.dtype.kind in "iu":
        row_ids = row_ids.astype(np.int64)  # a copy, in torch's byte order
    ids = row_ids if isinstance(row_ids, torch.Tensor) else torch.tensor(row_ids, device="cpu")
    is_whole = ids.dtype in _INTEGERS or (ids.is_floating_point() and torch.equal(ids, ids.round()))
    if not is_whole and ids.numel():
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

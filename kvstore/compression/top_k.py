"""Top-k sparsification: the largest values with their indices; all others are zero."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from gangline.kvstore.compression.codec import Codec, check_dtype, checked_number, checked_payload, typed
from gangline.kvstore.compression.registry import register

_MOST = 2**31
_SAMPLES = 2**16


@register("topk")
class TopK(Codec):
    """The ``ceil(ratio * n)`` of n values with the largest magnitudes; ties go to the lower index.

    Method: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.

    Payload: the indices, int32, ascending, then their values in the tensor's dtype. ``ratio`` is taken as the decimal
    number that it prints as: 0.07 of 100 values is 7.

    Args:
        ratio: 0 < ratio <= 1.

    Raises:
        ValueError: if the ratio is out of range; or (`encode`, `decode`) for 2**31 values or more.
        TypeError: if the ratio is not a number.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = checked_number("ratio", ratio)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is {ratio!r}; expected 0 < ratio <= 1")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:  # noqa: D102  inherited
        return self._count(numel) * (4 + dtype.itemsize)

    def encode(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102  inherited
        check_dtype(values)
        flat = values.reshape(-1)
        return self._payload(flat, _largest(flat, self._count(flat.numel())))

    def encode_with_feedback(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # noqa: D102  inherited
        check_dtype(residual)
        count = self._count(residual.numel())
        indices = _largest(residual.add_(gradient), count)
        payload = self._payload(residual, indices)
        residual.index_fill_(0, indices, 0)
        return payload

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:  # noqa: D102  inherited
        payload = checked_payload(self, payload, out)
        border = 4 * self._count(out.numel())
        indices = typed(payload[:border], torch.int32).long()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < out.numel():
            raise ValueError(
                f"a TopK payload holds indices from {int(indices.min())} to {int(indices.max())}; expected 0 to "
                f"{out.numel() - 1}"
            )
        flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        flat.zero_()
        flat[indices] = typed(payload[border:], out.dtype)
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def _count(self, numel: int) -> int:
        if numel >= _MOST:
            raise ValueError(f"TopK cannot encode a tensor of {numel} values; expected fewer than {_MOST}: split it")
        return math.ceil(Fraction(repr(self.ratio)) * numel)

    def _payload(self, flat: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.cat((indices.int().view(torch.uint8), flat[indices].view(torch.uint8)))


def _largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending int64 indices of the ``count`` largest magnitudes; ties to the lower index."""
    magnitude = flat.abs()
    candidates = _candidates(magnitude, count)
    if candidates.numel() == count:
        return candidates
    found = magnitude[candidates]
    least = found.topk(count, sorted=False).values.min()
    chosen = found > least
    tied = (found == least).nonzero().view(-1)
    chosen[tied[: count - int(chosen.sum())]] = True
    return candidates[chosen]


def _candidates(magnitude: torch.Tensor, count: int) -> torch.Tensor:
    """Return ascending indices that include the ``count`` largest magnitudes and usually few more.

    A sample gives a lower bound for the magnitudes, because selecting among all values costs several times as much. If
    the sample is not representative, the result is still correct, only slower.
    """
    numel = magnitude.numel()
    stride = max(1, numel // _SAMPLES)
    sample = magnitude[::stride]
    expected = count / stride
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4  # four standard deviations above the mean
    if stride > 1 and rank < sample.numel():
        candidates = (magnitude >= sample.topk(rank, sorted=False).values.min()).nonzero().view(-1)
        if candidates.numel() >= count:
            return candidates
    return torch.arange(numel, device=magnitude.device)

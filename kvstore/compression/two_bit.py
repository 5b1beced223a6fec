"""Two bits per value: plus the threshold, minus the threshold, or zero."""

from __future__ import annotations

import math

import torch

from gangline.kvstore.compression.codec import Codec, check_dtype, checked_number, checked_payload
from gangline.kvstore.compression.registry import register
from gangline.kvstore.compression.spans import in_spans, piece_numel, pieces

_LOW_BITS = 0x03030303
# Multiplying four codes, one per byte of an int32, by this packs them into the highest byte; the lower bytes never
# carry into it.
_GATHER = 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6


@register("2bit")
class TwoBit(Codec):
    """Values at or above ``threshold`` as +threshold, at or below -threshold as -threshold, others as 0.

    Method: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015, without its sparse
    indices. With error feedback, in the tensor's own dtype and rounding:

        r += g
        if r >= t: send +t, r -= t
        elif r <= -t: send -t, r += t
        else: send 0

    Payload: 16 values in 4 bytes, padded with zeros. Value i is in byte i // 4, at bit 2 * (i % 4) counted from the
    lowest: 0 is 0, 1 is +threshold, 3 is -threshold; 2 is never sent and reads as 0.

    Args:
        threshold: > 0, finite, in the gradient's unit; used in the dtype of the tensor.

    Raises:
        ValueError: if the threshold is not > 0 and finite, here or (`encode`, `decode`) in the tensor's dtype.
        TypeError: if the threshold is not a number.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = checked_number("threshold", threshold)
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold is {threshold!r}; expected a finite number > 0")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:  # noqa: ARG002, D102  inherited
        return -(-numel // 16) * 4

    def encode(self, values: torch.Tensor) -> torch.Tensor:  # noqa: D102  inherited
        return self._encode(values.reshape(-1), None)

    def encode_with_feedback(self, gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # noqa: D102  inherited
        return self._encode(residual, gradient)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:  # noqa: D102  inherited
        payload = checked_payload(self, payload, out)
        flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        table = self._table(out)
        fours, rest = divmod(flat.numel(), 4)
        rows = flat[: fours * 4].view(-1, 4)

        def look_up(start: int, stop: int) -> None:
            scratch = torch.empty(piece_numel(stop - start, out.device) // 4, dtype=torch.int32, device=out.device)
            for piece in pieces(start, stop, out.device):
                part = slice(piece.start // 4, piece.stop // 4)
                index = scratch[: part.stop - part.start].copy_(payload[part])
                torch.index_select(table, 0, index, out=rows[part])

        in_spans(look_up, fours * 4, out.device)
        if rest:
            flat[fours * 4 :] = table[payload[fours].long(), :rest]
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def _encode(self, values: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return the payload of ``values``, or of values + gradient; then ``values`` becomes the part not sent."""
        check_dtype(values)
        threshold, below = self._bounds(values.dtype)
        numel, device = values.numel(), values.device
        payload = torch.empty(self.payload_bytes(numel, values.dtype), dtype=torch.uint8, device=device)
        packed = payload.view(torch.int8)

        def pack(start: int, stop: int) -> None:
            signs = torch.empty(piece_numel(stop - start, device), dtype=values.dtype, device=device)
            codes = torch.zeros(-(-signs.numel() // 16) * 16, dtype=torch.int8, device=device)
            words = codes.view(torch.int32)
            for piece in pieces(start, stop, device):
                part, size = values[piece], piece.stop - piece.start
                if gradient is not None:
                    part.add_(gradient[piece])
                # hardshrink keeps values beyond `below`, that is, at or beyond the threshold; torch's comparisons
                # cost four times as much
                sign = torch.hardshrink(part, below, out=signs[:size]).sign_()
                if gradient is not None:
                    part.sub_(sign, alpha=threshold)
                codes[:size].copy_(sign)
                if size < signs.numel():
                    codes[size:].zero_()
                words.bitwise_and_(_LOW_BITS).mul_(_GATHER).bitwise_right_shift_(24)
                target = packed[piece.start // 4 : -(-piece.stop // 16) * 4]
                target.copy_(words[: target.numel()])

        in_spans(pack, numel, device)
        return payload

    def _bounds(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the threshold in ``dtype``, and the next smaller number of the dtype."""
        bits = torch.tensor([self.threshold], dtype=dtype, device="cpu").view(
            getattr(torch, f"int{dtype.itemsize * 8}")
        )
        threshold, below = torch.cat((bits, bits - 1)).view(dtype).tolist()
        if not 0 < threshold < math.inf:
            raise ValueError(
                f"threshold {self.threshold!r} is {threshold} in {dtype}; expected one that stays finite and > 0 there"
            )
        return threshold, below

    def _table(self, out: torch.Tensor) -> torch.Tensor:
        """Return the four values of each byte, (256, 4)."""
        threshold, _ = self._bounds(out.dtype)
        of_code = torch.tensor([0.0, threshold, 0.0, -threshold], dtype=out.dtype, device=out.device)
        byte = torch.arange(256, device=out.device).unsqueeze(1)
        return of_code[byte >> torch.arange(0, 8, 2, device=out.device) & 3]
